"""MLPs tile by tile: the numbers of plain PyTorch, what never exists, and what is left whole."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from harness import SimulatedModel
from marks import thorough
from models import FAMILIES, tokens
from null.graphs import Build, aten, lower, lower_joint
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_compiler.compile.frame_state import FrameState
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.ir import dump, ops
from zero_compiler.tools.planning import report

WIDTH, TOKENS = 16, 96
ROW = 4 * WIDTH * 4  # bytes of what an MLP makes of a token


def mlp_graph(**kw) -> Build:
    """Joint graph of an MLP with a bias, and all of its gradients."""
    b = Build(w1=(8, 4), b1=(8,), w2=(4, 8), **kw)
    x, dy = b.input("x", 40, 4), b.input("tangents_1", 40, 4)
    w1, w2 = b.weight("w1"), b.weight("w2")
    h = b.op(aten.addmm.default, b.weight("b1"), x, b.op(aten.t.default, w1))
    a = b.op(aten.gelu.default, h)
    y = b.op(aten.mm.default, a, b.op(aten.t.default, w2))
    dw2 = b.op(aten.mm.default, b.op(aten.t.default, dy), a)
    dh = b.op(aten.gelu_backward.default, b.op(aten.mm.default, dy, w2), h)
    db1 = b.op(aten.sum.dim_IntList, dh, [0])
    dw1 = b.op(aten.mm.default, b.op(aten.t.default, dh), x)
    dx = b.op(aten.mm.default, dh, w1)
    b.done(y, b.reduced("w2", dw2), b.reduced("b1", db1), b.reduced("w1", dw1), dx)
    return b


class Goldens(TestCase):
    def test_tile_mlp(self):
        b = mlp_graph()
        lower_joint(b, "tile-mlp", tile_mlp=True)
        text = re.sub(r"\s+[+-]?\d*\s+live \d+$", "", dump.text(b.graph), flags=re.MULTILINE)
        self.assertExpectedInline(
            text,
            """\
%w1.shard = input                                                        f32[4,4]
%b1.shard = input                                                        f32[4]
%w2.shard = input                                                        f32[2,8]
%x = input                                                               f32[40,4]
%tangents_1 = input                                                      f32[40,4]
%w1_full = zero.unshard %w1.shard [w1]                                   f32[8,4]
%w2_full = zero.unshard %w2.shard [w2]                                   f32[4,8]
%b1_full = zero.unshard %b1.shard [b1]                                   f32[8]
%t_default = aten.t %w1_full                                             f32[4,8]
%t_default_1 = aten.t %w2_full                                           f32[8,4]
%tiled_default = zero.tiled [%b1_full, %x, %t_default, %t_default_1], 'mlp0.0' (f32[40,4])
%getitem = getitem %tiled_default, 0                                     f32[40,4]
%t_default_2 = aten.t %tangents_1                                        f32[4,40]
%tiled_default_1 = zero.tiled [%b1_full, %x, %t_default, %t_default_2, %tangents_1, %w2_full, %w1_full], 'mlp0.1' (f32[40,4], f32[4,8], f32[8], f32[8,4])
%getitem_1 = getitem %tiled_default_1, 0                                 f32[40,4]
%getitem_2 = getitem %tiled_default_1, 1                                 f32[4,8]
%getitem_3 = getitem %tiled_default_1, 2                                 f32[8]
%getitem_4 = getitem %tiled_default_1, 3                                 f32[8,4]
%reduce_grad_default = zero.reduce_grad %getitem_2 [w2]                  f32[2,8]
%reduce_grad_default_1 = zero.reduce_grad %getitem_3 [b1]                f32[4]
%reduce_grad_default_2 = zero.reduce_grad %getitem_4 [w1]                f32[4,4]
return %getitem, %reduce_grad_default, %reduce_grad_default_1, %reduce_grad_default_2, %getitem_1
""",
        )


@pytest.mark.parametrize("mlp_bytes", [1, 20 * 64, None])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_passes_keep_the_numbers(world, mlp_bytes):
    b = mlp_graph(world=world)
    want = b.by_markers(b.graph)
    lower_joint(b, tile_mlp=True, mlp_bytes=mlp_bytes)
    assert len(b.graph.find_nodes(op="call_function", target=ops.tiled)) == 2
    got = b.by_reference(lower(b, "forward"), "forward")
    # Sums over 40 tokens in another order: 40 roundings, of 2**-24 each, of partial sums below 40.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=40 * 40 * 2**-24)


# Models under a budget ------------------------------------------------------------------------------------------

MLPS = {}


def mlp(fn):
    MLPS[fn.__name__.replace("_", "-")] = fn
    return fn


@mlp
def gelu(m, x):
    return m.down(F.gelu(m.up(x)))


@mlp
def swiglu(m, x):
    return m.down(F.silu(m.gate(x)) * m.up(x))


@mlp
def squared_relu(m, x):
    return m.down(F.relu(m.up(x)).square())


@mlp
def in_bf16(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.down(F.gelu(m.up(x))).float()


@mlp
def scaled(m, x):
    return m.down(torch.tanh(m.up(x)) * m.scale)


@mlp
def masked_and_normed(m, x):
    """A number a token goes in, and one is made on the way."""
    a = F.gelu(m.up(x)) * (x[..., :1] > 0)
    return m.down(a * torch.rsqrt(a.square().sum(-1, keepdim=True) + 1))


class Block(nn.Module):
    def __init__(self, of, times: int = 4) -> None:
        super().__init__()
        self.of = MLPS[of] if isinstance(of, str) else of
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, times * WIDTH, bias=False), nn.Linear(WIDTH, times * WIDTH)
        self.down = nn.Linear(times * WIDTH, WIDTH)
        self.narrow = nn.Parameter(torch.randn(WIDTH // 2, times * WIDTH // 2))
        self.scale = nn.Parameter(torch.rand(times * WIDTH))

    def forward(self, x):
        return x + self.of(self, self.norm(x))


class Net(nn.Module):
    def __init__(self, of="gelu", layers: int = 2, regions: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.regions = regions
        self.h = nn.ModuleList(Block(of) for _ in range(layers))

    def forward(self, x):
        for k, block in enumerate(self.h):
            x = checkpoint(block, x, use_reentrant=False) if k in self.regions else block(x)
        return x.square().mean()


def x(rank: int = 0, tokens: int = TOKENS) -> tuple[torch.Tensor]:
    return (torch.randn(2, tokens // 2, WIDTH, generator=torch.Generator().manual_seed(rank)),)


def least(model: nn.Module, tokens: int = TOKENS) -> int:
    """The smallest budget for activations that does; it takes tiles."""
    torch._dynamo.reset()
    with pytest.raises(MemoryBudgetError) as caught:
        report(model, x(0, tokens), 2, activation_budget_bytes=1)
    return caught.value.least_bytes


def notes(model) -> list[str]:
    return [n for f in model.frames for p in f.programs.values() for n in p.notes]


def tiled(model) -> list[str]:
    return [n for n in notes(model) if "tiled: intermediate of" in n]


def trained(of="gelu", world: int = 2, tol: float = 1e-5, loss=lambda out: out, **fields) -> SimulatedModel:
    net = Net(of)
    if "activation_budget_bytes" not in fields:
        fields["activation_budget_bytes"] = least(net)
    model = SimulatedModel(net, world, **{"stage": 3, **fields})
    model.check([x(rank) for rank in range(world)], loss, rtol=tol, atol=tol)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("of", MLPS)
def test_every_mlp_is_tiled_and_equal_to_plain(of):
    model = trained(of, tol=2e-2 if of == "in-bf16" else 1e-5)
    assert len(tiled(model)) == 4  # two layers, forward and backward
    assert all("6 tiles of 16 rows" in n for n in tiled(model))
    assert not [n for n in notes(model) if "left whole" in n]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 2)])
def test_on_one_rank_and_at_other_stages(world, stage):
    assert len(tiled(trained(world=world, stage=stage))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("of", ["swiglu", *thorough("in-bf16")])
def test_compiled_segments_give_the_same(of):
    allowed, tol = int(1.2 * least(Net(of))), 2e-2 if of == "in-bf16" else 1e-5
    model = trained(of, tol=tol, compute="inductor", activation_budget_bytes=allowed)
    assert len(tiled(model)) == 4


@pytest.mark.slow
def test_weights_are_gathered_once_a_phase_and_gradients_reduced_once():
    programs = trained().programs
    for program in programs.values():
        names = [n for g in program.gathers for n in g.names]
        assert len(names) == len(set(names))
        assert {"h.0.up.weight", "h.0.up.bias", "h.0.down.weight"} <= set(names)
    names = [n for r in programs["backward"].reduces for n in r.names]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_tiles_have_equal_segments():
    few, many = (trained_on(count) for count in (TOKENS, 2 * TOKENS))
    assert all(b <= a for a, b in zip(few, many, strict=True))


def trained_on(tokens: int) -> list[int]:
    net = Net()
    model = SimulatedModel(net, 1, stage=3, activation_budget_bytes=least(net, tokens))
    model.check([x(0, tokens)], lambda out: out)
    assert f"{tokens // 16} tiles of 16 rows" in tiled(model)[0]
    return [len(p.segments) for p in model.programs.values()]


@pytest.mark.slow
def test_any_length_once_sizes_are_symbols():
    net = Net()
    model = SimulatedModel(net, 2, stage=3, dynamic=True, activation_budget_bytes=least(net))
    for count in (TOKENS, 62, 130):
        model.check([x(0, count), x(1, count)], lambda out: out)
    assert tiled(model)
    assert len(model.frames) <= 2


@pytest.mark.slow
def test_regions_of_the_user_stay_regions():
    net = Net(layers=3, regions=(0, 1))
    model = SimulatedModel(net, 2, stage=3, activation_budget_bytes=least(net))
    model.check([x(0), x(1)], lambda out: out)
    assert len([n for n in tiled(model) if "made again" in n]) == 3
    assert {r.module for r in model.frames[-1].remade if r.op == "aten.native_layer_norm"} >= {
        "h.0.norm",
        "h.1.norm",
    }


@pytest.mark.slow
def test_without_a_budget_that_asks_for_it_nothing_is_tiled():
    assert not tiled(trained(activation_budget_bytes=None))
    assert not tiled(trained(activation_budget_bytes=1 << 30))
    assert not tiled(trained(memory_budget_bytes=1 << 30, activation_budget_bytes=None))


# Memory ---------------------------------------------------------------------------------------------------------


def planned(tokens: int, **fields):
    torch._dynamo.reset()
    return report(Net(layers=1), x(0, tokens), 2, **fields)


@pytest.mark.slow
def test_the_peak_falls_by_the_intermediate():
    """With all that can be made again made again, backward of a layer holds h, a and their gradients of n tokens, or
    three of the four at least: 3 n rows. In tiles of r rows it holds 4 r rows."""
    n = 1024
    free = planned(n)
    budgets = [free.memory.peak * part // 16 for part in range(15, 1, -3)]
    whole, small = [], []
    for budget in budgets:
        try:
            told = planned(n, memory_budget_bytes=budget)
        except MemoryBudgetError:
            break
        assert told.memory.peak <= budget
        (small if [n for p in told.frames[0].programs.values() for n in p.notes] else whole).append(told)
    assert whole
    assert small
    # What tiles leave: input, output and their gradients, a quarter of the intermediate each.
    assert small[-1].memory.programs <= 6 * n * ROW // 4 + 4 * 64 * ROW
    assert min(t.memory.programs for t in whole) - small[-1].memory.programs >= n * ROW


@pytest.mark.slow
def test_which_collectives_run_does_not_depend_on_sizes():
    """Once MLPs are tiled, rank 0 having said so, they are on every rank, whatever its batch."""
    sequences = set()
    for count in (TOKENS, 4 * TOKENS):
        net = Net()
        model = SimulatedModel(net, 2, stage=3, activation_budget_bytes=least(net, count))
        model.check([x(0, count), x(1, count)], lambda out: out)
        sequences.add("\n".join(p.collectives() for p in model.programs.values()))
    assert len(sequences) == 1


@pytest.mark.slow
def test_evaluation_under_a_budget_is_tiled_too():
    torch._dynamo.reset()
    with torch.no_grad():
        free = report(Net(), x(), 2)
        told = report(Net(), x(), 2, memory_budget_bytes=free.memory.peak - TOKENS * ROW // 2)
    assert "tiled: intermediate of h.0.up.weight:" in str(told)
    assert told.memory.peak <= free.memory.peak - TOKENS * ROW // 2


# What is left whole ---------------------------------------------------------------------------------------------


def dropout_inside(m, x):
    return m.down(F.dropout(F.gelu(m.up(x)), 0.3, True))


def read_twice(m, x):
    a = F.gelu(m.up(x))
    return m.down(a) + a.mean(-1, keepdim=True)


def mixes_tokens(m, x):
    return m.down(F.gelu(m.up(x)) + m.up(x).cumsum(1))


def gate_and_up_as_one(m, x):
    gate, up = m.up(x).chunk(2, -1)
    return F.linear(F.silu(gate) * up, m.narrow).repeat(1, 1, 2)


def experts(m, x):
    up, down = m.up.weight.view(2, -1, WIDTH), m.down.weight.view(WIDTH, 2, -1).transpose(0, 1)
    return torch.bmm(F.gelu(torch.bmm(x, up.transpose(1, 2))), down.transpose(1, 2))


LEFT = {
    dropout_inside: "aten.native_dropout.default draws random numbers, which a tile that is made again would draw anew",
    read_twice: "nothing is known of how aten.mean.default treats tokens",
    mixes_tokens: "%cumsum, as large as it, is made elsewhere",
    gate_and_up_as_one: "nothing is known of how aten.split.Tensor treats tokens",
    experts: "aten.bmm.default (of experts, perhaps) is no product of two matrices",
}


@pytest.mark.slow
@pytest.mark.parametrize("of", LEFT, ids=lambda f: f.__name__)
def test_what_is_left_whole_is_right_and_named(of):
    """Beside one that is tiled, without which a budget would not be asked for in vain."""
    net = Net("gelu")
    net.h[1] = Block(of, 2 if of is gate_and_up_as_one else 3)
    model = SimulatedModel(net, 2, stage=3, activation_budget_bytes=least(net))
    model.check([x(0), x(1)], lambda out: out) if of is not dropout_inside else model.step(
        [x(0), x(1)], lambda out: out
    )
    assert [n for n in tiled(model) if "h.0.up" in n]
    whole = {n for n in notes(model) if "left whole" in n}
    (why,) = whole
    assert "intermediate of h.1.up.weight, because" in why
    assert LEFT[of] in why


@pytest.mark.slow
def test_a_random_mask_that_inductor_makes_is_as_large():
    net = Net(dropout_inside)
    net.h[1] = Block("gelu", 12)
    model = SimulatedModel(net, 2, stage=3, compute="inductor", activation_budget_bytes=110_000)
    model.step([x(0), x(1)], lambda out: out)
    assert [n for n in tiled(model) if "h.1.up" in n]
    (why,) = {n for n in notes(model) if "left whole" in n}
    assert re.search(r"intermediate of h.0.up.weight, because %\w+, as large as it, is made elsewhere", why)


class LossAlone(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_models_of_transformers(name, monkeypatch):
    """Small ones hold most elsewhere, so no budget asks for it: as if one had."""
    options = FrameState.options
    monkeypatch.setattr(
        FrameState,
        "options",
        lambda self, phase: replace(options(self, phase), tile_mlp=True, mlp_bytes=1),
    )
    model = SimulatedModel(LossAlone(FAMILIES[name].model()), 2, stage=3)
    data = [tokens(torch.Generator().manual_seed(rank), 0, 2, 24) for rank in range(2)]
    model.check([(d["input_ids"], d["labels"]) for d in data], lambda out: out, rtol=1e-4, atol=1e-5)
    if name == "mixtral":
        assert not tiled(model)
        whole = {n for n in notes(model) if "left whole" in n and "experts" in n}
        assert {re.search(r"intermediate of (\S+),", n)[1] for n in whole} == {
            "model.model.layers.0.mlp.experts.gate_up_proj"
        }
    else:
        assert len([n for n in tiled(model) if "made again" in n]) == {"gpt2": 2, "llama": 1}[name]
        assert not [n for n in notes(model) if "left whole" in n]
