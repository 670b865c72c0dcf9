"""The model of the papers: GPT-2 as Megatron-LM writes it, with every layer checkpointed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

HEAD = 128  # elements of a head, in all shapes here that do not say otherwise


@dataclass(frozen=True)
class Shape:
    """A model by its sizes.

    Args:
        layers, width: of the transformer. ``head``: elements of an attention head.
        tokens: of a row.
        vocabulary: GPT-2's 50,257, padded to a multiple of 128 as Megatron-LM does.
        parts: over so many ranks tensor slicing (model parallelism) cuts each layer; the model is the part of one.
    """

    layers: int
    width: int
    head: int = HEAD
    tokens: int = 1024
    vocabulary: int = 50304
    parts: int = 1

    @property
    def layer_parameters(self) -> int:
        """Of one layer, all parts together."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def parameters(self) -> int:
        """Of the model, all parts together; the head has a weight of its own."""
        around = (2 * self.vocabulary + self.tokens + 2) * self.width
        return self.layers * self.layer_parameters + around

    @property
    def flops_per_token(self) -> int:
        """Of the products with weights in a forward; what the papers count, who leave attention's own out."""
        return 2 * self.parameters

    def words(self) -> str:
        """For a table."""
        return f"{self.layers:,} layers of {self.width:,}"


class Layer(nn.Module):
    """One layer, or the part of it that one of ``shape.parts`` ranks has."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, part = shape.width, shape.width // shape.parts
        self.head = shape.head
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * part)
        self.out = nn.Linear(part, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * part)
        self.down = nn.Linear(4 * part, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of hidden states ``[rows, tokens, width]``."""
        rows, tokens, _ = x.shape
        made = self.qkv(self.norm1(x)).view(rows, tokens, 3, -1, self.head)
        q, k, v = made.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 of a shape. Backward makes each layer again from its input, as in all runs of the papers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary // shape.parts, shape.width)
        self.position = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary // shape.parts, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of tokens ``y`` that follow ``x``, both ``[rows, tokens]``, in nats."""
        hidden = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def made(shape: Shape, rows: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model and inputs of one rank; nothing of them is allocated."""
    with torch.device("meta"):
        tokens = torch.zeros(rows, shape.tokens, dtype=torch.long)
        return GPT(shape), (tokens, tokens)
