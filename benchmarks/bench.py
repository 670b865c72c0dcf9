"""Step time of every way to train, in turn, step by step, in one process group.

    python benchmarks/bench.py                                   # all models, all modes, 2 ranks
    python benchmarks/bench.py --model gpt-12x1024 --modes ddp,fsdp2-compiled,zero2,zero3 --allocator keep
    torchrun --nproc-per-node 2 benchmarks/bench.py --model tiny --steps 5

All modes hold a replica of the model at once and take turns at each step, after a barrier, so that drift of the
machine hits all alike; where they do not fit into memory they run in rounds, with DDP and compiled FSDP2 in each. A
step is forward, backward, AdamW(fused=True) and zero_grad; its time is that of the slowest rank. Ratios are taken step
by step against a mode of the same round. With --json, what is measured so far is saved after every round.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import modes
from models import MODELS

PEER = "deepspeed3"
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    args = arguments()
    if "RANK" in os.environ:
        under_torchrun(args)
        return
    result: dict[str, Any] = {"machine": common.machine(), "runs": []}
    print(common.machine_text(result["machine"]), flush=True)
    files = {a: common.hardware(args.hardware, args.ranks, a) for a in args.allocator}
    result["hardware"] = {a: json.loads(Path(file).read_text()) for a, file in files.items()}
    pages: list[str] = []
    for name in args.model:
        for dtype in args.dtype:
            for allocator in args.allocator:
                os.environ[common.HARDWARE] = files[allocator]
                before, run = result["runs"], None
                for run in rounds_of(args, name, dtype, allocator):
                    result["runs"] = [*before, run]
                    if args.json:
                        common.save(args.json, result, page(result, [*pages, text_of(run)]))
                assert run is not None
                report(run)
                pages.append(text_of(run))
    if not all(run["losses_agree"] for run in result["runs"]):
        sys.exit("losses do not agree")


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    names = [n for n in MODELS if not n.startswith("tiny")]
    parser.add_argument(
        "--model", type=_list, default=names, help=f"of {', '.join(MODELS)}; default: all but tiny ones"
    )
    parser.add_argument("--modes", type=_list, default=modes.DEFAULT, help=f"of {', '.join(modes.MODES)}")
    parser.add_argument("--steps", type=int, default=21, help="measured steps a mode")
    parser.add_argument("--warmup", type=int, default=4, help="steps before, with compilation")
    parser.add_argument(
        "--dtype", type=_list, default=["fp32"], help="fp32 and/or bf16 (compute over fp32 shards)"
    )
    parser.add_argument(
        "--allocator", type=_list, default=["keep"], help="default and/or keep (glibc keeps its pages)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--hardware", help="what `zero-compiler calibrate` wrote, for our plans; default: calibrate first"
    )
    parser.add_argument(
        "--memory-gib", type=float, help="what replicas may take together; default: 0.75 of what is free"
    )
    parser.add_argument("--json", help="write results here, and Markdown beside it")
    args = parser.parse_args()
    try:
        for m in args.modes:
            modes.check(m)
        for given, known in (
            (args.model, MODELS),
            (args.dtype, TOLERANCE),
            (args.allocator, common.ALLOCATORS),
        ):
            unknown = [g for g in given if g not in known]
            if unknown:
                raise ValueError(f"no {unknown[0]!r}; there are {', '.join(known)}")
    except ValueError as error:
        parser.error(str(error))
    if args.steps < 1 or args.warmup < 1:
        parser.error("--steps and --warmup must be at least 1")
    return args


def _list(text: str) -> list[str]:
    return [x for x in text.split(",") if x]


def under_torchrun(args: argparse.Namespace) -> None:
    (name,), (dtype,), (allocator,) = args.model[:1], args.dtype[:1], args.allocator[:1]
    wanted = common.ALLOCATORS[allocator]
    if any(os.environ.get(k) != v for k, v in wanted.items()):
        # glibc reads these when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    found = measure(call_for(args, name, dtype, args.modes))
    if found["rank"] == 0:
        m = common.machine()
        print(common.machine_text(m))
        run = summary(name, dtype, allocator, [found])
        report(run)
        if args.json:
            result = {"machine": m, "runs": [run]}
            common.save(args.json, result, page(result, [text_of(run)]))


def call_for(args: argparse.Namespace, name: str, dtype: str, chosen: Sequence[str]) -> dict[str, Any]:
    return {"model": name, "dtype": dtype, "modes": list(chosen), "steps": args.steps, "warmup": args.warmup}


def rounds_of(args: argparse.Namespace, name: str, dtype: str, allocator: str) -> Iterator[dict[str, Any]]:
    """The model's figures over its rounds so far, after each round.

    The first round has DDP and every mode of FSDP2; those after it have DDP and the fastest of FSDP2's, so that every
    ratio is to its best mode, taken in the same round.
    """
    budget = args.memory_gib * 2**30 if args.memory_gib else 0.75 * common.available_bytes()
    numel = numel_of(name)
    left, found = list(args.modes), []
    anchors = [m for m in left if m == "ddp" or m.startswith("fsdp2")]
    while left:
        chosen = next_round(left, anchors, numel, args.ranks, budget)
        print(
            f"{name} {dtype}, allocator {allocator}, round {len(found) + 1}: {', '.join(chosen)}",
            flush=True,
        )
        call = call_for(args, name, dtype, chosen)
        found.append(common.run_ranks(os.path.abspath(__file__), call, args.ranks, allocator)[0])
        left = [m for m in left if m not in chosen]
        anchors = [m for m in ("ddp", fastest(found[0]["modes"], "fsdp2")) if m in anchors]
        yield summary(name, dtype, allocator, found)


def numel_of(name: str) -> int:
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in MODELS[name].make().parameters())


def next_round(
    left: Sequence[str], anchors: Sequence[str], numel: int, world: int, budget: float
) -> list[str]:
    """``anchors``, and what fits into memory beside them of the modes that are left: at least one new mode."""
    # Libraries, compiler and one step's activations of each rank come on top.
    room = budget - world * 1.5 * 2**30

    def fits(ms: Sequence[str]) -> bool:
        return sum(world * modes.bytes_at_rest(m, numel, world) for m in ms) <= room

    chosen = list(anchors)
    # Ours first, so that they share a round, also with the peer that ratios refer to.
    for m in sorted(left, key=lambda m: (m != PEER, not m.startswith("zero"))):
        if m not in chosen and (fits([*chosen, m]) or not set(chosen) & set(left)):
            chosen.append(m)
    return chosen


# In a rank --------------------------------------------------------------------------------------------------------


def measure(call: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    rank, world = common.init_group()
    spec, dtype = MODELS[call["model"]], call["dtype"]
    links = measure_links()
    trainers: dict[str, modes.Trainer] = {}
    out: dict[str, Any] = {"rank": rank, "world": world, "modes": {}, "skipped": {}}
    for name in call["modes"]:
        start = time.perf_counter()
        try:
            trainer = modes.build(name, spec, dtype)
        except modes.Skip as skip:
            out["skipped"][name] = str(skip)
            if rank == 0:
                print(f"  {name}: skipped, {skip}", flush=True)
            continue
        losses = [float(trainer.step(*spec.data(i, rank))) for i in range(call["warmup"])]
        trainers[name] = trainer
        ready = time.perf_counter() - start
        out["modes"][name] = {"losses": losses, "ready_s": ready, "s": [], "cpu_s": [], "parts_s": []}
        if rank == 0:
            print(f"  {name}: ready after {ready:.0f} s", flush=True)
    names = list(trainers)
    # Two laps in turn, not measured: a library that changes global state makes torch.compile build others again.
    for i in (0, 1):
        for name in names:
            batch = spec.data(call["warmup"] + i, rank)
            out["modes"][name]["losses"].append(float(trainers[name].step(*batch)))
    gc.collect()
    gc.disable()
    for i in range(call["steps"]):
        batch = spec.data(call["warmup"] + 2 + i, rank)
        # Each step begins with another mode: none always follows the same one.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            trainer, row = trainers[name], out["modes"][name]
            gc.collect()
            dist.barrier()
            cpu, t0 = time.process_time(), time.perf_counter()
            loss = trainer.forward(*batch)
            t1 = time.perf_counter()
            trainer.backward(loss)
            t2 = time.perf_counter()
            trainer.update()
            t3 = time.perf_counter()
            row["cpu_s"].append(time.process_time() - cpu)
            row["s"].append(t3 - t0)
            row["parts_s"].append((t1 - t0, t2 - t1, t3 - t2))
            row["losses"].append(float(loss.detach()))
            del loss
        if rank == 0 and (i % 5 == 4 or i + 1 == call["steps"]):
            print(f"  step {i + 1} of {call['steps']}", flush=True)
    gc.enable()
    after = measure_links()
    out["links"] = {k: statistics.median([links[k], after[k]]) for k in links}
    for name, trainer in trainers.items():
        out["modes"][name]["transport"] = transport(name, trainer)
    out["numel"] = numel_of(call["model"])
    everyone = common.gather_objects(out["modes"])
    for name, row in out["modes"].items():
        of_ranks = [o[name] for o in everyone]
        row["s"] = [max(s) for s in zip(*(r["s"] for r in of_ranks))]
        row["cpu_s"] = [r["cpu_s"] for r in of_ranks]
        row["losses"] = [statistics.fmean(x) for x in zip(*(r["losses"] for r in of_ranks))]
    dist.barrier()
    del torch
    return out


def measure_links(nbytes: int = 64 << 20, times: int = 5) -> dict[str, float]:
    """Bytes a second of the group's collectives (bytes of the full tensor over time), and of a copy in memory."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    full = torch.ones(nbytes // 4 // world * world)
    other = torch.ones_like(full)
    part = torch.ones(full.numel() // world)
    rank = dist.get_rank()

    def exchange() -> None:
        # Every rank sends its part to every other: what an all-gather must move, without a library's copies.
        pieces = full.view(world, -1)
        others = [r for r in range(world) if r != rank]
        works = [dist.irecv(pieces[r], r) for r in others] + [dist.isend(part, r) for r in others]
        for work in works:
            work.wait()

    kinds = {
        "exchange": exchange,
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "all_reduce": lambda: dist.all_reduce(full),
        "copy": lambda: other.copy_(full),
    }
    out = {}
    for kind, go in kinds.items():
        seconds = []
        for i in range(times + 1):
            full.fill_(1.0)
            part.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            go()
            if i:
                seconds.append(time.perf_counter() - start)
        worst = torch.tensor([statistics.median(seconds)])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        out[kind] = full.nbytes / float(worst)
    return out


def transport(name: str, trainer: modes.Trainer) -> str:
    """What carried the bytes."""
    if not modes.communicates(name):
        return "none"
    if not name.startswith("zero"):
        return "c10d (gloo)"
    import zero_compiler as zero

    return zero.inspect(trainer.model).transport


# Results ----------------------------------------------------------------------------------------------------------


def summary(name: str, dtype: str, allocator: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One model's figures over its rounds."""
    run: dict[str, Any] = {
        "model": name,
        "about": MODELS[name].about,
        "dtype": dtype,
        "allocator": allocator,
        "world": found[0]["world"],
        "numel": found[0]["numel"],
        "links_bytes_per_s": found[0]["links"],
        "modes": [],
        "skipped": {k: v for f in found for k, v in f["skipped"].items()},
        "tolerance": TOLERANCE[dtype],
    }
    seen: set[str] = set()
    for i, f in enumerate(found):
        rows = f["modes"]
        best = {kind: fastest(rows, kind) for kind in ("fsdp2", "ddp", PEER)}
        truth = next((m for m in ("ddp", "fsdp2", *rows) if m in rows and modes.communicates(m)), None)
        for m, row in rows.items():
            if m in seen:
                continue
            seen.add(m)
            apart = None
            if truth is not None and modes.communicates(m):
                pairs = zip(row["losses"], rows[truth]["losses"])
                apart = max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs)
            run["modes"].append(
                {
                    "mode": m,
                    "round": i,
                    "step_s": common.spread(row["s"]),
                    "steps_s": row["s"],
                    "parts_median_s": [statistics.median(p) for p in zip(*row["parts_s"])],
                    "cpu_median_s_by_rank": [statistics.median(c) for c in row["cpu_s"]],
                    "ratios": {kind: ratio(row, rows.get(b)) for kind, b in best.items()},
                    "ratios_to": best,
                    "loss_apart": apart,
                    "loss_reference": truth,
                    "losses": row["losses"],
                    "ready_s": row["ready_s"],
                    "transport": row["transport"],
                }
            )
    order = {m: i for i, m in enumerate(modes.MODES)}
    run["modes"].sort(key=lambda r: order.get(r["mode"].partition(":")[0], 99))
    run["losses_agree"] = all(
        r["loss_apart"] is None or r["loss_apart"] <= run["tolerance"] for r in run["modes"]
    )
    run["limits_s"] = limits(run)
    return run


def fastest(rows: dict[str, Any], kind: str) -> str | None:
    """Of one round, the mode of a kind with the shortest median step."""
    of_kind = (m for m in rows if m.startswith(kind))
    return min(of_kind, key=lambda m: statistics.median(rows[m]["s"]), default=None)


def ratio(row: dict[str, Any], to: dict[str, Any] | None) -> dict[str, float] | None:
    return common.spread([a / b for a, b in zip(row["s"], to["s"])]) if to else None


def limits(run: dict[str, Any]) -> dict[str, float]:
    """Seconds that the bytes of a step alone take over gloo as measured in this run, with nothing hidden by compute.

    Over plain sends and receives, which is faster than gloo's own collectives; sums are left out.
    """
    if run["world"] == 1:
        return {}
    link, grads = run["links_bytes_per_s"], 4 * run["numel"]
    weights = grads // 2 if run["dtype"] == "bf16" else grads
    wire = max(link["exchange"], link["all_gather"])
    return {
        "stage 3 (two gathers, one reduction)": (2 * weights + grads) / wire,
        "stage 2 (one gather, one reduction)": (weights + grads) / wire,
        "DDP (one all-reduce)": min(2 * grads / wire, grads / link["all_reduce"]),
    }


HEAD = [
    "mode",
    "step ms (p10-p90)",
    "/ FSDP2 best",
    "/ DDP best",
    "/ DeepSpeed 3",
    "fwd/bwd/opt ms",
    "CPU ms by rank",
    "loss apart",
    "transport",
]


def report(run: dict[str, Any]) -> None:
    title, rows, lines = parts(run)
    common.print_table(title, HEAD, rows)
    print("\n".join(lines) + "\n", flush=True)


def text_of(run: dict[str, Any]) -> str:
    """The Markdown of one model."""
    title, rows, lines = parts(run)
    return common.table(title, HEAD, rows) + "\n" + "\n".join(f"- {x}" for x in lines) + "\n"


def parts(run: dict[str, Any]) -> tuple[str, list[list[str]], list[str]]:
    rows = []
    for r in run["modes"]:
        rows.append(
            [
                r["mode"],
                common.show(r["step_s"], 0, 1e3)
                if r["step_s"]["median"] > 0.1
                else common.show(r["step_s"], 1, 1e3),
                *(common.show(r["ratios"][kind], 2) for kind in ("fsdp2", "ddp", PEER)),
                "/".join(f"{p * 1e3:.0f}" for p in r["parts_median_s"]),
                ", ".join(f"{c * 1e3:.0f}" for c in r["cpu_median_s_by_rank"]),
                "own curve" if r["loss_apart"] is None else f"{r['loss_apart']:.0e}",
                r["transport"],
            ]
        )
    title = (
        f"{run['model']}: {run['about']}; {run['numel'] / 1e6:.1f}M parameters; {run['dtype']}, {run['world']} "
        f"ranks of one thread, allocator {run['allocator']}"
    )
    link = ", ".join(f"{k.replace('_', '-')} {v / 1e9:.2f}" for k, v in run["links_bytes_per_s"].items())
    lines = [
        f"Measured GB/s (bytes of the full tensor, gloo): {link}.",
        *(f"Bytes over that bandwidth, {k}: {v * 1e3:.0f} ms." for k, v in run["limits_s"].items()),
        verdict(run),
        *(f"Skipped {m}: {why}." for m, why in run["skipped"].items()),
    ]
    return title, rows, lines


def verdict(run: dict[str, Any]) -> str:
    far = [r for r in run["modes"] if r["loss_apart"] is not None and r["loss_apart"] > run["tolerance"]]
    if far:
        said = ", ".join(f"{r['mode']} by {r['loss_apart']:.1e} from {r['loss_reference']}" for r in far)
        return f"LOSSES DO NOT AGREE within {run['tolerance']:g} relative: {said}."
    return f"Losses agree at every step, warm-up included, within {run['tolerance']:g} relative."


def page(result: dict[str, Any], pages: Sequence[str]) -> str:
    text = common.heading("Step time", result["machine"])
    rates = {"torch's BLAS": "matmul_flops_per_us", "oneDNN": "onednn_flops_per_us"}
    for allocator, spec in result.get("hardware", {}).items():
        known = {k: spec.get(v, {}).get("float32") for k, v in rates.items()}
        if all(known.values()):
            found = ", ".join(f"{k} {v / 1e3:.0f}" for k, v in known.items())
            text += "Calibration of float32 matrix products, GFLOP/s with all ranks busy, "
            text += f"allocator {allocator}: {found}.\n\n"
    return text + "\n".join(pages)


if __name__ == "__main__":
    main()
