"""Weights in tiles in models that use them in more ways than one: products of weights, weights as activations, what is
added to every token, and heads of several calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import SimulatedModel
from heads import VOCAB, WIDTH, batch, flat
from marks import slow, thorough
from null.passes.tiling.test_tile_loss import notes
from torch import nn

BATCH, TOKENS = 3, 10


class Of(nn.Module):
    """``fn`` of a batch and of weights of these shapes."""

    def __init__(self, fn: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn, self.w = fn, nn.ParameterList(torch.randn(s) * 0.3 for s in shapes)

    def forward(self, x):
        return self.fn(
            x, *[self.w[k] for k in range(len(self.w))]
        )  # Dynamo of torch 2.11 unpacks no ParameterList


def experts(x, w):
    return torch.matmul(x.unsqueeze(1), w)


def latents(x, q, w):
    return F.linear(q, w) @ x.transpose(1, 2)


WAYS: dict[str, tuple[Any, ...]] = {
    "a sum with a product of two weights": (
        lambda x, w, b, a: F.linear(x, w + b @ a),
        (29, 8),
        (29, 2),
        (2, 8),
    ),
    "the same, normalised": (
        lambda x, w, b, a, m: F.linear(x, m * F.normalize(w + b @ a, dim=1)),
        (29, 8),
        (29, 2),
        (2, 8),
        (29, 1),
    ),
    "a product of two weights": (lambda x, u, v: x @ (u @ v), (8, 16), (16, 29)),
    "an embedding of a product": (lambda x, u, v: F.embedding(x.argmax(-1), u @ v), (8, 16), (16, 29)),
    "a weight that is an activation": (latents, (6, 8), (8, 8)),
    "a sum of two weights": (lambda x, u, v: F.linear(x, u + v), (29, 8), (29, 8)),
    "positions": (lambda x, p, w: F.linear(x + p, w), (TOKENS, 8), (29, 8)),
    "positions of a longer table": (
        lambda x, p, w: F.linear(x + p[: x.shape[1]], w),
        (2 * TOKENS, 8),
        (29, 8),
    ),
    "experts that all tokens go to": (experts, (4, 8, 6)),
    "queries for every row of the batch": (
        lambda x, q, w: torch.bmm(F.linear(q.expand(x.shape[0], -1, -1), w), x.transpose(1, 2)),
        (1, 6, 8),
        (8, 8),
    ),
    "a product by elements": (lambda x, w: (x.unsqueeze(-2) * w).sum(-1), (29, 8)),
    "einsum": (lambda x, w: torch.einsum("bsh,vh->bsv", x, w), (29, 8)),
}


COMPILED = (*list(WAYS)[:2], "positions")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "compute"),
    [
        *((way, "inductor") for way in COMPILED),
        *((way, "aten") for way in WAYS if way not in COMPILED),
        *thorough(*((way, "aten") for way in COMPILED)),
        *thorough(*((way, "inductor") for way in WAYS if way not in COMPILED)),
    ],
)
def test_gradients_are_those_of_whole_weights(way, compute):
    fn, *shapes = WAYS[way]
    model = SimulatedModel(Of(fn, *shapes), 2, stage=3, tile_bytes=100, compute=compute)
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(BATCH, TOKENS, 8, generator=draw),) for _ in range(2)]
    model.check(batches, lambda out: out.sin().sum(), rtol=1e-4, atol=1e-4)
    assert notes(model)


class Headed(nn.Module):
    """A head with a bias, and the loss that ``fn`` makes of hidden states."""

    def __init__(self, fn: Callable[..., torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn = fn
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=bias)
        self.more = nn.Parameter(torch.randn(VOCAB) * 0.3)

    def forward(self, ids, labels):
        return self.fn(self, torch.tanh(self.embed(ids)), labels)


def shifted(m, h, labels):
    return F.cross_entropy(flat(m.head(h[:, :-1])), labels[:, 1:].reshape(-1))


def turned(m, h, labels):
    return F.cross_entropy(flat(m.head(h.transpose(0, 1))), labels.t().reshape(-1))


def chunked(m, h, labels):
    pairs = zip(h.chunk(2, 1), labels.chunk(2, 1), strict=True)
    return (
        sum(F.cross_entropy(flat(m.head(a)), b.reshape(-1), reduction="sum") for a, b in pairs)
        / labels.numel()
    )


def added(m, h, labels):
    return F.cross_entropy(flat(F.linear(h, m.head.weight) + m.more), labels.view(-1))


def twice(m, h, labels):
    return F.cross_entropy(flat(m.head(h) - m.head(h).mean(-1, keepdim=True)), labels.view(-1))


@pytest.mark.slow
@pytest.mark.parametrize("tile_bytes", [800, *thorough(17 * VOCAB * 4)])
@pytest.mark.parametrize("fn", [shifted, *slow(turned, chunked, added, twice)])
def test_heads_whose_tokens_have_two_dimensions(fn, tile_bytes):
    """Sums over tokens, which are one dimension in a tile, have the dimensions of the model outside of it."""
    model = SimulatedModel(Headed(fn), 2, stage=3, tile_bytes=tile_bytes)
    model.check([batch(0, 32), batch(1, 32)], lambda out: 1.7 * out, rtol=3e-5, atol=3e-5)
    assert [n for n in notes(model) if "tiled: logits of head.weight" in n], notes(model)
