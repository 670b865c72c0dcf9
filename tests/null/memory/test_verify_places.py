"""The verifier of places by itself: a Program as it was planned passes, one whose buffers overlap does not."""

from __future__ import annotations

import dataclasses

import pytest
from null.graphs import OWNER, lower, two_layers

from zero_compiler.errors import VerifyError
from zero_compiler.memory.verify_places import verify_places


def test_only_places_that_overlap_are_refused():
    b = two_layers()
    program, _ = b.program(lower(b, "forward"), "forward")
    verify_places(program, {OWNER: 2}, None)
    first, second, *rest = program.gathers
    moved = dataclasses.replace(second, offsets=first.offsets[:1])
    broken = dataclasses.replace(program, gathers=[first, moved, *rest])
    with pytest.raises(VerifyError, match=r"planned memory \(transient\): slots"):
        verify_places(broken, {OWNER: 2}, None)
