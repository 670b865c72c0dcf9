"""``save_pretrained`` of a sharded model of transformers, on two ranks: files that plain ``from_pretrained`` reads."""

from __future__ import annotations

import importlib.util
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist.cases import Cases, refused
from dist.library_runs import shared_folder
from dist.spawn import run_ranks
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import zero_compiler as zero
from zero_compiler.errors import ShardError, StorageError, ZeroError
from zero_compiler.ranks import attendance
from zero_compiler.storage.safetensors_folder import WeightsFolder
from zero_compiler.tools.export import export

pytestmark = pytest.mark.dist
cases = Cases(__name__, group_timeout=60.0)
SENTENCE = "write `with zero.gathered(model):` around save_pretrained()"


def gpt2(**kw):
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=33, n_positions=16, **tokens, **kw)
    )


def mixtral():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    return MixtralForCausalLM(
        MixtralConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=24, vocab_size=32, **heads)
    )


def whole(model):
    with zero.gathered(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def unlike(found, wanted):
    return [n for n in {**found, **wanted} if n not in found or not torch.equal(found[n], wanted[n])]


@cases.add
def plain_from_pretrained_reads_it(rank):
    out = []
    for make in (gpt2, lambda: gpt2().to(torch.bfloat16), lambda: gpt2(tie_word_embeddings=False), mixtral):
        model = zero.shard(make(), device="cpu", compute="aten")
        call = torch.compile(model, backend="zero")
        call(torch.arange(8)[None] + rank, labels=torch.arange(8)[None]).loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        wanted = whole(model)
        for size in ("5GB", "3KB"):
            with shared_folder() as folder:
                call.save_pretrained(folder, is_main_process=rank == 0, max_shard_size=size)
                if not (folder / "generation_config.json").exists():
                    out.append("no generation_config.json")
                if (folder / "model.safetensors").exists() != (size == "5GB"):
                    out.append(f"files {os.listdir(folder)}")
                plain, info = type(model).from_pretrained(folder, output_loading_info=True)
                out += [f"{size}: {n}" for n in unlike(plain.state_dict(), wanted)]
                out += [f"{key}: {names}" for key, names in info.items() if names]
                if plain.dtype != model.dtype or plain.config.architectures != [type(plain).__name__]:
                    out.append(f"configuration {plain.config}")
    return out


@cases.add
def one_rank_alone(rank):
    """While the other is in a call of the model, or in code of the user's."""
    out = []
    model = zero.shard(gpt2(), device="cpu", compute="aten")
    x = torch.arange(8)[None]
    for where in ("call", "barrier", "save"):
        model(x)
        with mock.patch.object(attendance, "TOGETHER_S", 60.0 if where == "call" else 0.5):
            if rank == 0:
                out += refused(lambda: model.save_pretrained("nowhere"), ShardError, SENTENCE)
                if where == "barrier":
                    dist.barrier()
            else:
                if where != "call":
                    # The first rank gives up meanwhile.
                    time.sleep(2.0)
                if where == "barrier":
                    dist.barrier()
                second = (lambda: model.save_pretrained("nowhere")) if where == "save" else lambda: model(x)
                out += refused(second, ZeroError, "rank 0 of 2 could not go on behind save_pretrained()")
        model(x)  # ranks meet again
    return out + [os.path.abspath("nowhere")] * os.path.exists("nowhere")


@cases.add
def what_it_does_not_write_is_refused(rank):
    model, out = zero.shard(gpt2(), device="cpu", compute="aten"), []
    for kw in (
        {"push_to_hub": True},
        {"variant": "fp16"},
        {"distributed_checkpoint": True},
        {"new_option": 1},
    ):
        out += [
            f"{kw}: {e}"
            for e in refused(lambda: model.save_pretrained("nowhere", **kw), ShardError, SENTENCE)
        ]
        try:
            model(torch.arange(8)[None])  # the refusal of the other rank may still be on its way
        except ShardError:
            model(torch.arange(8)[None])
    with shared_folder() as folder:
        values = {name: torch.zeros_like(value) for name, value in whole(model).items()}
        if rank == 0:  # values that are given are for transformers to write
            model.save_pretrained(folder, state_dict=values)
            if any(v.any() for v in GPT2LMHeadModel.from_pretrained(folder).state_dict().values()):
                out.append("a state_dict that was given")
    return out


@cases.add
def an_error_on_the_first_rank_is_raised_on_all(rank):
    model = zero.shard(gpt2(), device="cpu", compute="aten")
    with (
        shared_folder() as folder,
        mock.patch.object(WeightsFolder, "open", side_effect=StorageError("full")),
    ):
        out = refused(lambda: model.save_pretrained(folder), StorageError, "full")
        dist.barrier()
        return out + os.listdir(folder)


@cases.add
def adapters_of_peft(rank):
    """PEFT reads what it has written: the adapter, with a module that is saved whole, and no weights of the base."""
    if importlib.util.find_spec("peft") is None:
        return []
    from peft import LoraConfig, PeftModel, get_peft_model

    out = []
    lora = LoraConfig(r=3, target_modules=["c_attn"], modules_to_save=["ln_f"], init_lora_weights=False)
    model = zero.shard(get_peft_model(gpt2(), lora), device="cpu", compute="aten")
    x = torch.arange(8)[None]
    model(input_ids=x + rank, labels=x).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    wanted = whole(model)
    with shared_folder() as folder:
        model.save_pretrained(folder)
        if {"adapter_config.json", "adapter_model.safetensors", "README.md"} != set(os.listdir(folder)):
            out.append(f"files {os.listdir(folder)}")
        if os.path.getsize(folder / "adapter_model.safetensors") > 4000:
            out.append("weights of the base")
        out += unlike(PeftModel.from_pretrained(gpt2(), folder).state_dict(), wanted)
    if rank == 0:
        with mock.patch.object(attendance, "TOGETHER_S", 0.3):
            out += refused(lambda: model.save_pretrained("nowhere"), ShardError, SENTENCE)
    else:
        out += refused(
            lambda: model(input_ids=x), ZeroError, "rank 0 of 2 could not go on behind save_pretrained()"
        )
    return out


@cases.add
def adapters_that_were_added_to_a_sharded_model(rank):
    """What merges them computes with the rows of a rank and with whole adapters, which is for whole weights."""
    if importlib.util.find_spec("peft") is None:
        return []
    from peft import LoraConfig, get_peft_model

    out = []
    plain, model = gpt2(), zero.shard(gpt2(), device="cpu", compute="aten")
    lora = LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(1)
    plain = get_peft_model(plain, lora).eval()
    torch.manual_seed(1)
    adapted = get_peft_model(model, lora).eval()
    x = torch.arange(8)[None]
    wanted = plain(input_ids=x).logits
    for call, name in (
        (adapted.merge_adapter, "merge_adapter()"),
        (lambda: adapted.merge_adapter(safe_merge=True), "merge_adapter()"),
        (adapted.merge_and_unload, "merge_and_unload()"),
    ):
        if rank == 0:  # whose caller catches the refusal: both go on
            out += refused(call, ShardError, f"{name} computes with ")
        torch.testing.assert_close(adapted(input_ids=x).logits, wanted)
    told = "the sharded parameter 'transformer.h.0.attn.c_attn.weight'", "zero.gathered(model, write=True)"
    out += refused(adapted.merge_adapter, ShardError, *told)
    for merged in (adapted, plain):
        with zero.gathered(merged, write=True):
            merged.merge_adapter()
    found = whole(adapted)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value)
    return out


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)


def saving(rank, world, folder):
    model = zero.shard(gpt2(), device="cpu")
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    zero.save_safetensors(model, folder, max_file_bytes=4000)


def loading(rank, world, folder):
    with torch.device("meta"):
        model = gpt2()
    zero.load_safetensors(zero.shard(model, device="cpu"), folder)
    return unlike(whole(model), gpt2().state_dict())


def test_another_number_of_ranks_reads_it(tmp_path):
    run_ranks(saving, 2, str(tmp_path))
    assert run_ranks(loading, 3, str(tmp_path)) == [[]] * 3
    assert unlike(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict(), gpt2().state_dict()) == []
    tied_weights_of_a_checkpoint(tmp_path / "dcp", tmp_path)


def tied_weights_of_a_checkpoint(checkpoint, config):
    """``zero-compiler export`` writes them once where the configuration ties them and their values are the same."""
    names = gpt2().state_dict().keys()
    untied, out = config / "untied", config / "out"
    gpt2(tie_word_embeddings=False).config.save_pretrained(untied)
    for given, written in ((config, names - {"lm_head.weight"}), (untied, names), (None, names)):
        assert export(checkpoint, out, config=given) == ("model", len(written))
        assert load_file(out / "model.safetensors").keys() == written
        plain, info = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert unlike(plain.state_dict(), gpt2().state_dict()) == []
        assert not any(info.values())
    values = gpt2().state_dict() | {"lm_head.weight": torch.ones(33, 16)}
    dcp.save(values, checkpoint_id=str(config / "other"), no_dist=True)
    assert export(config / "other", out, config=config) == ("", len(names))
