"""A model that does not fit: parameters, gradients and optimizer states rest in files, under a limit of memory.

    python benchmarks/large.py DIR --json benchmarks/results/large/HOST.json

Trains a GPT of 1.6 billion parameters (24.5 GiB of Adam's model states in fp32) for some steps under 6 GiB. The limit
holds from before the model is built: by a memory cgroup, page cache included, where one can be made, and by samples of
RssAnon + RssShmem + RssFile in any case. Each phase of a step stands beside its physical limit: the bytes that it must
move, checked against /proc/self/io, over what fio (or this project's io-bench, where there is no fio) reaches with the
same mix of reads and writes on the same disk, measured before and after the step, in the same run.

`--files` names what rests in files; `--files none --limit-gib 0` keeps everything in memory without a limit: for the
losses of a small model beside those under a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
import limits

PHASES = ("forward", "backward", "optimizer")
KINDS = ("params", "grads", "optimizer")
GIB = 1 << 30


def main() -> None:
    call = common.called()
    if call is not None:
        train(call)
        return
    args = options(__doc__).parse_args()
    planned_for(args)
    result = run(args)
    text = report(result)
    print(text)
    if args.json:
        common.save(args.json, result, text)


def options(about: str | None) -> argparse.ArgumentParser:
    parser = common.parser(about)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=64, help="in one sequence, the batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit-gib", type=float, default=6.0, help="0: none")
    parser.add_argument("--files", type=kinds, default=list(KINDS), help="of params,grads,optimizer; or none")
    parser.add_argument(
        "--host", type=kinds, default=[], help="the same, of what rests on an accelerator's host"
    )
    parser.add_argument("--compute", choices=("inductor", "aten"), default="inductor")
    parser.add_argument(
        "--overlap", action="store_true", help="update while backward runs: no gradient rests"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of the disk; 0: none")
    parser.add_argument(
        "--hardware",
        help="what `zero-compiler calibrate` wrote, for the plan; default: calibrate first; none: no machine is known",
    )
    parser.add_argument(
        "--allocator",
        choices=common.ALLOCATORS,
        default="default",
        help="keep: glibc keeps the pages of freed tensors; by default each large gradient gets fresh ones",
    )
    parser.add_argument("--threads", type=int, default=common.cores(), help="of torch; default: the cores")
    parser.add_argument("--json")
    return parser


def planned_for(args: argparse.Namespace) -> None:
    """The runs inherit what the plan is made for, which decides to which library matrix products go."""
    if args.compute == "inductor" and args.hardware != "none":
        common.hardware(args.hardware, 1, args.allocator, args.directory, args.threads)


def kinds(text: str) -> list[str]:
    given = [] if text == "none" else text.split(",")
    if not set(given) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"one or more of {', '.join(KINDS)}, or none")
    return given


def run(args: argparse.Namespace) -> dict[str, Any]:
    call = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(args).items()
        if k not in ("json", "seconds", "hardware")
    }
    result: dict[str, Any] = {
        "machine": common.machine(),
        "command": " ".join(["python", "benchmarks/large.py", "DIR", *map(os.path.basename, sys.argv[2:])]),
        "arguments": {k: v for k, v in call.items() if k not in ("directory", "deepspeed_python")},
        "steps": [],
    }
    limit = int(args.limit_gib * GIB)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    disk = Disk(args.directory, args.seconds) if args.seconds and args.files else None
    with limits.cgroup(limit or 1 << 50) as group:
        env = os.environ | {
            **common.ALLOCATORS[args.allocator],
            common.RANK_CALL: json.dumps(call),
            "OMP_NUM_THREADS": str(args.threads),
        }
        child = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            group.enter(child.pid)
            with limits.Watch(child.pid) as watch:
                for line in child.stdout:
                    if not line.startswith("{"):
                        continue
                    said = json.loads(line)
                    if "losses" in said:
                        result |= said
                        break
                    if "step" in said:
                        result["steps"].append(said)
                        print(
                            f"step {said['step']}: {sum(said['s'].values()):.1f} s, loss {said['loss']}",
                            flush=True,
                        )
                    elif "build_s" in said:
                        result["built"] = said
                        print(f"built in {said['build_s']:.1f} s", flush=True)
                    else:
                        result |= said
                    if disk is not None and "built" in result:
                        result.setdefault("disk", []).append(
                            disk.rates(shares(result["built"]["must_bytes"]))
                        )
                    child.stdin.write("\n")
                    child.stdin.flush()
            child.wait()
        finally:
            child.kill()
            child.wait()
            if disk is not None:
                disk.close()
        if "losses" not in result:
            raise SystemExit(
                f"the training process ended with {child.returncode} under {limit:,} bytes"
                + (": over the limit" if child.returncode == -9 else "")
            )
        result["memory"] = {
            "limit_bytes": limit,
            "cgroup": group.why or "yes",
            "cgroup_peak_bytes": group.peak_bytes(),
            "sampled_peak_bytes": watch.peak_bytes,
            "sampled_parts": watch.parts,
        }
    if disk is not None or (args.seconds and any(result["built"]["copied_bytes"].values())):
        result["limit_s"] = [
            {phase: _limit_s(result, k, phase) for phase in PHASES} for k in range(len(result["steps"]))
        ]
    if disk is not None:
        result["fio"] = disk.what
    return result


def _limit_s(result: dict[str, Any], k: int, phase: str) -> float:
    """Seconds that the bytes of a phase take at the disk's bandwidth around that step, or between an accelerator and
    its host at the calibrated one, whichever are more."""
    must = result["built"]["must_bytes"]["first" if k == 0 else "later"][phase]
    files = copies = 0.0
    if sum(must):
        files = sum(must) / statistics.mean(near[str(_share(*must))] for near in result["disk"][k : k + 2])
    if copied := result["built"]["copied_bytes"][phase]:
        spec = json.loads(Path(os.environ[common.HARDWARE]).read_text())
        copies = copied / spec["host_device"]["bytes_per_us"] / 1e6
    return max(files, copies)


def _share(read: int, write: int) -> int:
    """Reads in percent of all bytes."""
    return round(100 * read / (read + write))


def shares(must: dict[str, dict[str, list[int]]]) -> list[int]:
    return sorted({_share(*b) for step in must.values() for b in step.values() if sum(b)})


class Disk:
    """A file on the same disk, and what it gives at a mix of reads and writes, by fio or by io-bench."""

    NBYTES = 2 << 30

    def __init__(self, directory: Path, seconds: float) -> None:
        from zero_compiler.storage import aio
        from zero_compiler.tools import io_bench

        self.bench, self.seconds = io_bench, seconds
        self.path = directory / f"large-{os.getpid()}.bench"
        self.memory = aio.buffer(io_bench.memory_bytes(4 << 20, 32)).random_()
        try:
            self._fill(aio, io_bench, directory, seconds)
        except BaseException:
            self.close()
            raise

    def _fill(self, aio: Any, io_bench: Any, directory: Path, seconds: float) -> None:
        with aio.Engine() as io:
            file = io.open(self.path, self.NBYTES, create=True)
            for at in range(0, self.NBYTES, 64 << 20):
                io.write(file, self.memory[: 64 << 20], at).wait()
            io.flush(file)
            self.ours = io_bench.DiskReport(
                str(directory), self.NBYTES, seconds, io.backend, file.direct, io_bench.fio_version()
            )
        self.engine = io_bench.fio_engine(self.path, self.NBYTES, self.ours)
        self.what = self.ours.fio if self.engine else f"io-bench, since fio: {self.ours.fio}"

    def rates(self, read_percents: list[int]) -> dict[str, float]:
        """Bytes per second at each mix, at the better of two depths."""
        return {str(p): max(self._rate(p, depth) for depth in (16, 32)) for p in read_percents}

    def _rate(self, percent: int, depth: int) -> float:
        if self.engine:
            return self.bench.fio_rate(
                self.path, self.NBYTES, self.engine, percent, 4 << 20, depth, self.seconds / 2
            )
        mode = "read" if percent == 100 else "write" if percent == 0 else "both"
        return self.bench.our_rate(self.ours, self.path, self.memory, mode, 4 << 20, depth)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


# In the process under the limit ---------------------------------------------------------------------------------


def train(call: dict[str, Any]) -> None:
    import models
    import torch

    import zero_compiler as zero

    say({"libraries": limits.resident(os.getpid())})
    began = time.perf_counter()
    files = [
        k for k in call["files"] if not (k == "grads" and call["overlap"])
    ]  # those are used up as they land
    torch.manual_seed(0)
    where: dict[str, Any] = {"nvme_dir": call["directory"], "hardware": os.environ.get(common.HARDWARE)}
    device = torch.accelerator.current_accelerator(check_available=True)
    tiers = dict.fromkeys(call["host"], "host") | dict.fromkeys(files, "nvme")
    with zero.init(**where, **{f"offload_{kind}": tier for kind, tier in tiers.items()}):
        model = models.gpt(call["blocks"], call["width"], call["vocab"], call["tokens"])
    run_model = torch.compile(model, backend="zero", options={"compute": call["compute"]})
    optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-4, fused=True, overlap=call["overlap"])
    params = list(model.parameters())
    nbytes = sum(p._local_tensor.nbytes for p in params)
    once = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)] + [model.head.weight]
    read_once = sum(p._local_tensor.nbytes for p in once)
    say(
        {
            "build_s": time.perf_counter() - began,
            "parameters": sum(p.numel() for p in params),
            "model_states_bytes": 4 * nbytes,
            "must_bytes": must(nbytes, read_once, files, call["overlap"]),
            "copied_bytes": copied(
                nbytes, read_once, {*tiers} if device is not None else set(), call["overlap"]
            ),
        }
    )
    losses = []
    for step in range(call["steps"]):
        tokens, targets = (t.to(device or "cpu") for t in batch(step, call["tokens"], call["vocab"]))
        times, bytes_, at = {}, {}, limits.moved(os.getpid())
        loss = None
        for phase in PHASES:
            began = time.perf_counter()
            if phase == "forward":
                loss = run_model(tokens, targets)
            elif phase == "backward":
                loss.backward()
            else:
                optimizer.step()
                optimizer.zero_grad()
            if device is not None:
                torch.accelerator.synchronize()
            times[phase] = time.perf_counter() - began
            now = limits.moved(os.getpid())
            bytes_[phase], at = [now[0] - at[0], now[1] - at[1]], now
        losses.append(loss.item())
        say({"step": step, "loss": losses[-1], "s": times, "io_bytes": bytes_})
        del loss
    print(json.dumps({"losses": losses, "planned": planned(model)}), flush=True)


def planned(model: Any) -> dict[str, dict[str, float]]:
    """Of the Programs of forward and backward, and of the update: bytes that they read from files, and their predicted
    timelines. Updates that overlap backward are in its timeline."""
    import zero_compiler as zero
    from zero_compiler.cost.timeline import READ
    from zero_compiler.ir.instructions import Fetch

    told = zero.inspect(model)
    (frame,) = told.frames
    out = {}
    for phase, program in frame.programs.items():
        nbytes = sum(program.gathers[i.index].chunk_bytes for i in program.instrs if isinstance(i, Fetch))
        out[phase] = _predicted(frame.timelines[phase], nbytes)
    if told.update is not None and told.update.late:
        out["optimizer"] = _predicted(told.update.timeline, told.update.timeline.nbytes(READ))
    return out


def _predicted(time_: Any, read_bytes: int) -> dict[str, float]:
    from zero_compiler.cost.timeline import COMPUTE, READ, WRITE

    return {
        "read_bytes": read_bytes,
        "predicted_s": time_.total_us / 1e6,
        "compute_busy": time_.busy_us(COMPUTE) / time_.total_us,
        "files_busy": time_.busy_us(READ, WRITE) / time_.total_us,
    }


def batch(step: int, tokens: int, vocab: int) -> Any:
    import torch

    draw = torch.Generator().manual_seed(step)
    text = torch.randint(0, vocab, (1, tokens + 1), generator=draw)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def must(nbytes: int, read_once: int, files: list[str], overlap: bool) -> dict[str, dict[str, list[int]]]:
    """Bytes (read, written) that each phase of a step must move, where parameters take ``nbytes``.

    Forward reads every weight; backward reads it again, but for ``read_once`` bytes (tables of embeddings, whose
    gradient needs none, and the head, whose gradient is made with the loss), and writes its gradient; the update reads
    weight, gradient and two states, and writes all but the gradient. The first step finds no states yet. With
    ``overlap`` the update is part of the backward.
    """
    params, grads, two = (n * nbytes * (kind in files) for kind, n in zip(KINDS, (1, 1, 2)))
    out = {}
    for step in ("first", "later"):
        update = [params + grads + (two if step == "later" else 0), params + two]
        backward = [max(0, params - read_once), grads]
        if overlap:
            backward, update = [a + b for a, b in zip(backward, update)], [0, 0]
        out[step] = dict(zip(PHASES, ([params, 0], backward, update)))
    return out


def copied(nbytes: int, read_once: int, away: set[str], overlap: bool) -> dict[str, int]:
    """Bytes that each phase must copy between an accelerator and its host: weights that rest elsewhere come twice and
    their gradients go; states come and go where the weights stay."""
    params = nbytes * ("params" in away)
    backward = max(0, params - read_once) + params
    update = 4 * nbytes * ("optimizer" in away and not params)
    if overlap:
        backward, update = backward + update, 0
    return dict(zip(PHASES, (params, backward, update)))


def say(what: dict[str, Any]) -> None:
    """Tell the parent, and wait until it has measured the disk."""
    print(json.dumps(what), flush=True)
    if not sys.stdin.readline():
        sys.exit("the parent has ended")


# Report ---------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    built, memory, args = result["built"], result["memory"], result["arguments"]
    lines = [
        "# A model larger than memory",
        "",
        f"`{result['command']}`",
        "",
        common.machine_text(result["machine"]),
        "",
        f"GPT, {args['blocks']} blocks of width {args['width']}, vocabulary {args['vocab']}, {args['tokens']} tokens "
        f"a step: {built['parameters']:,} parameters, {built['model_states_bytes'] / GIB:.1f} GiB of model states in "
        f"fp32 (parameters, gradients, two states of AdamW); in files: {', '.join(args['files']) or 'nothing'}"
        + (f", on the host: {', '.join(args['host'])}" if args["host"] else "")
        + f". Built "
        f"in {built['build_s']:.1f} s.",
        "",
        f"Limit {memory['limit_bytes'] / GIB:.2f} GiB (0: none); memory cgroup: {memory['cgroup']}, peak with page "
        f"cache {_gib(memory['cgroup_peak_bytes'])}; sampled peak of RssAnon + RssShmem + RssFile "
        f"{_gib(memory['sampled_peak_bytes'])} ("
        + ", ".join(f"{k} {_gib(v)}" for k, v in memory["sampled_parts"].items())
        + ").",
        "",
        f"Losses: {', '.join(str(x) for x in result['losses'])}. By the plan: {_planned(result['planned'])}.",
        "",
    ]
    rows = []
    for k, step in enumerate(result["steps"]):
        limit = result["limit_s"][k] if "limit_s" in result else None
        must_ = built["must_bytes"]["first" if k == 0 else "later"]
        for phase in PHASES:
            rows.append(
                _row(
                    f"{k}, {phase}",
                    step["s"][phase],
                    must_[phase],
                    step["io_bytes"][phase],
                    limit and limit[phase],
                )
            )
        total = [[sum(x) for x in zip(*group.values())] for group in (must_, step["io_bytes"])]
        rows.append(_row(f"{k}, whole", sum(step["s"].values()), *total, limit and sum(limit.values())))
    head = ["step", "s", "must read, GiB", "must write", "read, GiB", "written", "limit, s", "s / limit"]
    lines.append(common.table("Time beside the physical limit", head, rows))
    if "disk" in result:
        lines.append(
            f"Bandwidth of the disk ({result['fio']}), GB/s, before each step and after the last, by reads in percent:"
        )
        lines += [
            "",
            *(f"- {', '.join(f'{p}: {r / 1e9:.2f}' for p, r in rates.items())}" for rates in result["disk"]),
            "",
        ]
    return "\n".join(lines)


def _row(name: str, s: float, must_: list[int], io: list[int], limit: float | None) -> list[str]:
    bytes_ = [f"{b / GIB:.2f}" for b in (*must_, *io)]
    return [name, f"{s:.2f}", *bytes_, *([f"{limit:.2f}", f"{s / limit:.2f}"] if limit else ["", ""])]


def _planned(phases: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{phase} reads {p['read_bytes'] / GIB:.2f} GiB from files and takes {p['predicted_s']:.2f} s, with the lane "
        f"of files busy for {p['files_busy']:.0%} of it and compute for {p['compute_busy']:.0%}"
        for phase, p in phases.items()
    )


def _gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / GIB:.2f} GiB"


if __name__ == "__main__":
    main()
