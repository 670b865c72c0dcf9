"""Past Dynamo's ``recompile_limit``: the same numbers, the same memory budget, one graph more and one sentence."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from null.small import ATEN
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.params.modules import sharded_models_of

LIMIT, STEPS = 2, 4


@pytest.fixture(autouse=True)
def soon():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.first, self.second, self.breaks = nn.Linear(8, 16), nn.Linear(16, 4), breaks

    def forward(self, x, word=""):
        h = torch.relu(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(h) * (len(word) + 1 if word != "three" else 7)


def behind_a_break(net, x):
    h = torch.relu(net.first(x))
    torch._dynamo.graph_break()
    return net.second(h)


class Calls(Net):
    """Its graph breaks in a function that is no method."""

    def forward(self, x):
        return behind_a_break(self, x)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(model):
    return torch.compile(model, backend="zero", dynamic=False)


def method(model):
    model.compile(backend="zero", dynamic=False)
    return model


def function(model):
    return torch.compile(lambda *given: model(*given) * 1.0, backend="zero", dynamic=False)


def forward(model):
    model.forward = torch.compile(model.forward, backend="zero", dynamic=False)
    return model


def blocks(model):
    for block in model.blocks:
        block.compile(backend="zero", dynamic=False)
    return model


WAYS = {
    "whole": (Net, whole, 1),
    "torch's own class": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), whole, 1),
    "graph break": (lambda: Net(breaks=True), whole, 2),
    "module.compile": (Net, method, 1),
    "module.compile, graph break": (lambda: Net(breaks=True), method, 2),
    "graph break in a function": (Calls, whole, 2),
    "module.compile, graph break in a function": (Calls, method, 2),
    "function": (Net, function, 1),
    "forward": (Net, forward, 1),
    "forward of torch's own class": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), forward, 1),
    "blocks": (Blocks, blocks, 2),
}


def made(name="whole", **fields):
    make, compiled, frames = WAYS[name]
    torch.manual_seed(0)
    plain = make()
    model = zero.shard(copy.deepcopy(plain), device="cpu", **ATEN, **fields)
    return plain, model, compiled(model), frames


def compare(call, plain, model, *given):
    for m in (model, plain):
        m.zero_grad()
    out, want = call(*given), plain(*given)
    torch.testing.assert_close(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def batch(size):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(size))


def frames_of(model):
    return len(sharded_models_of(model)[0].frames)


def told(caplog):
    return [r.message for r in caplog.records if r.name == "zero_compiler" and "recompile_limit" in r.message]


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_one_graph_serves_all_further_sizes(name, caplog):
    caplog.set_level(logging.WARNING)
    plain, model, call, frames = made(name)
    for step in range(STEPS):
        compare(call, plain, model, batch(5 + step))
    assert frames_of(model) == (LIMIT + 1) * frames
    (said,) = told(caplog)
    assert f"recompile_limit ({LIMIT}) was met" in said
    assert f"[{5 + LIMIT}, 8]" in said
    assert "would run eagerly" in said
    assert "dynamic=True" in said
    # What was compiled before the limit is as good as it was.
    compare(call, plain, model, batch(5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "graph break", "blocks"])
def test_a_memory_budget_refuses_as_before(name):
    plain, model, call, _ = made(name, memory_budget_bytes=60_000)
    for step in range(STEPS):
        compare(call, plain, model, batch(5 + step))
    with pytest.raises(MemoryBudgetError, match="20,000"):
        call(batch(20_000))
    compare(call, plain, model, batch(6))


WORDS = ["", "a", "bb", "three", "dddd", "eeeee", "ffffff"]


@pytest.mark.slow
def test_what_is_not_compiled_at_all_runs_eagerly_and_says_so_once(caplog):
    caplog.set_level(logging.WARNING)
    plain, model, call, _ = made()
    for word in WORDS:
        compare(call, plain, model, batch(5), word)
    assert frames_of(model) == 3 * LIMIT
    first, second = told(caplog)
    assert "would run eagerly" in first
    assert "a call of Net" in second
    assert "runs eagerly, since" in second


@pytest.mark.slow
def test_and_is_refused_under_a_memory_budget():
    plain, model, call, _ = made(memory_budget_bytes=60_000)
    for word in WORDS[: 3 * LIMIT]:
        compare(call, plain, model, batch(5), word)
    for _ in range(2):
        with pytest.raises(
            MemoryBudgetError, match=r"runs eagerly, since torch._dynamo.config.recompile_limit \(2\)"
        ):
            call(batch(5), WORDS[-1])
    compare(call, plain, model, batch(5), WORDS[0])


@pytest.mark.slow
def test_a_stance_that_forbids_to_compile_is_named(caplog):
    caplog.set_level(logging.WARNING)
    plain, model, call, _ = made()
    compare(call, plain, model, batch(5))
    with torch.compiler.set_stance("eager_on_recompile"):
        for size in (6, 7):
            compare(call, plain, model, batch(size))
    assert frames_of(model) == 1
    assert any("set_stance('eager_on_recompile')" in r.message for r in caplog.records)


@pytest.mark.slow
def test_eager_code_that_reads_weights_beside_a_budget_is_told_of_once(caplog):
    caplog.set_level(logging.WARNING)
    plain, model, call, _ = made(memory_budget_bytes=60_000)
    with torch._dynamo.config.patch(disable=True):  # as where Dynamo skips a frame
        for size in (5, 6):
            compare(call, plain, model, batch(size))
    (said,) = [r.message for r in caplog.records if "memory_budget_bytes" in r.message]
    assert "weight first.weight is read by code that runs eagerly" in said
