"""Which inputs and outputs of a phase are the caller's."""

from __future__ import annotations

import torch
from torch import fx

from zero_compiler.ir.recorded_phase import RecordedPhase, given_bytes, recorded_phase, written_inputs


def _graph(names, write=None, outputs=1):
    graph = fx.Graph()
    nodes = {}
    for name in names:
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = torch.empty(2, 3, device="meta")
    first = nodes[names[0]]
    if write is not None:
        graph.call_function(torch.ops.aten.copy_.default, (nodes[write], first))
    graph.output([first] * outputs)
    return graph


def test_of_a_forward_all_but_rows_of_parameters_and_what_is_written_to():
    graph = _graph(["primals_1", "primals_2", "primals_3", "primals_4"], write="primals_4", outputs=5)
    recorded = recorded_phase(graph, "forward", {1}, 2)
    assert recorded == RecordedPhase(given=(0, 2), returned=(0, 1))
    assert given_bytes(graph, recorded) == 2 * 24
    later = frozenset({"primals_3"})  # to which backward writes
    assert recorded_phase(graph, "forward", {1}, 2, later).given == (0,)


def test_of_an_inference_every_output():
    assert recorded_phase(_graph(["arg0_1", "arg1_1"], outputs=3), "inference", {0}, 0) == RecordedPhase(
        given=(1,), returned=(0, 1, 2)
    )


def test_of_a_backward_tangents_and_inputs_of_the_forward_but_nothing_that_it_has_made():
    graph = _graph(["primals_2", "primals_1", "view", "tangents_1"])
    assert recorded_phase(graph, "backward", {1}, 1) == RecordedPhase(given=(1, 3), returned=())
    graph = _graph(["primals_2", "primals_1", "view", "tangents_1"], write="primals_1")
    assert written_inputs(graph) == {"primals_1"}
    assert recorded_phase(graph, "backward", {1}, 1).given == (3,)
