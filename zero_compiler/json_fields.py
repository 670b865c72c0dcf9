"""JSON files that people write by hand or edit: read with one sentence for whatever is wrong with them."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Callable, Collection, Sequence
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

from .errors import ConfigError
from .open_files import of_open_files

T = TypeVar("T")
_LONGEST = 120  # characters of a value in a sentence
MOST_BYTES = (1 << 63) - 1  # of a number that counts bytes


def read_json(path: Traversable, build: Callable[[Any], T], what_to_do: str) -> T:
    """What ``build`` makes of the JSON in a file.

    Args:
        what_to_do: about a file that cannot be read or has a wrong value, a clause for the message.

    Raises:
        ConfigError: the file cannot be read, is no JSON, names a key twice, or ``build`` refuses it.
    """
    try:
        return build(json.loads(path.read_text(), object_pairs_hook=_each_once))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; {what_to_do}") from None
    except RecursionError:
        raise ConfigError(f"{path}: cannot be read as JSON: it is nested too deeply; {what_to_do}") from None
    except OSError as error:
        what_to_do = of_open_files(error.errno) or what_to_do
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {what_to_do}") from None
    except ValueError as error:  # no text, or no JSON
        raise ConfigError(f"{path}: cannot be read as JSON: {error}; {what_to_do}") from None


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} is given twice in one object")
    return made


def shown(value: object) -> str:
    """A value of a file in a sentence, which may be long or nested deeply."""
    text = reprlib.repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def check_fields(file: str, what: str, data: object, known: Collection[str], needed: Collection[str]) -> None:
    """``data`` is an object that has all of the ``needed`` fields, and none but the ``known`` ones.

    Args:
        file: what the file describes, the first words of a message.
        what: the part of it that ``data`` is; "it" for the whole.

    Raises:
        ConfigError: it is not, or a field is missing or unknown.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: {what} must be an object of fields, not {shown(data)}")
    of = "" if what == "it" else f" of {what}"
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{file}: there is no field {shown(name)}{of}{hint}")
    for name in needed:
        if name not in data:
            raise ConfigError(f"{file}: {name!r}{of} is missing")


def as_list(file: str, what: str, data: object) -> Sequence[object]:
    """``data``, which is a list.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(data, (list, tuple)):
        raise ConfigError(f"{file}: {what} must be a list, not {shown(data)}")
    return data


def as_object(file: str, what: str, data: object) -> dict[str, Any]:
    """``data``, which is an object whose fields have names of the user's.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: {what} must be an object of fields, not {shown(data)}")
    return data


def as_text(file: str, what: str, data: object) -> str:
    """``data``, which is a text.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(data, str):
        raise ConfigError(f"{file}: {what} must be a text, not {shown(data)}")
    return data


def as_flag(file: str, what: str, data: object) -> bool:
    """``data``, which is true or false.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(data, bool):
        raise ConfigError(f"{file}: {what} must be true or false, not {shown(data)}")
    return data


def as_whole(file: str, what: str, data: object, least: int, most: int = MOST_BYTES) -> int:
    """``data``, which is a whole number from ``least`` to ``most``.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(data, int) or isinstance(data, bool) or not least <= data <= most:
        raise ConfigError(
            f"{file}: {what} must be a whole number from {least:,} to {most:,}, not {shown(data)}"
        )
    return data
