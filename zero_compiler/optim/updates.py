"""One group of shards and its update: the real optimizer class on the local rows of a few parameters.

A *sub-group* is what is updated at once: pieces of parameters of one parameter group. An operand (rows of a parameter,
a gradient or a state) that rests on the device of the parameter is used where it lies; one in a file passes through a
buffer, and one on another device through a copy.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..alignment import BLOCK_BYTES, block_aligned
from ..errors import OptimizerError
from ..ir.transfers import update_of
from ..sharded import grads
from ..sharded.managed_parameters import local_of, sized_as_local
from ..storage import heap
from ..storage.stores import FileSpan, Region, region_of, watch
from ..storage.streaming import Job
from .elementwise import States, make, step_of

# Entries of a parameter group that are not the class's own.
OURS = frozenset({"params", "param_names", "offload_optimizer"})


def like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as a state of ``param``: a DTensor where that is one."""
    return grads.as_dtensor(param, local) if isinstance(param, DTensor) else local


def options_of(group: Mapping[str, object]) -> dict[str, object]:
    """What the class itself reads of a parameter group."""
    return {k: v for k, v in group.items() if k not in OURS}


@dataclass
class Entry:
    """A parameter of the optimizer and where its tensor states rest.

    Args:
        tier: "none" (the parameter's device), "host" or "nvme".
        regions: of each state in a file, by key.
        streamed: bytes per element of each operand that passes through a buffer or a copy, by role or key. A state in a
            file that is not among them is used through the mapping.
        fresh: states at rest of a parameter whose first update is under way.
        given: a gradient that is taken out of ``.grad`` for the update that is under way.
        taken: what ``.grad`` was then.
    """

    param: torch.Tensor
    name: str
    tier: str
    regions: dict[str, Region]
    streamed: dict[str, int]
    fresh: dict[str, torch.Tensor] = field(default_factory=dict)
    given: torch.Tensor | None = None
    taken: torch.Tensor | None = None

    def claim_grad(self) -> None:
        """From here on the gradient belongs to the update, and ``.grad`` says so."""
        if self.given is None and self.grad is not None:
            self.given, self.taken = self.grad, self.param.grad
            self.param.grad = grads.AppliedGrad(self.param)

    def give_back(self) -> None:
        """The update has not begun, and will not."""
        if self.given is not None:
            self.param.grad = self.taken
            self.drop_grad()

    def drop_grad(self) -> None:
        """There is no gradient that an update is to use."""
        self.given = self.taken = None

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's rows of the gradient that the next update is to use."""
        grad = self.param.grad
        if self.given is not None or grad is None or type(grad) is grads.AppliedGrad:
            return self.given
        return local_of(grad)

    def at_rest(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Memory for the whole of state ``key``, of the dtype of ``value``."""
        if key in self.regions:
            return self.regions[key].tensor
        if key not in self.fresh:
            local = local_of(self.param)
            pin = self.tier == "host" and local.device.type != "cpu"
            device = torch.device("cpu") if self.tier == "host" else local.device
            self.fresh[key] = torch.zeros(local.shape, dtype=value.dtype, device=device, pin_memory=pin)
        return self.fresh[key]

    def place_states(self, held: dict[str, object], keys: Iterable[str]) -> None:
        """Bring states that were put in place from outside (``load_state_dict``) to where they rest."""
        for key in keys if self.tier != "none" and held else ():
            if not isinstance(value := held.get(key), torch.Tensor):
                continue
            local = local_of(value)
            there = (
                region_of(local) is self.regions[key] if key in self.regions else local.device.type == "cpu"
            )
            if there:
                continue
            rest = self.at_rest(key, local)
            if local.shape != rest.shape:
                raise OptimizerError(
                    f"state {key!r} of {self.name} has shape {list(local.shape)} on this rank, and must have "
                    f"{list(rest.shape)}; load a state_dict of the same model and placement"
                )
            self.regions[key].fill(local) if key in self.regions else rest.copy_(local)
            held[key] = placed = like(self.param, rest)
            watch(placed, rest)
        self.fresh.clear()


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of a parameter; both None: the whole, in its own shape."""

    entry: Entry
    start: int | None = None
    stop: int | None = None
    last: bool = True

    @property
    def whole(self) -> bool:
        return self.start is None

    def rows(self, local: torch.Tensor) -> torch.Tensor:
        return local if self.start is None else local[self.start : self.stop]

    @property
    def nbytes(self) -> int:
        """What passes through a buffer, at most."""
        return sum(block_aligned(self.numel * item) for item in self.entry.streamed.values())

    @property
    def numel(self) -> int:
        """Elements of these rows on this rank."""
        return self.rows(sized_as_local(self.entry.param)).numel()


def whole_blocks(piece: Piece, dtype: torch.dtype) -> bool:
    """Whether pieces like this first one of a parameter begin at whole blocks in a file of ``dtype``."""
    return piece.whole or piece.numel * dtype.itemsize % BLOCK_BYTES == 0


def pieces_of(entry: Entry, limit_bytes: int) -> Iterator[Piece]:
    """``entry`` in pieces of about ``limit_bytes`` of what is streamed. Pieces of a file begin at whole blocks."""
    local = sized_as_local(entry.param)
    rows = local.shape[0] if local.dim() else 0
    items = list(entry.streamed.values())
    if rows < 2 or not items or local.numel() == 0:
        yield Piece(entry)
        return
    row_numel = local.numel() // rows
    # Rows that fill whole blocks in every dtype: then no two pieces share a block of a file.
    step = BLOCK_BYTES // math.gcd(BLOCK_BYTES, row_numel * min(items))
    count = max(1, limit_bytes // (row_numel * sum(items) * step)) * step
    if count >= rows:
        yield Piece(entry)
        return
    for start in range(0, rows, count):
        yield Piece(entry, start, min(start + count, rows), start + count >= rows)


def label_of(pieces: Iterable[Piece]) -> str:
    """What the update of ``pieces`` at once is called."""
    return update_of(p.entry.name for p in pieces)


@dataclass(frozen=True)
class _Operand:
    """Rows of one operand: where they rest (None: nowhere yet), and where they lie in the buffer (-1: they do not)."""

    rest: torch.Tensor | None
    at: int = -1
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()

    def source(self, buffer: torch.Tensor | None) -> torch.Tensor:
        if self.at < 0 or buffer is None:
            assert self.rest is not None
            return self.rest
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.at : self.at + nbytes].view(self.dtype).view(self.shape)


@dataclass
class _PartOfPiece:
    """A piece in one update: its operands, and what its state held beside tensors (None: it had none)."""

    piece: Piece
    param: _Operand
    grad: _Operand | None
    states: dict[str, _Operand]
    small: dict[str, object] | None
    held: frozenset[str] = frozenset()  # states that there are, and not only a place for them


@dataclass
class SubGroup:
    """Pieces that are updated by one call of the real class."""

    cls: type[Optimizer]
    kw: Mapping[str, object]
    group: dict[str, object]
    states: States
    pieces: list[Piece]
    inner: Optimizer | None = None
    lent: frozenset[str] = frozenset()  # options that the last update was given

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pieces)

    @property
    def params(self) -> list[torch.Tensor]:
        return [p.entry.param for p in self.pieces]

    @cached_property
    def label(self) -> str:
        """What it is called, in plans and profiles."""
        return label_of(self.pieces)

    def found(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> list[tuple[Piece, str, torch.dtype]]:
        """States without a place, which the class did not keep when it was tried: an option of the group that changed
        brings them, or a ``state_dict``."""
        out = []
        for piece in self.pieces:
            entry = piece.entry
            # Each step looks here: what has a place, and a count of steps, is passed by before anything costs time.
            for key, value in state.get(entry.param, {}).items():
                known = key in self.states.tensors
                if known and (key in entry.regions or entry.tier != "nvme"):
                    continue
                if not isinstance(value, DTensor) and not (isinstance(value, torch.Tensor) and value.dim()):
                    continue
                local = local_of(entry.param)
                if known and not local.numel():
                    continue
                whole = isinstance(value, DTensor) and value.shape == entry.param.shape
                if whole or like_rows(value, local):
                    out.append((piece, key, value.dtype))
        return out

    def keep(self, tensors: Mapping[str, torch.dtype]) -> None:
        """The class keeps these states as well from here on."""
        self.states = dataclasses.replace(self.states, tensors={**tensors, **self.states.tensors})

    def job(
        self,
        state: Mapping[torch.Tensor, dict[str, Any]],
        done: Done,
        factor: torch.Tensor | None = None,
        begin: bool = False,
    ) -> Job | None:
        """Update the pieces whose parameters have a gradient; None where there are none.

        Args:
            state: the optimizer's. Read now, and written when the job has run.
            done: told of every parameter that is through, and of options that the class changed.
            factor: what gradients are multiplied by first.
            begin: make the states of a class that has them before its first step, and no step.
        """
        active = [p for p in self.pieces if begin or p.entry.grad is not None]
        if not active:
            return None
        for p in active:
            if p.whole or p.start == 0:
                p.entry.place_states(state.get(p.entry.param, {}), self.states.tensors)
        layout = _Buffer()
        tensors = [self._states(p, state.get(p.entry.param, {}), layout) for p in active]
        params = [layout.place(p, local_of(p.entry.param), True, True) for p in active]
        given = [
            layout.place(p, grad, True, False) if (grad := p.entry.grad) is not None and not begin else None
            for p in active
        ]
        parts = [
            _PartOfPiece(p, param, grad, states, self._small(p, held), _tensors(held))
            if (held := state.get(p.entry.param))
            else _PartOfPiece(p, param, grad, states, None)
            for p, param, grad, states in zip(active, params, given, tensors, strict=True)
        ]
        return Job(
            layout.end,
            layout.reads,
            layout.writes,
            lambda b: self._run(parts, b, state, done, factor, begin),
            self.label,
        )

    def _states(self, piece: Piece, state: Mapping[str, object], layout: _Buffer) -> dict[str, _Operand]:
        out = {}
        for key in self.states.tensors:
            region, value = piece.entry.regions.get(key), state.get(key)
            if region is not None and key not in piece.entry.streamed:
                out[key] = _Operand(piece.rows(region.tensor))
            elif region is not None:
                out[key] = layout.place(piece, region.tensor, isinstance(value, torch.Tensor), True)
            elif isinstance(value, torch.Tensor):
                out[key] = _Operand(piece.rows(local_of(value)))
        return out

    def _small(self, piece: Piece, state: Mapping[str, object]) -> dict[str, object]:
        small = {
            k: v for k, v in state.items() if k not in self.states.tensors or not isinstance(v, torch.Tensor)
        }
        return small if piece.whole else copy.deepcopy(small)  # every piece starts from the same

    def _run(
        self,
        parts: list[_PartOfPiece],
        buffer: torch.Tensor | None,
        state: Mapping[torch.Tensor, dict[str, Any]],
        done: Done,
        factor: torch.Tensor | None,
        begin: bool,
    ) -> None:
        params, staged = [], []
        for part in parts:
            at = part.param.source(buffer)
            param = at.detach()
            if part.grad is not None:
                param.grad = part.grad.source(buffer).to(param.device, non_blocking=True)
                if factor is not None:
                    param.grad.mul_(factor.to(param.device))
            params.append(param)
            staged.append(at)
        given = options_of(self.group)
        if self.inner is None:
            self.inner = make(self.cls, self.kw, given, params)
        inner = self.inner
        if not begin:
            self._lend(inner, params, parts, buffer, given)
            made = buffer is not None and any(part.small is None for part in parts)
            # States that the class makes now are copied to where they rest, and dropped.
            with heap.apart() if made else contextlib.nullcontext():
                step_of(self.cls)(inner)
            done.change_options(
                self.group,
                {
                    k: v
                    for k, v in options_of(inner.param_groups[0]).items()
                    if k not in given or v is not given[k]
                },
            )
        for part, param, at in zip(parts, params, staged, strict=True):
            if param.data_ptr() != at.data_ptr():
                at.copy_(param)  # the class put another tensor in its place
            self._keep_states(part, inner.state.get(param, {}), buffer, state, done)
        inner.state.clear()
        inner.param_groups[0]["params"] = []
        # The host's copies are written to files, or read, next. A sub-group may have parameters of the host beside
        # those of a device, and pieces on several tiers.
        for device in {
            param.device
            for part, param in zip(parts, params, strict=True)
            if param.device.type != "cpu" and part.piece.entry.tier != "none"
        }:
            torch.accelerator.current_stream(device).synchronize()

    def _lend(
        self,
        inner: Optimizer,
        params: list[torch.Tensor],
        parts: list[_PartOfPiece],
        buffer: torch.Tensor | None,
        given: dict[str, object],
    ) -> None:
        group = inner.param_groups[0]
        for key in self.lent - given.keys() - inner.defaults.keys():
            group.pop(key, None)  # the user took it out of the group
        self.lent = frozenset(given)
        group.update(given | {"params": params})
        kept = dict(inner.state)
        inner.state.clear()
        for part, param in zip(parts, params, strict=True):
            if part.small is None:
                if param in kept:
                    inner.state[param] = kept[param]  # the class made it with itself
                continue
            inner.state[param] = {**part.small}
            for key, operand in part.states.items():
                if key in part.held:
                    inner.state[param][key] = operand.source(buffer).to(param.device, non_blocking=True)

    def _keep_states(
        self,
        part: _PartOfPiece,
        made: dict[str, object],
        buffer: torch.Tensor | None,
        state: Mapping[torch.Tensor, dict[str, Any]],
        done: Done,
    ) -> None:
        """Bring what the class holds for a piece to where it rests."""
        piece, entry = part.piece, part.piece.entry
        out: dict[str, object] = {}
        for key, value in made.items():
            # Of a state that the class did not keep before (``found``) each piece has its rows, too.
            if not isinstance(value, torch.Tensor) or not (
                key in self.states.tensors or like_rows(value, piece.rows(local_of(entry.param)))
            ):
                out[key] = value
                continue
            operand = part.states.get(key)
            if entry.tier == "none" and piece.whole:
                lent = buffer is not None and _shares(value, buffer)
                out[key] = value.clone() if lent else value.detach()
                continue
            if operand is None or operand.rest is None:
                operand = _Operand(piece.rows(entry.at_rest(key, value)))
            target = operand.source(buffer)
            if target.data_ptr() != value.data_ptr():
                target.copy_(value, non_blocking=True)
            out[key] = entry.regions[key].tensor if key in entry.regions else entry.fresh.get(key)
            if out[key] is None:
                out[key] = local_of(state[entry.param][key])
        if piece.last and (out or state.get(entry.param)):
            entry.fresh.clear()
            kept = state[entry.param]
            for key, value in out.items():
                now = kept.get(key)
                if isinstance(value, torch.Tensor) and (
                    key in self.states.tensors or like_rows(value, local_of(entry.param))
                ):
                    same = isinstance(now, torch.Tensor) and local_of(now).data_ptr() == value.data_ptr()
                    if same and isinstance(now, DTensor) is isinstance(entry.param, DTensor):
                        continue
                    local, value = value, like(entry.param, value)
                    watch(value, local)
                kept[key] = value
        if piece.last:
            entry.drop_grad()
            done.mark_written(entry.param)


def like_rows(value: object, rows: torch.Tensor) -> bool:
    """Whether ``value`` is a state of each element of ``rows``, by its shape."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == rows.shape


def _tensors(state: Mapping[str, object]) -> frozenset[str]:
    return frozenset(k for k, v in state.items() if isinstance(v, torch.Tensor))


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Done:
    """What a step hears of its sub-groups."""

    def mark_written(self, param: torch.Tensor) -> None: ...

    def change_options(self, group: dict[str, object], changed: dict[str, object]) -> None: ...


class _Buffer:
    """Gives operands in files their places in a buffer, and notes the transfers."""

    def __init__(self) -> None:
        self.end = 0
        self.reads: list[FileSpan] = []
        self.writes: list[FileSpan] = []

    def place(self, piece: Piece, rest: torch.Tensor, read: bool, write: bool) -> _Operand:
        rows, region = piece.rows(rest), region_of(rest)
        if region is None or rows.numel() == 0:
            return _Operand(rows)
        begin = rows.data_ptr() - region.tensor.data_ptr()
        span = region.span(begin, rows.numel() * rows.element_size(), self.end)
        self.end += span.nbytes
        if read:
            self.reads.append(span)
        if write:
            self.writes.append(span)
        return _Operand(rows, span.at, rows.dtype, tuple(rows.shape))


class OverlappedOptimizer(Protocol):
    """What the updates of a backward ask of the optimizer that they belong to (see `overlap.py`)."""

    @property
    def early(self) -> bool:
        """Whether updates run while backward does."""

    def check_whole(self) -> None:
        """Raise where an earlier step broke off."""

    def link_groups(self) -> None: ...

    def place_found(self) -> None: ...

    def receive(self, finish: Callable[[], None]) -> None: ...

    def feed(self, sub_group: SubGroup) -> None:
        """Begin the update of a sub-group whose gradients are final."""

    def give_up(self) -> None: ...

    def complete(self) -> None: ...

    def break_off(self, reason: str) -> None: ...

    def tell(self, error: BaseException, what: str) -> None:
        """Let peers know that this rank could not do ``what``."""
