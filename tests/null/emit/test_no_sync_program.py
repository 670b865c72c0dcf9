"""Backwards under zero.no_sync have a Program of their own: what it does, holds and costs, and what it may not lack."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from expecttest import TestCase
from harness import SimulatedModel
from machines import machine
from marks import slow, thorough
from models import TiedAndFrozen
from null.graphs import OWNER, lower, two_layers_backward
from null.ir.test_program import planned
from null.passes.tiling.test_tile_operators import Layers, ids
from torch import nn

import zero_compiler as zero
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.cost.simulate import simulate
from zero_compiler.cost.timeline import COMPUTE, LINK
from zero_compiler.emit.no_sync_program import accumulating
from zero_compiler.errors import VerifyError
from zero_compiler.ir.instructions import Keep, Reduce, WaitReduce
from zero_compiler.ir.program import Program
from zero_compiler.memory.peak_check import recount
from zero_compiler.memory.verify import verify_accumulating, verify_program

WORLDS = {OWNER: 2}


def both(bucket_bytes: int = 0, **kw) -> tuple[Program, Program]:
    """The backward of two layers, and the same under zero.no_sync."""
    b = two_layers_backward(**kw)
    base = b.program(lower(b, "backward", bucket_bytes=bucket_bytes), "backward")[0]
    return base, accumulating(base, {OWNER})


class Goldens(TestCase):
    def test_program(self):
        base, kept = both()
        self.assertExpectedInline(
            base.text(live=False),
            """\
gather          h.1.w float32[5, 4]
compute         segment 0:
reduce-scatter  h.1.w float32[5, 4]
wait            h.1.w
compute         segment 1:
release         h.1.w
reduce-scatter  h.0.w float32[4, 4]
reduce-scatter  h.0.b float32[4]
wait            gradients of h.1.w
wait            gradients of h.0.w
wait            gradients of h.0.b""",
        )
        self.assertExpectedInline(
            kept.text(),
            """\
gather          h.1.w float32[5, 4]                                                      live 1,940
compute         segment 0:                                                               live 2,020
keep            h.1.w float32[5, 4]                                                      live 1,972
wait            h.1.w                                                                    live 1,892
compute         segment 1:                                                               live 2,004
release         h.1.w                                                                    live 1,924
keep            h.0.w float32[4, 4]                                                      live 1,924
keep            h.0.b float32[4]                                                         live 1,860""",
        )
        self.assertExpectedInline(
            kept.collectives(),
            """\
phase backward under zero.no_sync
gather h.1.w float32 12 elements a rank""",
        )


def test_it_survives_json():
    base, kept = both()
    again = Program.from_dict(json.loads(kept.to_json()))
    assert again == kept
    assert (again.title, base.title) == ("backward under zero.no_sync", "backward")
    assert set(again.params()) == set(base.params())
    assert again.outputs == [None] * len(base.outputs)


# What it computes --------------------------------------------------------------------------------------------------


def square(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def tokens(rank: int, micro: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 11, (4 + micro,), generator=torch.Generator().manual_seed(10 * micro + rank)),)


def accumulate(run: SimulatedModel, batches: list) -> None:
    """All but the last batch under zero.no_sync."""
    run.sync = False
    for batch in batches[:-1]:
        run.step(batch, square)
        assert all(row.grad is None for rows in run.rows for row in rows.values())
        assert all(rank.waiting for rank in run.ranks)
    run.sync = True
    run.step(batches[-1], square)
    assert not any(rank.waiting for rank in run.ranks)


def total(run: SimulatedModel, batches: list) -> dict[str, torch.Tensor | None]:
    """Mean gradients of plain PyTorch, summed over batches."""
    each = [run.eager(batch, square)[1] for batch in batches]
    return {n: None if each[0][n] is None else sum(grads[n] for grads in each) for n in each[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "copies", "fields"),
    [
        (1, 1, {"stage": 3}),
        (2, 1, {"stage": 3, "bucket_bytes": 0}),
        (3, 1, {"stage": 1}),
        (2, 2, {"stage": 3}),
        (2, 1, {"stage": 0}),
        *thorough((3, 1, {"stage": 3, "bucket_bytes": 100}), (4, 1, {"stage": 2}), (2, 2, {"stage": 0})),
    ],
)
def test_two_backwards_that_keep_and_one_that_reduces_equal_plain(world, copies, fields):
    run = SimulatedModel(TiedAndFrozen(), world, copies=copies, dynamic=True, **fields)
    batches = [[tokens(rank, micro) for rank in range(run.world)] for micro in range(3)]
    accumulate(run, batches)
    run.check_gradients(total(run, batches))


@pytest.mark.slow
def test_tiles_of_gradients_are_kept_where_they_lie_in_the_whole():
    run = SimulatedModel(Layers(11), 2, stage=3, bucket_bytes=0, tile_bytes=96)
    batches = [[(ids(rank + 5 * micro, 11),) for rank in range(2)] for micro in range(3)]
    accumulate(run, batches)
    program, _ = run.frames[-1].accumulating
    assert any(k.tile and k.tile.of > 1 for k in program.keeps)
    run.check_gradients(total(run, batches), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_sums_are_made_in_reduce_dtype():
    fields = {"stage": 3, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    run, apart = (SimulatedModel(TiedAndFrozen(), 2, dynamic=True, **fields) for _ in range(2))
    batches = [[tokens(rank, micro) for rank in range(2)] for micro in range(3)]
    accumulate(run, batches)
    for batch in batches:
        apart.step(batch, square)
    for mine, theirs in zip(run.rows, apart.rows, strict=True):
        for name, row in mine.items():
            # Sums in bf16 would be off by 4e-3.
            torch.testing.assert_close(row.grad, theirs[name].grad, rtol=1e-5, atol=1e-7)
    program, _ = run.frames[-1].accumulating
    assert {(k.dtype, k.grad_dtype) for k in program.keeps} == {("float32", "bfloat16")}


# What it must not lack ---------------------------------------------------------------------------------------------


def refused(program: Program, base: Program, fact: str, owners: tuple[str, ...] = (OWNER,)) -> None:
    with pytest.raises(VerifyError, match=fact):
        verify_accumulating(program, base, owners, WORLDS)


def first(program: Program, kind: type) -> int:
    return next(i for i, instr in enumerate(program.instrs) if isinstance(instr, kind))


def test_what_is_derived_is_verified():
    for bucket_bytes in (0, 1 << 20):
        base, kept = both(bucket_bytes)
        verify_accumulating(kept, base, {OWNER}, WORLDS)
        verify_accumulating(accumulating(base, set()), base, set(), WORLDS)
        assert accumulating(base, set()) == base


def test_a_reduction_that_is_left():
    base, kept = both()
    i = first(kept, Keep)
    keep = kept.instrs[i]
    kept = dataclasses.replace(kept, reduces=[base.reduces[keep.index]], live=[])
    kept.instrs[i : i + 1] = [
        Reduce(0, keep.ins, keep.free),
        WaitReduce(0, base.instrs[first(base, WaitReduce)].outs),
    ]
    instrs = [dataclasses.replace(x, index=x.index - 1) if isinstance(x, Keep) else x for x in kept.instrs]
    left = dataclasses.replace(kept, keeps=kept.keeps[1:], instrs=instrs)
    refused(left, base, r"reduction of the gradients of h.1.w: they are to be kept")
    refused(kept, base, r"the sum of the gradients of h.1.w is not made")
    refused(base, base, r"reduction of the gradients of .*: they are to be kept")


def test_a_gradient_that_is_lost():
    base, kept = both()
    i = first(kept, Keep)
    del kept.instrs[i]
    refused(kept, base, r"the sum of the gradients of h.1.w is not made")
    del kept.keeps[0]
    kept.instrs[:] = [
        dataclasses.replace(x, index=x.index - 1) if isinstance(x, Keep) else x for x in kept.instrs
    ]
    verify_program(kept, WORLDS)  # by itself it is a Program of fewer gradients
    refused(kept, base, r"the gradient of h.1.w is lost: it is neither kept nor reduced")


def test_a_gradient_that_is_kept_twice_or_from_another_value():
    base, kept = both()
    i, j, _ = (k for k, instr in enumerate(kept.instrs) if isinstance(instr, Keep))
    kept.instrs[j] = dataclasses.replace(kept.instrs[j], index=kept.instrs[i].index)
    refused(kept, base, r"keep 0 is done, must be idle")
    base, kept = both()
    kept.instrs[i] = dataclasses.replace(kept.instrs[i], ins=(0,), free=())
    refused(kept, base, r"the gradient of h.1.w is lost")
    base, kept = both()
    kept.keeps[1] = dataclasses.replace(kept.keeps[1], names=kept.keeps[0].names)
    refused(kept, base, r"the gradient of h.1.w is reduced twice")


def test_another_order_or_other_owners():
    base, kept = both()
    kept.instrs.append(kept.instrs.pop(first(kept, Keep)))
    refused(kept, base, r"a backward under zero.no_sync does something else than the one that reduces")
    base, kept = both()
    refused(kept, base, r"sum of the gradients of .*: they are to be reduced", owners=())
    base, kept = both()
    kept.outputs[-1] = 0
    refused(kept, base, r"output \d+ is lost")


# What it holds and costs -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", [*thorough(1), 2])
@pytest.mark.parametrize(
    "fields", [{}, {"bucket_bytes": 0}, *slow({"stage": 2}, {"param_dtype": "bf16"}, {"stage": 0})]
)
def test_the_plan_and_the_verifier_count_alike(world, fields):
    for frame in planned(world=world, batch=(4, 9), **fields):
        base, (kept, _) = frame.programs["backward"], frame.accumulating
        assert kept.waiting_bytes == sum(
            plan.numel * plan.reduce_dtype.itemsize for plan in frame.params.values()
        )
        counted = [kept.buffer_bytes + sum(row) for row in recount(kept)]
        for line, live, again in zip(kept.text().splitlines(), kept.live, counted, strict=True):
            assert again <= live, f"{line}: {again} bytes, planned {live}"
        assert max(counted) == max(kept.live)
        assert kept.buffer_bytes <= base.buffer_bytes


@pytest.mark.parametrize("shared", [False, True])
def test_buffers_that_only_reductions_used_are_not_counted(shared):
    b = two_layers_backward(stage=2)  # nothing is gathered into the arena of this backward
    b.plans |= {ref: dataclasses.replace(plan, shared=shared) for ref, plan in b.plans.items()}
    base = b.program(lower(b, "backward"), "backward")[0]
    assert (base.own_bytes if shared else base.transient_bytes) > 0
    assert accumulating(base, {OWNER}).buffer_bytes == 0
    base, kept = both()
    (gather,) = kept.gathers
    assert kept.transient_bytes == gather.offsets[0] + 512  # the last unit of the arena that it needs


def test_no_link_is_busy_and_sums_take_their_time_in_memory():
    spec = HardwareSpec.from_dict(machine())
    base, kept = both(stage=2)  # the weights are there
    assert simulate(base, spec, 2).nbytes(LINK) > 0
    timeline = simulate(kept, spec, 2)
    assert timeline.nbytes(LINK) == 0
    numel = 4 * 4 + 4 + 5 * 4
    us = numel * 12 / spec.memory_bytes_per_us + 3 * spec.kernel_us
    assert timeline.total_us == pytest.approx(us) == pytest.approx(timeline.busy_us(COMPUTE))
    labels = [s.label for s in timeline.spans if s.label.startswith("sum")]
    assert labels == [f"sum of the gradients of {name}" for name in ("h.1.w", "h.0.w", "h.0.b")]


def test_the_report_shows_it_in_short_and_the_json_in_full():
    model = zero.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), stage=3)
    told = zero.inspect(model, (torch.ones(3, 8),))
    text = str(told)
    (line,) = (x for x in text.splitlines() if "backward under zero.no_sync" in x)
    kept, timeline = told.frames[0].accumulating
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    assert line == (
        f"frame {told.frames[0].index}, backward under zero.no_sync: {len(kept.instrs)} instructions on the same "
        f"segments, 4 gradients kept in {nbytes:,} bytes instead of reduced, arena {kept.buffer_bytes:,} bytes, "
        f"peak {max(kept.live):,} bytes"
    )
    assert timeline.lines()[0] in text
    assert "keep  " not in text
    (frame,) = told.to_dict()["frames"]
    assert Program.from_dict(frame["programs"][kept.title]) == kept
    assert frame["timelines"][kept.title] == timeline.to_dict()
