"""A few digits that stand for a value, equal in every process."""

from __future__ import annotations

import hashlib
import json


def digest_of(value: object) -> str:
    """Sixteen hexadecimal digits of a text or of plain JSON values."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
