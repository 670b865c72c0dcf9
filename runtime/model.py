"""What all Programs of one sharded model share at run time: the engine, the arenas and the kept weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zero_compiler.errors import ShardError, TransferError
from zero_compiler.ir.program import Program
from zero_compiler.ranks.peer_waits import explained
from zero_compiler.runtime import _C
from zero_compiler.sharded import blocking_transfers
from zero_compiler.sharded.sharded_model import ShardedModel
from zero_compiler.torch_cpp import all_stand

from ..storage import heap
from ..storage.activation_store import Parcels
from ..storage.aio import buffer
from ..storage.stores import Region, region_of
from .activation_offload import ActivationFiles, HostCopies, Moves, Staged
from .pools import Pools
from .tier_copies import Aside

GONE = "the sharded model of this call no longer exists"


class SecondPlace(NamedTuple):
    """Where a part of a full weight lies for backward: ``size`` elements from ``begin`` on of this rank's second shard,
    of ``numel`` elements, which is laid out in tiles of so many elements of a chunk (0: in none)."""

    name: str
    dtype: str
    numel: int
    tile: int
    begin: int
    size: int


class ModelRuntime:
    """Runtime state of one sharded model; made at its first compile and dropped with it.

    Compiled calls of several threads take turns (`pools.in_turn`); what is eager is not safe for two at once.
    """

    def __init__(self, sharded_model: ShardedModel) -> None:
        group = sharded_model.group
        self._sharded_model = weakref.ref(sharded_model)
        self._kept: dict[object, list[torch.Tensor]] = {}
        self._homes: dict[tuple[str, ...], list[torch.Tensor]] = {}
        segment, hosts = sharded_model.storage.transport.segment, sharded_model.storage.transport.hosts
        self.shared = segment is not None
        # Of a model that was made on meta and given storage since: here no call has begun. Before the engine is made,
        # of which a segment sees one: where there is no memory now, a later call may find it.
        for name in segment.chunks if segment is not None else ():
            if (param := sharded_model.find(name)) is not None and not param.is_meta:
                sharded_model.storage.bring_home(name, param)
        try:
            self.engine: Any = _C.Engine(
                group.pg if group.world > 1 else None,  # one rank talks to nobody
                group.rank,
                group.world,
                series=sharded_model.identity.series,
                shared=None if segment is None else segment.for_engine(),
                hosts=None if hosts is None else hosts.for_engine(),
            )
        except TransferError as error:  # it looks for the processes of its peers
            raise explained(group, "first compile of the model", error) or error from None
        if group.device.type == "cpu" and heap.may_be_tuned():
            _C.install_cpu_allocator()
        self.transient = self.engine.add_arena(0, group.device)
        self._connect_host(sharded_model)
        # Shared: gather buffers are the same memory on every rank; staging of reductions is read by peers.
        self.slots = self.own = self.transient
        if segment is None:
            self.kept = self.engine.add_arena(0, group.device)
        else:
            self.kept = self.engine.add_shared_arena(0, "kept")
            self.slots = self.engine.add_shared_arena(0, "slots")
            self.own = self.engine.add_shared_arena(0, "own")
        self.pools: Pools
        Pools(group.device).join(self)
        self.parcels = Parcels(functools.partial(_place, self._sharded_model))
        self.kept_offsets: dict[str, int] = {}
        self.fresh: set[str] = set()
        # On the only rank, by the names of a gather: flat chunks, and the full weights that they are.
        self.whole: dict[tuple[str, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

        self.planned: tuple[Any, Any] | None = (
            None  # what its calls may take, and by which frames (see CallDecisions)
        )
        # Dynamo may keep the Programs of a model that is gone; its memory goes with the model.
        weakref.finalize(sharded_model, self.close).atexit = False

    def _connect_host(self, sharded_model: ShardedModel) -> None:
        """An engine among the ranks of this host, where they share second shards."""
        self.host_engine: Any = None
        # By name, dtype, number of elements and those of a tile. They last: frames that share a weight share them.
        self._second: dict[tuple[str, str, int, int], torch.Tensor] = {}
        host = sharded_model.storage.host_ranks
        if host is None:
            return
        self.host_place = host.place
        try:
            pg, hosts = host.for_engine()
            self.host_engine = _C.Engine(
                pg, host.place, host.ranks, series=sharded_model.identity.series, hosts=hosts
            )
        except TransferError as error:
            raise explained(sharded_model.group, "first compile of the model", error) or error from None
        self.host_transient = self.host_engine.add_arena(0, sharded_model.group.device)

    @property
    def engines(self) -> list[Any]:
        """Those that calls of the model use."""
        return [self.engine] if self.host_engine is None else [self.engine, self.host_engine]

    def place_arena(self, arena: object) -> None:
        """Let gathers and staging lie in ``arena`` from here on."""
        self.engine.place_arena(self.transient, arena)
        if self.host_engine is not None:
            self.host_engine.place_arena(self.host_transient, arena)

    def second_shard(self, where: SecondPlace) -> torch.Tensor:
        """Of this rank's part of a full weight for backward, what lies at this place; zeros at first, which its padding
        stays."""
        key = where[:4]
        # A frame may be compiled meanwhile, or an evaluation run.
        with torch.inference_mode(False), unset_fake_temporarily():
            if key not in self._second:
                device = self.sharded_model.group.device
                self._second[key] = torch.zeros(where.numel, dtype=getattr(torch, where.dtype), device=device)
            return self._second[key][where.begin : where.begin + where.size]

    @property
    def sharded_model(self) -> ShardedModel:
        sharded_model = self._sharded_model()
        if sharded_model is None:
            raise ShardError(GONE)
        return sharded_model

    def kept_views(self, what: object) -> list[torch.Tensor]:
        """The kept weights of the gather ``what``, from call to call: one list for all Programs with that gather.

        A rank that compiles a Program again, alone, thus finds what its peers find.
        """
        return self._kept.setdefault(what, [])

    def make_room_for_kept(self, nbytes: int) -> None:
        """Let the arena of kept weights have at least so many bytes.

        In a larger one nothing has been gathered yet: views of the one before, which no gather writes to any more, are
        given up for every Program, and its memory with them.
        """
        if self.engine.grow_arena(self.kept, nbytes):
            self.fresh.clear()
            for views in self._kept.values():
                views.clear()

    def home_views(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Full weights where they lie at rest, in memory that all ranks share: one list for all Programs."""
        views = self._homes.setdefault(names, [])
        if not views:
            segment = self.sharded_model.storage.transport.segment
            assert segment is not None  # it is what they share
            views[:] = [segment.fulls[n] for n in names]
        return views

    def bring_home(self, names: Iterable[str]) -> None:
        """Move chunks that were given another storage (``to_empty``, ``load_state_dict(assign=True)``) to where peers
        read them: they would take memory twice, and a copy for every call.

        Only while no peer reads: before a call begins.
        """
        for name in names if self.shared else ():
            self.sharded_model.storage.bring_home(name, self.sharded_model.param(name))

    def moves(self, program: Program) -> Moves:
        """What carries the activations of a Program to another tier and back; has a place ready for the first of them.

        Raises:
            StorageError: there is no room for it.
        """
        if program.phase == "forward":
            self.parcels.reserve(program.file_bytes)
        what = self.parcels, program.offloads, program.file_bytes
        device, path = self.sharded_model.group.device, self.sharded_model.tiers.activation_path
        if path == ("host",):
            return HostCopies(*what, device, lambda: self.pools.stream)
        if path == ("nvme",):
            return ActivationFiles(*what, lambda: self.pools.host)
        return Staged(*what, lambda: self.pools.host, device, lambda: self.aside)

    @property
    def aside(self) -> Aside:
        """What copies chunks and gradients between the device and its host."""
        return self.pools.aside

    def region(self, name: str) -> Region | None:
        """Where a parameter rests in a file; None where it was put into memory meanwhile."""
        return region_of(self.sharded_model.param(name)._local_tensor)

    def flat_chunks(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The flat padded chunks of parameters, as they lie at rest; the list is the same one until one lies elsewhere.

        Of every parameter at every call: whether it stands where it stood, with the storage that it had. The cached
        view holds that, so its address cannot have been given to another.
        """
        names = tuple(names)
        sharded_model = self.sharded_model
        known = sharded_model.at_rest_together.get(names)
        if known is not None and all_stand(known[0]):
            return known[1]
        at_rest = sharded_model.at_rest
        found = [
            seen[1]
            if (seen := at_rest.get(name)) is not None and all_stand([seen[0]])
            else self._flat_chunk(sharded_model, name)
            for name in names
        ]
        if all(name in at_rest for name in names):
            sharded_model.at_rest_together[names] = [at_rest[name][0] for name in names], found
        return found

    def _flat_chunk(self, sharded_model: ShardedModel, name: str) -> torch.Tensor:
        if sharded_model.at_rest.pop(name, None) is not None:
            sharded_model.at_rest_together.clear()
        module, attribute = sharded_model.place_of(name)
        param: Any = module._parameters[attribute]
        layout = sharded_model.params[name].layout
        local = param._local_tensor
        flat: torch.Tensor = blocking_transfers.flat_chunk(layout, local)
        copied = flat.untyped_storage()._cdata != local.untyped_storage()._cdata
        if copied and local.is_contiguous() and not torch.is_inference_mode_enabled():
            # It was given a storage without the padding (load_state_dict(assign=True)): it moves once, and is not
            # copied for every call.
            param._local_tensor = local = flat.view(layout.padded_shape)[
                : layout.rows(sharded_model.group.rank)
            ]
        at = local.data_ptr()
        if at != 0 and flat.data_ptr() == at:
            sharded_model.at_rest[name] = (param, local, at, sharded_model.places[name]), flat
        return flat

    def close(self) -> None:
        self.whole.clear()
        for held in (*self._kept.values(), *self._homes.values()):
            held.clear()
        self.pools.leave(self)
        self.parcels.close()
        self._second.clear()
        for engine in self.engines:
            engine.close()
        self.host_engine = None
        self.engine = _Closed()  # with the last reference to it the memory goes that ranks share


class _Closed:
    """In the place of an engine whose model is gone: others that shared its pools may still come by."""

    def place_arena(self, *_: object) -> None:
        """Nothing: it transfers nothing any more."""

    trim = abandon = stop_waiting = close = place_arena

    def __getattr__(self, name: str) -> object:
        raise ShardError(GONE)


def _place(sharded_model: weakref.ref[ShardedModel], nbytes: int) -> object:
    """Where activations of a model wait for backward."""
    model = sharded_model()
    if model is None:
        raise ShardError(GONE)
    if model.tiers.activation_tier == "host":
        return buffer(nbytes)
    return model.storage.nvme().store("activations", nbytes, keep=False)  # nobody could read them later
