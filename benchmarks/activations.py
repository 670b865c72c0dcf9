"""Time of a step at equal peak memory: activations within a budget, beside torch's own and checkpointing every block.

    python benchmarks/activations.py --model gpt,llama,moe --json out.json

One process and one thread, fp32, forward and backward, compiled by Inductor; products by torch's BLAS in every row.
Every mode runs in a fresh process with an allocator that keeps freed pages.
Peers:
  torch            torch.compile
  torch 0.5        the same with torch's activation_memory_budget at 0.5 (its default solver and estimator)
  blocks           the same with torch.utils.checkpoint around every block
For each peer the memory that it takes is measured: the largest number of live bytes of torch's CPU allocator in steps
after warm-up, above those of the parameters (so gradients and buffers count). Then zero_compiler runs with the budget
that brings its own memory to that of the peer or below, and never above; both times stand beside each other. Where
its memory without a budget is below the peer's already, that run stands there. Logits are tiled by zero_compiler in
every row; its first row, without a budget, shows what that alone saves.

Times are medians of the steps with the 10th and 90th percentile; the ratio is that of every step of ours to every step
of the peer, since the two ran one after the other and no step of one belongs to one of the other. Predicted are the
plan's peak, less the parameters and the states of an optimizer that is not there, and its time.

The search for a budget takes a few runs, and memory does not depend on what else the machine does: `--budgets out.json`
takes those that a run before found, and measures once each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import common
from models import Spec, gpt, llama, moe

MODELS = {
    "gpt": Spec(
        "GPT, 6 layers, width 384, vocabulary 512, sequence 256, batch 8",
        lambda: gpt(6, 384, 512, 256),
        512,
        256,
        8,
    ),
    "llama": Spec(
        "Llama-like, 6 layers, width 384, hidden 1024, vocabulary 512, sequence 256, batch 8",
        lambda: llama(6, 384, 1024, 512, 256),
        512,
        256,
        8,
    ),
    "moe": Spec(
        "Mixture of Experts, 4 layers, width 384, 8 experts of 768, vocabulary 512, sequence 256, batch 6",
        lambda: moe(4, 384, 768, 8, 512, 256),
        512,
        256,
        6,
    ),
    "tiny": Spec("GPT, 2 layers, width 64", lambda: gpt(2, 64, 64, 32), 64, 32, 4),
}
ALLOCATOR = "keep"
_TRIES = 8  # budgets tried at most to come down to a peer's memory


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--model", type=lambda s: s.split(","), default=["gpt", "llama", "moe"])
    parser.add_argument("--fractions", type=lambda s: [float(x) for x in s.split(",")], default=[0.5, 0.2])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--budgets", help="what --json wrote in a run before")
    parser.add_argument("--json")
    args = parser.parse_args()
    known: dict[tuple[str, str], int] = {}
    if args.budgets:
        for found in json.loads(Path(args.budgets).read_text())["runs"]:
            known |= {(found["model"], r["name"]): r["zero"].get("budget") for r in found["rows"][1:]}
    common.hardware(args.hardware, 1, ALLOCATOR)
    m = common.machine()
    print(common.machine_text(m), flush=True)
    result: dict[str, Any] = {"machine": m, "runs": []}
    pages = []
    for name in args.model:
        rows = compare(name, args, known)
        result["runs"].append({"model": name, "rows": rows})
        pages.append(report(name, rows))
        print(pages[-1], flush=True)
        if args.json:
            text = common.heading("Time at equal memory", m) + "\n".join(pages)
            common.save(args.json, result, text)


def compare(name: str, args: argparse.Namespace, known: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    """Each peer, and zero_compiler within the memory of each; ``known``: with which budget."""

    def run(mode: str, **more: Any) -> dict[str, Any]:
        call = {"model": name, "mode": mode, "steps": args.steps, "warmup": args.warmup, **more}
        (found,) = common.run_ranks(os.path.abspath(__file__), call, 1, ALLOCATOR)
        print(f"  {name} {mode} {more or ''}: {found['ms']:.0f} ms, {found['bytes']:,} bytes", flush=True)
        return {"mode": mode, **more, **found}

    free = run("zero")
    rows = [free]
    peers = [run("torch"), *(run("torch", fraction=f) for f in args.fractions), run("blocks")]
    for peer in peers:
        peer["name"] = f"torch {peer['fraction']}" if "fraction" in peer else peer["mode"]
        ours = free
        if budget := known.get((name, peer["name"])):
            ours = run("zero", budget=budget)
        else:
            budget, least, step = free["held"], 0, 0
            for _ in range(_TRIES):
                # What is held is not all of a peak: where it did not fall, a larger step.
                step = max(ours["bytes"] - peer["bytes"], 2 * step)
                wanted = max(budget - step, least)
                if ours["bytes"] <= peer["bytes"] or wanted == budget:
                    break
                budget = wanted
                found = run("zero", budget=max(budget, 1))
                if "least" in found:
                    least = found["least"]
                else:
                    step = step if found["bytes"] == ours["bytes"] else 0
                    ours = found
        peer["zero"] = ours
        rows.append(peer)
    return rows


def measure(call: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch._functorch.config
    from torch.utils.checkpoint import checkpoint

    import zero_compiler as zero
    from zero_compiler.errors import MemoryBudgetError
    from zero_compiler.runtime import _C

    common.init_group()
    spec = MODELS[call["model"]]
    _C.meter_install()
    model: Any = spec.build()
    held = 0
    if call["mode"] == "blocks":
        for block in model.blocks:
            block.forward = _checkpointed(block.forward, checkpoint)
    if call["mode"] == "zero":
        budget, machine = call.get("budget"), os.environ[common.HARDWARE]
        model = zero.shard(model, kernels="torch", activation_budget_bytes=budget, hardware=machine)
        step = torch.compile(model, backend="zero")
    else:
        torch._functorch.config.activation_memory_budget = call.get("fraction", 1.0)
        step = torch.compile(model)
    gc.collect()
    base = _C.meter_current()  # parameters
    times = []
    for i in range(call["warmup"] + call["steps"]):
        tokens, targets = spec.data(i, 0)
        model.zero_grad()
        gc.collect()
        if i == call["warmup"]:
            _C.meter_reset_peak()
        begin = time.perf_counter()
        try:
            loss = step(tokens, targets)
        except MemoryBudgetError as error:
            least = str(error).split("give ")[1].split(", or")[0]
            return {"least": int(least.replace(",", "")), "ms": float("nan"), "bytes": 0}
        loss.backward()
        times.append((time.perf_counter() - begin) * 1e3)
    peak = _C.meter_peak() - base
    predicted = {}
    if call["mode"] == "zero":
        told = zero.inspect(model)
        (frame,), m = told.frames, told.memory
        held = frame.held_bytes
        predicted["predicted_bytes"] = m.peak - m.parameters - m.optimizer
        predicted["predicted_ms"] = sum(t.total_us for t in frame.timelines.values()) / 1e3
    times = times[call["warmup"] :]
    median = common.spread(times)["median"]
    return {"ms": median, "times": times, "bytes": peak, "held": held, "loss": loss.item(), **predicted}


def _checkpointed(forward: Any, checkpoint: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def report(name: str, rows: list[dict[str, Any]]) -> str:
    free, peers = rows[0], rows[1:]
    head = ["peer", "MiB", "ms", "zero: MiB", "predicted", "/ peer's", "ms", "predicted", "ratio of times"]
    table = [["-", "", "", *_bytes(free), "", *_ms(free), ""]]
    for p in peers:
        ours = p["zero"]
        share, ratio = f"{ours['bytes'] / p['bytes']:.2f}", ""
        if ours["bytes"] > p["bytes"]:
            share += ", at least"
        else:
            ratio = common.show(common.spread([a / b for a in ours["times"] for b in p["times"]]), 2)
        theirs = [f"{p['bytes'] / 2**20:.1f}", common.show(common.spread(p["times"]))]
        table.append([p["name"], *theirs, *_bytes(ours), share, *_ms(ours), ratio])
    return common.table(f"{name}: {MODELS[name].about}", head, table)


def _bytes(ours: dict[str, Any]) -> list[str]:
    return [f"{ours[k] / 2**20:.1f}" for k in ("bytes", "predicted_bytes")]


def _ms(ours: dict[str, Any]) -> list[str]:
    return [common.show(common.spread(ours["times"])), f"{ours['predicted_ms']:.0f}"]


if __name__ == "__main__":
    main()
