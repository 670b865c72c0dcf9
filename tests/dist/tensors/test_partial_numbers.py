"""Numbers that are taken from shards, whose rows lie on two ranks."""

from __future__ import annotations

import logging

import pytest
import torch
from dist.cases import Cases
from torch import nn

import zero_compiler as zero
from zero_compiler.tensors import partial_numbers

pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__)


@cases.add
def a_norm_of_this_ranks_rows_is_said_once(rank: int) -> list[str]:
    partial_numbers._said.clear()
    logger, said = logging.getLogger("zero_compiler"), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    model = zero.shard(nn.Linear(4, 4), stage=3, device="cpu")
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    norm = model.weight.grad.norm()
    logger.addHandler(handler)
    try:
        total = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item()
        model.bias.grad.full_tensor()[0].item()
        whole = norm.full_tensor().item()
        before = len(said)
        parts = [norm.item() for _ in range(2)]
    finally:
        logger.removeHandler(handler)
    errors = []
    if before or [".full_tensor().item()" in text for text in said] != [True]:
        errors.append(f"{before} were said before, and {said} then")
    # Each of the two ranks has half of the elements, all of which are 3 on average.
    if abs(whole - 12) > 1e-5 or abs(total**2 - 160) > 1e-3 or any(abs(p**2 - 72) > 1e-3 for p in parts):
        errors.append(f"norms are {whole}, {total} and {parts}")
    return errors


@pytest.mark.parametrize("name", cases.names)
def test_numbers(name: str) -> None:
    cases.check(name)
