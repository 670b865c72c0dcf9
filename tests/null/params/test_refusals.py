"""What other libraries would do to a sharded model: one sentence each that says what to write, before it begins."""

from __future__ import annotations

import logging

import pytest
import torch
from marks import slow
from null.small import batch, both_ways, mlp, use
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import zero_compiler as zero
from zero_compiler.errors import GradientError, ShardError
from zero_compiler.params import refusals

# --- wrappers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [lambda m: m, lambda m: nn.Sequential(m)])
def test_data_parallel_around_a_sharded_model(inner):
    with pytest.raises(ShardError, match="DataParallel around a sharded model: zero.shard has partitioned"):
        nn.DataParallel(inner(zero.shard(mlp())))


def test_data_parallel_around_a_plain_model_is_left_alone():
    zero.shard(mlp())
    nn.DataParallel(mlp())


# --- methods of libraries ------------------------------------------------------------------------------------------


class Saves(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.called = nn.Linear(4, 3), []

    def save_pretrained(self, folder):
        self.called.append(folder)

    def push_to_hub(self, name):
        self.called.append(name)

    def merge_adapter(self):
        self.inner.weight.data = self.inner.weight.data * 2

    def merge(self, x):  # of no adapter
        return x

    def get_input_embeddings(self):
        return self.inner

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None):
        self.called.append(new_num_tokens)


@pytest.mark.parametrize("name", ["save_pretrained", "push_to_hub"])
def test_saving_is_for_whole_weights(name):
    model = zero.shard(Saves())
    with pytest.raises(
        ShardError, match=rf"{name}\(\) of a sharded Saves: .*write `with zero.gathered\(model\):`"
    ):
        getattr(model, name)("there")
    with zero.gathered(model):
        getattr(model, name)("there")
    assert model.called == ["there"]


def test_merging_is_for_whole_weights():
    model = zero.shard(Saves())
    before = model.inner.weight.full_tensor().detach().clone()
    with pytest.raises(ShardError, match=r"merge_adapter\(\) of .*zero.gathered\(model, write=True\):"):
        model.merge_adapter()
    with zero.gathered(model, write=True):
        model.merge_adapter()
    assert torch.equal(model.inner.weight.full_tensor(), before * 2)
    assert model.merge(3) == 3


def test_token_embeddings_keep_their_number():
    model = zero.shard(Saves())
    with pytest.raises(ShardError, match=r"call resize_token_embeddings\(\) before zero.shard"):
        model.resize_token_embeddings(5)
    with pytest.raises(ShardError, match=r"call resize_token_embeddings\(\) before zero.shard"):
        model.resize_token_embeddings(3, pad_to_multiple_of=8)
    model.resize_token_embeddings(3)
    model.resize_token_embeddings()
    assert model.called == [3, None]


# --- attributes, tracers, hooks ------------------------------------------------------------------------------------


def test_quantization():
    model = zero.shard(mlp())
    with pytest.raises(ShardError, match="quantize before zero.shard"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert not hasattr(model, "qconfig")


def test_scripting_and_tracing():
    model = zero.shard(mlp())
    with pytest.raises(ShardError, match="torch.jit.script of a sharded Sequential"):
        torch.jit.script(model)
    with pytest.raises(ShardError, match=r"torch.jit.trace .*'0.weight'.*zero.gathered\(model\)"):
        torch.jit.trace(model, batch())
    with zero.gathered(model):
        traced = torch.jit.trace(model, batch())
    assert torch.equal(traced(batch()), model(batch()))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x * self.scale)


@pytest.mark.parametrize("build", [Scaled, lambda: nn.Sequential(Scaled())])
def test_symbolic_tracing_keeps_no_weight_as_a_constant(build):
    model = zero.shard(build())
    with pytest.raises(ShardError, match="torch.fx .*keep its values as constants"):
        torch.fx.symbolic_trace(model)
    x = torch.randn(2, 4)
    with zero.gathered(model):
        traced = torch.fx.symbolic_trace(model)
        assert torch.equal(traced(x), model(x))


def test_exporting_and_tracing_of_leaves_work():
    model = zero.shard(mlp())
    want = model(batch())
    assert torch.equal(torch.export.export(model, (batch(),)).module()(batch()), want)
    assert torch.equal(torch.fx.symbolic_trace(model)(batch()), want)


@pytest.mark.parametrize("marked", [False, True])
def test_dynamo_takes_no_sharded_module_for_one_of_fsdp(marked):
    """It captures the model as a whole, also where an integration has put the mark that transformers looks for."""
    model = zero.shard(mlp(), compute="aten")
    if marked:
        model.__dict__["_is_fsdp_managed_module"] = True
    assert getattr(model, "_is_fsdp_managed_module", False) is marked
    use(model, "compiled")(batch())
    assert len(model._zero.sharded_model.frames) == 1


def called_once(monkeypatch):
    """A model whose compiled call has run, of which no late hook has been told; and that call."""
    monkeypatch.setattr(refusals, "_said_late", set())
    model = zero.shard(mlp(), compute="aten")
    call = use(model, "compiled")
    call(batch())
    return model, call


@pytest.mark.parametrize(
    ("hook", "inner"),
    [
        ("register_forward_hook", True),
        pytest.param("register_forward_hook", False, marks=pytest.mark.slow),
        pytest.param("register_forward_pre_hook", False, marks=pytest.mark.slow),
        pytest.param("register_forward_pre_hook", True, marks=pytest.mark.slow),
        pytest.param("register_full_backward_hook", True, marks=pytest.mark.slow),
        pytest.param("register_full_backward_pre_hook", False, marks=pytest.mark.slow),
    ],
)
def test_a_hook_behind_the_first_compiled_call_is_told_of_once(caplog, monkeypatch, hook, inner):
    model, call = called_once(monkeypatch)
    called = []
    with caplog.at_level(logging.WARNING, logger="zero_compiler"):
        for _ in range(2):
            getattr(model[0] if inner else model, hook)(lambda *_: called.append(1))
    (record,) = [r for r in caplog.records if r.name == "zero_compiler"]
    assert hook in record.getMessage()
    assert "compiled calls may leave this one out" in record.getMessage()
    torch._dynamo.reset()  # as it says
    call(batch()).sum().backward()
    assert called == [1, 1]


@pytest.mark.parametrize(
    "hook", ["register_module_forward_hook", *slow("register_module_full_backward_hook")]
)
def test_a_hook_for_all_modules_behind_the_first_compiled_call_is_told_of_once(caplog, monkeypatch, hook):
    _, call = called_once(monkeypatch)
    called = []
    with caplog.at_level(logging.WARNING, logger="zero_compiler"):
        with getattr(nn.modules.module, hook)(lambda module, *_: called.append(type(module))):
            for _ in range(2):
                call(batch()).sum().backward()
            told = [r.getMessage() for r in caplog.records if r.name == "zero_compiler"]
            if not told:  # a release of torch that compiles anew for it
                assert sum(issubclass(kind, nn.Linear) for kind in called) == 4
                return
            assert len(told) == 1
            assert "register_module_forward_hook" in told[0]
            torch._dynamo.reset()  # as it says
            refusals._said_late.clear()
            called.clear()
            call(batch()).sum().backward()
    assert sum(issubclass(kind, nn.Linear) for kind in called) == 2
    assert len([r for r in caplog.records if r.name == "zero_compiler"]) == 1


def test_hooks_of_a_model_that_is_not_compiled_are_no_news(caplog, monkeypatch):
    monkeypatch.setattr(refusals, "_said_late", set())
    model = zero.shard(mlp())
    model(batch())
    called = []
    model[0].register_forward_hook(lambda *_: called.append(0))
    model(batch())
    assert called == [0]
    assert not caplog.records


def test_weight_norm_by_a_hook():
    with pytest.raises(ShardError, match="WeightNorm of torch.nn.utils on a sharded module"):
        torch.nn.utils.weight_norm(zero.shard(mlp())[0])


# --- penalties outside of the forward --------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(
    "penalty",
    [
        lambda params: sum(p.pow(2).sum() for p in params),
        lambda params: 0.1 * torch.stack([p.norm() for p in params]).sum(),
    ],
)
def test_a_penalty_on_parameters(how, penalty):
    plain, model = mlp(), zero.shard(mlp(), compute="aten")
    call = use(model, how)
    with pytest.raises(GradientError, match=r'p\.full_tensor\(grad_placements=\[Partial\("avg"\)\]\)'):
        (call(batch()).sum() + penalty(model.parameters())).backward()
    model.zero_grad()
    whole = penalty(p.full_tensor(grad_placements=[Partial("avg")]) for p in model.parameters())
    (call(batch()).sum() + whole).backward()
    (plain(batch()).sum() + penalty(plain.parameters())).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


OUTSIDE = {
    "added": lambda loss, term: loss + term,
    "first": lambda loss, term: 0.1 * term + loss,
    "in place": lambda loss, term: loss.add_(term),
    "weighed": lambda loss, term: torch.add(loss, term, alpha=0.1),
    "taken away": lambda loss, term: loss - term,
    "times": lambda loss, term: loss * term,
    "divided": lambda loss, term: loss / term,
    "stacked": lambda loss, term: torch.stack([loss, term]).sum(),
    "into a number": lambda loss, term: torch.zeros(()).add_(term) + loss,
}


@pytest.mark.parametrize("how", OUTSIDE)
def test_a_penalty_beside_a_loss_that_is_computed_outside_too(how):
    model = zero.shard(mlp())
    loss = nn.functional.mse_loss(model(batch()), torch.zeros(5, 3))
    with pytest.raises(GradientError, match=r"p\.full_tensor\(grad_placements"):
        OUTSIDE[how](loss, sum(p.square().sum() for p in model.parameters())).backward()


def test_a_loss_beside_what_is_not_of_a_sharded_model_is_left_alone():
    model = zero.shard(mlp())
    mesh = model[0].weight.device_mesh
    other = DTensor.from_local(torch.ones(3, requires_grad=True), mesh, [Replicate()])
    loss = nn.functional.mse_loss(model(batch()), torch.zeros(5, 3))
    with pytest.raises(RuntimeError, match="mixed") as error:
        (loss + other.sum()).backward()
    assert not isinstance(error.value, GradientError)


# --- another tensor in the place of a parameter's values -----------------------------------------------------------


@both_ways
def test_values_that_a_parameter_would_drop(how):
    model = zero.shard(mlp(), compute="aten")
    call = use(model, how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[0].weight.data += 1
    call(batch()).sum().backward()
    optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    torch.nn.utils.vector_to_parameters(torch.ones(count), model.parameters())
    with pytest.raises(ShardError, match=r"'0.weight' was given another tensor by .data =.*param.data.copy_"):
        optimizer.step()
    with pytest.raises(ShardError, match=r"'0.weight' was given another tensor"), zero.gathered(model):
        pass
    torch._dynamo.reset()
    with pytest.raises(ShardError, match=r"'0.weight' was given another tensor"):
        call(batch())


@both_ways
def test_a_sharded_value_that_a_parameter_would_drop(how):
    model = zero.shard(mlp(), compute="aten")
    call = use(model, how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    call(batch()).sum().backward()
    model.to(torch.float64).to(torch.float32)  # other memory, which is told
    model[0].weight.data = model[0].weight.data  # the same
    optimizer.step()
    model[0].weight.data = model[0].weight.data * 2
    with pytest.raises(ShardError, match=r"'0.weight' was given another tensor by .data =.*param.data.copy_"):
        optimizer.step()
    with pytest.raises(ShardError, match=r"'0.weight' was given another tensor"), zero.gathered(model):
        pass


def test_values_of_other_models_are_theirs():
    zero.shard(mlp())
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    plain[0].weight.data = torch.zeros_like(plain[0].weight)
    plain(batch()).sum().backward()
    optimizer.step()


def test_save_pretrained_of_values_that_are_given_is_left_alone():
    class Saves(nn.Linear):
        def save_pretrained(self, folder, state_dict=None):
            return state_dict

    model = zero.shard(Saves(4, 4))
    assert model.save_pretrained("out", state_dict={}) == {}
    with pytest.raises(ShardError, match="save_pretrained"):
        model.save_pretrained("out")
