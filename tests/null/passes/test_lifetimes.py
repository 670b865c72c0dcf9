"""Lifetimes of storages: views, aliases, mutations, random numbers. Whole models on simulated ranks.

Arenas of the reference executor hold NaN wherever a weight was released, so a late read fails the numbers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import SimulatedModel
from marks import slow, thorough
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.config import Config
from zero_compiler.params.shard import shard_over
from zero_compiler.tools.planning import planned_group

# Inductor compiles C++: the tests that need it are left out of the quick tier.
COMPUTE = ["aten", *slow("inductor")]
ATEN = ["aten", *thorough("inductor")]


def batches(world: int, *shapes: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    gen = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(s, generator=gen) for s in shapes) for _ in range(world)]


def total(out) -> torch.Tensor:
    leaves = out if isinstance(out, tuple) else (out,)
    return sum(o.square().sum() for o in leaves)


def simulated(model: nn.Module, world: int = 2, **kw) -> SimulatedModel:
    torch.manual_seed(5)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return SimulatedModel(model, world, **kw)


LEAVES = "a view of a gathered weight leaves the program: copied"


class Returns(nn.Module):
    """Returns its weight, or a view of it, beside a use."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        w = self.first.weight
        y = self.last(torch.relu(self.first(x)))
        view = {
            "itself": lambda: w,
            "transposed": lambda: w.t(),
            "rows": lambda: w[:3],
            "reshaped": lambda: w.view(-1),
            "no-op cast": lambda: w.to(torch.float32),
            "detached": lambda: w.detach(),
            "view of a view": lambda: w.t()[1:3].unsqueeze(0),
            "a copy": lambda: w * 2,
        }[self.what]()
        return y, view


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["itself", "rows", "no-op cast", *slow("transposed", "reshaped", "detached", "view of a view")]
)
def test_a_view_that_leaves_the_program(what):
    model = simulated(Returns(what), world=2 if what != "rows" else 4)
    xs = batches(model.world, (3, 4))
    model.check(xs, total)
    assert any(LEAVES in line for line in model.programs["forward"].notes)
    if what in ("itself", "rows"):
        model.check(xs)  # without gradients: the inference graph
        assert any(LEAVES in line for line in model.programs["inference"].notes)


@pytest.mark.parametrize(("what", "said"), [("rows", 1), ("a copy", 0)])
def test_the_report_names_a_view_that_leaves(what, said):
    model = shard_over(Returns(what), planned_group(2), Config(compute="aten"))
    (x,) = batches(1, (3, 4))
    lines = str(zero.inspect(model, x)).splitlines()
    assert sum(line.startswith("note: ") and line.endswith(LEAVES) for line in lines) == said


@pytest.mark.parametrize("what", ["rows", *slow("itself", "transposed", "no-op cast", "detached")])
def test_a_view_that_leaves_on_one_rank(what):
    simulated(Returns(what), world=1).check(batches(1, (3, 4)), total)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rows", *thorough("itself", "no-op cast")])
def test_a_view_that_leaves_a_compiled_segment(what):
    model = simulated(Returns(what), compute="inductor")
    xs = batches(2, (3, 4))
    got = model.check(xs, total, rtol=1e-4, atol=1e-5)
    # Later steps write to the arena again; what was returned before must not change.
    before = got[0][1].clone()
    model.check(batches(2, (3, 4)), total, rtol=1e-4, atol=1e-5)
    assert torch.equal(got[0][1], before)


class Crosses(nn.Module):
    """A view of a weight is made early and read late, with other units' waits in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        view = self.first.weight.t()[:, :2]
        cast = self.first.weight.to(torch.float64)
        y = self.first(x)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return y @ view, (y.double() @ cast).float()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_view_that_crosses_segments(stage):
    model = simulated(Crosses(), stage=stage)
    model.check(batches(2, (3, 4)), total)
    for program in model.programs.values():
        assert len(program.gathers) >= 3


class Tied(nn.Module):
    """One weight as embedding at the start and as head at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        y = self.embed((x.abs() * 10).long() % 11)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return self.head(y)


@pytest.mark.parametrize(("world", "stage"), [(2, 3), *slow((4, 3), (3, 2), (2, 0))])
def test_a_tied_weight_used_at_both_ends(world, stage):
    model = simulated(Tied(), world, stage=stage)
    model.check(batches(world, (2, 3)), total)
    names = [n for r in model.programs["backward"].reduces for n in r.names]
    assert sorted(names) == sorted(set(names))
    assert names.count("embed.weight") == 1


class Buffered(nn.Module):
    """Reads an old value of a buffer after the line that updates it, as a batch norm's running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = self.norm(self.first(x))
        old = self.mean * 2
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.steps.add_(1)
        y = self.last(y) + old
        self.mean.add_(1.0)
        return y * self.mean, old


@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTE)
def test_buffers_are_updated_after_their_last_reader(compute):
    model = simulated(Buffered(), compute=compute)
    for _ in range(2):
        # The bias before the norm has no gradient in exact arithmetic.
        model.check(batches(2, (5, 4)), total, rtol=1e-4, atol=1e-4)
    model.check(batches(2, (5, 4)), rtol=1e-4, atol=1e-5)


class Counted(nn.Module):
    """Backward needs what forward made of a buffer that forward then writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scale", torch.full((4,), 1.5))

    def forward(self, x):
        self.steps.add_(1)
        old = torch.sin(self.scale.view(2, 2)).view(4)
        y = self.layer(x) * self.steps * old
        self.scale.mul_(1.5)
        return torch.sigmoid(y) * self.scale.cos()


@pytest.mark.parametrize("stage", [*thorough(0), 3])
@pytest.mark.parametrize("compute", COMPUTE)
def test_backward_sees_what_forward_saw_of_a_buffer(compute, stage):
    model = simulated(Counted(), compute=compute, stage=stage)
    for _ in range(3):
        model.check(batches(2, (5, 4)), total, rtol=1e-4, atol=1e-5)


class SavedView(nn.Module):
    """Saves views and overlapping slices of activations for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        a = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        return self.out(a @ v), q.t()


@pytest.mark.parametrize("compute", ATEN)
def test_saved_views(compute):
    simulated(SavedView(), compute=compute).check(batches(2, (3, 4)), total, rtol=1e-4, atol=1e-5)


class OfAView(nn.Module):
    """Every segment reads slices of one big weight."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.empty(12, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        parts = self.big.view(3, 4, 4)
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) @ parts[i])
        return x


@pytest.mark.parametrize("compute", COMPUTE)
def test_segments_that_read_views_of_a_weight(compute):
    simulated(OfAView(), compute=compute).check(batches(2, (3, 4)), total, rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = dropout

    def block(self, i, x):
        return F.dropout(torch.tanh(self.layers[i](x)), self.dropout)

    def forward(self, x):
        for i in range(3):
            x = checkpoint(self.block, i, x, use_reentrant=False)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoint_regions(stage):
    model = simulated(Checkpointed(), stage=stage)
    model.check(batches(2, (3, 4)), total)


class Dropout(nn.Module):
    """Its output shows the mask: gradients must agree with it."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.checkpointed = checkpointed

    def block(self, x):
        return F.dropout(self.first(x), 0.5)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)


@pytest.mark.parametrize("compute", ATEN)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_agrees_between_forward_and_backward(checkpointed, compute):
    model = simulated(Dropout(checkpointed), compute=compute)
    xs = batches(2, (64, 4))
    outs = model.step(xs, lambda out: out.sum())
    masks = [(o != 0).float() * 2 for o in outs]
    assert not torch.equal(*masks)  # ranks draw their own numbers
    assert all(0.3 < m.mean() / 2 < 0.7 for m in masks)
    want = sum(m.t() @ x for m, (x,) in zip(masks, xs, strict=True)) / 2
    for k, rows in enumerate(model.rows):
        torch.testing.assert_close(rows["first.weight"].grad, want[2 * k : 2 * k + 2])


def test_dropout_draws_what_eager_draws():
    model = simulated(Checkpointed(dropout=0.5), world=1)
    xs = batches(1, (8, 4))
    torch.manual_seed(9)
    want, grads, _ = model.eager(xs, total)
    torch.manual_seed(9)
    got = model.step(xs, total)
    torch.testing.assert_close(got, want)
    for name, row in model.rows[0].items():
        torch.testing.assert_close(row.grad, grads[name])


class Sized(nn.Module):
    """Shapes in arithmetic, in views and as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        y = self.first(x) * x.shape[0]
        y = y.reshape(x.shape[0] * 2, 3)
        y = torch.cat([y, y.new_ones(x.shape[0] + 1, 3)]).sum(0)
        return self.last(torch.cat([y, y])).expand(x.shape[0], 4) / x.size(0)


@pytest.mark.parametrize("compute", ATEN)
def test_symbolic_sizes(compute):
    model = simulated(Sized(), dynamic=True, compute=compute)
    for rows in (3, 5, 8):
        model.check(batches(2, (rows, 4)), total, rtol=1e-4, atol=1e-5)
    assert len(model.frames) == 1


@pytest.mark.slow
def test_ranks_with_different_sizes():
    model = simulated(Sized(), dynamic=True)
    (a,), (b,) = batches(1, (3, 4))[0], batches(1, (7, 4))[0]
    model.check([(a,), (b,)], total)


class Odd(nn.Module):
    """Scalars, zero-sized tensors, fewer rows than ranks, rows that ranks do not divide, frozen and unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.short = nn.Parameter(torch.empty(2, 4))
        self.odd = nn.Linear(4, 5)
        self.frozen = nn.Linear(5, 4)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        y = self.frozen(self.odd(x)) * self.scale
        return y + self.short.sum(0) + self.none.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (3, 3), (4, 3), (4, 2), (3, 1), (2, 0)])
def test_odd_parameters(world, stage):
    model = simulated(Odd(), world, stage=stage)
    model.check(batches(world, (3, 4)), total)
    reduced = {n for r in model.programs["backward"].reduces for n in r.names}
    assert reduced == {"scale", "none", "short", "odd.weight", "odd.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_with_full_precision_reduction(dtype):
    model = simulated(Crosses(), 4, param_dtype=dtype, reduce_dtype=torch.float32)
    xs = batches(4, (3, 4))
    model.step(xs, lambda out: total(tuple(o.float() for o in out)))
    plain = SimulatedModel(model.plain.to(dtype), 1).plain
    grads: list[dict[str, torch.Tensor]] = []
    for (x,) in xs:
        plain.zero_grad()
        total(tuple(o.float() for o in plain(x.to(dtype)))).backward()
        grads.append({n: p.grad.float() for n, p in plain.named_parameters()})
    # The same arithmetic rank by rank; only the order of sums inside a matrix product may differ.
    eps = torch.finfo(dtype).eps
    for name, row in model.rows[0].items():
        want = sum(g[name] for g in grads) / 4
        torch.testing.assert_close(
            row.grad, want[: row.shape[0]], rtol=16 * eps, atol=16 * eps * want.abs().max().item()
        )
