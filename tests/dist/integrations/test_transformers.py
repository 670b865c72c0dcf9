"""``class T(ZeroMixin, Trainer)`` on two CPU ranks, beside transformers' own DDP with the same arguments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.cases import Cases, refused
from dist.library_runs import as_rank, differences, reduced_seldom, shared_folder, weights
from dist.loops import counters
from dist.measured import resident, restart_peak
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import IntegrationError
from zero_compiler.optim.optimizer import StreamedOptimizer
from zero_compiler.params.modules import is_root
from zero_compiler.storage import heap

pytest.importorskip("accelerate", reason="needs the extra transformers")
transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__, spawns=7)
CLOSE = 2e-5  # of sums in another order, through AdamW
CLOSE_BF16 = 3e-2


def model(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=60,
        pad_token_id=60, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def rows(n: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, 60, (12,), generator=generator) for _ in range(n)]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def common(folder: Path, **kwargs: Any) -> dict[str, Any]:
    as_rank()
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **kwargs,
    }


def arguments(folder: Path, **kwargs: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**common(folder, **kwargs))


def trainer(ours: bool, args: Any, **kwargs: Any) -> Any:
    from transformers import Trainer

    from zero_compiler.integrations.transformers import ZeroMixin

    class Sharded(ZeroMixin, Trainer):
        pass

    kwargs = {"model": model(), "train_dataset": rows(32), "eval_dataset": rows(8, 1), "args": args, **kwargs}
    if not ours:
        return Trainer(**kwargs)
    return Sharded(zero=kwargs.pop("zero", zero.Config(stage=3, compute="aten")), **kwargs)


def told(t: Any) -> dict[str, list[float]]:
    """What a trainer has logged: losses, norms, rates and evaluations."""
    history = t.state.log_history
    return {
        key: [float(h[key]) for h in history if key in h]
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss")
    }


def both(tolerance: float = CLOSE, run: Any = None, of_weights: bool = True, **kwargs: Any) -> list[str]:
    """The same training by DDP and by zero.

    Args:
        of_weights: they are compared too; not where an update divides noise by itself.
    """
    found = []
    for ours in (False, True):
        with shared_folder() as folder:
            t = trainer(
                ours,
                arguments(folder, **kwargs.get("args", {})),
                **{k: v() for k, v in kwargs.items() if k != "args"},
            )
            extra = run(t) if run is not None else (t.train() and None)
            held = weights(t.model) if of_weights else {}
            found.append({"said": told(t), "weights": held, "extra": extra or {}})
            if ours and not is_root(t.model):
                return ["the model is not sharded"]
    return differences("zero", found[1], found[0], tolerance)


@cases.add
def it_trains_with_the_numbers_of_ddp(rank: int) -> list[str]:
    return both()


@cases.add
def accumulation_and_clipping(rank: int) -> list[str]:
    """All micro-batches of a step are reduced together; the last step of an epoch has fewer."""
    from transformers import TrainerCallback

    counts: list[int] = []

    class Counts(TrainerCallback):
        def on_substep_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            if is_root(model):
                counts.append(counters(model)["bytes_reduced"])

        on_step_end = on_substep_end

    def run(t: Any) -> None:
        t.add_callback(Counts())
        t.train()

    errors = both(run=run, args={"gradient_accumulation_steps": 3, "max_grad_norm": 0.3})
    return errors + reduced_seldom("Trainer", counts, (2, 5, 7, 10))


@cases.add_thorough
def bf16(rank: int) -> list[str]:
    return both(CLOSE_BF16, args={"bf16": True})


@cases.add
def gradient_checkpointing(rank: int) -> list[str]:
    return both(args={"gradient_checkpointing": True, "gradient_accumulation_steps": 2})


@cases.add
def arguments_that_change_a_step(rank: int) -> list[str]:
    """What a step computes beside the model's own loss, and what is done around it."""

    def run(t: Any) -> dict[str, Any]:
        t.train()
        return {"tokens": t.state.num_input_tokens_seen}

    args = {
        "label_smoothing_factor": 0.1, "max_grad_norm": 0, "optim": "adamw_torch_fused", "eval_on_start": True,
        "include_num_input_tokens_seen": True, "torch_empty_cache_steps": 1, "neftune_noise_alpha": 5.0,
    }  # fmt: skip
    return both(args=args, run=run)


@cases.add_thorough
def torch_compile_is_what_zero_does_anyhow(rank: int) -> list[str]:
    found = []
    for ours in (False, True):
        with shared_folder() as folder:
            t = trainer(
                ours, arguments(folder, torch_compile=ours), **({"zero": zero.Config()} if ours else {})
            )
            t.train()
            found.append({"said": told(t), "weights": weights(t.model)})
    return differences("compiled", found[1], found[0], CLOSE)


@cases.add_thorough
def fp16(rank: int) -> list[str]:
    return both(CLOSE_BF16, args={"fp16": True})


@cases.add_thorough
def adafactor_and_adagrad(rank: int) -> list[str]:
    """States that begin as plain tensors, and states that are there before the model is sharded."""
    return [e for optim in ("adafactor", "adagrad") for e in both(of_weights=False, args={"optim": optim})]


class Greedy(torch.nn.Module):
    """A model that has no room for a batch of two, the second time that it sees one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = model(), 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        out = self.inner(input_ids=input_ids, labels=labels)
        self.seen += len(input_ids) > 1
        if self.seen == 2 and len(input_ids) > 1:
            raise RuntimeError("CUDA out of memory.")
        return out


@cases.add_thorough
def a_batch_that_does_not_fit_is_halved(rank: int) -> list[str]:
    return both(model=Greedy, args={"auto_find_batch_size": True, "max_steps": 3})


@cases.add
def evaluation_and_prediction_before_and_after_training(rank: int) -> list[str]:
    """A plain Trainer that has evaluated before does not wrap its model for DDP any more, so two of them are compared."""

    def run(ours: bool, train: bool, before: bool) -> dict[str, Any]:
        said: dict[str, Any] = {}
        with shared_folder() as folder:
            t = trainer(ours, arguments(folder))
            if before:
                said["before"] = t.evaluate()["eval_loss"]
                said["predicted"] = torch.from_numpy(t.predict(rows(4, 2)).predictions)
            if train:
                t.train()
                said |= {
                    "loss": told(t)["loss"],
                    "weights": weights(t.model),
                    "after": t.evaluate()["eval_loss"],
                }
        return said

    plain = run(False, False, True) | run(False, True, False)
    return differences("zero", run(True, True, True), plain, CLOSE)


@cases.add_thorough
def evaluation_without_training(rank: int) -> list[str]:
    return both(run=lambda t: {"loss": t.evaluate()["eval_loss"]})


@cases.add_thorough
def optimizers_that_are_given(rank: int) -> list[str]:
    def run(ours: bool) -> dict[str, Any]:
        with shared_folder() as folder:
            made = model()
            opt = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
            sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
            t = trainer(ours, arguments(folder), model=made, optimizers=(opt, sched))
            t.train()
            return {"said": told(t), "weights": weights(t.model)}

    return differences("zero", run(True), run(False), CLOSE)


@cases.add
def states_in_files_with_a_scheduler_that_is_given(rank: int) -> list[str]:
    def run(ours: bool, resume: bool = False, folder: Any = None) -> dict[str, Any]:
        made = model()
        opt = torch.optim.AdamW(made.parameters(), lr=1e-3, eps=1e-4)
        parts = [torch.optim.lr_scheduler.StepLR(opt, 1, gamma) for gamma in (0.5, 0.9)]
        sched = torch.optim.lr_scheduler.SequentialLR(opt, parts, [2])
        more = (
            {"zero": zero.Config(compute="aten", offload_optimizer="nvme", nvme_dir=str(folder))}
            if ours
            else {}
        )
        args = arguments(folder, save_strategy="steps", save_steps=2)
        t = trainer(ours, args, model=made, optimizers=(opt, sched), **more)
        t.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2") if resume else None)
        if ours and not isinstance(t.optimizer.optimizer, StreamedOptimizer):
            raise AssertionError(f"the optimizer is {t.optimizer}")
        return {
            "loss": told(t)["loss"][-2:],
            "rate": told(t)["learning_rate"][-2:],
            "weights": weights(t.model),
        }

    with shared_folder() as theirs:
        plain = run(False, False, theirs)
    with shared_folder() as folder:
        whole = run(True, False, folder)
        again = run(True, True, folder)
    return differences("in files", whole, plain, CLOSE) + differences("resumed", again, whole, 0.0)


@cases.add_thorough
def the_best_model_at_the_end_and_early_stopping(rank: int) -> list[str]:
    return best_at_the_end("FULL_STATE_DICT")


@cases.add_thorough
def the_best_of_sharded_checkpoints_at_the_end(rank: int) -> list[str]:
    return best_at_the_end("SHARDED_STATE_DICT")


def best_at_the_end(kind: str) -> list[str]:
    from transformers import EarlyStoppingCallback

    args = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 8,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
        "fsdp_config": {"state_dict_type": kind},
    }  # fmt: skip

    def run(t: Any) -> dict[str, Any]:
        t.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        t.train()
        return {"steps": t.state.global_step, "best": t.evaluate()["eval_loss"]}

    return both(args=args, run=run)


def resumed(rank: int, kind: str) -> list[str]:
    def run(folder: Path, resume: bool) -> dict[str, Any]:
        args = arguments(
            folder, save_strategy="steps", save_steps=2, max_steps=5, fsdp_config={"state_dict_type": kind}
        )
        t = trainer(True, args)
        t.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2") if resume else None)
        return {"loss": told(t)["loss"][-3:], "weights": weights(t.model)}

    with shared_folder() as folder:
        whole = run(folder, False)
        return differences(kind, run(folder, True), whole, 0.0)


@cases.add
def resume_from_whole_files(rank: int) -> list[str]:
    return resumed(rank, "FULL_STATE_DICT")


@cases.add
def resume_from_sharded_files(rank: int) -> list[str]:
    return resumed(rank, "SHARDED_STATE_DICT")


@cases.add
def checkpoints_of_another_kind_are_refused(rank: int) -> list[str]:
    whole, sharded = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
    errors = []
    with shared_folder() as folder:
        for kind in (whole, sharded, "none"):
            args = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
            if kind != "none":
                args["fsdp_config"] = {"state_dict_type": kind}
            trainer(kind != "none", arguments(folder / kind, **args)).train()
        for kind, written in ((whole, sharded), (sharded, whole), (whole, "none")):
            args = arguments(folder / "other", fsdp_config={"state_dict_type": kind})
            at = str(folder / written / "out" / "checkpoint-1")
            match = "was not written with zero" if written == "none" else f'"state_dict_type": "{written}"'
            errors += refused(lambda: trainer(True, args).train(at), IntegrationError, match)
    return errors


@cases.add
def save_model_is_read_by_from_pretrained(rank: int) -> list[str]:
    from transformers import GPT2LMHeadModel

    errors = []
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        with shared_folder() as folder:
            t = trainer(True, arguments(folder, fsdp_config={"state_dict_type": kind}))
            t.train()
            t.save_model(str(folder / "saved"))
            dist.barrier()
            if {"lm_head.weight", "transformer.wte.weight"} <= set(
                load_file(folder / "saved" / "model.safetensors")
            ):
                errors.append(f"{kind}: a tied weight was written twice")
            loaded = GPT2LMHeadModel.from_pretrained(folder / "saved")
            errors += differences(kind, weights(loaded), weights(t.model), 0.0)
    return errors


@cases.add
def generation_in_a_callback(rank: int) -> list[str]:
    """Ranks whose texts end at different lengths generate together."""
    from transformers import TrainerCallback

    texts: list[Any] = []

    class Generates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 2:
                inner = getattr(model, "module", model)
                prompt = torch.tensor([[1 + dist.get_rank(), 2]])
                with torch.no_grad():
                    out = inner.generate(prompt, max_new_tokens=3 + dist.get_rank(), do_sample=False)
                texts.append(out.tolist())

    def run(t: Any) -> dict[str, Any]:
        texts.clear()
        t.add_callback(Generates())
        t.train()
        return {"texts": torch.tensor(texts[0])}

    return both(run=run)


@cases.add_thorough
def prediction_by_generating(rank: int) -> list[str]:
    """Seq2SeqTrainer with predict_with_generate; ranks have texts of different lengths."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from zero_compiler.integrations.transformers import ZeroMixin

    class Sharded(ZeroMixin, Seq2SeqTrainer):
        pass

    def run(ours: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        t5 = T5ForConditionalGeneration(
            T5Config(
                vocab_size=61, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
            )
        )  # fmt: skip
        data = [{"input_ids": r["input_ids"], "labels": r["labels"][:5]} for r in rows(16)]
        with shared_folder() as folder:
            args = Seq2SeqTrainingArguments(
                **common(folder, max_steps=2, predict_with_generate=True, generation_max_length=6)
            )
            kwargs: dict[str, Any] = {
                "model": t5, "args": args, "train_dataset": data, "eval_dataset": data[:6],
            }  # fmt: skip
            t = Sharded(zero=zero.Config(compute="aten"), **kwargs) if ours else Seq2SeqTrainer(**kwargs)
            t.train()
            predicted = torch.from_numpy(t.predict(data[:6]).predictions)
            return {"said": told(t)["loss"], "predicted": predicted}

    return differences("generated", run(True), run(False), CLOSE)


@cases.add
def adapters_of_peft(rank: int) -> list[str]:
    """LoRA: a checkpoint holds the adapter alone, training goes on from it, and PEFT reads what was saved."""
    if importlib.util.find_spec("peft") is None:
        return []
    import peft

    def adapted() -> Any:
        base = model()
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        return peft.get_peft_model(base, config)

    def run(ours: bool, folder: Path, resume: bool) -> Any:
        args = arguments(folder, save_strategy="steps", save_steps=2, max_steps=5)
        t = trainer(ours, args, model=adapted())
        t.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2") if resume else None)
        return t

    with shared_folder() as theirs:
        plain = told(run(False, theirs, False))["loss"]
    errors = []
    with shared_folder() as folder:
        whole = run(True, folder, False)
        errors += differences("trained", told(whole)["loss"], plain, CLOSE)
        held = weights(whole.model)
        dist.barrier()
        again = run(True, folder, True)
        errors += differences("resumed", told(again)["loss"][-3:], told(whole)["loss"][-3:], 0.0)
        errors += differences("resumed", weights(again.model), held, 0.0)
        again.save_model(str(folder / "saved"))
        dist.barrier()
        loaded = peft.PeftModel.from_pretrained(model(), str(folder / "saved"))
        adapter = {k: v for k, v in weights(loaded).items() if "lora" in k}
        errors += differences("saved", adapter, {k: v for k, v in held.items() if "lora" in k}, 0.0)
        for place in ("saved", "out/checkpoint-4"):
            if (folder / place / "model.safetensors").exists():
                errors.append(f"{place} holds the whole model")
    return errors


@cases.add
def adapters_on_a_base_of_4_bits(rank: int) -> list[str]:
    """QLoRA as its documentation has it: weights of 4 bits that stay on every rank as they are, an adapter that is
    sharded."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return []  # the test is skipped
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)

    def run(ours: bool, folder: Path) -> dict[str, Any]:
        base = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=in_4_bits)
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        torch.manual_seed(3)
        t = trainer(ours, arguments(folder), model=peft.get_peft_model(base, lora))
        t.train()
        packed = [p for p in t.model.parameters() if type(p).__name__ == "Params4bit"]
        assert len(packed) == 14
        assert not any(isinstance(p, DTensor) for p in packed)
        t.save_model(str(folder / "saved"))
        dist.barrier()
        saved = load_file(folder / "saved" / "adapter_model.safetensors")
        assert not (folder / "saved" / "model.safetensors").exists()
        return {"said": told(t), "evaluated": t.evaluate()["eval_loss"], "saved": saved}

    found = []
    for ours in (False, True):
        with shared_folder() as folder:
            if rank == 0:
                torch.manual_seed(0)
                LlamaForCausalLM(config).save_pretrained(folder / "base")
            dist.barrier()
            found.append(run(ours, folder))
    return differences("4 bits", found[1], found[0], CLOSE)


@cases.add
def from_pretrained_gives_no_rank_memory_of_its_own(rank: int) -> list[str]:
    """Weights stay mapped until they are sharded, in the dtype of the file and in another one, and rank 0 alone reads
    them: no other rank has a whole model in memory while it is sharded. With ``bf16=True`` weights of bfloat16 rest in
    float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    errors = []
    with shared_folder() as folder:  # what is imported on the way is imported before
        t = trainer(True, arguments(folder))
        t.accelerator.prepare_model(t.model)
    for dtype, asked, args in (
        (torch.float32, "auto", {}),
        (torch.bfloat16, "auto", {"bf16": True}),
        (torch.float32, torch.bfloat16, {"bf16": True}),
    ):
        with shared_folder() as folder:
            if rank == 0:
                config = LlamaConfig(
                    vocab_size=4096, hidden_size=768, intermediate_size=3072, num_hidden_layers=4,
                    num_attention_heads=4,
                )  # fmt: skip
                LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "saved")
            dist.barrier()
            heap.give_back()
            before = resident("RssAnon")
            loaded = LlamaForCausalLM.from_pretrained(folder / "saved", dtype=asked)
            whole = sum(p.numel() for p in loaded.parameters()) * 4
            if (read := resident("RssAnon") - before) > whole // 8:
                errors.append(
                    f"{dtype} as {asked}: {read} bytes of its own after from_pretrained, of a model of {whole}"
                )
            t = trainer(True, arguments(folder, **args), model=loaded)
            restart_peak()
            first = resident("VmHWM")
            t.accelerator.prepare_model(t.model)
            if rank > 0 and (most := resident("VmHWM") - first) > whole * 3 // 4:
                errors.append(
                    f"{dtype} as {asked}: {most} bytes more at most, of a model of {whole}, half of which is its own"
                )
            if any(p.dtype != torch.float32 for p in t.model.parameters()):
                errors.append(f"{dtype} as {asked}: weights rest in another type than float32")
            dist.barrier()
    return errors


@cases.add
def what_cannot_be_is_refused(rank: int) -> list[str]:
    errors = []
    with shared_folder() as folder:
        for name, value in (("fsdp", "full_shard"), ("bf16_full_eval", True)):
            args = arguments(folder, **{name: value})
            errors += refused(lambda: trainer(True, args), IntegrationError, "zero", f"leave out {name}")
    return errors


@pytest.mark.parametrize("name", cases.names)
def test_trainer(name):
    if name == "adapters_on_a_base_of_4_bits":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    cases.check(name)
