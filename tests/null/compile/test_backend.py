"""Frames that Dynamo compiles: models and layers of one class do not use up what one of them may recompile."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import zero_compiler as zero
from zero_compiler.errors import CaptureError
from zero_compiler.params.modules import sharded_models_of

ATEN = {"compute": "aten"}
COUNT = 3


@pytest.fixture(autouse=True)
def strict():
    """Each code object is compiled once; a second time is an error, where it would run eagerly after eight."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.first, self.second, self.breaks = nn.Linear(4, 4), nn.Linear(4, 4), breaks

    def forward(self, x):
        h = torch.relu(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.second(h)


class Called(Block):
    def __call__(self, x):
        return super().__call__(x * 1.5)


class Deep(nn.Module):
    def __init__(self, breaks=False, layer=Block):
        super().__init__()
        self.layers = nn.ModuleList([layer(breaks) for _ in range(COUNT)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def programs(model):
    return [
        p.phase
        for sharded_model in sharded_models_of(model)
        for frame in sharded_model.frames
        for p in frame.programs.values()
    ]


def check(call, model, plain):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        got, want = call(x), plain(x)
        torch.testing.assert_close(got, want)
        got.sum().backward()
        want.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_every_model_of_a_class_is_compiled(how):
    for _ in range(COUNT):
        plain = Block()
        call = model = zero.shard(copy.deepcopy(plain))
        if how == "torch.compile":
            call = torch.compile(model, backend="zero", options=ATEN)
        else:
            model.compile(backend="zero", options=ATEN)
        check(call, model, plain)
        assert programs(model) == ["forward", "backward"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_every_layer_of_a_model_is_compiled(how):
    plain = Deep()
    model = zero.shard(copy.deepcopy(plain))
    for i, layer in enumerate(model.layers):
        if how == "torch.compile":
            model.layers[i] = torch.compile(layer, backend="zero", options=ATEN)
        else:
            layer.compile(backend="zero", options=ATEN)
    check(model, model, plain)
    assert programs(model) == ["forward", "backward"] * COUNT


@pytest.mark.slow
def test_a_whole_model_is_compiled_in_place():
    plain = Deep()
    model = zero.shard(copy.deepcopy(plain))
    model.compile(backend="zero", options=ATEN)
    check(model, model, plain)
    assert programs(model) == ["forward", "backward"]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Block, Called])
def test_every_layer_with_a_graph_break_is_compiled(layer):
    plain = Deep(breaks=True, layer=layer)
    model = zero.shard(copy.deepcopy(plain))
    # A function that is called behind a graph break and may not be compiled again makes the next call of its model
    # compile as a whole. The layers are more than two, so that each that took one of two graphs would still be seen.
    with torch._dynamo.config.patch(recompile_limit=2):
        check(torch.compile(model, backend="zero", options=ATEN), model, plain)
    assert programs(model) == ["forward", "backward"] * 2 * COUNT  # before and after the break


def test_a_method_with_its_own_code_is_the_same_method():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, /, *, scale: float = 2.0) -> torch.Tensor:
            """What it does."""
            return super().extra_repr() and x or x * self.weight * scale

    Odd.forward.note = "kept"
    model = zero.shard(Odd())
    assert model(torch.ones(2)).tolist() == [2.0, 2.0]
    assert model(torch.ones(2), scale=3.0).tolist() == [3.0, 3.0]
    assert type(model).forward is not Odd.forward
    assert type(model).forward.__code__ == Odd.forward.__code__
    for name in ("__doc__", "__annotations__", "__kwdefaults__", "__module__", "__qualname__", "note"):
        assert getattr(type(model).forward, name) == getattr(Odd.forward, name)


def guards_of(model):
    """What Dynamo checks before it runs the one compiled frame of ``model``, a line each."""
    (entry,) = _debug_get_cache_entry_list(type(model).__call__.__code__)
    return [line.split("#")[0] for line in str(entry.guard_manager).splitlines()]


@pytest.mark.slow
def test_names_of_weights_are_not_guarded():
    counts = []
    for depth in (1, 3):
        model = Deep()
        del model.layers[depth:]
        zero.shard(model, device="cpu")
        call = torch.compile(model, backend="zero", options=ATEN)
        call(torch.randn(2, 4)).sum().backward()
        lines = guards_of(model)
        assert not [g for g in lines if ".names" in g or "fget.__closure__" in g]
        # Of a parameter: its attribute and the getter, its type, placement, mesh, rows and requires_grad.
        counts.append(sum("_parameters['weight']" in g or "['weight'].fget" in g for g in lines))
    assert counts[0] > 0
    assert counts[1] - counts[0] <= 4 * 18


def test_full_weights_of_the_only_rank_are_looked_up_once():
    plain = nn.Linear(4, 4)
    model = zero.shard(copy.deepcopy(plain), device="cpu")
    call = torch.compile(model, backend="zero", options=ATEN)
    x = torch.randn(2, 4)

    def gathers():
        torch.testing.assert_close(call(x), plain(x))
        return sharded_models_of(model)[0].runtime.engine.counters()["gathers"]

    first = gathers()
    with torch.no_grad():
        for m in (plain, model):
            m.weight.mul_(2)
    assert gathers() == first  # the same memory
    saved = {k: v * 2 for k, v in plain.state_dict().items()}
    plain.load_state_dict(saved)
    model.load_state_dict(saved, assign=True)
    assert gathers() == first + 1  # another one


class StretchedProduct(nn.Module):
    """What it is given lies apart in memory, and is multiplied by one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        y = x * torch.ones(3, 6)
        return self.layer(y.amax(-1, keepdim=True) + y)


def test_a_product_with_one_leaves_the_strides_of_what_it_is_given():
    plain = StretchedProduct()
    model = zero.shard(copy.deepcopy(plain), device="cpu")
    call = torch.compile(model, backend="zero", options={"compute": "inductor"})
    x = torch.randn(3, 64)[:, :6]
    torch.testing.assert_close(call(x), plain(x))


class OwnResults(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        y = self.layer(x)
        return x * 1.0, y, y * 1.0, y.t()


@pytest.mark.parametrize("trained", [True, False])
def test_a_product_with_one_that_is_returned_is_memory_of_its_own(trained):
    """Inductor of torch 2.15 returns what was multiplied."""
    model = zero.shard(OwnResults(), device="cpu")
    call = torch.compile(model, backend="zero", options={"compute": "inductor"})
    x = torch.randn(3, 6)
    with torch.set_grad_enabled(trained):
        same, y, again, view = call(x)
    storages = [t.untyped_storage().data_ptr() for t in (x, same, y, again)]
    assert len(set(storages)) == 4
    assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@pytest.mark.parametrize("sharded", [False, True])
def test_compiled_autograd_is_refused(sharded):
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    if sharded:
        zero.shard(model, stage=3, device="cpu")
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(CaptureError, match="set torch._dynamo.config.compiled_autograd to False"),
    ):
        call(torch.randn(2, 4))
    torch._dynamo.reset()
    call(torch.randn(2, 4)).sum().backward()
