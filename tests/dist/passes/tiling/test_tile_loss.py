"""Tiles on two ranks: the curve of plain data-parallel PyTorch, with real models and their own losses."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import pytest
import torch
from compare import Twin
from dist.spawn import run_ranks
from marks import thorough
from models import FAMILIES, VOCAB
from torch import nn

import zero_compiler as zero

pytestmark = pytest.mark.dist


class LossAlone(nn.Module):
    """A model of ``transformers`` that returns its loss and no logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


def data(name: str, rank: int, step: int) -> dict[str, Any]:
    batch = FAMILIES[name].data(rank, step)
    batch["labels"][:, : 1 + rank] = -100
    return batch


def sharded(model: nn.Module, **fields: Any) -> nn.Module:
    return torch.compile(zero.shard(model, **fields), backend="zero", dynamic=False)


def train(rank: int, world: int, name: str, fields: dict[str, Any], want: str) -> list[str]:
    try:
        twin = Twin(
            LossAlone(FAMILIES[name].model()),
            functools.partial(sharded, **fields),
            functools.partial(torch.optim.AdamW, lr=3e-3, eps=1e-3),
            where=f"{name} {fields}",
        )
        twin.train(lambda m, i: m(**data(name, rank, i)), 4)
        text = str(zero.inspect(twin.model))
        if want not in text:
            twin.say(f"the report does not say {want!r}:\n{text}")
        return twin.errors
    except Exception:
        return [traceback.format_exc()]


# Each model, one with a tied head; thoroughly both ways to compute, which tests/null has of the passes.
@pytest.mark.parametrize(
    ("name", "stage", "compute"),
    [
        ("gpt2", 0, "aten"),
        ("llama", 3, "aten"),
        *thorough(("llama", 2, "inductor"), ("gpt2", 3, "inductor")),
    ],
)
@pytest.mark.timeout(600)
def test_logits_in_tiles(name: str, stage: int, compute: str) -> None:
    fields = {"stage": stage, "compute": compute, "tile_bytes": 4 * VOCAB * 4}
    weight = "model.transformer.wte.weight" if name == "gpt2" else "model.lm_head.weight"
    # Where the weight is cut between ranks it is larger than a tile, too.
    want = f"tiled: logits of {weight}, their gradient with them in forward: 4 tiles of 4 rows"
    if stage:
        want = f"tiled: logits of {weight}, made again in "
    for errors in run_ranks(train, 2, name, fields, want, timeout=400.0):
        assert not errors, "\n".join(errors)
