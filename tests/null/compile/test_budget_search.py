"""Plans within budgets: what is decided once, two budgets together, and what cannot fit whatever is tried."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from harness import SimulatedModel
from machines import machine
from null.passes.tiling.test_tile_mlp import Net as Mlps
from null.passes.tiling.test_tile_mlp import x
from torch import fx, nn

from zero_compiler import passes
from zero_compiler.compile import budget_search as fitting_module
from zero_compiler.compile import phase_lowering as lowering_module
from zero_compiler.compile.budget_search import Fitting
from zero_compiler.compile.phase_lowering import Lowering
from zero_compiler.cost.cost import smaller_buckets
from zero_compiler.cost.hardware import load
from zero_compiler.emit import emit as emit_module
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.tools.planning import report

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 256


class Wide(nn.Module):
    """Weights make the peak: a budget has them gathered in tiles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Asked(SimulatedModel):
    """Notes what the first rank is asked, and holds to it."""

    asked: tuple[str, ...] = ()

    def decide(self, sharded_model, key, text, room_bytes=None):
        self.asked = (*self.asked, key)
        sharded_model.agreed.decided[key] = text
        return text


def rows(count: int) -> tuple[torch.Tensor]:
    return (torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.slow
def test_a_rank_that_compiles_again_asks_nobody():
    """It may be alone in that, and would wait for an answer for as long as the group does."""
    budget = int(0.9 * report(Wide(), rows(32), 2, bucket_bytes=0).memory.peak)
    model = Asked(Wide(), 2, stage=3, memory_budget_bytes=budget, bucket_bytes=0)
    model.check([rows(32), rows(32)], lambda out: out)
    assert any(model.sharded_model.agreed.tile_bytes.values())
    assert model.asked
    model.asked = ()
    model.check([rows(24), rows(24)], lambda out: out)
    assert len(model.frames) == 2
    assert model.asked == ()


class Ordered(Asked):
    """The first rank wants MLPs in tiles of tokens, and then finds that weights in tiles take less time."""

    def decide(self, sharded_model, key, text, room_bytes=None):
        told = {"mlp-memory": "True", "order": "first"}
        return super().decide(sharded_model, key, told.get(key.partition("/")[0], text), room_bytes)


@pytest.mark.slow
def test_a_rank_that_compiles_again_holds_to_the_order_of_measures():
    """What was decided for an order that was dropped has no part in its plan: collectives are those of other ranks."""
    budget = int(0.9 * planned(64, layers=2, bucket_bytes=0).memory.peak)
    torch._dynamo.reset()
    model = Ordered(Mlps(layers=2), 2, stage=3, memory_budget_bytes=budget, bucket_bytes=0)
    for tokens in (64, 48):
        model.check([x(0, tokens), x(0, tokens)], lambda out: out)
    assert {key.partition("/")[0] for key in model.asked} >= {"mlp-memory", "order"}
    assert len(model.asked) == len(set(model.asked))
    gathers = [[g.names for p in frame.programs.values() for g in p.gathers] for frame in model.frames]
    assert len(gathers) == 2
    assert gathers[0] == gathers[1]


@pytest.mark.slow
def test_a_search_lowers_no_phase_twice_alike_and_takes_as_many_steps_at_any_depth(monkeypatch):
    """Cuts and trials are what planning within a budget takes time for."""
    tried: list[tuple] = []
    cuts: list[int] = []
    lowered, partitioned = Lowering._lowered, fitting_module.min_cut_rematerialization_partition
    phases: list[fx.GraphModule] = []  # alive, so that ids are of one graph each

    def lower(self, gm, phase, segment_us=None, trial=False, some_tiles=False, proves=True):
        if trial:
            context, options = self.state.context(phase), self.state.options(phase)
            phases.append(gm)
            tried.append(
                (
                    id(gm),
                    tuple(passes.tiles_in(gm.graph)),
                    options.bucket_bytes,
                    some_tiles,
                    str(context.params),
                )
            )
        return lowered(self, gm, phase, segment_us, trial, some_tiles, proves)

    monkeypatch.setattr(Lowering, "_lowered", lower)
    monkeypatch.setattr(
        fitting_module,
        "min_cut_rematerialization_partition",
        lambda *args, **kwargs: cuts.append(1) or partitioned(*args, **kwargs),
    )
    steps = []
    for layers in (5, 10):
        free = planned(256, layers).memory
        tried.clear(), cuts.clear(), phases.clear()
        budget = free.at_rest + (free.peak - free.at_rest) // 2
        assert planned(256, layers, memory_budget_bytes=budget).memory.peak <= budget
        assert len(set(tried)) == len(tried)
        steps.append((len(tried), len(cuts)))
    assert steps[0] == steps[1]
    assert steps[0][0] <= 24
    assert steps[0][1] <= 8


def test_what_a_search_takes_was_verified(monkeypatch):
    """Plans whose time is predicted are not, unless one of them is taken: that is then lowered once more."""
    verified: list[list] = []
    verify = emit_module.verify_program
    monkeypatch.setattr(
        emit_module,
        "verify_program",
        lambda program, *args, **kwargs: verified.append(program.instrs) or verify(program, *args, **kwargs),
    )
    proved: list[bool] = []
    predicted = Lowering.predicted_us

    def predict(self, graphs):
        before = len(verified)
        us = predicted(self, graphs)
        proved.append(len(verified) > before)
        return us

    monkeypatch.setattr(Lowering, "predicted_us", predict)
    free = report(Wide(), rows(32), 2, bucket_bytes=0)
    torch._dynamo.reset()
    budget = free.memory.at_rest + (free.memory.peak - free.memory.at_rest) // 2
    (frame,) = report(Wide(), rows(32), 2, bucket_bytes=0, memory_budget_bytes=budget).frames
    assert proved
    assert not any(proved)
    assert all(program.instrs in verified for program in frame.programs.values())


def planned(tokens: int = 512, layers: int = 8, **fields):
    torch._dynamo.reset()
    return report(Mlps(layers=layers), x(0, tokens), 2, **fields)


@pytest.mark.slow
def test_a_budget_for_activations_is_kept_beside_one_for_all_memory():
    """MLPs in tiles may keep the one with more activations than the other allows."""
    free = planned(layers=4)
    allowed = free.frames[0].held_bytes * 2 // 5
    alone = planned(layers=4, activation_budget_bytes=allowed)
    peak = alone.memory.peak
    both = planned(layers=4, activation_budget_bytes=allowed, memory_budget_bytes=peak * 4 // 5)
    assert both.memory.peak <= peak * 4 // 5
    assert both.frames[0].held_bytes <= allowed


@pytest.mark.slow
def test_a_refusal_names_a_budget_that_a_plan_is_found_for(monkeypatch):
    """And does not write out tiles that are too large even as small as they can be: there may be thousands."""
    rest = planned(layers=2).memory.at_rest
    with monkeypatch.context() as patched:
        patched.setattr(Lowering, "with_distances", None)
        with pytest.raises(MemoryBudgetError, match="the least that a plan was found for") as refused:
            planned(layers=2, memory_budget_bytes=rest + 4096)
    named = re.search(r"the predicted peak is ([\d,]+) bytes", str(refused.value))
    least = int(named[1].replace(",", ""))
    assert planned(layers=2, memory_budget_bytes=least).memory.peak <= least


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["MOST_TRIALS", "MOST_OPERATORS", "plan_seconds"])
def test_a_search_that_has_tried_enough_ends_with_what_it_has_found(limit, monkeypatch):
    free = planned(layers=2).memory
    budget = free.at_rest + (free.peak - free.at_rest) // 2
    fields = {"plan_seconds": 0.0} if limit == "plan_seconds" else {}
    if not fields:
        monkeypatch.setattr(lowering_module, limit, 1)
    told = planned(layers=2, memory_budget_bytes=budget, **fields)
    assert told.memory.peak <= budget
    ended = {"MOST_TRIALS": "the limit of 1 trials", "MOST_OPERATORS": "the limit of 1 operators on trial"}
    assert told.frames[0].search_ended == ended.get(limit, "plan_seconds=0")
    assert f"no more were tried: {told.frames[0].search_ended}" in told.summary()


@pytest.mark.slow
def test_a_long_search_says_now_and_then_that_it_goes_on(monkeypatch, caplog):
    (frame,) = report(Wide(), rows(8), 2, compute="aten").frames
    assert "still looking" not in caplog.text
    for seconds, said in ((0.0, True), (1e9, False)):
        caplog.clear()
        torch._dynamo.reset()
        monkeypatch.setattr(lowering_module, "SAY_EVERY_S", seconds)
        most = max(max(p.live) for p in frame.programs.values())
        with contextlib.suppress(MemoryBudgetError):
            report(Wide(), rows(8), 2, compute="aten", memory_budget_bytes=6 * WIDTH * WIDTH * 8 + most)
        assert ("still looking for a plan within the budget, 1 tried in" in caplog.text) == said


def test_what_rests_alone_does_not_fit_and_nothing_is_tried(monkeypatch):
    """Half of what rests: no cut helps, and none is made."""
    rest = planned(layers=1).memory
    rest_bytes = rest.parameters + rest.gradients + rest.optimizer
    for cut in ("_joint", "_inferred"):  # what every cut begins with
        monkeypatch.setattr(Fitting, cut, None)
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(
                MemoryBudgetError,
                match=rf"memory_budget_bytes={rest_bytes - 1:,} is more than 1 bytes too small.*{rest_bytes:,} bytes are at "
                r"rest \(parameters .*more ranks than 2 would help most",
            ),
        ):
            planned(layers=1, memory_budget_bytes=rest_bytes - 1)


# Buckets ---------------------------------------------------------------------------------------------------


class Narrow(nn.Module):
    """Layers of four weights that share a bucket on a fast link, and are copied for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


FEW = torch.ones(2, 64)


@pytest.fixture
def fast(tmp_path) -> str:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(latency_us=1.0, bytes_per_us=10_000.0, share=True)))
    return str(path)


def in_buckets(hardware: str, **fields):
    torch._dynamo.reset()
    return report(Narrow(), (FEW,), 2, hardware=hardware, **fields)


@pytest.mark.slow
def test_a_budget_takes_the_largest_buckets_that_fit(fast):
    sizes = [80_000, *smaller_buckets(load(fast), 2)]
    assert sizes == [80_000, 40_000, 20_000, 10_000]
    peaks = [in_buckets(fast, bucket_bytes=size).memory.peak for size in sizes]
    assert peaks[0] > min(peaks)
    for budget in sorted(set(peaks)):
        told = in_buckets(fast, memory_budget_bytes=budget)
        (frame,) = told.frames
        assert frame.bucket_bytes == next(s for s, peak in zip(sizes, peaks, strict=True) if peak <= budget)
        assert told.memory.peak <= budget
        assert not any(r.why == "the budget" for r in frame.remade)  # nothing that costs more was needed
        why = (
            "eight times latency times bandwidth between ranks"
            if frame.bucket_bytes == 80_000
            else "the memory budget asks for less than 80,000, which suits the link best"
        )
        assert f"transfers of less than {frame.bucket_bytes:,} bytes share buckets: {why}" in told.summary()
        assert told.to_dict()["frames"][0]["bucket_bytes"] == frame.bucket_bytes


@pytest.mark.slow
def test_buckets_that_the_user_gives_stay(fast):
    peak = in_buckets(fast, bucket_bytes=80_000).memory.peak
    told = in_buckets(fast, bucket_bytes=80_000, memory_budget_bytes=peak - 1024)
    assert told.memory.peak <= peak - 1024  # other measures are taken; what then is kept must still fit
    (frame,) = told.frames
    assert (frame.bucket_bytes, frame.bucket_why) == (80_000, "as bucket_bytes says")


class Told(Asked):
    """The first rank wants buckets of 20,000 bytes, and those rather than weights in tiles, whatever this one found."""

    def decide(self, sharded_model, key, text, room_bytes=None):
        told = {"buckets": "20000", "order": "last"}
        return super().decide(sharded_model, key, told.get(key.partition("/")[0], text), room_bytes)


@pytest.mark.slow
def test_the_first_rank_decides_how_large_buckets_are(fast):
    model = Told(Narrow(), 2, stage=3, hardware=fast, memory_budget_bytes=1 << 24)
    for rows in (2, 3):
        batch = (torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)),)
        model.check([batch, batch], lambda out: out)
    assert [frame.bucket_bytes for frame in model.frames] == [20_000, 20_000]
    assert all(len(g.names) == 1 for p in model.programs.values() for g in p.gathers)
    assert len([key for key in model.asked if key.startswith("buckets/")]) == 1


@pytest.mark.slow
def test_a_forward_without_gradients_takes_smaller_buckets_too(fast):
    with torch.no_grad():
        free = in_buckets(fast).memory
        peaks = {size: in_buckets(fast, bucket_bytes=size).memory.peak for size in (80_000, 20_000)}
        assert free.peak == peaks[80_000] > peaks[20_000]
        (frame,) = in_buckets(fast, memory_budget_bytes=peaks[20_000]).frames
    assert set(frame.programs) == {"inference"}
    assert frame.bucket_bytes <= 20_000
