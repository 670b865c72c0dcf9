"""Peak memory of every way to train, one mode in fresh processes at a time.

    python benchmarks/memory.py --model gpt-6x512 --modes ddp,fsdp2,zero2,zero3 --json out.json

Three figures a mode, each of the rank with the most:
  at rest   live bytes of torch's CPU allocator between steps (weights, optimizer states, what a mode keeps)
  peak      the largest number of live bytes in steps after warm-up
  PSS peak  growth of resident memory over that of the process with its libraries loaded, in the same steps; a page
            that n processes have in common counts as 1/n, so that shards in shared memory count once

The first two are exact counts of bytes asked for, by a meter in the allocator (of memory that ranks share, each
counts its part); memory that a library takes past torch's allocator (gloo's buffers, DeepSpeed's pinned ones), pages
that an allocator keeps, compiled code and kernels' scratch show in the third alone, which is sampled.

A second table says where the peak is and what it is made of: the peak of each phase of a step, and the live bytes after
forward and after backward. What is live after forward beyond the bytes at rest is what waits for backward: saved
activations, and of FSDP2 what it has not put back.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import threading
from pathlib import Path
from typing import Any

import common
import modes
from bench import TOLERANCE, _list
from models import MODELS

SETTINGS = ("default", "keep")
PHASES = ("forward", "backward", "optimizer")


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--model", type=_list, default=[n for n in MODELS if not n.startswith("tiny")])
    parser.add_argument("--modes", type=_list, default=modes.DEFAULT)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32")
    parser.add_argument("--allocator", choices=SETTINGS, default="default", help="matters to PSS alone")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    common.hardware(args.hardware, args.ranks, args.allocator)
    m = common.machine()
    print(common.machine_text(m), flush=True)
    result: dict[str, Any] = {"machine": m, "runs": []}
    pages = []
    for name in args.model:
        rows, skipped = {}, {}
        for mode in args.modes:
            call = {
                "model": name,
                "mode": mode,
                "dtype": args.dtype,
                "steps": args.steps,
                "warmup": args.warmup,
            }
            found = common.run_ranks(os.path.abspath(__file__), call, args.ranks, args.allocator)
            if "skipped" in found[0]:
                skipped[mode] = found[0]["skipped"]
                continue
            rows[mode] = most_of(found)
            peak = rows[mode]["peak"] / 2**20
            print(f"  {name} {mode}: peak {peak:.0f} MiB", flush=True)
        result["runs"].append({"model": name, "modes": rows, "skipped": skipped})
        pages.append(report(name, args, rows, skipped))
        if args.json:
            text = common.heading("Peak memory", m) + "\n".join(pages)
            common.save(args.json, result, text)


def most_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure that of the rank with the most."""
    first = {k: v for k, v in found[0].items() if v is not None}
    return {
        k: most_of([f[k] for f in found]) if isinstance(v, dict) else max(f[k] for f in found)
        for k, v in first.items()
    }


def measure(call: dict[str, Any]) -> dict[str, Any]:
    rank, _ = common.init_group()
    spec = MODELS[call["model"]]
    from zero_compiler.runtime import _C

    gc.collect()
    base = pss()
    _C.meter_install()
    try:
        trainer = modes.build(call["mode"], spec, call["dtype"])
    except modes.Skip as skip:
        return {"skipped": str(skip)}
    built = _C.meter_peak()
    for i in range(call["warmup"]):
        trainer.step(*spec.data(i, rank))
    gc.collect()
    at_rest = _C.meter_current()
    _C.meter_reset_peak()
    phases: dict[str, int] = {}
    with Sampled() as resident:
        for i in range(call["steps"]):
            step_in_phases(trainer, spec.data(call["warmup"] + i, rank), phases)
    peak = max(phases[phase] for phase in PHASES)
    plan = None
    if call["mode"].startswith("zero"):
        import zero_compiler as zero

        plan = zero.inspect(trainer.model).to_dict()["memory"]["peak_bytes"]
    return {
        "at_rest": at_rest,
        "peak": peak,
        "pss_peak": resident.peak - base,
        "while_building": built,
        "predicted_peak": plan,
        "phases": phases,
    }


def step_in_phases(trainer: modes.Trainer, batch: Any, most: dict[str, int]) -> None:
    """One step; ``most`` keeps the peak of each phase and the live bytes behind it, each the most of all steps."""
    from zero_compiler.runtime import _C

    def ended(phase: str) -> None:
        for name, nbytes in ((phase, _C.meter_peak()), (f"after {phase}", _C.meter_current())):
            most[name] = max(most.get(name, 0), nbytes)
        _C.meter_reset_peak()

    loss = trainer.forward(*batch)
    ended("forward")
    trainer.backward(loss)
    ended("backward")
    trainer.update()
    ended("optimizer")


class Sampled:
    """The most resident memory seen while the block ran, looked at every 20 ms."""

    def __enter__(self) -> Sampled:
        self.peak = pss()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.peak = max(self.peak, pss())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def pss() -> int:
    """Bytes of this process's resident pages, each divided by the number of processes that map it."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found.group(1)) * 1024


def report(
    name: str, args: argparse.Namespace, rows: dict[str, dict[str, Any]], skipped: dict[str, str]
) -> str:
    fsdp = min((r["peak"] for m, r in rows.items() if m.startswith("fsdp2")), default=None)
    head = [
        "mode",
        "at rest MiB",
        "peak MiB",
        "/ FSDP2 best",
        "PSS peak MiB",
        "while building MiB",
        "predicted peak MiB",
    ]
    table = []
    for mode, r in rows.items():
        mib = {k: f"{v / 2**20:.1f}" for k, v in r.items() if k != "phases"}
        share = f"{r['peak'] / fsdp:.2f}" if fsdp else ""
        cells = [
            mib["at_rest"],
            mib["peak"],
            share,
            mib["pss_peak"],
            mib["while_building"],
            mib.get("predicted_peak", ""),
        ]
        table.append([mode, *cells])
    title = f"{name}: {MODELS[name].about}; {args.dtype}, {args.ranks} ranks, allocator {args.allocator}"
    common.print_table(title, head, table)
    notes = [f"- Skipped {m}: {why}." for m, why in skipped.items()]
    spans = ("forward", "after forward", "backward", "after backward", "optimizer")
    by_phase = [
        [mode, f"{r['at_rest'] / 2**20:.1f}", *(f"{r['phases'][s] / 2**20:.1f}" for s in spans)]
        for mode, r in rows.items()
    ]
    head_of_phases = ["mode", "at rest MiB", *(s if s.startswith("after") else f"peak in {s}" for s in spans)]
    of_phases = f"{name}: by phase"
    common.print_table(of_phases, head_of_phases, by_phase)
    print("\n".join(notes), flush=True)
    text = common.table(title, head, table) + "\n" + common.table(of_phases, head_of_phases, by_phase)
    return text + "\n".join(notes) + "\n"


if __name__ == "__main__":
    main()
