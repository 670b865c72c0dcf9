"""DeepSpeed's aio beside ours: one request for a whole file, the same file, in turn.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/io_deepspeed.py DIR

Needs deepspeed (0.19) with its async_io operator built. The variable gives its locked memory the huge pages that
aio.buffer asks for. Both first run over a small grid of their options; then the best of each, by the medians of three
rounds, take turns for the rounds that count.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from zero_compiler.storage import aio

SIZES = (256 << 10, 1 << 20, 4 << 20)


def _best(ways, timed) -> str:
    """The fastest: the median of three rounds over all of them."""
    rates = {name: [] for name in ways}
    for _ in range(3):
        for name, taken in rates.items():
            taken.append(timed(ways[name]))
    return max(rates, key=lambda name: statistics.median(rates[name]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    nbytes = args.bytes
    theirs = AsyncIOBuilder().load()
    path = args.directory / f"io-deepspeed-{os.getpid()}.nvme"
    block = aio.buffer(nbytes).random_()
    handles = {
        f"{size >> 10} KiB x {depth}, {threads} threads": theirs.aio_handle(size, depth, False, True, threads)
        for size in SIZES
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
        with contextlib.ExitStack() as stack:
            ours = {}
            for size, depth in itertools.product(SIZES, (4, 16, 32)):
                io = stack.enter_context(aio.Engine(block_bytes=size, depth=depth))
                io.register(block)
                ours[f"{size >> 10} KiB x {depth}"] = io, io.open(path, nbytes, create=not ours)
            runs = {
                "write": (
                    {n: lambda io=io, f=f: io.write(f, block).wait() for n, (io, f) in ours.items()},
                    {n: lambda h=h: h.sync_pwrite(locked, str(path), 0) for n, h in handles.items()},
                ),
                "read": (
                    {n: lambda io=io, f=f: io.read(f, block).wait() for n, (io, f) in ours.items()},
                    {n: lambda h=h: h.sync_pread(locked, str(path), 0) for n, h in handles.items()},
                ),
            }
            io, file = next(iter(ours.values()))
            io.write(file, block).wait()
            print(
                f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, ours: {io.backend}, {nbytes >> 20} MiB"
            )
            for mode, sides in runs.items():
                best = [_best(side, timed) for side in sides]
                rates: list[list[float]] = [[], []]
                for number in range(args.rounds):
                    for side in (0, 1) if number % 2 else (1, 0):
                        rates[side].append(timed(sides[side][best[side]]))
                pairs = [a / b for a, b in zip(*rates, strict=True)]
                median = [statistics.median(taken) for taken in rates]
                print(
                    f"{mode}: ours {median[0]:.2f} GB/s ({best[0]}); DeepSpeed {median[1]:.2f} ({best[1]}); "
                    f"ratio {statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})"
                )
            assert torch.equal(locked, block), "both hold what was written"
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
