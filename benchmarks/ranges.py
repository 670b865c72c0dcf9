"""Host time of a step with the ranges that torch's profiler would show, and without them, where no profiler runs.

    python benchmarks/ranges.py --ranks 1 --json out.json

The layers are those of `host_overhead.py`: tiny, so nearly all of a step is host time. One model takes its steps in
turn, in an order that turns around from round to round:
  with       as it is: a call asks whether a profiler runs
  without    that question, and ranges, are functions of the benchmark's, which do nothing
  again      the same once more: its ratio to "without" says how large a difference is that means nothing
Ratios are of the steps of one round; "interval" is where their median lies with 95% confidence (by order statistics, so
whatever their distribution). Beside them stands how often a step asks, and what one question takes by itself.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import common
import modes
import torch
from bench import _list
from host_overhead import spec_of

WAYS = ("with", "without", "again")


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--modes", type=_list, default=["zero3"], help="of bench.py, zeroN alone")
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    call = {"modes": args.modes, "layers": args.layers, "rounds": args.rounds}
    found = common.run_ranks(os.path.abspath(__file__), call, args.ranks, "keep")[0]
    head = [
        "mode",
        "way",
        "step ms (p10-p90)",
        "/ without (p10-p90)",
        "interval",
        "questions a step",
        "of the step",
    ]
    rows = []
    for mode, r in found.items():
        for way in WAYS:
            ratios = [a / b for a, b in zip(r["s"][way], r["s"]["without"], strict=True)]
            row = [mode, way, common.show(common.spread(r["s"][way]), 2, 1e3)]
            if way != "without":
                low, high = interval(ratios)
                row += [common.show(common.spread(ratios), 3), f"{low:.4f}-{high:.4f}"]
            if way == "with":
                share = r["asked"] * r["question_s"] / statistics.median(r["s"][way])
                row += [f"{r['asked']} of {r['question_s'] * 1e9:.0f} ns", f"{share:.1e}"]
            rows.append(row + [""] * (len(head) - len(row)))
    about = spec_of(args.layers).about
    title = f"{about}; {args.ranks} ranks of one thread, fp32, allocator keep, {args.rounds} rounds"
    common.print_table(title, head, rows)
    if args.json:
        text = common.heading("Ranges for a profiler that does not run", m) + common.table(title, head, rows)
        common.save(args.json, {"machine": m, "modes": found}, text)


def interval(values: list[float]) -> tuple[float, float]:
    """Between which two of the values, in order, their median lies with 95% confidence."""
    ordered, n = sorted(values), len(values)
    half = 1.96 * math.sqrt(n) / 2
    return ordered[max(0, math.floor(n / 2 - half))], ordered[min(n - 1, math.ceil(n / 2 + half))]


def measure(call: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    from zero_compiler import ranges

    rank, _ = common.init_group()
    torch._dynamo.config.recompile_limit = 1000
    spec = spec_of(call["layers"])
    batch = spec.data(0, rank)
    nothing = contextlib.nullcontext()
    asked = [0]

    def counted() -> bool:
        asked[0] += 1
        return False

    def ask_and_count(*_: str) -> Any:
        counted()
        return nothing

    as_it_is = (ranges.ranged, ranges.profiled)
    silent = (lambda *_: nothing, lambda: False)
    found: dict[str, Any] = {}
    for name in call["modes"]:
        trainer = modes.build(name, spec, "fp32")
        for _ in range(4):
            trainer.step(*batch)
        with in_place_of_ranges(ask_and_count, counted):
            trainer.step(*batch)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        gc.freeze()  # what compiling left is not looked at in every collection
        gc.disable()
        for i in range(call["rounds"]):
            for way in WAYS[:: 1 if i % 2 else -1]:
                gc.collect()
                # Both are put in place, so that both begin with names that were just changed.
                with in_place_of_ranges(*(as_it_is if way == "with" else silent)):
                    dist.barrier()
                    start = time.perf_counter()
                    loss = trainer.step(*batch)
                    seconds[way].append(time.perf_counter() - start)
                del loss
        gc.enable()
        found[name] = {"s": seconds, "asked": asked[0], "question_s": seconds_of(lambda: ranges.ranged("x"))}
        asked[0] = 0
    return found


@contextlib.contextmanager
def in_place_of_ranges(ranged: Callable[..., Any], profiled: Callable[[], bool]) -> Iterator[None]:
    """Wherever the project has these two of `zero_compiler.ranges` by their names."""
    with contextlib.ExitStack() as stack:
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] != "zero_compiler":
                continue
            for name, value in (("ranged", ranged), ("profiled", profiled)):
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield


def seconds_of(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10_000):
            call()
        times.append((time.perf_counter() - start) / 10_000)
    return min(times)


if __name__ == "__main__":
    main()
