"""One device, one process: step time beside plain `torch.compile` and FSDP2, what less memory for activations costs,
and the largest model that trains within a budget.

    python benchmarks/accelerator.py DIR --device-gib 4 --host-gib 24 --json accelerator.json

Made for one accelerator, where the run for the results should take place; without one the CPU is the device, and its
host none. No torchrun; a process group of one rank, which FSDP2 asks for.

- **Step time.** Models of `bench.py`, each with plain PyTorch compiled by Inductor, FSDP2 with every block compiled,
  and stage 3, in turn step by step in one process: median, ratios, tokens/s, and the device's peak beside the plan.
- **Activations.** A GPT on long batches: plain, plain and FSDP2 with every block checkpointed, and stage 3 with
  everything saved, with a share of that as `activation_budget_bytes`, with `offload_activations="host"`, and with both.
- **One layer** of `--layer` features both ways, in bf16, on the device with plain PyTorch; and on the host, with half
  of its weight as the budget of the device: it passes in tiles. Beside the limit: its weight to the device in forward
  and in backward, and its gradient back, over the measured link. Not without an accelerator, which has a host.
- **The largest model** whose plan fits `--device-gib` of the device and `--host-gib` of its host: GPTs of `--width`
  with ever more blocks, bf16 compute and gradients over fp32 shards, AdamW. Shards, gradients and states rest on the
  device; on the host; or on both and, what has no room there, in files in DIR (`device_rest_bytes`, `host_rest_bytes`).
  That model trains for three steps in a process of its own: seconds a step, tokens/s, the device's peak and the plan's.
  The model for the host alone is trained by FSDP2 too (`CPUOffloadPolicy`, every block compiled and checkpointed).
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import common
import modes
import torch
import torch.distributed as dist
from models import MODELS, OF_A_GPU, Spec, gpt

GIB = 1 << 30
BYTES_AT_REST = 14  # of a parameter: weight and two states in float32, gradient in bf16
WAYS = ("on the device", "on the host", "on the host and in files", "on the device and the host")
FSDP2 = "on the host, FSDP2"


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, train(call))
    parser = common.parser(__doc__)
    parser.add_argument("directory", help="a folder on the disk that files go to")
    parser.add_argument(
        "--model",
        type=lambda s: [name for name in s.split(",") if name],
        default=["gpt-6x512", "gpt-12x1024", "moe"],
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="bf16", help="of compute, for step times"
    )
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument(
        "--gpt",
        type=lambda s: tuple(int(x) for x in s.split(",")),
        default=(8, 2048, 32768, 2048, 8),
        help="layers, width, vocabulary, sequence and batch, for activations; 0: not measured",
    )
    parser.add_argument("--layer", type=int, default=1 << 16, help="features; 0: not measured")
    parser.add_argument(
        "--device-gib", type=float, default=16.0, help="for the largest model; 0: not looked for"
    )
    parser.add_argument("--host-gib", type=float, default=96.0)
    parser.add_argument("--width", type=int, default=4096, help="of the largest model")
    parser.add_argument(
        "--ways",
        type=lambda s: [WAYS[int(k)] for k in s.split(",")],
        default=list(WAYS),
        help="of resting, for the largest model: 0 on the device, 1 on the host, 2 on the host and in files, "
        "3 on the device and the host",
    )
    parser.add_argument(
        "--cuda-graphs",
        choices=("yes", "no"),
        default="no",
        help="plain PyTorch with them too, for step times",
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
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    common.hardware(args.hardware, 1, directory=args.directory)
    if args.only_look:
        return print("--blocks", ",".join(str(look(way, args)) for way in WAYS))
    m = common.machine() | {"device": device_text()}
    result: dict[str, Any] = {"machine": m, "times": [], "activations": [], "layer": [], "largest": []}

    def save() -> str:
        """What there is so far: a later row that fails takes no earlier one with it."""
        text = common.heading("One device", m) + f"Device: {m['device']}.\n\n"
        rows = [time_row(r) for r in result["times"]]
        text += common.table(f"Step time, {args.dtype}", TIMES, rows) + "\n" if rows else ""
        if result["activations"]:
            title = "Activations of a GPT: {} layers, width {}, vocabulary {}, sequence {}, batch {}".format(
                *args.gpt
            )
            text += (
                common.table(f"{title}; {args.dtype}", ACTIVATIONS, activation_rows(result["activations"]))
                + "\n"
            )
        if result["layer"]:
            title = f"A linear layer of {args.layer:,} by {args.layer:,}, bf16, {ROWS} rows, SGD"
            text += common.table(title, LAYER, [layer_row(r) for r in result["layer"]]) + "\n"
        if result["largest"]:
            title = f"The largest model within {args.device_gib:g} GiB, and {args.host_gib:g} GiB of the host"
            text += common.table(title, LARGEST, [largest_row(r) for r in result["largest"]])
            host, both = (
                gib * GIB / BYTES_AT_REST / 1e9 for gib in (args.host_gib, args.host_gib + args.device_gib)
            )
            text += (
                f"\nBy arithmetic the host's memory holds {host:.2f} G parameters, and with the device's {both:.2f} G, "
                f"of {BYTES_AT_REST} bytes each: weight and two states in float32, the gradient in bf16.\n"
            )
        if args.json:
            common.save(args.json, result, text)
        return text

    for name in args.model:
        result["times"].append(times_of(name, args))
        save()
    for way in activation_ways() if any(args.gpt) else ():
        result["activations"].append(activations(way, result["activations"], args))
        save()
    for budgeted in (False, True) if args.layer and device().type != "cpu" else ():
        result["layer"].append(layer(args.layer, budgeted))
        save()
    if args.device_gib:
        for way in args.ways:
            result["largest"].append(largest(way, look(way, args), args))
            save()
            if way == WAYS[1] and (blocks := result["largest"][-1].get("blocks")):
                result["largest"].append(largest(FSDP2, blocks, args))
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


def forget() -> None:
    """What earlier models left: compiled code, and memory."""
    torch._dynamo.reset()
    gc.collect()
    if device().type != "cpu":
        torch.accelerator.empty_cache()


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


def group() -> None:
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device())
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def low(args: argparse.Namespace) -> torch.dtype | None:
    return torch.bfloat16 if args.dtype == "bf16" else None


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=modes.LR, fused=True)


def plain(model: Any, dtype: torch.dtype | None, mode: str | None = None) -> tuple[Any, Any]:
    """A trainer: what gives the loss of a batch, and an optimizer."""
    at, inner = device(), torch.compile(model, mode=mode)

    def call(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(at.type, dtype=dtype, enabled=dtype is not None):
            return inner(*batch)

    return call, adamw(model)


def fsdp2(
    model: Any, dtype: torch.dtype | None, checkpointed: bool = False, offloaded: bool = False
) -> tuple[Any, Any]:
    """``checkpointed``: every block; ``offloaded``: shards, gradients and states to the host."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    group()
    fields: dict[str, Any] = {
        "mesh": init_device_mesh(device().type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype if offloaded else None),
    }
    if checkpointed:
        model.blocks = torch.nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    if offloaded:
        fields["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        block.compile()
        fully_shard(block, **fields)
    fully_shard(model, **fields)
    return model, adamw(model)


def ours(model: Any, dtype: torch.dtype | None, **fields: Any) -> tuple[Any, Any]:
    import zero_compiler as zero

    model = zero.shard(model, hardware=os.environ[common.HARDWARE], param_dtype=dtype, **fields)
    return torch.compile(model, backend="zero"), adamw(model)


def check(losses: Sequence[Sequence[float]], what: str, args: argparse.Namespace) -> float:
    """How far the losses of trainers lie from those of the first, relative."""
    pairs = [pair for other in losses[1:] for pair in zip(losses[0], other, strict=True)]
    apart = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    if apart > (tolerance := 2e-2 if low(args) else 1e-4):
        raise SystemExit(f"{what}: losses are {apart:.1e} apart, which is more than {tolerance:g}")
    return apart


# Step time --------------------------------------------------------------------------------------------------------

TIMES = [
    "model",
    "plain, ms",
    "with CUDA graphs, ms",
    "FSDP2, ms",
    "stage 3, ms",
    "/ plain",
    "/ FSDP2",
    "tokens/s",
    "peak, GiB",
    "planned",
]


def times_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    import zero_compiler as zero

    meter()
    spec, at = (MODELS | OF_A_GPU)[name], device()
    makers: list[Any] = [plain, fsdp2, ours]
    if args.cuda_graphs == "yes":
        makers.append(partial(plain, mode="reduce-overhead"))
    made = [make(spec.build().to(at), low(args)) for make in makers]
    times: list[list[float]] = [[] for _ in makers]
    losses: list[list[float]] = [[] for _ in makers]
    for step in range(args.warmup + args.steps):
        batch = [t.to(at) for t in spec.data(step, 0)]
        for turn in range(len(made)):
            k = (step + turn) % len(made)
            seconds, loss = one_step(*made[k], batch)
            if step >= args.warmup:
                times[k].append(seconds * 1e3)
            losses[k].append(loss)
    apart = check(losses, name, args)
    made.clear()
    forget()
    call, optimizer = ours(spec.build().to(at), low(args))
    peak = Peak()
    for step in range(3):
        one_step(call, optimizer, [t.to(at) for t in spec.data(step, 0)])
    return {
        "model": name,
        "plain_ms": times[0],
        "fsdp2_ms": times[1],
        "zero_ms": times[2],
        "graphs_ms": times[3] if len(times) > 3 else None,
        "ratio": common.spread([b / a for a, b in zip(times[0], times[2], strict=True)]),
        "fsdp2_ratio": common.spread([b / a for a, b in zip(times[1], times[2], strict=True)]),
        "tokens": batch[0].numel(),
        "losses_apart": apart,
        "peak_bytes": peak.bytes(),
        "planned_bytes": (told := zero.inspect(call._orig_mod)).memory.peak,
        "planned_ms": planned_ms(told),
    }


def planned_ms(told: Any) -> float:
    """Predicted time of forward and backward, by a report."""
    return (
        sum(t.total_us for frame in told.frames for name, t in frame.timelines.items() if name != "inference")
        / 1e3
    )


def shown(values: list[float] | None) -> str:
    return "" if values is None else common.show(common.spread(values))


def time_row(r: dict[str, Any]) -> list[str]:
    return [
        r["model"],
        *(shown(r[name]) for name in ("plain_ms", "graphs_ms", "fsdp2_ms", "zero_ms")),
        *(common.show(r[name], 2) for name in ("ratio", "fsdp2_ratio")),
        f"{1e3 * r['tokens'] / common.spread(r['zero_ms'])['median']:,.0f}",
        f"{r['peak_bytes'] / GIB:.2f}",
        f"{r['planned_bytes'] / GIB:.2f}",
    ]


# Activations ------------------------------------------------------------------------------------------------------

ACTIVATIONS = ["way", "ms", "predicted", "/ plain", "peak, GiB", "planned", "/ plain's", "the plan has"]
Ways = dict[str, Callable[[Any, torch.dtype | None, int], tuple[Any, Any]]]


def activation_ways() -> Ways:
    """A trainer of a model, where ours holds so many bytes for backward if it saves all."""
    from torch.utils.checkpoint import checkpoint

    def checkpointed(model: Any, dtype: torch.dtype | None, _held: int) -> tuple[Any, Any]:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return plain(model, dtype)

    ways: Ways = {
        "plain": lambda model, dtype, _: plain(model, dtype),
        "plain, every block checkpointed": checkpointed,
        "FSDP2, every block compiled and checkpointed": lambda model, dtype, _: fsdp2(
            model, dtype, checkpointed=True
        ),
        "zero, all saved": lambda model, dtype, _: ours(model, dtype),
        "zero, 25% of that": lambda model, dtype, held: ours(model, dtype, activation_budget_bytes=held // 4),
    }
    if device().type != "cpu":
        host = {"offload_activations": "host"}
        ways["zero, what the link hides on the host"] = lambda model, dtype, _: ours(model, dtype, **host)
        ways["zero, 25% on the device, the host beside"] = lambda model, dtype, held: ours(
            model, dtype, activation_budget_bytes=held // 4, **host
        )
    return ways


def activations(way: str, before: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    import zero_compiler as zero

    meter()
    forget()
    layers, width, vocab, length, rows = args.gpt
    spec, at = Spec("", lambda: gpt(layers, width, vocab, length), vocab, length, rows), device()
    saved = next((r["held_bytes"] for r in before if "held_bytes" in r), 0)
    call, optimizer = activation_ways()[way](spec.build().to(at), low(args), saved)
    times, losses = [], []
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            peak = Peak()
        seconds, loss = one_step(call, optimizer, [t.to(at) for t in spec.data(step, 0)])
        losses.append(loss)
        if step >= args.warmup:
            times.append(seconds * 1e3)
    check([*(r["losses"] for r in before), losses], way, args)
    row: dict[str, Any] = {"way": way, "ms": times, "losses": losses, "peak_bytes": peak.bytes()}
    print(f"  {way}: {common.spread(times)['median']:.0f} ms, {row['peak_bytes'] / GIB:.2f} GiB", flush=True)
    if way.startswith("zero"):
        told = zero.inspect(call._orig_mod)
        (frame,) = told.frames
        row |= {
            "held_bytes": frame.held_bytes,
            "planned_bytes": told.memory.peak,
            "planned_ms": planned_ms(told),
            "made_again": len(frame.remade),
            "on_host": sum(r.nbytes for r in frame.offloaded),
        }
    return row


def activation_rows(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    first, table = rows[0], []
    for r in rows:
        ratio = common.spread([a / b for a in r["ms"] for b in first["ms"]])
        ours = "planned_bytes" in r
        has = f"{r['made_again']} made again" if ours else ""
        if ours and r["on_host"]:
            has += f", {r['on_host'] / GIB:.2f} GiB on the host"
        table.append(
            [
                r["way"],
                common.show(common.spread(r["ms"])),
                f"{r['planned_ms']:.0f}" if ours else "",
                common.show(ratio, 2),
                f"{r['peak_bytes'] / GIB:.2f}",
                f"{r['planned_bytes'] / GIB:.2f}" if ours else "",
                f"{r['peak_bytes'] / first['peak_bytes']:.2f}",
                has,
            ]
        )
    return table


# One layer --------------------------------------------------------------------------------------------------------

LAYER = ["weight", "s a step", "limit", "/ limit", "peak, GiB", "planned", "loss of the last step", "tiles"]
ROWS = 16


class Layer(torch.nn.Module):
    """One weight, of values that take no time to draw."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.linear = torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.to_empty(device="cpu")
        draw = torch.Generator().manual_seed(0)
        a, b = (torch.randn(width, generator=draw).bfloat16() for _ in range(2))
        torch.outer(a, b / width**0.5, out=self.linear.weight.data)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) - y).float().square().mean()


def layer(width: int, budgeted: bool) -> dict[str, Any]:
    import zero_compiler as zero
    from zero_compiler.cost.hardware import load

    meter()
    forget()
    at, model = device(), Layer(width)
    nbytes = model.linear.weight.nbytes
    fields: dict[str, Any] = {"hardware": os.environ[common.HARDWARE]}
    if budgeted:
        fields |= {"memory_budget_bytes": nbytes // 2, "offload_params": "host"}
        model = zero.shard(model, device=at, **fields)
        call = torch.compile(model, backend="zero")
    else:
        call = torch.compile(model.to(at))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # of a mean over all results: larger ones diverge
    times, losses = [], []
    for step in range(5):
        if step == 2:
            peak = Peak()
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(ROWS, width, generator=draw).to(at, torch.bfloat16) for _ in range(2))
        x.requires_grad_()  # backward reads the weight for it
        seconds, loss = one_step(call, optimizer, [x, y])
        losses.append(loss)
        if step >= 2:
            times.append(seconds)
    row: dict[str, Any] = {"s": times, "losses": losses, "peak_bytes": peak.bytes(), "weight_bytes": nbytes}
    if budgeted:
        told, link = zero.inspect(model), load(fields["hardware"]).host_device
        (frame,) = told.frames
        row |= {
            "planned_bytes": told.memory.peak,
            "tiles": sum(bool(g.tile) for p in frame.programs.values() for g in p.gathers),
            "limit_s": 3 * nbytes / link.bytes_per_us / 1e6,
        }
    print(f"  {row}", flush=True)
    return row


def layer_row(r: dict[str, Any]) -> list[str]:
    s, limit = common.spread(r["s"]), r.get("limit_s")
    return [
        "within half of its bytes" if "planned_bytes" in r else "plain, on the device",
        common.show(s, 2),
        f"{limit:.2f}" if limit else "",
        f"{s['median'] / limit:.2f}" if limit else "",
        f"{r['peak_bytes'] / GIB:.2f}",
        f"{r['planned_bytes'] / GIB:.2f}" if "planned_bytes" in r else "",
        f"{r['losses'][-1]:.4f}",
        str(r.get("tiles", "")),
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
    call = {k: v for k, v in vars(args).items() if k not in ("json", "model", "gpt", "ways")} | {
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
