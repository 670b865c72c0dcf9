"""Hybrid sharding on 2 x 2 ranks, beside plain PyTorch on all four.

All cases run in one set of ranks; each is reported as a test of its own. A case returns what is wrong, in sentences.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compare import Twin, average_gradients, local, part
from dist.cases import Cases
from dist.measured import train
from dist.spawn import run_ranks
from models import FAMILIES, MLP, Odd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.runtime import _C

pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__, world=4, group_timeout=60.0)
NAMES = ("replicate", "shard")


@functools.cache
def mesh_of(shape: tuple[int, int] = (2, 2), names: tuple[str, str] = NAMES) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def hybrid(model: nn.Module, mesh: Any = None, compiled: bool = True, **fields: Any) -> nn.Module:
    model = zero.shard(model, mesh=mesh or mesh_of(), compute="aten", **fields)
    return torch.compile(model, backend="zero") if compiled else model


ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3, eps=1e-3, weight_decay=0.1)


def trained(name: str, rank: int, steps: int = 3, where: str = "", **fields: Any) -> list[str]:
    family = FAMILIES[name]
    torch._dynamo.reset()
    twin = Twin(family.model(), functools.partial(hybrid, **fields), ADAMW, where=f"{name} {where}")
    for step in range(steps):
        twin.backward(lambda m, i=step: family.loss(m, family.data(rank, i)))
        for m in (twin.model, twin.plain):
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()
    return twin.errors[:5]


@cases.add
def stages_over_both_transports(rank: int) -> list[str]:
    return at(rank, (1, "c10d"), (3, "shared"))  # stages 1 and 2 are one plan


@cases.add_thorough
def the_other_stages_and_transports(rank: int) -> list[str]:
    return at(rank, (0, "shared"), (3, "c10d"))


def at(rank: int, *combined: tuple[int, str]) -> list[str]:
    errors = []
    for stage, transport in combined:
        where = f"stage {stage} over {transport}"
        errors += trained("odd", rank, where=where, stage=stage, transport=transport)
    return errors


@cases.add
def weights_in_tiles(rank: int) -> list[str]:
    errors = []
    for transport in ("shared", "c10d"):
        errors += trained(
            "mlp", rank, where=f"in tiles over {transport}", tile_bytes=200, transport=transport
        )
    return errors


@cases.add_thorough
def a_transformer(rank: int) -> list[str]:
    return trained("gpt2", rank, stage=3)


@cases.add
def code_outside_compiled_frames(rank: int) -> list[str]:
    return trained("broken", rank, stage=3) + trained("odd", rank, stage=2, compiled=False, where="eager")


@cases.add
def other_shapes_and_orders(rank: int) -> list[str]:
    errors = trained("odd", rank, where="4 x 1", mesh=mesh_of((4, 1)), stage=3)
    errors += trained("odd", rank, where="1 x 4", mesh=mesh_of((1, 4)), stage=3)
    swapped = mesh_of(names=("shard", "replicate"))
    errors += trained("odd", rank, where="shard x replicate", mesh=swapped, stage=3)
    weight = hybrid(MLP(), swapped).norm.weight
    if weight.placements != (Shard(0), Replicate()):
        errors.append(f"placements are {weight.placements}")
    return errors


@cases.add
def placements_are_those_of_fsdp2(rank: int) -> list[str]:
    errors = []
    torch.manual_seed(0)
    ours, theirs = zero.shard(MLP(), mesh=mesh_of(), stage=3), MLP()
    fully_shard(theirs, mesh=mesh_of())
    for (n, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if (p.placements, p.device_mesh, local(p).shape) != (q.placements, q.device_mesh, local(q).shape):
            errors.append(f"{n}: {p.placements} {local(p).shape}, FSDP2 {q.placements} {local(q).shape}")
    return errors


@cases.add
def accumulation(rank: int) -> list[str]:
    errors = []
    for stage, compiled in ((1, True), (3, True), (3, False)):
        torch._dynamo.reset()
        family = FAMILIES["odd"]
        twin = Twin(
            family.model(),
            functools.partial(hybrid, stage=stage, compiled=compiled),
            ADAMW,
            where=f"stage {stage}",
        )
        for step in range(2):
            with zero.no_sync(twin.call):
                twin.backward(lambda m, i=2 * step: family.loss(m, family.data(rank, i)), average=False)
            twin.backward(lambda m, i=2 * step + 1: family.loss(m, family.data(rank, i)), average=False)
            average_gradients(twin.plain)
            twin.check_gradients()
            twin.step()
        twin.check_parameters()
        errors += twin.errors
    return errors


@cases.add
def full_weights_and_what_is_written_to_them(rank: int) -> list[str]:
    errors = []
    torch.manual_seed(rank)  # rank 0's values are kept
    model = hybrid(Odd(), stage=3, compiled=False)
    torch.manual_seed(0)
    plain = Odd()
    with zero.gathered(model, write=True):
        for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if not torch.equal(p, q):
                errors.append(f"{n} is not rank 0's")
            with torch.no_grad():
                p.mul_(2)
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not torch.equal(local(p), part(2 * q, p)):
            errors.append(f"{n} was not written")
    try:
        with zero.gathered(model, write=True), torch.no_grad():
            model.ragged.weight.fill_(float(rank // 2))  # replicas differ
        errors.append("replicas wrote different values unseen")
    except RankMismatchError as error:
        if "ranks 0 and 2 wrote different values" not in str(error):
            errors.append(str(error))
    return errors


@cases.add
def built_in_place(rank: int) -> list[str]:
    torch.manual_seed(0)
    plain = FAMILIES["gpt2"].build()
    torch.manual_seed(0)
    with zero.init(stage=3, mesh=mesh_of()):
        model = FAMILIES["gpt2"].build()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    return [n for (n, p), q in pairs if not torch.equal(local(p), part(q, p)) or not isinstance(p, DTensor)]


@cases.add
def updates_in_mid_backward(rank: int) -> list[str]:
    return updated_in_mid_backward("odd", rank)


@cases.add_thorough
def updates_of_a_transformer_in_mid_backward(rank: int) -> list[str]:
    return updated_in_mid_backward("gpt2", rank)


def updated_in_mid_backward(name: str, rank: int) -> list[str]:
    family = FAMILIES[name]
    models = [hybrid(family.model(), stage=3, transport="c10d") for _ in range(2)]
    opts = [
        torch.optim.AdamW(models[0].parameters(), lr=1e-2),
        zero.optimizer(torch.optim.AdamW, models[1], lr=1e-2, overlap=True),
    ]
    for step in range(2):
        for model, opt in zip(models, opts, strict=True):
            family.loss(model, family.data(rank, step)).backward()
            opt.step()
            opt.zero_grad()
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    return [n for (n, p), q in pairs if not torch.equal(local(p), local(q))]


def said_by(body: Callable[[], Any]) -> str:
    try:
        body()
    except RankMismatchError as error:
        return str(error)
    return "nothing"


@cases.add
def pickled_whole(rank: int) -> list[str]:
    model = zero.shard(MLP(), mesh=mesh_of(), stage=3)
    again = torch.compile(pickle.loads(pickle.dumps(model)), backend="zero", options={"compute": "aten"})
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    x = torch.ones(2, 16) * (rank + 1)
    for m in (call, again):
        m(x).square().sum().backward()
    pairs = zip(model.named_parameters(), again.parameters(), strict=True)
    return [
        n for (n, p), q in pairs if not torch.allclose(local(p.grad), local(q.grad), rtol=1e-5, atol=1e-6)
    ]


@cases.add
def replicas_that_disagree(rank: int) -> list[str]:
    errors = []
    stage = 3 if rank < 2 else 2
    said = said_by(lambda: zero.shard(MLP(), mesh=mesh_of(), stage=stage))
    if "first difference: 'stage = 3' on rank 0 of 4, 'stage = 2' on rank 2 of 4" not in said:
        errors.append(f"another stage on one replica: {said}")
    model = hybrid(MLP(), stage=3)
    x = torch.ones(2, 16)
    model(x).sum().backward()

    def call() -> None:
        if rank < 2:
            model(x).sum().backward()
        else:
            with torch.no_grad():
                model(x)

    said = said_by(call)
    if "ranks are in different calls" not in said or "inference" not in said:
        errors.append(f"one replica trains, the other evaluates: {said}")
    return errors


@cases.add
def what_the_report_says(rank: int) -> list[str]:
    model = hybrid(MLP(), stage=3, transport="c10d")
    model(torch.ones(2, 16)).sum().backward()
    text = str(zero.inspect(model))
    wanted = (f"rank {rank % 2} of 2, 6 parameters, 2 replicas", "reduce-scatter, all-reduce x 2")
    placement = zero.inspect(model).to_dict()["parameters"][0]["placement"]
    return [w for w in wanted if w not in text] + (
        [] if placement == "Replicate(), Shard(0)" else [placement]
    )


@cases.add
def the_measured_peak_is_within_the_plan(rank: int) -> list[str]:
    """Where gradients make the peak: of a few rows. A bucket of several is summed between replicas in a copy."""
    _C.meter_install()
    errors = []
    net, rows = {"width": 128, "layers": 2}, 4
    outside = rows * net["width"] * 4 * 2 + 4096  # the batch, and eager code
    mixed = {"stage": 3, "param_dtype": "bf16", "reduce_dtype": "fp32"}
    cases: list[tuple[tuple[int, int], dict[str, Any]]] = [
        ((2, 2), {"stage": 0}),
        ((2, 2), mixed),
        ((2, 2), {"transport": "shared", **mixed}),
        ((2, 2), {"stage": 3, "reduce_dtype": "bf16", "bucket_bytes": 0}),
        ((4, 1), {"stage": 3}),
    ]
    for shape, fields in cases:
        given = {"bucket_bytes": 1 << 20} | fields
        _, measured, model = train(rank, net, rows, mesh=mesh_of(shape), **given)
        beyond = measured - zero.inspect(model).memory.peak
        if beyond > outside:
            errors.append(f"{beyond:,} of {measured:,} bytes beside the plan: {shape} {given}")
    return errors


@cases.add
def the_transport_within_a_replica(rank: int) -> list[str]:
    model = zero.shard(MLP(), mesh=mesh_of(), stage=3)
    transport = sharded_models_of(model)[0].storage.transport
    return (
        []
        if transport.shared and "2 CPU ranks" in transport.reason
        else [f"{transport.name}: {transport.reason}"]
    )


@pytest.mark.parametrize("name", cases.names)
@pytest.mark.timeout(600)
def test_hybrid_sharding(name: str) -> None:
    cases.check(name)


def save(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(0)
    model = zero.shard(Odd(), mesh=mesh_of(), stage=3)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load(rank: int, world: int, folder: str, shape: tuple[int, int] | None) -> list[str]:
    torch.manual_seed(1)
    model = zero.shard(Odd(), mesh=mesh_of(shape) if shape else None, stage=3)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    torch.manual_seed(0)
    want = Odd().state_dict()
    return [n for n, p in model.state_dict().items() if not torch.equal(local(p), part(want[n], p))]


@pytest.mark.timeout(300)
def test_checkpoints_move_between_meshes(tmp_path: Path) -> None:
    run_ranks(save, 4, str(tmp_path), timeout=120.0)
    assert run_ranks(load, 4, str(tmp_path), (2, 2), timeout=120.0) == [[]] * 4
    assert run_ranks(load, 2, str(tmp_path), None, timeout=120.0) == [[]] * 2
