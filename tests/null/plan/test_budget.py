"""Which weights a budget keeps, beside an exact solver; and the sentence for a plan that does not fit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zero_compiler.config import Config
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.params.shard import shard_over
from zero_compiler.plan.budget import Candidate, check, choose
from zero_compiler.report.memory import Memory
from zero_compiler.tools.planning import planned_group, report

candidates = st.lists(
    st.builds(lambda b, t: (b, t), st.integers(1, 5000), st.integers(0, 1000)), min_size=0, max_size=9
)


def _exact(items: list[Candidate], room: int) -> float:
    best = 0.0
    for n in range(len(items) + 1):
        for some in itertools.combinations(items, n):
            if sum(c.nbytes for c in some) <= room:
                best = max(best, sum(c.saved_us for c in some))
    return best


@given(candidates, st.integers(0, 4096))
@settings(max_examples=200, deadline=None)
def test_small_cases_are_solved_exactly(raw, room):
    # Fewer sums of sizes than are followed at once.
    items = [Candidate(f"w{i}", b, float(t)) for i, (b, t) in enumerate(raw)]
    kept = choose(items, room)
    assert sum(c.nbytes for c in items if c.name in kept) <= room
    assert sum(c.saved_us for c in items if c.name in kept) == _exact(items, room)


@given(candidates, st.integers(4097, 20000))
@settings(max_examples=100, deadline=None)
def test_so_are_larger_ones_of_as_few(raw, room):
    items = [Candidate(f"w{i}", b * 7, float(t)) for i, (b, t) in enumerate(raw)]
    kept = choose(items, room)
    assert sum(c.nbytes for c in items if c.name in kept) <= room
    assert sum(c.saved_us for c in items if c.name in kept) == _exact(items, room)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 1000)), min_size=20, max_size=60), st.data())
@settings(max_examples=50, deadline=None)
def test_of_many_little_is_lost(raw, data):
    """Beside a table with a column for every byte of room."""
    room = data.draw(st.integers(0, sum(b for b, _ in raw)))
    items = [Candidate(f"w{i}", b, float(t)) for i, (b, t) in enumerate(raw)]
    kept = choose(items, room)
    assert sum(c.nbytes for c in items if c.name in kept) <= room
    best = [0] * (room + 1)
    for nbytes, us in raw:
        for left in range(room, nbytes - 1, -1):
            best[left] = max(best[left], best[left - nbytes] + us)
    assert sum(c.saved_us for c in items if c.name in kept) >= 0.99 * best[room]


def test_equal_input_gives_equal_choice():
    items = [Candidate(f"w{i}", 100 + i, 10.0) for i in range(50)]
    assert choose(items, 2000) == choose(list(items), 2000)


def sharded_models_on(world, **fields):
    model = nn.Linear(8, 8)
    shard_over(model, planned_group(world), Config.make(None, fields))
    return sharded_models_of(model)


def advice(memory, **fields):
    sharded_models = sharded_models_on(2, **fields)
    check(memory, memory.peak, "anywhere", sharded_models)
    with pytest.raises(MemoryBudgetError) as error:
        check(memory, memory.peak - 1, "segment 3 of h.1", sharded_models)
    assert "1 bytes too small" in str(error.value)
    assert ", at segment 3 of h.1;" in str(error.value)
    return str(error.value).rpartition("; ")[2]


def test_what_does_not_fit_says_by_how_much_where_and_what_would_help():
    some = {"parameters": 10, "gradients": 10, "optimizer": 10, "kept": 0, "arena": 5, "programs": 20}
    activations, rest, kept, arena = (
        Memory(**some | {name: 1000}) for name in ("programs", "optimizer", "kept", "arena")
    )
    for stage in range(4):
        assert "checkpoint on the repeated blocks" in advice(activations, stage=stage)
    assert advice(rest, stage=3).startswith("more ranks than 2 would help most")
    assert advice(rest, stage=0) == "stage=3, under which the 2 ranks share these bytes, would help most"
    assert advice(kept, stage=2).startswith("stage=3, which releases")
    assert advice(arena, stage=3).startswith("param_dtype=torch.bfloat16")
    # All that is kept can be released, where a batch of half the size saves half of the activations.
    both = Memory(**some | {"kept": 600, "programs": 1000})
    assert advice(both, stage=2).startswith("stage=3, which releases")
    assert "checkpoint" in advice(Memory(**some | {"kept": 400, "programs": 1000}), stage=2)
    # What has been done already, or does not help, is not said.
    assert advice(kept, stage=3).startswith("more ranks than 2")
    assert advice(arena, stage=3, param_dtype="bf16").startswith("more ranks than 2")
    assert advice(arena, stage=0).startswith("stage=3")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


def planned(rows=2, world=2, **fields):
    torch._dynamo.reset()
    # On one rank, where operators are fused, layers as small as these share a unit.
    return report(Layers(), (torch.zeros(rows, 64),), world, compute="aten", **fields)


def refused(**fields):
    """The advice for a plan that is a little too large."""
    budget_bytes = planned(**fields).memory.peak // 2
    with pytest.raises(MemoryBudgetError) as error:
        planned(**fields, memory_budget_bytes=budget_bytes)
    return str(error.value).rpartition("; ")[2]


@pytest.mark.slow
def test_the_advice_for_a_plan_helps():
    assert refused(stage=0) == "stage=3, under which the 2 ranks share these bytes, would help most"
    assert planned(stage=3).memory.peak < planned(stage=0).memory.peak
    assert (
        refused(stage=0, world=1)
        == "stage=3, under which more ranks than 1 share these bytes, would help most"
    )
    assert refused(stage=3).startswith("more ranks than 2")
    assert planned(stage=3, world=4).memory.peak < planned(stage=3).memory.peak
    assert "checkpoint" in refused(stage=0, rows=4096)
    for fields in ({"stage": 2, "world": 16}, {"stage": 2, "world": 16, "param_dtype": "bf16"}):
        # Its kept weights are the most of it, and released weights take less.
        assert refused(**fields).startswith("stage=3, which releases")
        assert planned(**fields | {"stage": 3}).memory.peak < planned(**fields).memory.peak
    # Beside them activations are more, of which a smaller batch leaves a part.
    busy = {"stage": 2, "world": 16, "param_dtype": "bf16", "rows": 32}
    assert refused(**busy).startswith("stage=3, which releases")
    assert planned(**busy | {"stage": 3}).memory.peak < planned(**busy | {"rows": 16}).memory.peak
    assert "param_dtype" not in refused(stage=3, param_dtype="bf16", bucket_bytes=1 << 20, world=16)
