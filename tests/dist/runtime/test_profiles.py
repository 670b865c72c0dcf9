"""Names of torch's profiler are those of the plan on ranks that talk, by every transport and at every stage."""

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from dist.cases import Cases
from dist.ranks.test_hosts import two_hosts
from dist.spawn import run_ranks
from null import profiles
from tiered import ALL, made

import zero_compiler as zero

pytestmark = pytest.mark.dist
cases = Cases(__name__)


def compared(rank, overlap=False, **fields):
    """What is wrong with the names of a step, and what is compared of it; lane and name of each range."""
    with tempfile.TemporaryDirectory() as folder:
        torch._dynamo.reset()
        model = made(folder, **fields)
        step = torch.compile(model, backend="zero", options={"compute": "aten"})
        optimizer = zero.optimizer(torch.optim.Adam, model, lr=1e-3, overlap=overlap)

        def train():
            torch.manual_seed(rank)
            step(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        train()
        path = Path(folder) / "measured.json"
        events = profiles.profiled(train, path)
        measured, planned = set(profiles.names(events)), profiles.planned(model, Path(folder) / "plan.json")
        if fields.get("transport") != "auto":  # a transport of the project's own shows its transfers
            planned -= profiles.unshown(planned)
        errors = [f"{fields}: {name} is on one side only" for name in measured ^ planned]
        found = zero.inspect(model).compare(path)
        errors += [
            f"{fields}: {row} was not measured"
            for row in found.rows
            if row.measured_us is None and not row.name.startswith(profiles.PLANNED_ONLY)
        ]
        return errors, found, [(profiles.lane_of(e), profiles.what_of(e)) for e in events]


@cases.add
def names_are_those_of_the_plan(rank):
    errors = []
    for stage, transport in itertools.product(range(4), ("c10d", "shared")):
        wrong, found, _ = compared(rank, stage=stage, transport=transport)
        errors += wrong
        lanes = {row.lane for row in found.rows}
        if lanes != {"compute", "device-device"}:
            errors.append(f"stage {stage} over {transport}: lanes {lanes}")
    return errors


@cases.add
def names_are_those_of_the_plan_with_files(rank):
    errors = []
    for overlap in (False, True):
        wrong, found, events = compared(rank, overlap, tiers=ALL)
        errors += wrong
        if {"nvme-read", "nvme-write"} - {row.lane for row in found.rows}:
            errors.append("a lane of files is missing")
        errors += [
            f"{name} on {lane}" for lane, name in events if "nvme" in lane and not name.startswith("file of")
        ]
    return errors


@cases.add
def a_wait_for_a_late_peer_is_measured(rank):
    """Over gloo the end of a collective is known where somebody waits for it."""
    errors, found, _ = compared(rank, stage=3, transport="c10d")
    gathers = [row for row in found.rows if row.name.startswith("gather of") and row.lane == "device-device"]
    if not gathers:
        errors.append("no gather")
    return errors + [f"{row}: shorter than its wait" for row in gathers if row.measured_us <= 0]


@pytest.mark.parametrize("name", cases.names)
def test_profiles(name):
    cases.check(name)


def between_hosts(rank, world):
    two_hosts(rank, world)
    errors, found, events = compared(rank, stage=3, transport="auto")
    own = {name for lane, name in events if lane == "device-device"}
    moved = {row.name for row in found.rows if row.lane == "device-device"}
    return errors + [f"{name} is on one side only" for name in own ^ moved]


@pytest.mark.slow
@pytest.mark.alone
def test_transfers_between_hosts_are_on_the_thread_that_makes_them():
    assert run_ranks(between_hosts, 4, timeout=200.0) == [[]] * 4
