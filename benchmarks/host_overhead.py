"""Host time of a step of 200 tiny layers: what a framework costs beside its arithmetic.

    python benchmarks/host_overhead.py --ranks 1 --modes local-compiled,zero3
    python benchmarks/host_overhead.py --ranks 2 --modes ddp-compiled,zero2,zero3

Each layer is LayerNorm and Linear of width 16 with a residual, and FSDP2 wraps each one. The arithmetic takes some
microseconds a layer, so nearly all of the time is Python, autograd and dispatch. CPU time of the process (all its
threads) stands beside wall time: with peers, wall time has waiting in it. Modes take turns, step by step, and
ratios are those of steps of the same turn: what else the machine does meanwhile meets both.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from typing import Any

import common
import modes
import torch
import torch.nn.functional as F
from bench import _list
from models import LM, Spec
from torch import nn

MODES = [
    "local",
    "local-compiled",
    "ddp",
    "ddp-compiled",
    "fsdp2",
    "fsdp2-compiled",
    "simplefsdp",
    "zero2",
    "zero3",
]
WIDTH = 16
BESIDE = ["local-compiled", "ddp-compiled", "fsdp2", "fsdp2-compiled"]  # where they are among the modes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def spec_of(layers: int) -> Spec:
    def make() -> LM:
        return LM(32, WIDTH, 4, [Layer() for _ in range(layers)], nn.LayerNorm(WIDTH))

    return Spec(f"{layers} layers of LayerNorm and Linear, width {WIDTH}", make, 32, 4, 1)


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--modes", type=_list, default=MODES)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--steps", type=int, default=51)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    call = {"modes": args.modes, "layers": args.layers, "steps": args.steps}
    rows = common.run_ranks(os.path.abspath(__file__), call, args.ranks, "keep")[0]
    beside = [mode for mode in BESIDE if mode in rows]
    head = ["mode", "step ms (p10-p90)", "forward ms", "backward ms", "optimizer ms", "CPU ms"]
    head += [f"/ {mode} (p10-p90)" for mode in beside]
    table = []
    for mode, r in rows.items():
        parts = [f"{statistics.median(p) * 1e3:.1f}" for p in zip(*r["parts_s"])]
        cpu = f"{statistics.median(r['cpu_s']) * 1e3:.1f}"
        ratios = [[a / b for a, b in zip(r["s"], rows[other]["s"], strict=True)] for other in beside]
        shares = [common.show(common.spread(ratio), 2) for ratio in ratios]
        table.append([mode, common.show(common.spread(r["s"]), 1, 1e3), *parts, cpu, *shares])
    title = f"{spec_of(args.layers).about}; {args.ranks} ranks of one thread, fp32, allocator keep"
    common.print_table(title, head, table)
    if args.json:
        text = common.heading("Host time", m) + common.table(title, head, table)
        common.save(args.json, {"machine": m, "modes": rows}, text)


def measure(call: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    rank, _ = common.init_group()
    torch._dynamo.config.recompile_limit = 1000
    spec = spec_of(call["layers"])
    batch = spec.data(0, rank)
    trainers: dict[str, modes.Trainer] = {}
    rows: dict[str, Any] = {}
    for name in call["modes"]:
        trainers[name] = modes.build(name, spec, "fp32")
        for _ in range(3):
            trainers[name].step(*batch)
        rows[name] = {"s": [], "cpu_s": [], "parts_s": []}
        if rank == 0:
            print(f"  {name}: ready", flush=True)
    for trainer in trainers.values():
        trainer.step(*batch)
    gc.disable()
    for _ in range(call["steps"]):
        for name, trainer in trainers.items():
            gc.collect()
            dist.barrier()
            cpu, t0 = time.process_time(), time.perf_counter()
            loss = trainer.forward(*batch)
            t1 = time.perf_counter()
            trainer.backward(loss)
            t2 = time.perf_counter()
            trainer.update()
            t3 = time.perf_counter()
            rows[name]["cpu_s"].append(time.process_time() - cpu)
            rows[name]["s"].append(t3 - t0)
            rows[name]["parts_s"].append((t1 - t0, t2 - t1, t3 - t2))
            del loss
    return rows


if __name__ == "__main__":
    main()
