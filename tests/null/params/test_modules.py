"""What a sharded module is to its user, in one process: its attributes, and what assignment and copies mean."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from marks import slow
from null.small import REFERENCE, Net, batch, compiled, grads, net, same, train, use
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import ShardError

# --- module.weight -----------------------------------------------------------------------------------------------


def test_outside_a_forward_an_attribute_is_the_sharded_parameter():
    model = zero.shard(net())
    assert model.first.weight is dict(model.named_parameters())["first.weight"]
    assert model.first.weight is model.first._parameters["weight"]
    assert isinstance(model.first.weight, nn.Parameter)
    assert isinstance(model.first.weight.data, DTensor)
    seen = []
    model.first.weight.register_hook(lambda g: seen.append(type(g)))
    model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is model.first.weight))
    model.second.bias.requires_grad_(False)
    model(batch()).sum().backward()
    assert seen == [DTensor, True]
    assert model.first.weight.grad is dict(model.named_parameters())["first.weight"].grad
    assert model.first.weight.grad.shape == model.first.weight.shape
    assert model.second.bias.grad is None
    assert not dist.is_initialized()


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.a.__dict__["weight"] = self.b.weight * 2
        y = self.a(x)
        del self.a.__dict__["weight"]
        return self.b(y).square().mean()


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_what_stands_in_the_dictionary_of_a_module_hides_its_parameter(how):
    plain = Hides()
    model = zero.shard(copy.deepcopy(plain), device="cpu")
    plain(torch.ones(2, 4)).backward()
    use(model, how)(torch.ones(2, 4)).backward()
    assert plain.a.weight.grad is None
    assert model.a.weight.grad is None
    assert torch.allclose(model.b.weight.grad.to_local(), plain.b.weight.grad)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_freezing_in_mid_training_is_seen_by_the_next_call(how):
    model = zero.shard(net())
    call = use(model, how)
    call(batch()).sum().backward()
    model.first.requires_grad_(False)
    model.zero_grad()
    call(batch()).sum().backward()
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None
    model.first.requires_grad_(True)
    call(batch()).sum().backward()
    assert model.first.weight.grad is not None


class Lender(nn.Module):
    """Calls a part of itself with other tensors in the place of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        lent = {"weight": self.inner.weight * 2, "bias": self.inner.bias}
        return torch.func.functional_call(self.inner, lent, (x,)) + self.inner(x)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_forward_that_lends_a_part_other_weights(how):
    plain, model = Lender(), zero.shard(Lender())
    model.load_state_dict(plain.state_dict())
    call = use(model, how)
    x = torch.randn(3, 4)
    for m in (call, plain):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


class Spy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.seen: list = []

    def forward(self, x):
        self.seen.append((type(self.inner.weight), tuple(self.inner.weight.shape)))
        return self.inner(x) + self.inner.weight.sum()


def test_inside_a_forward_an_attribute_is_the_full_weight():
    model = zero.shard(net(cls=Spy))
    out = model(batch())
    assert model.seen == [(nn.Parameter, (3, 4))]
    plain = net(cls=Spy)
    torch.testing.assert_close(out, plain(batch()))
    assert isinstance(model.inner.weight, DTensor)


def test_scope_ends_with_an_exception_in_the_forward():
    model = zero.shard(net())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 7))
    assert model.first.weight is dict(model.named_parameters())["first.weight"]


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_submodule_called_directly_has_its_full_weight(how):
    plain, model = net(), zero.shard(net())
    inner = compiled(model.first) if how == "compiled" else model.first
    inner(batch()).square().sum().backward()
    plain.first(batch()).square().sum().backward()
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), plain.first.weight.grad)
    assert model.second.weight.grad is None


# --- assignment, deletion, registration --------------------------------------------------------------------------


def test_deletion_and_plain_assignment_keep_the_meaning_of_nn_module():
    model = zero.shard(nn.Linear(4, 3))
    del model.bias
    with pytest.raises(AttributeError, match=r"'Linear' object has no attribute 'bias'"):
        model.bias
    assert not hasattr(model, "bias")
    assert list(model.state_dict()) == ["weight"]
    model.bias = torch.zeros(3)  # a plain tensor, as functional code assigns it
    assert type(model.bias) is torch.Tensor
    torch.testing.assert_close(model(batch()), batch() @ model.weight.full_tensor().t())
    del model.bias
    with pytest.raises(AttributeError):
        model.bias


def test_a_parametrization_comes_before_sharding():
    register = torch.nn.utils.parametrizations.weight_norm
    model = zero.shard(nn.Linear(4, 3))
    with pytest.raises(ShardError, match="sharded Linear cannot be swapped again.* before zero.shard"):
        register(model)
    torch.manual_seed(0)
    plain = register(nn.Linear(4, 3))
    torch.manual_seed(0)
    model = zero.shard(register(nn.Linear(4, 3)))
    for call in (model, compiled(model)):
        torch.testing.assert_close(call(batch()), plain(batch()))


def test_a_parameter_set_to_none_is_gone():
    model = zero.shard(nn.Linear(4, 3))
    model.bias = None
    assert model.bias is None
    assert [n for n, _ in model.named_parameters()] == ["weight"]
    expected = batch() @ model.weight.full_tensor().t()
    torch.testing.assert_close(model(batch()), expected)
    torch.testing.assert_close(compiled(model)(batch()), expected)


def test_a_module_registered_after_sharding_runs_and_trains_as_it_is():
    model = zero.shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
    model.append(nn.Linear(3, 2))
    model(batch()).sum().backward()
    assert type(model[2].weight) is nn.Parameter
    assert model[2].weight.grad is not None
    assert isinstance(model[0].weight.grad, DTensor)


def test_a_sharded_parameter_registered_again_stays_itself():
    model = zero.shard(net())
    weight = model.first.weight
    model.first.weight = weight
    assert model.first.weight is weight
    model.first.register_parameter("weight", weight)
    assert model.first.weight is weight
    assert train(model) == pytest.approx(REFERENCE, rel=1e-6)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_an_attribute_replaced_by_another_sharded_one_is_used(how):
    # e.g. tying after sharding: the second name is the first one's parameter from here on
    model = zero.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].weight = model[0].weight
    first, bias0, bias1 = (
        t.full_tensor().detach().requires_grad_() for t in (model[0].weight, model[0].bias, model[1].bias)
    )
    want = (batch() @ first.t() + bias0) @ first.t() + bias1
    want.square().sum().backward()
    call = use(model, how)
    got = call(batch())
    got.square().sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), first.grad)


# --- copies ------------------------------------------------------------------------------------------------------


def by_deepcopy(model):
    return copy.deepcopy(model)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("how", [by_deepcopy, *slow(by_pickle), by_torch_save])
@pytest.mark.parametrize("after_a_call", [*slow(False), True])
def test_a_copy_is_sharded_independent_and_trains(how, after_a_call):
    model = zero.shard(net(), stage=2)
    if after_a_call:
        compiled(model)(batch()).sum().backward()
        model.zero_grad()
    twin = how(model)
    assert type(twin).__mro__[1:] == type(model).__mro__[1:] == Net.__mro__
    assert type(twin.first).__mro__[1] is nn.Linear
    assert isinstance(twin.first.weight, DTensor)
    assert twin.first.weight is not model.first.weight
    assert twin.first.weight.to_local().data_ptr() != model.first.weight.to_local().data_ptr()
    before = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    losses = train(twin, compiled(twin))
    assert losses == pytest.approx(REFERENCE, rel=1e-6)
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), before[name])
        assert p.grad is None
    assert train(model, compiled(model)) == pytest.approx(REFERENCE, rel=1e-6)
    assert zero.inspect(twin).stage == 2
    with pytest.raises(ShardError, match="sharded already"):
        zero.shard(twin)


def test_a_pickled_model_holds_its_shards_once():
    model = zero.shard(nn.Linear(256, 256))
    before = len(pickle.dumps(model))
    compiled(model)(torch.ones(2, 256))
    assert len(pickle.dumps(model)) < before + 256 * 4  # bytes; the weight has as many times 256


@pytest.mark.parametrize("how", [by_deepcopy, by_pickle])
def test_a_copied_submodule_stands_alone(how):
    model = zero.shard(net())
    twin = how(model.first)
    torch.testing.assert_close(twin(batch()), model.first(batch()))
    with torch.no_grad():
        twin.weight.zero_()
    assert model.first.weight.full_tensor().abs().sum() > 0
    twin(batch()).sum().backward()
    assert model.first.weight.grad is None


@pytest.mark.parametrize("which", [0, 1])
def test_tied_parameters_that_are_not_any_more_are_an_error_until_they_are_again(which):
    """Compiled code knows one parameter for both, also where no frame reads both."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    zero.shard(model)
    x = torch.ones(2, 4)
    frames = [compiled(m) for m in model]
    want = [frame(x).detach() for frame in frames]
    tied = model[0].weight
    model[which].weight = nn.Parameter((tied * 2).detach())
    for frame in frames:
        with pytest.raises(
            ShardError, match=r"'0.weight' was tied to several attributes at zero.shard, and differ"
        ):
            frame(x)
    with pytest.raises(ShardError, match="tied"), zero.gathered(model):
        pass
    assert model[which](x).ne(want[which]).any()  # by itself, as it stands
    model[which].weight = tied
    for frame, value in zip(frames, want, strict=True):
        torch.testing.assert_close(frame(x), value)


def test_ties_survive_a_copy():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    twin = copy.deepcopy(zero.shard(model))
    assert twin[1].weight is twin[0].weight
    assert twin[1].weight is not model[0].weight


class CopiesItself(nn.Linear):
    """As a class of a library may: what it does not name is left out."""

    def __deepcopy__(self, memo):
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "left_out"})
        return made


@pytest.mark.parametrize("cls", [nn.Linear, CopiesItself])
@pytest.mark.parametrize("waits", [False, True])
def test_a_deep_copy_has_no_gradients_as_in_plain_torch(cls, waits):
    model = nn.Sequential(cls(4, 4), nn.Tanh(), cls(4, 4))
    model[2].weight = model[0].weight
    model[0].left_out = torch.ones(())
    twin = zero.shard(copy.deepcopy(model))
    with zero.no_sync(twin) if waits else contextlib.nullcontext():
        twin(batch()).sum().backward()
    twin[0].kept = None if waits else twin[2].bias.grad
    given = {name: p.grad for name, p in twin.named_parameters()}
    again = copy.deepcopy(twin)
    assert all(p.grad is given[name] is not None for name, p in twin.named_parameters())
    assert all(p.grad is None for p in again.parameters())
    assert (again[0].kept is None) == waits
    assert again[2].weight is again[0].weight
    assert hasattr(again[0], "left_out") == (cls is nn.Linear)
    for made in (model, again):
        made(batch(3)).square().sum().backward()
    same(grads(again), grads(model))
