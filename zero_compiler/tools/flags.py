"""The fields of Config as flags of a command: names, types, defaults and help have one source."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Annotated, get_type_hints

import typer

from ..config import Config


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """``command(..., **fields)`` with a flag for each field of Config; it gets those that were given."""
    own = inspect.signature(command, eval_str=True)
    flags = {p.name: p for p in _flags()}

    def called(**given: object) -> None:
        command(**{name: v for name, v in given.items() if name not in flags or v is not None})

    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    called.__signature__ = own.replace(parameters=[*named, *flags.values()])  # type: ignore[attr-defined]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called


def _flags() -> list[inspect.Parameter]:
    help_of, types = help_of_fields(), get_type_hints(Config)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                _parsed(types[f.name]),
                typer.Option(
                    help=help_of[f.name],
                    show_default=f.default is not None and str(f.default),
                ),
            ],
        )
        for f in dataclasses.fields(Config)
    ]


def _parsed(kind: object) -> object:
    """What a word on the command line is read as; a dtype is given by name."""
    for plain in (bool, int, float):
        if kind in (plain, plain | None):
            return plain | None
    return str | None


def help_of_fields() -> dict[str, str]:
    """Of each field the first sentence that the docstring of Config says of it."""
    text = inspect.getdoc(Config) or ""
    args = text.partition("Args:\n")[2].partition("\nRaises:")[0]
    found: dict[str, str] = {}
    for names, said in re.findall(r"^ {4}(\w[\w, ]*): (.+\n(?:^ {8}.*\n?)*)", args, flags=re.M):
        sentence = re.split(r"\.(?: (?=[A-Z])|$)", " ".join(said.split()).replace("``", ""))[0]
        found |= dict.fromkeys(names.split(", "), sentence)
    return found
