"""The largest numbers that a question may have."""

from __future__ import annotations

MOST_RANKS = 1 << 20  # a plan describes each
MOST_TOKENS = 1 << 24  # of a row, and rows: beyond these torch cannot count bytes
