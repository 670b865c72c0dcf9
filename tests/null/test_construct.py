"""Partitioned construction in one process without a process group: scopes, decorators, views, bad input."""

import copy
import gc
import inspect
import json
import os
import pickle
import subprocess
import sys
import threading

import made
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
import zero_compiler.backend
from zero_compiler.errors import ConfigError, ShardError
from zero_compiler.modules import is_root, policies_of, state_of


@pytest.fixture(autouse=True)
def no_trace_left():
    hooks = nn.modules.module
    # The backend has one, for what torch.compile is given.
    before = dict(hooks._global_module_registration_hooks)
    yield
    assert torch.overrides._len_torch_function_stack() == 0
    assert not hooks._global_parameter_registration_hooks
    assert hooks._global_module_registration_hooks == before
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", list(made.BUILDERS))
def test_values_are_those_of_plain_construction(name):
    plain = made.plain(name)
    after = torch.get_rng_state()
    with zero.init():
        model = made.plain(name)
    assert torch.equal(after, torch.get_rng_state())
    assert made.differing(plain, model) == []
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not any("_zero_cut" in p.__dict__ for p in model.parameters())


@pytest.mark.parametrize("name", ["written", "applied", "tied", "recurrent", "encoder"])
def test_forward_and_gradients_are_those_of_plain(name):
    plain = made.plain(name)
    with zero.init():
        model = made.plain(name)
    x = torch.randint(0, 9, (2, 4))
    outs = []
    for m in (plain, model):
        m.zero_grad()
        torch.manual_seed(1)
        out = m(x)
        out.square().mean().backward()
        outs.append(out)
    assert torch.equal(*outs)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad.to_local(), rtol=0, atol=0)


# --- zero.init ---------------------------------------------------------------------------------------------------


def test_a_model_made_of_parts_is_one_model():
    with zero.init():
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        model = nn.Sequential(a, nn.ReLU())
        model.append(b)
    assert [sorted(p.params) for p in policies_of(model)] == [["0.bias", "0.weight", "2.bias", "2.weight"]]


def test_each_module_that_stands_alone_is_a_model():
    with zero.init(stage=2):
        actor, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1))
    assert is_root(actor)
    assert is_root(critic)
    assert [p.config.stage for m in (actor, critic) for p in policies_of(m)] == [2, 2]


def test_a_head_made_for_a_model_from_before():
    model = nn.Sequential(nn.Linear(2, 2))
    with zero.init():
        model.add_module("head", nn.Linear(2, 3))
    assert state_of(model) is None
    assert is_root(model.head)
    assert type(model[0].weight) is nn.Parameter
    zero.shard(model)
    assert [sorted(p.params) for p in policies_of(model)] == [["0.bias", "0.weight"], ["bias", "weight"]]


def test_a_body_from_before_becomes_part_of_what_is_made():
    body = nn.Linear(2, 2)
    value = body.weight.detach().clone()
    with zero.init():
        model = nn.Sequential(body, nn.Linear(2, 2))
    assert [sorted(p.params) for p in policies_of(model)] == [["0.bias", "0.weight", "1.bias", "1.weight"]]
    assert torch.equal(model[0].weight.to_local(), value)


class HalfInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(2, 2)
        with zero.init():
            self.inner = nn.Linear(2, 2)
            self.late = nn.Parameter(torch.ones(2))
        self.after = nn.Linear(2, 2)


def test_a_context_inside_an_init():
    model = HalfInside()
    assert is_root(model.inner)
    assert state_of(model) is None
    kinds = {n: isinstance(p, DTensor) for n, p in model.named_parameters(recurse=True)}
    assert [n for n, cut in kinds.items() if cut] == ["inner.weight", "inner.bias"]


def test_init_inside_init_joins_or_keeps_its_own_placement():
    with zero.init(stage=3):
        a = nn.Linear(2, 2)
        with zero.init():
            b = nn.Linear(2, 2)
        with zero.init(stage=3):
            c = nn.Linear(2, 2)
        with zero.init(stage=1):
            d = nn.Linear(2, 2)
        model = nn.ModuleList([a, b, c, d])
        d.weight.data.fill_(3.0)
    assert [(p.config.stage, len(p.params)) for p in policies_of(model)] == [(3, 6), (1, 2)]
    assert d.weight.to_local().eq(3).all()


def test_views_write_through_as_long_as_the_scope_lasts():
    with zero.init():
        model = nn.Linear(3, 3)
        other = nn.Linear(3, 3)
        flat = model.weight.data.view(-1)
        other.weight.data.zero_()
        flat.fill_(2.0)
        kept = other.weight.data[1]
        model.weight.data.mul_(2)
        kept.add_(1)
    assert model.weight.to_local().eq(4).all()
    assert other.weight.to_local().sum() == 3


def test_a_parameter_kept_whole_by_the_caller_is_the_same_parameter():
    with zero.init():
        whole = nn.Parameter(torch.ones(2, 2))
        a = nn.Linear(2, 2)
        a.weight = whole
        b = nn.Linear(2, 2)
        nn.init.constant_(whole, 5.0)
        b.weight = whole
        model = nn.ModuleList([a, b])
    assert model[0].weight is model[1].weight
    assert model[1].weight.to_local().eq(5).all()


def test_errors_of_plain_torch_stay():
    with zero.init():
        model = nn.Linear(2, 2)
        value = model.weight.tolist()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            model.weight[0].fill_(1)
        with pytest.raises(ValueError, match="Fan in and fan out"):
            nn.init.xavier_normal_(model.bias)
        with pytest.raises(ShardError, match=r"Linear.weight: .data = .*\[3, 3\].*\[2, 2\]"):
            model.weight.data = torch.ones(3, 3)
        assert model.weight.tolist() == value


def test_questions_about_a_parameter_are_answered():
    with zero.init():
        m = nn.Linear(3, 4)
        assert (m.weight.shape, m.weight.numel(), len(m.weight), m.weight.dim()) == ((4, 3), 12, 4, 2)
        assert isinstance(m.weight, nn.Parameter)
        assert m.weight.requires_grad
        assert m.weight.norm().item() == pytest.approx(torch.tensor(m.weight.tolist()).norm().item())
        assert type(m.weight * 2) is torch.Tensor
        assert torch.equal(m.weight, m.weight.clone())
        assert "DTensor" in repr(m.weight)


def test_another_thread_is_left_alone():
    made_there = []
    with zero.init():
        nn.Linear(2, 2)
        thread = threading.Thread(target=lambda: made_there.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert type(made_there[0].weight) is nn.Parameter


def test_a_meta_model():
    with torch.device("meta"), zero.init():
        model = made.Applied()
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    torch.manual_seed(0)
    with zero.init():
        model.to_empty(device="cpu")
        for m in model.modules():
            if hasattr(m, "reset_parameters"):
                m.reset_parameters()
        model.apply(model._reset)
    assert made.differing(made.plain("applied"), model) == []
    assert model(torch.tensor([[1]])).shape == (1, 1, 6)


# --- zero.module -------------------------------------------------------------------------------------------------


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
    assert sorted(policies_of(model)[0].params) == ["lin.weight", "own"]


@pytest.mark.parametrize(("cls", "n"), [(Sub, 4), (SubSub, 4)])
def test_subclasses_are_one_model(cls, n):
    torch.manual_seed(0)
    model = cls()
    assert [sorted(p.params) for p in policies_of(model)] == [["extra", "lin.bias", "lin.weight", "own"]]
    torch.manual_seed(0)
    lin, own, extra = nn.Linear(n, n), torch.randn(n), torch.randn(n)
    nn.init.ones_(lin.weight)
    x = torch.randn(2, n)
    assert torch.equal(model(x), lin(x) * own + extra)


def test_nested_decorated_classes():
    model = Outer()
    assert [(p.config.stage, sorted(p.params)) for p in policies_of(model)] == [
        (2, ["bare.lin.bias", "bare.lin.weight", "bare.own"]),
        (1, ["w"]),
    ]
    assert model.inner.w.to_local().eq(1.5).all()


def test_a_decorated_class_inside_the_context():
    with zero.init(stage=2):
        model = nn.Sequential(Bare(), Inner())
    assert [(p.config.stage, len(p.params)) for p in policies_of(model)] == [(2, 3), (1, 1)]


def test_a_decorated_class_without_an_init_and_decorated_twice():
    cls = zero.module(zero.module(stage=2)(NoInit))
    model = cls(2, 3)
    assert [p.config.stage for p in policies_of(model)] == [3]
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
    assert [p.config.stage for p in policies_of(Last())] == [1]
    assert [(p.config.stage, len(p.params)) for p in policies_of(Tagged())] == [(1, 4)]


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


# --- the result is an ordinary sharded model ---------------------------------------------------------------------


@pytest.mark.parametrize("make", [Sub, lambda: made_in_context("recurrent")])
def test_deepcopy_and_pickle(make):
    model = make()
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        assert type(twin).__mro__[1:] == type(model).__mro__[1:]
        assert made.differing(model, twin) == []
        with torch.no_grad():
            next(twin.parameters()).zero_()
        assert made.differing(model, twin) != []


def made_in_context(name):
    with zero.init():
        return made.plain(name)


def test_no_whole_weight_stays_with_a_recurrent_module():
    model = made_in_context("recurrent")
    assert "_flat_weights" not in model.lstm.__dict__


@pytest.mark.slow
def test_training_equals_a_model_sharded_after_the_fact():
    finals = []
    for way in ("shard", "init"):
        model = zero.shard(made.plain("applied")) if way == "shard" else made_in_context("applied")
        compiled = torch.compile(model, backend="zero", options={"compute": "aten"})
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.randint(0, 9, (2, 4), generator=torch.Generator().manual_seed(step))
            compiled(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        finals.append(model)
    assert made.differing(*finals) == []
    assert made.differing(made.plain("applied"), finals[0]) != []


def test_an_optimizer_over_a_parameter_from_before_the_cut_is_told():
    with zero.init():
        whole = nn.Parameter(torch.ones(2, 2))
        model = nn.Linear(2, 2)
        model.weight = whole
        stale = torch.optim.SGD([whole], lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(
        ShardError, match="SGD was made before zero.shard and holds the parameter 'weight' that"
    ):
        stale.step()
    before = model.weight.full_tensor().clone()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.weight.full_tensor(), before)


def test_nothing_of_a_model_outlives_it():
    import weakref

    model = made_in_context("written")
    alive = [weakref.ref(m) for m in model.modules()]
    del model
    gc.collect()
    assert not any(ref() for ref in alive)


# --- safetensors -------------------------------------------------------------------------------------------------


class Saved(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.norm = nn.BatchNorm1d(5)


WEIGHTS = {
    "emb.weight": torch.arange(15.0).view(5, 3),
    "scale": torch.tensor(4.0),
    "norm.weight": torch.full((5,), 2.0),
    "norm.bias": torch.full((5,), 3.0),
    "norm.running_mean": torch.full((5,), 4.0),
    "norm.running_var": torch.full((5,), 5.0),
    "norm.num_batches_tracked": torch.tensor(6),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    return path


@pytest.mark.parametrize("kind", ["file", "list", "folder", "meta", "plain", "bf16"])
def test_load_safetensors(file, kind):
    with torch.device("meta" if kind == "meta" else "cpu"):
        model = Saved()
    if kind == "bf16":
        model.bfloat16()
    if kind != "plain":
        zero.shard(model)
    paths = {"list": [os.fspath(file)], "folder": file.parent}.get(kind, file)
    assert zero.load_safetensors(model, paths) == ([], [])
    assert model.head.weight is model.emb.weight
    values = made.full(model)
    for name, want in WEIGHTS.items():
        assert torch.equal(values[name].to(want.dtype), want), name
    if kind == "bf16":
        assert values["emb.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_safetensors_into_files_some_rows_at_a_time(tmp_path, monkeypatch, device):
    monkeypatch.setattr(sys.modules[zero.load_safetensors.__module__], "_PART_BYTES", 1 << 14)
    want = {"weight": torch.randn(3001, 3).bfloat16(), "bias": torch.randn(3001)}
    save_file(want, tmp_path / "model.safetensors")
    with torch.device(device):
        model = zero.shard(nn.Linear(3, 3001), offload_params="nvme", nvme_dir=str(tmp_path))
    assert zero.load_safetensors(model, tmp_path / "model.safetensors") == ([], [])
    for name, value in made.full(model).items():
        assert torch.equal(value, want[name].float()), name


def test_load_safetensors_by_an_alias_and_by_an_index(tmp_path):
    state = dict(WEIGHTS)
    state["head.weight"] = state.pop("emb.weight")
    save_file(state, tmp_path / "one.safetensors")
    index = {"weight_map": dict.fromkeys(state, "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = made_with(Saved)
    assert zero.load_safetensors(model, tmp_path / "model.safetensors.index.json") == ([], [])
    assert torch.equal(model.emb.weight.to_local(), WEIGHTS["emb.weight"])


def made_with(build):
    with zero.init():
        return build()


def test_load_safetensors_that_do_not_fit(tmp_path, file):
    model = made_with(Saved)
    before = made.full(copy.deepcopy(model))
    save_file({"scale": torch.tensor(1.0), "other": torch.ones(1)}, tmp_path / "part.safetensors")
    with pytest.raises(
        ShardError, match=r"7 missing from the files \(first: emb.weight, head.weight, .*1 in the .*other"
    ):
        zero.load_safetensors(model, tmp_path / "part.safetensors")
    save_file(WEIGHTS | {"emb.weight": torch.ones(4, 3)}, tmp_path / "shape.safetensors")
    with pytest.raises(ShardError, match=r"emb.weight has shape \[4, 3\] in the files and \[5, 3\] in the"):
        zero.load_safetensors(model, tmp_path / "shape.safetensors")
    with pytest.raises(ShardError, match="no file .*absent.safetensors"):
        zero.load_safetensors(model, tmp_path / "absent.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(file.read_bytes()[:40])
    with pytest.raises(ShardError, match="damaged.safetensors cannot be read"):
        zero.load_safetensors(model, tmp_path / "damaged.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardError, match="holds neither"):
        zero.load_safetensors(model, tmp_path / "empty")
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ShardError, match="no index with a weight_map"):
        zero.load_safetensors(model, tmp_path / "index.json")
    assert all(torch.equal(v, before[n]) for n, v in made.full(model).items())
    missing, unexpected = zero.load_safetensors(model, tmp_path / "part.safetensors", strict=False)
    assert (len(missing), unexpected) == (7, ["other"])
    assert model.scale.to_local() == 1


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x):
        return self.turn(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_orthogonal_weight_can_be_trained(compiled):
    with zero.init(device="cpu"):
        model = Turned()
    call = torch.compile(model, backend="zero", options={"compute": "aten"}) if compiled else model
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.full_tensor().clone() for p in model.parameters()]
    call(torch.randn(2, 8)).square().mean().backward()
    opt.step()
    assert not all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))


class Halved(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = how(nn.Linear(8, 8))

    def forward(self, x):
        return self.second(self.first(x).to(self.second.weight.dtype))


@pytest.mark.parametrize("how", ["bfloat16", "double"])
def test_a_part_that_changes_its_dtype_while_the_model_is_built(how):
    torch.manual_seed(0)
    plain = Halved(lambda m: getattr(m, how)())
    torch.manual_seed(0)
    with zero.init(device="cpu"):
        model = Halved(lambda m: getattr(m, how)())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.dtype == q.dtype
        assert torch.equal(p.full_tensor(), q)
    model(torch.randn(2, 8)).float().sum().backward()


@pytest.mark.slow
def test_optimizers_are_guarded_without_a_call_of_shard():
    # In a process of its own: elsewhere something has called zero.shard before.
    body = """
import torch, zero_compiler as zero
from torch import nn
from zero_compiler.errors import ShardError
with zero.init(device="cpu"):
    model = nn.Sequential(nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 8)).sum().backward()
model[0].weight._zero_stale = "weight", "zero.shard"  # as sharding marks what it replaces
try:
    opt.step()
except ShardError as error:
    print("told:", error)
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=120)
    assert "told: SGD was made before zero.shard" in done.stdout, done.stderr
