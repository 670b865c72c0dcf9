"""What tests of the user's own loop share: models as they are tried, batches, and what their engines did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zero_compiler as zero
from zero_compiler.params.modules import sharded_models_of


def sharded(model: nn.Module, stage: int = 3, **fields: Any) -> nn.Module:
    return torch.compile(zero.shard(model, stage=stage, **{"compute": "aten", **fields}), backend="zero")


def eager(model: nn.Module, stage: int = 3, **fields: Any) -> nn.Module:
    return zero.shard(model, stage=stage, **fields)


def aot(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def data(rank: int, step: int, rows: int = 4, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def loss_of(rank: int, step: int, rows: int = 4) -> Callable[[nn.Module], torch.Tensor]:
    x, y = data(rank, step, rows)
    return lambda m: F.mse_loss(m(x), y)


def batches(rank: int, n: int) -> list[torch.Tensor]:
    return [torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(n)]


def counters(model: nn.Module) -> dict[str, int]:
    return dict(sharded_models_of(model)[0].runtime.engine.counters())


def moved(model: nn.Module, what: str, body: Callable[[], Any]) -> int:
    """How often the engine did ``what`` during ``body``."""
    before = counters(model)[what]
    body()
    return counters(model)[what] - before


def programs(model: nn.Module, phase: str) -> list[Any]:
    return [
        p
        for sharded_model in sharded_models_of(model)
        for frame in sharded_model.frames
        for p in frame.programs.values()
        if p.phase == phase
    ]
