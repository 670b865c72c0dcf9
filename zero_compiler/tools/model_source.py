"""Models as the command line names them: a function of the user's, or a configuration of transformers.

``my:make``, ``my:make(layers=4)``, ``path/to/config.json`` or a folder with one, ``LlamaConfig(hidden_size=4096)``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from . import transformers_models
from .error_lines import last_line
from .transformers_models import near

FORMS = (
    "module:function, module:function(layers=4), a transformers config.json or a folder with one, or a class of "
    "transformers with fields, such as LlamaConfig(hidden_size=4096)"
)


@dataclass(frozen=True)
class ModelSource:
    """A model on the meta device, and what its forward is planned with.

    Args:
        model: nothing of it is allocated.
        inputs: of a batch: a tuple of positional arguments or a dict of keyword arguments.
        batch: rows of the inputs; None: whoever made the model has made its inputs too, and they stay as they are.
        about: what was made, for the report.
    """

    model: nn.Module
    inputs: Callable[[int | None], object]
    batch: int | None
    about: str


def model_source(text: str, batch: int | None = None, sequence: int | None = None) -> ModelSource:
    """The model that ``text`` names.

    Args:
        batch, sequence: rows and tokens of integer inputs and labels; for configurations of transformers, and for
            functions that return a model alone. None: 1 row, and 2,048 tokens or as many as the model has positions.

    Raises:
        ConfigError: it names nothing, or what it names cannot be made: in the words of the error that it raised, with
            the file and the line of the user's code.
    """
    for name, size in (("--batch", batch), ("--sequence", sequence)):
        if size is not None and size < 1:
            raise ConfigError(f"{name} must be at least 1, not {size}")
    if text.endswith(".json") or os.path.isdir(text):
        return _of_config(transformers_models.config_in(Path(text)), batch, sequence)
    called, arguments, fields = _call(text)
    module, colon, name = called.partition(":")
    if colon:
        return _of_factory(text, module, name, arguments, fields, batch, sequence)
    if "(" in text or called.endswith("Config"):
        if arguments:
            raise ConfigError(
                f"MODEL {text!r}: fields of a configuration are given by name, as hidden_size=4096"
            )
        return _of_config(transformers_models.config_of(called, fields), batch, sequence)
    if text.endswith(".py") or os.path.isfile(text):
        raise ConfigError(
            f"MODEL {text!r} is a file: name the module and a function of it, {Path(text).stem}:FUNCTION"
        )
    raise ConfigError(f"MODEL {text!r} is none of these: {FORMS}")


def _call(text: str) -> tuple[str, list[object], dict[str, object]]:
    """Name, arguments and keyword arguments of ``name(...)``, which are literals; nothing of it is evaluated.

    Raises:
        ConfigError: it has another form.
    """
    name, parenthesis, rest = text.partition("(")
    if not parenthesis:
        return text, [], {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise SyntaxError
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"MODEL {text!r} cannot be read: it must be like {name}(layers=4)") from None
    given: list[tuple[str, ast.expr]] = [("", a) for a in call.args]
    given += [(k.arg or "**", k.value) for k in call.keywords]
    values = []
    for field, node in given:
        said = ast.unparse(node)
        try:
            if field == "**" or isinstance(node, ast.Starred):
                raise ValueError
            values.append(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise ConfigError(
                f"MODEL {name}: {field + '=' if field else ''}{said} is no literal; give a number, a text in quotes, "
                "True, False, None, or a list, tuple or dict of these"
            ) from None
    names = [field for field, _ in given if field]
    for field in names:
        if names.count(field) > 1:
            raise ConfigError(f"MODEL {name}: {field} is given twice; give it once")
    count = len(call.args)
    return name, values[:count], dict(zip(names, values[count:], strict=True))


def _of_config(config: object, batch: int | None, sequence: int | None) -> ModelSource:
    return _of_tokens(
        _run(type(config).__name__, lambda: transformers_models.model_of(config)), batch, sequence
    )


def _of_tokens(model: nn.Module, batch: int | None, sequence: int | None) -> ModelSource:
    tokens = transformers_models.tokens_of(model, sequence)
    rows = batch or 1
    about = f"{type(model).__name__}, {_size(model)}; {tokens.about(rows)}"
    return ModelSource(model, lambda rows: tokens.inputs(rows or 1), rows, about)


def _of_factory(
    text: str,
    module: str,
    name: str,
    arguments: Sequence[object],
    fields: dict[str, object],
    batch: int | None,
    sequence: int | None,
) -> ModelSource:
    called = f"{module}:{name}"
    factory = _factory(called, module, name)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of C, which says so itself
        signature = None
    if signature is not None:
        _check_arguments(called, signature, arguments, fields)

    def make() -> object:
        with torch.device("meta"):
            return factory(*arguments, **fields)

    made = _run(called, make)
    if isinstance(made, nn.Module) and (batch is not None or sequence is not None):
        return _of_tokens(made, batch, sequence)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        found = "a model without inputs" if isinstance(made, nn.Module) else type(made).__name__
        raise ConfigError(
            f"{called} must return a module and its inputs, (model, example_inputs), and returned {found}"
            + (
                "; or give --batch and --sequence for a model of tokens"
                if isinstance(made, nn.Module)
                else ""
            )
        )
    if batch is not None or sequence is not None:
        raise ConfigError(
            f"{called} returns its own inputs, which --batch and --sequence do not change; give it their sizes as "
            f"arguments, {called}(batch=8), or let it return the model alone"
        )
    model, inputs = made
    return ModelSource(model, lambda _: inputs, None, f"{type(model).__name__}, {_size(model)}")


def _size(model: nn.Module) -> str:
    """Parameters and their dtypes, in words."""
    parameters = list(model.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    return f"{sum(p.numel() for p in parameters):,} parameters in {' and '.join(dtypes) or 'no dtype'}"


def _check_arguments(
    called: str, signature: inspect.Signature, arguments: Sequence[object], fields: dict[str, object]
) -> None:
    known = signature.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for field in fields:
            if field not in known:
                said = ", ".join(known) or "none"
                raise ConfigError(
                    f"{called} has no argument {field!r}{near(field, known) or f'; it takes {said}'}"
                )
    try:
        signature.bind(*arguments, **fields)
    except TypeError as error:
        raise ConfigError(f"{called}{signature}: {error}") from None


def _factory(called: str, module: str, name: str) -> Callable[..., object]:
    if not module or not name:
        raise ConfigError(f"MODEL {called!r} is not module:function")
    if module.endswith(".py"):
        raise ConfigError(
            f"MODEL {called!r} names a file: give the module's name, {Path(module).stem}:{name}"
        )
    sys.path.insert(0, "")
    try:
        found = _run(f"import of {module}", lambda: importlib.import_module(module), module)
    finally:
        sys.path.remove("")
    if not hasattr(found, name):
        own = [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"module {module!r} has no function {name!r}{near(name, own)}")
    factory: Callable[..., object] = getattr(found, name)
    if not callable(factory):
        raise ConfigError(f"{called} is no function but {type(factory).__name__}")
    return factory


def _run(what: str, make: Callable[[], object], module: str = "") -> Any:
    """``make()``; what it raises becomes one sentence.

    Args:
        module: the one that is imported: if it is not there, that is said.
    """
    try:
        return make()
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not module or not (module == missing or module.startswith(missing + ".")):
            raise ConfigError(f"{what}: {last_line(error)}") from None
        known = [m.name for m in pkgutil.iter_modules()] if "." not in missing else []
        raise ConfigError(
            f"there is no module {missing!r}{near(missing, known)}; it is looked for in this folder, "
            f"{str(Path.cwd())!r}, and where Python finds modules"
        ) from None
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        said = last_line(error)
        asks_a_gpu = "CUDA" in said or "NVIDIA" in said
        do = "; make it without a device: --device says for which one it is planned" if asks_a_gpu else ""
        raise ConfigError(f"{what}: {said}{do}") from None
