"""A net of blocks, and its batch: activations of every block are kept, made again, or wait elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, LAYERS = 16, 24, 4


class Block(nn.Module):
    """A transformer's block without its attention."""

    def __init__(self, width: int = WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), drop
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.drop, self.drop > 0)


class Net(nn.Module):
    def __init__(self, drop: float = 0.0, regions: tuple[int, ...] = (), block: type[Block] = Block) -> None:
        super().__init__()
        self.regions = regions  # blocks in a torch.utils.checkpoint
        self.first = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList(block(drop=drop) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for k, block in enumerate(self.h):
            x = checkpoint(block, x, use_reentrant=False) if k in self.regions else block(x)
        return x.square().mean()


def x(rows: int = TOKENS) -> tuple[torch.Tensor]:
    return (torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)),)
