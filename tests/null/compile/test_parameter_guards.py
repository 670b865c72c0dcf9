"""Guards on sharded parameters: none in Python for each of them, and what they would find is found."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.tensor import DTensor, Replicate

import zero_compiler as zero
from zero_compiler.compile.parameter_guards import KnownParameters
from zero_compiler.errors import ShardError
from zero_compiler.ir.facts import ParamRef
from zero_compiler.params.modules import sharded_models_of

ATEN = {"compute": "aten"}


class Deep(nn.Module):
    def __init__(self, count=2):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model):
    return torch.compile(model, backend="zero", options=ATEN)


def guards_of(model):
    """What Dynamo checks before it runs the one compiled frame of ``model``, a line each."""
    (entry,) = _debug_get_cache_entry_list(type(model).__call__.__code__)
    return [line.split("#")[0] for line in str(entry.guard_manager).splitlines()]


def test_no_parameter_and_no_module_has_a_guard_in_python():
    counts = []
    for depth in (1, 3):
        model = zero.shard(Deep(depth), device="cpu")
        compiled(model)(torch.randn(2, 4)).sum().backward()
        lines = [g for g in guards_of(model) if "LAMBDA_GUARD" in g]
        assert not [
            g for g in lines if "dtensor_spec" in g or ".device_mesh is" in g or "sharded_model is" in g
        ]
        guards = guards_of(model)
        assert not [g for g in guards if "_local_tensor" in g or ".fget" in g]
        assert [g for g in guards if ".requires_grad == True" in g]  # what compiles anew is left
        counts.append(len(lines))
    assert counts[0] == counts[1]


def test_what_takes_a_parameter_out_of_its_module_is_found():
    """As torch's parametrizations do it, of a class that is one of theirs already."""
    plain = Deep()
    model = zero.shard(copy.deepcopy(plain), device="cpu")
    call, x, linear, other = compiled(model), torch.randn(2, 4), model.layers[1][1], torch.randn(4, 4)
    torch.testing.assert_close(call(x), plain(x))
    linear.register_parameter("of_weight", linear._parameters.pop("weight"))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(linear), "weight", property(lambda self: other))
        plain.layers[1][1].weight.copy_(other)
        torch.testing.assert_close(call(x), plain(x))


def test_another_parameter_that_lies_otherwise_is_used_as_it_stands():
    """Of a model on one rank: a parameter that is whole is that rank's rows, too."""
    plain = Deep()
    model = zero.shard(copy.deepcopy(plain), device="cpu")
    call, x = compiled(model), torch.randn(2, 4)
    torch.testing.assert_close(call(x), plain(x))
    linear, new = model.layers[1][1], torch.randn(4, 4)
    mesh = linear._parameters["weight"].device_mesh
    given = nn.Parameter(DTensor.from_local(new.clone(), mesh, [Replicate()]))
    linear._parameters["weight"] = given
    with torch.no_grad():
        plain.layers[1][1].weight.copy_(new)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            out = call(x)
            torch.testing.assert_close(out, plain(x))
    out.sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(given.grad.to_local(), plain.layers[1][1].weight.grad)
    assert given.grad.placements == given.placements


def test_what_guards_in_cpp_find_is_compiled_anew():
    model = zero.shard(Deep(), device="cpu")
    call, x = compiled(model), torch.randn(2, 4)
    call(x).sum().backward()
    weight = model.layers[0][1]._parameters["weight"]
    weight.grad = None
    weight.requires_grad_(False)
    call(x).sum().backward()
    assert weight.grad is None
    assert model.layers[0][1]._parameters["bias"].grad is not None


def test_another_shape_is_named():
    model = zero.shard(nn.Linear(4, 4), device="cpu")
    (sharded_model,) = sharded_models_of(model)
    weight = model._parameters["weight"]
    specs = KnownParameters([weight], [ParamRef(sharded_model.key, "weight")])
    specs.check([weight])
    other = nn.Parameter(DTensor.from_local(torch.zeros(5, 4), weight.device_mesh, weight.placements))
    with pytest.raises(ShardError, match=r"'weight' was sharded with shape \[4, 4\]"):
        specs.check([other])
    specs.check([weight])


def test_other_memory_is_found_and_memory_of_another_kind_is_named():
    plain = nn.Linear(4, 4)
    model = zero.shard(copy.deepcopy(plain), device="cpu")
    call, x = compiled(model), torch.randn(2, 4)
    torch.testing.assert_close(call(x), plain(x))
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    plain.load_state_dict(state)
    model.load_state_dict(state, assign=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(call(x), plain(x))
    model.double()
    with pytest.raises(ShardError, match=r"was sharded as torch.float32 on cpu, and is torch.float64"):
        call(x.double())
    model.float()
    torch.testing.assert_close(call(x), plain(x))
