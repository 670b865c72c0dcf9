"""Time and memory of whole weights to safetensors files, beside what the disk does by itself.

    python benchmarks/export.py DIR --json out.json

A stack of linear layers (float32) is sharded at stage 3 over two ranks. In turn, in every round:
  disk write     one process writes as many bytes from memory, 16 MiB at a time, and has them synced
  disk read      it reads them again, out of an empty page cache
  one process    safetensors' own save_file of the whole model, synced: what the first rank has to hold for that
  memory         zero.save_safetensors, shards in memory
  files          the same, shards in files (offload_params="nvme")
  checkpoint     torch.distributed.checkpoint.save of the shards in memory: each rank writes its own
  export         zero-compiler export of that checkpoint, out of an empty page cache, in one process

Times run from when all ranks are there until all have returned, with the sync. "limit": the time that the disk needs by
itself for what is read and written, at the rates of the same round, one after the other; for "memory" and "checkpoint"
the write alone. Memory is what a rank's resident memory (VmHWM) grows meanwhile, the largest of the ranks.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

WAYS = ("disk write", "disk read", "one process", "memory", "files", "checkpoint", "export")
READS = {"disk read", "files", "export"}
PART_BYTES = 16 << 20


def main() -> None:
    call = common.called()
    if call is not None:
        measure(call)
    parser = common.parser(__doc__)
    parser.add_argument("folder", metavar="DIR", help="on the disk that is measured; needs four times --mib")
    parser.add_argument("--mib", type=int, default=1024, help="of weights")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    folder = Path(args.folder).resolve() / "zero-export-bench"
    folder.mkdir(parents=True)
    try:
        asked = {"folder": str(folder), "mib": args.mib, "layers": args.layers, "rounds": args.rounds}
        ranks = common.run_ranks(__file__, asked, args.ranks)
    finally:
        shutil.rmtree(folder)
    text = report(ranks, args)
    if args.json:
        result = {"machine": m, "ranks": ranks}
        common.save(args.json, result, common.heading("Export of whole weights", m) + text)


# On a rank --------------------------------------------------------------------------------------------------------


def measure(call: dict[str, Any]) -> None:
    """Seconds and bytes of memory of every way and round, and the bytes of weights."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch import nn

    import zero_compiler as zero
    from zero_compiler.tools.export import export

    rank, _ = common.init_group()
    folder, first = Path(call["folder"]), rank == 0
    side = math.isqrt((call["mib"] << 20) // 4 // call["layers"])

    def stack(**fields: Any) -> nn.Module:
        layers = (nn.utils.skip_init(nn.Linear, side, side, bias=False) for _ in range(call["layers"]))
        model = zero.shard(nn.Sequential(*layers), stage=3, device="cpu", **fields)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        return model

    nbytes = call["layers"] * side * side * 4
    in_memory = stack()
    (folder / "files").mkdir(exist_ok=True)
    in_files = stack(offload_params="nvme", nvme_dir=str(folder / "files"))

    def one_process() -> None:
        whole = {f"{i}.weight": torch.ones(side, side) for i in range(call["layers"])}
        save_file(whole, folder / "whole.safetensors", {"format": "pt"})
        sync(folder / "whole.safetensors")

    def checkpoint() -> None:
        torch.distributed.checkpoint.save(
            {"model": in_memory.state_dict()}, checkpoint_id=str(folder / "dcp")
        )

    ways: dict[str, Callable[[], object]] = {
        "disk write": lambda: first and write(folder / "plain", nbytes),
        "disk read": lambda: first and read(folder / "plain"),
        "one process": lambda: first and one_process(),
        "memory": lambda: zero.save_safetensors(in_memory, folder / "memory"),
        "files": lambda: zero.save_safetensors(in_files, folder / "from-files"),
        "checkpoint": checkpoint,
        "export": lambda: first and export(folder / "dcp", folder / "exported"),
    }
    zero.save_safetensors(
        zero.shard(nn.Linear(2, 2), device="cpu"), folder / "memory"
    )  # what it imports is there
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for _ in range(call["rounds"]):
        for way, run in ways.items():
            dist.barrier()
            if first:
                if way == "checkpoint":
                    shutil.rmtree(folder / "dcp", ignore_errors=True)
                forget(folder)
            restart_peak()
            before = resident("VmRSS")
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            found[way].append((time.perf_counter() - start, resident("VmHWM") - before))
    common.answer(call, {"nbytes": nbytes, "found": found})


def write(path: Path, nbytes: int) -> None:
    part = memoryview(bytes(PART_BYTES))
    with open(path, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for at in range(0, nbytes, PART_BYTES):
            file.write(part[: min(PART_BYTES, nbytes - at)])
        os.fsync(file.fileno())


def read(path: Path) -> None:
    part = bytearray(PART_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(part):
            pass


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def forget(folder: Path) -> None:
    """Have what the files hold written, and no longer in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def resident(line: str) -> int:
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# The table --------------------------------------------------------------------------------------------------------


def report(ranks: list[dict[str, Any]], args: Any) -> str:
    nbytes, rounds = ranks[0]["nbytes"], range(args.rounds)
    seconds = {way: [max(r["found"][way][i][0] for r in ranks) for i in rounds] for way in WAYS}
    rows = []
    for way in WAYS:
        limits = [
            seconds["disk read"][i] * (way in READS) + seconds["disk write"][i] * (way != "disk read")
            for i in rounds
        ]
        memory = max(r["found"][way][i][1] for r in ranks for i in rounds)
        rows.append(
            (
                way,
                common.show(common.spread(seconds[way]), 2),
                f"{nbytes / 1e9 / common.spread(seconds[way])['median']:.2f}",
                common.show(common.spread([s / x for s, x in zip(seconds[way], limits, strict=True)]), 2),
                f"{memory / 2**20:.0f}",
            )
        )
    title = f"{nbytes / 2**20:.0f} MiB of weights in {args.layers} tensors, {args.ranks} ranks, {args.rounds} rounds"
    head = ("way", "seconds", "GB/s", "of the limit", "memory, MiB")
    common.print_table(title, head, rows)
    return common.table(title, head, rows)


if __name__ == "__main__":
    main()
