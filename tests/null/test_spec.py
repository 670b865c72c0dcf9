"""The verifier: each fact has a broken graph, or a broken Program, that it catches."""

from __future__ import annotations

import dataclasses

import machines
import pytest
import torch
from null.graphs import OWNER, Build, aten, head_graph, linear_graph, lower
from null.sentences import ROOT, untested
from null.test_offload_activations import two_products
from null.test_passes import two_layers, two_layers_backward

from zero_compiler import arena, emit, slots
from zero_compiler.errors import VerifyError
from zero_compiler.hardware import HardwareSpec
from zero_compiler.ir import facts, ops, spec
from zero_compiler.ir.facts import ParamRef
from zero_compiler.passes import JOINT, Context, OffloadActivations, run_passes
from zero_compiler.program import (
    Bring,
    Compute,
    Gather,
    Program,
    Reduce,
    Release,
    WaitGather,
    WaitOffload,
    WaitReduce,
    WaitRestore,
    Write,
)
from zero_compiler.recount import recount
from zero_compiler.verify import verify_program


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


def find(b: Build, target, k: int = 0):
    return list(b.graph.find_nodes(op="call_function", target=target))[k]


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
    run_passes(b.graph, JOINT, b.context("joint", tile_bytes=40))
    node = find(b, ops.tiled, 1)
    tiling = facts.tiling(node)
    columns = tiling.columns
    if "inputs" in change:
        change = {"inputs": tuple(0 if c is None else c for c in columns.inputs)}
    facts.set_tiling(node, dataclasses.replace(tiling, columns=dataclasses.replace(columns, **change)))
    broken(b, fact, "merged")


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
    b.plans[ref] = dataclasses.replace(b.plans[ref], cut=False)
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
    broken(b, "writes to %.*, which %.* still reads")


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
    run_passes(b.graph, JOINT[:1], b.context("joint"))


# Programs --------------------------------------------------------------------------------------------------


def program(phase: str = "forward", **kw) -> Program:
    b = (two_layers if phase == "forward" else two_layers_backward)(**kw)
    return b.program(lower(b, phase), phase)[0]


def bad(p: Program, fact: str) -> None:
    with pytest.raises(VerifyError, match=fact):
        verify_program(p, {OWNER: 2})


def at(p: Program, kind: type, k: int = 0) -> int:
    return [i for i, instr in enumerate(p.instrs) if isinstance(instr, kind)][k]


def test_a_value_read_before_it_is_written():
    p = program()
    i, j = at(p, Compute, 0), at(p, Compute, 1)
    p.instrs[i], p.instrs[j] = p.instrs[j], p.instrs[i]
    bad(p, r"value \d+ is read before anything writes it")


def test_a_value_read_after_it_was_freed():
    p = program()
    i = at(p, Compute, 0)
    j = at(p, Compute, 1)
    gone = p.instrs[i].ins[0]
    assert gone in p.instrs[i].free
    p.instrs[j] = dataclasses.replace(p.instrs[j], ins=(*p.instrs[j].ins, gone))
    bad(p, r"value \d+ is read after it was freed")


def test_a_value_written_twice():
    p = program()
    i = at(p, Compute, 1)
    p.instrs[i] = dataclasses.replace(p.instrs[i], outs=p.instrs[at(p, Compute, 0)].outs[:1])
    bad(p, r"value \d+ is written twice")


def test_a_value_outside_the_table():
    p = program()
    p.num_values -= 1
    bad(p, r"value \d+ is outside the table of \d+ values")


def test_an_output_that_was_freed():
    p = program()
    i = at(p, Compute, 1)
    p.instrs[i] = dataclasses.replace(p.instrs[i], free=(p.outputs[1],))
    bad(p, r"output \d+ was never written, or was freed")


@pytest.mark.parametrize(
    ("phase", "kind", "fact"),
    [
        ("forward", Gather, "gather 0 is idle, must be started"),
        ("forward", WaitGather, "is read before anything writes it"),
        ("forward", Release, "ends ready, must end released"),
        ("backward", Reduce, "reduce 0 is idle, must be started"),
        ("backward", WaitReduce, "was never written"),
    ],
)
def test_a_missing_step_of_a_transfer(phase, kind, fact):
    p = program(phase)
    del p.instrs[at(p, kind)]
    bad(p, fact)


def test_a_reduction_that_nothing_waits_for():
    p = program("backward")
    i = at(p, WaitReduce)
    p.outputs = [None if v in p.instrs[i].outs else v for v in p.outputs]
    del p.instrs[i]
    bad(p, "reduction of the gradients of h.1.w is not waited for")


def test_a_kept_gather_that_is_released():
    p = program(stage=2)
    p.instrs.append(Release(0, p.instrs[at(p, WaitGather)].outs))
    bad(p, "ends released, must end ready")


def test_a_release_of_other_values():
    p = program()
    i = at(p, Release)
    p.instrs[i] = dataclasses.replace(p.instrs[i], values=p.instrs[i].values[:1])
    bad(p, r"releases values \(\d+,\), but gather 0 gave")


def test_two_reductions_of_one_gradient_in_a_program():
    p = program("backward")
    p.reduces[1] = dataclasses.replace(p.reduces[1], names=p.reduces[0].names[:1] * len(p.reduces[1].names))
    bad(p, "is reduced twice")


def in_tiles() -> Program:
    """A Program with a gradient that is reduced in tiles."""
    b = linear_graph(2, 1)
    return b.program(lower(b, "forward"), "forward")[0]


def test_a_tile_of_a_gradient_that_is_reduced_whole():
    p = in_tiles()
    p.reduces.append(dataclasses.replace(p.reduces[0], tile=None))
    k = len(p.reduces) - 1
    p.instrs[:0] = [Reduce(k, (0,), ()), WaitReduce(k, (p.num_values,))]
    p.num_values += 1
    bad(p, "reduction of the gradients of w, tile 1 of 4: the whole of it is reduced already")


def test_a_tile_before_the_last_that_gives_the_gradient():
    p = in_tiles()
    i = next(i for i, x in enumerate(p.instrs) if isinstance(x, WaitReduce) and p.reduces[x.index].tile)
    assert p.instrs[i].outs == (-1,)
    p.instrs[i] = dataclasses.replace(p.instrs[i], outs=(p.num_values,))
    p.num_values += 1
    bad(p, "tile 1 of 4 is not the last one, and gives the gradient")


def test_a_gradient_whose_last_tile_is_not_reduced():
    p = in_tiles()
    for k, r in enumerate(p.reduces):
        if r.tile:
            p.reduces[k] = dataclasses.replace(r, tile=dataclasses.replace(r.tile, of=r.tile.of + 1))
    for i, x in enumerate(p.instrs):
        if isinstance(x, WaitReduce) and p.reduces[x.index].tile:
            p.outputs = [None if v in x.outs else v for v in p.outputs]
            p.instrs[i] = dataclasses.replace(x, outs=(-1,))
    bad(p, "the last tile of the gradient of w is not reduced")


def test_tiles_that_are_less_than_the_gradient():
    p = in_tiles()
    for k, r in enumerate(p.reduces):
        if r.tile:
            p.reduces[k] = dataclasses.replace(r, tile=dataclasses.replace(r.tile, numel=r.tile.numel + 1))
    whole = p.reduces[0].tile.numel
    bad(p, f"tile 4 of 4 ends at element {whole - 1} of {whole}")


def in_files(phase: str = "forward", tiers: tuple[str, ...] = ("nvme",)) -> Program:
    """A forward that hands a tensor on in a file, or its backward."""
    forward, backward = two_products()
    fast = {"latency_us": 1e-6, "bytes_per_us": 1e9}
    machine = HardwareSpec.from_dict(machines.machine(nvme_read=fast, nvme_write=fast, host_device=fast))
    context = forward.context("joint", machine=machine, away=frozenset(), activation_bytes=0, tiers=tiers)
    facts.send_away(find(forward, aten.tanh.default))
    OffloadActivations().run(forward.graph, backward.graph, 1, context)
    build = forward if phase == "forward" else backward
    return build.program(lower(build, phase, machine=machine), phase)[0]


def test_an_activation_that_is_not_waited_for():
    p = in_files()
    del p.instrs[at(p, WaitOffload)]
    bad(p, "activation .* ends started, must end released")


@pytest.mark.parametrize(("phase", "onward"), [("forward", Write), ("backward", Bring)])
def test_an_activation_that_stops_half_way(phase, onward):
    p = in_files(phase, ("host", "nvme"))
    del p.instrs[at(p, onward)]
    bad(p, "offload 0 is started, must be sent on")


@pytest.mark.parametrize(("phase", "onward"), [("forward", Write), ("backward", Bring)])
def test_an_activation_that_is_sent_on_from_where_it_waits(phase, onward):
    p = in_files(phase)
    p.instrs.insert(at(p, WaitOffload if phase == "forward" else WaitRestore), onward(0))
    bad(p, "offload 0 has one step to go, and is not sent on")


@pytest.mark.parametrize("place", ["offset", "where"])
def test_an_activation_between_two_blocks(place):
    p = in_files()
    p.offloads[0] = dataclasses.replace(p.offloads[0], **{place: 1})
    bad(p, "activation .*: lies at no multiple of 4096")


def test_slots_that_overlap():
    p = program()
    assert p.gathers[0].offsets[0] != p.gathers[1].offsets[0]
    p.gathers[1] = dataclasses.replace(p.gathers[1], offsets=(p.gathers[0].offsets[0],))
    bad(p, r"planned memory \(transient\): slots .* \(slots .*, ...\)")


def test_a_staging_area_that_overlaps():
    p = program()
    p.gathers[0] = dataclasses.replace(p.gathers[0], staging=p.gathers[0].offsets[0])
    bad(p, r"planned memory \(transient\): slots .* \(slots .*, ...\)")


def test_a_bucket_without_staging():
    p = program()
    p.gathers[0] = dataclasses.replace(p.gathers[0], staging=-1)
    bad(p, "needs a place in the arena and has none")


def test_a_bucket_of_gradients_without_staging():
    p = program("backward")
    (k,) = (k for k, r in enumerate(p.reduces) if len(r.names) > 1)
    p.reduces[k] = dataclasses.replace(p.reduces[k], staging=-1)
    bad(p, "reduction of the gradients of h.0.w, h.0.b: needs a staging area")


def test_a_slot_outside_the_arena():
    p = program()
    p.transient_bytes = 16
    bad(p, r"planned memory \(transient\): slot")


def test_chunks_that_are_too_small():
    p = program()
    p.gathers[1] = dataclasses.replace(p.gathers[1], chunk_numels=(1,))
    bad(p, r"gather of .*: h.1.\w has \d+ elements, its chunks 2")


def test_gradients_that_peers_may_still_read():
    b = two_layers_backward()
    b.plans |= {ref: dataclasses.replace(plan, shared=True) for ref, plan in b.plans.items()}
    p = b.program(lower(b, "backward", bucket_bytes=0), "backward")[0]
    one, two = (at(p, kind, k) for kind, k in ((WaitReduce, 0), (Reduce, 1)))
    assert one < two  # on this rank the first has ended
    p.reduces[1] = dataclasses.replace(p.reduces[1], staging=p.reduces[0].staging)
    bad(p, r"planned memory \(own\): slots")


def test_kept_weights_that_overlap():
    p = program(stage=2)
    p.gathers[0] = dataclasses.replace(p.gathers[0], offsets=(0, 4))
    bad(p, "kept weights of m overlap")
    p.gathers[0] = dataclasses.replace(p.gathers[0], offsets=(0, 0))
    bad(p, "kept weights of m overlap at byte 0")
    p = program(stage=2)
    p.gathers[1] = dataclasses.replace(p.gathers[1], offsets=p.gathers[0].offsets[:1])
    bad(p, "kept weights of m overlap at byte 0")


def test_a_kept_weight_in_two_places():
    p = program(stage=2)
    p.gathers[0] = dataclasses.replace(p.gathers[0], names=p.gathers[0].names[:1] * 2, shapes=((1, 1),) * 2)
    bad(p, r"gather of .*: .* is kept in two places")


def test_a_kept_weight_outside_its_arena():
    p = program(stage=2)
    ends = [o + n * 2 * 4 for g in p.gathers for o, n in zip(g.offsets, g.chunk_numels, strict=True)]
    verify_program(p, {OWNER: 2}, kept_bytes={OWNER: max(ends)})
    for kept in ({OWNER: max(ends) - 1}, {}):
        with pytest.raises(
            VerifyError, match=f"kept weights of m end at byte {max(ends)}, and their arena has"
        ):
            verify_program(p, {OWNER: 2}, kept_bytes=kept)


def test_a_planner_that_sizes_the_kept_arena_too_small_is_caught(monkeypatch):
    b = two_layers(stage=2)
    lower(b, "forward")
    monkeypatch.setattr(emit, "kept_ends", lambda tables: dict.fromkeys(tables, 64))
    with pytest.raises(VerifyError, match="kept weights of m end at byte"):
        b.program(b.graph, "forward")


def test_a_planner_that_overlaps_is_caught(monkeypatch):
    def everything_at_zero(slots):
        return [0] * len(slots), max(arena.aligned(s.nbytes) for s in slots)

    b = two_layers()
    lower(b, "forward")
    monkeypatch.setattr(slots, "pack", everything_at_zero)
    with pytest.raises(VerifyError, match="planned memory"):
        b.program(b.graph, "forward")


def test_live_bytes_that_pass_the_budget():
    b = Build(**{f"h__{i}__w": (4, 4) for i in range(4)})
    x = b.input("x", 3, 4)
    for i in range(4):
        x = b.op(aten.mm.default, x, b.weight(f"h.{i}.w"))
    b.done(x)
    p = b.program(lower(b, "forward"), "forward")[0]
    budget = max(p.live) - p.buffer_bytes
    verify_program(p, {OWNER: 2}, budget)
    with pytest.raises(VerifyError, match=f"{budget} bytes are live, and the budget leaves {budget - 1}"):
        verify_program(p, {OWNER: 2}, budget - 1)
    # The plan's own count stays, but what was freed is held to the end.
    p.instrs = [dataclasses.replace(i, free=()) if isinstance(i, Compute) else i for i in p.instrs]
    with pytest.raises(VerifyError, match=r"instruction \d+ \(compute\): .* bytes are live, and the budget"):
        verify_program(p, {OWNER: 2}, budget)


def test_gradients_that_pass_the_budget():
    p = program("backward")
    gradients = 4 * sum(n for r in p.reduces for n in r.chunk_numels)
    most = max(others + reduced for reduced, others in recount(p))
    assert most <= max(p.live) - p.buffer_bytes
    verify_program(p, {OWNER: 2}, most, gradients)
    # Those of the rest of the model are there from the first instruction to the last.
    with pytest.raises(VerifyError, match="bytes are live, and the budget leaves"):
        verify_program(p, {OWNER: 2}, most, gradients + 4)
    i = at(p, Reduce)
    p.instrs[i] = dataclasses.replace(p.instrs[i], free=())  # a gradient outlives its reduction
    with pytest.raises(VerifyError, match="bytes are live, and the budget leaves"):
        verify_program(p, {OWNER: 2}, most, gradients)


# All of them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["verify.py", "ir/spec.py"])
def test_every_fact_has_a_broken_case(file):
    assert untested(ROOT / "zero_compiler" / file, {"_fail", "VerifyError"}) == []
