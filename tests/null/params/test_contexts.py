"""zero.gathered in one process: whole parameters for a while, and what is written to them."""

from __future__ import annotations

import pytest
import torch
from null.small import batch, both_ways, grads, same, two, use, values
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ShardError


def test_inside_gathered_parameters_are_whole_and_come_back_as_they_were():
    model = zero.shard(two())
    model(batch()).backward()
    before, shards, kept = values(model), dict(model.named_parameters()), grads(model)
    with zero.gathered(model):
        inside = dict(model.named_parameters())
        assert list(inside) == list(shards)
        for name, p in inside.items():
            assert type(p) is nn.Parameter
            assert not p.requires_grad
            assert torch.equal(p, before[name])
        state = model.state_dict()
        assert all(type(v) is torch.Tensor and torch.equal(v, before[k]) for k, v in state.items())
        assert torch.equal(model.first.weight, before["first.weight"])
    for name, p in model.named_parameters():
        assert p is shards[name]
    same(grads(model), kept)


def test_what_is_read_inside_stays_valid_and_what_is_written_is_dropped():
    model = zero.shard(two())
    before = values(model)
    with zero.gathered(model):
        taken = model.first.weight
        model.first.weight.zero_()
    assert torch.equal(taken, torch.zeros(3, 4))
    same(values(model), before)


@pytest.mark.parametrize("fails", [False, True])
def test_written_values_are_cut_again_also_after_an_exception(fails):
    model = zero.shard(two())
    shards = dict(model.named_parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = values(model)
    try:
        with zero.gathered(model, write=True):
            model.first.weight.fill_(2)
            model.second.bias = nn.Parameter(torch.full((3,), 7.0))
            model.second.weight.data = torch.full((3, 4), 5.0)
            if fails:
                raise KeyError("in the body")
    except KeyError:
        assert fails
    after = values(model)
    assert torch.equal(after["first.weight"], torch.full((3, 4), 2.0))
    assert torch.equal(after["second.bias"], torch.full((3,), 7.0))
    assert torch.equal(after["second.weight"], torch.full((3, 4), 5.0))
    assert torch.equal(after["first.bias"], before["first.bias"])
    for name, p in model.named_parameters():
        assert p is shards[name]
    model(batch()).backward()
    opt.step()
    assert not torch.equal(values(model)["first.weight"], after["first.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_compiled_forward_sees_what_was_written_inside_and_after(stage):
    model = zero.shard(two(), stage=stage)
    call = use(model, "compiled")
    call(batch()).backward()  # stages 1 and 2 may keep gathered weights from here
    twin = two()
    with zero.gathered(model, write=True):
        with torch.no_grad():
            for p in (model.first.weight, twin.first.weight):
                p.fill_(0.25)
            torch.testing.assert_close(call(batch()), twin(batch()))
    torch.testing.assert_close(call(batch()), twin(batch()))
    model.zero_grad()
    call(batch()).backward()
    twin(batch()).backward()
    same(grads(model), grads(twin))


@both_ways
def test_a_forward_with_gradients_enabled_inside_gathered(how):
    model, twin = zero.shard(two()), two()
    call = use(model, how)
    x = batch().requires_grad_()
    with zero.gathered(model):
        call(x).backward()
    got, x.grad = x.grad, None
    twin(x).backward()
    torch.testing.assert_close(got, x.grad)
    assert model.first.weight.grad is None


def test_load_state_dict_inside_gathered():
    model, other = zero.shard(two()), two()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    with zero.gathered(model, write=True):
        model.load_state_dict(other.state_dict())
    same(values(model), values(other))


def test_a_second_gathered_inside_the_first_is_an_error():
    model = zero.shard(two())
    shards = dict(model.named_parameters())
    with zero.gathered(model):
        with pytest.raises(ShardError, match="this model is gathered already; leave the first one before"):
            with zero.gathered(model):
                pass
        assert type(model.first.weight) is nn.Parameter
    assert all(p is shards[n] for n, p in model.named_parameters())
    with zero.gathered(model):
        pass


def test_a_shape_that_changed_inside_is_an_error_and_nothing_is_written():
    model = zero.shard(two())
    before = values(model)
    window = zero.gathered(model, write=True)
    window.__enter__()
    model.first.weight.zero_()
    model.first.bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(ShardError, match=r"parameter 'first.bias' has shape \(9,\) at exit, expected \(3,\)"):
        window.__exit__(None, None, None)
    same(values(model), before)
    model(batch()).backward()


def test_tied_weights_stay_tied_inside():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    zero.shard(model)
    with zero.gathered(model, write=True):
        assert model[0].weight is model[1].weight
        model[1].weight.fill_(3)
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight.full_tensor(), torch.full((5, 4), 3.0))


def test_gathered_with_a_part_that_was_deleted():
    model = zero.shard(two())
    del model.first.bias
    model.second.bias = None
    with zero.gathered(model, write=True):
        model.first.weight.fill_(1)
    assert not hasattr(model.first, "bias")
    assert model.second.bias is None
    model.second(batch()).sum().backward()
    with zero.no_sync(model):
        model.second(batch()).sum().backward()
    model.second(batch()).sum().backward()
    assert [r["name"] for r in zero.inspect(model).to_dict()["parameters"]]


def test_the_backward_of_an_earlier_forward_inside_gathered_is_an_error():
    model = zero.shard(two())
    loss = use(model, "compiled")(batch())
    with (
        zero.gathered(model),
        pytest.raises(ShardError, match="whole inside zero.gathered: run the backward"),
    ):
        loss.backward()


def test_writing_between_forward_and_backward_is_an_error():
    for how in ("eager", "compiled"):
        model = zero.shard(two())
        loss = use(model, how)(batch())
        with zero.gathered(model, write=True):
            model.first.weight.zero_()
        with pytest.raises(
            ShardError, match=r"'first\.\w+' was modified in place between forward and backward"
        ):
            loss.backward()


def test_replacing_a_weight_between_forward_and_backward_is_an_error():
    """Backward would gather the new one."""
    model = zero.shard(two())
    loss = use(model, "compiled")(batch())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(
        ShardError, match=r"'first\.\w+' was replaced between forward and backward .* after backward"
    ):
        loss.backward()
    use(model, "compiled")(batch()).backward()  # and the next step is as any other


def test_gathered_and_no_sync_of_a_plain_model_do_nothing():
    model = two()
    with zero.gathered(model, write=True):
        model.first.weight.data.fill_(1)
    assert torch.equal(model.first.weight, torch.ones(3, 4))


def test_a_forward_inside_gathered_computes_in_the_dtype_of_the_weights():
    model, plain = zero.shard(two(), param_dtype="bf16"), two()
    with zero.gathered(model):
        torch.testing.assert_close(model(batch()), plain(batch()), rtol=0, atol=0)
