"""The longest sequence that a model trains with on one device, activations on its host, beside FSDP2.

    python benchmarks/longest_sequence.py --hardware FILE --json FILE

A GPT in bf16, batch 1, by default of 1.5 B parameters. FSDP2 has every block compiled and checkpointed, with what a
checkpoint keeps on the host (`offload_wrapper`); lengths are doubled until one does not fit. Ours has
`offload_activations="host"` under a budget of the device's bytes; its length is doubled as long as a plan fits the
device and the host, and the longest is then trained. Each length is a process of its own.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import common
import torch
from models import gpt
from one_device import GIB, Peak, adamw, device, fsdp2, meter, one_step

HEAD = ["way", "tokens in a sequence", "s a step", "tokens/s", "peak on the device, GiB", "planned"]
FSDP2 = "FSDP2, blocks checkpointed, kept on the host"
OURS = "stage 3, activations on the host"


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, train(call))
    parser = common.parser(__doc__)
    for name, default in (
        ("layers", 24),
        ("width", 2304),
        ("vocab", 50304),
        ("first", 16384),
        ("most", 1 << 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    common.hardware(args.hardware, 1)
    m = common.machine()
    result: dict[str, Any] = {"machine": m, "rows": []}

    def add(row: dict[str, Any]) -> None:
        result["rows"] = [r for r in result["rows"] if r["way"] != row["way"]] + [row]
        print(f"  {row}", flush=True)
        if args.json:
            common.save(args.json, result, text_of(result, args))

    length = args.first
    while length <= args.most and "why" not in (row := trained(OURS, length, args)):
        add(row)
        length *= 2
    length = args.first
    while length <= args.most and "why" not in (row := trained(FSDP2, length, args)):
        add(row)
        length *= 2
    print(text_of(result, args))


def trained(way: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    if way == OURS and (why := refused(length, args)):
        return {"way": way, "length": length, "why": why}
    call = {k: v for k, v in vars(args).items() if k != "json"} | {"way": way, "length": length}
    try:
        (answer,) = common.run_ranks(os.path.abspath(__file__), call, 1, threads=common.cores())
    except RuntimeError as error:
        return {"way": way, "length": length, "why": str(error)}
    return {"way": way, "length": length} | answer


def fields(args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {"hardware": os.environ[common.HARDWARE], "param_dtype": "bf16"}
    at = device()
    if at.type != "cpu":
        whole = torch.get_device_module(at).get_device_properties(at).total_memory
        given |= {"offload_activations": "host", "memory_budget_bytes": int(0.9 * whole)}
    return given


def refused(length: int, args: argparse.Namespace) -> str:
    """Why no plan is found for a length; empty where one is."""
    from zero_compiler.errors import ZeroError
    from zero_compiler.tools.planning import report

    with torch.device("meta"):
        model = gpt(args.layers, args.width, args.vocab, length)
        batch = tuple(torch.empty(1, length, dtype=torch.long) for _ in range(2))
    try:
        memory = report(model, batch, 1, device().type, **fields(args)).memory
    except ZeroError as error:
        return str(error)
    return "the host has too little memory" if memory.apart > 0.9 * common.available_bytes() else ""


def train(call: dict[str, Any]) -> dict[str, Any]:
    import zero_compiler as zero

    meter()
    args, at = argparse.Namespace(**call), device()
    torch.manual_seed(0)
    model: Any = gpt(args.layers, args.width, args.vocab, args.length).to(at)
    if args.way == FSDP2:
        if at.type != "cpu":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

            model.blocks = torch.nn.ModuleList(map(offload_wrapper, model.blocks))
        step_of, optimizer = fsdp2(model, torch.bfloat16, checkpointed=True)
    else:
        model = zero.shard(model, **fields(args))
        step_of, optimizer = torch.compile(model, backend="zero"), adamw(model)
    peak, times = Peak(), []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        text = torch.randint(0, args.vocab, (1, args.length + 1), generator=draw)
        times.append(one_step(step_of, optimizer, [text[:, :-1].to(at), text[:, 1:].to(at)])[0])
    row = {"s": min(times[1:]), "peak": peak.bytes()}
    return row if args.way == FSDP2 else row | {"planned": zero.inspect(model).memory.peak}


def text_of(result: dict[str, Any], args: argparse.Namespace) -> str:
    title = f"GPT, {args.layers} layers, width {args.width}, vocabulary {args.vocab}, batch 1, bf16"
    rows = [
        [
            r["way"],
            f"{r['length']:,}",
            f"{r['s']:.2f}",
            f"{r['length'] / r['s']:,.0f}",
            f"{r['peak'] / GIB:.2f}",
            f"{r['planned'] / GIB:.2f}" if "planned" in r else "",
        ]
        for r in result["rows"]
    ]
    return common.heading("The longest sequence", result["machine"]) + common.table(title, HEAD, rows)


if __name__ == "__main__":
    main()
