"""A sharded model is given another dtype or device: its parameters stay the objects that they are."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from null.small import batch, both_ways, mlp, use

import zero_compiler as zero
from zero_compiler.errors import ShardError


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("change", ["half", "bfloat16", "double"])
def test_a_dtype_changed_after_sharding(how, change):
    model = zero.shard(mlp())
    call = use(model, how)
    getattr(model, change)()
    with pytest.raises(
        ShardError,
        match=r"parameter '0\.weight' was sharded as torch\.float32 on cpu, and is torch\.\w+ on cpu now",
    ):
        call(batch())
    model.float()
    call(batch()).sum().backward()


def test_a_dtype_is_changed_where_garbage_refers_to_parameters_weakly():
    """As Dynamo of torch 2.11 leaves it, in a frame that it did not compile."""
    model = zero.shard(mlp())
    left: list[Any] = [weakref.ref(model[0].weight)]
    left.append(left)
    gc.disable()
    try:
        del left
        model.double()
    finally:
        gc.enable()
    assert model[0].weight.dtype == torch.float64


@both_ways
def test_a_device_changed_after_sharding(how):
    model = zero.shard(mlp())
    call = use(model, how)
    model.to("meta")
    with pytest.raises(
        ShardError, match=r"parameter '0\.weight' was sharded as .* and is torch\.float32 on meta now"
    ):
        call(batch())


def half_and_call(model, call):
    model.half()
    call(batch())


@both_ways
def test_moving_a_model_that_was_trained(how):
    """What changes nothing works; what would change a parameter that autograd knows says so."""
    model = zero.shard(mlp())
    call = use(model, how)
    call(batch()).sum().backward()
    before = dict(model.named_parameters())
    for same in (model.to("cpu"), model.float(), model.share_memory()):
        assert same is model
    assert all(p is before[name] and p.grad is not None for name, p in model.named_parameters())
    assert list(before) == [name for name, _ in model.named_parameters()]
    loss = call(batch()).sum()  # whose graph may hold the parameters
    with pytest.raises(
        ShardError, match="has been trained cannot change its dtype|was sharded as torch.float32"
    ):
        half_and_call(model, call)
    del loss
