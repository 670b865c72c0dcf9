"""Sums of gradients that go between hosts in blocks: through the reference executor, and how far off they are."""

from __future__ import annotations

import pytest
import torch
from marks import slow
from null.graphs import check_numbers, lower, two_layers_backward


@pytest.mark.parametrize(
    "fields", [{}, *slow({"bucket_bytes": 0}, {"stage": 2}, {"world": 6, "sum_hosts": 3})], ids=str
)
def test_a_backward_adds_up_what_arrives(fields):
    bucket_bytes = fields.get("bucket_bytes", 1 << 20)
    given = {k: v for k, v in fields.items() if k != "bucket_bytes"}
    check_numbers(
        two_layers_backward(**({"world": 4, "sum_hosts": 2} | given)), "backward", bucket_bytes=bucket_bytes
    )


@pytest.mark.parametrize("fields", [{}, *slow({"tile_rows": {"h__1__w": 1}})], ids=str)
def test_it_is_not_what_it_is_in_full_and_says_so(fields):
    packed, exact = (two_layers_backward(world=4, sum_hosts=hosts, **fields) for hosts in (2, 1))
    graphs = [lower(b, "backward", bucket_bytes=0) for b in (packed, exact)]
    found = [b.by_reference(g, "backward") for b, g in zip((packed, exact), graphs, strict=True)]
    off = [
        (a - b).abs().max()
        for some, more in zip(*found, strict=True)
        for a, b in zip(some, more, strict=True)
        if a.numel()
    ]
    largest = max(float(t.abs().max()) for some in found[1] for t in some if t.numel())
    assert 0 < max(off) < largest / 10
    text = packed.program(graphs[0], "backward")[0].text()
    assert "reduce-scatter as int8 between hosts" in text
    assert "int8" not in exact.program(graphs[1], "backward")[0].text()
    torch.testing.assert_close(found[1], exact.by_reference(graphs[1], "backward"), rtol=0, atol=0)
