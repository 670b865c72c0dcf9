"""The verifier of graphs: each fact has a broken graph that it catches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from null.graphs import (
    OWNER,
    Build,
    aten,
    find,
    head_graph,
    lower,
    lower_joint,
    two_layers,
    two_layers_backward,
)
from null.sentences import ROOT, untested

from zero_compiler.errors import VerifyError
from zero_compiler.ir import facts, ops, spec
from zero_compiler.ir.facts import ParamRef
from zero_compiler.passes import Context, run_passes


def forward(**kw) -> Build:
    b = two_layers(**kw)
    lower(b, "forward", bucket_bytes=20)
    spec.verify(b.graph, "scheduled", b.plans)
    return b


def backward(**kw) -> Build:
    b = two_layers_backward(**kw)
    lower(b, "backward")
    spec.verify(b.graph, "scheduled", b.plans)
    return b


def broken(b: Build, fact: str, level: str = "scheduled", **kw) -> None:
    b.graph.lint()
    with pytest.raises(VerifyError, match=fact):
        spec.verify(b.graph, level, b.plans, **kw)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"size": 4}, "cuts %.* along dimension [01], which has no 4 columns"),
        ({"outputs": (0, 1)}, "lays result [01] along dimension [01], which has no 5 columns"),
        ({"inputs": 0}, "cuts %.* by tokens and by rows of the weight"),
    ],
)
def test_columns_that_are_not_those_of_the_weight(change, fact):
    b = head_graph(tile_rows={"w": 1})
    lower_joint(b, tile_bytes=40)
    node = find(b, ops.tiled, 1)
    tiling = facts.tiling(node)
    columns = tiling.columns
    if "inputs" in change:
        change = {"inputs": tuple(0 if c is None else c for c in columns.inputs)}
    facts.set_tiling(node, dataclasses.replace(tiling, columns=dataclasses.replace(columns, **change)))
    broken(b, fact, "merged")


# Order -----------------------------------------------------------------------------------------------------


def test_a_value_that_is_read_before_it_is_made():
    b = two_layers()
    *_, output = b.graph.nodes
    output.prepend(find(b, ops.unshard))
    with pytest.raises(VerifyError, match="reads %.*, which does not stand before it"):
        spec.verify(b.graph, "captured", b.plans)


def test_two_values_of_one_name():
    b = two_layers()
    find(b, ops.unshard, 1).name = find(b, ops.unshard, 0).name
    with pytest.raises(VerifyError, match="two nodes have one name"):
        spec.verify(b.graph, "captured", b.plans)


# Markers ---------------------------------------------------------------------------------------------------


def test_two_markers_for_one_weight():
    b = Build(w=(4, 4))
    b.done(b.op(aten.mm.default, b.weight("w"), b.weight("w")))
    broken(b, "parameter 'w' is gathered more than once", "merged")


def test_two_markers_for_one_gradient():
    b = Build(w=(4,))
    t = b.input("tangents_1", 4)
    b.done(b.op(aten.add.Tensor, b.reduced("w", t), b.reduced("w", t)))
    broken(b, "parameter 'w' is reduced more than once", "merged")


def test_markers_left():
    broken(two_layers(), "a marker is left after lowering", "lowered")


# Transfers -------------------------------------------------------------------------------------------------


def test_a_gather_of_another_shape():
    b = forward()
    gather = find(b, ops.gather)
    facts.set_value(gather, [b._fake((4, 5))])
    broken(b, r"gathers h.0.\w as \(4, 5\) torch.float32, its plan says")


def test_a_gather_of_another_dtype():
    b = forward()
    gather = find(b, ops.gather)
    facts.set_value(gather, [v.to(torch.bfloat16) for v in facts.value(gather)])
    broken(b, "torch.bfloat16, its plan says")


def test_a_gather_with_too_few_values():
    b = forward()
    facts.set_value(find(b, ops.gather), [])
    broken(b, "moves 1 parameters but has 0 values and 1 shapes")


def test_a_gather_of_what_every_rank_holds():
    b = forward()
    ref = facts.params(find(b, ops.gather))[0]
    b.plans[ref] = dataclasses.replace(b.plans[ref], sharded=False)
    broken(b, r"gathers h.0.\w, which every rank holds whole")


def test_a_gradient_of_another_shape():
    b = backward()
    reduction = find(b, ops.reduce)
    grad = reduction.args[0][0]
    facts.set_value(grad, b._fake((7, 7)))
    broken(b, r"gradient of h.1.w has shape \(7, 7\)")


@pytest.mark.parametrize(
    ("said", "fact"),
    [
        ("value", "gives the gradient of h.1.w as torch.bfloat16, its plan says torch.float32"),
        ("argument", "gives the gradient of h.1.w as torch.bfloat16, its plan says torch.float32"),
        ("whole", "gives every rank all of the gradient of h.1.w, its plan says otherwise"),
    ],
)
def test_a_reduction_to_something_else(said, fact):
    b = backward()
    reduction = find(b, ops.reduce)
    if said == "value":
        facts.set_value(reduction, [v.to(torch.bfloat16) for v in facts.value(reduction)])
    else:
        changed = {3: torch.bfloat16} if said == "argument" else {4: True}
        reduction.args = tuple(changed.get(i, a) for i, a in enumerate(reduction.args))
    broken(b, fact)


def test_a_bucket_that_is_added_up_in_two_dtypes():
    b = backward()
    first, second = facts.params(find(b, ops.reduce, 1))
    assert (first.name, second.name) == ("h.0.w", "h.0.b")
    b.plans[second] = dataclasses.replace(b.plans[second], reduce_dtype=torch.bfloat16)
    broken(b, "adds up the gradient of h.0.b in torch.float32, its plan says torch.bfloat16")


def test_a_missing_wait():
    b = forward()
    gather = find(b, ops.gather)
    with b.graph.inserting_before(b.graph.output_node()):
        early = b.graph.call_function(aten.relu.default, (gather,))
    facts.set_value(early, facts.value(gather)[0])
    broken(b, "a transfer has exactly one wait and no other reader, found")


def test_two_waits():
    b = forward()
    gather = find(b, ops.gather)
    with b.graph.inserting_after(find(b, ops.wait)):
        b.graph.call_function(ops.wait, (gather,))
    broken(b, "a transfer has exactly one wait and no other reader, found")


def test_a_wait_that_is_read_as_a_whole():
    b = forward()
    with b.graph.inserting_before(b.graph.output_node()):
        b.graph.call_function(aten.relu.default, (find(b, ops.wait),))
    broken(b, "reads a wait as a whole")


# Gradients -------------------------------------------------------------------------------------------------


def test_a_gradient_reduced_twice():
    b = backward()
    reduction = find(b, ops.reduce)
    with b.graph.inserting_after(reduction):
        again = b.graph.call_function(ops.reduce, reduction.args)
    facts.set_params(again, facts.params(reduction))
    facts.set_value(again, facts.value(reduction))
    with b.graph.inserting_after(again):
        facts.set_value(b.graph.call_function(ops.wait, (again,)), facts.value(again))
    broken(b, "gradient of h.1.w is reduced twice, first by %")


def test_a_reduced_gradient_that_is_dropped():
    b = backward()
    (output,) = b.graph.find_nodes(op="output")
    output.args = ((None, *output.args[0][1:]),)
    broken(b, "the reduced gradient of h.0.w is not returned")


def test_a_gradient_that_reaches_no_reduction():
    b = two_layers_backward()
    want = spec.reduced_by(b.graph)
    (output,) = b.graph.find_nodes(op="output")
    marker = output.args[0][0]
    output.args = ((None, *output.args[0][1:]),)
    b.graph.erase_node(marker)
    broken(b, "the gradient of h.0.w reaches no reduction", "captured", reduced=want)


def test_a_pass_that_loses_a_gradient_is_caught():
    @dataclasses.dataclass(frozen=True)
    class Careless:
        name: str = "careless"

        def run(self, graph, ctx: Context) -> None:
            (output,) = graph.find_nodes(op="output")
            marker = output.args[0][2]
            marker.replace_all_uses_with(marker.args[0])
            graph.erase_node(marker)

    b = two_layers_backward()
    with pytest.raises(VerifyError, match=r"the gradient of h.1.w reaches no reduction"):
        run_passes(b.graph, [(Careless(), "captured")], b.context("backward"))


def test_a_gradient_that_nobody_asked_for():
    b = backward()
    broken(b, "the gradient of h.0.b is reduced, and was not before", reduced=spec.reduced_by(b.graph) - {
        ParamRef(OWNER, "h.0.b")
    })  # fmt: skip


def test_a_gradient_written_while_its_reduction_reads_it():
    b = backward()
    reduction = find(b, ops.reduce)
    grad = reduction.args[0][0]
    with b.graph.inserting_after(reduction):
        node = b.graph.call_function(aten.add_.Tensor, (grad, 1.0))
    facts.set_value(node, facts.value(grad))
    broken(b, "writes to %.*, which %.* has sent")


# Lives of weights ------------------------------------------------------------------------------------------


def test_a_weight_that_is_returned():
    b = forward()
    (output,) = b.graph.find_nodes(op="output")
    weight = next(n for n in b.graph.nodes if facts.is_weight(n))
    output.args = ((*output.args[0], weight),)
    broken(b, "returns storage of the gathered weight %", "lowered")


def test_a_view_of_a_weight_that_is_returned():
    b = forward()
    (output,) = b.graph.find_nodes(op="output")
    output.args = ((*output.args[0], find(b, aten.t.default)),)
    broken(b, "returns storage of the gathered weight %", "lowered")


def test_a_write_to_a_weight():
    b = forward()
    weight = next(n for n in b.graph.nodes if facts.is_weight(n))
    view = find(b, aten.t.default)
    for target in (weight, view):
        with b.graph.inserting_after(view):
            node = b.graph.call_function(aten.mul_.Tensor, (target, 2.0))
        facts.set_value(node, facts.value(target))
        broken(b, "writes to the gathered weight %", "lowered")
        b.graph.erase_node(node)


def test_a_weight_without_release():
    b = forward()
    b.graph.erase_node(find(b, ops.release))
    broken(b, r"gathered weight h.0.\w is released 0 times, expected 1")


def test_a_weight_released_twice():
    b = forward()
    with b.graph.inserting_before(b.graph.output_node()):
        b.graph.call_function(ops.release, find(b, ops.release).args)
    broken(b, "is released 2 times, expected 1")


def test_a_kept_weight_that_is_released():
    b = forward(stage=2)
    weight = next(n for n in b.graph.nodes if facts.is_weight(n))
    with b.graph.inserting_before(b.graph.output_node()):
        b.graph.call_function(ops.release, ([weight],))
    broken(b, "is released 1 times, expected 0")


def test_a_release_of_something_else():
    b = forward()
    x = next(n for n in b.graph.nodes if n.name == "x")
    release = find(b, ops.release)
    release.args = ([*release.args[0], x],)
    broken(b, "is released but is no gathered weight")


def test_a_release_across_gathers():
    b = forward()
    first, second = (find(b, ops.release, k) for k in (0, 1))
    assert first.next is second
    second.args = ([*first.args[0], *second.args[0]],)
    b.graph.erase_node(first)
    broken(b, "releases something else than the weights of one gather")


@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_use_after_release(through_a_view):
    b = forward()
    weight = next(n for n in b.graph.nodes if facts.is_weight(n) and facts.value(n).dim() == 2)
    used = next(u for u in weight.users if u.target is aten.t.default) if through_a_view else weight
    with b.graph.inserting_before(b.graph.output_node()):
        late = b.graph.call_function(aten.relu.default, (used,))
    facts.set_value(late, facts.value(used))
    broken(b, "uses the gathered weight %.* after its release")


def test_a_gathered_weight_that_nothing_names():
    b = forward()
    bias = next(n for n in b.graph.nodes if facts.is_weight(n) and facts.value(n).dim() == 1)
    release = next(u for u in bias.users if u.target is ops.release)
    other = next(n for n in b.graph.nodes if n.name == "x")
    bias.replace_all_uses_with(other)
    b.graph.erase_node(release)
    b.graph.erase_node(bias)
    broken(b, "is gathered, but nothing names or releases it")


def test_a_full_weight_that_is_saved():
    b = Build(w=(4, 4))
    x = b.input("x", 3, 4)
    w = b.weight("w")
    cast = b.op(aten._to_copy.default, b.op(aten.t.default, w), dtype=torch.bfloat16)
    out = b.op(aten.mm.default, x, w)
    b.done(out, x, cast)
    backward = Build()
    for name, dtype in (("x", torch.float32), ("cast", torch.bfloat16)):
        facts.set_value(backward.input(name, 3, 4), torch.empty(3 if name == "x" else 4, 4, dtype=dtype))
    spec.verify_partition(b.graph, 3, backward.graph)  # the user's own output may be one
    with pytest.raises(VerifyError, match="is saved for backward, but is nothing but the full weight 'w'"):
        spec.verify_partition(b.graph, 1, backward.graph)


def test_what_backward_takes_is_what_forward_saves():
    b, backward = Build(), Build()
    x, y = b.input("x", 3, 4), b.input("y", 4)
    b.done(x, x, y)
    backward.input("x", 3, 4)
    with pytest.raises(VerifyError, match="is saved for backward, which does not take it"):
        spec.verify_partition(b.graph, 1, backward.graph)
    backward.input("y", 5)
    with pytest.raises(
        VerifyError, match=r"is saved for backward as torch.float32 \[4\], which takes %y as .*\[5\]"
    ):
        spec.verify_partition(b.graph, 1, backward.graph)
    spec.verify_partition(b.graph, 3, backward.graph)


def test_levels_hold_where_they_should():
    b = two_layers()
    spec.verify(b.graph, "captured", b.plans)
    lower_joint(b, "merge-markers")


# All of them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["memory/verify.py", "memory/verify_places.py", "ir/spec.py"])
def test_every_fact_has_a_broken_case(file):
    assert untested(ROOT / "zero_compiler" / file, {"_fail", "VerifyError"}) == []
