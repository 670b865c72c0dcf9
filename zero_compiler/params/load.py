"""Pretrained weights from safetensors files, shard by shard: each rank reads its own rows and nothing else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from ..alignment import BLOCK_BYTES
from ..errors import ConfigError, ShardError
from ..ranks.failure_broadcast import together
from ..ranks.group import group_of
from ..storage import heap
from ..storage.stores import Region, region_of, watch
from . import parameter_memory
from .modules import ModuleState, sharded_models_of, state_of
from .optimizer_guards import mark_stale
from .shard import inherit, sharded_parameter

_PART_BYTES = 16 << 20  # of a shard in a file that are in memory while it is read

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class IncompatibleKeys(NamedTuple):
    """What :func:`load_safetensors` did not match, as ``load_state_dict`` says it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass
class Destination:
    """Where a tensor of the model lives: a parameter or a buffer of ``module``."""

    module: nn.Module
    attribute: str
    tensor: torch.Tensor
    state: ModuleState | None


def load_safetensors(model: nn.Module, paths: Paths, *, strict: bool = True) -> IncompatibleKeys:
    """Copy the weights of safetensors files into ``model``, in place.

    Of a partitioned parameter each rank reads its own rows, those of a parameter in a file some at a time, so that
    one larger than memory can be loaded; buffers, and parameters of a model that is not sharded, are read whole.
    Values are converted to the dtype of the parameter. Of tied names one in the files is enough. Parameters and
    buffers on the meta device get storage on the device that the model was sharded for, so a model made under
    ``torch.device("meta")`` and sharded needs no ``to_empty``; buffers that are not in the files
    (``persistent=False``) stay on meta and are the model's to fill. Nothing is written before all names and shapes
    are checked. No communication: every rank calls it, with the same files. An error on one rank is raised by the
    next call of the others, too.

    Args:
        model: a sharded (or plain) module; names are those of ``model.state_dict()``.
        paths: a ``.safetensors`` file, several of them, an index (``model.safetensors.index.json``), or a
            directory that holds the one or the other.
        strict: raise where names are missing or unexpected, instead of returning them.

    Raises:
        ConfigError: ``paths`` is none.
        ShardError: a file that is missing or damaged, a shape that differs, or (``strict``) names that differ.
    """
    model = getattr(model, "_orig_mod", model)
    with together(lambda: group_of(sharded_models_of(model)), "zero.load_safetensors"):
        return _load_files(model, paths, strict)


def _load_files(model: nn.Module, paths: Paths, strict: bool) -> IncompatibleKeys:
    slots = slots_of(model)
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        paths_of: dict[str, str] = {}
        for file in _files(paths):
            try:
                reader = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ShardError(
                    f"zero.load_safetensors: {file} cannot be read as safetensors: {error}"
                ) from None
            where.update({key: reader for key in reader.keys()})
            paths_of.update({key: file for key in reader.keys()})
        found = {name for name in slots if name in where}
        tied: dict[int, list[str]] = {}
        for name, slot in slots.items():
            tied.setdefault(id(slot.tensor), []).append(name)
        missing = [n for names in tied.values() if not found.intersection(names) for n in names]
        unexpected = [key for key in where if key not in slots]
        if strict and (missing or unexpected):
            raise ShardError(
                f"zero.load_safetensors into {type(model).__name__}: "
                + "; ".join(
                    f"{len(names)} {kind} (first: {', '.join(names[:3])})"
                    for kind, names in (
                        ("missing from the files", missing),
                        ("in the files but not in the model", unexpected),
                    )
                    if names
                )
                + "; pass strict=False to load what fits"
            )
        for name in sorted(found):
            shape = list(where[name].get_slice(name).get_shape())
            expected = list(slots[name].tensor.shape)
            if shape != expected:
                raise ShardError(
                    f"zero.load_safetensors: {name} has shape {shape} in the files and {expected} in the model"
                )
        for names in tied.values():
            # Where several tied names are in the files the last one counts, as with load_state_dict.
            present = [n for n in names if n in found]
            if present:
                name = present[-1]
                _load(name, where[name], paths_of[name], [slots[n] for n in names])
    heap.give_back()  # what files were read through
    return IncompatibleKeys(missing, unexpected)


def _files(paths: Paths) -> list[str]:
    if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes, os.PathLike)):
        return [file for path in paths for file in _files(path)]
    path = path_of("zero.load_safetensors", "paths", paths, "a path, or several")
    if os.path.isdir(path):
        for name in ("model.safetensors.index.json", "model.safetensors"):
            if os.path.exists(os.path.join(path, name)):
                return _files(os.path.join(path, name))
        raise ShardError(
            f"zero.load_safetensors: directory {path!r} holds neither model.safetensors nor "
            "model.safetensors.index.json; name the files"
        )
    if not os.path.exists(path):
        raise ShardError(f"zero.load_safetensors: there is no file {path!r}")
    if not path.endswith(".json"):
        return [path]
    with open(path) as file:
        try:
            parts = sorted(set(json.load(file)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ShardError(f"zero.load_safetensors: {path!r} is no index with a weight_map") from None
    return [file for part in parts for file in _files(os.path.join(os.path.dirname(path), part))]


def path_of(call: str, parameter: str, value: object, expected: str = "a path") -> str:
    """``value`` as a str.

    Args:
        expected: what ``call`` takes as this parameter, for the message.

    Raises:
        ConfigError: it is no path.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise ConfigError(
            f"{call}: {parameter} must be {expected} (a str or a pathlib.Path), not {value!r}, which is of type "
            f"{type(value).__name__}"
        )
    if "\0" in path:
        raise ConfigError(f"{call}: {parameter} must be {expected}, and {path!r} has a null character in it")
    return path


def slots_of(model: nn.Module) -> dict[str, Destination]:
    """Tensors by the names of ``model.state_dict()``, tied ones under each of their names."""

    def all_of() -> Iterator[tuple[str, Destination]]:
        for prefix, module in model.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            state = state_of(module)
            for attribute, param in module._parameters.items():
                if param is not None:
                    yield dot + attribute, Destination(module, attribute, param, state)
            for attribute, buffer in module._buffers.items():
                if buffer is not None and attribute not in module._non_persistent_buffers_set:
                    yield dot + attribute, Destination(module, attribute, buffer, state)

    return dict(all_of())


@torch.no_grad()
def _load(name: str, reader: Any, file: str, slots: Sequence[Destination]) -> None:
    """Read one tensor of ``reader``, of ``file``, into the place that all of ``slots`` share."""
    first = slots[0]
    old = first.tensor
    if not isinstance(old, DTensor) or first.state is None:
        value = reader.get_tensor(name)
        if not old.is_meta:
            old.copy_(value)
            return
        device = first.state.sharded_model.group.device if first.state is not None else torch.device("cpu")
        new: torch.Tensor = value.to(device, old.dtype)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        _replace(name, slots, new)
        return
    sharded_model = first.state.sharded_model
    info = sharded_model.params[first.state.names[first.attribute]]
    layout, rank = info.layout, sharded_model.group.rank
    local = old._local_tensor
    if local.is_meta:
        chunk = sharded_model.storage.place(first.state.names[first.attribute])
        local = chunk[: layout.rows(rank)] if layout.sharded else chunk
        parameter_memory.give(
            old, sharded_parameter(sharded_model.group, layout, local, old.requires_grad, info.part), name
        )
    if not layout.shape:
        local.copy_(reader.get_tensor(name))
    elif local.numel():
        starts = list(info.part.start() if info.part is not None else (0,) * local.dim())
        starts[0] += layout.start(rank) if layout.sharded else 0
        region = region_of(local)
        if region is None:
            local.copy_(reader.get_slice(name)[_ranges(starts, local.shape)])
        else:
            _fill(region, local, name, file, reader, starts)
            if (param := sharded_model.find(first.state.names[first.attribute])) is not None:
                watch(param, local)


def _fill(
    region: Region, local: torch.Tensor, name: str, file: str, reader: Any, starts: Sequence[int]
) -> None:
    """Read ``local`` from ``starts`` on and write it to the file where it rests, some rows at a time.

    Nothing goes through a mapping, of ``file`` or of the region: what was read of it would stay in memory.
    """
    given = reader.get_slice(name)
    shape, dtype = given.get_shape(), given[:0].dtype
    row = local[0].numel() * local.element_size()
    whole = BLOCK_BYTES // math.gcd(row, BLOCK_BYTES)  # rows that fill whole blocks
    rows = max(whole, _PART_BYTES // row // whole * whole)
    with open(file, "rb", buffering=0) as raw:
        size = int.from_bytes(raw.read(8), "little")  # of the header, which the data follow
        first = 8 + size + json.loads(raw.read(size))[name]["data_offsets"][0]
        for begin in range(0, local.shape[0], rows):
            part = torch.empty((min(rows, local.shape[0] - begin), *shape[1:]), dtype=dtype)
            raw.seek(first + (starts[0] + begin) * part[0].nbytes)
            left = part.view(-1).view(torch.uint8).numpy().data
            while left:
                got = raw.readinto(left)
                if not got:
                    raise ShardError(
                        f"{file} ends within {name}, {len(left):,} bytes before its rows do: it was cut short since it "
                        "was opened; load a whole file"
                    )
                left = left[got:]
            region.fill(part[_ranges([0, *starts[1:]], [len(part), *local.shape[1:]])], begin * row)


def _ranges(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))


def _replace(name: str, slots: Sequence[Destination], new: torch.Tensor) -> None:
    inherit(new, slots[0].tensor)
    mark_stale(slots[0].tensor, name, "zero.load_safetensors")
    for slot in slots:
        if isinstance(new, nn.Parameter):
            slot.module._parameters[slot.attribute] = new
        else:
            slot.module._buffers[slot.attribute] = new
