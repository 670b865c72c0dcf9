"""Full weights on their way: from chunks at rest through gathers to segments until their release, and which kept ones
are still right."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_compiler.ir.program import Program
from zero_compiler.ir.transfers import GatherDesc
from zero_compiler.layout import second_runs
from zero_compiler.quantised_blocks import round_trip

from .model import ModelRuntime, SecondPlace
from .tier_copies import Hops

_BLOCK = 1 << 22  # elements of kept weights that a device compares at a time


# This rank's rows inside a kept copy, as they rest, and the dtype of 8 bits that they travel in, if any.
_Pair = tuple[torch.Tensor, torch.Tensor, torch.dtype | None]


def _equal(pairs: Sequence[_Pair | None]) -> list[bool]:
    """Of each pair whether the second, as it would arrive now, equals the first; not where there is none."""
    there = [pair for pair in pairs if pair is not None]
    if not there or there[0][0].device.type == "cpu":
        return [pair is not None and _equal_here(*pair) for pair in pairs]
    # A device is asked once: each answer waits for all that it has been told to compute.
    flags = torch.stack([_differ(*pair) for pair in there]).tolist()
    differ = iter(flags)
    return [pair is not None and not next(differ) for pair in pairs]


def _pieces(
    kept: torch.Tensor, local: torch.Tensor, wire: torch.dtype | None, first: int, later: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both, some numbers at a time, so that what is cast takes little room: of the second what would arrive. Rows,
    which are quantised each by itself, come whole."""
    shape = (-1,) if wire is None else (local.shape[0], -1)
    kept, local = kept.reshape(shape), local.reshape(shape)
    each = 1 if wire is None else max(1, local.shape[1])
    at, numel = 0, first
    while at < local.shape[0]:
        end = at + max(1, numel // each)
        some = local[at:end]
        yield kept[at:end], some.to(kept.dtype) if wire is None else round_trip(some, wire, kept.dtype)
        at, numel = end, later


def _equal_here(kept: torch.Tensor, local: torch.Tensor, wire: torch.dtype | None = None) -> bool:
    """After an optimizer's step the first block tells."""
    return all(torch.equal(*some) for some in _pieces(kept, local, wire, 1 << 12, 1 << 18))


def _differ(kept: torch.Tensor, local: torch.Tensor, wire: torch.dtype | None = None) -> torch.Tensor:
    differ = torch.zeros((), dtype=torch.bool, device=kept.device)
    for here, there in _pieces(kept, local, wire, _BLOCK, _BLOCK):
        differ |= (here != there).any()
    return differ


def _rows(runtime: ModelRuntime, name: str, view: torch.Tensor | None, wire: str) -> _Pair | None:
    """This rank's rows of a kept weight; None where they are not there to compare."""
    if view is None:
        return None
    group = runtime.sharded_model.group
    layout = runtime.sharded_model.params[name].layout
    rows = layout.rows(group.rank)
    local = runtime.sharded_model.param(name)._local_tensor.detach()
    if local.shape[:1] != (rows,):
        return None
    kept = view.narrow(0, layout.start(group.rank), rows)
    return kept, local, getattr(torch, wire) if wire and rows else None


def _second_places(g: GatherDesc) -> list[SecondPlace]:
    """Of each weight, where this rank's second shard lies, or the part of it that a tile has."""
    if not g.host_ranks:
        return []
    out = []
    parts, tiles = g.parts or g.chunk_numels, g.second_tiles
    for name, part, chunk, tile in zip(g.names, parts, g.chunk_numels, tiles, strict=True):
        hosts = part // chunk if g.parts else 1
        begin, numel = (g.tile.begin * hosts, g.tile.numel * hosts) if g.tile else (0, part)
        out.append(SecondPlace(name, g.dtype, numel, tile, begin, part))
    return out


class Gathers:
    """What a call of one Program gathers.

    Args:
        runtimes: of each owner that the Program names.
    """

    def __init__(self, program: Program, runtimes: Mapping[str, ModelRuntime]) -> None:
        self._runtimes = runtimes
        self._all = [self._add_gather(g) for g in program.gathers]
        self._whole = [self._is_whole(g) for g in program.gathers]
        self._second = [_second_places(g) for g in program.gathers]
        self._parted: dict[int, Sequence[torch.Tensor]] = {}  # full weights of which a part is to stay
        self.hops = Hops([(runtimes[g.owner], g) for g in program.gathers])
        self._at_home: dict[ModelRuntime, list[str]] = {}
        for g in program.gathers:
            if g.home:
                self._at_home.setdefault(runtimes[g.owner], []).extend(g.names)

    def views(self, which: int) -> list[torch.Tensor]:
        """The weights of a gather that stay where they are from call to call."""
        return self._all[which][3]

    def bring_home(self) -> None:
        """What peers read where it lies at rest from here on is in place."""
        for runtime, names in self._at_home.items():
            runtime.bring_home(names)

    def _add_gather(self, g: GatherDesc) -> tuple[ModelRuntime, int, GatherDesc, list[Any]]:
        runtime = self._runtimes[g.owner]
        if g.home:
            return runtime, -1, g, runtime.home_views(g.names)
        engine, transient = runtime.engine, runtime.transient
        if g.from_second:
            engine, transient = runtime.host_engine, runtime.host_transient
        arena = runtime.kept if g.kept else runtime.slots if g.shared else transient
        if g.kept:
            item = runtime.sharded_model.group.world * getattr(torch, g.dtype).itemsize
            runtime.make_room_for_kept(
                max(o + c * item for o, c in zip(g.offsets, g.chunk_numels, strict=True))
            )

        params = list(zip(g.chunk_numels, map(list, g.shapes), g.offsets, strict=True))
        index = engine.add_gather(
            arena,
            getattr(torch, g.dtype),
            g.label,
            params,
            g.staging,
            staging_arena=transient,
            wire=getattr(torch, g.wire) if g.wire else None,
        )
        views = runtime.kept_views((g.names, g.dtype, g.wire, g.offsets)) if g.kept else []
        return runtime, index, g, views

    def _is_whole(self, g: GatherDesc) -> bool:
        """Whether full weights are what lies at rest on the only rank, so that their views serve from call to call."""
        sharded_model = self._runtimes[g.owner].sharded_model
        own = all(sharded_model.params[n].layout.dtype is getattr(torch, g.dtype) for n in g.names)
        return sharded_model.group.world == 1 and own and not (g.home or g.hops or g.tile)

    def stale_kept(self, phase: str) -> bytes:
        """Forget kept weights whose shards have changed; a digest of what is left to gather.

        Shards are written outside the runtime (optimizers, ``load_state_dict``, averages through ``.data``), and
        no counter sees all of that; this rank's rows inside the kept copy do.
        """
        seen = hashlib.blake2b(digest_size=8)
        kept = [
            (runtime, name, view, g.wire)
            for runtime, _, g, views in self._all
            if g.kept and not g.home
            for name, view in zip(g.names, views or [None] * len(g.names), strict=True)
        ]
        if phase != "backward":
            asked = [at for at in kept if at[1] in at[0].fresh]
            for (runtime, name, *_), same in zip(asked, _equal([_rows(*at) for at in asked]), strict=True):
                if not same:
                    runtime.fresh.discard(name)
        for runtime, name, view, _ in kept:
            seen.update(b"\1" if view is not None and name in runtime.fresh else b"\0")
        return seen.digest()

    def start(self, which: int) -> None:
        runtime, index, g, views = self._all[which]
        if g.kept and views and runtime.fresh.issuperset(g.names) and runtime.sharded_model.group.world > 1:
            return
        if g.kept:
            runtime.fresh.difference_update(g.names)
        if g.from_second:
            runtime.host_engine.gather_start(index, [runtime.second_shard(w) for w in self._second[which]])
            return
        if not self._whole[which]:
            runtime.engine.gather_start(index, self.hops.chunks(which))
            return
        chunks = runtime.flat_chunks(g.names)
        held = runtime.whole.get(g.names)
        if held is None or (held[0] is not chunks and not all(map(operator.is_, held[0], chunks))):
            runtime.engine.gather_start(index, chunks)
            runtime.whole[g.names] = (chunks, runtime.engine.gather_wait(index))
            runtime.engine.release(index)

    def wait(self, which: int) -> Sequence[torch.Tensor]:
        runtime, index, g, views = self._all[which]
        if self._whole[which]:
            return runtime.whole[g.names][1]
        if not g.kept:
            fulls = (runtime.host_engine if g.from_second else runtime.engine).gather_wait(index)
            if g.parts:
                self._parted[which] = fulls
            return fulls
        if views and runtime.fresh.issuperset(g.names) and runtime.sharded_model.group.world > 1:
            return views
        views[:] = runtime.engine.gather_wait(index)
        runtime.engine.release(index)
        runtime.fresh.update(g.names)
        return views

    def keep_part(self, which: int) -> None:
        """Copy this rank's parts of the full weights to its second shards."""
        runtime, _, g, _ = self._all[which]
        tiles = g.part_tiles or (0,) * len(g.names)
        fulls = self._parted.pop(which)
        for full, where, part, chunk, tile in zip(
            fulls, self._second[which], g.parts, g.chunk_numels, tiles, strict=True
        ):
            if not part:
                continue
            flat, second = full.view(-1), runtime.second_shard(where)
            for to, begin, size in second_runs(flat.numel(), part, runtime.host_place, chunk, tile):
                second[to : to + size].copy_(flat[begin : begin + size], non_blocking=True)

    def forget(self) -> None:
        """A run was broken off: no part of what it has gathered is to stay."""
        self._parted.clear()

    def release(self, which: int) -> None:
        if not self._whole[which]:
            runtime, index, g, _ = self._all[which]
            (runtime.host_engine if g.from_second else runtime.engine).release(index)
