"""Models of transformers by their configuration. Slow: the library alone is an import of many seconds."""

from __future__ import annotations

import json

import pytest
import torch

from zero_compiler.errors import ConfigError
from zero_compiler.tools.model_source import model_source

pytestmark = pytest.mark.slow

LLAMA = (
    "LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=2, vocab_size=128"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_configuration_is_a_model_with_its_head_and_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    source = model_source(f"{LLAMA})", 3, 7)
    assert type(source.model) is transformers.LlamaForCausalLM
    assert source.model.training
    assert not source.model.config.use_cache
    assert all(p.is_meta for p in source.model.parameters())
    inputs = source.inputs(3)
    assert {k: tuple(v.shape) for k, v in inputs.items()} == {"input_ids": (3, 7), "labels": (3, 7)}
    assert "LlamaForCausalLM, 78,144 parameters in float32; 3 x 7 tokens a rank" in source.about
    # The same from a file, a folder, and of the class that it names.
    config = source.model.config.to_dict() | {"dtype": "bfloat16", "field_of_another_tool": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for named in (str(tmp_path), "config.json"):
        same = model_source(named)
        assert type(same.model) is transformers.LlamaForCausalLM
        assert next(same.model.parameters()).dtype is torch.bfloat16
        assert same.inputs(None)["input_ids"].shape == (1, 2048)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]})
    )
    row = model_source(str(tmp_path), 4, 8)
    assert type(row.model) is transformers.LlamaForSequenceClassification
    assert row.inputs(4)["labels"].shape == (4,)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("BertConfig(num_hidden_layers=1)", "BertForMaskedLM"),
        ("GPT2Config(n_layer=1)", "GPT2LMHeadModel"),
        ("T5Config(num_layers=1)", "T5ForConditionalGeneration"),
        ("BertConfig(num_hidden_layers=1, is_decoder=True)", "BertLMHeadModel"),
    ],
)
def test_the_head_is_the_one_that_is_trained(text, kind):
    pytest.importorskip("transformers")
    assert type(model_source(text).model).__name__ == kind


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("LlamConfig()", "did you mean 'LlamaConfig'?"),
        ("LlamaConfig", ""),
        ("LlamaForCausalLM(hidden_size=4)", "has no configuration 'LlamaForCausalLM'"),
        ("LlamaConfig(hiden_size=4)", "LlamaConfig has no field 'hiden_size'; did you mean 'hidden_size'?"),
        ("LlamaConfig(zzz=4)", "LlamaConfig has no field 'zzz'"),
        ("LlamaConfig(4096)", "fields of a configuration are given by name"),
        ("LlamaConfig(hidden_size='wide')", "hidden_size"),
        ("ViTConfig()", "ViT"),
        ("LlamaConfig(num_attention_heads=0)", "LlamaConfig"),
    ],
)
def test_what_is_no_configuration_is_one_sentence(text, said):
    pytest.importorskip("transformers")
    if not said:
        assert model_source(text, sequence=4).model is not None
        return
    with pytest.raises(ConfigError) as refused:
        model_source(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "an object with a model_type"),
        ('{"model_type": 3}', "an object with a model_type"),
        ('{"model_type": "lama"}', "has no model_type 'lama'; did you mean "),
        (
            '{"model_type": "llama", "hiden_size": 4}',
            "has no field 'hiden_size'; did you mean 'hidden_size'?",
        ),
    ],
)
def test_what_is_no_configuration_in_a_file_is_one_sentence(tmp_path, written, said):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(ConfigError) as refused:
        model_source(str(tmp_path))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_more_tokens_than_positions_are_refused():
    pytest.importorskip("transformers")
    with pytest.raises(
        ConfigError, match="--sequence 4,096 is more than the 64 positions that LlamaForCausalLM has"
    ):
        model_source(f"{LLAMA}, max_position_embeddings=64)", sequence=4096)
    assert model_source(f"{LLAMA}, max_position_embeddings=64)").inputs(1)["input_ids"].shape == (1, 64)
