"""One device and its host: the largest model that trains within a budget.

    python benchmarks/largest_model.py DIR --device-gib 4 --host-gib 24 --json FILE

GPTs of `--width` with ever more blocks, bf16 compute and gradients over fp32 shards, AdamW. The largest is the one
whose plan fits `--device-gib` of the device and `--host-gib` of its host. Shards, gradients and states rest on the
device; on the host; or on both and, what has no room there, in files in DIR (`device_rest_bytes`, `host_rest_bytes`).
That model trains for three steps in a process of its own: seconds a step, tokens/s, the device's peak and the plan's.
The model for the host alone is trained by FSDP2 too (`CPUOffloadPolicy`, every block compiled and checkpointed).
Without an accelerator the CPU is the device, and its host none.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from typing import Any

import common
import modes
import torch
from models import gpt
from one_device import GIB, Peak, Results, called, device, fsdp2, meter, one_step

BYTES_AT_REST = 14  # of a parameter: weight and two states in float32, gradient in bf16
WAYS = ("on the device", "on the host", "on the host and in files", "on the device and the host")
FSDP2 = "on the host, FSDP2"
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


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, train(call))
    parser = common.parser(__doc__)
    parser.add_argument("directory", help="a folder on the disk that files go to")
    parser.add_argument("--device-gib", type=float, default=16.0)
    parser.add_argument("--host-gib", type=float, default=96.0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument(
        "--ways",
        type=lambda s: [WAYS[int(k)] for k in s.split(",")],
        default=list(WAYS),
        help="of resting: 0 on the device, 1 on the host, 2 on the host and in files, 3 on the device and the host",
    )
    parser.add_argument("--most-blocks", type=int, default=1 << 10, help="no more are tried")
    parser.add_argument(
        "--blocks",
        type=lambda s: dict(zip(WAYS, map(int, s.split(",")), strict=False)),
        default={},
        help="that a run before found, in the order of the ways: they are not looked for",
    )
    parser.add_argument("--only-look", action="store_true", help="for those blocks, and train nothing")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=2048, help="in one sequence, the batch")
    args = called(parser)
    if args.only_look:
        return print("--blocks", ",".join(str(look(way, args)) for way in WAYS))
    results = Results("One device", "largest", args.json, lambda rows: text_of(rows, args))
    for way in args.ways:
        row = results.add(largest(way, look(way, args), args))
        if way == WAYS[1] and (blocks := row.get("blocks")):
            results.add(largest(FSDP2, blocks, args))
    print(results.text())


def text_of(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    title = f"The largest model within {args.device_gib:g} GiB, and {args.host_gib:g} GiB of the host"
    host, both = (gib * GIB / BYTES_AT_REST / 1e9 for gib in (args.host_gib, args.host_gib + args.device_gib))
    return common.table(title, LARGEST, [largest_row(r) for r in rows]) + (
        f"\nBy arithmetic the host's memory holds {host:.2f} G parameters, and with the device's {both:.2f} G, "
        f"of {BYTES_AT_REST} bytes each: weight and two states in float32, the gradient in bf16.\n"
    )


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
    elif way == WAYS[3]:
        fields |= {"device_rest_bytes": budget * 3 // 4}
    if way in WAYS[2:]:
        if device().type != "cpu":
            fields["host_rest_bytes"] = int(args.host_gib * GIB * 0.75)  # the rest is for buffers
    return fields


def built(blocks: int, args: argparse.Namespace) -> Any:
    return gpt(blocks, args.width, args.vocab, args.tokens)


def look(way: str, args: argparse.Namespace) -> int:
    """The most blocks that a plan is found for; 0: none."""
    from zero_compiler.errors import ZeroError
    from zero_compiler.tools.planning import report

    if way in args.blocks or (way in (WAYS[1], WAYS[3]) and device().type == "cpu"):
        return args.blocks.get(way, 0)

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
    return blocks


def largest(way: str, blocks: int, args: argparse.Namespace) -> dict[str, Any]:
    if not blocks:
        return {"way": way, "why": "one block does not fit, or the CPU's host is itself"}
    call = {k: v for k, v in vars(args).items() if k not in ("json", "ways")} | {
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
    if call["way"] == FSDP2:
        step_of, optimizer = fsdp2(
            built(call["blocks"], args), torch.bfloat16, checkpointed=True, offloaded=True
        )
        model = step_of
    else:
        with zero.init(**fields_of(call["way"], args)):
            model = built(call["blocks"], args)
        step_of = torch.compile(model, backend="zero")
        optimizer = zero.optimizer(torch.optim.AdamW, model, lr=modes.LR, fused=True)
    peak, times, losses = Peak(), [], []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        text = torch.randint(0, args.vocab, (1, args.tokens + 1), generator=draw)
        seconds, loss = one_step(step_of, optimizer, [text[:, :-1].to(at), text[:, 1:].to(at)])
        times.append(seconds)
        losses.append(loss)
    memory = None if call["way"] == FSDP2 else zero.inspect(model).memory
    return {
        "s": times,
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": args.tokens,
        "peak_bytes": peak.bytes(),
        "planned": {name: getattr(memory, name) for name in ("peak", "apart", "files")} if memory else {},
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
        *(f"{planned[name] / GIB:.2f}" if planned else "" for name in ("peak", "apart", "files")),
    ]


if __name__ == "__main__":
    main()
