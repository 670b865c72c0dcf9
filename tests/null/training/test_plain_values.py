"""Training in one process: the gradients and values of the plain model."""

from __future__ import annotations

import pytest
import torch
from null.small import REFERENCE, batch, compiled, grads, net, train, use
from torch import nn

import zero_compiler as zero


@pytest.mark.parametrize("how", ["eager", "compiled", "aot_eager", "eager backend"])
def test_training_is_that_of_the_plain_model(how):
    model = zero.shard(net())
    torch._dynamo.reset()
    call = {
        "eager": lambda: model,
        "compiled": lambda: compiled(model),
        "aot_eager": lambda: torch.compile(model, backend="aot_eager"),
        "eager backend": lambda: torch.compile(model, backend="eager"),
    }[how]()
    losses = train(model, call)
    assert losses == pytest.approx(REFERENCE, rel=1e-6)


@pytest.mark.slow
def test_inductor_is_right_on_a_sharded_model():
    torch._dynamo.reset()
    model = zero.shard(net())
    assert train(model, torch.compile(model)) == pytest.approx(REFERENCE, rel=1e-5)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_nan_in_a_gradient_passes_through(how):
    plain, model = net(), zero.shard(net())
    call = use(model, how)
    x = batch()
    x[0, 0] = float("nan")
    call(x).sum().backward()
    plain(x).sum().backward()
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, dict(plain.named_parameters())[name].grad, equal_nan=True)
    assert grads(model)["first.weight"].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_the_plain_model_in_one_process(stage):
    model = zero.shard(net(), stage=stage)
    assert train(model, compiled(model)) == pytest.approx(REFERENCE, rel=1e-6)


class Nested(nn.Module):
    """Notes the dtypes of what it is given, wherever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x, *, more, mask=None):
        given = (x, more["a"][0], more["b"], mask)
        self.seen = [t.dtype for t in given]
        return self.layer(x + more["a"][0] * mask) + more["b"].to(x.dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_floating_inputs_of_the_root_are_cast_wherever_they_are(compiled):
    model = zero.shard(Nested(), stage=3, param_dtype="bf16")
    call = torch.compile(model, backend="zero", options={"compute": "aten"}) if compiled else model
    x = torch.randn(2, 4)
    more = {"a": [torch.randn(2, 4, dtype=torch.float64)], "b": torch.ones(2, 4, dtype=torch.int64)}
    out = call(x, more=more, mask=torch.ones(2, 4, dtype=torch.bool))
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.int64, torch.bool]
    assert out.dtype == torch.bfloat16
    assert more["a"][0].dtype == torch.float64, "the caller's own are left alone"
