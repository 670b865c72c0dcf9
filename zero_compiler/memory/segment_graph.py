"""A compute segment: a run of compute nodes between two transfers, which can be made a graph of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir import facts
from .generated_code import Generated


@dataclass
class SegmentGraph:
    """A compute segment, by the nodes of the graph that it is a part of. A graph of its own is made of them where one
    is asked for: what counts bytes or compares segments does without, and of equal ones a single one is compiled.

    Args:
        root: has the constants that the graph names.
        ins: what the segment takes.
        body: what it computes, after what it makes again of views and constants; in order.
        outs: what it gives.
        own: its own graph, where that was made.
        generated: what the code that it was compiled to does with memory; None: it was not, or that is not known.
    """

    root: torch.nn.Module
    ins: Sequence[fx.Node]
    body: Sequence[fx.Node]
    outs: Sequence[fx.Node]
    own: fx.Graph | None = None
    generated: Generated | None = None

    @staticmethod
    def of(root: torch.nn.Module, graph: fx.Graph) -> SegmentGraph:
        """All of a graph as a segment."""
        *nodes, output = graph.nodes
        ins = [n for n in nodes if n.op == "placeholder"]
        given: Any = output.args[0]
        outs = list(given) if isinstance(given, (tuple, list)) else [given]
        return SegmentGraph(root, ins, [n for n in nodes if n.op != "placeholder"], outs, graph)

    @property
    def inputs(self) -> list[Any]:
        """Fake values of what it takes."""
        return [facts.value(n) for n in self.ins]

    @property
    def graph(self) -> fx.Graph:
        """The segment as a graph of its own."""
        if self.own is None:
            self.own = self._copied()
        return self.own

    def _copied(self) -> fx.Graph:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.ins):
            env[node] = graph.placeholder(f"in_{i}")
            for key in ("val", "tensor_meta"):
                if key in node.meta:
                    env[node].meta[key] = node.meta[key]
        for node in self.body:
            env[node] = graph.node_copy(node, lambda n: env[n])
        out_node = graph.output(tuple(env[n] for n in self.outs))
        out_node.meta["val"] = tuple(facts.value(n) for n in self.outs)
        return graph

    @functools.cached_property
    def gm(self) -> fx.GraphModule:
        """The graph as a module. Code is written for it, so that what only counts bytes does without."""
        return fx.GraphModule(self.root, self.graph)
