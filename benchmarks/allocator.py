"""Step time and resident memory with torch's own CPU allocator, with the runtime's, and with large blocks mapped.

    python benchmarks/allocator.py --model gpt-6x512,gpt-12x1024 --json out.json

Ways to allocate, each a job of its own, for one process has one allocator:
  own      the runtime's, as a plan installs it
  torch    torch's own stays
  mapped   torch's own, and glibc maps every block of 1 MiB or more (MALLOC_MMAP_THRESHOLD_), which it gives back

The jobs train at stage 3 and take turns at every step, each round beginning with another, so that drift of the machine
hits all alike; the others wait meanwhile. A step's time is that of its slowest rank; beside it stands the time that
its ranks had a processor, system calls and page faults included, which other work on the machine changes least. Ratios
are taken round by round.
Resident memory is what a rank has for itself when the last step has ended (RssAnon), the larger of the two.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import common
import modes
from models import MODELS

WAYS: dict[str, dict[str, str]] = {
    "own": {},
    "torch": {},
    "mapped": {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
}


def main() -> None:
    call = common.called()
    if call is not None:
        train(call)
    parser = common.parser(__doc__)
    names = lambda s: s.split(",")  # noqa: E731
    parser.add_argument("--model", type=names, default=["gpt-6x512", "gpt-12x1024"])
    parser.add_argument("--ways", type=names, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=21, help="measured steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before, with compilation")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    common.hardware(args.hardware, args.ranks)
    m = common.machine()
    print(common.machine_text(m), flush=True)
    result: dict[str, Any] = {"machine": m, "runs": []}
    text = ""
    for name in args.model:
        jobs = {way: Job(name, way, args.ranks) for way in args.ways}
        try:
            run = {"model": name, **rounds(jobs, args.warmup, args.steps)}
        finally:
            for job in jobs.values():
                job.end()
        result["runs"].append(run)
        text += report(run)
        if args.json:
            common.save(args.json, result, common.heading("Allocators of CPU memory", m) + text)


class Job:
    """Ranks that make a step when they are told to."""

    def __init__(self, model: str, way: str, ranks: int) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, os.path.abspath(__file__)],
                env={
                    **os.environ,
                    **group,
                    **WAYS[way],
                    "RANK": str(rank),
                    "OMP_NUM_THREADS": "1",
                    common.RANK_CALL: json.dumps({"model": model, "way": way}),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def step(self) -> dict[str, float]:
        """Of a step the time (the slowest rank's), processor time (of all), resident bytes (the largest) and loss."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print("step", file=rank.stdin, flush=True)
        found = []
        for rank in self._ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError("a rank has ended")
            found.append(json.loads(line))
        return {
            "seconds": max(f["seconds"] for f in found),
            "processor": sum(f["processor"] for f in found),
            "resident": max(f["resident"] for f in found),
            "loss": found[0]["loss"],
        }

    def end(self) -> None:
        for rank in self._ranks:
            rank.terminate()
        for rank in self._ranks:
            rank.wait()


def rounds(jobs: dict[str, Job], warmup: int, steps: int) -> dict[str, Any]:
    order = list(jobs)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in order}
    for i in range(warmup + steps):
        for way in order[i % len(order) :] + order[: i % len(order)]:
            one = jobs[way].step()
            found[way] += [one] if i >= warmup else []
        print(f"  round {i + 1} of {warmup + steps}", file=sys.stderr, flush=True)
    first = found[order[0]]
    return {
        "ways": {
            way: {
                **{what: compared(what, first, all_) for what in ("seconds", "processor")},
                "resident": all_[-1]["resident"],
                "losses_equal": [f["loss"] for f in all_] == [f["loss"] for f in first],
            }
            for way, all_ in found.items()
        }
    }


def compared(what: str, first: list[dict[str, float]], these: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "all": [f[what] for f in these],
        "time": common.spread([f[what] for f in these]),
        "ratio": common.spread([f[what] / g[what] for f, g in zip(first, these)]),
    }


def report(run: dict[str, Any]) -> str:
    ways = run["ways"]
    first = next(iter(ways))
    title = f"{run['model']}: {MODELS[run['model']].about}; fp32, stage 3, one thread a rank"
    head = ["allocator", "ms a step", f"{first} / this", "processor ms", f"{first} / this"]
    head += ["resident MiB of a rank", f"losses of {first}"]
    rows = [
        [
            way,
            *(
                cell
                for what in ("seconds", "processor")
                for cell in (
                    common.show(w[what]["time"], scale=1000),
                    common.show(w[what]["ratio"], digits=2),
                )
            ),
            f"{w['resident'] / 2**20:.0f}",
            "equal" if w["losses_equal"] else "other",
        ]
        for way, w in ways.items()
    ]
    common.print_table(title, head, rows)
    return common.table(title, head, rows) + "\n"


# In a rank --------------------------------------------------------------------------------------------------------


def train(call: dict[str, Any]) -> None:
    from zero_compiler.runtime import _C
    from zero_compiler.storage import heap
    from zero_compiler.storage.resident_memory import Resident

    if call["way"] == "torch":
        heap.may_be_tuned = lambda: False
    rank, _ = common.init_group()
    import torch.distributed as dist

    spec = MODELS[call["model"]]
    trainer = modes.build("zero3", spec, "fp32")
    said = os.fdopen(os.dup(1), "w")
    for step, _ in enumerate(sys.stdin):
        data = spec.data(step, rank)
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        loss = trainer.step(*data)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        assert _C.cpu_allocator_is_installed() == (call["way"] == "own")
        found = {"seconds": seconds, "processor": busy, "resident": Resident.now().own, "loss": loss.item()}
        print(json.dumps(found), file=said, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
