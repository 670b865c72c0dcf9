"""What measurements of calibration share: clocks, and processes that measure beside each other."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

# More than a core's own caches hold, a rank: operands of a training step come from memory.
OPERANDS_BYTES = 64 << 20


def median_us(fn: Callable[[], object], device: torch.device, repeat: int = 7) -> float:
    return medians_us([fn], device, repeat)[0]


# Runs of one measurement, and seconds, after which no more are needed; and what takes so long that one run is enough,
# the first one: a late wake-up does not spoil a product of a dtype that a CPU has no instructions for.
_LEAST, _ENOUGH_S, _LONG_S = 3, 2.0, 1.0


def medians_us(fns: list[Callable[[], Any]], device: torch.device, repeat: int) -> list[float]:
    """Median time of each, called in turn: what else runs on the machine then slows all of them alike.

    Not of collectives: where runs take long, ranks need not end after as many (:func:`times_us`).
    """
    times: list[list[float]] = [[us] if (us := _once_us(fn, device)) > _LONG_S * 1e6 else [] for fn in fns]
    if all(times):
        return [us for (us,) in times]
    began = time.perf_counter()
    for done in range(repeat):
        if done >= _LEAST and time.perf_counter() - began > _ENOUGH_S * len(fns):
            break
        for fn, of in zip(fns, times, strict=True):
            of.append(_once_us(fn, device))
    return [statistics.median(of) for of in times]


def times_us(fn: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    """Of so many runs, however long they take: ranks that do it together do it equally often."""
    fn()
    return [_once_us(fn, device) for _ in range(runs)]


def _once_us(fn: Callable[[], object], device: torch.device) -> float:
    sync(device)
    start = time.perf_counter()
    fn()
    sync(device)
    return (time.perf_counter() - start) * 1e6


def lower_quartile(times: list[float]) -> float:
    return statistics.quantiles(times, n=4, method="inclusive")[0]


def sync(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def in_ranks(world: int, fn: Callable[..., None], *args: object) -> Any:
    """What rank 0 of ``world`` processes saved as "rows"."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(fn, (world, folder, *args), nprocs=world)
        return torch.load(os.path.join(folder, "rows"), weights_only=False)
