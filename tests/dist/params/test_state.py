"""Saving and loading."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from compare import average_gradients, local, part, whole
from dist.spawn import run_ranks
from models import FAMILIES, MLP
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import zero_compiler as zero
from zero_compiler.errors import ShardError

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def sharded(model: nn.Module, **fields: Any) -> nn.Module:
    return torch.compile(zero.shard(model, compute="aten", **fields), backend="zero")


def train(model: nn.Module, opt: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


# --- state_dict -------------------------------------------------------------------------------------------------


def names_and_values(rank: int, world: int) -> list[str]:
    errors = []
    for name in ("odd", "gpt2", "resnet", "mixed-dtypes"):
        family = FAMILIES[name]
        plain, model = family.model(), zero.shard(family.model(), stage=3)
        other = zero.shard(family.model(seed=1), stage=1)
        before = {n: id(p) for n, p in other.named_parameters()}
        want, got = plain.state_dict(), model.state_dict()
        if list(want) != list(got):
            errors.append(f"{name}: names are {list(got)}, expected {list(want)}")
        other.load_state_dict(got, strict=True)
        for key, value in other.state_dict().items():
            if not torch.equal(local(value), part(want[key], value)):
                errors.append(f"{name}: {key} was not loaded")
        if before != {n: id(p) for n, p in other.named_parameters()}:
            errors.append(f"{name}: loading in place made new parameters")
        assigned = zero.shard(family.model(seed=2), stage=3)
        assigned.load_state_dict({k: v.clone() for k, v in got.items()}, strict=True, assign=True)
        for key, value in assigned.state_dict().items():
            if not torch.equal(local(value), part(want[key], value)):
                errors.append(f"{name}: {key} was not assigned")
        try:
            model.load_state_dict({k: v for k, v in list(got.items())[1:]}, strict=True)
            errors.append(f"{name}: a missing key was not missed")
        except RuntimeError as error:
            if "Missing key" not in str(error):
                errors.append(str(error))
        batch = family.data(rank, 0)
        with torch.no_grad():
            losses = [family.loss(m, batch).item() for m in (plain, other, assigned)]
        if max(losses) - min(losses) > 1e-5 * abs(losses[0]):
            errors.append(f"{name}: losses after loading are {losses}")
    return errors


def placements_and_rows(rank: int, world: int) -> list[str]:
    """Every managed parameter is a DTensor: cut by rows as FSDP2 cuts it, or replicated where it has no rows or no elements."""
    errors = []
    family = FAMILIES["odd"]
    theirs = family.model()
    scalars = {p for p in theirs.parameters() if p.dim() == 0}  # FSDP2 takes none
    fully_shard(theirs, mesh=init_device_mesh("cpu", (world,)), ignored_params=scalars)
    for stage in range(4):
        ours = zero.shard(family.model(), stage=stage)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            cut = stage > 0 and p.dim() > 0 and p.numel() > 0
            if not isinstance(p, DTensor) or p.placements != ((Shard(0),) if cut else (Replicate(),)):
                errors.append(f"stage {stage}: {name} is {type(p).__name__} {getattr(p, 'placements', '')}")
            elif local(p).shape != (local(q).shape if cut else p.shape):
                errors.append(f"stage {stage}: {name} has {local(p).shape}, FSDP2 {local(q).shape}")
    return errors


def assign_while_compiled(rank: int, world: int) -> list[str]:
    """Loading with assign=True between steps of a compiled model, kept weights and all."""
    errors = []
    for stage in (2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        call = sharded(MLP(), stage=stage)
        model = call._orig_mod
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        train(call, opt, rank, range(2))
        torch.manual_seed(1)
        plain = MLP()
        fresh = zero.shard(MLP(), stage=stage)
        fresh.load_state_dict(_as_sharded(plain, fresh))
        model.load_state_dict({k: v.clone() for k, v in fresh.state_dict().items()}, assign=True)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        ours, theirs = call(x), plain(x)
        if not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
            errors.append(f"stage {stage}: the assigned weights are not those that compute")
        ours.sum().backward()
        theirs.sum().backward()
        average_gradients(plain)
        for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if p.grad is None or not torch.allclose(
                local(p.grad), part(q.grad, p.grad), rtol=1e-4, atol=1e-5
            ):
                errors.append(f"stage {stage}: gradient of assigned {n}")
    return errors


def _as_sharded(plain: nn.Module, like: nn.Module) -> dict[str, Any]:
    want = plain.state_dict()
    out = {}
    for key, value in like.state_dict().items():
        rows = part(want[key], value).clone()
        out[key] = DTensor.from_local(rows, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()) if isinstance(value, DTensor) else rows  # fmt: skip
    return out


def assigned_rows_move_once(rank: int, world: int) -> list[str]:
    """An assigned shard has no room for the padding with which it is sent: it gets that once, and not at every call."""
    torch.manual_seed(0)
    model = zero.shard(nn.Linear(4, 7), compute="aten", transport="c10d")
    call = torch.compile(model, backend="zero")
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    opt, errors = torch.optim.SGD(model.parameters(), lr=0.1), []
    plain = nn.Linear(4, 7)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    places = set()
    for _ in range(2):
        plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        out = call(x)
        if not torch.allclose(out, plain(x)):
            errors.append("other weights compute than those at rest")
        out.sum().backward()
        opt.step()
        rows = model.weight.to_local()
        places.add(rows.data_ptr())
        if rows.untyped_storage().nbytes() < 4 * 4 * rows.itemsize:
            errors.append(f"{tuple(rows.shape)} rows have no padding")
    if len(places) != 1:
        errors.append("moved again")
    return errors


@pytest.mark.parametrize(
    "body", [names_and_values, placements_and_rows, assign_while_compiled, assigned_rows_move_once]
)
@pytest.mark.timeout(600)
def test_state_dict(body: Any) -> None:
    for rank, errors in enumerate(run_ranks(body, 2, timeout=500.0)):
        assert not errors, f"rank {rank}:\n" + "\n".join(errors)


@pytest.mark.parametrize("overlap", [False, True])
def test_values_that_are_assigned_after_an_optimizer_was_made(overlap: bool) -> None:
    """They compute and are planned for, and the optimizer trains them: the parameters are the same objects."""
    torch.manual_seed(0)
    plain, model = MLP(), zero.shard(MLP(), stage=3)
    ours = zero.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9, overlap=overlap)
    params = list(model.parameters())
    model.load_state_dict(_as_sharded(plain, model), assign=True)
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    assert train(call, ours, 0, range(3)) == pytest.approx(train(plain, theirs, 0, range(3)), rel=1e-5)


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------

MAKERS = {"mlp": lambda: MLP(), "odd": lambda: FAMILIES["odd"].build()}


def _model(name: str, seed: int, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = zero.shard(MAKERS[name](), stage=stage)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(rank: int, world: int, folder: str) -> dict[str, Any]:
    out = {}
    for name in MAKERS:
        model, opt = _model(name, 0, 3)
        train(model, opt, rank, range(3))
        weights, states = get_state_dict(model, opt)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/{name}")
        out[name] = {k: whole(v) for k, v in model.state_dict().items()}
        out[name + ".exp_avg"] = {
            n: whole(opt.state[p]["exp_avg"]) for n, p in model.named_parameters() if p in opt.state
        }
        # What one more step on data that does not depend on the rank makes of it.
        out[name + ".next"] = train(model, opt, 0, range(5, 8))
    return out


def load(rank: int, world: int, folder: str, stage: int) -> dict[str, Any]:
    out = {}
    for name in MAKERS:
        model, opt = _model(name, 1, stage)
        weights, states = get_state_dict(model, opt)
        # get_state_dict makes states for every parameter; one that was never used had none to save.
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"model": weights, "optim": states}, checkpoint_id=f"{folder}/{name}", planner=planner)
        set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=states)
        out[name] = {k: whole(v) for k, v in model.state_dict().items()}
        out[name + ".exp_avg"] = {
            n: whole(opt.state[p]["exp_avg"]) for n, p in model.named_parameters() if p in opt.state
        }
        out[name + ".next"] = train(model, opt, 0, range(5, 8))
    return out


@pytest.mark.timeout(900)
def test_checkpoint_into_another_world_size(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, str(tmp_path), timeout=250.0)[0]
    for world, stage in ((2, 3), (4, 3), (1, 2)):
        for loaded in run_ranks(load, world, str(tmp_path), stage, timeout=250.0, group=world > 1):
            for key, want in saved.items():
                if key.endswith(".next"):
                    assert loaded[key] == pytest.approx(want, rel=1e-5), f"{key} on {world} ranks"
                    continue
                got = loaded[key]
                if key.endswith(".exp_avg"):
                    # A parameter that was never used has no state to save; loading may lay zeros there.
                    got = {k: v for k, v in got.items() if k in want}
                assert list(got) == list(want)
                for name, value in want.items():
                    assert torch.equal(got[name], value), f"{key} {name} on {world} ranks"


def from_fsdp2(rank: int, world: int, folder: str) -> list[str]:
    """A checkpoint of an FSDP2 model and its optimizer, loaded into a model that is sharded here."""
    torch.manual_seed(0)
    theirs = fully_shard(MLP(), mesh=init_device_mesh("cpu", (world,)))
    their_opt = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    train(theirs, their_opt, rank, range(3))
    weights, states = get_state_dict(theirs, their_opt)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    model, opt = _model("mlp", 1, 3)
    weights, states = get_state_dict(model, opt)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=states)
    want, got = train(theirs, their_opt, rank, range(3, 6)), train(model, opt, rank, range(3, 6))
    return [] if got == pytest.approx(want, rel=1e-5) else [f"losses after loading are {got}, FSDP2's {want}"]


def test_checkpoint_of_fsdp2(tmp_path: Path) -> None:
    assert run_ranks(from_fsdp2, 2, str(tmp_path), timeout=250.0) == [[], []]


# --- the model itself, pickled ----------------------------------------------------------------------------------


def _copied(model: nn.Module) -> dict[str, nn.Module]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(file, weights_only=False),
    }


def _go_on(call: nn.Module, rank: int) -> list[float]:
    return train(call, torch.optim.SGD(call.parameters(), lr=0.1), rank, range(2, 4))


def _clip_together(models: list[nn.Module]) -> None:
    """Norms over several models: torch wants their parameters on one mesh."""
    for model in models:
        model(torch.ones(1, 16)).sum().backward()
    torch.nn.utils.clip_grad_norm_([p for m in models for p in m.parameters()], 1.0)


def save_whole(rank: int, world: int, folder: str) -> tuple[list[str], list[float]]:
    """A model in training, and copies of it that go on as it does, each with parameters of its own."""
    errors = []
    torch.manual_seed(0)
    model = zero.shard(MLP(), compute="aten")
    call = torch.compile(model, backend="zero")
    train(call, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    if rank == 0:
        pickle.dumps(model)  # alone
    twins = _copied(model)
    torch.save(model, f"{folder}/{rank}.pt")
    torch.save(call, f"{folder}/compiled-{rank}.pt")
    want = _go_on(call, rank)
    for how, twin in twins.items():
        got = _go_on(torch.compile(twin, backend="zero"), rank)
        if got != pytest.approx(want, rel=1e-6):
            errors.append(f"{how}: losses {got}, expected {want}")
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            if not torch.equal(local(p), local(q)) or local(p).data_ptr() == local(q).data_ptr():
                errors.append(f"{how}: a parameter that differs, or that is the original's")
    _clip_together([model, *twins.values()])
    return errors, want


def load_whole(rank: int, world: int, folder: str) -> list[list[float]]:
    out = []
    fresh = zero.shard(MLP())
    for name in (f"{rank}", f"{rank}", f"compiled-{rank}"):
        model = torch.load(f"{folder}/{name}.pt", weights_only=False)
        call = model if "compiled" in name else torch.compile(model, backend="zero")
        out.append(_go_on(call, rank))
        _clip_together([fresh, model])
    return out


def load_another(rank: int, world: int, folder: str, said: str) -> None:
    file = Path(folder) / f"{(rank + 1) % world}.pt"
    with pytest.raises(ShardError, match=said + ".* save model.state_dict"):
        torch.load(file if file.exists() else Path(folder) / "0.pt", weights_only=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_pickled_whole(tmp_path: Path, world: int) -> None:
    folder, group = str(tmp_path), world > 1
    saved = run_ranks(save_whole, world, folder, timeout=200.0, group=group)
    for rank, (errors, _) in enumerate(saved):
        assert not errors, f"rank {rank}:\n" + "\n".join(errors)
    loaded = run_ranks(load_whole, world, folder, timeout=200.0, group=group)
    for (_, want), got in zip(saved, loaded, strict=True):
        assert got == [pytest.approx(want, rel=1e-6)] * 3
    if world == 1:
        run_ranks(load_another, 2, folder, "pickled in one process without a process group")
    else:
        run_ranks(load_another, 2, folder, "pickled on rank . of 2, and is loaded on rank . of 2")
        run_ranks(load_another, 1, folder, "pickled on rank 0 of 2, and is loaded on rank 0 of 1")
        run_ranks(load_another, 1, folder, "there is no process group", group=False)
