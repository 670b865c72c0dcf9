"""A small transformer and plans of tensor parallelism for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCAB, WIDTH, HEAD = 12, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """The rows of ``up`` on a tensor-parallel rank are seven: data ranks do not divide them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def tokens(data_rank: int, step: int, length: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randint(0, VOCAB, (2, length), generator=generator)


def by_columns(model: nn.Module, mesh: Any) -> nn.Module:
    """Linear layers by columns and rows (Shoeybi et al. 2019); norms and the scalar stay plain."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.[qkv]": ColwiseParallel(),
        "blocks.*.attention.o": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def by_sequence(model: nn.Module, mesh: Any) -> nn.Module:
    """The same, with activations between them cut along the sequence (Korthikanti et al. 2022)."""
    cut, whole = Shard(1), Replicate()
    prepare = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,))
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "blocks.*.norms.*": SequenceParallel(),
        "blocks.*.attention": prepare,
        "blocks.*.attention.[qkv]": ColwiseParallel(),
        "blocks.*.attention.o": RowwiseParallel(output_layouts=cut),
        "blocks.*.up": ColwiseParallel(input_layouts=cut),
        "blocks.*.down": RowwiseParallel(output_layouts=cut),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }
    return parallelize_module(model, mesh, plan)
