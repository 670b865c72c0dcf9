"""The verifier of Programs: each fact has a broken Program that it catches."""

from __future__ import annotations

import dataclasses

import machines
import pytest
from null.graphs import (
    OWNER,
    Build,
    aten,
    find,
    linear_graph,
    lower,
    two_layers,
    two_layers_backward,
    two_products,
)

from zero_compiler.alignment import arena_aligned
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.emit import emit, transfer_allocation
from zero_compiler.errors import VerifyError
from zero_compiler.ir import facts
from zero_compiler.ir.instructions import (
    Bring,
    Compute,
    Gather,
    KeepPart,
    Reduce,
    Release,
    WaitGather,
    WaitOffload,
    WaitReduce,
    WaitRestore,
    Write,
)
from zero_compiler.ir.program import Program
from zero_compiler.memory.peak_check import recount
from zero_compiler.memory.verify import verify_program
from zero_compiler.passes import OffloadActivations


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


def test_a_weight_read_after_its_release():
    """A release that moves before the last reader of its weight."""
    p = program()
    release = at(p, Release)
    reader = max(
        i for i, instr in enumerate(p.instrs[:release]) if set(p.instrs[release].frees) & set(instr.reads)
    )
    p.instrs.insert(reader, p.instrs.pop(release))
    bad(p, r"value \d+ is read after it was freed")


def test_a_value_written_twice():
    p = program()
    i = at(p, Compute, 1)
    p.instrs[i] = dataclasses.replace(p.instrs[i], outs=p.instrs[at(p, Compute, 0)].outs[:1])
    bad(p, r"value \d+ is written twice")


def test_a_value_outside_the_table():
    p = program()
    p = dataclasses.replace(p, num_values=p.num_values - 1)
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
    p.outputs[:] = [None if v in p.instrs[i].outs else v for v in p.outputs]
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
    p = dataclasses.replace(p, num_values=p.num_values + 1)
    bad(p, "reduction of the gradients of w, tile 1 of 4: the whole of it is reduced already")


def test_a_tile_before_the_last_that_gives_the_gradient():
    p = in_tiles()
    i = next(i for i, x in enumerate(p.instrs) if isinstance(x, WaitReduce) and p.reduces[x.index].tile)
    assert p.instrs[i].outs == (-1,)
    p.instrs[i] = dataclasses.replace(p.instrs[i], outs=(p.num_values,))
    p = dataclasses.replace(p, num_values=p.num_values + 1)
    bad(p, "tile 1 of 4 is not the last one, and gives the gradient")


def test_a_gradient_whose_last_tile_is_not_reduced():
    p = in_tiles()
    for k, r in enumerate(p.reduces):
        if r.tile:
            p.reduces[k] = dataclasses.replace(r, tile=dataclasses.replace(r.tile, of=r.tile.of + 1))
    for i, x in enumerate(p.instrs):
        if isinstance(x, WaitReduce) and p.reduces[x.index].tile:
            p.outputs[:] = [None if v in x.outs else v for v in p.outputs]
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
    context = forward.context("joint", machine=machine)
    facts.send_away(find(forward, aten.tanh.default))
    OffloadActivations((), frozenset(), tiers, 0).run(forward.graph, backward.graph, 1, context)
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
    p = dataclasses.replace(p, transient_bytes=16)
    bad(p, r"planned memory \(transient\): slot")


def test_chunks_that_are_too_small():
    p = program()
    p.gathers[1] = dataclasses.replace(p.gathers[1], chunk_numels=(1,))
    bad(p, r"gather of .*: h.1.\w has \d+ elements, its chunks 2")


def parted(phase: str = "forward") -> Program:
    """A forward that keeps parts on two ranks, or the backward that gathers them."""
    b = (two_layers if phase == "forward" else two_layers_backward)(second=2)
    reads = tuple(b.plans) if phase == "backward" else ()
    return b.program(lower(b, phase, bucket_bytes=0, reads=reads, second=frozenset(b.plans)), phase)[0]


def test_second_shards_that_are_not_all_of_a_weight():
    p = parted()
    at_first = next(k for k, g in enumerate(p.gathers) if g.parts)
    g = p.gathers[at_first]
    p.gathers[at_first] = dataclasses.replace(g, parts=tuple(n // 2 for n in g.parts))
    bad(p, r"gather of .*: 2 parts of \d+ elements are not all of it")


def test_a_part_that_is_kept_behind_the_release():
    p = parted()
    k = at(p, KeepPart)
    p.instrs[k], p.instrs[k + 1] = p.instrs[k + 1], p.instrs[k]
    bad(p, r"gather \d is released, must be ready")
    p = parted()
    p.gathers[0] = dataclasses.replace(p.gathers[0], parts=())
    bad(p, "of gather 0 no part is to stay")


def test_second_shards_whose_slots_are_too_small():
    p = parted("backward")
    (g,) = p.gathers
    p.gathers[0] = dataclasses.replace(g, chunk_numels=(9,))
    bad(p, "h.1.w has 20 elements, its chunks 18")


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
        return [0] * len(slots), max(arena_aligned(s.nbytes) for s in slots)

    b = two_layers()
    lower(b, "forward")
    monkeypatch.setattr(transfer_allocation, "pack", everything_at_zero)
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
    p.instrs[:] = [dataclasses.replace(i, free=()) if isinstance(i, Compute) else i for i in p.instrs]
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
