"""Whole weights of a sharded model to safetensors files, a part of one tensor at a time.

The first rank writes. Of each tensor, part after part, the ranks that hold rows of it send them to the first one, so
that no rank ever has more of it than a part. What a rank cannot do it says where all meet before the next tensor: until
then it sends any values, or takes what is sent to it, since the others go on.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..alignment import BLOCK_BYTES, block_aligned
from ..errors import ShardError, TransferError
from ..ranks.call_handshake import has_gloo
from ..ranks.failing import is_known
from ..ranks.failure_broadcast import cannot_begin, together
from ..ranks.group import Group, by_ranks, first_rank, group_of
from ..ranks.mesh import SHARD, TENSOR
from ..ranks.peer_waits import answered
from ..sharded import parameter_errors
from ..sharded.sharded_model import ShardedModel
from ..storage import aio
from ..storage.safetensors_folder import TensorEntry, WeightFile, WeightsFolder, files_of
from ..storage.stores import Region, region_of
from . import parameter_memory
from .load import Destination, path_of, slots_of
from .modules import sharded_models_of

CALL = "zero.save_safetensors"
_PART_BYTES = 16 << 20  # of a tensor that are in memory while it is written
_TAG = 0x5A000000  # of the messages that carry parts


@dataclass(frozen=True)
class _HeldPart:
    """What one rank holds of a tensor: a box of ``sizes`` that begins at ``starts``. ``holder``: its number in the job,
    None where every rank has it."""

    holder: int | None
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Source:
    """A tensor, and where its values are.

    Args:
        shape: by which it is cut into parts, along its first dimension.
        pieces: which together are all of it.
        values: what this rank holds; of no meaning where no piece is this rank's.
    """

    entry: TensorEntry
    shape: tuple[int, ...]
    pieces: tuple[_HeldPart, ...]
    values: torch.Tensor

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.entry.dtype.itemsize

    @property
    def part_rows(self) -> int:
        """Of a part, in all but the last one."""
        return max(1, min(self.shape[0], _PART_BYTES // max(1, self.row_bytes)))


def save_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], max_file_bytes: int = 5_000_000_000
) -> None:
    """Write the whole weights of a sharded model as Hugging Face's libraries read them. Collective: all ranks call it.

    The folder gets ``model.safetensors``, or, where the weights are more than ``max_file_bytes``, files
    ``model-00001-of-0000N.safetensors`` and their index ``model.safetensors.index.json``. A model of ``transformers``
    also gets its ``config.json`` and ``generation_config.json``. Names are those of ``model.state_dict()``, with tied
    weights under one of theirs; dtypes are those at rest. Values are read where they rest (memory, host or files) and
    sent to the first rank some MiB at a time, which writes them; on no rank is there ever more of a tensor than that.

    Nothing in the folder is replaced before all files are written, and the file by which readers find the others is
    renamed last: a killed call leaves no files that look whole. An error on one rank is raised on all.

    Args:
        model: a sharded module, plain or compiled, outside of ``zero.gathered``.
        folder: where the files are to be; the same on all ranks, and made where it does not exist. Only the first rank
            writes to it.
        max_file_bytes: bytes of weights in one file, at most; a tensor of more has a file of its own.

    Raises:
        ConfigError: ``folder`` is no path, or ``max_file_bytes`` no number of bytes.
        ShardError: the model is not sharded, is gathered, or its ``state_dict()`` has values that are no plain tensors.
        StorageError: the files cannot be written, or values in files cannot be read.
        RankMismatchError: ranks are in different calls, or were given different folders.
    """
    model = getattr(model, "_orig_mod", model)
    write_together(model, folder, max_file_bytes)


def write_together(model: nn.Module, folder: str | os.PathLike[str], max_file_bytes: int) -> None:
    """The same of a module that is not compiled."""
    with together(lambda: group_of(sharded_models_of(model)), CALL, works=False):
        sharded_models = by_ranks(sharded_models_of(model))
        if not sharded_models:
            raise ShardError(
                f"{CALL} takes a sharded model, and this {type(model).__name__} is plain: save it with its "
                "save_pretrained, or with safetensors.torch.save_model"
            )
        lead = sharded_models[0]
        with _told(lead.group):
            path = path_of(CALL, "folder", folder)
            sources = _sources(model, sharded_models)
            files = files_of([source.entry for source in sources.values()], max_file_bytes)
        details = [f"folder {path!r}", f"max_file_bytes {max_file_bytes}"]
        lead.meet(CALL, "\n".join(details + [str(file) for file in files]))
        first = lead.group.everyone.rank == 0
        out = WeightsFolder(path, files, CALL) if first else None
        try:
            _write(lead, out, files, sources, lambda unfinished: write_configuration(model, unfinished))
        finally:
            if out is not None:
                out.discard()


def _write(
    lead: ShardedModel,
    out: WeightsFolder | None,
    files: Sequence[WeightFile],
    sources: dict[str, _Source],
    beside: Callable[[str], None],
) -> None:
    group = lead.group.everyone
    with _told(group):
        parts = _Parts(group, sources.values(), None if out is None else out.write)
        if out is not None:
            out.begin()
            beside(out.unfinished)
    for file in files:
        lead.meet(CALL, f"begins {file.name}")
        with _told(group):
            if out is not None:
                out.open(file)
        for entry in file.entries:
            lead.meet(CALL, f"writes {entry.name}")
            with _told(group):
                parts.write(sources[entry.name])
    lead.meet(CALL, "has written all files")
    with _told(group):
        if out is not None:
            out.commit()
    lead.meet(CALL, "has renamed all files")


def give_to_first(
    model: nn.Module, names: Sequence[str], then: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """The whole values of some tensors of a model in the memory of the first rank, which does ``then`` with them.

    Collective, and for what is small beside the model. An error on one rank is raised on all.
    """
    with together(lambda: group_of(sharded_models_of(model)), CALL, works=False):
        sharded_models = by_ranks(sharded_models_of(model))
        lead = sharded_models[0]
        group = lead.group.everyone
        found: dict[str, torch.Tensor] = {}
        with _told(group):
            sources = _sources(model, sharded_models, names)
            values: list[torch.Tensor] = []
            parts = _Parts(group, sources.values(), _kept_in(values) if group.rank == 0 else None)
        lead.meet(CALL, "\n".join(f"gives {name}" for name in names))
        for name in names:
            lead.meet(CALL, f"gives {name}")
            with _told(group):
                values.clear()
                parts.write(sources[name])
                if group.rank == 0:
                    entry = sources[name].entry
                    flat = torch.cat(values) if values else torch.empty(0, dtype=entry.dtype)
                    found[name] = flat.view(entry.shape)
        with _told(group):
            if group.rank == 0:
                then(found)
        lead.meet(CALL, "has done with them what it was to do")


def _kept_in(values: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    return lambda part: values.append(part.reshape(-1).clone())


@contextlib.contextmanager
def _told(group: Group) -> Iterator[None]:
    """What this rank cannot do inside ends the call on the others where they meet next."""
    try:
        yield
    except TransferError:
        raise  # a peer is gone, and those that are left do not meet any more
    except Exception as error:
        if not is_known(error):
            cannot_begin(group, error)
        raise


# What there is to write ------------------------------------------------------------------------------------------


def _sources(
    model: nn.Module, sharded_models: Sequence[ShardedModel], names: Sequence[str] | None = None
) -> dict[str, _Source]:
    """The tensors of a model by name, tied ones under one of theirs, in the order of ``state_dict()``; or only those of
    these ``names``."""
    if any(sharded_model.opened for sharded_model in sharded_models):
        raise ShardError(
            f"{CALL} reads the rows of a {type(model).__name__} where they rest, and here they are gathered: call it "
            "outside of zero.gathered"
        )
    slots = slots_of(model)
    if names is not None:
        return {name: _source(name, slots[name]) for name in names}
    found = model.state_dict()
    for name in (*found, *slots):
        if name not in slots or name not in found:
            only = "is in state_dict() alone" if name in found else "is not in state_dict()"
            raise ShardError(
                f"{CALL}: {name!r} {only}, so the {type(model).__name__} saves itself in a way of its own: do that "
                "within zero.gathered(model)"
            )
    tied: dict[int, list[str]] = {}
    for name in found:
        tied.setdefault(id(slots[name].tensor), []).append(name)
    copies = set(
        getattr(model, "all_tied_weights_keys", None) or ()
    )  # of transformers: what is filled from others
    keep = {next((n for n in names if n not in copies), names[0]) for names in tied.values()}
    return {name: _source(name, slots[name]) for name in found if name in keep}


def _source(name: str, slot: Destination) -> _Source:
    tensor, state = slot.tensor, slot.state
    managed = state.names.get(slot.attribute) if state is not None else None
    pieces: tuple[_HeldPart, ...] = ()
    if managed is None or state is None:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
            raise ShardError(
                f"{CALL}: {name} is a {type(tensor).__name__}, of which only its own library knows how it is saved: "
                "save the model within zero.gathered(model) with that"
            )
        values, shape = tensor, tuple(tensor.shape)
    elif isinstance(tensor, DTensor):
        if parameter_errors.was_dropped(tensor):
            parameter_errors.dropped(managed)
        parameter_memory.check_closed(tensor, managed)
        values, shape = tensor._local_tensor, state.sharded_model.params[managed].shape
        pieces = _pieces(state.sharded_model, managed)
    else:
        parameter_errors.replaced(managed)
    if values.is_meta:
        raise ShardError(
            f"{CALL}: {name} has no values yet (it is on the meta device); fill it first, for instance with "
            "zero.load_safetensors"
        )
    whole = _HeldPart(None, (0,) * len(shape), shape)
    return _flat(TensorEntry(name, shape, values.dtype), pieces or (whole,), values.detach())


def _flat(entry: TensorEntry, pieces: tuple[_HeldPart, ...], values: torch.Tensor) -> _Source:
    """Where every piece has whole rows, these are ranges of elements, and can be parted anywhere."""
    if any(piece.sizes[1:] != entry.shape[1:] for piece in pieces):
        return _Source(entry, entry.shape, pieces, values)
    row = math.prod(entry.shape[1:])
    return _Source(
        entry,
        (math.prod(entry.shape),),
        tuple(
            _HeldPart(p.holder, (p.starts[0] * row if p.starts else 0,), (math.prod(p.sizes),))
            for p in pieces
        ),
        values,
    )


def _pieces(sharded_model: ShardedModel, name: str) -> tuple[_HeldPart, ...]:
    """Of a parameter: the rows of every rank that holds some which no other rank before it holds."""
    info, group = sharded_model.params[name], sharded_model.group
    layout, part = info.layout, info.part
    ranks = range(group.world if layout.sharded else 1)
    cut = part is not None and part.placement.is_shard()
    out = []
    for place in range(group.tensor.world if cut and group.tensor is not None else 1):
        starts = [0] * len(info.shape)
        if cut and part is not None:
            dim = part.placement.dim  # type: ignore[attr-defined]
            starts[dim] = layout.shape[dim] * place
        for rank in ranks:
            at = {SHARD: rank, TENSOR: place}
            holder = int(group.mesh.mesh[tuple(at.get(role, 0) for role in group.roles)])
            here = (starts[0] + layout.start(rank), *starts[1:]) if layout.sharded else tuple(starts)
            sizes = layout.local_shape(rank)
            if math.prod(sizes):
                out.append(_HeldPart(holder, here, sizes))
    return tuple(out)


# From the ranks to the file ----------------------------------------------------------------------------------------


class _Parts:
    """Brings the tensors of a model to the first rank, which writes them.

    All memory that parts take is made here, before a peer waits for one: what fails later fails by itself, and the
    sends and receives of that part go on.

    Args:
        sources: the tensors that are to be written.
        write: takes the values of a tensor, part after part, on the first rank; None on the others.
    """

    def __init__(
        self, group: Group, sources: Collection[_Source], write: Callable[[torch.Tensor], None] | None
    ) -> None:
        self._group, self._write = group, write
        self._first = first_rank(group)
        self._me = dist.get_rank() if group.link is not None else group.ranks[0]
        largest = max((source.part_rows * source.row_bytes for source in sources), default=0)
        # The first rank's: the part that is written, of which every rank's rows have their place.
        self._block = torch.empty(largest, dtype=torch.uint8) if write is not None else None
        # Rows that were read from a file, in whole blocks, or that have arrived and are still to be put in their place.
        self._rows = aio.buffer(block_aligned(largest) + BLOCK_BYTES)
        by_cpu = group.one_rank or has_gloo(group)
        self._on_device = None if by_cpu else torch.empty(largest, dtype=torch.uint8, device=group.device)

    def write(self, source: _Source) -> None:
        """Write one tensor.

        Raises:
            Exception: what this rank could not do, once all parts have been sent.
            TransferError: a peer is gone.
        """
        failed: Exception | None = None
        if not source.entry.nbytes:
            return
        for begin in range(0, source.shape[0], source.part_rows):
            error = self._part(source, begin, min(begin + source.part_rows, source.shape[0]))
            failed = failed or error
        if failed is not None:
            raise failed

    def _part(self, source: _Source, begin: int, end: int) -> Exception | None:
        """Write rows ``begin`` to ``end``; what this rank could not do of that."""
        failed: Exception | None = None
        dtype = source.entry.dtype
        block = None
        if self._block is not None:
            block = _shaped(self._block, dtype, (end - begin, *source.shape[1:]))
        for piece in source.pieces:
            low, high = max(begin, piece.starts[0]), min(end, piece.starts[0] + piece.sizes[0])
            if low >= high:
                continue
            sizes = (high - low, *piece.sizes[1:])
            holds = piece.holder == self._me or (piece.holder is None and block is not None)
            rows = None
            if holds:
                try:
                    rows = self._read(source.values, low - piece.starts[0], sizes)
                except Exception as error:
                    failed = failed or error
                    rows = _shaped(self._rows, dtype, sizes)  # of whatever values: the call fails
            there = None
            if block is not None:
                starts = (low - begin, *piece.starts[1:])
                there = block[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
            if rows is not None and there is not None:
                there.copy_(rows)
            elif rows is not None:
                self._send(rows)
            elif there is not None and piece.holder is not None:
                self._receive(there, piece.holder)
        if self._write is not None and block is not None:
            try:
                self._write(block)
            except Exception as error:
                failed = failed or error
        return failed

    def _read(self, values: torch.Tensor, begin: int, sizes: tuple[int, ...]) -> torch.Tensor:
        """Rows of what this rank holds, contiguous in memory; from a file without its mapping, of which pages would
        stay."""
        region = region_of(values)
        if region is not None:
            row = math.prod(sizes[1:]) * values.element_size()
            raw = self._read_file(region, begin * row, sizes[0] * row)
            return raw.view(values.dtype).view(sizes)
        if len(sizes) == 1:
            values = values.reshape(-1)
        return values[begin : begin + sizes[0]].cpu().contiguous()

    def _read_file(self, region: Region, start: int, nbytes: int) -> torch.Tensor:
        before = start % BLOCK_BYTES
        with region.store.whole():
            region.store.read(region.span(start - before, before + nbytes, 0), self._rows).wait()
        return self._rows[before : before + nbytes]

    def _send(self, rows: torch.Tensor) -> None:
        raw = rows.view(-1).view(torch.uint8)
        if self._on_device is not None:
            raw = self._on_device[: raw.numel()].copy_(raw)
        with answered(self._group, CALL):
            dist.send(raw, self._first, group=self._group.pg, tag=_TAG)

    def _receive(self, there: torch.Tensor, holder: int) -> None:
        straight = there.is_contiguous() and self._on_device is None
        rows = there if straight else _shaped(self._arriving, there.dtype, tuple(there.shape))
        with answered(self._group, CALL):
            dist.recv(rows.view(-1).view(torch.uint8), holder, group=self._group.pg, tag=_TAG)
        if not straight:
            there.copy_(rows)

    @property
    def _arriving(self) -> torch.Tensor:
        return self._rows if self._on_device is None else self._on_device


def _shaped(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The begin of some bytes as a tensor."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


# Beside the weights ------------------------------------------------------------------------------------------------


def of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of ``transformers``, with a configuration from which it can be made again."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(model).__mro__
    )


def write_configuration(model: Any, folder: str) -> None:
    """What ``from_pretrained`` of ``transformers`` reads beside the weights."""
    if not of_transformers(model):
        return
    config, made = model.config, getattr(type(model), "_zero_base", type(model))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [made.__name__.removeprefix("FSDP")]
    if getattr(model, "_auto_class", None) is not None:
        custom = importlib.import_module("transformers.dynamic_module_utils")
        custom.custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
