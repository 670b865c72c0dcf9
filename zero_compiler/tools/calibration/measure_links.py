"""Measures links: host to device, collectives over c10d and over memory that ranks share, and files."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...cost.hardware import Collective, Link
from ...ranks.mesh import make_group
from ...ranks.transport import choose
from ...storage import aio
from ...torch_versions import all_gather_flat, reduce_scatter_flat
from .. import io_bench
from .measuring import OPERANDS_BYTES, in_ranks, lower_quartile, median_us, medians_us, times_us

FILE_BYTES = 512 << 20
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)


_SMALL, _SWEPT = (
    100,
    50,
)  # runs of a small collective; and where a sweep before each takes longer than all else


def _runs(size: int, small: int = _SMALL) -> int:
    """Of one collective, as many on every rank. The small ones tell latency, which sizes buckets, and which a rank that
    waits for a core makes many times longer."""
    return small if size < 1 << 20 else 15


def copy(device: torch.device) -> Link:
    times = []
    for size in (1 << 12, 1 << 26):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        there = torch.empty(size, dtype=torch.uint8, device=device)
        times.append(median_us(partial(there.copy_, host, non_blocking=True), device))
    return fit([1 << 12, 1 << 26], times)


def fit(sizes: list[int], times: list[float]) -> Link:
    """Latency and bandwidth of the line that suits all sizes but one: of those through two of the points, the one from
    which the others, without the worst, are fewest times off.

    So one time that something else spoiled moves nothing, and small sizes count for as much as large ones, of which a
    twentieth is more than all of the latency.
    """
    points = list(zip(sizes, times, strict=True))

    def off(line: Link) -> tuple[float, float]:
        errors = sorted(abs(math.log(line.us(n) / max(us, 1e-3))) for n, us in points)
        return sum(errors[:-1]), errors[-1]

    return min((_through(a, b) for a, b in itertools.combinations(points, 2)), key=off)


def _through(a: tuple[int, float], b: tuple[int, float]) -> Link:
    """The line through two points, ``a`` of the smaller size."""
    rate = (b[0] - a[0]) / max(b[1] - a[1], 1e-3)
    return Link(max(a[1] - a[0] / rate, 0.1), rate)


def collectives_of(world: int) -> list[Collective]:
    if world < 2:
        return []
    rows = in_ranks(world, _collective_rank)
    return [
        Collective(kind, transport, world, fit(list(SIZES), times))
        for transport, kinds in rows.items()
        for kind, times in kinds.items()
    ]


def _collective_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if accelerator is not None and torch.accelerator.device_count() >= world:
        device = torch.device(accelerator.type, rank)
        torch.accelerator.set_device_index(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    rows = {"c10d": _over_c10d(world, device)}
    if device.type == "cpu":
        rows["shared"] = _over_shared_memory(world)
    if rank == 0:
        torch.save(rows, os.path.join(folder, "rows"))
    dist.barrier()
    dist.destroy_process_group()


def _over_c10d(world: int, device: torch.device) -> dict[str, list[float]]:
    """The process group's collectives, as the lower quartile of runs.

    Waking its threads belongs to each of them, so the shortest run is luck; but half of the runs may wait for a core.
    """
    rows: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    for size in SIZES:
        full = torch.ones(size // 4, device=device)
        part = full[: full.numel() // world].clone()
        out = torch.empty(part.numel() * world, device=device)
        for kind, call, given in (
            ("all_gather", all_gather_flat, (out, part)),
            ("reduce_scatter", reduce_scatter_flat, (part, out)),
            ("all_reduce", dist.all_reduce, (full,)),
        ):
            dist.barrier()
            rows[kind].append(lower_quartile(times_us(partial(call, *given), device, _runs(size))))
    return rows


def _over_shared_memory(world: int) -> dict[str, list[float]]:
    """The engine's own transfers through memory that the ranks share; nothing where they cannot.

    Before each a core's own caches are swept: in training, compute fills them with other things. Then ranks meet, or
    one would wait for the sweep of another. The shortest run counts: what makes one longer is a rank without a core.
    """
    from ...runtime import _C

    group = make_group(None, "cpu")
    way = choose(group, "auto", "calibrate", [])
    if way.segment is None:
        return {}
    engine = _C.Engine(group.pg, group.rank, world, shared=way.segment.for_engine())
    slots = engine.add_shared_arena(SIZES[-1], "slots")
    own = engine.add_shared_arena(SIZES[-1], "own")
    word, swept = torch.ones(1), torch.zeros(OPERANDS_BYTES // 4)
    met = engine.add_reduce(own, word.dtype, "meeting", [(1, [1])], 0, True, word.dtype, world)

    def reduced(at: int, given: torch.Tensor) -> None:
        engine.reduce_start(at, [given])
        engine.reduce_wait(at)
        engine.leave()

    def timed(call: Callable[[], object], runs: int) -> float:
        times = []
        for _ in range(runs):
            swept.add_(1)
            reduced(met, word)
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return min(times)

    rows: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    for size in SIZES:
        full = torch.ones(size // 4)
        part = full[: full.numel() // world].clone()
        sizes, chunk = list(full.shape), part.numel()
        gather = engine.add_gather(slots, full.dtype, f"{size} bytes", [(chunk, sizes, 0)], -1)
        scatter, reduce = (
            engine.add_reduce(own, full.dtype, f"{size} bytes", [(n, sizes)], 0, whole, full.dtype, world)
            for n, whole in ((chunk, False), (full.numel(), True))
        )

        def gathered(at: int = gather, given: torch.Tensor = part) -> None:
            engine.gather_start(at, [given])
            engine.gather_wait(at)
            engine.release(at)
            engine.leave()

        for kind, call in (
            ("all_gather", gathered),
            ("reduce_scatter", partial(reduced, scatter, full)),
            ("all_reduce", partial(reduced, reduce, full)),
        ):
            dist.barrier()
            rows[kind].append(timed(call, _runs(size, _SWEPT)))
    engine.close()
    return rows


def files_rank(rank: int, world: int, folder: str, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mine = _files(Path(directory), dist.barrier)
    if rank == 0:
        torch.save(mine, os.path.join(folder, "rows"))
    dist.barrier()
    dist.destroy_process_group()


def _files(directory: Path, together: Callable[[], Any]) -> tuple[Link, Link]:
    """Reads and writes as Programs have them: through the engine's queue, past the page cache where that can be.

    Args:
        together: waits until all ranks are there: they share the disk, and each gets its part.
    """
    path = directory / f"zero-calibrate-{os.getpid()}"
    try:
        with aio.Engine() as io:
            block, depth = io.block_bytes, io.depth
            memory = aio.buffer(io_bench.memory_bytes(block, depth))
            file = io.open(path, FILE_BYTES, create=True)
            # Written once: later writes find their blocks in place.
            for at in range(0, FILE_BYTES, io_bench.PIECE):
                io.write(file, memory[: io_bench.PIECE], at).wait()
            io.flush(file)
            report = io_bench.DiskReport(str(directory), FILE_BYTES, 0.3, io.backend, file.direct, "not run")
            part, host = memory[: aio.ALIGN], torch.device("cpu")
            single = [lambda: io.read(file, part, 0).wait(), lambda: io.write(file, part, 0).wait()]
            together()  # no rank's latency beside another's writes
            latencies = medians_us(single, host, 50)
            together()
        links = []
        for mode, latency in zip(("read", "write"), latencies, strict=True):
            rates = []
            for _ in range(5):
                together()
                rates.append(io_bench.our_rate(report, path, memory, mode, block, depth, registered=False))
            links.append(Link(latency, statistics.median(rates) / 1e6))
    finally:
        path.unlink(missing_ok=True)
    return links[0], links[1]
