"""The search: sketches of every setting, extrapolations of the best, and whole plans of what is answered."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...errors import ZeroError
from ...report.verdict import amount
from ..fitting_plan import Asked
from ..limits import MOST_RANKS
from ..planning import Say
from .estimate import SKETCH, WHOLE, Estimate, Estimator
from .settings import REMADE, Setting, settings

_SHOWN = 8  # of the front
_EXTRAPOLATED = 2  # kinds of settings, the fastest first
_TRIES = 6  # whole plans, where the first do not fit
_BUDGETED = 3  # plans within a budget, where nothing else was found
_SAME = 1.01  # a step that takes so much longer at most is as fast: the simpler setting is better


class OutOfTime(BaseException):
    """The time that was given is over. No Exception, which what is interrupted would take for its own."""


@contextlib.contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTime after so many seconds; only the main thread can be interrupted."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(signum: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Search:
    """What has been found so far for one model on so many ranks."""

    asked: Asked
    room_bytes: int | None
    weighed: int = 0
    fitting: int = 0
    plans: int = 0
    pool: list[Estimate] = field(default_factory=list)  # that fit, as far as is known
    best: Estimate | None = None  # of a whole plan
    refused: list[str] = field(default_factory=list)
    ended: str = ""  # what ended it early
    nearest: Estimate | None = None  # of those that do not fit, the one that takes least
    layers: int = 0  # of the model that are alike
    resting: list[Estimate] = field(default_factory=list)  # of which what rests fits, and the sketch does not
    largest: Estimate | None = None  # of the most rows a rank that fit by a sketch

    @property
    def front(self) -> list[Estimate]:
        """What is worth choosing between, the fastest first."""
        out = front(self.pool)
        if self.best is not None and not any(e is self.best for e in out):
            out = [self.best, *out]
        return out


def search(
    asked: Asked,
    global_batch: int | None,
    any_batch: bool,
    found: Search,
    say: Say,
    estimator: Estimator | None = None,
) -> None:
    """Fill ``found``, which has the best so far at any moment.

    Raises:
        ZeroError: the model cannot be planned at all.
    """
    estimator = estimator or Estimator(asked, any_batch, say)
    found.layers = sum(stack.count for stack in estimator.stacks)
    found.plans = estimator.plans
    say("weighing settings")
    fitting = fits(asked, global_batch, any_batch, found, estimator)
    found.plans = estimator.plans
    found.pool = fitting
    if any_batch and fitting:
        found.largest = max(fitting, key=lambda e: (e.setting.batch or 0, -e.us_each))
    # What backward makes again is looked for by a search of its own, which takes longer: an answer without comes first.
    for remade in (False, True):
        _planned(found, estimator, remade, say)
    if found.best is None:
        found.pool = []  # sketches that fit, of which the best did not when they were planned
        _within_budget(found, estimator, say)


def _planned(found: Search, estimator: Estimator, remade: bool, say: Say) -> None:
    """Plan the settings that promise to be faster than the best so far: with few layers, then with all.

    Args:
        remade: those in which backward makes activations again, or those in which it does not.
    """

    def todo() -> list[Estimate]:
        faster = [e for e in found.pool if (e.setting.activations == REMADE) is remade and e.how != WHOLE]
        if found.best is not None:
            faster = [e for e in faster if e.us_each * _SAME < found.best.us_each]
        return sorted(faster, key=rank)

    if estimator.by_layers:
        for estimate in _to_extrapolate(todo()):
            say(f"planning one layer and two: {words(estimate.setting)}")
            _refined(found, estimate, estimator)
            found.plans = estimator.plans
    for _ in range(_TRIES):
        if not (left := todo()):
            break
        estimate = left[0]
        say(f"planning all layers: {words(estimate.setting)}")
        try:
            made = estimator.whole(estimate.setting, say)
        except ZeroError as refused:
            _drop(found, estimate, str(refused))
            continue
        found.plans = estimator.plans
        if not made.fits(estimator.spec, found.room_bytes):
            _drop(found, estimate, "its whole plan takes more than there is")
            continue
        _put(found, estimate, made)
        if found.best is None or made.us_each < found.best.us_each:
            found.best = made


def _within_budget(found: Search, estimator: Estimator, say: Say) -> None:
    """Where nothing fits as it is: plans within a budget, for which the compiler also gathers weights in tiles."""
    rows = min((e.setting.batch or 1 for e in found.resting), default=1)
    tight = [
        e
        for e in found.resting
        if (e.setting.stage, e.setting.replicas, e.setting.activations) == (3, 1, "kept")
        and (e.setting.batch or 1) == rows
    ]
    for estimate in sorted(tight, key=lambda e: len(e.setting.tiers))[:_BUDGETED]:
        setting = replace(estimate.setting, memory_budget_bytes=found.room_bytes)
        say(f"planning all layers: {words(setting)}")
        try:
            made = estimator.whole(setting, say)
        except ZeroError as refused:
            _drop(found, replace(estimate, setting=setting), str(refused))
            continue
        finally:
            found.plans = estimator.plans
        if made.fits(estimator.spec, found.room_bytes):
            found.pool, found.best = [made], made
            return


def fits(
    asked: Asked, global_batch: int | None, any_batch: bool, found: Search, estimator: Estimator
) -> list[Estimate]:
    """Sketches of the settings that fit."""
    out = []
    for setting in settings(asked, asked.world, global_batch, any_batch):
        found.weighed += 1
        # Bytes at rest are known without any plan: what does not fit by them alone is not looked at.
        rest = Estimate(
            setting, 0.0, 0.0, {t: math.ceil(n) for t, n in estimator.rest(setting).items()}, SKETCH
        )
        if not rest.fits(estimator.spec, found.room_bytes):
            _note_nearest(found, rest)
            continue
        estimate = estimator.sketch(setting)
        if estimate.fits(estimator.spec, found.room_bytes):
            out.append(estimate)
        else:
            found.resting.append(estimate)
            _note_nearest(found, estimate)
    found.fitting = len(out)
    return out


def _note_nearest(found: Search, estimate: Estimate) -> None:
    if found.nearest is None or estimate.nbytes["device"] < found.nearest.nbytes["device"]:
        found.nearest = estimate


def rank(estimate: Estimate) -> tuple[float, ...]:
    """Fast before slow; of what is about as fast, what is simpler and takes less."""
    s = estimate.setting
    steps = math.floor(math.log(max(estimate.us_each, 1e-9)) / math.log(_SAME))
    return (steps, s.away, s.activations != "kept", s.replicas, estimate.nbytes["device"])


def front(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Those than which none is both faster and smaller, the fastest first; of many a few, evenly."""
    out: list[Estimate] = []
    for estimate in sorted(estimates, key=rank):
        least = min((e.nbytes["device"] for e in out), default=math.inf)
        if estimate.nbytes["device"] < least:
            out.append(estimate)
    if len(out) <= _SHOWN:
        return out
    picked = {round(k * (len(out) - 1) / (_SHOWN - 1)) for k in range(_SHOWN)}
    return [out[k] for k in sorted(picked)]


def _to_extrapolate(every: Sequence[Estimate]) -> list[Estimate]:
    """The fastest settings that differ in more than the batch."""
    out: list[Estimate] = []
    for estimate in sorted(every, key=rank):
        if not any(_kind(e.setting) == _kind(estimate.setting) for e in out):
            out.append(estimate)
        if len(out) == _EXTRAPOLATED:
            break
    return out


def _kind(setting: Setting) -> tuple[object, ...]:
    return setting.stage, setting.replicas, setting.tiers, setting.activations


def _refined(found: Search, estimate: Estimate, estimator: Estimator) -> None:
    try:
        made = estimator.extrapolation(estimate.setting)
    except ZeroError as refused:
        _drop(found, estimate, str(refused))
        return
    if made.fits(estimator.spec, found.room_bytes):
        _put(found, estimate, made)
        return
    _drop(found, estimate, "")
    smaller = [
        e
        for e in found.pool
        if _kind(e.setting) == _kind(estimate.setting)
        and (e.setting.batch or 0) < (estimate.setting.batch or 0)
    ]
    if smaller:
        _refined(found, max(smaller, key=lambda e: e.setting.batch or 0), estimator)


def _put(found: Search, old: Estimate, new: Estimate) -> None:
    """Know ``new`` in the place of ``old``."""
    found.pool = [e for e in found.pool if e is not old] + [new]


def _drop(found: Search, estimate: Estimate, why: str) -> None:
    found.pool = [e for e in found.pool if e is not estimate]
    if why:
        found.refused.append(f"{words(estimate.setting)}: {why}")


def words(setting: Setting) -> str:
    """A setting, short."""
    out = [f"stage {setting.stage}"]
    if setting.replicas > 1:
        out.append(f"{setting.replicas} replicas")
    if setting.batch is not None:
        out.append(f"batch {setting.batch:,}")
    if setting.micro_batches > 1:
        out.append(f"{setting.micro_batches} micro-batches")
    names = {"params": "parameters", "grads": "gradients", "optimizer": "states"}
    by_tier: dict[str, list[str]] = {}
    for kind, tier in setting.tiers.items():
        by_tier.setdefault(tier, []).append(names[kind])
    for tier, kinds in by_tier.items():
        out.append(f"{' and '.join(kinds)} on {tier}")
    if setting.activations == "remade":
        out.append("activations made again")
    elif setting.activations != "kept":
        out.append(f"activations on {setting.activations}")
    if setting.memory_budget_bytes is not None:
        out.append(f"within a budget of {amount(setting.memory_budget_bytes)}")
    return ", ".join(out)


def least_world(
    asked: Asked, any_batch: bool, room_bytes: int | None, say: Say
) -> tuple[int | None, Estimator]:
    """The fewest ranks, a power of two, on which a setting fits by its sketch; with everything on the device where
    that takes no more than twice as many."""
    estimator = Estimator(replace(asked, world=2), any_batch, say)
    spec = estimator.spec
    found: dict[bool, int] = {}  # by whether anything is on another tier
    world = 1
    while world <= MOST_RANKS:
        now = replace(asked, world=world)
        for setting in settings(now, world, None, any_batch):
            if setting.replicas > 1 or setting.away in found:
                continue
            if estimator.sketch(setting).fits(spec, room_bytes):
                found[setting.away] = world
        if False in found or (True in found and world > 2 * found[True]):
            break
        world *= 2
    return (found.get(False) or found.get(True)), estimator
