"""What an optimizer that streams updates at once: pieces of parameters, in an order that overlap relies on."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_compiler.optim.optimizer import sub_groups_of
from zero_compiler.optim.updates import Entry

shapes = st.tuples(st.integers(1, 300), st.sampled_from([1, 3, 64, 96, 1024]))


@given(st.lists(shapes, min_size=1, max_size=8), st.integers(1, 1 << 19), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_beginning_of_a_weight_waits_for_no_other(of, limit, few):
    """A sub-group is fed once all its gradients are final. Pieces of one weight are to be updated in order: what comes before
    the last one stands with nothing that may be final later."""
    entries = [
        Entry(torch.nn.Parameter(torch.empty(shape, device="meta")), str(i), "nvme", {}, {"m": 4, "v": 4})
        for i, shape in enumerate(of)
    ]
    batches = [list(batch) for batch in sub_groups_of(entries, few, limit)]
    for batch in batches:
        for piece in batch:
            through = any(p.entry is piece.entry and p.last for p in batch)
            assert through or all(p.entry is piece.entry for p in batch)
    # All rows of all, once and in order.
    for entry in entries:
        pieces = [p for batch in batches for p in batch if p.entry is entry]
        assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
        rows = entry.param.shape[0]
        assert pieces[0].whole or [p.start for p in pieces[1:]] == [p.stop for p in pieces[:-1]]
        assert pieces[-1].whole or (pieces[0].start, pieces[-1].stop) == (0, rows)
