"""One device: step time beside plain `torch.compile` and FSDP2.

    python benchmarks/device_step_time.py --model gpt-1.5b --cuda-graphs yes --json FILE

Models of `bench.py`, each with plain PyTorch compiled by Inductor, FSDP2 with every block compiled, and stage 3, in
turn step by step in one process: median, ratios, tokens/s, and the device's peak beside the plan. Made for an
accelerator; without one the CPU is the device.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import common
import torch
from models import MODELS, OF_A_GPU
from one_device import (
    GIB,
    Peak,
    Results,
    called,
    check,
    device,
    forget,
    fsdp2,
    meter,
    one_step,
    ours,
    plain,
    planned_ms,
)

TIMES = [
    "model",
    "plain, ms",
    "plain with CUDA graphs, ms",
    "FSDP2, ms",
    "stage 3, ms",
    "stage 3 with CUDA graphs, ms",
    "/ plain",
    "/ FSDP2",
    "tokens/s",
    "peak, GiB",
    "planned",
]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--model",
        type=lambda s: [name for name in s.split(",") if name],
        default=["gpt-6x512", "gpt-12x1024", "moe"],
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="of compute")
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument(
        "--cuda-graphs", choices=("yes", "no"), default="no", help="plain PyTorch and ours with them too"
    )
    args = called(parser)
    results = Results(
        "One device",
        "times",
        args.json,
        lambda rows: common.table(f"Step time, {args.dtype}", TIMES, [time_row(r) for r in rows]),
    )
    for name in args.model:
        results.add(times_of(name, args))
    print(results.text())


def times_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    import zero_compiler as zero

    meter()
    spec, at = (MODELS | OF_A_GPU)[name], device()
    dtype = torch.bfloat16 if args.dtype == "bf16" else None
    makers: list[Any] = [plain, fsdp2, ours]
    if args.cuda_graphs == "yes":
        makers += [partial(make, mode="reduce-overhead") for make in (plain, ours)]
    made = [make(spec.build().to(at), dtype) for make in makers]
    times: list[list[float]] = [[] for _ in makers]
    losses: list[list[float]] = [[] for _ in makers]
    for step in range(args.warmup + args.steps):
        batch = [t.to(at) for t in spec.data(step, 0)]
        for turn in range(len(made)):
            k = (step + turn) % len(made)
            seconds, loss = one_step(*made[k], batch)
            if step >= args.warmup:
                times[k].append(seconds * 1e3)
            losses[k].append(loss)
    apart = check(losses, name, args.dtype == "bf16")
    made.clear()
    forget()
    call, optimizer = ours(spec.build().to(at), dtype)
    peak = Peak()
    for step in range(3):
        one_step(call, optimizer, [t.to(at) for t in spec.data(step, 0)])
    return {
        "model": name,
        "plain_ms": times[0],
        "fsdp2_ms": times[1],
        "zero_ms": times[2],
        "graphs_ms": times[3] if len(times) > 3 else None,
        "zero_graphs_ms": times[4] if len(times) > 4 else None,
        "ratio": common.spread([b / a for a, b in zip(times[0], times[2], strict=True)]),
        "fsdp2_ratio": common.spread([b / a for a, b in zip(times[1], times[2], strict=True)]),
        "tokens": batch[0].numel(),
        "losses_apart": apart,
        "peak_bytes": peak.bytes(),
        "planned_bytes": (told := zero.inspect(call._orig_mod)).memory.peak,
        "planned_ms": planned_ms(told),
    }


def shown(values: list[float] | None) -> str:
    return "" if values is None else common.show(common.spread(values))


def time_row(r: dict[str, Any]) -> list[str]:
    return [
        r["model"],
        *(shown(r[name]) for name in ("plain_ms", "graphs_ms", "fsdp2_ms", "zero_ms", "zero_graphs_ms")),
        *(common.show(r[name], 2) for name in ("ratio", "fsdp2_ratio")),
        f"{1e3 * r['tokens'] / common.spread(r['zero_ms'])['median']:,.0f}",
        f"{r['peak_bytes'] / GIB:.2f}",
        f"{r['planned_bytes'] / GIB:.2f}",
    ]


if __name__ == "__main__":
    main()
