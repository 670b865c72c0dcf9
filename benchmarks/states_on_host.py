"""Gradients and optimizer states on the host of an accelerator: step time beside DeepSpeed ZeRO-Offload, and the limit.

    python benchmarks/states_on_host.py --model gpt-1.5b --hardware FILE --json FILE

One device, one process. Weights rest on the device; gradients go to the host as backward makes them, the host updates
its float32 weights and states, and the weights that were updated come back, in bf16. Beside it DeepSpeed's ZeRO-2 with
`offload_optimizer: cpu`, where it can be imported: else a line says why not.

**The limit** is the longest of what must happen, each measured alone, as if all of it overlapped: the step of plain
PyTorch compiled by Inductor with everything on the device; the bytes of gradients to the host and of weights back, over
the measured rates of the link; and Adam's bytes on the host (weight, two states and a gradient are read, weight and
states written, and the weight's bf16), over the rate at which the host copies memory with all of its threads.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import common
import torch
from models import MODELS, OF_A_GPU, Spec
from one_device import GIB, Peak, device, forget, meter, one_step, plain, planned_ms

Step = Callable[[Sequence[torch.Tensor]], tuple[float, float]]  # of a batch: seconds, and the loss
HEAD = ["way", "s a step", "/ limit", "peak on the device, GiB", "planned", "loss of the last step"]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="gpt-1.5b", choices=MODELS | OF_A_GPU)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(common.cores())
    common.hardware(args.hardware, 1, threads=common.cores())
    meter()
    m = common.machine()
    spec = (MODELS | OF_A_GPU)[args.model]
    result: dict[str, Any] = {"machine": m, "model": args.model, "rows": []}

    def add(row: dict[str, Any]) -> dict[str, Any]:
        result["rows"].append(row)
        print(f"  {row}", flush=True)
        if args.json:
            common.save(args.json, result, text_of(result))
        return row

    call, optimizer = plain(spec.build().to(device()), torch.bfloat16)
    numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    step_of = partial(one_step, call, optimizer)
    on_device = add(measured("plain, everything on the device", step_of, spec, args.steps))
    del call, optimizer, step_of
    result["limit"] = limit(numel, common.spread(on_device["s"])["median"])
    add(ours(spec, args.steps))
    add(deepspeed(spec, args.steps))
    print(text_of(result))


def measured(way: str, step_of: Step, spec: Spec, steps: int) -> dict[str, Any]:
    """Times and losses of so many steps, after two that are not counted."""
    times, losses = [], []
    for step in range(steps + 2):
        if step == 2:
            peak = Peak()
        seconds, loss = step_of([t.to(device()) for t in spec.data(step, 0)])
        losses.append(loss)
        if step >= 2:
            times.append(seconds)
    return {"way": way, "s": times, "losses": losses, "peak": peak.bytes()}


def ours(spec: Spec, steps: int) -> dict[str, Any]:
    from modes import LR

    import zero_compiler as zero

    forget()
    fields: dict[str, Any] = {
        "hardware": os.environ[common.HARDWARE],
        "param_dtype": "bf16",
        "reduce_dtype": "bf16",
    }
    if device().type != "cpu":  # whose memory is the host's
        fields |= {"offload_grads": "host", "offload_optimizer": "host"}
    model = zero.shard(spec.build(), device=device(), **fields)
    call = torch.compile(model, backend="zero")
    optimizer = zero.optimizer(torch.optim.AdamW, model, lr=LR, fused=True)
    row = measured(
        "stage 3, gradients and states on the host", partial(one_step, call, optimizer), spec, steps
    )
    told = zero.inspect(model)
    return row | {"planned": told.memory.peak, "planned_ms": planned_ms(told)}


def deepspeed(spec: Spec, steps: int) -> dict[str, Any]:
    way = "DeepSpeed ZeRO-2, optimizer on the host"
    if importlib.util.find_spec("deepspeed") is None:
        return {"way": way, "why": "deepspeed is not installed"}
    if device().type == "cpu":
        return {"way": way, "why": "the CPU has no host"}
    forget()
    try:
        return _deepspeed(way, spec, steps)
    except Exception as error:
        return {"way": way, "why": f"{type(error).__name__}: {str(error)[:200]}"}


def _deepspeed(way: str, spec: Spec, steps: int) -> dict[str, Any]:
    import deepspeed as ds

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556"}
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": spec.batch,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload, "overlap_comm": True},
    }
    model = spec.build().to(device())
    engine, *_ = ds.initialize(
        model=model, optimizer=ds.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-4), config=config
    )

    def step_of(batch: Sequence[torch.Tensor]) -> tuple[float, float]:
        torch.accelerator.synchronize()
        began = time.perf_counter()
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        torch.accelerator.synchronize()
        return time.perf_counter() - began, loss.item()

    return measured(way, step_of, spec, steps)


# The limit --------------------------------------------------------------------------------------------------------


def limit(numel: int, compute_s: float) -> dict[str, float]:
    """Seconds of each of what must happen in a step."""
    from zero_compiler.cost.hardware import load

    link = load(os.environ[common.HARDWARE]).host_device
    each_way = 2 * numel  # bytes: bf16
    parts = {"compute": compute_s, "adam": (4 * 4 + 3 * 4 + 2) * numel / copy_rate()}
    if link is not None:
        parts |= dict.fromkeys(("to the host", "to the device"), each_way / link.bytes_per_us / 1e6)
    return parts


def copy_rate() -> float:
    """Bytes a second that the host reads and writes, both counted, with all threads."""
    a, b = torch.ones(1 << 27), torch.ones(1 << 27)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        b.copy_(a)
        best = min(best, time.perf_counter() - began)
    return 2 * a.nbytes / best


def text_of(result: dict[str, Any]) -> str:
    text = common.heading("Gradients and states on the host", result["machine"])
    parts = result.get("limit", {})
    longest = max(parts.values(), default=0.0)
    if parts:
        each = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in parts.items())
        text += f"The limit is {longest * 1e3:.0f} ms a step, the longest of: {each}.\n\n"
    rows = [row_text(row, longest) for row in result["rows"]]
    return text + common.table(f"{result['model']}, bf16", HEAD, rows)


def row_text(row: dict[str, Any], longest: float) -> list[str]:
    if "why" in row:
        return [row["way"], row["why"], *[""] * (len(HEAD) - 2)]
    s = common.spread(row["s"])
    return [
        row["way"],
        common.show(s, 3),
        f"{s['median'] / longest:.2f}" if longest else "",
        f"{row['peak'] / GIB:.2f}",
        f"{row['planned'] / GIB:.2f}" if "planned" in row else "",
        f"{row['losses'][-1]:.4f}",
    ]


if __name__ == "__main__":
    main()
