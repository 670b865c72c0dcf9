"""Where a step of ours spends its time, by kind of instruction, and how much fresh memory it touches.

    python benchmarks/where.py --model gpt-6x512 --mode zero3 --steps 11

Wall time, CPU time of the calling thread, and page faults (fresh memory costs one a 4 KiB page), median of the steps,
by rank. Wall time far above CPU time in a wait is waiting for peers; in compute it is another process on the core.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import time
from collections import defaultdict
from typing import Any

import common
import modes
from bench import TOLERANCE
from models import MODELS


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt-6x512")
    parser.add_argument(
        "--mode", default="zero3", help="one mode; of others than ours only whole phases are shown"
    )
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--allocator", choices=common.ALLOCATORS, default="default")
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    common.hardware(args.hardware, args.ranks, args.allocator)
    m = common.machine()
    print(common.machine_text(m), flush=True)
    call = {"model": args.model, "mode": args.mode, "dtype": args.dtype, "steps": args.steps}
    found = common.run_ranks(os.path.abspath(__file__), call, args.ranks, args.allocator)
    head = ["what", "times a step"]
    for rank in range(args.ranks):
        head += [f"rank {rank} wall ms", "CPU ms", "faults"]
    rows = []
    for key in found[0]:
        row: list[Any] = [key, found[0][key]["count"]]
        for f in found:
            row += [f"{f[key]['wall'] * 1e3:.1f}", f"{f[key]['cpu'] * 1e3:.1f}", f"{f[key]['faults']:.0f}"]
        rows.append(row)
    title = f"{args.mode} on {args.model}, {args.dtype}, {args.ranks} ranks, allocator {args.allocator}"
    common.print_table(title, head, rows)
    if args.json:
        text = common.heading("Where the time goes", m) + common.table(title, head, rows)
        common.save(args.json, {"machine": m, "ranks": found}, text)


class Clock:
    """Adds up wall time, thread CPU time and page faults under names, a step at a time."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[float]]] = []

    def new_step(self) -> None:
        self.steps.append(defaultdict(lambda: [0, 0.0, 0.0, 0]))

    @staticmethod
    def now() -> tuple[float, float, int]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return time.perf_counter(), time.thread_time(), faults

    def add(self, name: str, since: tuple[float, float, int]) -> tuple[float, float, int]:
        now = self.now()
        if self.steps:
            row = self.steps[-1][name]
            row[0] += 1
            for i in range(3):
                row[i + 1] += now[i] - since[i]
        return now

    def result(self) -> dict[str, dict[str, float]]:
        out = {}
        for name in self.steps[-1]:
            rows = [s[name] for s in self.steps]
            medians = [statistics.median(r[i] for r in rows) for i in range(4)]
            out[name] = dict(zip(("count", "wall", "cpu", "faults"), medians))
        return out


def measure(call: dict[str, Any]) -> dict[str, Any]:
    rank, _ = common.init_group()
    clock = Clock()
    if call["mode"].startswith("zero"):
        watch_sessions(clock)
    spec = MODELS[call["model"]]
    trainer = modes.build(call["mode"], spec, call["dtype"])
    for i in range(3):
        trainer.step(*spec.data(i, rank))
    gc.collect()
    gc.disable()
    import torch.distributed as dist

    for i in range(call["steps"]):
        batch = spec.data(3 + i, rank)
        dist.barrier()
        clock.new_step()
        start = at = clock.now()
        loss = trainer.forward(*batch)
        at = clock.add("= forward", at)
        trainer.backward(loss)
        at = clock.add("= backward", at)
        trainer.update()
        clock.add("= optimizer", at)
        clock.add("= step", start)
        del loss
    return clock.result()


def watch_sessions(clock: Clock) -> None:
    """Put a clock around what a session does. For this measurement alone: the session itself carries none."""
    from zero_compiler.runtime import session

    walk, agree = session.Session._walk, session.Session._agree

    def timed_agree(self: Any, need: Any) -> None:
        at = clock.now()
        agree(self, need)
        clock.add(f"{self.program.phase}: agreement", at)

    def timed_walk(self: Any, env: list[Any]) -> None:
        code, at = self._code, clock.now()
        whole = at
        kinds = [i.op for k, i in enumerate(self.program.instrs) if self._step(k, i) is not None]
        try:
            for kind, step in zip(kinds, code, strict=True):
                self._code = [step]
                walk(self, env)
                at = clock.add(f"{self.program.phase}: {kind.replace('_', ' ')}", at)
        finally:
            self._code = code
        clock.add(f"{self.program.phase}: whole program", whole)

    session.Session._walk = timed_walk
    session.Session._agree = timed_agree


if __name__ == "__main__":
    main()
