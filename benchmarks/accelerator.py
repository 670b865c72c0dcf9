"""One device, one process: step time beside plain `torch.compile`, and the largest model that trains within a budget.

    python benchmarks/accelerator.py DIR --device-gib 16 --host-gib 96 --json accelerator.json

Made for one accelerator, where the run for the results should take place; without one the CPU is the device, and its
host none. No process group and no torchrun.

- **Step time.** Models of `bench.py`, each with plain PyTorch compiled by Inductor and with stage 3, in turn step by
  step in one process: median, ratio, tokens/s, and the device's peak beside the plan.
- **The largest model** whose plan fits `--device-gib` of the device and `--host-gib` of its host: GPTs of `--width`
  with ever more blocks, bf16 compute and gradients over fp32 shards, AdamW. Shards, gradients and states rest on the
  device; on the host; or on both and, what has no room there, in files in DIR (`device_rest_bytes`, `host_rest_bytes`).
  That model trains for three steps in a process of its own: seconds a step, tokens/s, the device's peak and the plan's.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import modes
import torch
from models import MODELS, gpt

GIB = 1 << 30
WAYS = ("on the device", "on the host", "on the host and in files")


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, train(call))
    parser = common.parser(__doc__)
    parser.add_argument("directory", help="a folder on the disk that files go to")
    parser.add_argument("--model", type=lambda s: s.split(","), default=["gpt-6x512", "gpt-12x1024", "moe"])
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="bf16", help="of compute, for step times"
    )
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument(
        "--device-gib", type=float, default=16.0, help="for the largest model; 0: not looked for"
    )
    parser.add_argument("--host-gib", type=float, default=96.0)
    parser.add_argument("--width", type=int, default=4096, help="of the largest model")
    parser.add_argument("--most-blocks", type=int, default=1 << 10, help="no more are tried")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=2048, help="in one sequence, the batch")
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    common.hardware(args.hardware, 1, directory=args.directory)
    m = common.machine() | {"device": device_text()}
    result: dict[str, Any] = {"machine": m, "times": [], "largest": []}

    def save() -> str:
        """What there is so far: a later row that fails takes no earlier one with it."""
        text = common.heading("One device", m) + f"Device: {m['device']}.\n\n"
        rows = [time_row(r) for r in result["times"]]
        text += common.table(f"Step time, {args.dtype}", TIMES, rows) + "\n"
        if result["largest"]:
            title = f"The largest model within {args.device_gib:g} GiB, and {args.host_gib:g} GiB of the host"
            text += common.table(title, LARGEST, [largest_row(r) for r in result["largest"]])
        if args.json:
            common.save(args.json, result, text)
        return text

    for name in args.model:
        result["times"].append(times_of(name, args))
        save()
    for way in WAYS if args.device_gib else ():
        result["largest"].append(largest(way, args))
        save()
    print(save())


def device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def device_text() -> str:
    at = device()
    if at.type == "cpu":
        return "the CPU"
    known = torch.get_device_module(at).get_device_properties(at)
    return f"{known.name}, {known.total_memory / GIB:.0f} GiB"


def meter() -> None:
    """Count the live bytes of this device from here on: on an accelerator torch always does."""
    if device().type == "cpu":
        from zero_compiler.runtime import _C

        _C.meter_install()


class Peak:
    """Most live bytes on the device since it was made, of those that were allocated behind :func:`meter`."""

    def __init__(self) -> None:
        gc.collect()
        if device().type == "cpu":
            from zero_compiler.runtime import _C

            _C.meter_reset_peak()
        else:
            torch.accelerator.reset_peak_memory_stats()

    def bytes(self) -> int:
        if device().type == "cpu":
            from zero_compiler.runtime import _C

            return int(_C.meter_peak())
        return int(torch.accelerator.max_memory_allocated())


def wait() -> None:
    if device().type != "cpu":
        torch.accelerator.synchronize()


def one_step(call: Any, optimizer: Any, batch: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Seconds of a step of training, and its loss."""
    wait()
    began = time.perf_counter()
    loss = call(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    wait()
    return time.perf_counter() - began, loss.item()


# Step time --------------------------------------------------------------------------------------------------------

TIMES = ["model", "plain, ms", "stage 3, ms", "ratio", "tokens/s", "peak, GiB", "planned"]


def times_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    import zero_compiler as zero

    meter()
    spec, at = MODELS[name], device()
    low = torch.bfloat16 if args.dtype == "bf16" else None

    def plain() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = spec.build().to(at)
        inner = torch.compile(model)

        def call(*batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast(at.type, dtype=low, enabled=low is not None):
                return inner(*batch)

        return call, torch.optim.AdamW(model.parameters(), lr=modes.LR, fused=True)

    def ours() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = zero.shard(spec.build().to(at), hardware=os.environ[common.HARDWARE], param_dtype=low)
        held.append(model)
        return torch.compile(model, backend="zero"), torch.optim.AdamW(
            model.parameters(), lr=modes.LR, fused=True
        )

    held: list[Any] = []
    made = [plain(), ours()]
    times: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for step in range(args.warmup + args.steps):
        batch = [t.to(at) for t in spec.data(step, 0)]
        for k in (0, 1) if step % 2 else (1, 0):
            seconds, loss = one_step(*made[k], batch)
            if step >= args.warmup:
                times[k].append(seconds * 1e3)
            losses[k].append(loss)
    tolerance = 1e-4 if low is None else 2e-2
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    if apart > tolerance:
        raise SystemExit(f"{name}: losses are {apart:.1e} apart, which is more than {tolerance:g}")
    made.clear()
    gc.collect()
    torch._dynamo.reset()
    held.clear()
    call, optimizer = ours()
    peak = Peak()
    for step in range(3):
        one_step(call, optimizer, [t.to(at) for t in spec.data(step, 0)])
    return {
        "model": name,
        "plain_ms": times[0],
        "zero_ms": times[1],
        "ratio": common.spread([b / a for a, b in zip(*times, strict=True)]),
        "tokens": batch[0].numel(),
        "losses_apart": apart,
        "peak_bytes": peak.bytes(),
        "planned_bytes": zero.inspect(held[0]).memory.peak,
    }


def time_row(r: dict[str, Any]) -> list[str]:
    mine = common.spread(r["zero_ms"])
    return [
        r["model"],
        common.show(common.spread(r["plain_ms"])),
        common.show(mine),
        common.show(r["ratio"], 2),
        f"{1e3 * r['tokens'] / mine['median']:,.0f}",
        f"{r['peak_bytes'] / GIB:.2f}",
        f"{r['planned_bytes'] / GIB:.2f}",
    ]


# The largest model ------------------------------------------------------------------------------------------------

LARGEST = [
    "rests",
    "blocks",
    "parameters",
    "s a step",
    "tokens/s",
    "peak, GiB",
    "planned",
    "host, planned",
    "files",
]


def fields_of(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """What `zero.shard` is given for it."""
    budget = int(args.device_gib * GIB)
    fields: dict[str, Any] = {
        "memory_budget_bytes": budget,
        "param_dtype": "bf16",
        "reduce_dtype": "bf16",
        "hardware": os.environ[common.HARDWARE],
    }
    if way == WAYS[1]:
        fields |= dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "host")
    elif way == WAYS[2]:
        fields |= {"device_rest_bytes": budget // 4, "nvme_dir": args.directory}
        if device().type != "cpu":
            fields["host_rest_bytes"] = int(args.host_gib * GIB * 0.75)  # the rest is for buffers
    return fields


def built(blocks: int, args: argparse.Namespace) -> Any:
    return gpt(blocks, args.width, args.vocab, args.tokens)


def largest(way: str, args: argparse.Namespace) -> dict[str, Any]:
    from zero_compiler.errors import ZeroError
    from zero_compiler.planning import report

    if way == WAYS[1] and device().type == "cpu":
        return {"way": way, "why": "the CPU's host is itself"}

    def fits(blocks: int) -> bool:
        with torch.device("meta"):
            model = built(blocks, args)
            batch = tuple(torch.empty(1, args.tokens, dtype=torch.long) for _ in range(2))
        try:
            memory = report(model, batch, 1, device().type, **fields_of(way, args)).memory
        except ZeroError:
            return False
        room = shutil.disk_usage(args.directory).free
        return memory.apart <= args.host_gib * GIB and memory.files <= 0.9 * room

    blocks = bisect(fits, args.most_blocks)
    print(f"{way}: {blocks} blocks", flush=True)
    if not blocks:
        return {"way": way, "why": "one block does not fit"}
    call = {k: v for k, v in vars(args).items() if k not in ("json", "model")} | {
        "way": way,
        "blocks": blocks,
    }
    try:
        (answer,) = common.run_ranks(os.path.abspath(__file__), call, 1, threads=os.cpu_count() or 1)
    except RuntimeError as error:  # its reason stands above; what else was measured is kept
        return {"way": way, "why": f"{blocks} blocks by the plan; {error}"}
    return {"way": way, "blocks": blocks} | answer


def bisect(fits: Callable[[int], bool], most: int) -> int:
    """The most blocks that fit, or one part in 16 fewer; 0 where one does not."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def train(call: dict[str, Any]) -> dict[str, Any]:
    import zero_compiler as zero

    meter()
    args, at = argparse.Namespace(**call), device()
    torch.manual_seed(0)
    fields = fields_of(call["way"], args)
    with zero.init(**fields):
        model = built(call["blocks"], args)
    step_of = torch.compile(model, backend="zero")
    optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-4, fused=True)
    peak, times, losses = Peak(), [], []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        text = torch.randint(0, args.vocab, (1, args.tokens + 1), generator=draw)
        seconds, loss = one_step(step_of, optimizer, [text[:, :-1].to(at), text[:, 1:].to(at)])
        times.append(seconds)
        losses.append(loss)
    memory = zero.inspect(model).memory
    return {
        "s": times,
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": args.tokens,
        "peak_bytes": peak.bytes(),
        "planned": {name: getattr(memory, name) for name in ("peak", "apart", "files")},
    }


def largest_row(r: dict[str, Any]) -> list[str]:
    if "why" in r:
        return [r["way"], r["why"], *[""] * (len(LARGEST) - 2)]
    s, planned = min(r["s"][1:]), r["planned"]
    return [
        r["way"],
        str(r["blocks"]),
        f"{r['parameters'] / 1e9:.2f} G",
        f"{s:.2f}",
        f"{r['tokens'] / s:,.0f}",
        f"{r['peak_bytes'] / GIB:.2f}",
        *(f"{planned[name] / GIB:.2f}" for name in ("peak", "apart", "files")),
    ]


if __name__ == "__main__":
    main()
