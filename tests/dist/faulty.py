"""Ranks with a short timeout, and the error that a call on them raises."""

from __future__ import annotations

import time

import torch
from dist.spawn import run_ranks
from torch import nn

ATEN = {"compute": "aten"}
GROUP_TIMEOUT = 20.0


def ranks(fn, world, *args, **kwargs):
    return run_ranks(fn, world, *args, timeout=240, group_timeout=GROUP_TIMEOUT, **kwargs)


class Net(nn.Module):
    """`branch` chooses what runs: batch-dependent graphs."""

    def __init__(self, width=6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)
        self.other = nn.Linear(width, 3)

    def forward(self, x, branch=0):
        h = torch.relu(self.first(x))
        return (self.other(h) if branch else self.second(h)).square().mean()


def net(*args, seed=0):
    torch.manual_seed(seed)
    return Net(*args)


def batch(rows=5, seed=1):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def use(model, how):
    return torch.compile(model, backend="zero", options=ATEN) if how == "compiled" else model


def expect(kind, fn, *parts):
    """The text of the error that `fn` raises, and the seconds until it came."""
    start = time.monotonic()
    try:
        fn()
    except kind as error:
        text = str(error)
        for part in parts:
            assert part in text, text
        return text, time.monotonic() - start
    raise AssertionError(f"no {kind.__name__}")
