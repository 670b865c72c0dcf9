"""A class whose instances are partitioned as they are made: the whole model never exists on one rank.

python examples/decorated.py
torchrun --standalone --nproc-per-node 2 examples/decorated.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import zero_compiler as zero


# compute="aten" compiles nothing, which suits a model as small as this one.
@zero.module(stage=3, device="cpu", compute="aten")
class Classifier(nn.Module):
    def __init__(self, inputs: int = 64, width: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, classes)
        # Initialisers mean what they mean on full weights, whatever rows lie on this rank.
        nn.init.orthogonal_(self.head.weight)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), label)


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0

    torch.manual_seed(0)  # every rank runs the same constructor on the same seed
    model = Classifier()
    here = sum(p.to_local().numel() for p in model.parameters())
    print(f"rank {rank}: {here:,} of {sum(p.numel() for p in model.parameters()):,} values", flush=True)

    compiled = torch.compile(model, backend="zero")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(rank)  # each rank draws its own part of the batch
    truth = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    for step in range(30):
        x = torch.randn(32, 64)
        loss = compiled(x, (x @ truth).argmax(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:>2}  loss {loss.item():.3f}", flush=True)

    with zero.gathered(model):  # full weights for a while, on every rank
        if rank == 0:
            error = (model.head.weight @ model.head.weight.T - torch.eye(10)).abs().max()
            print(f"the head has drifted from orthogonal by {error.item():.3f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
