"""Options of Inductor for the segments that it compiles: a mode of ``torch.compile``, fields of its configuration."""

from __future__ import annotations

import contextlib
import difflib
import json
import reprlib
from collections.abc import Mapping

from .errors import ConfigError

_GRAPHS = "triton.cudagraphs"
_NO_GRAPHS = (
    "Inductor's graphs of a device would copy gathered weights into memory of their own, which no plan has; "
    'mode="reduce-overhead" records segments where weights lie'
)


def check_mode(mode: object) -> None:
    """Raise where ``mode`` is none of ``torch.compile``.

    Raises:
        ConfigError: it is unknown.
    """
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if not isinstance(mode, str) or mode not in modes:
        raise ConfigError(f"mode must be one of {', '.join(modes)}, not {reprlib.repr(mode)}")


def records_graphs(mode: str | None) -> bool:
    """Whether a mode asks for graphs of the device, as "reduce-overhead" does."""
    from torch._inductor import list_mode_options

    return mode is not None and bool(list_mode_options(mode).get(_GRAPHS))


def as_held(fields: object) -> str | None:
    """Fields of ``torch._inductor.config`` by name, or their JSON, as a configuration holds them: JSON in one order.

    Raises:
        ConfigError: they are no dictionary, a field is unknown, or its value is of another type.
    """
    if fields is None:
        return None
    if isinstance(fields, str):
        try:
            fields = json.loads(fields)
        except ValueError as error:
            raise ConfigError(f"inductor must be a dictionary or its JSON: {error}") from None
    if not isinstance(fields, Mapping):
        raise ConfigError(f"inductor must be a dictionary of fields by name, not {reprlib.repr(fields)}")
    from torch._inductor import config

    known = config.get_config_copy()
    for name, value in fields.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; torch._inductor.list_options() has them all"
            raise ConfigError(f"unknown option {reprlib.repr(name)} in inductor={{...}}{hint}")
        if name == _GRAPHS and value:
            raise ConfigError(f"inductor={{{name!r}: {value!r}}} is not possible: {_NO_GRAPHS}")
        if known[name] is not None and value is not None and type(value) is not type(known[name]):
            raise ConfigError(
                f"inductor={{{name!r}: {value!r}}}: the value must be of type {type(known[name]).__name__}"
            )
    try:
        return json.dumps(dict(fields), sort_keys=True)
    except TypeError as error:
        raise ConfigError(
            f"inductor={{...}} takes values that JSON has, since ranks compare them: {error}"
        ) from None


def in_force(fields: Mapping[str, object]) -> contextlib.AbstractContextManager[object]:
    """Inductor's configuration with these fields, and without graphs of a device of its own."""
    from torch._inductor import config

    return config.patch({**fields, _GRAPHS: False})


def patches(mode: str | None, held: object) -> dict[str, object]:
    """What Inductor's configuration is to be while a segment is compiled.

    Args:
        held: what :func:`as_held` returned.
    """
    from torch._inductor import list_mode_options

    found: dict[str, object] = {} if mode is None else dict(list_mode_options(mode))
    return found if held is None else found | json.loads(str(held))
