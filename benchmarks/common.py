"""What the benchmarks share: starting ranks, the description of the machine, statistics and tables."""

from __future__ import annotations

import argparse
import atexit
import datetime
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    # glibc gives freed pages back to the system and takes fresh ones, which cost a fault each, at the next step.
    # These keep them. Setting either also turns off glibc's own moving threshold.
    "keep": {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
}
RANK_CALL = "ZERO_BENCH_CALL"
HARDWARE = "ZERO_BENCH_HARDWARE"  # the file that our plans are made for


def parser(about: str | None) -> argparse.ArgumentParser:
    """For a script whose ``about`` is laid out for its readers."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))


def hardware(
    file: str | None,
    ranks: int,
    allocator: str = "default",
    directory: str | os.PathLike[str] | None = None,
    threads: int = 1,
) -> str:
    """For :func:`run_ranks` to inherit: ``file``, or what calibration finds now (``directory``: on that disk too) with
    so many ``threads`` a rank.

    Under the allocator that the ranks will have: fresh pages take part of the time of gloo's transfers, and of
    products, whose results are new memory.
    """
    from zero_compiler.tools.calibration.calibrate import calibrate

    if file is None:
        folder = tempfile.mkdtemp(prefix="zero-bench-")
        atexit.register(shutil.rmtree, folder)
        file = os.path.join(folder, "hardware.json")
        with mock.patch.dict(os.environ, ALLOCATORS[allocator]):  # processes that calibration starts read it
            spec = calibrate(
                [ranks],
                directory and os.fspath(directory),
                lambda what: print(f"  calibrating: {what}", flush=True),
                threads,
            )
        Path(file).write_text(spec.to_json())
    os.environ[HARDWARE] = os.path.abspath(file)
    return os.environ[HARDWARE]


def allocator_in_use() -> str:
    for name, env in ALLOCATORS.items():
        if env and all(os.environ.get(k) == v for k, v in env.items()):
            return name
    return "default"


# Ranks ------------------------------------------------------------------------------------------------------------


def run_ranks(
    script: str,
    call: Mapping[str, Any],
    world: int,
    allocator: str = "default",
    env: Mapping[str, str] | None = None,
    threads: int = 1,
) -> list[Any]:
    """Run ``script`` in ``world`` fresh processes of so many threads each; what each gave to :func:`answer`, in order.

    Raises:
        RuntimeError: a rank failed. The others are ended.
    """
    # As an exception, so that the ranks are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory(prefix="zero-bench-") as folder:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        ranks = []
        for rank in range(world):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
                RANK_CALL: json.dumps({**call, "answer": os.path.join(folder, str(rank))}),
            }
            full = {**os.environ, "DS_ACCELERATOR": "cpu", **ALLOCATORS[allocator], **(env or {}), **own}
            ranks.append(subprocess.Popen([sys.executable, script], env=full))
        try:
            while any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks):
                time.sleep(0.05)
            # A rank that failed leaves the others in a collective.
            if any(r.poll() for r in ranks):
                raise RuntimeError(
                    f"a rank of {os.path.basename(script)} failed: {[r.poll() for r in ranks]}"
                )
        finally:
            for r in ranks:
                if r.poll() is None:
                    r.terminate()
            for r in ranks:
                r.wait()
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]


def called() -> dict[str, Any] | None:
    """In a process started by :func:`run_ranks`, what it is to do."""
    text = os.environ.get(RANK_CALL)
    return json.loads(text) if text else None


def answer(call: Mapping[str, Any], value: Any) -> None:
    Path(call["answer"]).write_text(json.dumps(value))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's shutdown: libraries' threads may still look at the group.
    os._exit(0)


def init_group() -> tuple[int, int]:
    """One thread, a gloo group over the ranks that the environment names; (rank, world)."""
    import torch
    import torch.distributed as dist

    # torch renames its collectives; the libraries compared here still use the old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        raise RuntimeError("no ranks in the environment")
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=15))
    return dist.get_rank(), dist.get_world_size()


def gather_objects(value: Any) -> list[Any]:
    import torch.distributed as dist

    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


# The machine ------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a reader needs to judge a number; nothing that names the machine itself."""
    cpu = next(
        (x.split(":", 1)[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")),
        platform.machine(),
    )
    memory = next((int(x.split()[1]) for x in _lines("/proc/meminfo") if x.startswith("MemTotal")), 0)
    flags = next((x for x in _lines("/proc/cpuinfo") if x.startswith("flags")), "").split()
    return {
        "command": command(),
        "cpu": cpu,
        "cores": cores(),
        "memory_gib": round(memory / 2**20, 1),
        "isa": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": {p: _version(p) for p in ("torch", "zero-compiler", "deepspeed")},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def command() -> str:
    """That which runs, with the names of files alone."""
    words = (os.path.basename(word) if "/" in word else word for word in sys.argv[1:])
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def heading(title: str, m: Mapping[str, Any]) -> str:
    """The begin of a file of results."""
    return f"# {title}\n\n`{m['command']}`\n\n{machine_text(m)}\n\n"


def machine_text(m: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in m["versions"].items() if v)
    return (
        f"{m['cpu']}, {m['cores']} cores ({' '.join(m['isa'])}), {m['memory_gib']} GiB, {m['system']}, Python "
        f"{m['python']}, {versions}, commit {m['commit']}, {m['date']}, load average at start "
        f"{m['load_average_at_start']}"
    )


def available_bytes() -> int:
    return next(
        (int(x.split()[1]) * 1024 for x in _lines("/proc/meminfo") if x.startswith("MemAvailable")), 8 << 30
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        run = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# Numbers and tables -----------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    if len(values) == 1:
        return {"median": values[0], "p10": values[0], "p90": values[0]}
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": cuts[0], "p90": cuts[-1]}


def show(s: Mapping[str, float] | None, digits: int = 0, scale: float = 1.0) -> str:
    if s is None:
        return ""
    return f"{s['median'] * scale:.{digits}f} ({s['p10'] * scale:.{digits}f}-{s['p90'] * scale:.{digits}f})"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    text = [[str(c) for c in row] for row in rows]
    width = [max(len(r[i]) for r in [list(head), *text]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, width)))
            + " |"
        )

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(width)) + "|"
    return "\n".join([f"**{title}**", "", line(list(head)), rule, *map(line, text), ""])


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """On a terminal a drawn table, in a log Markdown."""
    if not sys.stdout.isatty():
        print(table(title, head, rows), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        drawn.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        drawn.add_row(*map(str, row))
    Console().print(drawn)


def save(path: str, result: Mapping[str, Any], markdown: str) -> None:
    """JSON at ``path`` and Markdown beside it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
    Path(path).with_suffix(".md").write_text(markdown)
