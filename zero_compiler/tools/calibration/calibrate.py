"""Measures this machine once and keeps the result: ``zero-compiler calibrate``.

Nothing here is called by compilation.
"""

from __future__ import annotations

import datetime
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...compile.backend import compile_with
from ...compile.loader import EngineLoader
from ...cost.hardware import RESERVE_PARTS, Collective, HardwareSpec, PythonTime, load
from ...emit.segments import SegmentFn
from ...errors import ConfigError
from ...ir import ops
from ...ir.program import Program
from ...params.shard import shard
from ...report.frame import Frame
from ...storage.checksums import sums
from .measure_links import FILE_BYTES, collectives_of, copy, files_rank
from .measuring import OPERANDS_BYTES, in_ranks, median_us, medians_us

# Of the memory of a CPU rank, one part in so many is left free: Python and torch take 0.5 GB, the heap has holes, and
# the system needs room for itself.
_CPU_RESERVE_PARTS = 8


def threads_of(world: int) -> int:
    """Threads that torch gives a rank where nobody chooses: OMP_NUM_THREADS, which torchrun sets to 1 unless it is set;
    one process alone has all cores."""
    return torch.get_num_threads() if world == 1 or "OMP_NUM_THREADS" in os.environ else 1


# Long: one measurement after the other, each with the line that is said before it.
def calibrate(
    worlds: list[int],
    directory: str | None,
    say: Callable[[str], None] = lambda _: None,
    threads: int | None = None,
) -> HardwareSpec:
    """Measure matrix products, memory, collectives, host-device copies, Python around a Program, and the disk under
    ``directory``.

    Args:
        worlds: numbers of ranks to measure collectives with; each runs as processes of this machine.
        directory: where to write a test file of 512 MiB a rank; None: the disk is not measured and takes the preset's
            numbers.
        say: called with a line before each measurement.
        threads: of a rank that computes; None: :func:`threads_of` the largest of ``worlds``.

    Raises:
        ConfigError: ``directory`` is none, takes no files, or has no room for them.
    """
    if directory is not None and not (os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)):
        raise ConfigError(f"directory must be one that files can be written to; {directory!r} is not")
    need = FILE_BYTES * max(worlds)
    if directory is not None and (free := shutil.disk_usage(directory).free) < need:
        raise ConfigError(
            f"directory must have room for {need:,} bytes, {FILE_BYTES:,} a rank; {directory!r} has {free:,}"
        )
    threads = threads or threads_of(max(worlds))

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type)
    preset = load("laptop")
    say("matrix products, vectors, memory, and Python around forward and backward")
    # CPU ranks share cores' caches and memory: what one of them gets shows while all are busy.
    rates, (forward, backward) = in_ranks(max(worlds), _compute_rank, threads, device.type == "cpu")
    rates = rates or _rates(device)
    say("host to device")
    host_device = copy(device)
    collectives: list[Collective] = []
    for world in worlds:
        say(f"collectives over {world} ranks")
        collectives += collectives_of(world)
    read, write = preset.nvme_read, preset.nvme_write
    files = f"files: not measured, as in the preset {preset.name!r}"
    if directory is not None:
        files = "files: measured"
        say(f"files in {directory}")
        # Gone whichever rank fails: the others are ended then, and remove nothing.
        with tempfile.TemporaryDirectory(prefix="zero-calibrate-", dir=directory) as folder:
            read, write = in_ranks(max(worlds), files_rank, folder)
    return HardwareSpec(
        name=f"{device.type}, {os.cpu_count()} cores",
        source=f"zero-compiler calibrate, torch {torch.__version__}, {_threads(threads)} a rank; {files}",
        date=datetime.date.today().isoformat(),
        matmul_flops_per_us=rates["matmul"],
        memory_bytes_per_us=rates["memory"],
        vector_per_us=rates["vector"],
        special_per_us=rates["special"],
        vector_share=rates["vector_share"],
        special_share=rates["special_share"],
        kernel_us=rates["kernel"],
        **_bytes_of_a_rank(accelerator is not None, max(worlds), directory),
        collectives=tuple(collectives),
        host_device=host_device,
        nvme_read=read,
        nvme_write=write,
        shared=(
            *([("compute", "device-device", "host-device")] if device.type == "cpu" else []),
            ("nvme-read", "nvme-write"),  # one disk
        ),
        checksum_bytes_per_us=rates["checksum"],
        onednn_flops_per_us=rates["onednn"],
        matmul_traffic=rates["traffic"],
        forward_python=forward,
        backward_python=backward,
    )


def _bytes_of_a_rank(accelerator: bool, world: int, directory: str | None) -> dict[str, Any]:
    """Of each tier, by its field of a spec; files: what is free in ``directory`` now."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world
    device = torch.accelerator.get_memory_info()[1] if accelerator else host
    return {
        "memory_bytes": device,
        "host_memory_bytes": host,
        "nvme_bytes": None if directory is None else shutil.disk_usage(directory).free // world,
        "device_reserve_bytes": device // (RESERVE_PARTS if accelerator else _CPU_RESERVE_PARTS),
    }


def _rates(device: torch.device) -> dict[str, Any]:
    kernel = _kernel_us(device)
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "vector": lambda x: x.add_(1.0),
        "special": lambda x: torch.erf(x, out=x),
    }
    elements = {
        kind: {dtype: _elements_per_us(device, call, dtype) for dtype in (torch.float32, *_OTHER_DTYPES)}
        for kind, call in calls.items()
    }
    return {
        **(_cpu_products() if device.type == "cpu" else _products_on(device)),
        **{kind: rates[torch.float32] for kind, rates in elements.items()},
        **{f"{kind}_share": _shares(rates) for kind, rates in elements.items()},
        "kernel": kernel,
        "checksum": _checksum(),
    }


def _shares(rates: dict[torch.dtype, float]) -> dict[str, float]:
    return {str(d).removeprefix("torch."): rate / rates[torch.float32] for d, rate in rates.items()}


def _elements_per_us(
    device: torch.device, call: Callable[[torch.Tensor], object], dtype: torch.dtype = torch.float32
) -> float:
    """Rate of an element-wise kernel on data in cache, without its launch."""
    sizes = (1 << 11, 1 << 16) if device.type == "cpu" else (1 << 20, 1 << 23)
    times = []
    for n in sizes:
        x = torch.zeros(n, device=device, dtype=dtype)

        def many(x: torch.Tensor = x) -> None:
            for _ in range(200):
                call(x)

        times.append(median_us(many, device) / 200)
    return (sizes[1] - sizes[0]) / max(times[1] - times[0], 1e-3)


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def _compute_rank(rank: int, world: int, folder: str, threads: int, computes: bool) -> None:
    """Saves the rates of a rank, where it ``computes``, and then what Python takes: in one start of the processes."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    dist.barrier()
    mine = _rates(torch.device("cpu")) if computes else None
    dist.barrier()  # nobody is measured beside a rank that is done
    torch.set_num_threads(1)
    times, params = _around_us(_LAYERS), [4 * layers for layers in _LAYERS]
    if rank == 0:
        torch.save((mine, [_python_time(params, us) for us in times]), os.path.join(folder, "rows"))
    dist.barrier()
    dist.destroy_process_group()


_OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class _Products:
    """The three products of a linear layer in training: what runs them, their operations, and bytes that they move."""

    run: Callable[[], object]
    flops: int
    nbytes: int


def _products(
    device: torch.device, dtype: torch.dtype, product: Callable[..., object], rows: int, side: int
) -> _Products:
    """Of ``rows`` by a square weight of ``side``.

    They are the layer's result, the gradient of its input and that of its weight, which transpose one operand or the
    other: libraries are not equally fast at them. Each takes operands, and memory for its result, that were not used
    for long: a gradient of a weight goes where the last one does not lie.

    Args:
        product: of two matrices.
    """
    item = dtype.itemsize
    count = max(4, OPERANDS_BYTES // ((2 * rows + side) * side * item)) if device.type == "cpu" else 2
    layers = [
        [torch.randn(n, side, device=device, dtype=dtype) for n in (rows, side, rows)] for _ in range(count)
    ]
    turn, results = itertools.cycle(layers), deque[Any](maxlen=count)
    forms: list[Callable[..., object]] = [
        lambda x, w, g: product(x, w.t()),
        lambda x, w, g: product(g, w),
        lambda x, w, g: product(g.t(), x),
    ]

    def run() -> None:
        for form in forms:
            results.append(form(*next(turn)))

    return _Products(run, 3 * 2 * rows * side**2, 3 * (2 * rows + side) * side * item)


# Runs of which most come after the first that write to each result.
_WARM = 15
# Rows and side of a weight: of a square product, which is arithmetic nearly alone, and of a thin one, which is not.
_SQUARE, _THIN = (1024, 1024), (64, 1024)
_SQUARE_ON_DEVICE = (8192, 8192)


def _products_on(device: torch.device) -> dict[str, Any]:
    """Rates of an accelerator's products and memory. It loads while it computes: traffic is hidden."""
    copying, nbytes = _memory(device)
    memory = nbytes / median_us(copying, device)
    del copying  # gigabytes
    rates = {}
    for dtype in (torch.float32, *_OTHER_DTYPES):
        work = _products(device, dtype, torch.mm, *_SQUARE_ON_DEVICE)
        rates[_name(dtype)] = work.flops / median_us(work.run, device)
        del work  # before there are others of its size
    return {"matmul": rates, "onednn": {}, "traffic": 0.0, "memory": memory}


def _cpu_products() -> dict[str, Any]:
    """Rates of products by torch's own library and, of float32, by oneDNN where it is there beside; of memory; and how
    many times over products' traffic counts.

    That is one number for both libraries and all dtypes: where it was 2.6 for float32, oneDNN had 1.9, bfloat16 2.4 and
    float64 2.1 (AMD EPYC 9004, torch 2.13, by products of 512 rows whose results lay in cache).
    """
    device, float32 = torch.device("cpu"), torch.float32
    square, thin = (_products(device, float32, torch.mm, *shape) for shape in (_SQUARE, _THIN))
    copying, nbytes = _memory(device)
    runs = [square.run, thin.run, copying]
    if torch.backends.mkldnn.is_available():
        runs += [_products(device, float32, lambda a, b: ops.onednn_linear(a, b.t(), None), *_SQUARE).run]
    square_us, thin_us, copy_us, *onednn_us = medians_us(runs, device, 21)
    memory = nbytes / copy_us
    traffic = _traffic(square, square_us, thin, thin_us, memory)
    rates = {"float32": _rate(square, square_us, traffic / memory)}
    onednn = {"float32": _rate(square, onednn_us[0], traffic / memory)} if onednn_us else {}
    for dtype in _OTHER_DTYPES:
        work = _products(device, dtype, torch.mm, *_SQUARE)
        rates[_name(dtype)] = _rate(work, median_us(work.run, device, _WARM), traffic / memory)
    return {"matmul": rates, "onednn": onednn, "traffic": traffic, "memory": memory}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _traffic(square: _Products, square_us: float, thin: _Products, thin_us: float, memory: float) -> float:
    """``matmul_traffic`` with which both take what they were measured to, at one rate of arithmetic.

    Not below 0, nor so much that it were more than half of the square one, which only a disturbed measurement gives.
    """
    apart = thin.nbytes * square.flops - square.nbytes * thin.flops
    found = memory * (thin_us * square.flops - square_us * thin.flops) / apart
    return min(max(found, 0.0), memory * square_us / (2 * square.nbytes))


def _rate(work: _Products, us: float, byte_us: float) -> float:
    """Operations a microsecond beside traffic, which is half of the time at most.

    Args:
        byte_us: what every byte that it moves takes beside arithmetic.
    """
    return work.flops / max(us - work.nbytes * byte_us, us / 2)


def _memory(device: torch.device) -> tuple[Callable[[], Any], int]:
    """What copies in memory, and the bytes that it moves."""
    n = 1 << (25 if device.type == "cpu" else 29)
    a, b = torch.ones(n, device=device), torch.ones(n, device=device)
    return lambda: b.copy_(a), 2 * a.nbytes


def _checksum() -> float:
    """Sums of what goes to files are the host's work, wherever compute is.

    With memory that the allocator has had before, as in training: fresh pages for temporaries make it six times slower.
    """
    raw = torch.zeros(1 << 25, dtype=torch.uint8)
    return raw.numel() / median_us(lambda: sums(raw), raw.device)


def _kernel_us(device: torch.device) -> float:
    a = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(200):
            a.add_(1)

    return median_us(many, device) / 200


# Layers of the two models that are compared: each is a LayerNorm and a Linear, so four parameters.
_LAYERS = (4, 16)
_CALLS = 41


def _python_time(params: Sequence[int], us: Sequence[float]) -> PythonTime:
    """What two models of so many parameters take, as a time for each parameter and one for the call."""
    each = max(0.0, (us[1] - us[0]) / (params[1] - params[0]))
    return PythonTime(max(0.0, us[0] - params[0] * each), each)


class _BesideSegments(EngineLoader):
    """Adds up the CPU time of this thread in compute segments, ``spent_us``."""

    compute: str | None = "aten"
    spent_us = 0.0

    def load(
        self, program: Program, segments: Sequence[SegmentFn], frame: Frame
    ) -> Callable[[list[Any]], list[Any]]:
        return super().load(program, [partial(self._timed, segment) for segment in segments], frame)

    def _timed(self, segment: Callable[[list[object]], object], args: list[object]) -> Any:
        start = time.thread_time()
        out = segment(args)
        self.spent_us += (time.thread_time() - start) * 1e6
        return out


def _around_us(counts: Sequence[int]) -> list[list[float]]:
    """Median times of a forward, and of a backward, of models of so many tiny layers, beside their compute segments.

    It is time of the CPU, so waiting for peers is none of it. The layers are one block, whose weights and gradients
    travel together: what the number of transfers costs is in the links. Between calls memory is swept: in training,
    compute fills the caches with other things. The models take turns, so that what else runs slows all of them alike.
    """
    loader, x = _BesideSegments(), torch.ones(1, 8)
    swept = torch.zeros(OPERANDS_BYTES // 4)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return compile_with(gm, inputs, None, loader)

    def timed(fn: Callable[[], object], row: list[float]) -> Any:
        swept.add_(1)
        loader.spent_us, start = 0.0, time.thread_time()
        out = fn()
        row.append((time.thread_time() - start) * 1e6 - loader.spent_us)
        return out

    steps: list[Any] = []
    for count in counts:
        layers = (m for _ in range(count) for m in (nn.LayerNorm(8), nn.Linear(8, 8)))
        model = shard(nn.Sequential(nn.Sequential(*layers)), device="cpu")
        steps.append(torch.compile(model, backend=backend))
    forward: list[list[float]] = [[] for _ in steps]
    backward: list[list[float]] = [[] for _ in steps]
    for _ in range(_CALLS):
        for step, f, b in zip(steps, forward, backward, strict=True):
            loss = timed(partial(step, x), f).sum()
            timed(loss.backward, b)
            step.zero_grad()
    # The first calls compile.
    return [[statistics.median(row[2:]) for row in rows] for rows in (forward, backward)]
