"""Errors of the user's code in one line: type, message, and where it was raised."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

_OWN = tuple(
    str(Path(__file__).resolve().parents[n] / room) for n, room in ((1, ""), (2, "passes"), (2, "runtime"))
)
_MOST = 400  # characters of a message


def last_line(error: BaseException) -> str:
    """Type and message of an error behind the place in the user's code: the last one that is of nobody else's
    installation, or the one that Dynamo names."""
    text, _, captured = str(error).partition("\nfrom user code:\n")
    said = " ".join(re.split(r"\n\s*\n", text)[0].split())  # behind that Dynamo gives advice of its own
    said = said if len(said) <= _MOST else said[:_MOST] + "..."
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {line}"
    places = re.findall(r'File "([^"]+)", line (\d+)', captured) or [
        (f.filename, str(f.lineno)) for f in traceback.extract_tb(error.__traceback__)
    ]
    others = [p for p in places if not p[0].startswith((*_OWN, "<"))]
    users = [p for p in others if "site-packages" not in p[0] and not p[0].startswith(sys.base_prefix)]
    found = users or others
    return f"{found[-1][0]}:{found[-1][1]}: {line}" if found else line
