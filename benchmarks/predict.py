"""Predicted beside measured: time of forward and backward, and peak memory, of every model.

    python benchmarks/predict.py --json benchmarks/results/predict/HOST.json
    python benchmarks/predict.py --model transformers --modes zero3,zero3:tile_bytes=4000000 --json FILE

``--model transformers`` are six of that library. ``DIR`` in a mode is a folder of its own, for files:
``zero3:offload_optimizer=nvme+nvme_dir=DIR``.

The prediction is made from shapes and the hardware file alone, before the first step; each model is then trained in
fresh processes. Time is that of forward and backward of the slowest rank, median of the steps: the optimizer is the
user's, and no part of a Program. Peak is the largest number of live bytes of torch's CPU allocator in steps after
warm-up, of the rank with the most.

A shared host gives more at one minute than at another. So the machine is calibrated before each model, unless
--hardware names a file, and before every step each rank times a product of the size of calibration's: "host" is what
it reaches meanwhile, of what it should by calibration. Where that is far from 1 the prediction was made for another
machine than the one that ran. (It is one form of three, its operands in cache and its result not.)
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import tempfile
import time
from typing import Any

import common
import modes
import torch
import transformers_models
from bench import TOLERANCE, _list
from models import MODELS

OTHERS = transformers_models.MODELS
ALLOCATOR = "keep"
SIDE = 1024  # of the square matrices in calibration


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call))
    parser = common.parser(__doc__)
    parser.add_argument("--model", type=_list, default=[n for n in MODELS if not n.startswith("tiny")])
    parser.add_argument("--modes", type=_list, default=["zero3"], help="of ours, with options as in bench.py")
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    rows = {}
    names = [n for given in args.model for n in (OTHERS if given == "transformers" else [given])]
    for name, mode in itertools.product(names, args.modes):
        common.hardware(args.hardware, args.ranks, ALLOCATOR)
        call = {
            "model": name,
            "mode": mode,
            "dtype": args.dtype,
            "steps": args.steps,
            "warmup": args.warmup,
        }
        with tempfile.TemporaryDirectory(prefix="zero-predict-") as folder:
            call["mode"] = mode.replace("DIR", folder)
            found = common.run_ranks(os.path.abspath(__file__), call, args.ranks, ALLOCATOR)
        slowest = [max(steps) for steps in zip(*(f["seconds"] for f in found))]
        rows[f"{name}, {mode}"] = {
            "seconds": slowest,
            "predicted_s": max(f["predicted_s"] for f in found),
            "peak": max(f["peak"] for f in found),
            "predicted_peak": found[0]["predicted_peak"],
            "host": min(f["host"] for f in found),
        }
    head = [
        "model, mode",
        "measured ms (p10-p90)",
        "predicted ms",
        "off by",
        "host",
        "peak MiB",
        "predicted MiB",
        "off by",
    ]
    table = []
    for name, r in rows.items():
        s = common.spread(r["seconds"])
        table.append(
            [
                name,
                common.show(s, 1, 1e3),
                f"{r['predicted_s'] * 1e3:.1f}",
                f"{r['predicted_s'] / s['median'] - 1:+.0%}",
                f"{r['host']:.2f}",
                f"{r['peak'] / 2**20:.1f}",
                f"{r['predicted_peak'] / 2**20:.1f}",
                f"{r['predicted_peak'] / r['peak'] - 1:+.1%}",
            ]
        )
    title = f"{args.dtype}, {args.ranks} ranks of one thread"
    common.print_table(title, head, table)
    if args.json:
        text = common.heading("Predicted and measured", m) + common.table(title, head, table)
        common.save(args.json, {"machine": m, "models": rows}, text)


def measure(call: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    import zero_compiler as zero
    from zero_compiler.cost import hardware
    from zero_compiler.runtime import _C

    rank, _ = common.init_group()
    spec = (MODELS | OTHERS)[call["model"]]
    gc.collect()
    _C.meter_install()
    trainer = modes.build(call["mode"], spec, call["dtype"])
    for i in range(call["warmup"]):
        trainer.step(*spec.data(i, rank))
    gc.collect()
    _C.meter_reset_peak()
    seconds, products = [], []
    for i in range(call["steps"]):
        batch = spec.data(call["warmup"] + i, rank)
        dist.barrier()
        products += [product_us() for _ in range(3)]
        dist.barrier()
        start = time.perf_counter()
        trainer.backward(trainer.forward(*batch))
        seconds.append(time.perf_counter() - start)
        trainer.update()
    peak = _C.meter_peak()
    report = zero.inspect(trainer.model)
    us = sum(t.total_us for f in report.frames for p, t in f.timelines.items() if p != "inference")
    predicted = {"predicted_s": us / 1e6, "predicted_peak": report.memory.peak}
    h = hardware.load(os.environ[common.HARDWARE])
    traffic = h.matmul_traffic * 3 * 4 * SIDE**2 / h.memory_bytes_per_us
    host = (2 * SIDE**3 / h.matmul_flops_per_us["float32"] + traffic) / statistics.median(products)
    if rank == 0:
        print(f"  {call['model']}: {statistics.median(seconds) * 1e3:.0f} ms", flush=True)
    return {"seconds": seconds, "peak": peak, "host": host, **predicted}


def product_us() -> float:
    """Time of a product of the size by which `zero-compiler calibrate` measures float32 throughput of a CPU."""
    a = torch.ones(SIDE, SIDE)
    out = torch.empty_like(a)
    start = time.perf_counter()
    torch.mm(a, a, out=out)
    return (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    main()
