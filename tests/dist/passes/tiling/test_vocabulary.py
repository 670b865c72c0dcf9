"""A head whose weight is gathered in tiles, on two ranks: the values of plain PyTorch, and the memory that it takes."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.runtime import _C

pytestmark = pytest.mark.dist
WIDTH, WORDS, TOKENS, STEPS = 256, 8192, 64, 3
WEIGHT = WORDS * WIDTH * 4  # bytes


class Net(nn.Module):
    """A small layer, and a head of ``words``; tied to an embedding where that is asked for."""

    def __init__(self, words: int = WORDS, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, WIDTH) if tied else None
        self.small = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = x + self.embed(labels.clamp(min=0)) / 16
        return F.cross_entropy(self.head(torch.tanh(self.small(x))) / 4, labels)


def batches(rank: int, words: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    gen = torch.Generator().manual_seed(rank)
    out = []
    for _ in range(count):
        labels = torch.randint(0, words, (TOKENS,), generator=gen)
        labels[: 3 + rank] = -100
        out.append((torch.randn(TOKENS, WIDTH, generator=gen), labels))
    return out


def trained(rank: int, given: nn.Module, micro: int = 1, **fields: Any) -> tuple[nn.Module, int]:
    """The model after some steps of ``micro`` batches each, and the most bytes that training took."""
    model = zero.shard(copy.deepcopy(given), stage=3, bucket_bytes=0, compute="aten", **fields)
    gc.collect()
    base = _C.meter_current()
    _C.meter_reset_peak()
    step = torch.compile(model, backend="zero")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)
    data = iter(batches(rank, given.head.out_features, STEPS * micro))
    for _ in range(STEPS):
        for k in range(micro):
            with zero.no_sync(model) if k < micro - 1 else torch.enable_grad():
                step(*next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, _C.meter_peak() - base


def plainly(world: int, model: nn.Module, micro: int) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)
    data = [iter(batches(rank, model.head.out_features, STEPS * micro)) for rank in range(world)]
    for _ in range(STEPS):
        for _ in range(micro):
            (sum(model(*next(d)) for d in data) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _equal(rank: int, world: int, words: int, tied: bool, micro: int, transport: str) -> list[str]:
    _C.meter_install()
    plain = Net(words, tied)
    model, _ = trained(rank, plain, micro, tile_bytes=WEIGHT // 8, transport=transport)
    want = plainly(world, plain, micro)
    with zero.gathered(model):
        for (name, a), b in zip(model.named_parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(
                a.detach(), b.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    return [line for line in str(zero.inspect(model)).splitlines() if "whole" in line]


@pytest.mark.parametrize(
    ("words", "tied", "micro", "transport"),
    [
        (WORDS, False, 1, "c10d"),
        (WORDS - 1, False, 2, "shared"),
        (WORDS - 1, True, 1, "shared"),
        (WORDS, True, 2, "c10d"),
    ],
)
def test_training_equals_plain(words: int, tied: bool, micro: int, transport: str) -> None:
    for whole in run_ranks(_equal, 2, words, tied, micro, transport):
        assert not whole


def _measured(rank: int, world: int) -> list[tuple[int, int]]:
    _C.meter_install()
    rows = []
    for tile_bytes in (WEIGHT, WEIGHT // 8, WEIGHT // 32):
        torch._dynamo.reset()
        model, peak = trained(rank, Net(), tile_bytes=tile_bytes, transport="c10d")
        rows.append((peak, zero.inspect(model).memory.peak))
        del model
    return rows


def test_peak_falls_by_the_weight_and_its_gradient() -> None:
    """Whole: the weight, and its gradient, which forward makes. In ``n`` tiles: at most three tiles of the weight (in
    use, arriving, staged) and three of the gradient (being made, two under way), beside this rank's half of it."""
    for whole, *tiled in run_ranks(_measured, 2):
        for (measured, planned), n in zip(tiled, (8, 32), strict=True):
            assert whole[0] - measured >= 2 * WEIGHT - WEIGHT // 2 - 6 * WEIGHT // n
            assert measured <= 1.05 * planned + 2 * TOKENS * WIDTH * 4 + 65536


def _filed(rank: int, world: int, folder: str) -> set[str]:
    plain = Net(WORDS - 1)
    fields = {"offload_params": "nvme", "offload_grads": "nvme", "nvme_dir": folder}
    model = zero.shard(copy.deepcopy(plain), stage=3, compute="aten", tile_bytes=WEIGHT // 8, **fields)
    step = torch.compile(model, backend="zero")
    want = copy.deepcopy(plain)
    for x, labels in batches(rank, WORDS - 1, 2):
        step(x, labels).backward()
        want(x, labels).backward()
    for (name, a), b in zip(model.named_parameters(), want.named_parameters(), strict=True):
        torch.testing.assert_close(
            a.grad.full_tensor(), b[1].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    (frame,) = zero.inspect(model).frames
    return {g.names[0] for p in frame.programs.values() for g in p.gathers if g.tile and g.hops}


def test_a_head_in_files_on_one_rank(tmp_path: Any) -> None:
    assert run_ranks(_filed, 1, str(tmp_path), group=False) == [{"head.weight"}]
