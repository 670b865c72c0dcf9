"""What is made again in backward: full weights, and what is cheap."""

from __future__ import annotations

from expecttest import TestCase
from null.graphs import (
    two_layers,
)

from zero_compiler.passes import TagRecompute


class Goldens(TestCase):
    def test_tag_recompute(self):
        b = two_layers()
        TagRecompute(1 << 20).run(b.graph, b.context("joint"))
        rows = [
            f"{n.name}: {n.meta['recompute'].name}" if "recompute" in n.meta else f"{n.name}: -"
            for n in b.graph.nodes
            if n.op == "call_function"
        ]
        self.assertExpectedInline(
            "\n".join(rows),
            """\
h_0_b_full: MUST_RECOMPUTE
h_0_w_full: MUST_RECOMPUTE
t_default: MUST_RECOMPUTE
addmm_default: MUST_SAVE
relu_default: -
h_1_w_full: MUST_RECOMPUTE
t_default_1: MUST_RECOMPUTE
mm_default: MUST_SAVE""",
        )
