"""What cannot be done to a sharded model, or in its forward: one clear sentence each, in eager and compiled use."""

from __future__ import annotations

import copy

import pytest
import torch
from null.small import batch, both_ways, mlp, use
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ShardError, ZeroError

# --- changed after sharding --------------------------------------------------------------------------------------


@both_ways
def test_a_model_that_has_no_values_yet(how):
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    call = use(zero.shard(model, device="cpu"), how)
    with pytest.raises(
        ShardError,
        match="parameter 'weight' was .* it has no values; .*zero.load_safetensors, or with to_empty",
    ):
        call(torch.ones(2, 4))


@both_ways
@pytest.mark.parametrize("called_before", [False, True])
def test_a_parameter_replaced_by_a_plain_one(how, called_before):
    model = zero.shard(mlp())
    call = use(model, how)
    if called_before:
        call(batch()).sum().backward()
    model[2].weight = nn.Parameter(torch.zeros(3, 6))
    for _ in range(2):
        with pytest.raises(
            ShardError, match=r"parameter '2\.weight' was replaced by a plain tensor after zero\.shard"
        ):
            call(batch())
    with (
        pytest.raises(ShardError, match=r"parameter '2\.weight' was deleted or replaced"),
        zero.gathered(model),
    ):
        pass
    assert model[0].weight is dict(model.named_parameters())["0.weight"]
    assert zero.inspect(model).stage == 3


@both_ways
def test_a_sharded_parameter_of_another_shape_in_its_place(how):
    model, other = zero.shard(mlp()), zero.shard(nn.Linear(6, 7))
    call = use(model, how)
    model[2].weight = other.weight
    with pytest.raises(
        ShardError, match=r"'2\.weight' was sharded with shape \[3, 6\], and a sharded .* \[7, 6\]"
    ):
        call(batch())


@both_ways
def test_a_deleted_parameter_is_an_attribute_error_as_in_torch(how):
    model = zero.shard(mlp())
    call = use(model, how)
    del model[2].bias
    with pytest.raises(AttributeError, match="object has no attribute 'bias'"):
        call(batch())


@both_ways
def test_a_model_goes_on_after_an_error_in_its_forward(how):
    plain, model = mlp(), zero.shard(mlp())
    call = use(model, how)
    with pytest.raises(Exception, match="shapes cannot be multiplied|must have same reduction dim"):
        call(torch.randn(2, 9))
    torch.testing.assert_close(call(batch()), plain(batch()))
    assert isinstance(model[0].weight.grad, type(None))


@both_ways
def test_a_gradient_of_another_kind(how):
    model = zero.shard(mlp())
    call = use(model, how)
    with pytest.raises((ZeroError, RuntimeError, TypeError)):
        model[0].weight.grad = torch.zeros(2, 2)
    call(batch()).sum().backward()
    assert model[0].weight.grad.shape == model[0].weight.shape


# --- reading parameters past their modules -------------------------------------------------------------------------


class Reads(nn.Module):
    def __init__(self, what, scalar=True):
        super().__init__()
        self.inner, self.what, self.scalar = nn.Linear(4, 4), what, scalar

    def forward(self, x):
        reads = {
            "parameters": lambda: list(self.parameters()),
            "named_parameters": lambda: [p for _, p in self.named_parameters()],
            "state_dict": lambda: list(self.state_dict(keep_vars=True).values()),
            "_parameters": lambda: list(self.inner._parameters.values()),
            "attributes": lambda: [self.inner.weight, self.inner.bias],
        }
        penalty = sum(p.square().sum() for p in reads[self.what]())
        return self.inner(x).square().mean() + penalty


@both_ways
@pytest.mark.parametrize("what", ["state_dict", "_parameters"])
def test_a_forward_that_computes_with_shards(how, what):
    model = zero.shard(Reads(what))
    with pytest.raises(
        ShardError,
        match=r"computes with shards.* attributes such as module\.weight and parameters\(\) are whole",
    ):
        use(model, how)(torch.randn(2, 4))


@both_ways
def test_what_that_sentence_says_to_do(how):
    plain = Reads("attributes")
    model = zero.shard(copy.deepcopy(plain))
    x = torch.randn(2, 4)
    use(model, how)(x).backward()
    (sum(p.square().sum() for p in model.parameters()).full_tensor()).backward()
    (plain(x) + sum(p.square().sum() for p in plain.parameters())).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


# --- what a gathered weight cannot do ----------------------------------------------------------------------------


class Writes(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.inner, self.what = nn.Linear(4, 4), what

    def forward(self, x):
        with torch.no_grad():
            if self.what == "whole":
                self.inner.weight.clamp_(-0.1, 0.1)
            elif self.what == "norm":
                self.inner.weight.data.div_(self.inner.weight.norm())
            elif self.what == "part":
                self.inner.bias[1:3].zero_()
            elif self.what == "read":
                self.inner.weight.data.clamp(-0.1, 0.1)
        weight = self.inner.weight
        out = torch.nn.functional.linear(x, weight, self.inner.bias)
        if self.what == "late":
            with torch.no_grad():
                weight.zero_()
        return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "what", "name"),
    [
        *((how, "part", "inner.bias") for how in ("eager", "compiled")),
        ("compiled", "late", "inner.weight"),  # eager: as plain PyTorch
        ("compiled", "norm", "inner.weight"),  # of the whole weight: more than its rows
    ],
)
def test_a_forward_that_writes_to_a_weight(how, what, name):
    # Of one rank the gathered weight is the parameter itself, unless it has another dtype.
    model = zero.shard(Writes(what), device="cpu", param_dtype="bf16")
    with pytest.raises(ZeroError, match=rf"writes to parameter '{name}' in place.*zero\.gathered"):
        use(model, how)(torch.randn(2, 4))
    for harmless in ("none", "read"):
        model = zero.shard(Writes(harmless), device="cpu", param_dtype="bf16")
        use(model, how)(torch.randn(2, 4)).sum().backward()


def test_an_eager_forward_of_one_rank_writes_to_its_parameter():
    model = zero.shard(Writes("whole"), device="cpu")
    model(torch.full((2, 4), float("nan"))).sum().backward()
    assert model.inner.weight.full_tensor().abs().max() <= 0.1


def test_a_weight_that_is_no_number_was_not_written_to():
    model = zero.shard(Writes("none"), device="cpu", param_dtype="bf16")
    with torch.no_grad():
        model.inner.weight.fill_(float("nan"))
    assert model(torch.randn(2, 4)).isnan().any()


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_tables_with_a_limited_norm_or_sparse_gradients(cls):
    with pytest.raises(ShardError, match=r"0: Embedding\w*\(max_norm=1\.0\) writes to its weight in forward"):
        zero.shard(nn.Sequential(cls(5, 3, max_norm=1.0)))
    with pytest.raises(ShardError, match=r"sparse=True\) has sparse gradients.*sparse=False"):
        zero.shard(nn.Sequential(cls(5, 3, sparse=True)))


class Keeps(nn.Module):
    """Reads a weight in its first forward alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4, bias=False), []

    def forward(self, x):
        self.kept = self.kept or [self.layer.weight]
        return x @ self.kept[0]


def test_a_weight_that_an_earlier_forward_has_kept():
    model = zero.shard(Keeps(), param_dtype=torch.bfloat16)
    model(batch())
    with torch.no_grad():
        model.layer.weight.mul_(2)
    with pytest.raises(ShardError, match="an earlier one read and kept: read it anew in each"):
        model(batch()).sum().backward()
