"""The count of bytes by instructions alone, beside the plan's own."""

from __future__ import annotations

import pytest
from null.graphs import lower, two_layers, two_layers_backward

from zero_compiler.memory.peak_check import recount


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("build", "phase"), [(two_layers, "forward"), (two_layers_backward, "backward")])
def test_the_plan_counts_no_less_than_its_instructions_say(build, phase, world):
    b = build(world=world)
    program, _ = b.program(lower(b, phase), phase)
    counted = [program.buffer_bytes + sum(row) for row in recount(program)]
    assert len(counted) == len(program.instrs)
    assert all(own <= plan for own, plan in zip(counted, program.live, strict=True))
    if phase == "forward":
        assert max(counted) == max(program.live)
