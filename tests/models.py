"""Small models with data and a loss: what the numerics tests train.

Every family is built from a seed, so that each rank can build the same plain and the same sharded model. A batch
depends on the rank and the step, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 61  # a prime: no world size divides it


@dataclass(frozen=True)
class Family:
    """A model to train.

    Args:
        build: makes the model; called under a seed.
        batch: keyword arguments of :attr:`loss`'s model, drawn with the generator that it is given.
        loss: scalar loss of a model and a batch.
        rounds: whether it rounds to fewer bits. Then one bit of float32 decides now and then about a unit of bf16,
            and the reference has to run the same operators: bit for bit, no tolerance is needed.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], dict[str, Any]]
    loss: Callable[[nn.Module, dict[str, Any]], torch.Tensor]
    rounds: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def data(self, rank: int, step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1000 * step + rank + 1)
        return self.batch(generator, step)


FAMILIES: dict[str, Family] = {}


def family(
    name: str, batch: Any, loss: Any, rounds: bool = False
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        FAMILIES[name] = Family(name, build, batch, loss, rounds)
        return build

    return add


def tokens(generator: torch.Generator, step: int, rows: int = 2, length: int = 8) -> dict[str, Any]:
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def images(generator: torch.Generator, step: int) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (4,), generator=generator),
    }


def vectors(generator: torch.Generator, step: int, rows: int = 4, width: int = 16) -> dict[str, Any]:
    return {
        "x": torch.randn(rows, width, generator=generator),
        "y": torch.randn(rows, width, generator=generator),
    }


def own_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss


def squared(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


# --- transformers -----------------------------------------------------------------------------------------------
# Tracing an operator takes longer than all steps of a test: two layers of GPT-2 show what one layer does to the next,
# and the others have one.


@family("gpt2", tokens, own_loss)
def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.loss_type = "ForCausalLM"  # what the library falls back to, with a warning that breaks the graph
    return model


@family("llama", tokens, own_loss)
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


@family("bert", tokens, own_loss)
def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@family("t5", tokens, own_loss)
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


@family("vit", images, own_loss)
def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=5,
            problem_type="single_label_classification",  # or the first call finds out, and the second compiles again
        )
    )


@family("mixtral", tokens, own_loss)
def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=3,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            output_router_logits=True,
            use_cache=False,
        )
    )


# --- written here -----------------------------------------------------------------------------------------------


class ResBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = None
        if stride != 1 or width != out:
            self.short = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.short is None else self.short(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.Sequential(ResBlock(6, 6, 1), ResBlock(6, 10, 2))
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def class_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


family("resnet", images, class_loss)(ResNet)


class Recurrent(nn.Module):
    """Dynamo does not capture nn.LSTM: its frame runs eagerly between two compiled ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.lstm = nn.LSTM(12, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def next_token_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


family("lstm", tokens, next_token_loss)(Recurrent)


class Broken(nn.Module):
    """A graph break in the middle, with a weight that is read on both sides of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return self.b(y) + self.a(y)


family("broken", vectors, squared)(Broken)


class Odd(nn.Module):
    """Everything about a parameter that is seldom tried together."""

    def __init__(self) -> None:
        super().__init__()
        self.few_rows = nn.Parameter(torch.randn(1, 16) * 0.3)  # fewer rows than ranks
        self.ragged = nn.Linear(16, 7)  # rows that ranks do not divide
        self.back = nn.Linear(7, 16, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))  # scalars
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.empty = nn.Parameter(torch.zeros(0, 16))  # zero-sized
        self.no_columns = nn.Parameter(torch.zeros(3, 0))
        self.never = nn.Parameter(torch.randn(5, 3))  # never used
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.shared = nn.Linear(16, 16, bias=False)  # used in several layers
        self.tied_in = nn.Embedding(9, 16)
        self.tied_out = nn.Linear(16, 9, bias=False)
        self.tied_out.weight = self.tied_in.weight
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.few_rows
        h = h + self.back(torch.tanh(self.ragged(h))) * self.scale
        h = torch.cat([h, self.empty]) + self.no_columns.sum()
        for norm in self.norms:
            h = norm(h + torch.tanh(self.shared(h)))
        h = self.frozen(h)
        picked = self.tied_out(h).argmax(-1)
        h = h + self.tied_in(picked) + self.tied_out(h).softmax(-1) @ self.tied_in.weight
        return h + self.shift


family("odd", vectors, squared)(Odd)


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A rank's part of it is whole vectors on up to four ranks: torch may round what is left over otherwise.
        self.low = nn.Parameter(torch.randn(16, 16).bfloat16() * 0.3)
        self.high = nn.Parameter(torch.randn(16, 16).double() * 0.3)
        self.plain = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.table = nn.Parameter(torch.arange(16), requires_grad=False)  # integers are parameters too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.bfloat16() @ self.low
        h = (h.double() @ self.high * self.gain).float()
        return self.plain(h[:, self.table])


family("mixed-dtypes", vectors, squared, rounds=True)(MixedDtypes)


class Sometimes(nn.Module):
    """One branch is taken in some steps only, on every rank in the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(16, 16)
        self.odd_steps = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        h = self.always(x)
        return h + self.odd_steps(h) if extra else h


def sometimes_batch(generator: torch.Generator, step: int) -> dict[str, Any]:
    return {**vectors(generator, step), "extra": step % 3 == 1}


def sometimes_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], batch["extra"]), batch["y"])


family("sometimes", sometimes_batch, sometimes_loss)(Sometimes)


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.2)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.t()) @ self.b.t()


@family("lora", tokens, own_loss)
def lora() -> nn.Module:
    """A frozen Llama with adapters on its query and value projections."""
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRALinear(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRALinear(layer.self_attn.v_proj)
    return model


class Nested(nn.Module):
    """For nested shards: the test shards ``inner`` first, with another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.inner = nn.Sequential(nn.Linear(16, 11), nn.GELU(), nn.Linear(11, 16))
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(torch.tanh(self.first(x))))


family("nested", vectors, squared)(Nested)


class Uneven(nn.Module):
    """Uneven rows, fewer rows than ranks, a tied weight, a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.one = nn.Linear(9, 1)
        self.down = nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = torch.tanh(self.up(self.embed(ids)))
        h = self.down(h) * self.scale + self.one(h)
        return self.head(h)


class MLP(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(x)))
        return self.norm(x)


family("mlp", vectors, squared)(MLP)


class TiedAndFrozen(nn.Module):
    """Tied ends, rows that ranks do not divide, a scalar, a frozen weight."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.odd = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(5, 6, bias=False).requires_grad_(False)
        self.head = nn.Linear(6, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        y = self.embed(tokens)
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        return self.head(self.frozen(self.odd(y)) * self.scale)
