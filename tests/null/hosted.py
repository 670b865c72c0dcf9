"""Plans of models whose shards rest on the host of an accelerator, or in files behind it."""

from __future__ import annotations

import torch
from torch import nn

from zero_compiler.ir.program import Program
from zero_compiler.tools.planning import report


def deep(depth=4, width=16, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, bias=bias), nn.Tanh()) for _ in range(depth))
    )


def planned(model=None, world=2, x=None, **fields):
    """The report of a plan; on the host unless told otherwise."""
    fields = {"offload_params": "host", "bucket_bytes": 0} | fields
    torch._dynamo.reset()
    model = model or deep(4, 64, bias=False)
    return report(model, (torch.ones(2, 64) if x is None else x,), world, **fields)


def programs(**fields) -> dict[str, Program]:
    return planned(**fields).frames[0].programs


TIERS = ("host", "nvme")


def on(tier, folder) -> dict[str, str]:
    return {"offload_params": tier} | ({"nvme_dir": str(folder)} if tier == "nvme" else {})
