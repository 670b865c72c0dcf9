"""What `tile_bytes` and `activation_budget_bytes` promise holds at sizes that come after the first ones, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError

VOCAB, WIDTH = 512, 16
TILE = 16 * VOCAB * 4


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(torch.tanh(self.embed(ids))).view(-1, VOCAB), labels.view(-1))


@pytest.mark.slow
def test_no_operator_makes_more_logits_than_tile_bytes_however_long_sequences_become():
    """Tiles were as many as for the first lengths, and so as large as it takes: at last the whole logits."""
    torch._dynamo.reset()
    plain, model = Headed(), zero.shard(Headed(), tile_bytes=TILE, compute="aten")
    step = torch.compile(model, backend="zero")
    frames = []
    for length in (32, 16, 48, 56, 64, 256, 256, 200):
        torch.manual_seed(length)
        ids, labels = torch.randint(0, 64, (1, length)), torch.randint(0, VOCAB, (1, length))
        step(ids, labels).backward()  # compiles, where it has to
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
            loss = step(ids, labels)
            loss.backward()
        assert max(e.self_cpu_memory_usage for e in taken.events()) <= TILE + 4096  # and small things
        torch.testing.assert_close(loss, plain(ids, labels))
        frames.append(len(zero.inspect(model).frames))
    assert frames[3] == frames[2]
    assert frames[-1] == frames[-2] == frames[-3]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_a_forward_that_would_save_more_than_its_budget_is_refused():
    torch._dynamo.reset()
    model = zero.shard(Deep(), activation_budget_bytes=1 << 20, compute="aten")
    step = torch.compile(model, backend="zero")
    for rows in (64, 128, 200, 256):
        step(torch.randn(rows, 64)).backward()
    for _ in range(2):
        with pytest.raises(
            MemoryBudgetError, match=r"=1,048,576 is .* too small for this call .* = 16,384 \(planned"
        ):
            step(torch.randn(16384, 64))
    step(torch.randn(256, 64)).backward()  # smaller ones still run
    with torch.no_grad():
        step(torch.randn(16384, 64))  # and what saves nothing
