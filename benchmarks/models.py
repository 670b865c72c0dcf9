"""The models that the benchmarks train: plain PyTorch, no library's own tricks, the same module for every mode.

Each forward takes tokens and targets and returns the mean loss in fp32. ``blocks`` are the repeated layers, which
FSDP2 wraps one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, bias=True, rotary=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attn = Attention(width, heads, bias=False, rotary=True)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Experts(nn.Module):
    """A mixture of experts with a fixed capacity (GShard, Lepikhin et al. 2020): all shapes are static."""

    def __init__(self, width: int, hidden: int, experts: int, top: int = 2, slack: float = 1.25) -> None:
        super().__init__()
        self.experts, self.top, self.slack = experts, top, slack
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        count = tokens.shape[0]
        capacity = int(self.slack * self.top * count / self.experts)
        weight, chosen = self.router(tokens).float().softmax(-1).topk(self.top, -1)  # [N, top]
        taken = F.one_hot(chosen, self.experts).reshape(count * self.top, self.experts)
        place = (taken.cumsum(0) * taken).sum(-1) - 1  # place of each choice in its expert's queue
        fits = place < capacity
        # A choice that does not fit goes to a row that no expert reads.
        row = torch.where(fits, chosen.reshape(-1) * capacity + place, self.experts * capacity)
        queue = tokens.new_zeros(self.experts * capacity + 1, tokens.shape[-1])
        queue = queue.index_copy(0, row, tokens.repeat_interleave(self.top, 0))
        h = queue[:-1].view(self.experts, capacity, -1)
        h = torch.bmm(F.gelu(torch.bmm(h, self.up)), self.down)
        y = F.pad(h.reshape(self.experts * capacity, -1), (0, 0, 0, 1))[row]
        y = y * (weight.reshape(-1) * fits).to(y.dtype)[:, None]
        return y.view(count, self.top, -1).sum(1).view_as(x)


class MoEBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, bias=True, rotary=False)
        self.moe = Experts(width, hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.moe(self.ln2(x))


class LM(nn.Module):
    """Embedding, blocks, norm, head, mean cross entropy."""

    def __init__(
        self, vocab: int, width: int, length: int, blocks: Iterable[nn.Module], norm: nn.Module
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Spec:
    """A model and its batch on one rank."""

    about: str
    make: Callable[[], LM]
    vocab: int
    length: int
    batch: int

    def build(self) -> LM:
        """The same values on every rank and in every mode."""
        torch.manual_seed(0)
        return self.make()

    def data(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens that follow a noisy rule, so that there is something to learn."""
        g = torch.Generator().manual_seed(1000 * step + rank)
        first = torch.randint(0, self.vocab, (self.batch, 1), generator=g)
        noise = torch.randint(0, 4, (self.batch, self.length + 1), generator=g)
        text = (first + (7 + noise).cumsum(1)) % self.vocab
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def gpt(layers: int, width: int, vocab: int, length: int) -> LM:
    heads = max(1, width // 64)
    return LM(vocab, width, length, [GPTBlock(width, heads) for _ in range(layers)], nn.LayerNorm(width))


def llama(layers: int, width: int, hidden: int, vocab: int, length: int) -> LM:
    blocks = [LlamaBlock(width, width // 64, hidden) for _ in range(layers)]
    return LM(vocab, width, length, blocks, nn.RMSNorm(width))


def moe(layers: int, width: int, hidden: int, experts: int, vocab: int, length: int) -> LM:
    blocks = [MoEBlock(width, width // 64, hidden, experts) for _ in range(layers)]
    return LM(vocab, width, length, blocks, nn.LayerNorm(width))


MODELS: dict[str, Spec] = {
    "gpt-6x512": Spec(
        "GPT, 6 layers, width 512, vocabulary 4096, sequence 256, batch 4 a rank",
        lambda: gpt(6, 512, 4096, 256),
        4096,
        256,
        4,
    ),
    "gpt-6x512-short": Spec(
        "GPT, 6 layers, width 512, vocabulary 4096, sequence 64, batch 1 a rank",
        lambda: gpt(6, 512, 4096, 64),
        4096,
        64,
        1,
    ),
    "gpt-12x1024": Spec(
        "GPT, 12 layers, width 1024, vocabulary 4096, sequence 128, batch 1 a rank",
        lambda: gpt(12, 1024, 4096, 128),
        4096,
        128,
        1,
    ),
    "llama-vocab": Spec(
        "Llama-like, 6 layers, width 512, hidden 1408, vocabulary 32000, sequence 128, batch 2 a rank",
        lambda: llama(6, 512, 1408, 32000, 128),
        32000,
        128,
        2,
    ),
    "deep-60": Spec(
        "GPT, 60 layers, width 128, vocabulary 1024, sequence 128, batch 4 a rank",
        lambda: gpt(60, 128, 1024, 128),
        1024,
        128,
        4,
    ),
    "moe": Spec(
        "Mixture of Experts, 4 layers, width 512, 8 experts of 1024, vocabulary 4096, sequence 128, batch 2 a rank",
        lambda: moe(4, 512, 1024, 8, 4096, 128),
        4096,
        128,
        2,
    ),
    "tiny": Spec(
        "GPT, 2 layers, width 64, for trying the benchmark itself", lambda: gpt(2, 64, 256, 32), 256, 32, 2
    ),
    "tiny-6x256": Spec(
        "GPT, 6 layers, width 256, vocabulary 1024, sequence 128, batch 1 a rank",
        lambda: gpt(6, 256, 1024, 128),
        1024,
        128,
        1,
    ),
    "tiny-16x256": Spec(
        "GPT, 16 layers, width 256, vocabulary 1024, sequence 128, batch 1 a rank",
        lambda: gpt(16, 256, 1024, 128),
        1024,
        128,
        1,
    ),
    "tiny-moe": Spec(
        "Mixture of Experts, 2 layers, width 64, for trying the benchmark itself",
        lambda: moe(2, 64, 128, 4, 256, 32),
        256,
        32,
        2,
    ),
}

# For a device of 80 GB and more: no other benchmark takes them up by itself.
OF_A_GPU: dict[str, Spec] = {
    "gpt-1.5b": Spec(
        "GPT, 24 layers, width 2304, vocabulary 50304, sequence 1024, batch 4 a rank",
        lambda: gpt(24, 2304, 50304, 1024),
        50304,
        1024,
        4,
    ),
}
