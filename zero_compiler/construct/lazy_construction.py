"""A model under construction: who owns which parameter, when it is partitioned, and what becomes a sharded model.

torch tells us, by its public registration hooks, when a parameter or a module is registered. It does not tell
when an ``__init__`` returns; but until it does, its frame is on the stack of this thread. So before every torch
function that may allocate or write, the parameters of owners whose frame is gone are partitioned.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as nn_module

from ..config import Config
from ..errors import ShardError
from ..layout import Layout, layout_of
from ..params.modules import state_of, swap_classes
from ..params.optimizer_guards import guard_optimizers, mark_stale
from ..params.shard import SUCCESSOR, collect, contiguous_stride, given, inherit, install
from ..ranks import peer_connections
from ..ranks.agreement import agree, give_up
from ..ranks.call_handshake import begin
from ..ranks.failure_broadcast import tell, together
from ..ranks.group import Group
from ..ranks.mesh import make_group, ranks_of
from ..replicated.parameters import at_rest
from ..sharded import blocking_transfers
from ..sharded.model_identity import made_together
from ..sharded.sharded_model import ShardedModel, agree_on_processor
from ..storage import heap
from ..storage.stores import Nvme
from ..tensors.whole_parameters import describe_whole, stays_whole
from .unsharded_mode import KEY, Openings, PartitionedTensor, partitioned_of, rows_of, storage_uses

BUILDING, BUILD = "zero.init or zero.module", "build its part of the model"
# How many constructions there have been over the same ranks, which all make the same ones.
_numbers: Counter[tuple[int, ...]] = Counter()
_thread = threading.local()


@dataclass(frozen=True)
class Options:
    """Placement that a user gave; resolved when construction begins, since the process group may come later."""

    config: Config
    mesh: DeviceMesh | None
    device: torch.device | str | None
    given: bool


class Placement:
    """Where the modules of one construction scope are put.

    Args:
        frame: the frame that entered the scope: an ``__init__`` that began before it builds nothing of it.
    """

    def __init__(self, config: Config, group: Group, frame: types.FrameType | None) -> None:
        self.config, self.group, self.frame = config, group, frame
        # Modules that were met, and whether they were made in this scope as a whole. In order of meeting, which
        # is the same on every rank.
        self.met: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self.nvme: Nvme | None = None  # made when first needed; the models of the scope go on with it
        self._held = {"none": 0, "host": 0}  # bytes that were put on each tier

    def tier(self, layout: Layout, full: torch.Tensor) -> str:
        """Where the shard of the parameter ``full`` is to rest; asked once for each.

        Where the planner decides, which needs to know all parameters, what still fits the budgets is put into memory
        meanwhile. CPU ranks may move it to files later; rows of an accelerator stay where they are, so that there is
        room beside them for what belongs to them.
        """
        config, asked = self.config, self.config.offload_params
        apart = self.group.device.type != "cpu"
        if not layout.sharded:
            return "none"
        if asked is not None or config.device_rest_bytes is None or config.stage != 3:
            return asked if asked is not None and (apart or asked == "nvme") else "none"
        if full.is_meta or isinstance(full, FakeTensor):
            return "none"
        nbytes = layout.bytes_local()
        if apart and full.requires_grad:
            if "none" in (config.offload_grads, config.offload_optimizer):
                return "none"
            nbytes = 2 * nbytes + layout.chunk_numel * config.state_bytes
        room = {"none": config.device_rest_bytes, "host": (config.host_rest_bytes or 0) if apart else 0}
        for tier, limit in room.items():
            if self._held[tier] + nbytes <= limit:
                self._held[tier] += nbytes
                return tier
        return "nvme" if config.nvme_dir is not None else "none"

    def at_rest(self, tier: str, full: torch.Tensor) -> torch.device:
        """The device of the rows of the parameter ``full``."""
        if full.is_meta:
            return full.device
        return self.group.device if tier == "none" else torch.device("cpu")

    def chunk(
        self, layout: Layout, device: torch.device, full: torch.Tensor, what: str, filed: bool
    ) -> torch.Tensor:
        """Memory at rest for this rank's flat padded chunk of a parameter, or a place in a file: zeros."""
        if not filed:
            return torch.zeros(layout.chunk_numel, dtype=full.dtype, device=device)
        if self.nvme is None:
            assert self.config.nvme_dir is not None
            self.nvme = Nvme(
                self.config.nvme_dir,
                self.group.everyone.rank,
                self.config.nvme_keep,
                self.config.nvme_checksums,
            )
        return self.nvme.grow(what, (layout.chunk_numel,), full.dtype).tensor


@dataclass
class _Pending:
    """A parameter that is whole yet: its owner's ``__init__`` runs, or has just returned."""

    placement: Placement
    owner: nn.Module
    attribute: str
    frame: types.FrameType | None


@dataclass
class _Meetings:
    """Of the same ranks in one construction: its number among theirs; how often it has failed, and how often they have
    met since. All of them count alike."""

    number: int
    failed: int = 0
    met: int = 0

    @property
    def key(self) -> str:
        return f"construct/{self.number}/{self.failed}"


class Construction:
    """All nested construction scopes of one thread; the outermost makes it and ends it."""

    def __init__(self) -> None:
        self.placements: list[Placement] = []
        self.making: list[nn.Module] = []  # decorated modules whose __init__ runs
        self._pending: dict[tuple[int, str], _Pending] = {}
        self._roots: list[nn.Module] = []
        self._meetings: dict[tuple[int, ...], _Meetings] = {}  # of the ranks of each placement
        self._log: list[str] = []
        self._thread = threading.get_ident()
        self._mode = Openings(self.sweep, self._meet, lambda: [p.group for p in self.placements])
        self._handles: list[Any] = []
        self._apart = contextlib.ExitStack()

    def start(self) -> None:
        self._handles = [
            nn_module.register_module_parameter_registration_hook(self._on_parameter),
            nn_module.register_module_module_registration_hook(self._on_module),
        ]
        self._mode.__enter__()

    def enter(self, placement: Placement) -> None:
        self.placements.append(placement)
        ranks = placement.group.ranks
        if ranks not in self._meetings:
            self._meetings[ranks] = _Meetings(_numbers[ranks])
            _numbers[ranks] += 1
        if placement.config.nvme_dir is not None:
            self._apart.enter_context(heap.apart())  # full values are made one after the other, and dropped
        own = ("nvme_dir", "plan")  # each rank may have its own
        self._log += [f"{k} = {v}" for k, v in sorted(placement.config.to_dict().items()) if k not in own]

    def stop(self) -> None:
        """Leave no trace: neither hooks nor mode nor marks on tensors."""
        self._mode.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._mode.close()
        self._apart.close()
        for root in self._roots:
            for _, param in at_rest(root):
                param.__dict__.pop(KEY, None)

    # --- what torch tells ------------------------------------------------------------------------------------

    def _on_parameter(self, owner: nn.Module, attribute: str, param: nn.Parameter) -> Any:
        if threading.get_ident() != self._thread or param is None:
            return None
        with torch._C.DisableTorchFunction():
            self._pending.pop((id(owner), attribute), None)
            frame, inside = self._init_frame(owner)
            self._mark_met(owner, frame, inside)
            successor = param.__dict__.get(SUCCESSOR)
            if successor is not None:
                entry = partitioned_of(successor)
                if entry is not None and entry.shares(param):
                    return successor  # partitioned meanwhile; the caller kept the whole one
                del param.__dict__[
                    SUCCESSOR
                ]  # repointed (``set_``, which no mode sees): another parameter now
            if inside and not isinstance(param, DTensor):
                self._pend(owner, attribute, frame)
            self.sweep()
        return None

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if threading.get_ident() != self._thread or child is None:
            return
        with torch._C.DisableTorchFunction():
            frame, inside = self._init_frame(parent)
            self._mark_met(parent, frame, inside)
            # A module that copy.deepcopy made comes with parameters of which the other hook heard nothing. One
            # from before the scope is left as it is: rank 0 has its values.
            for module in child.modules():
                if self.placements[-1].met.get(module) or _has_partitioned(module):
                    for attribute, param in module._parameters.items():
                        if param is not None and not isinstance(param, DTensor):
                            if (id(module), attribute) not in self._pending:
                                self._pend(module, attribute, self._init_frame(module)[0])
            self.sweep()

    def _mark_met(self, module: nn.Module, frame: types.FrameType | None, inside: bool) -> None:
        if inside:
            met = self.placements[-1].met
            met[module] = met.get(module, False) or frame is not None

    def _pend(self, owner: nn.Module, attribute: str, frame: types.FrameType | None) -> None:
        self._pending[id(owner), attribute] = _Pending(self.placements[-1], owner, attribute, frame)

    def _init_frame(self, module: nn.Module) -> tuple[types.FrameType | None, bool]:
        """The running ``__init__`` of ``module``, if any, and whether it began inside the innermost scope.

        Frames are told by their code. Where two modules of one class are under construction the innermost is
        taken; if it was the outer one, its parameters are partitioned earlier, which changes no value.
        """
        code = getattr(inspect.unwrap(type(module).__init__), "__code__", None)
        inside = True
        for frame in _stack():
            if frame is self.placements[-1].frame:
                inside = False
            if frame.f_code is code:
                return frame, inside
        return None, True

    # --- partitioning ----------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Cut the parameters whose owners are done."""
        if self._pending:
            self._partition(self._done())
        self._mode.close_unused()

    def _done(self) -> list[_Pending]:
        """What waits for no ``__init__`` any more. Their frames are let go: a frame's locals may be large."""
        if any(p.frame is not None for p in self._pending.values()):
            alive = {id(f) for f in _stack()}
            for pending in self._pending.values():
                if pending.frame is not None and id(pending.frame) not in alive:
                    pending.frame = None
        return [p for p in self._pending.values() if p.frame is None]

    def _partition(self, done: list[_Pending]) -> None:
        finished = {id(p) for p in done}
        # One whole parameter may have several owners, made one inside the other: it is partitioned when all are done.
        waiting = {id(self._whole(p)) for p in self._pending.values() if id(p) not in finished}
        for pending in done:
            old = self._whole(pending)
            if old is None or isinstance(old, nn.parameter.UninitializedParameter) or stays_whole(old):
                del self._pending[id(pending.owner), pending.attribute]
            elif id(old) not in waiting:
                del self._pending[id(pending.owner), pending.attribute]
                self._partition_one(pending, old)

    def _whole(self, pending: _Pending) -> nn.Parameter | None:
        param = pending.owner._parameters.get(pending.attribute)
        return None if isinstance(param, DTensor) else param

    def _partition_one(self, pending: _Pending, old: nn.Parameter) -> None:
        owner, attribute = pending.owner, pending.attribute
        new = old.__dict__.get(SUCCESSOR)
        if new is None:
            what = f"parameter {type(owner).__name__}.{attribute}"
            self._log += [f"{what}: {list(old.shape)} {old.dtype}", *given({what: old})]
            new = self._shard_of(pending.placement, old, what)
            inherit(new, old)
            # Whoever kept the whole one and registers or optimises it later is led to the new one.
            old.__dict__[SUCCESSOR] = new
            mark_stale(old, attribute, "zero.shard")
        owner._parameters[attribute] = new
        flat = owner.__dict__.get("_flat_weights")
        if isinstance(flat, list):  # nn.RNNBase keeps a second list
            flat[:] = [new if w is old else w for w in flat]

    def _shard_of(self, placement: Placement, old: nn.Parameter, what: str) -> nn.Parameter:
        group = placement.group
        layout = layout_of(old, group.world, placement.config.stage)
        full = old.data  # not detach(): a view would keep its base alive
        stride = contiguous_stride(layout.shape) if full.is_contiguous() else tuple(full.stride())
        tier = placement.tier(layout, old)
        at_rest = placement.at_rest(tier, full)
        unshared = storage_uses(full) <= 2 and full.untyped_storage().nbytes() == full.numel() * full.itemsize
        filed = tier == "nvme" and not (full.is_meta or isinstance(full, FakeTensor))
        keep = (
            not filed
            and (group.world == 1 or not layout.sharded)
            and full.is_contiguous()
            and full.device == at_rest
            and unshared
        )
        if keep:
            local = full
        else:
            local = rows_of(layout, placement.chunk(layout, at_rest, full, what, filed), group.rank)
        entry = PartitionedTensor(group, layout, local, full.device, stride, what, filed)
        if not keep:
            self._mode.hold(entry, full)
        return entry.parameter(old.requires_grad)

    # --- what becomes of it ----------------------------------------------------------------------------------

    def finish(self, placement: Placement, root: nn.Module | None) -> None:
        """End a scope: partition what is left, and make a sharded model of every module that stands for itself.

        Args:
            root: the decorated module that the scope was opened for.
        """
        with torch._C.DisableTorchFunction():
            self._partition([p for p in self._pending.values() if p.placement is placement])
            self._mode.close_unused()
            if any(model is not root for model in self._tops(placement, root)):
                # What was made and dropped counts until it is collected, which may have happened on some ranks.
                gc.collect()
            for model in self._tops(placement, root):
                self._make_root(model, placement)

    def _tops(self, placement: Placement, root: nn.Module | None) -> list[nn.Module]:
        made = [m for m, whole in placement.met.items() if whole or self._all_ours(m, placement)]
        if root is not None:
            made = [root, *(m for m in made if m is not root)]
        inner = {id(sub) for m in made for sub in m.modules() if sub is not m}
        tops = [m for m in made if id(m) not in inner and state_of(m) is None]
        return [m for m in tops if m is root or any(True for _ in _unmanaged(m))]

    def _all_ours(self, module: nn.Module, placement: Placement) -> bool:
        return all(self._is_ours(p, placement) for p in _unmanaged(module))

    def _is_ours(self, param: torch.Tensor, placement: Placement) -> bool:
        entry = partitioned_of(param)
        return entry is not None and isinstance(param, DTensor) and _same(entry.group, placement.group)

    def _make_root(self, model: nn.Module, placement: Placement) -> None:
        group = placement.group
        with made_together(group):
            sharded_model = ShardedModel(group, placement.config)
            targets = collect(model, sharded_model, lambda param: self._is_ours(param, placement))
            said = [
                f"end of construction of {type(model).__name__}",
                sharded_model.protocol.describe(),
                *given({name: param for name, (param, _) in targets.items()}),
                *describe_whole(model),
                *(
                    f"parameter {name} is from before"
                    for name, (p, _) in targets.items()
                    if not _is_partitioned(p)
                ),
            ]
            self._agree(group, said)
        agree_on_processor(sharded_model)
        params = {name: param for name, (param, _) in targets.items()}
        sharded_model.tiers.place(
            sharded_model.params,
            params,
            sharded_model.hardware,
            {name: self._fixed_tier(sharded_model, param) for name, param in params.items()},
        )
        sharded_model.hardware = sharded_model.storage.choose_transport(sharded_model.hardware)
        sharded_model.storage.adopt_files(placement.nvme)
        sharded_model.storage.make_room(params, {name for name, param in params.items() if _is_filed(param)})
        for name, (param, places) in targets.items():
            entry = partitioned_of(param)
            if entry is None or not isinstance(param, DTensor):
                # From before the scope, or put in place behind torch's hooks: as zero.shard does.
                install(
                    sharded_model,
                    name,
                    param,
                    blocking_transfers.scatter_from_first(
                        group, sharded_model.params[name].layout, param, sharded_model.tiers.on_host(name)
                    ),
                    places,
                )
            elif entry.layout != sharded_model.params[name].layout:
                raise ShardError(
                    f"parameter {name} was partitioned with stage {3 if entry.layout.sharded else 0} by an inner scope "
                    "and is used in a model with another placement; give both the same options"
                )
            else:
                sharded_model.places[name] = places
                if entry.layout.sharded and (entry.has_values or type(entry.local) is torch.Tensor):
                    chunk = blocking_transfers.flat_chunk(entry.layout, entry.local).view(
                        entry.layout.padded_shape
                    )
                    entry.local = param._local_tensor = sharded_model.storage.place_chunk(name, chunk)[
                        : entry.layout.rows(group.rank)
                    ]
        sharded_model.storage.check_placed()
        swap_classes(model, sharded_model)
        sharded_model.installed()
        guard_optimizers()
        self._roots.append(model)

    def _fixed_tier(self, sharded_model: ShardedModel, param: torch.Tensor) -> str | None:
        """The tier where rows of a parameter stay: a file, or a side of an accelerator."""
        if _is_filed(param):
            return "nvme"
        entry = partitioned_of(param)
        if (
            entry is None
            or not entry.layout.sharded
            or entry.local.is_meta
            or isinstance(entry.local, FakeTensor)
        ):
            return None
        if sharded_model.config.device_rest_bytes is None or sharded_model.group.device.type == "cpu":
            return None
        return "host" if entry.local.device.type == "cpu" else "none"

    # --- agreement -------------------------------------------------------------------------------------------

    def _meet(self, group: Group, line: str) -> None:
        self._agree(group, [line, *self._log])
        self._log.clear()

    def _agree(self, group: Group, lines: list[str]) -> None:
        # One sequence of keys for reads and results: ranks that do not even agree in which it is find out.
        meetings = self._meetings[group.ranks]
        key = f"{meetings.key}/{meetings.met}"
        meetings.met += 1
        agree(group, key, "the model under construction", "\n".join(lines), f"{meetings.key}/failed")

    def fail(self, group: Group, error: BaseException) -> None:
        """This rank builds no further: the others would wait for it where they next agree."""
        meetings = self._meetings[group.ranks]
        give_up(group, f"{meetings.key}/failed", BUILD, error)
        # Whoever catches it and goes on does so on all ranks.
        meetings.failed, meetings.met = meetings.failed + 1, 0


def current() -> Construction | None:
    """The construction that this thread is in."""
    return getattr(_thread, "construction", None)


class Building:
    """Scope of construction: a context manager that joins the scope around it, or places on its own."""

    def __init__(self, options: Options, root: nn.Module | None = None) -> None:
        self._options, self._root = options, root
        self._construction: Construction | None = None
        self._placement: Placement | None = None
        self._outermost = False
        self._working: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def __enter__(self) -> None:
        construction = current()
        options = self._options
        if construction is not None and not options.given:
            return  # nothing of its own: part of what is being built around it
        with together(lambda: ranks_of(options.mesh), BUILDING):
            self._begin(construction, sys._getframe(1))
        if self._placement is not None:
            self._working = peer_connections.working(BUILDING)
            self._working.__enter__()

    def _begin(self, construction: Construction | None, frame: types.FrameType) -> None:
        options = self._options
        group = make_group(options.mesh, options.device)
        if group.tensor is not None:
            raise ShardError(
                "construction makes plain parameters, and tensor parallelism comes between it and zero.shard: build "
                "the model, call parallelize_module, then zero.shard with this mesh"
            )
        if construction is not None:
            around = construction.placements[-1]
            if around.config == options.config and _same(around.group, group):
                return
        else:
            construction = Construction()
            self._outermost = True
        begin(group, BUILDING)
        self._construction = construction
        self._placement = Placement(options.config, group, frame)
        if self._outermost:
            construction.start()
            _thread.construction = construction
        construction.enter(self._placement)
        if self._root is not None:
            construction.making.append(self._root)

    def __exit__(self, kind: object, value: Any, traceback: object) -> None:
        construction, placement = self._construction, self._placement
        if construction is None or placement is None:
            return
        self._construction = self._placement = None
        error: BaseException | None = value
        try:
            if error is None:
                construction.finish(placement, self._root)
        except BaseException as failed:
            error = failed
            raise
        finally:
            try:
                if error is not None:
                    construction.fail(placement.group, error)
                    tell(lambda: placement.group, error, BUILD)
                self._working.__exit__(type(error) if error is not None else None, error, None)
            finally:
                construction.placements.remove(placement)
                if self._root is not None:
                    construction.making.pop()
                if self._outermost:
                    _thread.construction = None
                    construction.stop()


def _stack() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _same(a: Group, b: Group) -> bool:
    return a is b or (a.mesh == b.mesh and a.device == b.device)


def _is_partitioned(param: torch.Tensor) -> bool:
    """Whether construction has partitioned it: else rank 0's values are sent around when its model is made."""
    return partitioned_of(param) is not None and isinstance(param, DTensor)


def _is_filed(param: torch.Tensor) -> bool:
    """Whether construction has made room in a file for the rows of a parameter: on all ranks or on none."""
    entry = partitioned_of(param)
    return entry is not None and entry.filed and _is_partitioned(param)


def _has_partitioned(module: nn.Module) -> bool:
    return any(p is not None and partitioned_of(p) is not None for p in module._parameters.values())


def _unmanaged(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of ``module`` that belong to no sharded model yet."""
    for sub in module.modules():
        if state_of(sub) is None:
            yield from (p for p in sub._parameters.values() if p is not None and not stays_whole(p))
