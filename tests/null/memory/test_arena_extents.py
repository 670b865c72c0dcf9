"""What of each arena transfers need: never more than the arena has, and all of it where there is one owner."""

from __future__ import annotations

import pytest
from null.graphs import OWNER, lower, two_layers, two_layers_backward

from zero_compiler.memory.arena_extents import Ends, ends_by_owner


@pytest.mark.parametrize(("build", "phase"), [(two_layers, "forward"), (two_layers_backward, "backward")])
def test_the_only_owner_needs_the_whole_arena(build, phase):
    b = build()
    program, _ = b.program(lower(b, phase), phase)
    assert program.transient_bytes > 0
    assert ends_by_owner(program) == {
        OWNER: Ends(program.transient_bytes, program.slots_bytes, program.own_bytes)
    }
