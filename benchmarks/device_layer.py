"""One layer of `--layer` features on an accelerator, both ways, in bf16: plain, and beyond its memory budget.

    python benchmarks/device_layer.py --layer 65536 --json FILE

On the device with plain PyTorch; and on the host, with half of its weight as the budget of the device: it passes in
tiles. Beside the limit: its weight to the device in forward and in backward, and its gradient back, over the measured
link. Without an accelerator, which has a host, there are no rows.
"""

from __future__ import annotations

import os
from typing import Any

import common
import torch
from one_device import GIB, Peak, Results, called, device, forget, meter, one_step

LAYER = ["weight", "s a step", "limit", "/ limit", "peak, GiB", "planned", "loss of the last step", "tiles"]
ROWS = 16


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--layer", type=int, default=1 << 16, help="features")
    args = called(parser)
    title = f"A linear layer of {args.layer:,} by {args.layer:,}, bf16, {ROWS} rows, SGD"
    results = Results(
        "One device",
        "layer",
        args.json,
        lambda rows: common.table(title, LAYER, [layer_row(r) for r in rows]),
    )
    for budgeted in (False, True) if device().type != "cpu" else ():
        results.add(layer(args.layer, budgeted))
    print(results.text())


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


if __name__ == "__main__":
    main()
