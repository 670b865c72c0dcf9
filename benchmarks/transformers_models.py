"""Models of transformers behind the interface of the benchmarks' own: tokens and targets in, the mean loss out."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from models import Spec
from torch import Tensor, nn

VOCAB, LENGTH, BATCH = 4096, 128, 2


class Transformers(nn.Module):
    """A model whose first output is the logits of each token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> Any:
        """The repeated layers of a decoder, which FSDP2 compiles one by one."""
        inner: Any = self.model
        return inner.model.layers

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self.model(tokens).logits, targets)


class EncoderDecoder(nn.Module):
    """One that reads the tokens with its encoder and the targets, one place later, with its decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self.model(input_ids=tokens, decoder_input_ids=tokens).logits, targets)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def decoder(kind: str, **more: Any) -> nn.Module:
    """A causal model: 6 layers of 512 unless ``more`` says otherwise."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "use_cache": False,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | more)
    return Transformers(getattr(transformers, f"{kind}ForCausalLM")(config))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=512,
        n_layer=6,
        n_head=8,
        n_positions=LENGTH,
        use_cache=False,
        **_no_dropout("pdrop"),
    )
    return Transformers(GPT2LMHeadModel(config))


def _no_dropout(ending: str) -> dict[str, float]:
    return {f"{what}_{ending}": 0.0 for what in ("resid", "embd", "attn")}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Transformers(BertForMaskedLM(config))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=512,
        d_kv=64,
        d_ff=1408,
        num_layers=4,
        num_heads=8,
        dropout_rate=0.0,
        use_cache=False,
    )
    return EncoderDecoder(T5ForConditionalGeneration(config))


def _spec(about: str, make: Any) -> Spec:
    return Spec(
        f"{about}, vocabulary {VOCAB}, sequence {LENGTH}, batch {BATCH} a rank", make, VOCAB, LENGTH, BATCH
    )


MODELS: dict[str, Spec] = {
    "transformers-gpt2": _spec("GPT-2 of transformers, 6 layers, width 512", _gpt2),
    "transformers-llama": _spec("Llama of transformers, 6 layers, width 512", lambda: decoder("Llama")),
    "transformers-qwen2": _spec("Qwen2 of transformers, 6 layers, width 512", lambda: decoder("Qwen2")),
    "transformers-mixtral": _spec(
        "Mixtral of transformers, 4 layers, width 512, 4 experts",
        lambda: decoder("Mixtral", num_hidden_layers=4, intermediate_size=1024, num_local_experts=4),
    ),
    "transformers-bert": _spec("BERT of transformers, 6 layers, width 512", _bert),
    "transformers-t5": _spec("T5 of transformers, 4 and 4 layers, width 512", _t5),
}
