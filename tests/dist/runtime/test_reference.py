"""The engine's session and the reference executor run the same Program: equal results, bit for bit on two ranks.

With two ranks there is one order in which two numbers can be summed. Over shared memory the engine's plan is another
(its gathers move nothing), and the numbers are the same.
"""

from __future__ import annotations

import pytest
import torch
from dist.spawn import run_ranks
from harness import SimulatedModel
from torch import nn

import zero_compiler as zero

pytestmark = pytest.mark.dist


class Model(nn.Module):
    """Tied ends, uneven rows, a scalar, a frozen weight, a buffer, views that leave."""

    def __init__(self, buffers: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.odd = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(5, 6, bias=False)
        self.frozen.requires_grad_(False)
        # Statistics in float32 do not go with activations in bfloat16, in plain PyTorch either.
        self.norm = nn.BatchNorm1d(6) if buffers else nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        y = self.embed(tokens)
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        y = self.frozen(self.odd(y)) * self.scale
        return self.head(self.norm(y)), self.odd.weight[:3]


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (4 + step,), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(out) -> torch.Tensor:
    logits, rows = out
    return logits.float().square().mean() + rows.float().sum()


BF16 = {"stage": 3, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def engine_side(rank, world, fields, transport):
    model = zero.shard(Model("param_dtype" not in fields), transport=transport, **fields)
    compiled = torch.compile(model, backend="zero", options={"compute": "aten"}, dynamic=False)
    results = []
    for step in range(2):
        model.zero_grad()
        if step:  # gradients of one batch wait for those of the next
            with zero.no_sync(model):
                loss_of(compiled(tokens(rank, step))).backward()
        out = compiled(tokens(rank, step))
        loss_of(out).backward()
        grads = {
            n: None if p.grad is None else p.grad.to_local().clone() for n, p in model.named_parameters()
        }
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        results.append(([o.detach().clone() for o in out], grads, buffers))
    frames = zero.inspect(model).frames
    return results, [{ph: p.collectives() for ph, p in f.programs.items()} for f in frames]


@pytest.mark.parametrize(
    ("fields", "transport"),
    [
        ({"stage": 3}, "c10d"),
        ({"stage": 3, "bucket_bytes": 100}, "c10d"),
        ({"stage": 2}, "c10d"),
        ({"stage": 1}, "c10d"),
        ({"stage": 0}, "c10d"),
        (BF16, "c10d"),
        ({"stage": 3}, "shared"),
        ({"stage": 1}, "shared"),
        (BF16, "shared"),
    ],
    ids=["3", "3-small-buckets", "2", "1", "0", "3-bf16", "3-shared", "1-shared", "3-bf16-shared"],
)
def test_engine_and_reference_are_equal(fields, transport):
    ranks = run_ranks(engine_side, 2, fields, transport, timeout=240.0)
    torch.set_num_threads(1)  # as the ranks have: sums inside an operator depend on it
    simulated = SimulatedModel(Model("param_dtype" not in fields), 2, **fields)
    for step in range(2):
        for rows in simulated.rows:
            for row in rows.values():
                row.grad = None
        batch = [(tokens(k, step),) for k in range(2)]
        if step:
            simulated.sync = False
            simulated.step(batch, loss_of)
            simulated.sync = True
        outs = simulated.step(batch, loss_of)
        for rank in range(2):
            theirs, grads, buffers = ranks[rank][0][step]
            for mine, other in zip(outs[rank], theirs, strict=True):
                assert torch.equal(mine, other), (mine - other).abs().max()
            for name, row in simulated.rows[rank].items():
                if row.grad is None:
                    assert grads[name] is None, name
                else:
                    assert torch.equal(row.grad, grads[name]), (
                        f"{name}: {(row.grad - grads[name]).abs().max()}"
                    )
            for (name, other), buffer in zip(buffers.items(), simulated.model.buffers(), strict=True):
                assert torch.equal(simulated._buffers[id(buffer)][rank], other), name
    assert ranks[0][1] == ranks[1][1]
    if transport == "c10d":
        plans = [{phase: p.collectives() for phase, p in f.programs.items()} for f in simulated.frames]
        assert ranks[0][1] == plans
