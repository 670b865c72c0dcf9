"""A small GPT over bytes, in plain PyTorch: nothing in it knows of sharding or ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    vocabulary: int = 256


class Block(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.heads = cfg.heads
        self.norm1 = nn.LayerNorm(cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)
        self.norm2 = nn.LayerNorm(cfg.width)
        self.up = nn.Linear(cfg.width, 4 * cfg.width)
        self.down = nn.Linear(4 * cfg.width, cfg.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.token = nn.Embedding(cfg.vocabulary, cfg.width)
        self.position = nn.Embedding(cfg.context, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocabulary, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)
        for block in self.blocks:
            # Residual branches start small, as in GPT-2.
            for branch in (block.out, block.down):
                nn.init.normal_(branch.weight, std=0.02)
                nn.init.zeros_(branch.bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the bytes ``y`` that follow the bytes ``x``, in nats a byte."""
        hidden = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def planned() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """For `zero-compiler plan examples.gpt:planned`: a model and inputs of its shapes; nothing of it is allocated."""
    return _with_inputs(GPTConfig(layers=12, width=768, heads=12, context=1024), batch=4)


def trillion() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The same with 1.0 trillion parameters: ZeRO-Infinity's 1T (Rajbhandari et al. 2021, table 1)."""
    cfg = GPTConfig(layers=128, width=25600, heads=160, context=1024, vocabulary=50304)
    return _with_inputs(cfg, batch=1)


def _with_inputs(cfg: GPTConfig, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    x = torch.zeros(batch, cfg.context, dtype=torch.long)
    return GPT(cfg), (x, x)
