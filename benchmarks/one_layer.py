"""A single linear layer larger than the memory of its process: tiles of the weight, everything else in files.

    python benchmarks/one_layer.py DIR --json benchmarks/results/one_layer/HOST.json

First plain PyTorch trains one nn.Linear without a limit, and leaves its first values in DIR as safetensors. Then
zero_compiler trains it from there under a limit of memory that is below the bytes of the fp32 weight: the module is
made on the meta device, and parameters, gradients and optimizer states rest in files in DIR. Nothing is said about
tiles: `memory_budget_bytes` is given, and the compiler finds that the weight must be gathered, and its gradient
reduced, in tiles. Both are a process of their own with as many threads as there are cores; AdamW, one small batch.

The limit holds for our process from before torch is imported: by a memory cgroup, page cache included, where one can
be made, and by samples of RssAnon + RssShmem + RssFile in any case. "Predicted" is the plan's peak, buffers of files
and of `zero.optimizer` included, beside what the process had resident before the model was made. Those buffers (a
quarter of a GiB) and the libraries are of fixed size, so a limit below half a GiB is too small for any layer;
`--limit-mib 0` sets none, for a layer that is tried at a small size. DIR needs room for five times the weight.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import large
import limits

MIB = 1 << 20
TOLERANCE = 1e-4  # relative, of losses: sums over tiles are rounded in another order
FILE = "weights.safetensors"


def main() -> None:
    call = common.called()
    if call is not None:
        {"plain": plain, "ours": ours}[call["name"]](call)
        return
    parser = common.parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--inputs", type=int, default=16384)
    parser.add_argument("--outputs", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=16, help="of the batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-mib", type=int, default=1536, help="0: none")
    parser.add_argument("--budget-mib", type=int, help="memory_budget_bytes; default: half of the limit")
    parser.add_argument(
        "--compute",
        choices=("aten", "inductor"),
        default="aten",
        help="the C++ compiler that Inductor starts is under the limit too",
    )
    parser.add_argument(
        "--hardware",
        help="what `zero-compiler calibrate` wrote, for the plan; default: calibrate first; none: no machine is known",
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.hardware != "none":
        common.hardware(args.hardware, 1, directory=args.directory, threads=common.cores())
    weight = 4 * args.inputs * args.outputs
    limit = args.limit_mib * MIB
    if limit >= weight:
        parser.error(f"the weight has {weight // MIB} MiB: --limit-mib must be less")
    m = common.machine()
    print(common.machine_text(m), flush=True)
    with tempfile.TemporaryDirectory(prefix="one-layer-", dir=args.directory) as folder:
        keys = ("inputs", "outputs", "rows", "steps", "compute")
        given = {k: getattr(args, k) for k in keys}
        given["budget"] = (args.budget_mib or args.limit_mib // 2) * MIB
        call = {**given, "folder": folder}
        result: dict[str, Any] = {"machine": m, "weight_bytes": weight, "arguments": given}
        for name, bound in (("plain", 0), ("ours", limit)):
            result[name] = run({**call, "name": name, "limit": bound})
            print(f"{name}: {result[name]['s']} s, losses {result[name]['losses']}", flush=True)
    text = report(result)
    print(text)
    if args.json:
        common.save(args.json, result, text)
    check(result)


def check(result: dict[str, Any]) -> None:
    """Raises SystemExit where a loss is another than plain PyTorch's, or the limit was passed."""
    for got, want in zip(result["ours"]["losses"], result["plain"]["losses"], strict=True):
        if not abs(got - want) <= TOLERANCE * abs(want):
            raise SystemExit(f"loss {got} differs from plain PyTorch's {want}")
    memory = result["ours"]["memory"]
    # A cgroup leaves out pages of libraries that another process had brought to memory before.
    took = memory["cgroup_peak_bytes"] or memory["sampled_peak_bytes"]
    if 0 < memory["limit_bytes"] < took:
        raise SystemExit(f"{took:,} bytes were taken, above the limit")


def run(call: dict[str, Any]) -> dict[str, Any]:
    """One process, under ``call["limit"]`` bytes (0: no limit); what it found, and what memory it took."""
    with limits.cgroup(call["limit"] or 1 << 50) as group:
        env = os.environ | {
            common.RANK_CALL: json.dumps(call),
            "OMP_NUM_THREADS": str(common.cores()),
        }
        command = [sys.executable, os.path.abspath(__file__)]
        with subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                if call["limit"]:
                    group.enter(child.pid)
                with limits.Watch(child.pid) as watch:
                    child.stdin.write("\n")  # it waits for this, and imports nothing before
                    child.stdin.flush()
                    said = [json.loads(line) for line in child.stdout if line.startswith("{")]
            finally:
                child.kill()
        if not said:
            why = ": over the limit" if child.returncode == -9 else ""
            raise SystemExit(
                f"the training process ended with {child.returncode}{why}; resident: {watch.parts}"
            )
        memory = {
            "limit_bytes": call["limit"],
            "cgroup": group.why or "yes",
            "cgroup_peak_bytes": group.peak_bytes() if call["limit"] else None,
            "sampled_peak_bytes": watch.peak_bytes,
            "sampled_parts": watch.parts,
        }
    return said[-1] | {"memory": memory}


# In the processes that train -------------------------------------------------------------------------------------


def plain(call: dict[str, Any]) -> None:
    sys.stdin.readline()
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = layer(call)
    save_file(model.state_dict(), os.path.join(call["folder"], FILE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    print(json.dumps(train(call, model, optimizer)), flush=True)


def ours(call: dict[str, Any]) -> None:
    sys.stdin.readline()
    import torch

    import zero_compiler as zero

    before = sum(limits.resident(os.getpid()).values())
    files = {f"offload_{kind}": "nvme" for kind in large.KINDS}
    with torch.device("meta"):
        model = layer(call)
    zero.shard(
        model,
        nvme_dir=call["folder"],
        hardware=os.environ.get(common.HARDWARE),
        memory_budget_bytes=call["budget"],
        **files,
    )
    zero.load_safetensors(model, os.path.join(call["folder"], FILE))
    optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-3, fused=True)
    compiled = torch.compile(model, backend="zero", options={"compute": call["compute"]})
    found = train(call, compiled, optimizer)
    report_ = zero.inspect(model)
    (frame,) = report_.frames
    found |= {
        "before_bytes": before,
        "planned_peak_bytes": report_.memory.peak,
        "predicted_s": sum(t.total_us for t in frame.timelines.values()) / 1e6,
        "tiles": tiles(frame),
    }
    print(json.dumps(found), flush=True)


def tiles(frame: Any) -> dict[str, int]:
    """Tiles of the weight in each phase."""
    return {phase: sum(bool(g.tile) for g in p.gathers) for phase, p in frame.programs.items()}


def layer(call: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Linear(call["inputs"], call["outputs"])


def train(call: dict[str, Any], model: Any, optimizer: Any) -> dict[str, Any]:
    """Losses and seconds of each step; the inputs have a gradient too, so that backward reads the weight."""
    import torch

    losses, seconds = [], []
    for step in range(call["steps"]):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(call["rows"], call["inputs"], generator=draw).requires_grad_()
        y = torch.randn(call["rows"], call["outputs"], generator=draw)
        began = time.perf_counter()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(round(time.perf_counter() - began, 3))
        losses.append(loss.item())
    return {"losses": losses, "s": seconds}


# Report ----------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    args, mine = result["arguments"], result["ours"]
    memory, weight = mine["memory"], result["weight_bytes"]
    apart = max(abs(a / b - 1) for a, b in zip(mine["losses"], result["plain"]["losses"], strict=True))
    predicted = mine["before_bytes"] + mine["planned_peak_bytes"]
    head = ["", "limit MiB", "peak MiB, sampled", "with page cache", "predicted MiB", "s a step", "losses"]
    rows = []
    for name, one in (("plain PyTorch", result["plain"]), ("zero_compiler", mine)):
        took = one["memory"]
        rows.append(
            [
                name,
                _mib(took["limit_bytes"]) if took["limit_bytes"] else "none",
                _mib(took["sampled_peak_bytes"]),
                _mib(took["cgroup_peak_bytes"]),
                _mib(predicted) if one is mine else "",
                common.show(common.spread(one["s"][1:] or one["s"]), 2),
                ", ".join(f"{loss:.6f}" for loss in one["losses"]),
            ]
        )
    parts = ", ".join(f"{k} {_mib(v)}" for k, v in memory["sampled_parts"].items())
    shape = f"nn.Linear({args['inputs']}, {args['outputs']})"
    return "\n".join(
        [
            common.heading("A layer larger than memory", result["machine"]).rstrip(),
            "",
            f"{shape}, fp32: a weight of {_mib(weight)} MiB, {_mib(4 * weight)} MiB with its gradient and two states "
            f"of AdamW; {args['rows']} rows a step. Losses differ by at most {apart:.1e} of themselves.",
            "",
            common.table("Beside plain PyTorch without a limit", head, rows),
            f"Memory cgroup: {memory['cgroup']}. At the sampled peak: {parts} MiB. Predicted: "
            f"{_mib(mine['before_bytes'])} MiB of Python and libraries before the model, "
            f"{_mib(mine['planned_peak_bytes'])} of the plan within `memory_budget_bytes` {_mib(args['budget'])}. The "
            f"weight is gathered in {mine['tiles']['forward']} tiles in forward and {mine['tiles']['backward']} in "
            f"backward; the two are predicted to take {mine['predicted_s']:.2f} s. Seconds are those after the "
            "first step.",
            "",
        ]
    )


def _mib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / MIB:,.0f}"


if __name__ == "__main__":
    main()
