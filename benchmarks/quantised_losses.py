"""Losses of a run with weights that travel in 8 bits, beside those of the same run in full precision.

    python benchmarks/quantised_losses.py --steps 500 --json out.json
    python benchmarks/quantised_losses.py --steps 500 --what sums --ranks 4

A small GPT learns the source of Python's standard library, byte by byte, on ranks over c10d with AdamW. Every matrix
travels in 8 bits (the machine that is planned for has a slow link). The same model and batches serve all rows but the
one called "other batches", which is full precision again: as far off as it is, any run may be.

``--what sums``: sums of gradients travel so between two hosts, which are two halves of the ranks, told apart by what a
rank says of its host; within each they share memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch
from models import gpt

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from text import Text, standard_library

from zero_compiler.ranks import transport

CONTEXT, ROWS = 64, 8
ROWS_OF_TABLE: dict[str, tuple[dict[str, Any], int]] = {
    "full precision": ({}, 0),
    "other batches": ({}, 1),
    "int8": ({"gather_dtype": "int8"}, 0),
    "float8_e4m3fn": ({"gather_dtype": "float8_e4m3fn"}, 0),
    "bf16": ({"param_dtype": "bf16", "reduce_dtype": "fp32"}, 0),
    "bf16, int8": ({"param_dtype": "bf16", "reduce_dtype": "fp32", "gather_dtype": "int8"}, 0),
}

SUMS: dict[str, tuple[dict[str, Any], int]] = {
    "full precision": ({}, 0),
    "other batches": ({}, 1),
    "int8": ({"reduce_between_hosts_dtype": "int8"}, 0),
    "bf16": ({"param_dtype": "bf16"}, 0),
    "bf16, int8": ({"param_dtype": "bf16", "reduce_between_hosts_dtype": "int8"}, 0),
}
KINDS = {
    "weights": (
        ROWS_OF_TABLE,
        "weights travel in",
        "bytes gathered a step",
        "Losses with weights that travel in 8 bits",
    ),
    "sums": (
        SUMS,
        "sums travel between hosts in",
        "bytes from a rank to other hosts a step",
        "Losses with gradients that travel in 8 bits between hosts",
    ),
}


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--what", choices=list(KINDS), default="weights", help="what travels in 8 bits")
    parser.add_argument("--json", help="write results here, and Markdown beside it")
    args = parser.parse_args()
    machine = common.machine()
    print(common.machine_text(machine), flush=True)
    call = {name: getattr(args, name) for name in ("steps", "width", "layers", "what")}
    found = common.run_ranks(os.path.abspath(__file__), call, args.ranks)[0]
    head = [
        *KINDS[args.what][1:3],
        *(f"loss at {at}" for at in points(args.steps)),
        "off by",
    ]
    exact = found["full precision"]["losses"]
    rows = [
        [
            name,
            f"{r['sent']:,.0f}",
            *(f"{smooth(r['losses'], at):.4f}" for at in points(args.steps)),
            off_by(r, exact),
        ]
        for name, r in found.items()
    ]
    title = (
        f"GPT, {args.layers} layers, width {args.width}, context {CONTEXT}, {ROWS} rows a rank, {args.ranks} ranks; "
        f"losses are means of {WINDOW} steps, in nats a byte"
    )
    common.print_table(title, head, rows)
    if args.json:
        text = common.heading(KINDS[args.what][3], machine)
        common.save(args.json, {"machine": machine, "runs": found}, text + common.table(title, head, rows))


WINDOW = 50


def points(steps: int) -> list[int]:
    """The steps at which losses are shown."""
    return [steps * k // 5 for k in range(1, 6)]


def smooth(losses: list[float], at: int) -> float:
    """The mean of the steps up to ``at``."""
    window = losses[max(0, at - WINDOW) : at]
    return sum(window) / len(window)


def off_by(run: dict[str, Any], exact: list[float]) -> str:
    """At the end, from full precision."""
    steps = len(exact)
    return f"{smooth(run['losses'], steps) / smooth(exact, steps) - 1:+.2%}"


def measure(call: dict[str, Any]) -> dict[str, Any]:
    """In a rank: losses of every run, averaged over the ranks, and what was gathered in a step."""
    rank, _ = common.init_group()
    text, _ = standard_library()
    if call["what"] == "sums":
        world = torch.distributed.get_world_size()
        transport._host = lambda: f"host {rank * 2 // world}"
    return {name: trained(call, text, rank, *what) for name, what in KINDS[call["what"]][0].items()}


def trained(call: dict[str, Any], text: Text, rank: int, fields: dict[str, Any], seed: int) -> dict[str, Any]:
    import zero_compiler as zero

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = gpt(call["layers"], call["width"], 256, CONTEXT)
    way = "shared" if call["what"] == "sums" else "c10d"
    model = zero.shard(model, device="cpu", transport=way, compute="aten", hardware=slow_link(), **fields)
    step = torch.compile(model, backend="zero")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for k in range(call["steps"]):
        loss = step(*batch(text, rank, seed, k))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    if call["what"] == "sums":
        sent = between_hosts(zero.inspect(model))
    else:
        engine = model._zero.sharded_model.runtime.engine
        sent = engine.counters()["bytes_gathered"] / call["steps"]
    every = common.gather_objects(losses)
    return {"losses": [sum(row) / len(row) for row in zip(*every, strict=True)], "sent": sent}


def between_hosts(report: Any) -> float:
    """Bytes of the sums that a rank sends to the other of two hosts in a step."""
    (frame,) = report.frames
    scattered = [r for r in frame.programs["backward"].reduces if not r.replicated]
    return float(sum(r.packed_bytes if r.wire else r.summed_bytes for r in scattered))


def batch(text: Text, rank: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000_000 * seed + 100 * step + rank)
    return text.windows(text.random_starts(ROWS, CONTEXT, generator), CONTEXT)


def slow_link() -> str:
    """A machine over whose link every matrix is worth its way in 8 bits, hidden or not."""
    from zero_compiler.cost import hardware

    spec = hardware.load("laptop")
    rows = tuple(
        dataclasses.replace(c, link=dataclasses.replace(c.link, latency_us=0.0, bytes_per_us=0.1))
        for c in spec.collectives
    )
    spec = dataclasses.replace(spec, collectives=rows, shared=(("compute", "device-device"),))
    path = Path(tempfile.gettempdir(), f"slow-link-{os.getpid()}.json")
    path.write_text(json.dumps(spec.to_dict()))
    return str(path)


if __name__ == "__main__":
    main()
