"""Partitioned construction by zero.init in one process: scopes, views, and the model that comes of it."""

import gc
import subprocess
import sys
import threading

import made
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import ShardError
from zero_compiler.params.modules import is_root, sharded_models_of, state_of

pytestmark = pytest.mark.usefixtures("no_trace_left")


@pytest.mark.slow
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
    assert [sorted(p.params) for p in sharded_models_of(model)] == [
        ["0.bias", "0.weight", "2.bias", "2.weight"]
    ]


def test_each_module_that_stands_alone_is_a_model():
    with zero.init(stage=2):
        actor, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1))
    assert is_root(actor)
    assert is_root(critic)
    assert [p.config.stage for m in (actor, critic) for p in sharded_models_of(m)] == [2, 2]


def test_a_head_made_for_a_model_from_before():
    model = nn.Sequential(nn.Linear(2, 2))
    with zero.init():
        model.add_module("head", nn.Linear(2, 3))
    assert state_of(model) is None
    assert is_root(model.head)
    assert type(model[0].weight) is nn.Parameter
    zero.shard(model)
    assert [sorted(p.params) for p in sharded_models_of(model)] == [
        ["0.bias", "0.weight"],
        ["bias", "weight"],
    ]


def test_a_body_from_before_becomes_part_of_what_is_made():
    body = nn.Linear(2, 2)
    value = body.weight.detach().clone()
    with zero.init():
        model = nn.Sequential(body, nn.Linear(2, 2))
    assert [sorted(p.params) for p in sharded_models_of(model)] == [
        ["0.bias", "0.weight", "1.bias", "1.weight"]
    ]
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
    assert [n for n, sharded in kinds.items() if sharded] == ["inner.weight", "inner.bias"]


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
    assert [(p.config.stage, len(p.params)) for p in sharded_models_of(model)] == [(3, 6), (1, 2)]
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


# --- the result is an ordinary sharded model ---------------------------------------------------------------------


def test_no_whole_weight_stays_with_a_recurrent_module():
    model = made.in_context("recurrent")
    assert "_flat_weights" not in model.lstm.__dict__


@pytest.mark.slow
def test_training_equals_a_model_sharded_after_the_fact():
    finals = []
    for way in ("shard", "init"):
        model = zero.shard(made.plain("applied")) if way == "shard" else made.in_context("applied")
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

    model = made.in_context("written")
    alive = [weakref.ref(m) for m in model.modules()]
    del model
    gc.collect()
    assert not any(ref() for ref in alive)


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


class Taught(nn.Module):
    """As a constructor that measures a frozen teacher."""

    def __init__(self, teacher, call):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        with torch.no_grad():
            self.layer.bias.copy_(call(torch.ones(1, 4))[0])
            with zero.gathered(teacher):
                self.layer.weight.copy_(teacher.weight)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_sharded_model_is_called_while_another_is_built(how, tmp_path):
    teacher = zero.shard(nn.Linear(4, 3).requires_grad_(False))
    call = (
        torch.compile(teacher, backend="zero", options={"compute": "aten"}) if how == "compiled" else teacher
    )
    with zero.init():
        made = Taught(teacher, call)
        zero.save_safetensors(teacher, tmp_path / "teacher")
    assert torch.equal(made.layer.weight.full_tensor(), teacher.weight.full_tensor())
    assert torch.equal(made.layer.bias.full_tensor(), teacher(torch.ones(1, 4))[0])
    zero.load_safetensors(teacher, tmp_path / "teacher")
