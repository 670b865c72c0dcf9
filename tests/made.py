"""Models whose construction is hard to partition: each writes to its parameters in another way.

Plain construction under a seed is the reference; every rank runs the same code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import zero_compiler as zero


class Written(nn.Module):
    """Initialisers of torch and writes in place, on parameters of submodules that are done."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 8, padding_idx=2)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.rand(5, 5))
        nn.init.orthogonal_(self.blocks[0].weight)
        nn.init.trunc_normal_(self.blocks[1].weight, std=0.02)
        nn.init.kaiming_normal_(self.blocks[2].weight)
        nn.init.xavier_uniform_(self.blocks[3].weight)
        nn.init.eye_(self.blocks[4].weight)
        nn.init.sparse_(self.blocks[5].weight, 0.5)
        with torch.no_grad():
            self.blocks[0].weight[3].fill_(7.0)
            self.blocks[0].weight[:, 1] *= 2
            self.blocks[1].weight.data[2:5, 3].normal_()
            self.blocks[1].bias.data.normal_().mul_(0.5)
            row = self.blocks[2].weight.view(-1)[10:30]
            self.norm.weight.copy_(self.blocks[2].bias)  # another parameter, while a view of one lives
            row.add_(1.0)
            self.blocks[3].weight.t().add_(self.blocks[2].weight)
            self.norm.bias.add_(self.blocks[3].weight.norm() + self.blocks[3].weight.std())
            torch.nn.utils.vector_to_parameters(torch.randn(72), self.blocks[4].parameters())
            for p in self.blocks[5].parameters():
                p[p > 0] = 0.25
        self.blocks[5].bias.data = torch.randn(8)
        self.head.weight.data.copy_(self.emb.weight.data.flip(0))

    def forward(self, x):
        h = self.emb(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h)) * 0.1
        return self.head(self.norm(h)) * self.scale


class Tied(nn.Module):
    """Weights tied before and after the owner's end, and a whole parameter given to two children."""

    def __init__(self):
        super().__init__()
        shared = nn.Parameter(torch.randn(7, 5))
        self.left, self.right = Holder(shared), Holder(shared)
        self.emb = nn.Embedding(13, 5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.emb.weight
        nn.init.normal_(shared)
        nn.init.uniform_(self.head.weight)

    def forward(self, x):
        h = self.emb(x)
        h = h @ self.left.weight.t() @ self.right.weight
        return self.head(h)


class Holder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


class Applied(nn.Module):
    """``self.apply`` with an initialiser of its own, as many models have it; ranks with few or no rows."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1), nn.Linear(1, 6))
        self.apply(self._reset)

    def _reset(self, m):
        if isinstance(m, nn.Linear):
            m.weight.data.normal_(0.0, 0.5)
            nn.init.zeros_(m.bias)
        elif isinstance(m, nn.Embedding):
            m.weight.data.uniform_(-1, 1)
            m.weight.data[0].zero_()

    def forward(self, x):
        return self.body(self.emb(x))


class Copied(nn.Module):
    """Deep copies of a module, of one that is done and of one that torch met just now."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        layer = nn.Linear(6, 6)
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])
        for m in self.layers:
            m.reset_parameters()
        self.more = copy.deepcopy(self.layers[0])

    def forward(self, x):
        h = self.emb(x)
        for layer in [*self.layers, self.more]:
            h = torch.tanh(layer(h))
        return h


class Halved(nn.Module):
    """Conversion of what is partitioned already."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.lin = nn.Linear(6, 6)
        self.emb.to(torch.float64)
        self.lin.double()
        nn.init.normal_(self.lin.weight)
        self.skip = nn.Parameter(torch.ones(4, 6).t(), requires_grad=False)
        self.lin.weight.requires_grad_(False)

    def forward(self, x):
        return self.lin(self.emb(x)).sum() + self.skip.sum()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        for p in self.lstm.parameters():
            if p.dim() > 1:
                nn.init.orthogonal_(p)

    def forward(self, x):
        return self.lstm(self.emb(x))[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.encoder(self.emb(x)).flatten(0, 1))


class Parametrized(nn.Module):
    """Parametrizations repoint a parameter (``set_``) that torch met just now."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 5)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(5, 5))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        nn.init.normal_(self.conv.weight)
        self.ids = nn.Parameter(torch.arange(7), requires_grad=False)
        self.ids.data[2:4] = 9

    def forward(self, x):
        return self.turn(self.norm(self.emb(x)))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=61,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "written": Written,
    "tied": Tied,
    "applied": Applied,
    "copied": Copied,
    "halved": Halved,
    "recurrent": Recurrent,
    "encoder": Encoder,
    "parametrized": Parametrized,
    "gpt2": gpt2,
    "bert": bert,
}


def plain(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return BUILDERS[name]()


def in_context(name: str) -> nn.Module:
    with zero.init():
        return plain(name)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full values by name, tied names included; gathers on several ranks."""
    from torch.distributed.tensor import DTensor

    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
            tensor = tensor.full_tensor()
        elif isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        out[name] = tensor.detach()
    return out


def differing(a: nn.Module, b: nn.Module) -> list[str]:
    """Names, dtypes and bits in which two models differ."""
    left, right = full(a), full(b)
    if list(left) != list(right):
        return [f"names: {list(left)} and {list(right)}"]
    out = [n for n in left if left[n].dtype != right[n].dtype or not torch.equal(left[n], right[n])]
    grads = [(n, p.requires_grad) for n, p in a.named_parameters()]
    if grads != [(n, p.requires_grad) for n, p in b.named_parameters()]:
        out.append("requires_grad or ties")
    return out
