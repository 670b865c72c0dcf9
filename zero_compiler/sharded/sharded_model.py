"""A sharded model: its ranks and its parameters, how these are looked up, and the parts that the rest of it is in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypedDict
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..config import Config
from ..cost import hardware, processors
from ..cost.hardware import HardwareSpec
from ..cost.placed_hardware import over_c10d
from ..errors import ShardError
from ..ir import ops
from ..ranges import ranged
from ..ranks.agreement import decide
from ..ranks.group import Group
from ..ranks.transport import COPIED, LOCAL, Transport
from ..storage import heap
from ..storage.resident_memory import Footprint
from ..storage.stores import watch
from ..tensors.full_weight import FULL, Read
from . import blocking_transfers, grads, parameter_errors
from .agreed_choices import AgreedChoices
from .call_protocol import CallProtocol
from .chunk_storage import ChunkStorage
from .gather_wire import wire_of
from .gradient_storage import GradientStorage
from .managed_parameters import ParamInfo, Places, find, local_of, standing
from .model_identity import ModelIdentity
from .rest_tiers import RestTiers
from .write_detector import Copies

# Of a parameter: that, its local tensor, the address of it, and all places.
AtRest = tuple[DTensor, torch.Tensor, int, Places]

_keys = itertools.count()  # not the serial, which another process may have given out too


class CompiledOnce(Protocol):
    """What a module knows of how often Dynamo has compiled what it calls (see `recompile_limit.py`)."""

    full: bool


class Scope:
    """What a sharded model and the parts of it that were sharded before have in common: whether a forward is running.
    Inside one, a managed attribute is the full weight.

    ``calls``: the module that was called from outside, while its forward runs. It is a list that changes, and no
    attribute that is set: where a compiled forward registers a hook on a tensor that it has computed, Dynamo forgets
    what is set behind that (torch 2.13), and keeps how lists change.

    ``read``: weights that eager code has read in calls which run; ``copies``: what it was given as weights, where a
    forward runs without compile; ``compiled_reads``: by id, parameters whose weights compiled frames of such a forward
    have read. ``members``: the sharded models. ``changes`` counts what these learn of frames and optimizers.

    For calls past Dynamo's limit (`recompile_limit.py`). ``compile``: compiles a function once more, as the backend
    was asked to compile the model; ``again``: what it has made, by the module that is called; ``entered``: while a
    call runs, the state of the module at which its compiled code begins; ``begun``: that of the module that was
    called from outside, with the code of its forward, which may be compiled alone; ``eager``: a call runs that is not
    compiled any more; ``limit``: Dynamo's, while a call is compiled past it; ``said``: what messages about ranks that
    do not meet repeat of such calls; ``eager_said``, ``outside_said``: whether the user was told of eager ones, and of
    eager code that a memory budget does not count.
    """

    def __init__(self) -> None:
        self.compile: Callable[[object], Callable[..., object]] | None = None
        self.again: WeakKeyDictionary[nn.Module, Callable[..., object]] = WeakKeyDictionary()
        self.entered: CompiledOnce | None = None
        self.begun: tuple[CompiledOnce | None, object] = None, None
        self.eager = False
        self.limit: int | None = None
        self.said = ""
        self.eager_said = self.outside_said = False
        self.calls: list[Any] = []
        self.copies: Copies | None = None
        self.read: Read = {}
        self.compiled_reads: set[int] = set()
        self.members: WeakSet[ShardedModel] = WeakSet()
        self.changes = 0

    def refuse_lost_hooks(self) -> None:
        """A hook that eager code has registered on a weight is given the gradient of what eager code computes with it.

        Raises:
            ShardError: a compiled frame of the same forward reads that weight as well.
        """
        if not self.compiled_reads:
            return
        for param, _, _, full in self.read.values():
            if full._backward_hooks and id(param) in self.compiled_reads:
                names = (n for model in self.members for n in model.places if model.find(n) is param)
                raise ShardError(parameter_errors.hooked(next(names)))

    def compare_copies(self, kept: int) -> None:
        """A call of a module ends: see whether what it has read is unchanged, but for the first ``kept`` weights, which
        calls around it have read."""
        if self.copies is not None:
            self.copies.compare(full for *_, full in list(self.read.values())[kept:])

    def told(self, text: str) -> str:
        """The description of a call, for ranks that are in another one."""
        head, *rest = text.split("\n")
        return "\n".join([f"{head} ({self.said})" if self.said else head, *rest])

    def __reduce__(self) -> tuple[type[Scope], tuple[()]]:
        return Scope, ()  # nothing of it is a copy's


class _Copied(TypedDict):
    """What a copy of a sharded model has of it; all else it makes for itself."""

    identity: ModelIdentity
    group: Group
    config: Config
    hardware: HardwareSpec
    tiers: RestTiers
    agreed: AgreedChoices
    protocol: CallProtocol
    params: dict[str, ParamInfo]
    places: dict[str, Places]
    scope: Scope
    sync: bool
    may_reduce_each: bool
    writes: bool
    opened: bool


class ShardedModel:
    """One sharded module; shared by all its submodules. Made by :func:`~zero_compiler.params.shard.shard`.

    What it has beside its parameters is in parts, and who needs one of these takes it: ``identity``, ``tiers``,
    ``storage``, ``gradients``, ``agreed``, ``protocol``.

    Args:
        params: what is known of each parameter, by its first qualified name.
        places: where it stands, in each module to which it is tied.
        scope: of the model that it is a part of.
        sync: False inside ``zero.no_sync``.
        may_reduce_each: what asks for no reduction is content with one for each backward: a library's accumulation.
        writes: a class of the model has code that may write to weights in place (see `write_detector.py`).
        opened: inside ``zero.gathered`` parameters are whole.
    """

    def __init__(self, group: Group, config: Config, scope: Scope | None = None) -> None:
        identity = ModelIdentity(group)  # first: what fails on one rank below has not kept it from counting
        tiers, spec = RestTiers(group, config), hardware.load(config.hardware, processor="")
        params: dict[str, ParamInfo] = {}
        made = _Copied(
            identity=identity,
            group=group,
            config=config,
            hardware=spec,
            tiers=tiers,
            agreed=AgreedChoices(),
            protocol=CallProtocol(identity, group, config, spec, params),
            params=params,
            places={},
            scope=scope or Scope(),
            sync=True,
            may_reduce_each=False,
            writes=False,
            opened=False,
        )
        self._begin(made, LOCAL)  # until the parameters are known

    def _begin(self, made: _Copied, transport: Transport) -> None:
        self.identity = made["identity"]
        self.group = made["group"]
        self.config = made["config"]
        self.hardware = made["hardware"]
        self.tiers = made["tiers"]
        self.agreed = made["agreed"]
        self.protocol = made["protocol"]
        self.params = made["params"]
        self.places = made["places"]
        self.sync = made["sync"]
        self.may_reduce_each = made["may_reduce_each"]
        self.writes = made["writes"]
        self.opened = made["opened"]
        self.key = f"m{next(_keys)}"
        self.runtime: Any = None  # made by the first compile; dies with this
        self.frames: list[Any] = []  # compiled ones, for the report
        self.compilers: dict[object, object] = {}
        # Flat chunks by name, with where they were found.
        self.at_rest: dict[str, tuple[AtRest, torch.Tensor]] = {}
        # The same of those that are asked for together.
        self.at_rest_together: dict[tuple[str, ...], tuple[list[AtRest], list[torch.Tensor]]] = {}
        # Who updates a parameter while backward runs, by its name; and forwards whose backward may still read weights.
        self.sinks: WeakValueDictionary[str, grads.Sink] = WeakValueDictionary()
        self.calls: WeakSet[grads.ForwardCall] = WeakSet()
        # Backwards, by autograd's number: at whose end waiting gradients are reduced; in which accumulation was
        # looked at.
        self.flush_queued: int | None = None
        self.looked: int | None = None
        # The zero.optimizer of a parameter, by its name: it knows how many bytes the states take.
        self.optimizers: WeakValueDictionary[str, Any] = WeakValueDictionary()
        # What the process has beside the plan; None: not measured here, as of a copy or of what is planned only.
        self.footprint: Footprint | None = None
        self.taken = 0  # how often an optimizer took a parameter, maybe from another one
        self.storage = ChunkStorage(
            self.identity, self.group, self.config, self.tiers, self.params, transport
        )
        self.gradients = GradientStorage(
            self.protocol, self.tiers, self.storage, self.params, self.places, self.sinks
        )
        self.belong(made["scope"])
        ops.bind_owner(self.key, self)

    def __getstate__(self) -> _Copied:
        return _Copied(
            identity=self.identity,
            group=self.group,
            config=self.config,
            hardware=self.hardware,
            tiers=self.tiers,
            agreed=self.agreed,
            protocol=self.protocol,
            params=self.params,
            places=self.places,
            scope=self.scope,
            sync=self.sync,
            may_reduce_each=self.may_reduce_each,
            writes=self.writes,
            opened=self.opened,
        )

    def __setstate__(self, state: _Copied) -> None:
        self._begin(state, COPIED if state["group"].world > 1 else LOCAL)
        self.hardware = over_c10d(self.hardware)

    def belong(self, scope: Scope) -> None:
        """Be a part of the model that ``scope`` is of, and of no other."""
        if (before := self.__dict__.get("scope")) is not None:
            before.members.discard(self)
            before.changes += 1
        self.scope = scope
        scope.members.add(self)
        scope.changes += 1

    @property
    def defers(self) -> bool:
        """Whether backwards leave their gradients, whole, to a later one that reduces them."""
        return not self.sync and not (self.may_reduce_each and self.agreed.reduces_each)

    def count_claim(self) -> None:
        """An optimizer takes a parameter, or finds what its states need."""
        self.taken += 1
        self.scope.changes += 1

    def installed(self) -> None:
        """The parameters are where they rest, and stand in the modules."""
        for name in self.places:
            watch(self.param(name), local_of(self.param(name)))
        self.gradients.begin()
        heap.give_back()  # whole parameters, and what has moved to files or shared memory since
        self.footprint = Footprint.beside(self.shards_in_memory())

    def shards_in_memory(self) -> int:
        """Bytes of shards that take memory of the process."""
        nbytes = 0
        for name, info in self.params.items():
            local = local_of(self.param(name))
            tier = self.tiers.tier("params", name)
            if tier == "host" or (tier == "none" and local.device.type == "cpu"):
                nbytes += info.layout.bytes_local()
        return nbytes

    def param(self, name: str) -> Any:
        """The sharded parameter called ``name`` as it stands in the module now.

        Raises:
            ShardError: it was deleted or replaced, in one of the places to which it was tied maybe, or is whole for the
                time of a ``zero.gathered``.
        """
        places = self.places[name]
        if len(places) == 1:  # as nearly all, of which each is asked for in every call: so without a function
            module, attribute = places[0]
            found = module._parameters.get(attribute)
            if isinstance(found, DTensor) and FULL not in found.__dict__:
                return found
        module, attribute = self.place_of(name)
        return module._parameters[attribute]

    def place_of(self, name: str) -> tuple[nn.Module, str]:
        """The module and the attribute where it stands.

        Raises:
            ShardError: as :meth:`param` does.
        """
        found = standing(self.places[name])
        if found is None:
            parameter_errors.missing(name, self.opened)
        if len(places := self.places[name]) > 1:
            param = found[0]._parameters[found[1]]
            others = (module._parameters.get(attribute) for module, attribute in places)
            if any(isinstance(other, DTensor) and other is not param for other in others):
                parameter_errors.untied(name)
        return found

    def find(self, name: str) -> Any:
        """The same as :meth:`param`, or None where no sharded parameter stands there now."""
        return find(self.places, name)

    # Eager meaning of the markers (ops.Owner).
    def gather_now(self, name: str, shard_: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The full weight, as compiled code has it."""
        wire = wire_of(self, name)
        what = f"eager gather of {name}" + ("" if wire is None else f" as {self.config.gather_dtype}")
        with ranged(what):
            return self.protocol.transfer(
                partial(self.meet, what),
                lambda: blocking_transfers.gather(self.group, self.params[name].layout, shard_, dtype, wire),
            )

    def reduce_now(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        if self.defers:
            raise ShardError(
                'zero.no_sync needs backend="zero" or no compile; another backend runs this graph'
            )
        info = self.params[name]
        what = f"eager reduction of the gradient of {name}"
        with ranged(what):
            return self.protocol.transfer(
                partial(self.meet, what),
                lambda: blocking_transfers.reduce(self.group, info.layout, grad, info.reduce_dtype),
            )

    def meet(self, operation: str, details: str = "") -> None:
        """Before a part of a call that all ranks make, see :meth:`CallProtocol.meet`."""
        self.protocol.meet(operation, details, self.scope.told)


def agree_on_processor(model: ShardedModel) -> None:
    """Plan for the kind of processor that rank 0 has, where no machine was named or calibrated. Collective, once
    ranks have agreed on all that :meth:`CallProtocol.describe` says.

    Raises:
        TransferError: rank 0 is gone, or did not answer within the process group's timeout.
    """
    if model.hardware != hardware.uncalibrated(""):
        return
    mine = processors.here() if hardware.is_assumed(model.config.hardware) else ""
    key = f"processor/{model.identity.title()}"
    kind = decide(model.group, key, mine, "the kind of processor that plans are made for")
    model.hardware = hardware.uncalibrated(kind)
    model.protocol.plan_for(model.hardware)
