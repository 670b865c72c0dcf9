"""What the kernel counts of every way to train, in a memory cgroup of all ranks and their launcher.

    python benchmarks/resident.py --model gpt-12x1024 --modes ddp,fsdp2-compiled,zero3 --json out.json

Each mode runs under ``torchrun`` in a cgroup of its own, as in a container. At the end of each phase the ranks meet,
and the cgroup is read: what its processes have of anonymous memory, of shared memory, of page cache and of the kernel's
own. ``--limit`` trains one rank instead, in a cgroup of the report's expected resident memory and a tenth more: with
everything in memory, and with parameters, gradients and states in files. With ``--beyond-mib`` the cgroup has instead
what a process takes that imports the libraries and does nothing, the budget, and so much more; with ``--torch-compile``
also what plain ``torch.compile(backend="aot_eager")`` of the same model leaves in such a process when it has run a
forward and a backward and its garbage was collected. A phase is

  libraries   torch, Inductor and zero_compiler are imported, the group is made
  built       the model, sharded or wrapped, and its optimizer
  compiled    the first step has ended
  steady      steps later, as often as ``--steps`` says

``peak`` is the most that was counted while a phase lasted. ``live`` are bytes of torch's CPU allocator, counted
exactly, of all ranks at their most in the last phase. ``overhead`` is what the last phase adds to the libraries beyond
``live``: heap that is free and not given back, Python's objects, compiled code, buffers of libraries. Page cache of
files that anybody may read (libraries' code) is given back when memory is short, and stands apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import limits
import modes
from bench import _list
from models import MODELS

CGROUP = "ZERO_BENCH_CGROUP"
NO_LIMIT = 1 << 50
KINDS = ("anonymous", "shared", "cache", "kernel")


def main() -> None:
    call = common.called()
    if call is not None:
        kinds = {"files": train, "libraries": libraries, "plain": plain}
        next((run for kind, run in kinds.items() if kind in call), measure)(call)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the cgroup is left and removed
    parser = common.parser(__doc__)
    parser.add_argument("--model", type=_list, default=["gpt-12x1024"])
    parser.add_argument("--modes", type=_list, default=["ddp", "fsdp2-compiled", "zero3"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--limit", metavar="DIR", help="train under the expected resident memory; files go to DIR"
    )
    parser.add_argument(
        "--rests", type=_list, default=["memory", "files"], help="with --limit: where all rests, in turn"
    )
    parser.add_argument(
        "--budget-mib", type=int, help="with --limit: memory_budget_bytes of what is in files"
    )
    parser.add_argument(
        "--beyond-mib",
        type=int,
        help="with --budget-mib: what is in files, limited to libraries, budget and so much more",
    )
    parser.add_argument(
        "--torch-compile",
        action="store_true",
        help="with --beyond-mib: the limit has also what plain torch.compile leaves of the model",
    )
    parser.add_argument("--compute", choices=("inductor", "aten"), default="inductor", help="with --limit")
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.beyond_mib is not None and (args.budget_mib is None or args.limit is None):
        parser.error("--beyond-mib takes --limit and --budget-mib")
    common.hardware(args.hardware, args.ranks if args.limit is None else 1)
    m = common.machine()
    print(common.machine_text(m), flush=True)
    result: dict[str, Any] = {"machine": m, "runs": []}
    pages = []
    if args.limit is not None:
        for name in args.model:
            for rests in args.rests if args.beyond_mib is None else ["files"]:
                result["runs"].append(limited(args, name, rests == "files"))
            text = limited_report(args, result["runs"])
            if args.json:
                common.save(args.json, result, common.heading("Under the expected resident memory", m) + text)
        return
    for name in args.model:
        rows = {}
        for mode in args.modes:
            rows[mode] = run(name, mode, args.steps, args.ranks)
            print(f"  {name} {mode}: {rows[mode]['phases']['steady']['peak'] / 2**20:.0f} MiB", flush=True)
        result["runs"].append({"model": name, "modes": rows})
        pages.append(report(name, args, rows))
        if args.json:
            common.save(args.json, result, common.heading("What the kernel counts", m) + "\n".join(pages))


def run(model: str, mode: str, steps: int, ranks: int) -> dict[str, Any]:
    """One mode in fresh processes; what rank 0 has read of their cgroup, and each rank of itself."""
    with tempfile.TemporaryDirectory(prefix="zero-bench-") as folder, limits.cgroup(NO_LIMIT) as group:
        if group.path is None:
            sys.exit(f"nobody counts here: {group.why}")
        call = {"model": model, "mode": mode, "steps": steps, "answer": folder}
        env = {
            **os.environ,
            common.RANK_CALL: json.dumps(call),
            CGROUP: str(group.path),
            "OMP_NUM_THREADS": "1",
        }
        env["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))  # nothing was compiled before
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        code = in_cgroup(group, [*launch, os.path.abspath(__file__)], env)
        if code:
            raise RuntimeError(f"{mode} of {model} failed: {code}")
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
    return {
        "phases": found[0]["phases"],
        "live": sum(f["live"] for f in found),
        "ranks": [f["own"] for f in found],
    }


# Under a limit ----------------------------------------------------------------------------------------------------


def limited(args: argparse.Namespace, name: str, files: bool) -> dict[str, Any]:
    """What the report expects of a model that has run for a step, and whether it lives under its limit."""
    call = {"model": name, "files": args.limit if files else None, "compute": args.compute}
    call["budget_mib"] = args.budget_mib if files else None
    first = trained(call | {"steps": 1}, NO_LIMIT)
    if "expected" not in first:
        raise RuntimeError(f"{name} does not train without a limit either")
    limit = int(1.1 * first["expected"])
    if args.beyond_mib is not None:
        first |= trained({"libraries": True}, NO_LIMIT) | trained({"plain": True, "model": name}, NO_LIMIT)
        limit = first["imported"] + (args.budget_mib + args.beyond_mib << 20)
        limit += first["torch"] if args.torch_compile else 0
    found = trained(call | {"steps": args.steps}, limit)
    row = {"model": name, "files": files, "limit": limit, "lives": "expected" in found} | first
    row |= {"peak": found["peak"], "steps": found.get("steps", 0)}
    print(f"  {name}, {'files' if files else 'memory'}: {'lives' if row['lives'] else 'killed'}", flush=True)
    return row


def trained(call: dict[str, Any], limit: int) -> dict[str, Any]:
    """A fresh process in a cgroup of its own: what it says at the end, if it came to that, and the cgroup's peak."""
    with tempfile.TemporaryDirectory(prefix="zero-bench-") as folder, limits.cgroup(limit) as group:
        if group.path is None:
            sys.exit(f"nobody counts here: {group.why}")
        env = {**os.environ, common.RANK_CALL: json.dumps({**call, "answer": f"{folder}/answer"})}
        env |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor"))}
        in_cgroup(group, [sys.executable, os.path.abspath(__file__)], env)
        answer = Path(folder, "answer")
        found = json.loads(answer.read_text()) if answer.exists() else {}
        return {**found, "peak": group.peak_bytes()}


def libraries(call: dict[str, Any]) -> None:
    """What a process has that has imported them, and does nothing."""
    import torch
    from torch._inductor import compile_fx  # noqa: F401

    from zero_compiler.storage.resident_memory import Resident

    torch.set_num_threads(1)
    now = Resident.now()
    common.answer(call, {"imported": now.own + now.shared + now.tables})


def plain(call: dict[str, Any]) -> None:
    """What plain ``torch.compile`` of the model leaves beside its tensors, of a process with the same libraries."""
    import torch
    from torch._inductor import compile_fx  # noqa: F401

    from zero_compiler.storage import heap
    from zero_compiler.storage.resident_memory import Resident

    torch.set_num_threads(1)
    spec = MODELS[call["model"]]
    model = spec.build()
    heap.give_back()
    before = Resident.now()
    torch.compile(model, backend="aot_eager")(*spec.data(0, 0)).backward()
    for p in model.parameters():
        p.grad = None
    gc.collect()
    heap.give_back()
    now = Resident.now()
    common.answer(
        call, {"torch": now.own + now.shared + now.tables - before.own - before.shared - before.tables}
    )


def train(call: dict[str, Any]) -> None:
    """Steps on one rank; the plan and what is expected of the process, as the report has it behind the first step."""
    import torch

    import zero_compiler as zero

    torch.set_num_threads(1)
    spec = MODELS[call["model"]]
    fields: dict[str, Any] = {"hardware": os.environ[common.HARDWARE]}
    if call["files"]:
        fields |= {f"offload_{kind}": "nvme" for kind in ("params", "grads", "optimizer")}
        fields["nvme_dir"] = call["files"]
    if call["budget_mib"]:
        fields["memory_budget_bytes"] = call["budget_mib"] << 20
    torch.manual_seed(0)
    with zero.init(**fields):
        model = spec.make()
    step = torch.compile(model, backend="zero", options={"compute": call["compute"]})
    if call["files"]:
        opt: Any = zero.optimizer(torch.optim.AdamW, model, lr=modes.LR, fused=True)
    else:
        opt = torch.optim.AdamW(model.parameters(), lr=modes.LR, fused=True)
    said: dict[str, Any] = {}
    for i in range(call["steps"]):
        step(*spec.data(i, 0)).backward()
        opt.step()
        opt.zero_grad()
        if i == 0:
            memory = zero.inspect(model).memory
            said = zero.inspect(model).to_dict()["memory"]["resident_parts"] | {"expected": memory.resident}
    common.answer(call, {**said, "steps": call["steps"]})


def limited_report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    def mib(n: float) -> str:
        return f"{n / 2**20:.0f}"

    head = [
        "model",
        "rests",
        "had",
        "compiled",
        "plan",
        "overhead",
        "expected",
        "limit",
        "peak",
        f"{args.steps} steps",
    ]
    table = [
        [
            r["model"],
            "in files" if r["files"] else "in memory",
            mib(r["measured"]["had"]),
            *(
                mib(r[k])
                for k in ("compiled_bytes", "planned_bytes", "overhead_bytes", "expected", "limit", "peak")
            ),
            "lives" if r["lives"] else "killed",
        ]
        for r in rows
    ]
    limit = "the expected resident memory and a tenth more"
    if args.beyond_mib is not None:
        imported = mib(rows[0]["imported"])
        torch_ = ["what plain torch.compile leaves"] if args.torch_compile else []
        parts = [f"libraries ({imported})", *torch_, f"the budget of {args.budget_mib}"]
        limit = f"{', '.join(parts)} and {args.beyond_mib} more"
        head.insert(2, "plain torch.compile")
        for row, cells in zip(rows, table, strict=True):
            cells.insert(2, mib(row["torch"]))
    title = f"One rank in a cgroup of {limit}, MiB, {args.compute}"
    common.print_table(title, head, table)
    return common.table(title, head, table)


# Beside peers -----------------------------------------------------------------------------------------------------


def in_cgroup(group: limits.Group, command: list[str], env: dict[str, str]) -> int:
    """Run a command as a process that is born in the cgroup, so that it is counted from its first page on; its exit
    status."""
    child = subprocess.Popen(command, env=env, preexec_fn=lambda: group.enter(os.getpid()))
    try:
        return child.wait()
    finally:
        child.terminate()  # torchrun ends its ranks
        child.wait()


def measure(call: dict[str, Any]) -> None:
    rank, _ = common.init_group()
    import torch.distributed as dist
    from torch._inductor import compile_fx  # noqa: F401

    import zero_compiler  # noqa: F401
    from zero_compiler.runtime import _C

    spec = MODELS[call["model"]]
    count = Counted(Path(os.environ[CGROUP]))
    phases: dict[str, Any] = {}
    own: dict[str, Any] = {}

    def ended(phase: str) -> None:
        dist.barrier()
        own[phase] = mappings()
        if rank == 0:
            phases[phase] = count.now()
        dist.barrier()
        if rank == 0:
            count.begin()
        dist.barrier()

    ended("libraries")
    _C.meter_install()
    trainer = modes.build(call["mode"], spec, "fp32")
    ended("built")
    trainer.step(*spec.data(0, rank))
    ended("compiled")
    _C.meter_reset_peak()
    for i in range(call["steps"]):
        trainer.step(*spec.data(1 + i, rank))
    live = _C.meter_peak()
    ended("steady")
    gc.collect()
    Path(call["answer"], str(rank)).write_text(json.dumps({"phases": phases, "live": live, "own": own}))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


class Counted:
    """What the kernel counts of a cgroup."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first = (path / "memory.usage_in_bytes").exists()  # of version 1
        self._peak = None if self.first else self._open_peak()
        self.begin()

    def _open_peak(self) -> Any:
        # What is written to it holds for this descriptor.
        return open(self.path / "memory.peak", "r+")

    def begin(self) -> None:
        """The peak is that since now."""
        if self.first:
            (self.path / "memory.max_usage_in_bytes").write_text("0")
        else:
            self._peak.write("reset\n")
            self._peak.flush()

    def now(self) -> dict[str, int]:
        """Bytes by kind, and the most since :meth:`begin`."""
        stat = {
            k: int(v) for k, v in (x.split() for x in (self.path / "memory.stat").read_text().splitlines())
        }
        if self.first:
            usage = int((self.path / "memory.usage_in_bytes").read_text())
            peak = int((self.path / "memory.max_usage_in_bytes").read_text())
            kernel = int((self.path / "memory.kmem.usage_in_bytes").read_text())
            anonymous, shared = stat["total_rss"], stat["total_shmem"]
            cache = stat["total_cache"] - shared
        else:
            usage = int((self.path / "memory.current").read_text())
            self._peak.seek(0)
            peak = int(self._peak.read())
            kernel, anonymous, shared = stat["kernel"], stat["anon"], stat["shmem"]
            cache = stat["file"] - shared
        procs = len((self.path / "cgroup.procs").read_text().split())
        return {
            "processes": procs,
            "anonymous": anonymous,
            "shared": shared,
            "cache": cache,
            "kernel": kernel,
            "now": usage,
            "peak": peak,
        }


def mappings() -> dict[str, int]:
    """Resident bytes of this process, by what is mapped."""
    found: dict[str, int] = {}
    what = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            path = line.split(maxsplit=5)[5:] or ["anonymous"]
            what = kind_of(path[0])
        elif line.startswith("Pss:"):
            found[what] = found.get(what, 0) + int(line.split()[1]) * 1024
    return found


def kind_of(path: str) -> str:
    if path in ("[heap]", "anonymous"):
        return path.strip("[]")
    if path.startswith("/memfd") or path.startswith("/dev/shm"):
        return "shared memory"
    return "libraries" if ".so" in path else "other"


def report(name: str, args: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> str:
    def mib(n: float) -> str:
        return f"{n / 2**20:.0f}"

    text = ""
    title = f"{name}: {MODELS[name].about}; fp32, {args.ranks} ranks and torchrun, MiB of one cgroup"
    head = ["mode", "phase", *KINDS, "in all", "peak"]
    table = [
        [mode, phase, *(mib(p[k]) for k in KINDS), mib(p["now"]), mib(p["peak"])]
        for mode, r in rows.items()
        for phase, p in r["phases"].items()
    ]
    common.print_table(title, head, table)
    text += common.table(title, head, table) + "\n"
    base = next((r for m, r in rows.items() if m.startswith("fsdp2")), None)
    head = [
        "mode",
        "live",
        "/ FSDP2",
        "peak of all steps",
        "/ FSDP2",
        "peak without cache",
        "/ FSDP2",
        "overhead",
    ]
    table = []
    for mode, r in rows.items():
        cells = [mode]
        for f in (lambda r: r["live"], top, firm):
            cells += [mib(f(r)), f"{f(r) / f(base):.2f}" if base else ""]
        table.append([*cells, mib(firm_end(r) - held(r["phases"]["libraries"]) - r["live"])])
    title = f"{name}: in short"
    common.print_table(title, head, table)
    return text + common.table(title, head, table)


def held(phase: dict[str, int]) -> int:
    """What cannot be given back."""
    return phase["now"] - phase["cache"]


def top(r: dict[str, Any]) -> int:
    return max(p["peak"] for p in r["phases"].values())


def firm(r: dict[str, Any]) -> int:
    return max(p["peak"] - p["cache"] for p in r["phases"].values())


def firm_end(r: dict[str, Any]) -> int:
    return r["phases"]["steady"]["peak"] - r["phases"]["steady"]["cache"]


if __name__ == "__main__":
    main()
