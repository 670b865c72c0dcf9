"""Names in a trace of torch's profiler, beside those of the plan's."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import zero_compiler as zero
from zero_compiler.cost.timeline import HOST, LINK, PYTHON
from zero_compiler.ranges import lane_and_what

# Parts of what has a range of its own, of which only a plan knows the times.
PLANNED_ONLY = ("checksums of", "buffer of", "copy of the update of")


def profiled(step: Callable[[], object], path: Any, **options: Any) -> list[dict[str, Any]]:
    """The ranges of the user's that a profile of ``step`` has, from every thread; the trace is left at ``path``."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, **options) as profile:
        step()
    profile.export_chrome_trace(str(path))
    return events_of(path)


def events_of(path: Any) -> list[dict[str, Any]]:
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]


def lane_of(event: dict[str, Any]) -> str:
    """The lane that the name of a range says."""
    return lane_and_what(event["name"])[0]


def what_of(event: dict[str, Any]) -> str:
    """What a range is of, by its name."""
    return lane_and_what(event["name"])[1]


def threads_of_lanes() -> int:
    """How many threads of this process stand for lanes."""
    gc.collect()  # engines of other tests
    found = 0
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            found += file.read().startswith("nvme-")
    return found


def planned(
    model: torch.nn.Module, path: Any, phases: tuple[str, ...] = ("forward", "backward", "update")
) -> set[str]:
    """Names of the plan's trace, without those of what has no range."""
    zero.inspect(model).save_trace(str(path))
    with open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    return {
        e["name"]
        for e in events
        if e["cat"] in phases and lane_of(e) != PYTHON and not what_of(e).startswith(PLANNED_ONLY)
    }


def unshown(names: set[str]) -> set[str]:
    """Of planned names, those of transfers that no thread of this project's carries out: nothing shows their end."""
    return {name for name in names if lane_and_what(name)[0] in (LINK, HOST)}


def is_ours(name: str) -> bool:
    """Whether a range is none of torch's own, which has some around gloo's transfers, optimizers and graphs."""
    return name.startswith("zero ")


def names(events: list[dict[str, Any]]) -> Counter[str]:
    """How often each name is there, but for those of torch's own."""
    return Counter(e["name"] for e in events if is_ours(e["name"]))
