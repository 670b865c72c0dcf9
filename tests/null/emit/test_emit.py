"""The Program of a scheduled graph: each transfer starts, is waited for and ends once, in that order."""

from __future__ import annotations

import pytest
import torch
from null.graphs import OWNER, lower, two_layers, two_layers_backward
from torch import fx

from zero_compiler.emit.emit import emit
from zero_compiler.ir.instructions import Gather, Reduce, Release, WaitGather, WaitReduce


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize(("build", "phase"), [(two_layers, "forward"), (two_layers_backward, "backward")])
def test_each_step_of_a_transfer_comes_once_and_in_order(build, phase, bucket_bytes):
    b = build()
    program, _ = b.program(lower(b, phase, bucket_bytes=bucket_bytes), phase)
    for kinds, many in (
        ((Gather, WaitGather, Release), program.gathers),
        ((Reduce, WaitReduce), program.reduces),
    ):
        for index in range(len(many)):
            at = [
                [k for k, i in enumerate(program.instrs) if type(i) is kind and i.index == index]
                for kind in kinds
            ]
            assert all(len(places) == 1 for places in at)
            assert sorted(at) == at
    names = [name for g in program.gathers for name in g.names]
    assert len(names) == len(set(names))
    assert len(program.live) == len(program.instrs)


@pytest.mark.parametrize(("build", "phase"), [(two_layers, "forward"), (two_layers_backward, "backward")])
def test_a_trial_is_the_same_program_without_graphs_of_segments(build, phase, monkeypatch):
    b = build()
    graph = lower(b, phase)
    program, _ = b.program(graph, phase)
    copies: list[fx.Node] = []
    monkeypatch.setattr(fx.Graph, "node_copy", lambda self, node, *args: copies.append(node))
    tried = emit(fx.GraphModule(torch.nn.Module(), graph), b.plans, phase, {OWNER: {}}, trial=True)
    assert tried.program == program
    assert copies == []
