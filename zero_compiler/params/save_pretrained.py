"""``save_pretrained`` of a sharded model, called by all ranks.

Of a model of ``transformers`` it is ``zero.save_safetensors``; of one of PEFT the first rank writes the adapters.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..ranks.attendance import all_come
from ..ranks.group import group_of
from . import refusals
from .modules import sharded_models_of
from .save import give_to_first, of_transformers, write_together

# Arguments with any value: which rank writes, and how it reaches a hub that it sends nothing to, changes nothing here.
_PASSED_OVER = {"is_main_process", "token", "save_peft_format", "save_original_format"}
# Those that change what is written, with the values that they may have.
_EXPECTED: dict[str, tuple[object, ...]] = {
    "state_dict": (None,),
    "push_to_hub": (False,),
    "variant": (None,),
    "distributed_checkpoint": (False,),
    "safe_serialization": (True,),
    "path_initial_model_for_weight_conversion": (None,),
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _save(
    module: Any, method: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    given = _given(module, method, args, kwargs)
    if of_transformers(module):
        return _save_model(module, given)
    return _of_peft(module) and _save_adapters(module, method, given)


def _given(
    module: Any, method: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, Any]:
    """The arguments of a call by name, defaults too."""
    bound = inspect.signature(method).bind(module, *args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    given |= given.pop("kwargs", {})
    del given["self"]
    return given


def _expected(given: dict[str, object]) -> bool:
    return all(
        name in _PASSED_OVER or any(value == e for e in _EXPECTED.get(name, ()))
        for name, value in given.items()
    )


def _all_come(module: nn.Module) -> bool:
    group = group_of(sharded_models_of(module))
    return group is None or all_come(group, "save_pretrained()")


def _save_model(module: nn.Module, given: dict[str, Any]) -> bool:
    if getattr(module, "_hf_peft_config_loaded", False) or getattr(module, "hf_quantizer", None) is not None:
        return False
    folder, max_shard_size = given.pop("save_directory"), given.pop("max_shard_size", "5GB")
    if not _expected(given) or not _all_come(module):
        return False
    write_together(module, folder, _bytes(max_shard_size))
    return True


# Adapters ----------------------------------------------------------------------------------------------------------


def _of_peft(module: object) -> bool:
    return any(
        cls.__name__ == "PeftModel" and cls.__module__.partition(".")[0] == "peft"
        for cls in type(module).__mro__
    )


def _save_adapters(module: Any, method: Callable[..., object], given: dict[str, Any]) -> bool:
    """PEFT's own files: which tensors of the model it saves is asked of it, and the first rank gives it those whole."""
    folder = os.fspath(given.pop("save_directory"))
    own = {name: given.pop(name) for name in ("selected_adapters", "save_embedding_layers") if name in given}
    names = _saved_by_peft(module, **own)
    if names is None or not _expected(given) or not _all_come(module):
        return False

    def write(values: dict[str, torch.Tensor]) -> None:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".zero-export-", dir=folder) as unfinished:
            method(module, unfinished, **own, state_dict=values)
            found = [os.path.join(place, name) for place, _, files in os.walk(unfinished) for name in files]
            for path in sorted(found, key=lambda path: os.path.basename(path) == "adapter_config.json"):
                where = os.path.join(folder, os.path.relpath(path, unfinished))
                os.makedirs(os.path.dirname(where), exist_ok=True)
                os.replace(path, where)

    give_to_first(module, names, write)
    return True


def _saved_by_peft(
    module: Any, selected_adapters: list[str] | None = None, save_embedding_layers: object = "auto"
) -> list[str] | None:
    """Names of the tensors that PEFT takes of a model's ``state_dict()``; None where it would compute with them."""
    peft: Any = sys.modules["peft"]  # which made the model

    marks = {name: torch.empty(value.shape, device="meta") for name, value in module.state_dict().items()}
    names = {id(mark): name for name, mark in marks.items()}
    taken: list[str] = []
    for adapter in selected_adapters or list(module.peft_config):
        found = peft.get_peft_model_state_dict(
            module, marks, adapter, save_embedding_layers=save_embedding_layers
        )
        if any(id(value) not in names for value in found.values()):
            return None
        taken += (names[id(value)] for value in found.values())
    return list(dict.fromkeys(taken))


def _bytes(size: int | str) -> int:
    """A number of bytes as ``transformers`` takes it, such as "5GB"."""
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|)\s*", size.upper())
    if found is None:
        raise ConfigError(f'max_shard_size must be a number of bytes or text such as "5GB", not {size!r}')
    return int(float(found[1]) * _UNITS[found[2]])


def install() -> None:
    """Let ``save_pretrained`` of sharded modules come here before it is refused."""
    refusals.together["save_pretrained"] = _save
