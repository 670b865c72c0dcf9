"""``zero-compiler export``: the weights of a checkpoint of torch.distributed.checkpoint as safetensors files.

One process reads them, one tensor at a time, whatever number of ranks has written the checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import ConfigError, StorageError
from ..storage.safetensors_folder import TensorEntry, WeightsFolder, files_of

_WHAT = "zero-compiler export"
_COMPILED = "_orig_mod."  # what torch.compile puts before the names of a model


def export(
    checkpoint: Path,
    out: Path,
    *,
    key: str | None = None,
    max_file_bytes: int = 5_000_000_000,
    config: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> int:
    """Write the weights of a checkpoint as :func:`zero_compiler.save_safetensors` would have.

    Memory holds one tensor, and of that what one rank has saved a second time. The checkpoint does not say which names
    were tied, so each of them is written.

    Args:
        checkpoint: folder that ``torch.distributed.checkpoint`` has written.
        out: where the files are to be.
        key: under which the model was saved; default: "model" where there is that, else the weights are the checkpoint.
        config: a folder, or file, of a configuration that is copied beside them (``config.json`` and
            ``generation_config.json``).
        progress: is told which tensor is written.

    Returns:
        How many tensors were written.

    Raises:
        ConfigError: the checkpoint has nothing under ``key``, or ``config`` is none.
        StorageError: it cannot be read, or ``out`` not be written.
    """
    reader, metadata = _opened(checkpoint)
    names = _weights(metadata, key, checkpoint)
    entries = []
    for name, fqn in names.items():
        stored = metadata.state_dict_metadata[fqn]
        entries.append(TensorEntry(name, tuple(stored.size), stored.properties.dtype))
    beside = _configuration(config)
    files = files_of(entries, max_file_bytes)
    folder = WeightsFolder(out, files, _WHAT)
    try:
        folder.begin()
        for path in beside:
            shutil.copyfile(path, os.path.join(folder.unfinished, path.name))
        for file in files:
            folder.open(file)
            for entry in file.entries:
                progress(entry.name)
                if entry.nbytes:
                    folder.write(_read(reader, metadata, names[entry.name], entry))
        folder.commit()
    finally:
        folder.discard()
    return len(entries)


def _opened(checkpoint: Path) -> tuple[FileSystemReader, Any]:
    reader = FileSystemReader(checkpoint)
    try:
        metadata = reader.read_metadata()
    except Exception as error:  # of pickle, too
        raise StorageError(
            f"{_WHAT}: {str(checkpoint)!r} is no whole checkpoint of torch.distributed.checkpoint: {error}; give the "
            "folder that holds its .metadata",
            path=str(checkpoint),
        ) from error
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return reader, metadata


def _weights(metadata: Any, key: str | None, checkpoint: Path) -> dict[str, str]:
    """The name in the checkpoint of every tensor of the model, by its name there."""
    stored = metadata.state_dict_metadata
    paths: Mapping[str, tuple[object, ...]] = metadata.planner_data or {name: (name,) for name in stored}
    first = {str(path[0]) for path in paths.values() if len(path) > 1}
    key = "model" if key is None and "model" in first else key
    found = {}
    for fqn, path in paths.items():
        if fqn not in stored or (key is not None and (str(path[0]) != key or len(path) < 2)):
            continue
        if key is None and len(path) > 1:
            continue
        name = ".".join(str(step) for step in (path if key is None else path[1:]))
        found[name] = fqn
    others = [fqn for fqn in found.values() if not isinstance(stored[fqn], TensorStorageMetadata)]
    if len(others) == len(found):
        raise ConfigError(
            f"{_WHAT}: {str(checkpoint)!r} has no weights "
            + (f"under {key!r}" if key is not None else "of its own")
            + f"; give --key, one of {', '.join(sorted(first)) or 'none'}"
        )
    if others:
        raise ConfigError(
            f"{_WHAT}: {others[0]!r} of {str(checkpoint)!r} is no tensor, and a safetensors file holds nothing else; "
            "give --key, under which the weights are"
        )
    if all(name.startswith(_COMPILED) for name in found):
        found = {name.removeprefix(_COMPILED): fqn for name, fqn in found.items()}
    return found


def _read(reader: FileSystemReader, metadata: Any, fqn: str, entry: TensorEntry) -> torch.Tensor:
    values = torch.empty(entry.shape, dtype=entry.dtype)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({fqn: values}, metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{_WHAT}: {fqn} cannot be read: {error}", label=fqn) from error
    return values


def _configuration(config: Path | None) -> list[Path]:
    if config is None:
        return []
    names = ("config.json", "generation_config.json")
    found = [p for p in ([config / n for n in names] if config.is_dir() else [config]) if p.is_file()]
    if not any(path.name == "config.json" for path in found):
        raise ConfigError(
            f"{_WHAT}: --config {str(config)!r} is no config.json, and no folder that holds one"
        )
    return found
