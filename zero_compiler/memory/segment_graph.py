"""A compute segment: a run of compute nodes between two transfers, as a graph of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .generated_code import Generated


@dataclass
class SegmentGraph:
    """A compute segment as a graph of its own, with the fake values of its inputs.

    Args:
        root: has the constants that the graph names.
        generated: what the code that it was compiled to does with memory; None: it was not, or that is not known.
    """

    root: torch.nn.Module
    graph: fx.Graph
    inputs: list[Any]
    generated: Generated | None = None

    @functools.cached_property
    def gm(self) -> fx.GraphModule:
        """The graph as a module. Code is written for it, so that what only counts bytes does without."""
        return fx.GraphModule(self.root, self.graph)
