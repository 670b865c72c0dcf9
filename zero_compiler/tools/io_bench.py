"""What file I/O reaches under a directory, beside what fio reaches there: ``zero-compiler io-bench``.

A disk's speed can change twofold within a minute, so ours and fio take turns: first over a grid of block sizes and
depths, each point once, then the best few points of each for some rounds. Reported are the medians of the best of them:
one measurement alone would often choose a point that met the disk in a good moment.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StorageError
from ..storage import aio

MODES = {"read": 100, "write": 0, "both": 50}  # reads in percent of all bytes
BLOCKS = (256 << 10, 1 << 20, 4 << 20)
DEPTHS = (4, 16, 32)
FINALISTS = 3  # points of each that go into the rounds
PIECE = 1 << 20  # bytes of one request, at least
FIO_ENGINES = ("io_uring", "libaio")


@dataclass(frozen=True)
class Point:
    """One measurement: bytes per second, both directions together, with O_DIRECT where the directory has it."""

    by: str  # "zero" or "fio"
    mode: str  # of MODES; "both": reads and writes at once, equally many
    block_bytes: int
    depth: int
    bytes_per_s: float


@dataclass(frozen=True)
class Row:
    """The best of ours and of fio in one mode: medians over the rounds, in bytes per second."""

    mode: str
    ours: float
    block_bytes: int
    depth: int
    fio: float | None = None
    fio_block_bytes: int | None = None
    fio_depth: int | None = None
    ratio: float | None = None  # ours to fio's, round by round; the median


@dataclass
class DiskReport:
    directory: str
    nbytes: int
    seconds: float
    backend: str
    direct: bool
    fio: str  # its version and engine, or why it was not run
    rows: list[Row] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def bench(
    directory: str | os.PathLike[str],
    *,
    nbytes: int = 1 << 30,
    seconds: float = 1.0,
    rounds: int = 5,
    backend: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
) -> DiskReport:
    """Measures reads, writes and both at once in a file of ``nbytes`` bytes, made for this and removed at the end.

    Raises:
        ConfigError: the directory does not exist, or a number is out of range.
        StorageError: the disk has no room for the file, or fails.
    """
    if not Path(directory).is_dir():
        raise ConfigError(f"io-bench needs an existing directory, and {os.fspath(directory)!r} is none")
    least = 4 * max(BLOCKS)
    if nbytes < least or nbytes % (2 * max(BLOCKS)):
        raise ConfigError(f"bytes must be a multiple of {2 * max(BLOCKS)}, at least {least}, not {nbytes}")
    if seconds <= 0 or rounds < 1:
        raise ConfigError("seconds must be above 0, and rounds at least 1")
    path = Path(directory) / f"io-bench-{os.getpid()}-{time.monotonic_ns()}.nvme"
    memory = aio.buffer(max(memory_bytes(block, depth) for block in BLOCKS for depth in DEPTHS))
    memory.random_()
    try:
        with aio.Engine(backend=backend) as io:
            file = io.open(path, nbytes, create=True)
            for offset in range(0, nbytes, PIECE):  # written once: later writes find their blocks in place
                io.write(file, memory[: min(PIECE, nbytes - offset)], offset).wait()
            io.flush(file)
            report = DiskReport(os.fspath(directory), nbytes, seconds, io.backend, file.direct, fio_version())
        engine = fio_engine(path, nbytes, report)
        _measure(report, path, memory, engine, rounds, progress)
    finally:
        path.unlink(missing_ok=True)
    return report


def _measure(
    report: DiskReport,
    path: Path,
    memory: object,
    engine: str | None,
    rounds: int,
    progress: Callable[[str], None],
) -> None:
    def ours(mode: str, block: int, depth: int) -> float:
        return our_rate(report, path, memory, mode, block, depth)

    def fio(mode: str, block: int, depth: int) -> float:
        return fio_rate(path, report.nbytes, engine or "", MODES[mode], block, depth, report.seconds)

    runners = {"zero": ours} | ({"fio": fio} if engine else {})
    grid = [(block, depth) for block in BLOCKS for depth in DEPTHS]
    places = range(min(FINALISTS, len(grid)))
    for mode in MODES:
        tried: dict[str, list[Point]] = {by: [] for by in runners}
        for number, (block, depth) in enumerate(grid):
            # The first of a pair may find the disk rested: they change places.
            for by in sorted(runners, reverse=bool(number % 2)):
                progress(f"{mode}, blocks of {block >> 10} KiB, depth {depth}: {by}")
                tried[by].append(Point(by, mode, block, depth, runners[by](mode, block, depth)))
        report.points += [point for points in tried.values() for point in points]
        finalists = {by: sorted(ps, key=lambda p: -p.bytes_per_s)[: len(places)] for by, ps in tried.items()}
        taken: dict[str, list[list[float]]] = {by: [[] for _ in places] for by in runners}
        for number in range(rounds):
            for place in places:
                for by in sorted(runners, reverse=bool((number + place) % 2)):
                    progress(f"{mode}, round {number + 1} of {rounds}, point {place + 1}: {by}")
                    point = finalists[by][place]
                    rate = runners[by](mode, point.block_bytes, point.depth)
                    taken[by][place].append(rate)
                    report.points.append(replace(point, bytes_per_s=rate))
        best = {by: max(places, key=lambda i: statistics.median(taken[by][i])) for by in runners}
        rates = {by: taken[by][i] for by, i in best.items()}
        points = {by: finalists[by][i] for by, i in best.items()}
        row = Row(
            mode, statistics.median(rates["zero"]), points["zero"].block_bytes, points["zero"].depth,
            *(
                (
                    statistics.median(rates["fio"]), points["fio"].block_bytes, points["fio"].depth,
                    statistics.median(a / b for a, b in zip(rates["zero"], rates["fio"], strict=True)),
                )
                if engine
                else ()
            ),
        )  # fmt: skip
        report.rows.append(row)


def memory_bytes(block: int, depth: int) -> int:
    """What :func:`our_rate` takes at most."""
    return 2 * requests(block, depth, 2) * max(block, PIECE)


def requests(block: int, depth: int, kinds: int) -> int:
    """Requests of each of so many kinds at a time: those that have ``depth`` blocks under way, and two that wait.

    No more than that: what is read into memory that is in the processor's caches is read faster, and fio's buffers are
    the blocks under way.
    """
    return depth * block // max(block, PIECE) // kinds + 2


def our_rate(
    report: DiskReport, path: Path, memory: Any, mode: str, block: int, depth: int, registered: bool = True
) -> float:
    """Bytes per second of requests that follow one another through the file, or through one half each.

    Args:
        registered: the memory, with the kernel.
    """
    piece = max(block, PIECE)
    kinds = ("read", "write") if mode == "both" else (mode,)
    span = report.nbytes // len(kinds) // piece * piece
    count = requests(block, depth, len(kinds))
    moved = 0
    with aio.Engine(backend=report.backend, block_bytes=block, depth=depth) as io:
        if registered:
            io.register(memory)
        file = io.open(path, report.nbytes, direct=report.direct)
        begins = {kind: number * span for number, kind in enumerate(kinds)}
        sent = dict.fromkeys(kinds, 0)
        waiting: deque[tuple[str, int, aio.Request]] = deque()

        def send(kind: str, slot: int) -> None:
            part = memory[slot * piece : (slot + 1) * piece]
            offset = begins[kind] + sent[kind] % span
            sent[kind] += piece
            request = io.read(file, part, offset) if kind == "read" else io.write(file, part, offset)
            waiting.append((kind, slot, request))

        began = time.perf_counter()
        for slot in range(count * len(kinds)):
            send(kinds[slot % len(kinds)], slot)
        while waiting:
            kind, slot, request = waiting.popleft()
            request.wait()
            moved += piece
            if time.perf_counter() - began < report.seconds:
                send(kind, slot)
        took = time.perf_counter() - began
    return moved / took


def fio_version() -> str:
    if shutil.which("fio") is None:
        return "not installed"
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()


def fio_engine(path: Path, nbytes: int, report: DiskReport) -> str | None:
    """The first of fio's engines that runs here; the report says which, or why none."""
    if not report.direct or not report.fio.startswith("fio"):
        report.fio += "" if report.direct else ": not run, the directory has no O_DIRECT"
        return None
    why = ""
    for engine in FIO_ENGINES:
        try:
            fio_rate(path, nbytes, engine, 100, 1 << 20, 4, 0.1)
        except StorageError as error:
            why = str(error)
            continue
        report.fio += f", {engine}"
        return engine
    report.fio += f": not run, {why}"
    return None


def fio_rate(
    path: Path, nbytes: int, engine: str, read_percent: int, block: int, depth: int, seconds: float
) -> float:
    """Bytes per second that fio reaches in a file of ``nbytes`` with O_DIRECT, reads and writes together.

    Raises:
        StorageError: fio failed.
    """
    mode = {100: "read", 0: "write"}.get(read_percent, "rw")
    command = [
        "fio", "--name=bench", f"--filename={path}", f"--size={nbytes}", "--direct=1", f"--ioengine={engine}",
        f"--rw={mode}", f"--rwmixread={read_percent}", f"--bs={block}", f"--iodepth={depth}", "--time_based",
        f"--runtime={int(seconds * 1000)}ms", "--output-format=json",
        *(["--fixedbufs=1", "--registerfiles=1"] if engine == "io_uring" else []),
    ]  # fmt: skip
    # Large pages alone can double what a disk takes from memory. Ours are; this lets fio's malloc have them too.
    env = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        why = done.stderr.strip() or done.stdout.strip()[:300]
        raise StorageError(f"fio ended with {done.returncode}: {why}", path=str(path))
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    took = job["job_runtime"] / 1000  # milliseconds of wall time
    return (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / took
