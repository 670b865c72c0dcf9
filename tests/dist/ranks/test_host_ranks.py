"""Second shards: backward gathers among the ranks of a host, and what it computes is the same to the bit. Sums of
gradients that go between hosts in blocks: off by no more than their bound.

The hosts are two halves of this machine's ranks, told apart by what a rank says of its host (see `test_hosts.py`).
"""

from __future__ import annotations

import tempfile

import pytest
import torch
from dist.ranks.test_hosts import killed, make, trained, two_hosts
from dist.spawn import run_ranks
from marks import thorough
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError, ShardError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.ranks import transport

pytestmark = [pytest.mark.dist, pytest.mark.alone]


def same_as_without(rank, world, kind, fields):
    two_hosts(rank, world)
    with tempfile.TemporaryDirectory() as folder:
        if fields.get("offload_params") == "nvme":
            fields = fields | {"nvme_dir": folder}
        _, losses, rows = trained(kind, rank, **fields)
        torch._dynamo.reset()
        model, mine, own = trained(kind, rank, second_shard="host", **fields)
        assert mine == losses
        for a, b in zip(own, rows, strict=True):
            assert torch.equal(a, b)
        return found_of(model)


def found_of(model):
    """What backward gathers over the model's group, and what it and the plan say of second shards."""
    report = zero.inspect(model)
    (runtime,) = [m.runtime for m in sharded_models_of(model)]
    (frame,) = [f for f in report.frames if "backward" in f.programs]
    across = [g.what for g in frame.programs["backward"].gathers if not (g.from_second or g.kept)]
    held = sum(t.numel() * t.element_size() for t in runtime._second.values())
    within = runtime.host_engine.counters()["bytes_gathered"]
    return across, held, report.memory.kept, within > 0, "second shards" in str(report)


WAYS = [
    ("auto", {}),
    ("c10d", {"tile_bytes": 64}),
    *thorough(
        ("c10d", {"param_dtype": torch.bfloat16, "bucket_bytes": 0}),
        ("auto", {"offload_params": "nvme"}),
        ("auto", {"gather_dtype": "int8"}),
        ("auto", {"memory_budget_bytes": 1 << 30}),
    ),
]


@pytest.mark.parametrize(("kind", "fields"), WAYS, ids=str)
def test_training_is_the_same_to_the_bit(kind, fields):
    results = run_ranks(same_as_without, 4, kind, fields, timeout=240.0)
    for across, held, planned, within, told in results:
        assert across == []
        if "memory_budget_bytes" in fields:  # there is room for all weights, which then stay gathered
            assert (held, within) == (0, False)
        else:
            assert (0 < held == planned, within, told) == (True, True, True)


class RunAgain(torch.nn.Module):
    """Each layer is a region that backward runs again: there it reads biases too."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda v, layer=layer: torch.tanh(layer(v)), x, use_reentrant=False)
        return x


class _ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad @ w, None


class BackwardAlone(torch.nn.Module):
    """A weight that only backward computes with."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.weight = torch.nn.Parameter(torch.randn(16, 16), requires_grad=False)

    def forward(self, x):
        return _ReadInBackward.apply(self.layer(x), self.weight)


def deep():
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(3)))


def gradients(rank, made, tiles, second_shard):
    """Of a model, by functions that gather in tiles of these sizes, whose forwards come before all of the backwards."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(made(), transport="c10d", device="cpu", second_shard=second_shard, bucket_bytes=0)
    options = [{"compute": "aten"} | ({"tile_bytes": t} if t else {}) for t in tiles]
    steps = [torch.compile(model, backend="zero", options=o) for o in options]
    given = torch.Generator().manual_seed(rank)
    out = []
    for _ in range(2):
        losses = [
            step(torch.randn(4 + 2 * k, 16, generator=given)).square().sum() for k, step in enumerate(steps)
        ]
        for loss in losses:
            loss.backward()
            out += [p.grad._local_tensor.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)  # what is left of the first step is of no use in the second
    report = zero.inspect(model)
    within = any(g.from_second for f in report.frames for p in f.programs.values() for g in p.gathers)
    return out, within


def same_gradients(rank, world):
    two_hosts(rank, world)
    wrong = []
    for made, tiles, uses in (
        (RunAgain, [0], True),
        (BackwardAlone, [0], False),
        (deep, [0, 256], True),
        (deep, [256, 512], True),
    ):
        want, _ = gradients(rank, made, tiles, None)
        found, within = gradients(rank, made, tiles, "host")
        if within != uses or len(found) != len(want) or not all(map(torch.equal, found, want)):
            off = [float((a - b).abs().max()) for a, b in zip(found, want, strict=False) if a.numel()]
            wrong.append((made.__name__, tiles, within, off))
    return wrong


def test_backward_never_gathers_what_forward_has_not_left():
    """Regions that are run again, weights that backward reads alone, frames with tiles of different sizes."""
    assert run_ranks(same_gradients, 4, timeout=240.0) == [[]] * 4


def written_between(rank, world):
    """A frozen weight that changes between forward and backward."""
    two_hosts(rank, world)
    model = zero.shard(deep(), transport="c10d", device="cpu", second_shard="host", bucket_bytes=0)
    model[2].requires_grad_(False)
    loss = torch.compile(model, backend="zero", options={"compute": "aten"})(torch.ones(2, 16)).sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(ShardError) as error:
        loss.backward()
    return str(error.value)


def test_second_shards_are_of_the_weight_as_it_is():
    """What forward has left of a weight is never used once the weight has changed."""
    for said in run_ranks(written_between, 4, timeout=120.0):
        assert "parameter '2.weight' was modified in place between forward and backward" in said


def packed_sums(rank, world, fields):
    """How far weights are off after four steps whose sums went between hosts in blocks, and the losses."""
    two_hosts(rank, world)
    _, losses, rows = trained("auto", rank, **fields)
    torch._dynamo.reset()
    model, mine, own = trained("auto", rank, reduce_between_hosts_dtype="int8", **fields)
    off = max(float((a - b).abs().max()) for a, b in zip(own, rows, strict=True) if a.numel())
    most = max(
        abs(a - b)
        for some, others in zip(mine, losses, strict=True)
        for a, b in zip(some, others, strict=True)
    )
    return off, most, "as int8 between hosts" in str(zero.inspect(model))


@pytest.mark.parametrize("fields", [{}, *thorough({"stage": 1, "param_dtype": torch.bfloat16})], ids=str)
def test_sums_in_blocks_train_nearly_as_in_full(fields):
    """Gradients are clipped to a norm of 1, so no number of a mean is off by more than 1/254, and of SGD at 0.5 no
    weight by more than four times half of that in four steps, were each step's gradient the same."""
    for off, most, told in run_ranks(packed_sums, 4, fields, timeout=240.0):
        assert told
        assert 0 < off < 4 * 0.5 / 254
        assert most < 0.02


def one_sum(rank, world):
    """The mean of a gradient of random numbers, beside the bound."""
    two_hosts(rank, world)
    torch.manual_seed(0)
    found = {}
    for wire in (None, "int8"):
        torch._dynamo.reset()
        model = torch.nn.Linear(300, 5, bias=False)
        model = zero.shard(model, transport="shared", device="cpu", reduce_between_hosts_dtype=wire)
        step = torch.compile(model, backend="zero", options={"compute": "aten"})
        x = torch.randn(7, 300, generator=torch.Generator().manual_seed(rank))
        weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(9 + rank))
        (step(x) * weight).sum().backward()
        found[wire] = model.weight.grad._local_tensor.clone()
        if wire is None:
            own = weight.T @ x  # this rank's part of the sum, of all rows
    every = [torch.empty_like(own) for _ in range(world)]
    torch.distributed.all_gather(every, own)
    other = sum(every[2 * (1 - rank // 2) :][:2])  # of the other host
    rows = found[None].shape[0]
    mine = other[2 * rank : 2 * rank + rows].flatten()
    bounds = [block.abs().max().item() / 254 / world for block in mine.split(256) if block.numel()]
    off = (found["int8"] - found[None]).flatten()
    errors = [block.abs().max().item() for block in off.split(256) if block.numel()]
    return bounds, errors


def test_a_mean_is_off_by_no_more_than_the_bound():
    results = run_ranks(one_sum, 4, timeout=120.0)
    # Of two, two, one and no rows of 300.
    assert [len(errors) for _, errors in results] == [3, 3, 2, 0]
    for bounds, errors in results:
        assert all(error <= 1.0001 * bound + 1e-6 for error, bound in zip(errors, bounds, strict=True))
        assert not errors or max(errors) > 0


def killed_with_second_shards(rank, world, kind):
    return killed(rank, world, kind, second_shard="host")


@pytest.mark.parametrize("kind", ["shared", *thorough("c10d")])
def test_a_killed_rank_ends_all_others(kind):
    results = run_ranks(killed_with_second_shards, 4, kind, timeout=90.0, group_timeout=15.0, may_die={3})
    assert results[:3] == [True] * 3


def refused(rank, world):
    sentences = []
    for hosts, fields in (
        ("aaab", {"second_shard": "host"}),
        ("abcd", {"second_shard": "host"}),
        ("aaab", {"reduce_between_hosts_dtype": "int8"}),
    ):
        transport._host = lambda hosts=hosts: hosts[rank]
        with pytest.raises(ShardError) as error:
            make("auto", **fields)
        sentences.append(str(error.value))
    two_hosts(rank, world)
    with pytest.raises(RankMismatchError) as mismatch:
        make("auto", **({"second_shard": "host"} if rank == 1 else {}))
    sentences.append(str(mismatch.value))
    # On one host, or with each replica on one, there is nothing to change.
    transport._host = lambda: "a"
    model, _ = make("auto", second_shard="host", reduce_between_hosts_dtype="int8")
    two_hosts(rank, world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid, _ = make("c10d", second_shard="host", mesh=mesh)
    assert [sharded_models_of(m)[0].storage.second_ranks for m in (model, hybrid)] == [0, 0]
    return sentences


def test_what_cannot_be_is_refused_on_all_ranks_before_anything_is_sent():
    first, *others = run_ranks(refused, 4, timeout=120.0)
    assert all(found[:3] == first[:3] for found in others)
    assert "hosts have ranks 0, 1, 2; 3; leave it out" in first[0]
    assert "each of 4 hosts has one rank" in first[1]
    assert "needs CPU ranks that share memory within each host, and these use c10d" in first[2]
    assert "second_shard" in first[3]
