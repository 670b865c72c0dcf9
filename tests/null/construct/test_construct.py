"""@zero.module: the class it makes, its subclasses, and what fails while a model is built."""

import copy
import inspect
import pickle

import made
import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, ShardError
from zero_compiler.params.modules import is_root, sharded_models_of

pytestmark = pytest.mark.usefixtures("no_trace_left")


@zero.module
class Bare(nn.Module):
    """A docstring."""

    def __init__(self, n: int = 3, *, bias: bool = True):
        super().__init__()
        self.lin = nn.Linear(n, n, bias=bias)
        self.own = nn.Parameter(torch.randn(n))
        assert type(self.own) is nn.Parameter, "plain while its owner's __init__ runs"
        self.was = type(self.lin.weight)

    def forward(self, x):
        return self.lin(x) * self.own


class Sub(Bare):
    def __init__(self, n: int = 4):
        super().__init__(n)
        assert not is_root(self)
        self.extra = nn.Parameter(torch.randn(n))
        nn.init.ones_(self.lin.weight)

    def forward(self, x):
        return super().forward(x) + self.extra


class SubSub(Sub):
    pass


@zero.module(stage=1, reduce_dtype="fp32")
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))


@zero.module(config=zero.Config(stage=2))
class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.bare = Bare()
        self.inner = Inner()
        self.inner.w.data.fill_(1.5)


class NoInit(nn.Linear):
    pass


def test_a_decorated_class_is_the_same_class():
    assert (Bare.__name__, Bare.__doc__, Bare.__module__) == ("Bare", "A docstring.", __name__)
    assert str(inspect.signature(Bare)) == "(n: int = 3, *, bias: bool = True)"
    model = Bare(bias=False)
    assert isinstance(model, Bare)
    assert is_root(model)
    assert type(model).__name__ == "Bare"
    assert sorted(sharded_models_of(model)[0].params) == ["lin.weight", "own"]


@pytest.mark.parametrize(("cls", "n"), [(Sub, 4), (SubSub, 4)])
def test_subclasses_are_one_model(cls, n):
    torch.manual_seed(0)
    model = cls()
    assert [sorted(p.params) for p in sharded_models_of(model)] == [
        ["extra", "lin.bias", "lin.weight", "own"]
    ]
    torch.manual_seed(0)
    lin, own, extra = nn.Linear(n, n), torch.randn(n), torch.randn(n)
    nn.init.ones_(lin.weight)
    x = torch.randn(2, n)
    assert torch.equal(model(x), lin(x) * own + extra)


def test_nested_decorated_classes():
    model = Outer()
    assert [(p.config.stage, sorted(p.params)) for p in sharded_models_of(model)] == [
        (2, ["bare.lin.bias", "bare.lin.weight", "bare.own"]),
        (1, ["w"]),
    ]
    assert model.inner.w.to_local().eq(1.5).all()


def test_a_decorated_class_inside_the_context():
    with zero.init(stage=2):
        model = nn.Sequential(Bare(), Inner())
    assert [(p.config.stage, len(p.params)) for p in sharded_models_of(model)] == [(2, 3), (1, 1)]


def test_a_decorated_class_without_an_init_and_decorated_twice():
    cls = zero.module(zero.module(stage=2)(NoInit))
    model = cls(2, 3)
    assert [p.config.stage for p in sharded_models_of(model)] == [3]
    assert model(torch.ones(1, 2)).shape == (1, 3)


def test_a_decorated_subclass_has_the_last_word():
    @zero.module(stage=1)
    class Last(Bare):
        def __init_subclass__(cls, tag=None, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.tag = tag

    class Tagged(Last, tag=7):
        def __init__(self):
            super().__init__()
            self.more = nn.Parameter(torch.ones(2))

    assert Tagged.tag == 7
    assert [p.config.stage for p in sharded_models_of(Last())] == [1]
    assert [(p.config.stage, len(p.params)) for p in sharded_models_of(Tagged())] == [(1, 4)]


def test_bad_arguments_are_told_at_once():
    with pytest.raises(ConfigError, match="stage must be 0, 1, 2 or 3"):
        zero.module(stage=7)
    with pytest.raises(ConfigError, match="did you mean 'param_dtype'"):
        zero.init(param_dtyp="bf16")
    with pytest.raises(ConfigError, match="stage was given twice"):
        zero.init(stage=1, config=zero.Config(stage=2))
    for wrong in (len, nn.Linear(1, 1), int):
        with pytest.raises(ShardError, match="zero.module decorates subclasses of nn.Module"):
            zero.module(wrong)
    with pytest.raises(TypeError):
        zero.module(Bare, 3)


@zero.module
class Failing(nn.Module):
    def __init__(self, deep):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = Inner()
        if deep:
            Failing(False)
        raise ValueError("from the constructor")


@pytest.mark.parametrize("deep", [False, True])
def test_an_exception_leaves_nothing_behind(deep):
    with pytest.raises(ValueError, match="from the constructor"):
        Failing(deep)
    assert torch.overrides._len_torch_function_stack() == 0
    assert type(nn.Linear(2, 2).weight) is nn.Parameter
    with zero.init():  # one that is caught inside goes on
        with pytest.raises(ValueError):
            Failing(deep)
        model = nn.Linear(2, 2)
    assert is_root(model)


def test_an_exception_in_the_context_leaves_nothing_behind():
    def fail():
        with zero.init():
            nn.Linear(2, 2)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


@pytest.mark.parametrize("make", [Sub, lambda: made.in_context("recurrent")])
def test_deepcopy_and_pickle(make):
    model = make()
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        assert type(twin).__mro__[1:] == type(model).__mro__[1:]
        assert made.differing(model, twin) == []
        with torch.no_grad():
            next(twin.parameters()).zero_()
        assert made.differing(model, twin) != []
