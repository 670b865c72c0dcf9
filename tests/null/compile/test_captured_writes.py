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


def _hidden(m):
    # A name that is made while the forward runs is no word that a search would find.
    torch.clamp(m.inner.weight.detach(), -0.1, 0.1, out=getattr(m.inner.weight, "da" + "ta"))


def _hidden_assignment(m):
    setattr(m.inner.weight, "da" + "ta", torch.zeros_like(m.inner.weight))


def _shared(m):
    m.inner.weight.detach().view(torch.int16).numpy()[:] = 0


@pytest.mark.parametrize("write", [_hidden, _hidden_assignment, _shared])
def test_eager_writes_that_nothing_announces_and_nothing_counts_are_found_by_values(write):
    model = zero.shard(writing(write), device="cpu", param_dtype="bf16")
    with pytest.raises(ZeroError, match=r"writes to parameter 'inner\.weight' in place"):
        model(torch.randn(4, 6))


def test_of_one_rank_another_tensor_in_place_of_the_weight_is_found():
    model = zero.shard(writing(_hidden_assignment), device="cpu")
    with pytest.raises(ZeroError, match=r"writes to parameter 'inner\.weight' in place"):
        model(torch.randn(4, 6))


def _swapped(m):
    weight = m.inner.weight
    old = weight.data
    weight.data = torch.sign(old)
    m.binary = torch.equal(m.inner.weight.abs(), torch.ones(5, 6, dtype=old.dtype))
    weight.data = old


def _swapped_unheard(m):
    weight = m.inner.weight
    old = weight.detach()
    setattr(weight, "da" + "ta", torch.sign(old))
    m.binary = torch.equal(m.inner.weight.abs(), torch.ones(5, 6, dtype=old.dtype))
    setattr(weight, "da" + "ta", old)


@pytest.mark.parametrize("write", [_swapped, _swapped_unheard])
def test_values_that_are_put_back_leave_the_shard_with_all_its_bits(write):
    model = zero.shard(writing(write), device="cpu", param_dtype="bf16")
    before = model.inner.weight.to_local().clone()
    model(torch.randn(4, 6)).sum().backward()
    assert model.binary
    assert torch.equal(model.inner.weight.to_local(), before)
    assert model.inner.weight.grad is not None


class WritesToWhatItKeeps(nn.Module):
    def __init__(self, by_data):
        super().__init__()
        self.weight, self.by_data = nn.Parameter(torch.full((4, 4), 0.5)), by_data

    def forward(self, x):
        weight = self.weight
        with torch.no_grad():
            (weight.data if self.by_data else weight).mul_(0.5)
        return x @ weight @ weight


@pytest.mark.parametrize("by_data", [False, True])
def test_a_weight_that_was_read_before_it_is_written_to(by_data):
    plain, x = WritesToWhatItKeeps(by_data), torch.ones(2, 4)
    model = zero.shard(copy.deepcopy(plain), device="cpu", param_dtype="bf16")
    for m in (model, plain):
        m(x).sum().backward()
    assert torch.equal(model.weight.grad.to_local(), plain.weight.grad)
    assert torch.equal(model.weight.to_local(), plain.weight)


def _follows(m):
    with torch.no_grad():
        for follower, leader in zip(m.last.parameters(), m.first.parameters(), strict=True):
            follower.data = follower.data * 0.9 + leader.data * 0.1


class Momentum(nn.Module):
    """A layer that follows another one, as encoders of momentum contrast do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.requires_grad_(False)

    def forward(self, x):
        _follows(self)
        with torch.no_grad():
            target = self.last(x)
        return (self.first(x) - target).square().mean()


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_layer_that_follows_another_in_the_forward(how):
    torch.manual_seed(0)
    plain, x = Momentum(), torch.ones(2, 6)
    model = zero.shard(copy.deepcopy(plain), device="cpu", compute="aten")
    call = use(model, how)
    for _ in range(2):
        wanted, found = plain(x), call(x)
        for loss in (wanted, found):
            loss.backward()
        assert torch.allclose(found, wanted)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.to_local(), q)
