"""DeepSpeed's aio beside ours: one request for a whole file, the same file, in turn.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/io_deepspeed.py DIR

Needs deepspeed (0.19) with its async_io operator built. The variable gives its locked memory the huge pages that
aio.buffer asks for. DeepSpeed first runs over a small grid of its options; then its best, by the medians of three
rounds, and ours at its defaults take turns for the rounds that count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from zero_compiler.runtime import aio


def _best(ways, timed) -> str:
    """Of DeepSpeed's options the fastest: the median of three rounds over all of them."""
    rates = {name: [] for name in ways if name != "zero"}
    for _ in range(3):
        for name, taken in rates.items():
            taken.append(timed(ways[name]))
    return max(rates, key=lambda name: statistics.median(rates[name]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    nbytes = args.bytes
    theirs = AsyncIOBuilder().load()
    path = args.directory / f"io-deepspeed-{os.getpid()}.nvme"
    block = aio.buffer(nbytes).random_()
    handles = {
        f"{size >> 20} MiB x {depth}, {threads} threads": theirs.aio_handle(size, depth, False, True, threads)
        for size in (1 << 20, 4 << 20)
        for depth in (16, 32)
        for threads in (1, 2)
    }
    locked = next(iter(handles.values())).new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    locked.copy_(block)

    def timed(run) -> float:
        began = time.perf_counter()
        run()
        return nbytes / (time.perf_counter() - began) / 1e9

    try:
        with aio.Engine() as io:
            file = io.open(path, nbytes, create=True)
            io.register(block)
            ways = {
                "read": {n: lambda h=h: h.sync_pread(locked, str(path), 0) for n, h in handles.items()}
                | {"zero": lambda: io.read(file, block).wait()},
                "write": {n: lambda h=h: h.sync_pwrite(locked, str(path), 0) for n, h in handles.items()}
                | {"zero": lambda: io.write(file, block).wait()},
            }
            io.write(file, block).wait()
            print(
                f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, ours: {io.backend}, {nbytes >> 20} MiB"
            )
            for mode in ("write", "read"):
                ours, theirs_best = "zero", _best(ways[mode], timed)
                rates: dict[str, list[float]] = {ours: [], theirs_best: []}
                for number in range(args.rounds):
                    for name in sorted(rates, reverse=bool(number % 2)):
                        rates[name].append(timed(ways[mode][name]))
                pairs = [a / b for a, b in zip(rates[ours], rates[theirs_best], strict=True)]
                median = {name: statistics.median(taken) for name, taken in rates.items()}
                print(
                    f"{mode}: ours {median[ours]:.2f} GB/s; DeepSpeed {median[theirs_best]:.2f} ({theirs_best}); "
                    f"ratio {statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})"
                )
            assert torch.equal(locked, block), "both hold what was written"
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
