"""What one rank enters, all enter: models of odd parameters, anywhere at rest, are made, trained, saved and dropped, and
no rank waits for another one that does not come.

Ranks differ in all that they may: in the rows that they hold, in the order in which they drop what they made, in when
garbage is collected, and in models that one of them makes alone.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist.pool import Pool
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from standin import accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError

pytestmark = pytest.mark.dist

RANKS = 4
WIDTH = 3
WITHIN_S = 40.0  # an example, of which the slowest takes three or four seconds


# --- models ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Blocks one after the other; ``kinds`` names each: "linear", "head" (one row), "scale" (a scalar), "rows2" (fewer
    rows than ranks), "empty" (no elements), "norm", "tied" (the weight of the last "linear"). One with a "*" is frozen.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.blocks = nn.ModuleList()
        last = None
        for kind in kinds:
            name, frozen = kind.rstrip("*"), kind.endswith("*")
            if name == "tied":
                block: nn.Module = nn.Linear(WIDTH, WIDTH)
                if last is not None:
                    block.weight = last.weight
            else:
                block = _block(name)
            if name == "linear":
                last = block
            self.blocks.append(block)
            if frozen and not (name == "tied" and last is not None):
                block.requires_grad_(False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.beside: nn.Module | None = None

    def add_beside(self) -> None:
        torch.manual_seed(6)
        self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x) if self.beside is None else self.out(x) + self.beside(x)


class Rows(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(shape) + torch.rand(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value.sum() if self.value.numel() else x + self.value.sum()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.one(x)


def _block(name: str) -> nn.Module:
    if name == "linear":
        return nn.Linear(WIDTH, WIDTH)
    if name == "head":
        return Head()
    if name == "norm":
        return nn.LayerNorm(WIDTH)
    return Rows(*{"scale": (), "rows2": (2, WIDTH), "empty": (0, WIDTH)}[name])


@zero.module
class Partitioned(Net):
    pass


# --- examples ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """One model, from its making to its end.

    Args:
        mesh: which of :func:`_meshes`.
        apart: a CPU stands in an accelerator's place.
        fields: options of the shard, without ``nvme_dir``.
        how: "shard", "init", "module", "meta" (given storage and then values) or "assign" (values of a checkpoint).
        optimizer: "torch", "zero", "overlap" or "clip".
        compiled: else it runs eagerly.
        steps, accumulates: how many there are, and whether each has a backward under ``zero.no_sync``.
        saves: the state is saved with torch.distributed.checkpoint and read again.
        inner: a part is sharded by itself first; beside: a part stays plain.
        evaluates: before it is trained, on batches of which each rank has one of its own size.
        dropped: the rank that collects the garbage which was made while the model was; None: there is none.
        copied_by: a rank that makes a copy for itself; then all make one and train that.
    """

    kinds: tuple[str, ...]
    mesh: str
    apart: bool
    fields: tuple[tuple[str, Any], ...]
    how: str
    optimizer: str
    compiled: bool
    steps: int
    accumulates: bool
    saves: bool
    inner: bool
    beside: bool
    evaluates: bool
    dropped: int | None
    copied_by: int | None


@dataclass(frozen=True)
class Example:
    """Two models, one after the other; ``collects`` is the only rank that collects garbage between them, and what
    ranks drop they drop in orders of their own."""

    first: Model
    second: Model
    collects: int
    seed: int


KINDS = ("linear", "head", "scale", "rows2", "empty", "norm", "tied", "linear*", "head*", "rows2*", "scale*")
MESHES = ("all", "two", "three", "grid", "grid-shard-first", "tall", "wide", "row")


@st.composite
def models(draw: Any, compiles: bool) -> Model:
    apart = draw(st.sampled_from([False, False, True]))
    stage = draw(st.sampled_from([0, 1, 2, 3, 3, 3, 3]))
    fields: dict[str, Any] = {"stage": stage, "transport": draw(st.sampled_from(["auto", "c10d"]))}
    here, file = (None, "none"), "nvme"
    params, grads, states = None, None, None
    if stage == 3 and apart:
        params = draw(st.sampled_from([None, "host", file]))
        far = params is not None
        grads = draw(st.sampled_from([None, "host", file] if far else here))
        states = draw(st.sampled_from([None, "host", file] if far else [None, "none", "host", file]))
    elif stage == 3:
        params = draw(st.sampled_from([None, file, file]))
    if not apart:
        grads = draw(st.sampled_from([None, "none", file]))
        states = draw(st.sampled_from([None, "none", "host", file]))
    fields |= {"offload_params": params, "offload_grads": grads, "offload_optimizer": states}
    streamed = states in (file, "host") or params == file or grads == file
    if not streamed and draw(st.integers(0, 3)) == 0:  # the planner decides
        fields["device_rest_bytes"] = draw(st.sampled_from([0, 100, 300, 1000]))
        fields |= {"host_rest_bytes": 300} if apart else {}
        params = grads = states = None
        fields |= {"offload_params": None, "offload_grads": None, "offload_optimizer": None}
        streamed = True
    how = draw(st.sampled_from(["shard", "init", "init", "module", "meta", "assign"]))
    return Model(
        kinds=tuple(draw(st.lists(st.sampled_from(KINDS), min_size=0, max_size=4))),
        mesh=draw(st.sampled_from(MESHES)),
        apart=apart,
        fields=tuple((k, v) for k, v in fields.items() if v is not None),
        how=how,
        optimizer=draw(st.sampled_from(["zero", "clip", "overlap"] + ([] if streamed else ["torch"] * 2))),
        compiled=compiles and draw(st.integers(0, 5)) == 0,
        steps=draw(st.integers(0, 2)),
        accumulates=draw(st.sampled_from([False, False, True])),
        saves=draw(st.sampled_from([False, False, True])),
        inner=draw(st.booleans()) and how == "shard",
        beside=draw(st.sampled_from([False, False, True])),
        evaluates=draw(st.booleans()),
        dropped=draw(st.sampled_from([None, 0, 1])) if how in ("init", "module") else None,
        copied_by=draw(st.sampled_from([None, None, None, 0, 1])),
    )


def examples(compiles: bool = True) -> Any:
    return st.builds(
        Example, models(compiles), models(compiles), st.integers(0, RANKS - 1), st.integers(0, 1 << 16)
    )


# --- ranks -------------------------------------------------------------------------------------------------------

_made: dict[str, tuple[DeviceMesh | None, set[int]]] = {}


def _meshes(rank: int) -> dict[str, tuple[DeviceMesh | None, set[int]]]:
    """Meshes by name, with the ranks in them. Made once: groups last."""
    if not _made:
        every = set(range(RANKS))
        grid = torch.arange(RANKS).view(2, 2)
        names = ("replicate", "shard")
        _made["all"] = None, every
        for name, ranks in (("two", [0, 1]), ("three", [0, 1, 2])):
            _made[name] = DeviceMesh("cpu", ranks), set(ranks)
        _made["grid"] = DeviceMesh("cpu", grid, mesh_dim_names=names), every
        _made["grid-shard-first"] = DeviceMesh("cpu", grid, mesh_dim_names=names[::-1]), every
        _made["tall"] = DeviceMesh("cpu", grid.view(4, 1), mesh_dim_names=names), every
        _made["wide"] = DeviceMesh("cpu", torch.tensor([[0, 1, 2]]), mesh_dim_names=names), {0, 1, 2}
        row = _made["grid"][0]
        assert row is not None
        _made["row"] = row["shard"], every  # each half of the ranks by itself
        for one in range(RANKS):
            mesh = DeviceMesh("cpu", [one])
            if one == rank:
                _made["alone"] = mesh, {one}
    return _made


def _within(m: Model, folder: str) -> dict[str, Any]:
    fields = dict(m.fields)
    if "nvme" in fields.values() or "device_rest_bytes" in fields:
        fields["nvme_dir"] = folder
    return fields


def _build(m: Model, cls: type[Net], rank: int) -> Net:
    """Inside a construction scope; leaves garbage behind, which one rank collects before the scope ends."""
    model = cls(m.kinds)
    if m.dropped is not None:
        spare = Net(("head",))
        spare.itself = [spare]
        del spare
        if m.dropped == rank:
            gc.collect()
    return model


def _construct(m: Model, rank: int, folder: str) -> Net:
    fields = _within(m, folder) | {"mesh": _meshes(rank)[m.mesh][0]}
    torch.manual_seed(5)
    if m.how == "shard":
        model = Net(m.kinds)
        if m.inner:
            zero.shard(model.out, mesh=fields["mesh"])
        return zero.shard(model, **fields)
    if m.how == "init":
        with zero.init(**fields):
            return _build(m, Net, rank)
    if m.how == "module":
        with zero.init(**fields):
            return _build(m, Partitioned, rank)
    with torch.device("meta"):
        model = Net(m.kinds)
    zero.shard(model, **fields)
    values = _plain(m.kinds).state_dict()
    if m.how == "assign":
        model.load_state_dict(values, assign=True)
    else:
        with zero.init(**fields):
            model.to_empty(device="cpu")
        model.load_state_dict(values)
    return model


def _plain(kinds: tuple[str, ...]) -> Net:
    torch.manual_seed(5)
    return Net(kinds)


def _optimizer(m: Model, model: nn.Module) -> Any:
    params = [p for p in model.parameters() if p.requires_grad]
    if m.optimizer == "torch":
        return torch.optim.SGD(params, lr=0.1)
    more = {"clip": {"max_grad_norm": 0.5}, "overlap": {"overlap": True}}.get(m.optimizer, {})
    return zero.optimizer(torch.optim.AdamW, params, lr=0.1, foreach=False, **more)


def _train(m: Model, run: Any, model: nn.Module, optimizer: Any, managed: bool) -> None:
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    for _ in range(m.steps):
        if m.accumulates and m.optimizer != "overlap":
            with zero.no_sync(model) if managed else contextlib.nullcontext():
                run(x).square().mean().backward()
        run(x).square().mean().backward()
        if not managed and m.optimizer == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _expected(m: Model) -> dict[str, torch.Tensor]:
    plain = _plain(m.kinds)
    if m.beside:
        plain.add_beside()
    params = [p for p in plain.parameters() if p.requires_grad]
    kind: Any = torch.optim.SGD if m.optimizer == "torch" else torch.optim.AdamW
    _train(m, plain, plain, kind(params, lr=0.1, foreach=False), False)
    return dict(plain.state_dict())


def _differing(model: nn.Module, want: dict[str, torch.Tensor]) -> list[str]:
    with zero.gathered(model):
        return [
            name
            for name, value in model.state_dict().items()
            if not torch.allclose(value, want[name], atol=1e-5, rtol=1e-4)
        ]


def _live(m: Model, rank: int, folder: str, keep: list[Any]) -> list[str]:
    """The life of one model; what it leaves behind goes to ``keep``. Returns what is wrong."""
    mesh, ranks = _meshes(rank)[m.mesh]
    if rank not in ranks:
        # It has a life of its own, which is no concern of the others.
        with zero.init(mesh=_meshes(rank)["alone"][0]):
            keep.append(Net(m.kinds))
        return []
    model = _construct(m, rank, folder)
    keep.append(model)
    if m.beside:
        model.add_beside()
    if m.copied_by is not None:
        if m.copied_by == rank:
            keep.append(copy.deepcopy(model))
        model = copy.deepcopy(model)
        keep.append(model)
    torch._dynamo.reset()
    run = torch.compile(model, backend="zero", options={"compute": "aten"}) if m.compiled else model
    optimizer = _optimizer(m, model)
    keep += [run, optimizer]
    if m.evaluates:
        with torch.no_grad():
            run(torch.ones(2 + rank, WIDTH))
    _train(m, run, model, optimizer, True)
    want = _expected(m)
    wrong = _differing(model, want)
    if m.saves:
        group = None if len(ranks) == RANKS and m.mesh != "row" else mesh.get_group() if mesh.ndim == 1 else 0
        if group != 0:
            wrong += _saved(
                model, want, f"{folder}/{m.mesh}-{min(dist.get_process_group_ranks(group))}", group
            )
    with torch.no_grad(), zero.gathered(model, write=True):
        for param in model.parameters():
            param.fill_(0.5)
    return wrong + [n for n, p in model.named_parameters() if (_rows(p) != 0.5).any()]


def _rows(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _saved(model: nn.Module, want: dict[str, torch.Tensor], folder: str, group: Any) -> list[str]:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    return [f"{name} as it was saved" for name in _differing(model, want)]


@contextlib.contextmanager
def _collected_by(rank: int) -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def _drop(keep: list[Any], order: random.Random) -> None:
    """Let go of what a life has left, in an order of this rank's own, some of it in cycles that only a collection
    ends."""
    order.shuffle(keep)
    for thing in keep:
        if order.random() < 0.5:
            ring: list[Any] = [thing]
            ring.append(ring)
    while keep:
        keep.pop()


def run_example(rank: int, world: int, example: Example, folder: str) -> list[str]:
    order = random.Random(example.seed + rank)
    wrong = []
    with _collected_by(rank):
        for i, m in enumerate((example.first, example.second)):
            keep: list[Any] = []
            with accelerator(late=False) if m.apart else contextlib.nullcontext():
                with contextlib.suppress(
                    MemoryBudgetError
                ):  # of all ranks: one that goes on waits for the others
                    wrong += [f"model {i}: {w}" for w in _live(m, rank, folder, keep)]
                _drop(keep, order)
                if example.collects == rank:
                    gc.collect()
    return wrong


# --- tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool(RANKS)
    yield ranks
    ranks.close()


def _hold(pool: Pool, example: Example) -> None:
    with tempfile.TemporaryDirectory(prefix="zero-examples-") as folder:
        for rank, wrong in enumerate(pool.run(run_example, example, folder, timeout=WITHIN_S)):
            assert not wrong, f"rank {rank}: {wrong}"


_SETTINGS = dict(
    deadline=None,
    database=None,
    derandomize=True,
    # An example that hangs takes its whole time: to make it smaller would take as many times.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@settings(max_examples=30, **_SETTINGS)
@given(example=examples())
def test_no_rank_waits_for_one_that_does_not_come(pool, example):
    _hold(pool, example)


@pytest.mark.thorough
@settings(max_examples=1000, **_SETTINGS | {"derandomize": False})
@given(example=examples())
def test_nor_in_many_more(pool, example):
    _hold(pool, example)
