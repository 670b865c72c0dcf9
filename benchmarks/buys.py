"""What a given memory buys: the most layers, the widest model and the longest sequence that train within a budget.

    python benchmarks/buys.py DIR --budget-mib 128,256 --json out.json
    python benchmarks/buys.py DIR --found out.json --json again.json    # those sizes once more, with their times

A GPT (4 layers, width 256, sequence 128, vocabulary 1024, one row of the batch a rank; one of them grows), fp32,
AdamW, two ranks of one thread. Ways to train:
  local      plain PyTorch, compiled
  fsdp2      FSDP2, every block compiled and checkpointed
  deepspeed  DeepSpeed ZeRO-3, where it can be imported
  zero3      stage 3 with memory_budget_bytes
  nvme       the same with parameters, gradients and states in files in DIR, and zero.optimizer(overlap=True)
A size counts where three steps were made in fresh processes and the largest number of live bytes of torch's CPU
allocator, with the buffers of files, stayed within the budget (the rank with the most; an exact count). A peer's size
is looked for by running it. Ours is the largest that the plan finds to fit, before anything is allocated, up to 6% too
small, and of 32 layers or a width of 2048 at most, as a search takes long; then that size is run. The time is that of
the last step, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import common
import modes
from models import Spec, gpt

SHAPE = {"layers": 4, "width": 256, "sequence": 128}
GRAIN = {"layers": 1, "width": 64, "sequence": 64}
MOST = {"layers": 32, "width": 1 << 11, "sequence": 1 << 14}  # grains times a power of two; no more is tried
CLOSE = 16
VOCAB, RANKS = 1024, 2


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("dir", help="a folder on the disk that files go to")
    numbers = lambda s: [int(x) for x in s.split(",")]  # noqa: E731
    parser.add_argument("--budget-mib", type=numbers, default=[128, 256])
    parser.add_argument("--axes", type=lambda s: s.split(","), default=list(SHAPE))
    parser.add_argument("--ways", type=lambda s: s.split(","), default=list(WAYS))
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--found", help="what an earlier run wrote: its sizes are run again, not looked for")
    parser.add_argument("--json")
    args = parser.parse_args()
    known = {}
    if args.found:
        with open(args.found) as file:
            known = {(r["budget_mib"], r["axis"], r["way"]): r for r in json.load(file)["rows"]}
    common.hardware(args.hardware, RANKS)
    m = common.machine()
    print(common.machine_text(m), flush=True)
    found: list[dict[str, Any]] = []
    for mib in args.budget_mib:
        for axis in args.axes:
            for way in args.ways:
                cell = {"budget_mib": mib, "axis": axis, "way": way}
                row = cell | largest(args.dir, mib << 20, axis, way, known.get((mib, axis, way)))
                found.append(row)
                print(f"  {mib} MiB, {way}: {axis} {row['size']}", flush=True)
                if args.json:
                    text = common.heading("What a given memory buys", m) + report(args, found)
                    common.save(args.json, {"machine": m, "rows": found}, text)
    print(report(args, found))


def report(args: argparse.Namespace, found: list[dict[str, Any]]) -> str:
    head = ["budget and way", *(f"{axis} (parameters, peak of predicted MiB, ms)" for axis in args.axes)]
    rows = []
    for mib in args.budget_mib:
        for way in args.ways:
            cells = []
            for axis in args.axes:
                row = next(
                    (r for r in found if (r["budget_mib"], r["axis"], r["way"]) == (mib, axis, way)), None
                )
                if row is None or not row["size"]:
                    cells.append("" if row is None else row.get("skipped", "none"))
                else:
                    peak = f"{row['peak'] / 2**20:.0f}"
                    if row["predicted"]:
                        peak += f" of {row['predicted'] / 2**20:.0f}"
                    more = " or more" if row["size"] == MOST[axis] else ""
                    cells.append(f"{row['size']}{more} ({row['numel'] / 1e6:.1f} M, {peak}, {row['ms']:.0f})")
            rows.append([f"{mib} MiB, {way}", *cells])
    return common.table("The largest that trains, a rank", head, rows)


def largest(folder: str, budget: int, axis: str, way: str, known: dict[str, Any] | None) -> dict[str, Any]:
    """The largest size on ``axis`` that trains, with its measured peak; size 0 where the smallest does not.

    Args:
        known: the row of an earlier run, whose size is run again, and looked for anew if it passes the budget now.
    """
    runs = []

    @cache
    def measured(size: int) -> dict[str, Any]:
        call = {"dir": folder, "budget": budget, "axis": axis, "size": size, "way": way}
        answers = common.run_ranks(os.path.abspath(__file__), call, RANKS)
        slowest = {"ms": max(a["ms"] for a in answers)} if "ms" in answers[0] else {}
        row = {"size": size, **max(answers, key=lambda a: a["peak"]), **slowest}
        runs.append(row)
        return row

    planned = PLANNED.get(way)
    if known is not None and not known["size"]:
        return known
    if known is not None and measured(known["size"])["peak"] <= budget:
        size = known["size"]
    elif planned is not None:
        size = bisect(axis, lambda s: planned(folder, budget, axis, s))
        while size and measured(size)["peak"] > budget:
            size -= GRAIN[axis]
    else:
        if "skipped" in measured(SHAPE[axis]):
            return {"size": 0, "skipped": measured(SHAPE[axis])["skipped"], "runs": runs}
        size = interpolate(axis, budget, lambda s: measured(s)["peak"])
    return {"size": 0, "runs": runs} | (measured(size) if size else {})


def bisect(axis: str, fits: Callable[[int], bool]) -> int:
    """The largest multiple of the axis's grain that fits, if smaller ones do; 0 where none does. One part in CLOSE may
    be missing."""
    grain, low = GRAIN[axis], 0
    high = 2
    while high * grain <= MOST[axis] and fits(high * grain):
        low, high = high, 2 * high
    if high * grain > MOST[axis]:
        return low * grain
    while high - low > max(1, low // CLOSE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * grain) else (low, middle)
    return low * grain


def interpolate(axis: str, budget: int, peak: Callable[[int], int]) -> int:
    """The same for what only a run can tell: peaks are near to a line, or a parabola, through those known."""
    grain = GRAIN[axis]
    known = {0: 0, SHAPE[axis] // grain: peak(SHAPE[axis])}
    while True:
        low = max(n for n, p in known.items() if p <= budget)
        over = [n for n, p in known.items() if p > budget]
        if over and min(over) == low + 1:
            return low * grain
        a, b = sorted(known, key=lambda n: abs(known[n] - budget))[:2]
        guess = a + round(
            (budget - known[a]) * (b - a) / (known[b] - known[a]) if known[a] != known[b] else 1
        )
        guess = max(low + 1, min(guess, min(over) - 1 if over else 4 * max(low, 1)))
        known[guess] = peak(guess * grain)


def spec_of(axis: str, size: int) -> Spec:
    at = {**SHAPE, axis: size}
    return Spec("", lambda: gpt(at["layers"], at["width"], VOCAB, at["sequence"]), VOCAB, at["sequence"], 1)


def fields_of(way: str, folder: str, budget: int) -> dict[str, Any]:
    tiers = {}
    if way == "nvme":
        tiers = {f"offload_{what}": "nvme" for what in ("params", "grads", "optimizer")} | {
            "nvme_dir": folder
        }
    return {"stage": 3, "memory_budget_bytes": budget, **tiers}


def plans(way: str) -> Callable[[str, int, str, int], bool]:
    def fits(folder: str, budget: int, axis: str, size: int) -> bool:
        import torch

        from zero_compiler.errors import MemoryBudgetError
        from zero_compiler.tools.planning import plan

        spec = spec_of(axis, size)
        with torch.device("meta"):
            model = spec.build()
            batch = tuple(torch.empty(1, spec.length, dtype=torch.long) for _ in range(2))
        machine = {"hardware": os.environ[common.HARDWARE]}
        # Of the buffers of `zero.optimizer`, an eighth of a budget at most, a plan without an optimizer knows nothing.
        room = budget - budget // 8 if way == "nvme" else budget
        try:
            plan(model, batch, RANKS, **fields_of(way, folder, room), **machine)
        except MemoryBudgetError:
            return False
        return True

    return fits


def measure(call: dict[str, Any]) -> dict[str, Any]:
    rank, _ = common.init_group()
    spec = spec_of(call["axis"], call["size"])
    from zero_compiler.errors import MemoryBudgetError
    from zero_compiler.runtime import _C
    from zero_compiler.storage import aio

    _C.meter_install()
    import torch

    with torch.device("meta"):
        numel = sum(p.numel() for p in spec.build().parameters())
    try:
        trainer = WAYS[call["way"]](spec, call["dir"], call["budget"])
        _C.meter_reset_peak()  # a whole replica is built first, in every way alike
        for i in range(3):
            begin = time.perf_counter()
            loss = trainer.step(*spec.data(i, rank))
    except modes.Skip as why:
        return {"peak": 0, "skipped": str(why), "numel": numel}
    except MemoryBudgetError as refused:
        return {"peak": 1 << 62, "refused": str(refused), "numel": numel}
    ms, peak, predicted = (time.perf_counter() - begin) * 1e3, _C.meter_peak() + aio.live_bytes(), None
    if call["way"] in PLANNED:
        import zero_compiler as zero

        predicted = zero.inspect(trainer.model).memory.peak
    return {"peak": peak, "predicted": predicted, "ms": ms, "loss": float(loss), "numel": numel}


def _streamed(spec: Spec, folder: str, budget: int) -> modes.Trainer:
    import torch

    import zero_compiler as zero

    model = zero.shard(
        spec.build(), hardware=os.environ[common.HARDWARE], **fields_of("nvme", folder, budget)
    )
    call = torch.compile(model, backend="zero")
    opt = zero.optimizer(torch.optim.AdamW, model, lr=modes.LR, fused=True, overlap=True)

    def update() -> None:
        opt.step()
        opt.zero_grad()

    return modes.Trainer(call, torch.Tensor.backward, update, model, opt)


WAYS: dict[str, Callable[[Spec, str, int], modes.Trainer]] = {
    "local": lambda spec, folder, budget: modes.build("local-compiled", spec, "fp32"),
    "fsdp2": lambda spec, folder, budget: modes.build("fsdp2-blocks", spec, "fp32"),
    "deepspeed": lambda spec, folder, budget: modes.build("deepspeed3", spec, "fp32"),
    "zero3": lambda spec, folder, budget: modes.build(f"zero3:memory_budget_bytes={budget}", spec, "fp32"),
    "nvme": _streamed,
}
PLANNED = {way: plans(way) for way in ("zero3", "nvme")}


if __name__ == "__main__":
    main()
