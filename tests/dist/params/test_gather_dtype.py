"""Weights that travel in 8 bits: every rank computes with the same ones, whatever carries them; what rests is exact."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import Twin, whole
from dist.cases import Cases
from machines import machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.quantised_blocks import DTYPES, packed_bytes, round_trip
from zero_compiler.sharded.gather_wire import wire_of

pytestmark = pytest.mark.dist
cases = Cases(__name__, group_timeout=60.0)
fours = Cases(__name__, world=4, group_timeout=60.0)
fours.__qualname__ = "fours"


class Net(nn.Module):
    """Rows that no number of ranks divides, fewer of them than ranks, more than a block; read twice, frozen, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(17, 33)
        self.narrow = nn.Linear(33, 1)
        self.wide = nn.Parameter(torch.randn(3, 300) * 0.1)
        self.frozen = nn.Parameter(torch.randn(33, 33) * 0.1, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        h = torch.tanh(self.first(x)) @ self.frozen
        again = h @ self.first.weight
        return (
            (self.narrow(h) * self.scale + again.sum(-1, keepdim=True) + self.wide.sin().sum())
            .square()
            .mean()
        )


MATRICES = ("first.weight", "narrow.weight", "wide", "frozen")


def hardware(share=True):
    """A link so slow that every matrix is worth its way in 8 bits, and nothing is hidden where lanes share cores."""
    path = Path(tempfile.mkdtemp()) / "machine.json"
    path.write_text(json.dumps(machine(latency_us=0.0, bytes_per_us=0.1, share=share)))
    return str(path)


def sharded(model, wire="int8", compiled=True, **fields):
    fields = {"hardware": hardware(), "transport": "c10d", "compute": "aten", "device": "cpu"} | fields
    model = zero.shard(model, gather_dtype=wire, **fields)
    return torch.compile(model, backend="zero") if compiled else model


def batch(rank, step):
    return torch.randn(4, 17, generator=torch.Generator().manual_seed(10 * step + rank))


def as_travelled(model, wire):
    """The parameters of a plain model as all ranks compute with them; gradients go to what they were made of."""
    out = {}
    for name, param in model.named_parameters():
        moved = round_trip(param, DTYPES[wire], param.dtype) if name in MATRICES else param.detach()
        out[name] = param + (moved - param).detach()
    return out


def trained(rank, wire="int8", steps=3, micro=1, **fields):
    """What differs from plain PyTorch that computes with the same rounded weights.

    Both begin each step with the same bits: of two that differ in the last one, one may be rounded up, and one down.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    twin = Twin(Net(), lambda m: sharded(m, wire, **fields), where=f"{wire} {fields}")

    def loss(model, step):
        if model is twin.plain_call:
            return torch.func.functional_call(model, as_travelled(model, wire), (batch(rank, step),))
        return model(batch(rank, step))

    for step in range(steps):
        if micro > 1:
            with zero.no_sync(twin.model):
                loss(twin.call, 100 + step).backward()
            loss(twin.plain_call, 100 + step).backward()
        twin.backward(lambda m, step=step: loss(m, step))
        twin.check_gradients()
        twin.step()
        twin.check_parameters()
        with torch.no_grad():
            for ours, plain in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
                plain.copy_(whole(ours))
    return twin.errors[:4]


@cases.add
def training_is_that_of_plain_pytorch_with_rounded_weights(rank):
    return [
        *trained(rank),
        *trained(rank, "float8_e4m3fn", stage=2, bucket_bytes=0),
        *trained(rank, micro=2),
    ]


@cases.add
def so_it_is_eagerly_and_where_lanes_overlap(rank):
    return [*trained(rank, compiled=False), *trained(rank, hardware=hardware(share=False))]


@cases.add
def so_it_is_in_tiles_and_from_files(rank):
    with tempfile.TemporaryDirectory() as folder:
        return [
            *trained(rank, tile_bytes=600),
            *trained(rank, offload_params="nvme", nvme_dir=folder),
            *trained(rank, "float8_e4m3fn", offload_params="nvme", nvme_dir=folder, tile_bytes=600),
        ]


@cases.add
def so_it_is_within_a_budget_that_keeps_weights(rank):
    return trained(rank, memory_budget_bytes=1 << 20)


class Weights(nn.Module):
    """Gives what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Parameter(torch.randn(4, 300)), nn.Parameter(torch.randn(5, 3, 7))
        self.few, self.vector = nn.Parameter(torch.randn(1, 40)), nn.Parameter(torch.randn(9))

    def forward(self, x):
        return [w * x for w in (self.even, self.odd, self.few, self.vector)]


def weights_seen(rank, wire, spoil=None, **fields):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Weights()
    if spoil is not None:
        with torch.no_grad():
            plain.even[1, 256:] = 0.0
            plain.odd[3, 1, 2] = spoil
    dtype = fields.get("param_dtype") or torch.float32
    want = [p.detach() if p.dim() == 1 else round_trip(p, DTYPES[wire], dtype) for p in plain.parameters()]
    exact = [p.detach().clone() for p in plain.parameters()]
    call = sharded(plain, wire, **fields)
    with torch.no_grad():
        seen = call(torch.ones((), dtype=dtype))
    model = getattr(call, "_orig_mod", call)
    said = [
        f"{name} of {fields} is not what has travelled"
        for (name, _), w, s in zip(model.named_parameters(), want, seen, strict=True)
        if not torch.equal(w.to(dtype).nan_to_num(7.0), s.nan_to_num(7.0))
    ]
    states = [whole(t) for t in model.state_dict().values()]
    with zero.gathered(model):
        opened = [p.detach().clone() for p in model.parameters()]
    for what, found in (("state_dict", states), ("zero.gathered", opened)):
        if not all(
            torch.equal(e.nan_to_num(7.0), f.nan_to_num(7.0)) for e, f in zip(exact, found, strict=True)
        ):
            said.append(f"{what} of {fields} is not what rests")
    return said


def every_way(rank, **fields):
    said = []
    for wire in DTYPES:
        for compiled in (True, False):
            said += weights_seen(rank, wire, compiled=compiled, **fields)
    return said


@cases.add
def all_ranks_see_the_same_weights_and_what_rests_is_exact(rank):
    return [
        *every_way(rank),
        *every_way(rank, param_dtype=torch.bfloat16),
        *weights_seen(rank, "int8", spoil=torch.inf),
        *weights_seen(rank, "int8", spoil=torch.nan, compiled=False),
    ]


@cases.add
def what_the_engine_has_sent_is_what_the_plan_says(rank):
    torch._dynamo.reset()
    call = sharded(Weights())
    call(torch.ones(()))
    (sharded_model,) = sharded_models_of(call)
    sent = sharded_model.runtime.engine.counters()["bytes_gathered"]
    rows = {"even": (2, 300), "odd": (3, 21), "few": (1, 40)}
    want = 2 * (sum(packed_bytes(n * row, row) for n, row in rows.values()) + 5 * 4)
    (frame,) = sharded_model.frames
    planned = frame.timelines["forward"].nbytes("device-device")
    return [] if sent == planned == want else [f"{sent:,} bytes were sent, {planned:,} planned, not {want:,}"]


@cases.add
def kept_weights_are_gathered_again_when_their_shards_change(rank):
    torch._dynamo.reset()
    said, call = [], sharded(Weights(), stage=1)
    model = call._orig_mod
    (sharded_model,) = sharded_models_of(call)
    x = torch.ones(())

    def gathered():
        before = sharded_model.runtime.engine.counters()["bytes_gathered"] if sharded_model.runtime else 0
        with torch.no_grad():
            seen = call(x)
        return sharded_model.runtime.engine.counters()["bytes_gathered"] - before, seen

    first, _ = gathered()
    if not first:
        said.append("nothing was gathered at first")
    if (again := gathered()[0]) != 0:
        said.append(f"{again:,} bytes were gathered again, and nothing had changed")
    with torch.no_grad():
        model.even.mul_(1.5)
    more, seen = gathered()
    want = round_trip(whole(model.even), torch.int8, torch.float32)
    if not more or not torch.equal(seen[0], want):
        said.append("a weight that has changed was not gathered again")
    return said


@cases.add
def gradients_of_gradients_travel_as_they_are(rank):
    """The same data on both ranks: so the mean is what each of them has."""
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 6, bias=False), batch(0, 0)[:, :8]
    model = sharded(copy.deepcopy(plain), compiled=False)

    def steepness(param, out):
        (grad,) = torch.autograd.grad(out.sin().sum(), param, create_graph=True)
        total = grad.square().sum()
        (again,) = torch.autograd.grad(total, param, create_graph=True)
        loss = again.square().sum() + total
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()

    moved = round_trip(plain.weight, torch.int8, torch.float32)
    steepness(plain.weight, x @ (plain.weight + (moved - plain.weight).detach()).t())
    steepness(model.weight, model(x))
    found = whole(model.weight.grad)
    return [] if torch.allclose(found, plain.weight.grad, rtol=1e-4, atol=1e-5) else ["gradients differ"]


def _mesh(names):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@fours.add
def replicas_and_four_ranks_see_the_same_weights(rank):
    mesh = _mesh(("replicate", "shard"))
    return [
        *weights_seen(rank, "int8"),
        *weights_seen(rank, "float8_e4m3fn", compiled=False),
        *weights_seen(rank, "int8", mesh=mesh),
        *trained(rank, mesh=mesh, steps=2),
    ]


@fours.add
def so_do_tensor_parallel_ranks(rank):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch._dynamo.reset()
    mesh = _mesh(("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Linear(20, 12, bias=False)
    weight = plain.weight.detach().clone()
    model = parallelize_module(plain, mesh["tp"], ColwiseParallel())
    call = sharded(model, mesh=mesh)
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(rank // 2))
    with torch.no_grad():
        y = call(x)
    own = weight.chunk(2)[rank % 2]
    want = x @ round_trip(own, torch.int8, torch.float32).t()
    local = y.to_local() if hasattr(y, "to_local") else y
    said = (
        []
        if torch.allclose(local, want, atol=1e-5)
        else ["a tensor-parallel rank computes with other weights"]
    )
    (sharded_model,) = sharded_models_of(call)
    if wire_of(sharded_model, "weight") is None:
        said.append("nothing travels in 8 bits")
    dist.barrier()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.names)
def test_on_two_ranks(name):
    cases.check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", fours.names)
def test_on_four_ranks(name):
    fours.check(name)
