"""What a sharded module is to its user, in one process and without a process group.

Every test runs at world size 1: what an attribute means, what copies are, and what stays as torch has it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from marks import slow
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import ConfigError, ShardError

ATEN = {"compute": "aten"}


class Net(nn.Module):
    """Two layers; the forward also reads a child's weight by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.second(h) * self.scale + (h @ self.second.weight.t()) * 0.5


def net(seed=0, cls=Net):
    torch.manual_seed(seed)
    return cls()


def batch(seed=1):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options={**ATEN, **options})


def full_grads(model):
    return {
        n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for n, p in model.named_parameters()
    }


def train(model, call=None, steps=3, lr=0.1):
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    call = model if call is None else call
    losses = []
    for i in range(steps):
        loss = call(batch(i)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


REFERENCE = train(net())


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


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_hooks_and_autograd_grad_mean_what_they_always_do(how):
    plain, model = net(), zero.shard(net())
    call = compiled(model) if how == "compiled" else model
    model.first.weight.register_hook(lambda g: g * 2)
    loss = call(batch()).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(plain(batch()).square().mean(), list(plain.parameters()))
    for (name, p), grad, want in zip(model.named_parameters(), grads, expected, strict=True):
        assert p.grad is None
        torch.testing.assert_close(grad.full_tensor(), want * 2 if name == "first.weight" else want)
    call(batch()).square().mean().backward(inputs=[model.second.weight])
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["second.weight"]


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_freezing_in_mid_training_is_seen_by_the_next_call(how):
    model = zero.shard(net())
    call = compiled(model) if how == "compiled" else model
    call(batch()).sum().backward()
    model.first.requires_grad_(False)
    model.zero_grad()
    call(batch()).sum().backward()
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None
    model.first.requires_grad_(True)
    call(batch()).sum().backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_freezing_between_forward_and_backward(how):
    """As in plain PyTorch, what is frozen when its gradient comes gets none."""
    for quiet in (False, True):
        model = zero.shard(net())
        call = compiled(model) if how == "compiled" else model
        loss = call(batch()).sum()
        model.first.weight.requires_grad_(False)
        with zero.no_sync(model) if quiet else contextlib.nullcontext():
            loss.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == ["first.weight"]


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
    call = compiled(model) if how == "compiled" else model
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
    assert model.seen == [(torch.Tensor, (3, 4))]
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
    call = compiled(model) if how == "compiled" else model
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


def test_ties_survive_a_copy():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    twin = copy.deepcopy(zero.shard(model))
    assert twin[1].weight is twin[0].weight
    assert twin[1].weight is not model[0].weight


# --- process group and mesh --------------------------------------------------------------------------------------


def test_one_process_has_a_mesh_and_no_process_group():
    model = zero.shard(net())
    train(model, compiled(model))
    mesh = model.first.weight.device_mesh
    assert mesh.size() == 1
    assert not dist.is_initialized()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.isfinite(total.full_tensor() if isinstance(total, DTensor) else total)


def run_python(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


@pytest.mark.slow
def test_the_backend_is_found_without_importing_the_package():
    done = run_python(
        "import torch\n"
        "assert 'zero' in torch._dynamo.list_backends()\n"
        "m = torch.nn.Linear(3, 2)\n"
        "c = torch.compile(m, backend='zero', options={'compute': 'aten'})\n"
        "c(torch.ones(1, 3)).sum().backward()\n"
        "assert m.weight.grad is not None\n"
        "print('works')\n"
    )
    assert done.stdout.strip() == "works", done.stderr


def test_a_process_group_made_after_sharding_is_an_error():
    # Two processes would be needed to make such a group on gloo; the fake backend has any number of ranks.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = zero.shard(net())
    model(batch())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for call in (model, compiled(model)):
            with pytest.raises(
                ShardError, match=r"a process group was made after zero\.shard.* before zero\.shard"
            ):
                call(batch())
    finally:
        dist.destroy_process_group()
    compiled(model)(batch()).sum().backward()


def test_world_size_in_the_environment_without_a_group_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ShardError, match="WORLD_SIZE is 2 but there is no process group"):
        zero.shard(net())


# --- plain models ------------------------------------------------------------------------------------------------


def test_a_plain_model_trains_as_stage_0_and_logs_once(caplog):
    model = net()
    with caplog.at_level(logging.WARNING, logger="zero_compiler"):
        call = compiled(model)
        losses = train(model, call)
        with torch.no_grad():
            call(batch())
        call(torch.randn(9, 4)).sum().backward()
    assert losses == pytest.approx(REFERENCE, rel=1e-6)
    said = [r.getMessage() for r in caplog.records if "zero.shard" in r.getMessage()]
    assert len(said) == 1
    assert "stage 0" in said[0]


def test_stage_0_in_the_options_of_a_plain_model_is_allowed():
    model = net()
    assert train(model, compiled(model, stage=0)) == pytest.approx(REFERENCE, rel=1e-6)


@pytest.mark.parametrize("options", [{"stage": 2}, {"param_dtype": "bf16"}, {"offload_params": "host"}])
def test_a_placement_on_a_plain_model_names_zero_shard(options):
    with pytest.raises(ConfigError, match=r"call zero\.shard\(model, stage=\.\.\.\) before torch\.compile"):
        compiled(net(), **options)(batch())


# --- gradients and values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_nan_in_a_gradient_passes_through(how):
    plain, model = net(), zero.shard(net())
    call = compiled(model) if how == "compiled" else model
    x = batch()
    x[0, 0] = float("nan")
    call(x).sum().backward()
    plain(x).sum().backward()
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, dict(plain.named_parameters())[name].grad, equal_nan=True)
    assert full_grads(model)["first.weight"].isnan().any()


@pytest.mark.parametrize("how", ["plain", "eager", "compiled"])
def test_a_weight_changed_between_forward_and_backward_is_an_error(how):
    model = net() if how == "plain" else zero.shard(net(), stage=3)
    call = compiled(model) if how == "compiled" else model
    loss = call(batch()).square().mean()
    with torch.no_grad():
        model.second.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_the_plain_model_in_one_process(stage):
    model = zero.shard(net(), stage=stage)
    assert train(model, compiled(model)) == pytest.approx(REFERENCE, rel=1e-6)


class Same(nn.Module):
    """Both weights and both biases have the same gradient, which a compiler computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)

    def forward(self, x):
        return self.first(x) + self.second(x)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_equal_gradients_are_tensors_of_their_own(how):
    plain, model = net(cls=Same), zero.shard(net(cls=Same))
    call = compiled(model) if how == "compiled" else model
    for i in range(3):
        plain(batch(i)).square().sum().backward()
        call(batch(i)).square().sum().backward()
    for m in (plain, model):
        torch.nn.utils.clip_grad_value_(m.parameters(), 1.5)
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, dict(plain.named_parameters())[name].grad)
    pointers = {p.grad.to_local().data_ptr() for p in model.parameters()}
    assert len(pointers) == 4


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_gradient_that_an_input_has_too_is_not_shared_with_it(how):
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 4))

        def forward(self, x):
            return x + self.weight

    model = zero.shard(Add())
    call = compiled(model) if how == "compiled" else model
    x = batch().requires_grad_()
    (call(x) * 3).sum().backward()
    model.weight.grad.mul_(0)
    assert torch.equal(x.grad, torch.full((5, 4), 3.0))


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
