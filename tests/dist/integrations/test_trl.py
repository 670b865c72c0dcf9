"""SFTTrainer and DPOTrainer of TRL under ZeroMixin on two CPU ranks, beside TRL's own DDP with the same arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.cases import Cases
from dist.library_runs import as_rank, differences, shared_folder, weights

import zero_compiler as zero
from zero_compiler.params.modules import is_root

pytest.importorskip("trl", reason="needs the extra trl")
pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__)
CLOSE = 2e-5
WORDS = [f"w{i}" for i in range(40)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", *WORDS])}, unk_token="<pad>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def model(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=48, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def sentence(n: int, generator: torch.Generator) -> str:
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=generator))


def common(folder: Path) -> dict[str, Any]:
    as_rank()
    return {
        "output_dir": str(folder / "out"), "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 3,
        "learning_rate": 1e-3, "adam_epsilon": 1e-4, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip


def trained(ours: bool, base: type, **kwargs: Any) -> dict[str, Any]:
    from zero_compiler.integrations.transformers import ZeroMixin

    class Sharded(ZeroMixin, base):  # type: ignore[misc, valid-type]
        pass

    if ours:
        t: Any = Sharded(zero=zero.Config(compute="aten"), **kwargs)
    else:
        t = base(**kwargs)
    t.train()
    reference = getattr(t, "ref_model", None)
    assert not ours or (is_root(t.model) and (reference is None or is_root(reference)))
    history = t.state.log_history
    return {"loss": [float(h["loss"]) for h in history if "loss" in h], "weights": weights(t.model)}


@cases.add
def sft(rank: int) -> list[str]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def run(ours: bool) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        data = Dataset.from_list([{"text": sentence(10, generator)} for _ in range(24)])
        with shared_folder() as folder:
            args = SFTConfig(**common(folder), max_length=16)
            return trained(
                ours, SFTTrainer, model=model(), args=args, train_dataset=data, processing_class=tokenizer()
            )

    return differences("sft", run(True), run(False), CLOSE)


@cases.add
def dpo_shards_the_reference_model_too(rank: int) -> list[str]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def run(ours: bool) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        data = Dataset.from_list(
            [
                {key: sentence(n, generator) for key, n in (("prompt", 4), ("chosen", 6), ("rejected", 5))}
                for _ in range(24)
            ]
        )
        with shared_folder() as folder:
            args = DPOConfig(**common(folder), max_length=16)
            return trained(
                ours,
                DPOTrainer,
                model=model(),
                ref_model=model(1),
                args=args,
                train_dataset=data,
                processing_class=tokenizer(),
            )

    return differences("dpo", run(True), run(False), CLOSE)


@cases.add
def lora_of_peft(rank: int) -> list[str]:
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def run(ours: bool) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        data = Dataset.from_list([{"text": sentence(10, generator)} for _ in range(24)])
        with shared_folder() as folder:
            args = SFTConfig(**common(folder), max_length=16)
            torch.manual_seed(3)
            lora = peft.LoraConfig(
                r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False
            )
            return trained(
                ours,
                SFTTrainer,
                model=model(),
                args=args,
                train_dataset=data,
                processing_class=tokenizer(),
                peft_config=lora,
            )

    return differences("lora", run(True), run(False), CLOSE)


@pytest.mark.parametrize("name", cases.names)
def test_trl(name):
    cases.check(name)
