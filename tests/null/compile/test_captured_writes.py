"""A forward that writes to its weights, element by element: done to the shards, with the values of plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from null.small import use
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ZeroError


def _data_clamp(m):
    m.inner.weight.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def _method(m):
    m.inner.weight.clamp_(-0.1, 0.1)
    m.inner.bias.mul_(0.9).add_(0.01)


@torch.no_grad()
def _copied(m):
    m.inner.weight.copy_(torch.where(m.inner.weight > 0.05, m.inner.weight * 0.5, m.inner.weight))


def _masked(m):
    m.inner.weight.data *= m.mask


def _broadcast(m):
    m.inner.weight.data.mul_(m.rows)
    m.inner.weight.data.add_(m.columns, alpha=0.1)


@torch.no_grad()
def _with_itself(m):
    weight = m.inner.weight
    weight.add_(weight, alpha=-0.1)


WRITES = {f.__name__: f for f in (_data_clamp, _method, _copied, _masked, _broadcast, _with_itself)}


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("mask", (torch.arange(30).view(5, 6) % 3 > 0).float())
        self.register_buffer("rows", torch.linspace(0.5, 1, 5).view(5, 1))
        self.register_buffer("columns", torch.linspace(-0.1, 0.1, 6))

    def forward(self, x):
        self.write()
        return self.last(torch.tanh(self.inner(x)))


def writing(write):
    """A model whose forward writes so; the code stands in its class, as people write it."""
    return type("Writing", (Writes,), {"write": write})()


def differences(write, how, stage, rank=0, world=1, **fields):
    """What is not that of plain data-parallel PyTorch in three steps: names of losses, gradients and parameters."""
    torch.manual_seed(0)
    plain = writing(write)
    model = zero.shard(copy.deepcopy(plain), stage=stage, device="cpu", compute="aten", **fields)
    call = use(model, how)
    ours = torch.optim.SGD(model.parameters(), 0.5)
    theirs = torch.optim.SGD(plain.parameters(), 0.5)
    out = []

    def close(what, a, b):
        if not torch.allclose(a, b, atol=1e-6):
            out.append(what)

    for step in range(3):
        batches = [
            torch.randn(4, 6, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(world)
        ]
        loss = call(batches[rank]).square().mean()
        loss.backward()
        for r, batch in enumerate(batches):
            # Ranks of plain data parallelism write to their replicas once a step each; here one replica plays all.
            before = copy.deepcopy(plain.state_dict())
            wanted = plain(batch).square().mean()
            (wanted / world).backward()
            if r == rank:
                close(f"loss {step}", loss, wanted)
            if r + 1 < world:
                plain.load_state_dict(before)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(f"gradient of {name} {step}", p.grad.full_tensor(), q.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(f"{name} {step}", p.full_tensor(), q)
    return out


QUICK = {("eager", w) for w in WRITES} | {("compiled", "_data_clamp")}


@pytest.mark.parametrize(
    ("how", "write"),
    [
        pytest.param(how, w, marks=() if (how, w) in QUICK else pytest.mark.slow)
        for how in ("eager", "compiled")
        for w in WRITES
    ],
)
def test_elementwise_writes_have_the_values_of_plain(how, write):
    assert differences(WRITES[write], how, 3) == []


@torch.no_grad()
def _after_a_use(m):
    m.columns.add_(m.inner.weight.sum(0), alpha=1e-3)
    m.inner.weight.mul_(0.9)


def _renorm(m):
    m.inner.weight.data.renorm_(2, 0, 0.1)


def _assigned(m):
    m.inner.weight.data = m.inner.weight.data.clamp(-0.1, 0.1)


def _put(weight):
    weight.data = weight.data.clamp(-0.1, 0.1)


def _assigned_by_a_function(m):
    _put(m.inner.weight)


def _exchanged(m):
    old = m.inner.weight.data
    m.inner.weight.data = old.flip(0).contiguous()
    m.columns.add_(old.sum())


@torch.no_grad()
def _averaged(m):
    torch._foreach_lerp_([m.inner.weight], [m.inner.weight + 1], 0.1)


@torch.no_grad()
def _all_averaged(m):
    for p, q in zip(m.inner.parameters(), list(m.last.parameters()), strict=True):
        p.mul_(0.9).add_(q.sum(), alpha=0.1)


@pytest.mark.parametrize(
    "write",
    [
        _renorm,
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in (_after_a_use, _assigned, _assigned_by_a_function, _exchanged, _averaged, _all_averaged)
        ),
    ],
)
def test_writes_that_a_graph_cannot_do_before_it_runs(write):
    model = zero.shard(writing(write), device="cpu", compute="aten")
    with pytest.raises(ZeroError, match=r"writes to parameter 'inner\.weight' in place"):
        use(model, "compiled")(torch.randn(4, 6))


def _frozen(m):
    m.inner.weight.requires_grad_(False)


def _trained_as_before(m):
    m.inner.weight.requires_grad_(True)


def test_a_forward_that_freezes_a_weight_is_refused():
    model = zero.shard(writing(_frozen), device="cpu", compute="aten")
    with pytest.raises(ZeroError, match=r"sets requires_grad of parameter 'inner\.weight'"):
        use(model, "compiled")(torch.randn(4, 6))
    assert differences(_trained_as_before, "compiled", 3) == []


def test_eager_code_that_writes_by_an_operator_that_is_not_elementwise_is_seen_through_data():
    model = zero.shard(writing(_renorm), device="cpu", param_dtype="bf16")  # so that the weight is a copy
    with pytest.raises(ZeroError, match=r"writes to parameter 'inner\.weight' in place"):
        model(torch.randn(4, 6))


def test_eager_code_may_put_another_value_in_place_by_data():
    assert differences(_assigned, "eager", 3) == []
