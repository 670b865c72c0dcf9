"""Memory that is taken: what the kernel counts of a process; a net of MLPs, and its training on ranks."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import zero_compiler as zero
from zero_compiler.runtime import _C


class Block(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.drop, self.drop > 0)


class Net(nn.Module):
    def __init__(self, width: int, layers: int, drop: float = 0.0) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width, drop) for _ in range(layers))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x.square().mean()


def resident(line: str) -> int:
    """Bytes that the kernel counts of this process: ``VmRSS`` now, ``RssAnon`` of it, which are no file's, ``VmHWM`` at
    most since :func:`restart_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{line}:\s+(\d+) kB", status)[1]) * 1024


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def settled() -> int:
    """Bytes that the meter counts once nothing is left of models that are gone.

    Dynamo leaves cycles of what frames were compiled with, and others behind what those held on to.
    """
    torch._dynamo.reset()
    while gc.collect():
        pass
    return _C.meter_current()


def train(rank: int, net: dict[str, float], rows: int, compute: str = "aten", optimizer=None, **fields):
    """Losses of three steps, the measured peak in bytes, and the model: a ``Net`` of ``net``.

    At stage 3 and over the process group, unless ``fields`` say otherwise. ``optimizer`` makes one of a class and a
    model, as ``zero.optimizer`` does; None: AdamW of torch.
    """
    base = settled()
    torch.manual_seed(0)
    model = zero.shard(Net(**net), **({"stage": 3, "transport": "c10d"} | fields))
    gc.collect()
    _C.meter_reset_peak()
    step = torch.compile(model, backend="zero", options={"compute": compute})
    if optimizer is None:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    else:
        opt = optimizer(torch.optim.AdamW, model, lr=1e-3)
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(3):
        loss = step(torch.randn(rows, net["width"]))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, _C.meter_peak() - base, model
