"""Two plans side by side: what differs between them, and which decision makes it differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..cost.timeline import PYTHON, duration
from ..errors import ConfigError
from ..ir.decisions import FrameDecisions, PlanDecisions, WeightDecisions
from ..ir.transfers import COMPUTE, HOST, LINK, READ, WRITE
from ..json_fields import as_list, as_object, check_fields, read_json
from ..report.trace import STEP
from ..report.verdict import amount

_NEEDED = ("verdict", "world", "memory", "frames", "step_us")
_SHOWN = 6  # names of a kind in one line

# Groups of decisions, in words; what a plan is made for comes first.
RANKS, CONFIG, MACHINE, BATCH, MODEL = "ranks", "options", "the machine", "the inputs", "the model"
RESTS, KEPT, WEIGHT_TILES, BUCKETS = "where tensors rest", "what is kept", "tiles of weights", "buckets"
QUANTISED = "what travels in 8 bits"
DISTANCES, TILES, VALUES, RECOMPUTE = (
    "distances",
    "tiles of tokens",
    "what is saved",
    "what may be made again",
)
_OUTSIDE = (RANKS, CONFIG, MACHINE, BATCH, MODEL)
_IN_PROGRAMS = (WEIGHT_TILES, BUCKETS, DISTANCES, TILES, VALUES, RECOMPUTE, KEPT, QUANTISED)
_LANES = {
    COMPUTE: "compute",
    LINK: "between ranks",
    HOST: "host and device",
    READ: "reads of files",
    WRITE: "writes of files",
    PYTHON: "Python",
}
# What can change a number of bytes, beside what a plan is made for.
_BYTES: dict[str, tuple[str, tuple[str, ...]]] = {
    "parameters_bytes": ("parameters at rest", (RESTS,)),
    "gradients_bytes": ("gradients", (RESTS,)),
    "optimizer_bytes": ("optimizer states", (RESTS,)),
    "kept_bytes": ("weights kept gathered", (KEPT, WEIGHT_TILES)),
    "arena_bytes": (
        "arena for transfers",
        (WEIGHT_TILES, BUCKETS, DISTANCES, KEPT, RESTS, VALUES, QUANTISED),
    ),
    "host_bytes": ("buffers of files", (RESTS, WEIGHT_TILES, VALUES)),
    "programs_bytes": (
        "activations and full gradients",
        (TILES, VALUES, RECOMPUTE, WEIGHT_TILES, BUCKETS, DISTANCES),
    ),
    "peak_bytes": ("peak on the device", (RESTS, *_IN_PROGRAMS)),
    "apart_bytes": ("on the host", (RESTS, VALUES, WEIGHT_TILES)),
    "files_bytes": ("in files", (RESTS, VALUES)),
}
# The same of the time that a lane has to do.
_US = {
    COMPUTE: (TILES, VALUES, RECOMPUTE, WEIGHT_TILES, BUCKETS, KEPT, QUANTISED),
    LINK: (KEPT, WEIGHT_TILES, BUCKETS, RECOMPUTE, TILES, QUANTISED),
    HOST: (RESTS, VALUES, WEIGHT_TILES),
    READ: (RESTS, VALUES, WEIGHT_TILES),
    WRITE: (RESTS, VALUES),
    PYTHON: (),
}


@dataclass(frozen=True)
class ComparedPlan:
    """A plan as `save_json` wrote it: its file, all of it, and its decisions, which files of older versions lack."""

    path: str
    data: Mapping[str, Any]
    decisions: PlanDecisions | None


@dataclass(frozen=True)
class ComparedNumber:
    """A number of both plans, in words, and the groups of decisions that can make it differ."""

    what: str
    a: float
    b: float
    is_time: bool
    causes: tuple[str, ...]

    def text(self, differing: Sequence[str]) -> str:
        """One line; where it differs, with what can have made it so.

        Args:
            differing: groups of decisions that differ between the plans.
        """
        show = duration if self.is_time else amount
        line = f"  {self.what:<32}{show(self.a):>16}{show(self.b):>16}"
        if self.a == self.b:
            return line
        change = self.b - self.a
        causes = [c for c in differing if c in _OUTSIDE or c in self.causes]
        why = (
            " and ".join(causes)
            or "no decision in these files: another version, or what follows from several"
        )
        return f"{line}  {'+' if change > 0 else '-'}{show(abs(change))}: {why}"


def read(path: str) -> ComparedPlan:
    """A plan from its file.

    Raises:
        ConfigError: it is no file of a plan.
    """

    def plan_in(data: object) -> ComparedPlan:
        if not isinstance(data, dict) or any(name not in data for name in _NEEDED):
            raise ConfigError("it is no plan")
        check_fields("plan", "it", data, data.keys(), _NEEDED)
        as_object("plan", "memory", data["memory"])
        as_list("plan", "frames", data["frames"])
        decisions = data.get("decisions")
        return ComparedPlan(path, data, None if decisions is None else PlanDecisions.from_dict(decisions))

    what_to_do = "`zero-compiler plan MODEL --json PATH` and `zero.inspect(...).save_json(PATH)` write plans"
    return read_json(Path(path), plan_in, what_to_do)


def compare(a: ComparedPlan, b: ComparedPlan) -> list[str]:
    """Two plans side by side, in lines.

    Raises:
        ConfigError: one is no plan of this version.
    """
    try:
        return _lines(a, b)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{a.path} and {b.path} cannot be compared, since one has not the form of a plan ({error!r}); write it "
            "anew with `zero-compiler plan MODEL --json PATH`"
        ) from None


def _lines(a: ComparedPlan, b: ComparedPlan) -> list[str]:
    differences = _differences(a, b)
    differing = list(dict.fromkeys(group for group, _ in differences))
    rows = [*_bytes(a, b), *_times(a, b), *_moved(a, b)]
    lines = [f"A: {a.path}: {_verdict(a)}", f"B: {b.path}: {_verdict(b)}"]
    if not differences and all(row.a == row.b for row in rows):
        return [*lines, "the two plans are the same"]
    lines += ["", f"  {'':<32}{'A':>16}{'B':>16}  B less A, and what can have made it so"]
    lines += [row.text(differing) for row in rows if row.a or row.b]
    lines += ["", "what was decided otherwise" if differences else "nothing was decided otherwise"]
    lines += [f"  {group}: {said}" for group, said in differences]
    if len(differing) == 1:
        lines.append(f"only {differing[0]} differ: all of the differences follow from that")
    return lines


def _verdict(plan: ComparedPlan) -> str:
    verdict = plan.data["verdict"]
    return "no verdict" if verdict is None else str(verdict["line"])


def _bytes(a: ComparedPlan, b: ComparedPlan) -> list[ComparedNumber]:
    return [
        ComparedNumber(what, int(a.data["memory"][key]), int(b.data["memory"][key]), False, causes)
        for key, (what, causes) in _BYTES.items()
    ]


def _phases(plan: ComparedPlan) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Timelines of a step; of a plan that trains nothing, those that it has."""
    every = [(phase, t) for frame in plan.data["frames"] for phase, t in frame["timelines"].items()]
    step = [(phase, t) for phase, t in every if phase in STEP]
    return step or every


def _times(a: ComparedPlan, b: ComparedPlan) -> list[ComparedNumber]:
    rows = [ComparedNumber("predicted step", *_step_us(a, b), True, (RESTS, *_IN_PROGRAMS))]
    totals = [Counter[str](), Counter[str]()]
    alone: list[dict[str, list[float]]] = [{}, {}]
    for at, plan in enumerate((a, b)):
        for phase, timeline in _phases(plan):
            totals[at][phase] += timeline["total_us"]
            for span in timeline["spans"]:
                alone[at].setdefault(span["lane"], []).append(span["alone_us"])
    for phase in dict.fromkeys([*totals[0], *totals[1]]):
        rows.append(
            ComparedNumber(f"  {phase}", totals[0][phase], totals[1][phase], True, (RESTS, *_IN_PROGRAMS))
        )
    for lane, words in _LANES.items():
        us = [math.fsum(found.get(lane, [])) for found in alone]
        rows.append(ComparedNumber(f"  lane: {words}", us[0], us[1], True, _US[lane]))
    return rows


def _step_us(a: ComparedPlan, b: ComparedPlan) -> tuple[float, float]:
    one, other = (float(plan.data["step_us"]) for plan in (a, b))
    return one, other


def _moved(a: ComparedPlan, b: ComparedPlan) -> list[ComparedNumber]:
    moved = [Counter[str](), Counter[str]()]
    for at, plan in enumerate((a, b)):
        for _, timeline in _phases(plan):
            for span in timeline["spans"]:
                moved[at][span["lane"]] += int(span["nbytes"])
    return [
        ComparedNumber(f"  moved: {words}", moved[0][lane], moved[1][lane], False, _US[lane])
        for lane, words in _LANES.items()
        if lane not in (COMPUTE, PYTHON)
    ]


# What was decided otherwise: each with the group that it belongs to.
Difference = tuple[str, str]


def _differences(a: ComparedPlan, b: ComparedPlan) -> list[Difference]:
    out: list[Difference] = []
    machines = [(plan.data["verdict"] or {}).get("hardware") for plan in (a, b)]
    if machines[0] != machines[1]:
        out.append((MACHINE, f"{machines[0]} and {machines[1]}"))
    if a.decisions is None or b.decisions is None:
        lacking = " and ".join(p.path for p in (a, b) if p.decisions is None)
        return [*out, (MODEL, f"not known: {lacking} has no decisions")]
    out += _made_for(a.decisions, b.decisions)
    out += _of_weights(a.decisions.weights, b.decisions.weights)
    frames = _matched(a.decisions.frames, b.decisions.frames)
    return [*out, *(difference for pair in frames for difference in _of_frames(*pair))]


def _made_for(a: PlanDecisions, b: PlanDecisions) -> list[Difference]:
    out, one, other = [], a.made_for, b.made_for
    for name in ("world", "replicas", "tensor_ranks"):
        if getattr(one, name) != getattr(other, name):
            out.append((RANKS, f"{name} {getattr(one, name):,} and {getattr(other, name):,}"))
    budgets = (
        {"memory_budget_bytes": one.memory_budget_bytes},
        {"memory_budget_bytes": other.memory_budget_bytes},
    )
    fields_ = [
        {**m.config, **budget, "compute": m.compute} for m, budget in zip((one, other), budgets, strict=True)
    ]
    for name in dict.fromkeys([*fields_[0], *fields_[1]]):
        x, y = (f.get(name) for f in fields_)
        if x != y:
            out.append((CONFIG, f"{name} {x} and {y}"))
    return out


def _of_weights(a: Mapping[str, WeightDecisions], b: Mapping[str, WeightDecisions]) -> list[Difference]:
    out = []
    for names, where in (([n for n in a if n not in b], "A"), ([n for n in b if n not in a], "B")):
        if names:
            out.append((MODEL, f"weights of {where} alone: {_listed(names)}"))
    both = [n for n in a if n in b]
    if names := [n for n in both if (a[n].shape, a[n].dtype) != (b[n].shape, b[n].dtype)]:
        out.append((MODEL, f"other shapes or dtypes of {_listed(names)}"))
    for kind in ("params", "grads", "optimizer"):
        moved: dict[tuple[str, str], list[str]] = {}
        for n in both:
            if a[n].rests[kind] != b[n].rests[kind]:
                moved.setdefault((a[n].rests[kind], b[n].rests[kind]), []).append(n)
        out += [(RESTS, f"{kind} on {x} and on {y}: {_listed(names)}") for (x, y), names in moved.items()]
    for what, name in ((KEPT, "kept"), (QUANTISED, "quantised")):
        for where, one, other in (("A", a, b), ("B", b, a)):
            if names := [n for n in both if getattr(one[n], name) and not getattr(other[n], name)]:
                out.append((what, f"in {where} alone: {_listed(names)}"))
    tiles: dict[tuple[int | None, int | None], list[str]] = {}
    for n in both:
        if a[n].tile_bytes != b[n].tile_bytes:
            tiles.setdefault((a[n].tile_bytes, b[n].tile_bytes), []).append(n)
    out += [
        (WEIGHT_TILES, f"of {_tile(x)} and of {_tile(y)}: {_listed(names)}")
        for (x, y), names in tiles.items()
    ]
    return out


def _tile(nbytes: int | None) -> str:
    return "the whole weight" if nbytes is None else f"{nbytes:,} bytes"


def _matched(
    a: Sequence[FrameDecisions], b: Sequence[FrameDecisions]
) -> list[tuple[FrameDecisions | None, FrameDecisions | None]]:
    """Frames of both, by function and kind, in order; None where one has no such frame."""
    rest, pairs = list(b), []
    for frame in a:
        same = next((f for f in rest if (f.function, f.kind) == (frame.function, frame.kind)), None)
        if same is not None:
            rest.remove(same)
        pairs.append((frame, same))
    return [*pairs, *((None, frame) for frame in rest)]


def _of_frames(a: FrameDecisions | None, b: FrameDecisions | None) -> list[Difference]:
    if a is None or b is None:
        there, where = (b, "B") if a is None else (a, "A")
        assert there is not None
        return [(MODEL, f"in {where} alone, {there.title}")]
    out = []
    if a.inputs != b.inputs:
        out.append((BATCH, f"{', '.join(a.inputs)} and {', '.join(b.inputs)}"))
    if a.bucket_bytes != b.bucket_bytes:
        out.append((BUCKETS, f"less than {a.bucket_bytes:,} and {b.bucket_bytes:,} bytes share one"))
    if a.reduce_each_micro_batch != b.reduce_each_micro_batch:
        where = "A" if a.reduce_each_micro_batch else "B"
        out.append((BUCKETS, f"gradients of each micro-batch are reduced by themselves in {where} alone"))
    if a.recompute != b.recompute:
        out.append((RECOMPUTE, f"costly operators in {'A' if a.recompute else 'B'} alone"))
    for name, words in (("tile_mlp", "MLPs"), ("tile_heads", "weights of heads")):
        if getattr(a, name) != getattr(b, name):
            out.append((TILES, f"{words} in tiles in {'A' if getattr(a, name) else 'B'} alone"))
    if a.mlp_tile_bytes != b.mlp_tile_bytes:
        out.append((TILES, f"of MLPs of {_tile(a.mlp_tile_bytes)} and of {_tile(b.mlp_tile_bytes)}"))
    for group, name in ((DISTANCES, "distances"), (TILES, "tiles")):
        for phase in dict.fromkeys([*getattr(a, name), *getattr(b, name)]):
            x, y = (getattr(f, name).get(phase, {}) for f in (a, b))
            rows = [f"{k} {x.get(k, '-')} and {y.get(k, '-')}" for k in {**x, **y} if x.get(k) != y.get(k)]
            if rows:
                out.append((group, f"of the {phase}: {_listed(rows)}"))
    return [*out, *_of_values(a, b)]


def _of_values(a: FrameDecisions, b: FrameDecisions) -> list[Difference]:
    out = []
    words = {"saved": "saved", "made_again": "made again", "away": "on another tier"}
    for f in fields(a.values):
        if f.name in words:
            x, y = getattr(a.values, f.name), getattr(b.values, f.name)
            for where, names in (("A", x.keys() - y.keys()), ("B", y.keys() - x.keys())):
                if names:
                    out.append((VALUES, f"{words[f.name]} in {where} alone: {_listed(sorted(names))}"))
    return out


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
