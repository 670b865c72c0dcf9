"""Small models that end in logits and a loss, as users and ``transformers`` write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH = 61, 16
Loss = Callable[["Head", torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {}


def loss(fn: Loss) -> Loss:
    LOSSES[fn.__name__.replace("_", "-")] = fn
    return fn


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(-1, VOCAB)


@loss
def plain(m, h, labels):
    return F.cross_entropy(flat(m.head(h)), labels.view(-1))


@loss
def upcast(m, h, labels):
    """bf16 logits, and the loss in float32, as ``transformers`` does."""
    logits = F.linear(h.bfloat16(), m.head.weight.bfloat16())
    return F.cross_entropy(flat(logits.float()), labels.view(-1))


@loss
def shifted(m, h, labels):
    return F.cross_entropy(m.head(h)[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


@loss
def shifted_and_capped(m, h, labels):
    logits = torch.tanh(m.head(h) / 30) * 30
    logits = logits[..., :-1, :].contiguous().float()
    return F.cross_entropy(flat(logits), labels[..., 1:].reshape(-1))


@loss
def smoothed(m, h, labels):
    return F.cross_entropy(flat(m.head(h)), labels.view(-1), label_smoothing=0.1)


@loss
def weighted(m, h, labels):
    return F.cross_entropy(flat(m.head(h)), labels.view(-1), weight=m.classes)


@loss
def summed(m, h, labels):
    """As ``transformers`` divides by ``num_items_in_batch``."""
    return F.cross_entropy(flat(m.head(h)), labels.view(-1), reduction="sum") / 7


@loss
def with_z(m, h, labels):
    logits = flat(m.head(h)).float()
    return F.cross_entropy(logits, labels.view(-1)) + 1e-2 * (torch.logsumexp(logits, -1) ** 2).mean()


@loss
def masked(m, h, labels):
    each = F.cross_entropy(flat(m.head(h)), labels.view(-1), reduction="none")
    keep = (labels.view(-1) % 2).float()
    return (each * keep).sum() / keep.sum()


@loss
def weighted_and_smoothed(m, h, labels):
    return F.cross_entropy(flat(m.head(h)), labels.view(-1), weight=m.classes, label_smoothing=0.1)


@loss
def gathered(m, h, labels):
    """Log-probabilities of the labels, of which some are masked."""
    logp = m.head(h).log_softmax(-1)
    each = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(each * (labels >= 0)).sum() / (labels >= 0).sum()


@loss
def selective(m, h, labels):
    """The same without log-probabilities, which holds less; shifted."""
    logits, labels = m.head(h)[:, :-1], labels[:, 1:]
    chosen = torch.gather(logits, -1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    each = torch.logsumexp(logits, -1) - chosen
    return (each * (labels >= 0)).sum() / 5


@loss
def squared_loss(m, h, labels):
    """The gradient's factor depends on the loss itself."""
    return F.cross_entropy(flat(m.head(h)), labels.view(-1)) ** 2


class Head(nn.Module):
    """An embedding, and a head with a loss."""

    def __init__(self, of: str | Loss = "plain", bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of = LOSSES[of] if isinstance(of, str) else of
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("classes", torch.rand(VOCAB) + 0.5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.of(self, torch.tanh(self.embed(ids)), labels)


def batch(rank: int, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, of which some are to be ignored."""
    gen = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCAB, (2, length), generator=gen)
    labels = torch.randint(0, VOCAB, (2, length), generator=gen)
    labels[0, : 2 + rank] = -100
    return ids, labels
