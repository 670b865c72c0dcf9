"""Step time and memory over shared memory and over c10d, in turn in one process group.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/transports.py --model gpt-12x1024

Both copies of the model live in the same processes and take their steps by turns, so that whatever else the machine
does hits both. ``--only`` trains one of them alone, for peak memory: the allocator's live bytes (arenas of its own
counted, pages that ranks share not) and the growth of PSS, in which a page that ranks share counts once among them.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS

import zero_compiler as zero
from zero_compiler.runtime import _C


def pss() -> int:
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss:"))


class Trained:
    def __init__(self, spec: Any, transport: str, stage: int, dtype: torch.dtype | None) -> None:
        self.spec = spec
        self.model = zero.shard(spec.build(), stage=stage, transport=transport, param_dtype=dtype)
        self.compiled = torch.compile(self.model, backend="zero")
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.losses: list[float] = []

    def step(self, number: int) -> float:
        tokens, targets = self.spec.data(number, dist.get_rank())
        dist.barrier()
        begin = time.perf_counter()
        loss = self.compiled(tokens, targets)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        dist.barrier()
        self.losses.append(loss.item())
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-12x1024", choices=MODELS)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--dtype", default=None, choices=("bfloat16",))
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--only", choices=("shared", "c10d"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    dtype = getattr(torch, args.dtype) if args.dtype else None
    kinds = [args.only] if args.only else ["c10d", "shared"]
    if args.only:
        _C.meter_install()
    before = pss()
    trained = {k: Trained(MODELS[args.model], k, args.stage, dtype) for k in kinds}
    times: dict[str, list[float]] = {k: [] for k in kinds}
    most = 0
    for number in range(args.warmup + args.steps):
        if number == args.warmup:
            _C.meter_reset_peak()
        for k in kinds if number % 2 else kinds[::-1]:
            seconds = trained[k].step(number)
            if number >= args.warmup:
                times[k].append(seconds)
        most = max(most, pss() - before)
    if dist.get_rank() == 0:
        dtype_name = args.dtype or "float32"
        print(
            f"{args.model}, stage {args.stage}, {dtype_name}, {dist.get_world_size()} ranks, {args.steps} steps"
        )
        for k in kinds:
            t = sorted(times[k])
            print(
                f"{k:<8} median {1e3 * statistics.median(t):8.1f} ms   quarter to three quarters "
                f"{1e3 * t[len(t) // 4]:.1f} to {1e3 * t[3 * len(t) // 4]:.1f}   last loss {trained[k].losses[-1]:.6f}"
            )
        if len(kinds) == 2:
            ratios = sorted(b / a for a, b in zip(times["c10d"], times["shared"], strict=True))
            print(
                f"shared / c10d: median {statistics.median(ratios):.3f}, quarter to three quarters "
                f"{ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}; equal losses: "
                f"{trained['c10d'].losses == trained['shared'].losses}"
            )
        else:
            shared = (
                trained[kinds[0]].model.__dict__["_zero"].policy.runtime.engine.counters()["shared_bytes"]
            )
            print(
                f"live bytes, peak {_C.meter_peak():,}; planned in shared blocks {shared:,}; PSS grew by {most:,}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
