"""A model whose parameters, gradients and states may rest on any tier, its training, and the same one in memory."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch
from compare import local
from torch import nn

import zero_compiler as zero
from zero_compiler.config import PLACED_FIELDS
from zero_compiler.errors import StorageError
from zero_compiler.storage.stores import FileStore

ALL = ("nvme",) * 3  # parameters, gradients and states in files


class Net(nn.Module):
    """With a scalar, which every rank holds on its device, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 200)
        self.inner = nn.Linear(200, 200)
        self.last = nn.Linear(200, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.inner(x))) * self.scale + self.frozen


def made(
    folder: Any, init: bool = False, tiers: tuple[str | None, ...] | None = None, **fields: Any
) -> nn.Module:
    """A sharded ``Net``, made inside ``zero.init`` or cut afterwards; ``tiers`` of parameters, gradients and states."""
    torch.manual_seed(0)
    if tiers is not None:
        fields |= dict(zip(PLACED_FIELDS, tiers, strict=True))
    if init:
        with zero.init(nvme_dir=str(folder), **fields):
            return Net()
    return zero.shard(Net(), nvme_dir=str(folder), **fields)


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options={"compute": "aten"} | options)


def train(
    model: nn.Module, run: Any, optimizer: Any, rank: int = 0, count: int = 3, begin: int = 0
) -> list[float]:
    losses = []
    for i in range(begin, begin + count):
        for k in range(2):  # the second adds to the gradients of the first
            torch.manual_seed(100 * i + 10 * k + rank)
            loss = run(torch.randn(8, 64)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reference(folder: Any) -> tuple[nn.Module, list[float]]:
    """A model in memory, and its losses."""
    want = made(folder)
    return want, train(want, compiled(want), torch.optim.AdamW(want.parameters()))


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local(a), local(b)), name


class Broken:
    """Requests of a store fail while it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.armed = False
        real = getattr(FileStore, method)

        def fake(store, span, buffer):
            if self.armed:
                raise StorageError(f"{method} of {span.label}: {os.strerror(errno.EIO)}", errno=errno.EIO)
            return real(store, span, buffer)

        monkeypatch.setattr(FileStore, method, fake)
