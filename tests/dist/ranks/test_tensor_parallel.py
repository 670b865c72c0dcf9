"""ZeRO over the data ranks and tensor parallelism over the others, on 2 x 2 ranks, beside plain PyTorch.

Cases run in three sets of ranks; each is reported as a test of its own. A case returns what is wrong, in sentences.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import Twin, average_gradients, local, part
from dist.cases import Cases
from dist.tensor_parallel import ADAMW, SGD, both, build, mesh_of, trained
from machines import machine
from parallel import Transformer, by_columns, loss, tokens
from standin import accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zero_compiler as zero
from zero_compiler.errors import CaptureError, ConfigError, RankMismatchError, ShardError
from zero_compiler.params.modules import sharded_models_of

pytestmark = [pytest.mark.dist, pytest.mark.slow]


cases = Cases(__name__, world=4, spawns=3, group_timeout=60.0)


@cases.add
def stages_over_both_transports(rank: int) -> list[str]:
    # Stages 1 and 2 are one plan, and other cases have stage 3 over shared memory.
    return at(rank, (0, "c10d"), (2, "shared"))


@cases.add_thorough
def stage_3_over_c10d(rank: int) -> list[str]:
    return at(rank, (3, "c10d"))


def at(rank: int, *combined: tuple[int, str]) -> list[str]:
    errors = []
    for stage, transport in combined:
        where = f"stage {stage} over {transport}"
        errors += trained(rank, where, 2, optimizer=SGD, stage=stage, transport=transport)
    return errors


@cases.add_thorough
def twenty_steps(rank: int) -> list[str]:
    return trained(rank, "twenty steps", 20, layers=2, stage=3)


@cases.add_thorough
def activations_cut_along_the_sequence(rank: int) -> list[str]:
    """At stage 2: other cases have such a plan at stage 3."""
    return trained(rank, "stage 2", plan="by sequence", stage=2)


@cases.add_thorough
def compiled_by_inductor(rank: int) -> list[str]:
    return trained(rank, "inductor", 2, stage=3, compute="inductor")


@cases.add
def without_a_compiler(rank: int) -> list[str]:
    return trained(rank, "eager", stage=3, compiled=False)


@cases.add_thorough
def the_data_dimension_alone_names_the_ranks(rank: int) -> list[str]:
    return trained(rank, "mesh['dp']", stage=3, mesh=mesh_of()["dp"])


@cases.add
def with_other_options(rank: int) -> list[str]:
    """A budget with weights in tiles, and shards in files."""
    errors = trained(rank, "a budget, tiles", 2, stage=3, memory_budget_bytes=1 << 20, tile_bytes=128)
    with tempfile.TemporaryDirectory() as folder:
        return errors + trained(rank, "files", 2, stage=3, offload_params="nvme", nvme_dir=folder)


def two_steps(rank: int, opt: Any, model: nn.Module, clip: bool) -> list[torch.Tensor]:
    """Local parameters afterwards; with ``clip`` the norms come first."""
    norms = []
    for step in range(2):
        loss(model, tokens(rank // 2, step)).backward()
        if clip and hasattr(opt, "grad_norm"):
            opt.step()
            norms.append(opt.grad_norm)
        else:
            norms += [nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()] if clip else []
            opt.step()
        opt.zero_grad()
    return [*norms, *(local(p).clone() for p in model.parameters())]


@cases.add
def activations_within_a_budget(rank: int) -> list[str]:
    """What is made again, the rest in parts; no all-reduce runs twice."""
    frames = []
    fields: dict[str, Any] = {"stage": 3}
    for _ in range(2):
        torch._dynamo.reset()
        model = both(build(), **fields)
        model(long(rank // 2, 0)).sum().backward()
        frames.append(zero.inspect(model).frames[-1])
        fields |= {"activation_budget_bytes": frames[0].held_bytes * 4 // 5, "partition_activations": True}
    errors = trained(rank, "a budget", 2, data=long, **fields)
    whole, within = frames
    if not within.remade or not any("bytes are saved" in n for n in within.programs["forward"].notes):
        errors.append(f"of {whole.held_bytes:,} bytes nothing was made again, or nothing cut")
    sent = [all_reduces(f.programs["backward"]) for f in frames]
    if sent[0] != sent[1] or not sent[0]:
        errors.append(f"all-reduces in backward: {sent}")
    return errors


def all_reduces(program: Any) -> int:
    return sum(program.segments[k].count("_c10d_functional.all_reduce.") for k in program.structures)


@cases.add
def the_optimizer_of_this_project(rank: int) -> list[str]:
    """Its own clipping has the norm over both dimensions, and updates in mid-backward change nothing."""
    errors = []
    theirs = both(build(), stage=3)
    start = {k: v.clone() for k, v in theirs.state_dict().items()}
    for clip, fields in ((True, {"max_grad_norm": 0.5}), (False, {"overlap": True})):
        ours = both(build(), stage=3)
        theirs.load_state_dict(start)
        ours_opt = zero.optimizer(torch.optim.AdamW, ours, lr=1e-2, **fields)
        got = two_steps(rank, ours_opt, ours, clip)
        want = two_steps(rank, torch.optim.AdamW(theirs.parameters(), lr=1e-2), theirs, clip)
        off = [
            k
            for k, (a, b) in enumerate(zip(got, want, strict=True))
            if not torch.allclose(a, b, rtol=1e-6, atol=0)
        ]
        errors += [f"{fields}: values {off} differ"] if off else []
    return errors


@cases.add
def copied(rank: int) -> list[str]:
    """A model with the hooks of ``parallelize_module`` can be copied, and its ranks are found again after pickling."""
    model = both(build(), compiled=False, stage=3)
    again = copy.deepcopy(model)
    for m in (model, again):
        loss(torch.compile(m, backend="zero"), tokens(rank // 2, 0)).backward()
    pairs = zip(model.named_parameters(), again.parameters(), strict=True)
    errors = [n for (n, p), q in pairs if not torch.equal(local(p.grad), local(q.grad))]
    group = sharded_models_of(model)[0].group
    found = pickle.loads(pickle.dumps(group))
    if (found.roles, found.rank, found.tensor.rank) != (group.roles, group.rank, group.tensor.rank):
        errors.append(f"ranks are {found}")
    return errors


@cases.add
def outputs_that_stay_cut(rank: int) -> list[str]:
    """An eager model may return DTensors over the tensor-parallel ranks; a frame that is trained may not."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6))
    plan = {"0": ColwiseParallel(use_local_output=False)}
    model = parallelize_module(copy.deepcopy(plain), mesh_of()["tp"], plan)
    model = zero.shard(model, mesh=mesh_of(), stage=3, compute="aten")
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank // 2))
    model(x).full_tensor().square().sum().backward()
    plain(x).square().sum().backward()
    average_gradients(plain)
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    errors = [
        n for (n, p), q in pairs if not torch.allclose(local(p.grad), part(q.grad, p), rtol=1e-4, atol=1e-5)
    ]
    try:
        torch.compile(model, backend="zero")(x)
        errors.append("not refused")
    except CaptureError as error:
        if "a compiled frame returns a DTensor" not in str(error):
            errors.append(str(error))
    return errors


@cases.add
def what_the_report_says(rank: int) -> list[str]:
    model = both(build(), stage=3)
    report = zero.inspect(model, example_inputs=(tokens(rank // 2, 0),))
    wanted = f"rank {rank // 2} of 2, 21 parameters, 2 tensor-parallel ranks"
    placed = {p["name"]: p["placement"] for p in report.to_dict()["parameters"]}
    errors = [] if wanted in str(report) else [str(report)[:200]]
    if placed["blocks.0.down.weight"] != "Shard(0), Shard(1)":
        errors.append(placed["blocks.0.down.weight"])
    return errors


@cases.add
def accumulation(rank: int) -> list[str]:
    twin = Twin(build(), functools.partial(both, stage=3), ADAMW)
    for step in range(2):
        with zero.no_sync(twin.call):
            twin.backward(lambda m, i=2 * step: loss(m, tokens(rank // 2, i)), average=False)
        twin.backward(lambda m, i=2 * step + 1: loss(m, tokens(rank // 2, i)), average=False)
        average_gradients(twin.plain)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()
    return twin.errors


@cases.add
def placements_are_those_of_fsdp2(rank: int) -> list[str]:
    ours, theirs = both(build(), compiled=False), by_columns(build(), mesh_of()["tp"])
    fully_shard(theirs, mesh=mesh_of()["dp"], ignored_params={theirs.scale})  # it takes no scalars
    errors = []
    for (n, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not isinstance(q, DTensor) or q.device_mesh.ndim == 1:
            continue  # a plain parameter beside the others: FSDP2 leaves it on a mesh of its own
        if (p.placements, p.shape, local(p).shape) != (q.placements, q.shape, local(q).shape):
            errors.append(f"{n}: {p.placements} {local(p).shape}, FSDP2 {q.placements} {local(q).shape}")
        if not torch.equal(local(p), local(q)):
            errors.append(f"{n}: other rows than FSDP2's")
    return errors


@cases.add
def full_weights_for_a_while(rank: int) -> list[str]:
    torch.manual_seed(rank)  # rank 0's values are kept, also of plain parameters
    model = both(Transformer(1), compiled=False)
    plain = build()
    errors = []
    ids = tokens(0, 0)
    with zero.gathered(model, write=True), torch.no_grad():
        if not isinstance(model.head.weight, DTensor) or model.head.weight.placements != (Shard(0),):
            errors.append(f"head is {type(model.head.weight)}")
        if not torch.allclose(model(ids), plain(ids), rtol=1e-5, atol=1e-6):
            errors.append("another output than plain PyTorch's")
        for p in model.parameters():
            p.mul_(2)
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not torch.equal(local(p), part(2 * q, p)):
            errors.append(f"{n} was not written")
    try:
        with zero.gathered(model, write=True), torch.no_grad():
            model.norm.weight.fill_(float(rank // 2))
        errors.append("data ranks wrote different values unseen")
    except RankMismatchError as error:
        if "ranks 0 and 2 wrote different values to 'norm.weight'" not in str(error):
            errors.append(str(error))
    return errors


@cases.add
def activations_in_parts(rank: int) -> list[str]:
    return in_parts(rank, ("by columns", "aten"), ("by sequence", "aten"))


@cases.add_thorough
def activations_in_parts_by_inductor(rank: int) -> list[str]:
    return in_parts(rank, ("by columns", "inductor"))


def in_parts(rank: int, *ways: tuple[str, str]) -> list[str]:
    """The same numbers, and of what is saved alike on both ranks of a pair one half."""
    errors = []
    for plan, compute in ways:
        where = f"{plan}, {compute}"
        fields = {"plan": plan, "compute": compute, "stage": 3, "partition_activations": True}
        errors += trained(rank, where, 2, data=long, **fields)
        saved, planned, adds = {}, {}, {}
        fields["compute"] = "aten"
        for parts in (False, True):
            torch._dynamo.reset()
            model = both(build(), **{**fields, "partition_activations": parts})
            out = model(long(rank // 2, 0))
            saved[parts] = held_by(out.grad_fn)
            out.sum().backward()
            report = zero.inspect(model)
            adds[parts] = report.memory.programs
            notes = [n for n in report.frames[-1].programs["forward"].notes if "bytes are saved" in n]
            planned[parts] = [
                [int(w.replace(",", "")) for w in n.split() if w[0].isdigit()][:2] for n in notes
            ]
        less = sum(whole - mine for mine, whole in planned[True])
        if planned[False] or len(planned[True]) < 4:
            errors.append(f"{where}: planned {planned}")
        if saved[False] - saved[True] != less:
            errors.append(f"{where}: {saved} bytes are saved, planned {less:,} less")
        if not adds[True] < adds[False]:
            errors.append(f"{where}: predicted bytes of a Program {adds}")
    return errors


@cases.add
def activations_in_parts_that_wait_elsewhere(rank: int) -> list[str]:
    """What a pair saves alike is saved in parts; what the lane hides, parts too, waits in files, or on the host."""
    with tempfile.TemporaryDirectory() as folder:

        def disk(bytes_per_us: float) -> dict[str, Any]:
            link = {"latency_us": 1e-6, "bytes_per_us": bytes_per_us}
            spec = Path(folder) / f"{bytes_per_us}.json"
            spec.write_text(json.dumps(machine(nvme_read=link, nvme_write=link)))
            return {"hardware": str(spec), "offload_activations": "nvme", "nvme_dir": folder}

        model = both(build(), stage=3, **disk(1e9))
        frame = zero.inspect(model, (long(rank // 2, 0),)).frames[-1]
        whole = sum(o.nbytes for o in frame.offloaded)
        half = [whole / frame.timelines["forward"].busy_us("compute") / 2]
        dist.broadcast_object_list(half)  # ranks agree on their machine
        fields = {"stage": 3, "partition_activations": True, **disk(half[0])}
        errors = trained(rank, "half", 2, data=long, **fields)
        torch._dynamo.reset()
        model = both(build(), **fields)
        model(long(rank // 2, 0)).sum().backward()
        frame = zero.inspect(model).frames[-1]
        cut = [n for n in frame.programs["forward"].notes if "bytes are saved" in n]
        moved = sum(o.nbytes for o in frame.offloaded)
        parts = [o for o in frame.offloaded if o.name.endswith("_part")]
        written = sharded_models_of(model)[0].storage.nvme().engine.counters()["bytes_written"]
        if not cut or not parts or not 0 < moved < whole or written < moved:
            errors.append(
                f"{len(parts)} of {len(cut)} parts moved, {moved:,} of {whole:,} bytes, {written:,} written"
            )
        # The same on the host, with a CPU in an accelerator's place.
        fast = {"latency_us": 1e-6, "bytes_per_us": 1e9}
        (spec := Path(folder) / "host.json").write_text(json.dumps(machine(host_device=fast)))
        fields = {
            "stage": 3,
            "partition_activations": True,
            "offload_activations": "host",
            "hardware": str(spec),
        }
        with accelerator():
            errors += trained(rank, "parts on the host", 2, data=long, **fields)
            torch._dynamo.reset()
            frame = zero.inspect(both(build(), **fields), (long(rank // 2, 0),)).frames[-1]
        if {o.tier for o in frame.offloaded if o.name.endswith("_part")} != {"host"}:
            errors.append(f"no part was parked on the host: {frame.offloaded}")
    return errors


def long(data_rank: int, step: int) -> torch.Tensor:
    """Tokens whose activations are worth cutting."""
    return tokens(data_rank, step, 130)


def held_by(node: Any) -> int:
    """Bytes that a graph of autograd holds for backward, beside parameters."""
    seen: dict[int, int] = {}
    todo, known = [node], {node}
    while todo:
        node = todo.pop()
        for t in getattr(node, "saved_tensors", ()):
            if t is not None and not isinstance(t, DTensor):
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                todo.append(following)
    return sum(seen.values())


@cases.add
def activations_in_parts_need_tensor_parallel_ranks(rank: int) -> list[str]:
    torch._dynamo.reset()
    model = torch.compile(zero.shard(Transformer(1)), backend="zero", options={"partition_activations": True})
    try:
        model(tokens(rank, 0)).sum()
    except ConfigError as error:
        wanted = "partition_activations=True needs tensor-parallel ranks, which save the same activations"
        return [] if wanted in str(error) else [str(error)]
    return ["not refused"]


@cases.add
def what_cannot_be_placed_is_refused(rank: int) -> list[str]:
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tp = mesh_of()["tp"]

    def lone(shape: tuple[int, ...]) -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.ones(shape), tp, [Shard(0)]))
        return model

    errors = []
    for body, sentence in (
        (
            lambda: zero.shard(lone((4, 2)), mesh=other),
            "and the mesh given to zero.shard has no tensor-parallel",
        ),
        (lambda: zero.shard(lone((4, 2))), "and the mesh given to zero.shard has no tensor-parallel"),
        (
            lambda: zero.shard(lone((5, 2)), mesh=mesh_of()),
            "parameter weight has 5 entries in dimension 0, which 2",
        ),
        (lambda: zero.init(mesh=mesh_of()).__enter__(), "tensor parallelism comes between it and zero.shard"),
    ):
        try:
            body()
            errors.append(f"not refused: {sentence}")
        except ShardError as error:
            if sentence not in str(error):
                errors.append(str(error))
    return errors


@pytest.mark.parametrize("name", cases.names)
@pytest.mark.timeout(600)
def test_tensor_parallelism(name: str) -> None:
    cases.check(name)
