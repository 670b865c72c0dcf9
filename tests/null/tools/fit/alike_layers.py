"""A small model of layers that are alike, and machines for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from machines import machine
from torch import nn

from zero_compiler.tools.fitting_plan import Asked
from zero_compiler.tools.model_source import ModelSource

WIDTH, LAYERS = 64, 6
PARAMETERS = LAYERS * (8 * WIDTH * WIDTH) * 4  # bytes


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


def hardware(tmp_path: Path, **told: object) -> str:
    """The path of a machine that keeps nothing in reserve."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(**{"device_reserve_bytes": 0, "nvme_bytes": None, **told})))
    return str(path)


def asked(
    tmp_path: Path, world: int = 4, batch: int | None = 8, model: nn.Module | None = None, **told: object
):
    torch._dynamo.reset()
    fields = {
        name: told.pop(name) for name in list(told) if name in ("stage", "optimizer", "offload_optimizer")
    }
    net = Net() if model is None else model

    def inputs(rows):
        return (torch.ones(rows or 8, WIDTH, device="meta"),)

    source = ModelSource(net, inputs, batch, "Net")
    return Asked(
        source, world, "cpu", {"compute": "aten", "hardware": hardware(tmp_path, **told), **fields}, batch
    )
