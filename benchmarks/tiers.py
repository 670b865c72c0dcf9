"""Step time by what rests in files, one model: each placement beside the physical limit of the bytes that it moves.

    python benchmarks/tiers.py DIR --json benchmarks/results/tiers/HOST.json

Runs `large.py` once for each placement, on one rank, with everything on the compute device first. Where that is the
CPU, this is the host's memory too; where there is an accelerator, its host is one more tier. The row "optimizer in
files" is the streaming of optimizer states alone, beside its own limit. "plan" is the predicted time of forward,
backward and update, "files busy" the share of each for which the plan's timeline sees the lane of files at work.
DeepSpeed's ZeRO-3 with its own offload to files stands beside where it can be imported and runs; where not, a line says
why. Medians over the steps after the first. Takes some ten minutes, most of them for compiling.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

import common
import large
import torch

ALL = ["params", "grads", "optimizer"]


@dataclass(frozen=True)
class Placement:
    """What rests in files and on an accelerator's host, and whether updates run while backward does."""

    name: str
    files: list[str] = field(default_factory=list)
    host: list[str] = field(default_factory=list)
    overlap: bool = False


CPU = [
    Placement("none"),
    Placement("optimizer in files", ["optimizer"]),
    Placement("optimizer in files, overlap", ["optimizer"], overlap=True),
    Placement("grads, optimizer in files", ["grads", "optimizer"]),
    Placement("all in files", ALL),
    Placement("params, optimizer in files, overlap", ["params", "optimizer"], overlap=True),
]
# Torch has a gradient where its parameter is.
ACCELERATOR = [
    Placement("none"),
    Placement("optimizer on the host", host=["optimizer"]),
    Placement("all on the host", host=ALL),
    Placement("optimizer in files", ["optimizer"]),
    Placement("all in files", ALL),
]
DEEPSPEED_SECONDS = 120


def main() -> None:
    call = common.called()
    if call is not None:
        deepspeed(call)
        return
    parser = large.options(__doc__)
    parser.set_defaults(blocks=12, width=1024, steps=5, limit_gib=0.0, seconds=0.6)
    parser.add_argument(
        "--deepspeed-python", default=sys.executable, help="a Python that can import deepspeed"
    )
    apart = torch.accelerator.is_available()
    placements = {p.name: p for p in (ACCELERATOR if apart else CPU)}
    parser.add_argument(
        "--only", action="append", choices=placements, help="one of the placements; can be given again"
    )
    args = parser.parse_args()
    large.planned_for(args)
    result: dict[str, Any] = {
        "machine": common.machine(),
        "command": " ".join(["python", "benchmarks/tiers.py", "DIR", *map(os.path.basename, sys.argv[2:])]),
        "runs": {},
    }
    losses, rows = None, []
    for name in args.only or placements:
        placement = placements[name]
        args.files, args.host, args.overlap = placement.files, placement.host, placement.overlap
        print(f"{name}:", flush=True)
        one = result["runs"][name] = large.run(args)
        losses = losses or one["losses"]
        if one["losses"] != losses and not apart:
            raise SystemExit(f"{name}: losses {one['losses']} differ from {losses}, of everything in memory")
        rows.append(_row(name, one))
        print(" | ".join(rows[-1]), flush=True)
    result["deepspeed"] = {tier: _deepspeed(args, tier) for tier in ("none", "nvme")}
    for tier, one in result["deepspeed"].items():
        what = "DeepSpeed ZeRO-3, " + ("none" if tier == "none" else "params, optimizer in files")
        rows.append([what, *([f"{_median(one['s']):.2f}"] if "s" in one else ["-"]), *[""] * 9])
    built = next(iter(result["runs"].values()))["built"]
    head = [
        "placement",
        "step, s",
        "forward",
        "backward",
        "optimizer",
        "limit, s",
        "s / limit",
        "optimizer / its limit",
        "plan, s",
        "files busy, plan",
        "resident, GiB",
    ]
    text = "\n".join(
        [
            "# Tiers",
            "",
            f"`{result['command']}`",
            "",
            common.machine_text(result["machine"]),
            "",
            f"GPT, {args.blocks} blocks of width {args.width}, {built['parameters']:,} parameters, {args.tokens} "
            "tokens a step, AdamW in fp32, one rank."
            + ("" if apart else " The losses of all of ours are equal in every bit."),
            "",
            common.table("Seconds a step, median", head, rows),
            *(
                f"DeepSpeed, {tier}: {one['why']}"
                for tier, one in result["deepspeed"].items()
                if "why" in one
            ),
        ]
    )
    print(text)
    if args.json:
        common.save(args.json, result, text)


def _median(values: list[float]) -> float:
    return statistics.median(values[1:] or values)


def _row(name: str, one: dict[str, Any]) -> list[str]:
    times = [step["s"] for step in one["steps"]]
    by_phase = [f"{_median([t[p] for t in times]):.2f}" for p in large.PHASES]
    whole = [sum(t.values()) for t in times]
    beside = ["", "", ""]
    if limits := one.get("limit_s", []):
        whole_limits, update_limits = [sum(x.values()) for x in limits], [x["optimizer"] for x in limits]
        beside[:2] = [
            f"{_median(whole_limits):.2f}",
            f"{_median([a / b for a, b in zip(whole, whole_limits)]):.2f}",
        ]
        if all(update_limits):
            beside[2] = f"{_median([t['optimizer'] / x for t, x in zip(times, update_limits)]):.2f}"
    plan = f"{sum(p['predicted_s'] for p in one['planned'].values()):.2f}"
    busy = ", ".join(f"{p['files_busy']:.0%}" for p in one["planned"].values() if p["files_busy"])
    peak = one["memory"]["sampled_peak_bytes"] / large.GIB
    return [name, f"{_median(whole):.2f}", *by_phase, *beside, plan, busy, f"{peak:.2f}"]


def _deepspeed(args: Any, tier: str) -> dict[str, Any]:
    """Times of DeepSpeed's steps, in a process of its own; or why there are none."""
    keys = ("blocks", "width", "vocab", "tokens", "steps")
    env = os.environ | {
        **common.ALLOCATORS[args.allocator],
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(common.cores()),
    }
    command = [args.deepspeed_python, os.path.abspath(__file__)]
    with tempfile.TemporaryDirectory(
        prefix="deepspeed-", dir=args.directory
    ) as folder:  # it leaves its files behind
        call = {k: getattr(args, k) for k in keys} | {"directory": folder, "tier": tier}
        env[common.RANK_CALL] = json.dumps(call)
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, check=False, timeout=DEEPSPEED_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"why": f"not done after {DEEPSPEED_SECONDS} s"}
    for line in done.stdout.splitlines():
        if line.startswith('{"s"') or line.startswith('{"why"'):
            return json.loads(line)
    return {"why": f"ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"}


def deepspeed(call: dict[str, Any]) -> None:
    try:
        print(json.dumps({"s": _deepspeed_steps(call)}), flush=True)
    except Exception as error:
        print(
            json.dumps({"why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}),
            flush=True,
        )
    os._exit(0)  # its threads outlive it


def _deepspeed_steps(call: dict[str, Any]) -> list[float]:
    import time

    import models
    import torch.distributed as dist

    try:
        import deepspeed as ds
    except ImportError:
        raise RuntimeError("the package deepspeed is not installed") from None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
    }
    ds.init_distributed("gloo", verbose=False)
    zero: dict[str, Any] = {
        "stage": 3,
        "reduce_bucket_size": int(1e7),
        "stage3_prefetch_bucket_size": int(1e7),
    }
    if call["tier"] == "nvme":
        there = {"device": "nvme", "nvme_path": call["directory"], "pin_memory": False}
        numel = 4 * call["width"] ** 2
        zero |= {
            "offload_optimizer": there | {"buffer_count": 5},
            "offload_param": there
            | {"buffer_count": 12, "buffer_size": max(numel, call["vocab"] * call["width"])},
        }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 16},
    }
    torch.manual_seed(0)
    model = models.gpt(call["blocks"], call["width"], call["vocab"], call["tokens"])
    if call["tier"] == "nvme":
        optimizer = ds.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
    out = []
    for step in range(call["steps"]):
        tokens, targets = large.batch(step, call["tokens"], call["vocab"])
        began = time.perf_counter()
        engine.backward(engine(tokens, targets))
        engine.step()
        out.append(time.perf_counter() - began)
    return out


if __name__ == "__main__":
    main()
