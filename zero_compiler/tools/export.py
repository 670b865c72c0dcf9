"""``zero-compiler export``: the weights of a checkpoint of torch.distributed.checkpoint as safetensors files.

One process reads them, one tensor at a time, whatever number of ranks has written the checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import ConfigError, StorageError
from ..storage.safetensors_folder import TensorEntry, WeightsFolder, files_of
from . import transformers_models

log = logging.getLogger("zero_compiler")

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
) -> tuple[str, int]:
    """Write the weights of a checkpoint as :func:`zero_compiler.save_safetensors` would have.

    Memory holds one tensor, and of that what one rank has saved a second time. The checkpoint does not say which names
    were tied: each of them is written, but for those that the model of ``config`` ties and that have the same values,
    which are written under one name.

    Args:
        checkpoint: folder that ``torch.distributed.checkpoint`` has written.
        out: where the files are to be.
        key: under which the model was saved, "training.model" say, or "" for the checkpoint itself; default: "model" at
            whatever depth, else the only place that holds tensors alone and is no optimizer's.
        config: a folder, or file, of a configuration that is copied beside them (``config.json`` and
            ``generation_config.json``).
        progress: is told which tensor is written.

    Returns:
        The key, and how many tensors were written.

    Raises:
        ConfigError: the checkpoint has no weights under ``key``, or several that they might be and no ``key`` is given,
            or ``config`` is none.
        StorageError: it cannot be read, or ``out`` not be written.
    """
    reader, metadata = _opened(checkpoint)
    key, names = _weights(metadata, key, checkpoint)
    beside = _configuration(config)
    entries = {name: _entry(name, metadata.state_dict_metadata[fqn]) for name, fqn in names.items()}

    def read(entry: TensorEntry) -> torch.Tensor:
        return _read(reader, metadata, names[entry.name], entry)

    for name in _copies(entries, beside, read):
        del entries[name]
    files = files_of(list(entries.values()), max_file_bytes)
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
                    folder.write(read(entry))
        folder.commit()
    finally:
        folder.discard()
    return key, len(entries)


def _opened(checkpoint: Path) -> tuple[FileSystemReader, Any]:
    if checkpoint.is_file() or (checkpoint.is_dir() and not (checkpoint / ".metadata").exists()):
        _refuse_another_kind(checkpoint)
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


def _refuse_another_kind(path: Path) -> None:
    """
    Raises:
        ConfigError: it can be read without an export, or what is to be exported is a folder in it.
    """
    inner = sorted(p.parent.name for p in path.glob("*/.metadata"))
    if inner:
        raise ConfigError(
            f"{_WHAT}: the checkpoints of torch.distributed.checkpoint in {str(path)!r} are {', '.join(inner)}; give "
            f"the one of the model, {str(path / inner[0])!r} say"
        )
    if path.is_file():
        raise ConfigError(
            f"{_WHAT}: {str(path)!r} is one file, which torch.load or safetensors reads as it is"
        )
    if any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{_WHAT}: {str(path)!r} has safetensors files already, which from_pretrained reads"
        )


def _weights(metadata: Any, key: str | None, checkpoint: Path) -> tuple[str, dict[str, str]]:
    """Under which key the model is ("" for the checkpoint itself), and the name in the checkpoint of each of its
    tensors, by its name in the model."""
    stored = metadata.state_dict_metadata
    planned = metadata.planner_data or {name: (name,) for name in stored}
    paths = {fqn: tuple(map(str, path)) for fqn, path in planned.items() if fqn in stored}
    models = _models(paths, stored)
    give = f"give --key, one of {', '.join(sorted(m or repr(m) for m in models))}"
    if not models:
        give = "nothing in it holds tensors alone"
    if key is None and len(models) != 1:
        found = "several places that hold weights" if models else "no weights"
        raise ConfigError(f"{_WHAT}: {str(checkpoint)!r} has {found}; {give}")
    key = models[0] if key is None else key
    names = {name: fqn for fqn, path in paths.items() if (name := _below(path, key)) is not None}
    others = [fqn for fqn in names.values() if not isinstance(stored[fqn], TensorStorageMetadata)]
    if len(others) == len(names):
        raise ConfigError(f"{_WHAT}: {str(checkpoint)!r} has no weights under {key!r}; {give}")
    if others:
        raise ConfigError(
            f"{_WHAT}: {others[0]!r} of {str(checkpoint)!r} is no tensor, and a safetensors file holds nothing else; "
            + give
        )
    if all(name.startswith(_COMPILED) for name in names):
        names = {name.removeprefix(_COMPILED): fqn for name, fqn in names.items()}
    return key, names


def _below(path: tuple[str, ...], key: str) -> str | None:
    """The name under ``key`` of what is at ``path``. The checkpoint itself has only what is in no part of it."""
    if not key:
        return path[0] if len(path) == 1 else None
    steps = (n for n in range(1, len(path)) if ".".join(path[:n]) == key)
    return next((".".join(path[n:]) for n in steps), None)


def _models(paths: Mapping[str, tuple[str, ...]], stored: Mapping[str, object]) -> list[str]:
    """The keys under which the weights of a model may be: what is named "model", else what holds tensors alone. States
    of an optimizer, which stand beside its "param_groups", are none."""
    optimizers = {
        path[:i] for path in paths.values() for i, step in enumerate(path) if step == "param_groups"
    }
    tensors_alone: dict[tuple[str, ...], bool] = {}
    for fqn, path in paths.items():
        if any(path[:i] in optimizers for i in range(len(path))):
            continue
        alone = isinstance(stored[fqn], TensorStorageMetadata)
        tensors_alone[path[:-1]] = tensors_alone.get(path[:-1], True) and alone
    named = {path[: path.index("model") + 1] for path in tensors_alone if "model" in path}
    if ("model",) in named:
        return ["model"]
    return [".".join(path) for path in named or (path for path, alone in tensors_alone.items() if alone)]


def _entry(name: str, stored: TensorStorageMetadata) -> TensorEntry:
    return TensorEntry(name, tuple(stored.size), stored.properties.dtype)


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


def _copies(
    entries: Mapping[str, TensorEntry], beside: Sequence[Path], read: Callable[[TensorEntry], torch.Tensor]
) -> list[str]:
    """The names that are not written: which transformers ties to others, and whose values are those of the others."""

    def digest(name: str) -> bytes:
        return hashlib.sha256(read(entries[name]).reshape(-1).view(torch.uint8).numpy().data).digest()

    found = []
    for name, source in _tied(beside).items():
        a, b = entries.get(name), entries.get(source)
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype) or not a.nbytes:
            continue
        if digest(name) == digest(source):
            found.append(name)
    return found


def _tied(beside: Sequence[Path]) -> dict[str, str]:
    """What the model of a configuration fills from others, by name. Where none can be made: nothing, which is said."""
    file = next((path for path in beside if path.name == "config.json"), None)
    if file is None:
        return {}
    try:
        model = transformers_models.model_of(transformers_models.config_in(file))
    except Exception as error:  # transformers is not there, or the model is made by code of its own
        log.warning(
            "%s: every name is written, also tied ones: no model of %s can be made: %s", _WHAT, file, error
        )
        return {}
    return dict(getattr(model, "all_tied_weights_keys", None) or {})
