"""Plans that an earlier start of the same job has found: what a search took long for is not searched for again.

A file in the user's cache folder has the decisions of one frame, as a plan file has them (`ir/decisions.py`), and what
ranks agreed on in the search for them. Its name stands for all that these follow from: the graph as it was captured,
the configuration, the machine, what rests in memory and what is agreed already, and versions. It is held to as a plan
file is that the user gives, and checked as that is: a plan that does not fit is an error, after which the file is gone.

Rank 0 looks, and tells the others what it has found. Where ranks compile different graphs, or have different bytes at
rest, each plan is another one, and none is stored. Nor is one where the folder takes no files; a file that is damaged
is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import passes
from ..cost import hardware
from ..errors import ZeroError
from ..ir.content_digest import digest_of
from ..ir.decisions import PlanDecisions
from ..ir.plan_file import PlanFile
from ..plan import schedule
from ..report.decisions import decisions_of, made_for
from .frame_state import FrameState
from .given_decisions import GivenDecisions
from .loader import EngineLoader

log = logging.getLogger("zero_compiler")
_NONE = ""
_MOST_FILES = 256  # of which the oldest make room


def folder() -> Path:
    """Where they lie: beside this machine's calibration."""
    return hardware.cache_path().parent / "plans"


def take(state: FrameState) -> None:
    """Hold to what an earlier start has found for the very frame, if it has; before the search for a plan.

    Collective, once for the frames that read the same weights in this order: a rank that compiles such a one again may
    be alone.
    """
    if not _is_searched(state):
        return
    assert isinstance(state.loader, EngineLoader)
    agreed = state.first.agreed
    names = [f"{s.ref.owner}:{s.ref.name}" for s in state.captured.shards]
    assert state.identity is not None
    asked = schedule.key_of(f"stored-{state.identity.kind}", names)
    if asked in agreed.decided:
        return
    key, found = _key(state), _NONE
    if set(state.loader.of_all(state.first, f"keys/{state.first.identity.serial}/{asked}", key)) == {key}:
        state.stored_at = folder() / f"{key}.json"
        found = state.loader.decide(state.first, asked, _text(state.stored_at) if _speaks(state) else _NONE)
    agreed.decided[asked] = "asked"  # and not all of the text
    if found != _NONE:
        _hold(state, json.loads(found))


def _is_searched(state: FrameState) -> bool:
    """Whether a plan of this frame takes a search, for a step that is run."""
    budgets = state.config.memory_budget_bytes, state.config.activation_budget_bytes
    runs = isinstance(state.loader, EngineLoader)
    return runs and state.given is None and state.first is not None and budgets != (None, None)


def _speaks(state: FrameState) -> bool:
    return bool(state.first.group.everyone.rank == 0)


def _key(state: FrameState) -> str:
    """Stands for all that a search follows from."""
    identity, first = state.identity, state.first
    assert identity is not None
    models = list(state.sharded_models.values())
    bare = dataclasses.replace(state.memory([]), footprint=None)
    return digest_of(
        {
            "identity": dataclasses.asdict(identity),
            "made for": dataclasses.asdict(made_for(state.relatives, state.config)),
            "config": {k: v for k, v in state.config.to_dict().items() if k not in ("hardware", "nvme_dir")},
            "hardware": repr(state.machine),
            "transport": first.storage.transport.name,
            "rests": [repr(sorted(m.tiers.placed.tiers.items())) for m in models],
            "memory": dataclasses.asdict(bare),
            "agreed": [
                [m.agreed.kept, m.agreed.tile_bytes, m.agreed.quantised, m.agreed.decided] for m in models
            ],
            "calls": [state.accumulates, state.reduces_each, state.is_whole_forward],
            "others": [digest_of(p.to_dict()) for f in state.others for p in f.programs.values()],
            "versions": [torch.__version__, _code()],
        }
    )


@functools.cache
def _code() -> str:
    """Stands for the code that plans, as it is installed on any host or lies in a checkout."""
    known = hashlib.sha256()
    for folder in (Path(hardware.__file__).parents[1], Path(passes.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            known.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
            known.update(file.read_bytes())
    return known.hexdigest()


def _text(path: Path) -> str:
    """What a file has, if it is whole: the same as it was written."""
    try:
        text = path.read_text()
        data = json.loads(text)
        whole = digest_of(data["plan"]) == data["digest"]
        PlanDecisions.from_dict(data["plan"]["decisions"])
    except (OSError, ValueError, LookupError, TypeError, ZeroError):
        return _NONE
    return json.dumps(data["plan"]) if whole else _NONE


def _hold(state: FrameState, data: dict[str, Any]) -> None:
    assert state.stored_at is not None
    decisions = PlanDecisions.from_dict(data["decisions"])
    for model, (tile_bytes, quantised, decided) in zip(
        state.sharded_models.values(), data["agreed"], strict=True
    ):
        model.agreed.tile_bytes.update(tile_bytes)
        model.agreed.quantised.update(quantised)
        model.agreed.decided.update(decided)
    state.hold_to(GivenDecisions(PlanFile(str(state.stored_at), decisions), state.relatives))
    state.frame.stored = str(state.stored_at)
    if _speaks(state):
        log.warning(
            "frame %d: the plan that an earlier start has found is taken from %s",
            state.index,
            state.stored_at,
        )


@contextlib.contextmanager
def holding(state: FrameState) -> Iterator[None]:
    """Around a compilation: a stored plan that cannot be held to is gone afterwards, and the next attempt searches."""
    try:
        yield
    except ZeroError:
        if state.frame.stored and _speaks(state):
            Path(state.frame.stored).unlink(missing_ok=True)
        raise


def keep(state: FrameState) -> None:
    """Store what was found by the search for the plan of a frame, which is compiled.

    Not where the search has ended by the clock: another start may find better.
    """
    frame = state.frame
    if state.stored_at is None or frame.stored or frame.decisions is None or not _speaks(state):
        return
    if frame.search_ended.startswith("plan_seconds"):
        return
    decisions = decisions_of(state.relatives, [frame])
    assert decisions is not None
    agreed = [
        [m.agreed.tile_bytes, m.agreed.quantised, m.agreed.decided] for m in state.sharded_models.values()
    ]
    plan = {"decisions": decisions.to_dict(), "agreed": agreed}
    _write(state.stored_at, json.dumps({"digest": digest_of(plan), "plan": plan}))


def _write(path: Path, text: str) -> None:
    """Whole or not at all; nothing where the folder takes no files."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(made, path)
        files = sorted(path.parent.glob("*.json"), key=lambda f: f.stat().st_mtime)
        for oldest in files[:-_MOST_FILES]:
            oldest.unlink(missing_ok=True)
