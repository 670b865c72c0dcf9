"""Which weights are worth their way in 8 bits: by what a link saves and packing costs, and by what can be quantised."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from null.instructions import spec_of

from zero_compiler.cost.quantised_gathers import pays
from zero_compiler.layout import Layout

F32, BF16 = torch.float32, torch.bfloat16


def worth(shape=(1024, 1024), dtype=F32, rest=F32, world=2, bytes_per_us=100.0, memory=1e5, **fields) -> bool:
    spec = dataclasses.replace(spec_of(bytes_per_us=bytes_per_us, **fields), memory_bytes_per_us=memory)
    return pays(Layout(shape, rest, world, bool(shape)), dtype, torch.int8, spec)


def test_a_large_weight_over_a_slow_link_does():
    assert worth()
    assert worth(dtype=BF16)
    assert worth(rest=BF16, dtype=BF16)
    assert worth(shape=(64, 3, 3, 3))


@pytest.mark.parametrize(
    "what",
    [
        {"shape": ()},
        {"shape": (1 << 20,)},  # a vector
        {"shape": (1 << 20, 1)},  # whose scales are four times as large as its numbers
        {"shape": (4, 4)},  # saves less than a start of another transfer takes
        {"dtype": torch.float64},
        {"rest": torch.float64},
        {"world": 1},
        {"memory": 10.0},  # packing takes longer than the bytes that it saves
        {"bytes_per_us": 1e6},
    ],
    ids=str,
)
def test_others_do_not(what):
    assert not worth(**what)


def test_where_it_begins_to_pay_is_where_the_times_are_equal():
    """Two ranks, rows of 256 float32: 1,024 bytes become 260. Memory moves 5 of each number twice on half of them."""

    def saved_us(rows):
        moved = 5 * 256 * (rows + rows // 2)
        return rows * (1024 - 260) / 100.0 - moved / 1000.0

    found = [rows for rows in range(2, 40, 2) if worth((rows, 256), memory=1000.0, latency_us=50.0)]
    assert found == [rows for rows in range(2, 40, 2) if saved_us(rows) > 50.0]
    assert 2 < found[0] < 38
