"""The largest models on nodes: what bounds them, and the paper's bytes of a parameter beside ours."""

from __future__ import annotations

import pytest
from null.tools.figures.given import GivenPlanner

from zero_compiler.tools.figures import nodes, papers


def test_files_bound_the_models_on_nodes():
    figure = nodes.nodes(GivenPlanner())
    assert [row.what.split()[0] for row in figure.rows] == [str(n) for n in papers.LARGEST_ON_NODES]
    for count, row in zip(papers.LARGEST_ON_NODES, figure.rows, strict=True):
        # 20 TB a node at 16 bytes of a parameter, less a part of a layer.
        if count < 128:  # where checkpoints fill the host first
            assert row.here == pytest.approx(count * papers.USABLE_FILES_BYTES / 16, rel=0.03)
    assert "1T a node" in figure.notes[0]


def test_a_host_and_a_device_bound_theirs():
    rows = {row.what: row.here for row in nodes.placement(GivenPlanner()).rows}
    # Less the checkpoints of one row a rank, which lie there too.
    assert rows["16 devices, states on the host"] == pytest.approx(1.5e12 / 16, rel=0.03)
    assert rows["one device, states on the host"] == pytest.approx(1.5e12 / 16, rel=0.03)
    assert 0.85 * 32 * 1.5e12 / 16 < rows["512 devices, states on hosts"] < 32 * 1.5e12 / 16
