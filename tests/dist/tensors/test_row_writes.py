"""Elementwise writes of a forward to its weights, on two ranks: each does them to its rows."""

from __future__ import annotations

import pytest
import torch
from dist.cases import Cases
from null.compile.test_captured_writes import (
    WRITES,
    _assigned,
    _assigned_by_a_function,
    _renorm,
    differences,
)

from zero_compiler.errors import ZeroError

pytestmark = [pytest.mark.dist, pytest.mark.slow]
cases = Cases(__name__)


def _all(how, stage, rank):
    out = []
    for name, write in WRITES.items():
        torch._dynamo.reset()
        out += [f"{name}: {said}" for said in differences(write, how, stage, rank, 2)]
    return out


@cases.add
def eagerly_at_stage_3(rank):
    out = _all("eager", 3, rank)
    for write in (_assigned, _assigned_by_a_function):
        out += differences(write, "eager", 3, rank, 2)
    return out


@cases.add
def compiled_at_stage_3(rank):
    return _all("compiled", 3, rank)


@cases.add
def compiled_where_weights_are_kept_until_the_shards_change(rank):
    return _all("compiled", 1, rank)


@cases.add
def what_is_not_elementwise_is_an_error(rank):
    out = []
    for how in ("eager", "compiled"):
        try:
            differences(_renorm, how, 3, rank, 2)
        except ZeroError as error:
            if "'inner.weight' in place" not in str(error):
                out.append(f"{how}: {error}")
        else:
            out.append(f"{how}: no error")
    return out


@cases.add
def gemma_3n_that_limits_its_coefficients_in_every_forward(rank):
    """Beside one process that plays both ranks."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    import zero_compiler as zero

    config = Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=[64, 64], num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_kv_shared_layers=0, laurel_rank=4, layer_types=["full_attention"] * 2, altup_coef_clip=0.01,
        activation_sparsity_pattern=[0.0, 0.0], pad_token_id=0,
    )  # fmt: skip
    out = []
    for how in ("eager", "compiled"):
        torch._dynamo.reset()
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Gemma3nForCausalLM(config).train())
        plain, model = models
        zero.shard(model, stage=3, device="cpu", compute="aten")
        call = torch.compile(model, backend="zero") if how == "compiled" else model
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
        for step in range(3):
            ids = torch.randint(1, 64, (2, 1, 8), generator=torch.Generator().manual_seed(step))
            ours = call(input_ids=ids[rank], labels=ids[rank], use_cache=False).loss
            ours.backward()
            for r in range(2):
                theirs = plain(input_ids=ids[r], labels=ids[r], use_cache=False).loss
                (theirs / 2).backward()
                if r == rank and not torch.allclose(ours, theirs, atol=1e-5):
                    out.append(f"{how}: loss {ours} and {theirs} in step {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        clipped = [p.full_tensor() for n, p in model.named_parameters() if "prediction_coefs" in n]
        wanted = [p for n, p in plain.named_parameters() if "prediction_coefs" in n]
        out += [
            f"{how}: weights"
            for a, b in zip(clipped, wanted, strict=True)
            if not torch.allclose(a, b, atol=1e-5)
        ]
    return out


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)
