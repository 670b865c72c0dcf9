"""``zero.optimizer``: a torch optimizer whose states, gradients and parameters may rest on any tier.

The states of one group of shards at a time are read, updated by the real class with torch's own kernels, and written
back; reads, updates and writes of neighbouring groups overlap (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.2.2).
"""

from __future__ import annotations

import contextlib
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..alignment import block_aligned
from ..config import TIERS
from ..errors import GradientError, OptimizerError
from ..ir import ops
from ..ranks.call_handshake import meet, short_digest
from ..ranks.failing import MAKE
from ..ranks.failure_broadcast import tell
from ..ranks.group import Group, group_of
from ..ranks.peer_connections import working
from ..sharded.grads import AppliedGrad, check_reduced, used_up
from ..sharded.managed_parameters import sized_as_local
from ..sharded.sharded_model import ShardedModel
from ..storage.double_buffer import BUFFERS
from ..storage.stores import FileStore, region_of
from ..storage.streaming import Stream
from ..storage.writeback_buffers import OF_BUDGET
from .elementwise import States, declared, states_of
from .overlap import Overlap
from .telling import Telling, groups_of, tells
from .updates import Done, Entry, Piece, SubGroup, local_of, options_of, pieces_of, whole_blocks

# A sub-group is long enough for a disk to be at full speed through it, and short enough that the first read and the
# last write, which nothing overlaps, are a small part of a step.
SUB_GROUP_BYTES = 32 << 20
_NORM = "norm of the gradients in a step of zero.optimizer"


@working("zero.optimizer")
def optimizer(
    cls: type[Optimizer],
    model_or_params_or_groups: nn.Module | ParamsT,
    *,
    overlap: bool = False,
    max_grad_norm: float | None = None,
    **kw: object,
) -> StreamedOptimizer:
    """``cls`` over the parameters of a sharded model, with states where ``offload_optimizer`` says.

    The result is a ``torch.optim.Optimizer`` with the parameter groups, states and ``state_dict`` of ``cls``, and
    gives the same values in every bit. A parameter group may have its own ``"offload_optimizer"``.

    Args:
        cls: an elementwise optimizer: SGD, Adam, AdamW, Adagrad, RMSprop, or a class of your own.
        model_or_params_or_groups: a model (plain, sharded or compiled), parameters, or parameter groups.
        overlap: update each parameter when its gradient is there, while backward still runs. Between backward and
            ``step()`` ``.grad`` cannot be read.
        max_grad_norm: clip the norm of all gradients first, as ``torch.nn.utils.clip_grad_norm_`` does; the norm
            is then in ``grad_norm``.
        kw: arguments of ``cls``.

    Raises:
        OptimizerError: ``cls`` couples the elements of a tensor, or an argument does not fit.
        StorageError: there is no room for the states in ``nvme_dir``.
    """
    try:
        return _made(cls, model_or_params_or_groups, overlap, max_grad_norm, kw)
    except BaseException as error:
        tell(lambda: group_of(_sharded_models_of(model_or_params_or_groups)), error, MAKE)
        raise


def _made(
    cls: type[Optimizer],
    given: nn.Module | ParamsT,
    overlap: bool,
    max_grad_norm: float | None,
    kw: dict[str, object],
) -> StreamedOptimizer:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise OptimizerError(f"zero.optimizer takes a subclass of torch.optim.Optimizer first, not {cls!r}")
    if max_grad_norm is not None and not (isinstance(max_grad_norm, numbers.Real) and max_grad_norm > 0):
        raise OptimizerError(f"max_grad_norm must be a number above 0 or None, not {max_grad_norm!r}")
    if not isinstance(overlap, bool):
        raise OptimizerError(f"overlap must be True or False, not {overlap!r}")
    if kw.get("differentiable"):
        raise OptimizerError(
            "differentiable=True keeps a graph through the step, which zero.optimizer does not; leave it out"
        )
    declared(cls)
    return StreamedOptimizer(
        cls, given.parameters() if isinstance(given, nn.Module) else given, overlap, max_grad_norm, kw
    )


def _sharded_models_of(given: object) -> list[object]:
    """The sharded models of the parameters that an optimizer was to have, as far as they can still be read."""
    if isinstance(given, nn.Module):
        given = given.parameters()
    elif not isinstance(given, (list, tuple)):
        return []  # an iterator that was used up
    owners = _owners()
    groups = [g if isinstance(g, dict) else {"params": [g]} for g in given]
    found = (owners.get(id(p)) for g in groups for p in g.get("params", ()))
    return list(dict.fromkeys(f[0] for f in found if f is not None))


@dataclass
class _StatePlacement:
    """A parameter group whose states have tiers, and no memory yet.

    Args:
        entries: of parameters whose states are alike.
        needs: what is to lie in files, by sharded model.
        taken: sharded model, name, parameter, and bytes of its states with their tier.
        sub_group_bytes: what a sub-group of it streams, about.
    """

    group: dict[str, Any]
    entries: list[list[Entry]]
    needs: dict[ShardedModel, list[tuple[Entry, str, torch.dtype]]]
    taken: list[tuple[ShardedModel, str, torch.Tensor, tuple[int, str]]]
    sub_group_bytes: int


class StreamedOptimizer(Optimizer, Done, Telling):
    """See :func:`optimizer`, which makes it. ``cls`` is the class that it runs.

    What fails in its making or in a step on one rank is told to the others: their next call raises it.
    """

    streams = True  # for the guard against plain optimizers

    def __init__(
        self,
        cls: type[Optimizer],
        params: ParamsT,
        overlap: bool,
        max_grad_norm: float | None,
        kw: dict[str, Any],
    ) -> None:
        self.cls, self.kw, self.max_grad_norm = cls, kw, max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        self._sub_groups: list[SubGroup] = []
        self._overlap = Overlap(self) if overlap else None
        self._stores: list[FileStore] = []
        self._stream: Stream | None = None
        self._broken: str | None = None
        self._changed: list[tuple[dict[str, object], dict[str, object]]] = []
        self._states: dict[tuple[object, ...], States] = {}
        self._held: dict[tuple[str, str], tuple[int, str]] = {}
        self._new: list[dict[str, object]] | None = []  # groups that are placed together, while it is made
        # Sharded model (weakly), name and parameter.
        self._managed: list[tuple[weakref.ref[ShardedModel], str, torch.Tensor]] = []
        self._groups: list[Group] = []  # of each of these, all ranks of its model
        self.buffer_bytes = 0  # host memory of the buffers through which a step streams; taken by the first
        # The class's own defaults, from one of it over nothing that matters.
        template = cls([torch.zeros(1)], **kw)
        try:
            super().__init__(params, dict(template.defaults))
            given, self._new = self._new, None
            self._place_all(given)
        except BaseException:
            if self._overlap is not None:
                self._overlap.end()  # whoever holds the error holds this object too
            raise
        del template
        weakref.finalize(self, _close, self._stores)

    def __repr__(self) -> str:
        return f"zero.optimizer of {super().__repr__().replace(type(self).__name__, self.cls.__name__, 1)}"

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        raise OptimizerError(
            "zero.optimizer cannot be copied or pickled, since its states may lie in files; save its state_dict()"
        )

    # Placement ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """As in torch; the states of the group are placed at once, and room for them is checked.

        Raises:
            OptimizerError: an unknown tier, or states in files for parameters of no sharded model.
            StorageError: no room.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self._new is not None:
            self._new.append(group)
            return
        try:
            self._place_all([group])
        except BaseException:
            self.param_groups.pop()
            raise

    def _place_all(self, groups: Sequence[dict[str, object]]) -> None:
        """Give the states of ``groups`` a place: one file for all of a model's, since each takes descriptors."""
        sub_groups, stores = list(self._sub_groups), len(self._stores)
        try:
            placed = [self._placed(group) for group in groups]
            needs: dict[ShardedModel, list[tuple[Entry, str, torch.dtype]]] = {}
            for one in placed:
                for sharded_model, wanted in one.needs.items():
                    needs.setdefault(sharded_model, []).extend(wanted)
            for sharded_model, wanted in needs.items():
                self._allocate(sharded_model, wanted)
            for one in placed:
                self._adopt(one)
        except BaseException as error:
            self.tell(error, MAKE)
            self._sub_groups = sub_groups
            for store in self._stores[stores:]:
                store.remove()
            del self._stores[stores:]
            raise
        for sharded_model, name, param, held in (t for one in placed for t in one.taken):
            self._held[sharded_model.key, name] = held
            self._managed.append((weakref.ref(sharded_model), name, param))
            self._groups.append(sharded_model.group.everyone)
            sharded_model.optimizers[name] = self
            sharded_model.count_claim()

    def _placed(self, group: dict[str, Any]) -> _StatePlacement:
        if self._overlap is not None:
            self._overlap.check_free(group["params"])
        owners = _owners()
        for model in {owners[id(p)][0] for p in group["params"] if id(p) in owners}:
            model.gradients.make_room_for_trained()
        names = group.get("param_names") or [None] * len(group["params"])
        entries: dict[tuple[object, ...], list[Entry]] = {}
        needs: dict[ShardedModel, list[tuple[Entry, str, torch.dtype]]] = {}
        taken: list[tuple[ShardedModel, str, torch.Tensor, tuple[int, str]]] = []
        seen: set[int] = set()
        for param, given in zip(group["params"], names, strict=True):
            sharded_model, name = owners.get(id(param), (None, given or "a parameter"))
            if id(param) in seen:
                raise OptimizerError(f"a parameter group has {name} twice; give each parameter once")
            seen.add(id(param))
            tier = tier_of(group, sharded_model, name, param.requires_grad)
            local = local_of(param)
            states = self._states_of(group, local)
            entry = Entry(param, name, tier, {}, {})
            if region_of(local) is not None:
                entry.streamed["param"] = local.element_size()
            if sharded_model is not None and sharded_model.tiers.placed.tier("grads", name) == "nvme":
                entry.streamed["grad"] = local.element_size()
            if sharded_model is not None:
                nbytes = local.numel() * sum(d.itemsize for d in states.tensors.values())
                rests = "host" if tier == "none" and sharded_model.tiers.on_host(name) else tier
                taken.append((sharded_model, name, param, (nbytes, rests)))
            for key, dtype in states.tensors.items():
                if tier == "nvme" and local.numel():
                    assert sharded_model is not None  # as `tier_of` has made sure
                    needs.setdefault(sharded_model, []).append((entry, key, dtype))
                if tier != "none":
                    entry.streamed[key] = dtype.itemsize
            entries.setdefault((states.eager, *states.tensors.items()), []).append(entry)
        most = sub_group_bytes(owners[id(p)][0] for p in group["params"] if id(p) in owners)
        return _StatePlacement(group, list(entries.values()), needs, taken, most)

    def _adopt(self, placed: _StatePlacement) -> None:
        group, most = placed.group, placed.sub_group_bytes
        new = [
            SubGroup(
                self.cls, self.kw, group, self._states_of(group, local_of(pieces[0].entry.param)), pieces
            )
            for alike in placed.entries
            for pieces in sub_groups_of(alike, self._overlap is not None or not group.get("fused"), most)
        ]
        self._sub_groups += new
        self._measure()
        if any(sub_group.states.eager for sub_group in new):
            self._begin([sub_group for sub_group in new if sub_group.states.eager])
        if self._overlap is not None:
            self._overlap.watch(new)

    def place_found(self) -> None:
        """Give states a place that there were not when the optimizer was made.

        Raises:
            StorageError: no room; they stay in memory then.
        """
        found = [(sub_group, *f) for sub_group in self._sub_groups for f in sub_group.found(self.state)]
        if not found:
            return
        # A group has one set of options, and a scalar does not tell which of its states are of its shape.
        tensors: dict[int, dict[str, torch.dtype]] = {}
        for sub_group, _, key, dtype in found:
            tensors.setdefault(id(sub_group.group), {})[key] = dtype
        for sub_group in self._sub_groups:
            sub_group.keep(tensors.get(id(sub_group.group), {}))
        owners = _owners()
        placed = []
        needs: dict[ShardedModel, list[tuple[Entry, str, torch.dtype]]] = {}
        for _, piece, key, dtype in found:
            entry = piece.entry
            sharded_model, name = owners.get(id(entry.param), (None, ""))
            if sharded_model is None or not (piece.whole or piece.start == 0):
                continue
            placed.append((sharded_model, name, piece, key, dtype))
            if entry.tier == "nvme" and local_of(entry.param).numel():
                needs.setdefault(sharded_model, []).append((entry, key, dtype))
        for sharded_model, wanted in needs.items():
            self._allocate(sharded_model, wanted)
        # Not before: what has found no room is found again.
        for sharded_model, name, piece, key, dtype in placed:
            nbytes, rests = self._held[sharded_model.key, name]
            self._held[sharded_model.key, name] = (
                nbytes + local_of(piece.entry.param).numel() * dtype.itemsize,
                rests,
            )
            sharded_model.count_claim()
            if piece.entry.tier != "none" and whole_blocks(piece, dtype):
                piece.entry.streamed[key] = dtype.itemsize
        self._measure()

    def _measure(self) -> None:
        self.buffer_bytes = BUFFERS * max((u.nbytes for u in self._sub_groups), default=0)

    @property
    def sub_groups(self) -> Sequence[SubGroup]:
        """What a step updates, in order."""
        return self._sub_groups

    @property
    def early(self) -> bool:
        """Whether updates run while backward does: clipping waits for the norm of all gradients."""
        return self._overlap is not None and self.max_grad_norm is None

    def held(self, owner: str, name: str) -> tuple[int, str]:
        """Bytes of the states of a parameter of the sharded model ``owner`` on this rank, and the tier on which they
        rest."""
        return self._held[owner, name]

    def _check_current(self) -> None:
        """Raise where a parameter was replaced by one that this optimizer does not have: it would stay as it is.

        Raises:
            OptimizerError: naming it.
        """
        mine = {id(param) for _, _, param in self._managed}
        for ref, name, _ in self._managed:
            sharded_model = ref()
            now = sharded_model.find(name) if sharded_model is not None else None
            if now is not None and now.requires_grad and id(now) not in mine:
                raise OptimizerError(
                    f"parameter {name} was replaced after zero.optimizer was made (load_state_dict(assign=True), or an "
                    "assignment to the module), and this optimizer holds the one before; make the optimizer after that"
                )

    def link_groups(self) -> None:
        """Units belong to the groups that their parameters are in now: schedulers and users write to these, and may
        have put other dictionaries in place of the first ones.

        Raises:
            OptimizerError: a parameter was put into another group, taken out of its own, or into one by hand.
        """
        groups = {id(p): g for g in self.param_groups for p in g["params"]}
        entries = {id(p.entry.param): p.entry for sub_group in self._sub_groups for p in sub_group.pieces}
        moved = next((e.name for i, e in entries.items() if i not in groups), None)
        for sub_group in self._sub_groups if moved is None else ():
            sub_group.group = groups[id(sub_group.params[0])]
            moved = moved or next(
                (p.entry.name for p in sub_group.pieces if groups[id(p.entry.param)] is not sub_group.group),
                None,
            )
        if moved is None and len(groups) > len(entries):
            moved = next(
                f"of shape {list(p.shape)}"
                for g in self.param_groups
                for p in g["params"]
                if id(p) not in entries
            )
        if moved is not None:
            raise OptimizerError(
                f"parameter {moved} was put into or taken out of a parameter group after zero.optimizer was made; give "
                "new ones to add_param_group, stop others with requires_grad_(False), or make the optimizer anew"
            )

    def _states_of(self, group: dict[str, object], local: torch.Tensor) -> States:
        if not (local.is_floating_point() or local.is_complex()):
            return States({}, False)  # it never has a gradient
        options = options_of(group)
        key = (repr(options), local.dtype, local.dim(), local.device)
        if key not in self._states:
            self._states[key] = states_of(self.cls, self.kw, options, local)
        return self._states[key]

    def _allocate(self, sharded_model: ShardedModel, wanted: list[tuple[Entry, str, torch.dtype]]) -> None:
        def nbytes(entry: Entry, dtype: torch.dtype) -> int:
            return block_aligned(local_of(entry.param).numel() * dtype.itemsize)

        store = sharded_model.storage.nvme().store(
            "optimizer states", sum(nbytes(e, d) for e, _, d in wanted)
        )
        self._stores.append(store)
        for entry, key, dtype in wanted:
            local = local_of(entry.param)
            entry.regions[key] = store.allocate(f"{key} of {entry.name}", local.shape, dtype)

    def _peers(self) -> list[Group]:
        params = [p for g in self.param_groups for p in g["params"]]
        owners = _owners()
        placing = {owners[id(p)][0] for p in params if id(p) in owners}  # while it is made
        return groups_of(placing | self._sharded_models(), params)

    def _sharded_models(self) -> set[ShardedModel]:
        """The sharded models whose parameters it has."""
        return {sharded_model for ref, _, _ in self._managed if (sharded_model := ref()) is not None}

    # Steps -------------------------------------------------------------------------------------------------

    @tells
    @Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient, as ``cls.step`` would.

        Raises:
            OptimizerError: a parameter was replaced since the optimizer was made.
            GradientError: gradients wait for their reduction.
            StorageError: a transfer failed; the parameters may then be half updated, and later steps raise.
            RankMismatchError: with ``max_grad_norm``, ranks are in different calls.
            ZeroError: with ``max_grad_norm``, of a rank that failed; it names the rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad(), self._known_to_peers():
                loss = closure()
        self.check_whole()
        self._check_current()
        self.link_groups()
        self.place_found()
        if self._overlap is not None:
            self._overlap.check_ended()
        for group in self.param_groups:
            check_reduced(group["params"])
            if self._overlap is None and any(type(p.grad) is AppliedGrad for p in group["params"]):
                raise used_up()  # by another optimizer
        self._run(self._sub_groups, self._clip())
        if self._overlap is not None:
            self._overlap.finish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.

        Raises:
            GradientError: ``overlap=True`` has updated parameters with these gradients; call ``step()`` first.
        """
        if self._overlap is not None and self._broken is None:
            self._overlap.check_stepped()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def feed(self, sub_group: SubGroup) -> None:
        """Begin the update of a sub-group whose gradients are final (``overlap=True``)."""
        with self._whole():
            job = sub_group.job(self.state, self)
            if job is not None:
                self._ready().feed(job)
                self._ready().admit()  # gradients that wait for a buffer would pile up where the disk is slower

    def receive(self, finish: Callable[[], None]) -> None:
        """Wait until gradients are in their files: where one is not, some parameters are updated and others not."""
        with self._whole():
            finish()

    @torch.no_grad()
    def complete(self) -> None:
        """End what was fed, at the end of a backward: until ``step()`` parameters and states are the caller's, who may
        read them, load others or add a group."""
        with self._whole():
            if self._stream is not None:
                self._stream.drain()

    def give_up(self) -> None:
        """Give up what was fed and has not ended."""
        if self._stream is not None:
            self._stream.forget()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # What torch.amp.GradScaler.step asks first. Gradients that are used up were never unscaled.
        if self._overlap is not None:
            raise GradientError(
                "torch.amp.GradScaler scales gradients until step(), and zero.optimizer(overlap=True) uses them "
                "before; leave overlap out, or train in bfloat16, which needs no scaling"
            )
        return False

    def _clip(self) -> torch.Tensor | None:
        """First phase of clipping: the norm; and what gradients are to be multiplied by."""
        if self.max_grad_norm is None:
            return None
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        # Which of them there are decides what the norm sends: a rank without any would leave its peers alone.
        kinds: dict[int, set[str]] = {}
        for (_, _, param), group in zip(self._managed, self._groups, strict=True):
            if isinstance(grad := param.grad, DTensor):
                kind = f"there are gradients {grad.placements} on a mesh of {tuple(grad.device_mesh.shape)}"
                kinds.setdefault(id(group.pg), set()).add(kind)
        with self._known_to_peers():
            for sharded_model in self._sharded_models():
                sharded_model.protocol.check_whole()
            # The ranks of all models whose parameters it has, whether a model has been collected on this one or not.
            for key, group in {id(g.pg): g for g in self._groups if not g.one_rank}.items():
                found = sorted(kinds.get(key, ())) or ["there are no gradients of sharded parameters"]
                text = "\n".join([_NORM, *found])
                meet(group, short_digest(text), lambda text=text: text, _NORM)  # type: ignore[misc]
        # DTensor adds no norms of different meshes, nor plain ones.
        alike: dict[DeviceMesh | None, list[torch.Tensor]] = {}
        for grad in grads:
            alike.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
        norms = [torch.nn.utils.get_total_norm(given) for given in alike.values() or [[]]]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        self.grad_norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
        return torch.clamp(self.max_grad_norm / (self.grad_norm + 1e-6), max=1.0)

    def _begin(self, sub_groups: Iterable[SubGroup]) -> None:
        with torch.no_grad():
            self._run(sub_groups, None, begin=True)

    def _run(self, sub_groups: Iterable[SubGroup], factor: torch.Tensor | None, begin: bool = False) -> None:
        with self._whole():
            stream = self._ready()
            for sub_group in sub_groups:
                job = sub_group.job(self.state, self, factor, begin)
                if job is not None:
                    stream.feed(job)
            stream.drain()
        changed, self._changed = self._changed, []
        for group, options in changed:
            group.update(options)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What breaks off inside leaves parameters and states of different steps: later calls say so.

        Raises:
            OptimizerError: an earlier call broke off.
        """
        self.check_whole()
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._changed.clear()
            self.give_up()
            raise

    def break_off(self, reason: str) -> None:
        """What was begun cannot be ended.

        Raises:
            OptimizerError: always, now and in later steps.
        """
        with self._whole():
            raise OptimizerError(reason)

    def check_whole(self) -> None:
        """Raise where an earlier step broke off.

        Raises:
            OptimizerError: with its reason.
        """
        if self._broken is not None:
            raise OptimizerError(
                f"an earlier step of this optimizer broke off, and parameters may be half updated ({self._broken}); "
                "load the state_dict of model and optimizer from a checkpoint"
            )

    def _ready(self) -> Stream:
        need = max((u.nbytes for u in self._sub_groups), default=0)
        if self._stream is None or self._stream.nbytes < need:
            self._stream = Stream(need, BUFFERS)
        return self._stream

    def mark_written(self, param: torch.Tensor) -> None:
        """An update has written a parameter, past autograd and past the handle of its file."""
        torch.autograd.graph.increment_version(param)  # a backward of an earlier forward is told
        if (region := region_of(local_of(param))) is not None:
            region.store.written(region)

    def change_options(self, group: dict[str, object], changed: dict[str, object]) -> None:
        """The class has changed options of a group in its step; they hold from the next one on."""
        if changed and not any(g is group for g, _ in self._changed):
            self._changed.append((group, changed))

    # States ------------------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        broken = self._broken is not None or (self._overlap is not None and self._overlap.broke_off)
        if broken:
            self.give_up()  # what a backward had begun would write over what is loaded
        # The class itself completes what an older torch has saved, in place: options that are new since, and counts of
        # steps that are tensors now.
        self.cls([torch.zeros(1)], **self.kw).__setstate__(state)
        # load_state_dict comes with a new list. The old list goes on, with what is in the new one: an optimizer that
        # this one replaced has it too, and schedulers of that optimizer go on with the groups that were loaded.
        held = self.param_groups
        super().__setstate__(state)
        held[:] = self.param_groups
        self.param_groups = held
        self.link_groups()  # load_state_dict makes new ones
        self.place_found()
        for sub_group in self._sub_groups:
            with torch.no_grad():
                for piece in sub_group.pieces:
                    piece.entry.drop_grad()
                    piece.entry.place_states(self.state.get(piece.entry.param, {}), sub_group.states.tensors)
        if self._overlap is not None and (broken or self._overlap.due):
            self._overlap.finish()  # what was used up belongs to the step that broke off, or is left out
        self._broken = None


def _owners() -> dict[int, tuple[ShardedModel, str]]:
    """Sharded model and name of every managed parameter of this process, by identity."""
    found: dict[int, tuple[ShardedModel, str]] = {}
    for sharded_model in ops.owners():
        for name in sharded_model.places:
            param = sharded_model.find(name)
            if param is not None:
                found[id(param)] = (sharded_model, name)
    return found


def tier_of(
    group: Mapping[str, object], sharded_model: ShardedModel | None, name: str, trained: bool = True
) -> str:
    """The tier on which the states of a parameter rest.

    Args:
        trained: it is not frozen. What was frozen when the model was sharded, and is, gets no room for states.

    Raises:
        OptimizerError: it cannot.
    """
    asked = group.get("offload_optimizer")
    if asked is not None and asked not in TIERS:
        raise OptimizerError(
            f"offload_optimizer of a parameter group must be one of {', '.join(TIERS)}, not {asked!r}"
        )
    known = (
        sharded_model
        if sharded_model is not None and (trained or not sharded_model.tiers.placed.was_frozen(name))
        else None
    )
    tier = asked or (known.tiers.tier("optimizer", name) if known is not None else "none")
    if tier == "nvme" and sharded_model is None:
        raise OptimizerError(
            f'offload_optimizer="nvme" of a parameter group: {name} belongs to no sharded model, which would say '
            "nvme_dir; call zero.shard(model, nvme_dir=...) first"
        )
    if (
        tier == "host"
        and sharded_model is not None
        and (not sharded_model.tiers.apart or sharded_model.tiers.on_host(name))
    ):
        return "none"  # beside the parameter
    return str(tier)


def sub_group_bytes(sharded_models: Iterable[ShardedModel]) -> int:
    """Bytes that a sub-group streams, about, where parameters of these sharded models are updated."""
    given = [p.tiers.files_budget for p in sharded_models]
    return min(
        [SUB_GROUP_BYTES, *(budget // (OF_BUDGET * BUFFERS) for budget in given if budget is not None)]
    )


def sub_groups_of(entries: list[Entry], few: bool, limit_bytes: int) -> Iterable[list[Piece]]:
    """Pieces of ``entries`` together, up to the size of a sub-group, ``limit_bytes``.

    What rests where it is used passes through no buffer, and is updated in one call; unless with ``few`` parts of it
    are to be updated early, or torch's kernels are not fused ones and make temporaries as large as what they update.
    Before the last piece of a parameter there is none of another one: its pieces are updated in order, and an update of
    the first that waited for another gradient would be passed by the last.
    """
    pieces: list[Piece] = []
    nbytes = 0
    for entry in entries:
        for piece in pieces_of(entry, limit_bytes):
            more = max(piece.nbytes, sized_as_local(entry.param).nbytes if few else 0)
            apart = not piece.last and pieces and pieces[-1].entry is not entry
            if pieces and (apart or nbytes + more > limit_bytes):
                yield pieces
                pieces, nbytes = [], 0
            pieces.append(piece)
            nbytes += more
    if pieces:
        yield pieces


def _close(stores: list[FileStore]) -> None:
    for store in stores:
        store.close()
    stores.clear()
