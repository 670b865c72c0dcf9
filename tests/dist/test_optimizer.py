"""zero.optimizer against the same class with the same arguments, resident: equal in every bit."""

import copy
import gc
import math
import sys

import pytest
import torch
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, GradientError, OptimizerError, ShardError
from zero_compiler.grads import AppliedGrad
from zero_compiler.runtime import streaming
from zero_compiler.runtime.stores import region_of
from zero_compiler.updates import Done, Entry, Piece, Unit

MODULE = sys.modules["zero_compiler.optimizer"]
O = torch.optim


class Lion(O.Optimizer):
    """A class of a user's, whose decay depends on the number of dimensions."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            a, b = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["count"] = 0
                state["count"] += 1
                if p.dim() > 1:
                    p.mul_(1 - group["lr"] * group["decay"])
                p.add_((state["exp_avg"] * a + p.grad * (1 - a)).sign(), alpha=-group["lr"])
                state["exp_avg"] = state["exp_avg"] * b + p.grad * (1 - b)  # another tensor each time


class Trust(O.Optimizer):
    """Scales each tensor by its own norm: not elementwise."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * p.norm().item())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.last = nn.Linear(256, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(7, 2), requires_grad=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


def made(**fields):
    torch.manual_seed(0)
    return zero.shard(Net(), **fields)


def steps(model, optimizer, count=4, begin=0, forward=None, schedule=True, clip=None):
    forward = model if forward is None else forward
    scheduler = O.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    for i in range(begin, begin + count):
        torch.manual_seed(i)
        forward(torch.randn(8, 64)).square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def local(x):
    return getattr(x, "_local_tensor", x).detach()


def assert_same(model, optimizer, other_model, other_optimizer):
    for (name, a), b in zip(model.named_parameters(), other_model.parameters(), strict=True):
        assert torch.equal(local(a), local(b)), name
    mine, theirs = optimizer.state_dict(), other_optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for k, states in theirs["state"].items():
        assert list(mine["state"][k]) == list(states)
        for key, value in states.items():
            have = mine["state"][k][key]
            assert type(have) is type(value), key
            assert (
                torch.equal(local(have), local(value)) if isinstance(value, torch.Tensor) else have == value
            ), key


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    monkeypatch.setattr(MODULE, "UNIT_BYTES", 16 << 10)  # the larger weights are updated in pieces


CLASSES = [
    (O.AdamW, {"fused": True}),
    (O.AdamW, {"foreach": True, "amsgrad": True}),
    (O.Adam, {"weight_decay": 0.1}),
    (O.SGD, {"lr": 0.1}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (O.Adagrad, {"initial_accumulator_value": 0.1}),
    (O.RMSprop, {"centered": True}),
    (O.NAdam, {}),
    (O.ASGD, {}),
    (Lion, {}),
]


@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize(("cls", "kw"), CLASSES, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_equal_to_the_resident_class(cls, kw, tier, tmp_path):
    want = made()
    plain = cls(want.parameters(), **kw)
    steps(want, plain)
    model = made(offload_optimizer=tier, nvme_dir=str(tmp_path))
    optimizer = zero.optimizer(cls, model, **kw)
    assert isinstance(optimizer, O.Optimizer)
    steps(model, optimizer)
    assert_same(model, optimizer, want, plain)
    if tier == "nvme":
        entries = [p.entry for u in optimizer._units for p in u.pieces if p.entry.regions]
        assert entries or (cls is O.SGD and "momentum" not in kw)
        for entry in entries:
            for key, value in optimizer.state[entry.param].items() if entry.param in optimizer.state else ():
                if key in entry.regions:
                    assert region_of(local(value)) is entry.regions[key]
        assert any(not p.whole for u in optimizer._units for p in u.pieces) or not entries
    assert list(tmp_path.iterdir()) == []  # its files have no names


def test_parameter_groups_schedules_and_a_group_that_comes_later(tmp_path):
    def groups(model):
        return [
            {"params": [model.first.weight, model.first.bias], "lr": 0.01, "betas": (0.8, 0.9)},
            {"params": [model.last.weight, model.scale], "weight_decay": 0.3},
        ]

    want, model = made(), made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    plain = O.AdamW(groups(want), lr=0.1)
    first, second = groups(model)
    optimizer = zero.optimizer(O.AdamW, [first, second | {"offload_optimizer": "none"}], lr=0.1)
    steps(want, plain)
    steps(model, optimizer)
    plain.add_param_group({"params": [want.last.bias]})
    optimizer.add_param_group({"params": [model.last.bias]})
    steps(want, plain, begin=4)
    steps(model, optimizer, begin=4)
    assert optimizer.param_groups[1].pop("offload_optimizer") == "none"
    assert_same(model, optimizer, want, plain)
    tiers = {p.entry.name: p.entry.tier for u in optimizer._units for p in u.pieces}
    assert tiers["first.weight"] == tiers["last.bias"] == "nvme"
    assert tiers["scale"] == "none"


@pytest.mark.parametrize("there", ["none", "nvme"])
def test_state_dict_goes_both_ways(there, tmp_path):
    want, model = made(), made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    plain, optimizer = O.AdamW(want.parameters()), zero.optimizer(O.AdamW, model)
    steps(want, plain, schedule=False)
    steps(model, optimizer, schedule=False)
    again = made(offload_optimizer=there, nvme_dir=str(tmp_path))
    again.load_state_dict(model.state_dict())
    loaded = zero.optimizer(O.AdamW, again)
    loaded.load_state_dict(optimizer.state_dict())
    back = made()
    back.load_state_dict(model.state_dict())
    resident = O.AdamW(back.parameters())
    resident.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((want, plain), (again, loaded), (back, resident)):
        steps(m, o, begin=4, schedule=False)
    assert_same(again, loaded, want, plain)
    assert_same(back, resident, want, plain)


def test_states_are_read_and_written_through_their_handles(tmp_path):
    model = made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    want = made()
    optimizer, plain = zero.optimizer(O.AdamW, model), O.AdamW(want.parameters())
    for i in range(3):
        steps(model, optimizer, 1, begin=i, schedule=False)
        steps(want, plain, 1, begin=i, schedule=False)
        mine, theirs = optimizer.state[model.first.weight], plain.state[want.first.weight]
        # What the step wrote directly is read through the mapping, and the other way round.
        assert torch.equal(local(mine["exp_avg"]), local(theirs["exp_avg"]))
        for state in (mine, theirs):
            local(state["exp_avg"]).mul_(0.5)
    assert_same(model, optimizer, want, plain)


def test_hooks_run_once_around_a_step_and_a_closure_is_called(tmp_path):
    model = made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    optimizer = zero.optimizer(O.AdamW, model)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert seen == ["before", "after"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_max_grad_norm_clips_as_torch_does(tier, overlap, tmp_path):
    want, model = made(), made(offload_optimizer=tier, nvme_dir=str(tmp_path))
    plain = O.AdamW(want.parameters())
    optimizer = zero.optimizer(O.AdamW, model, max_grad_norm=0.01, overlap=overlap)
    steps(want, plain, clip=0.01)
    steps(model, optimizer)
    assert_same(model, optimizer, want, plain)
    assert optimizer.grad_norm > 0.01


# Overlap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_overlap_gives_the_same_values(compiled, tier, tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "UNIT_BYTES", 4 << 10)
    want, model = made(), made(offload_optimizer=tier, nvme_dir=str(tmp_path))
    plain, optimizer = O.AdamW(want.parameters()), zero.optimizer(O.AdamW, model, overlap=True)
    run = [
        torch.compile(m, backend="zero", options={"compute": "aten"}) if compiled else m
        for m in (want, model)
    ]
    steps(want, plain, forward=run[0])
    steps(model, optimizer, forward=run[1])
    assert_same(model, optimizer, want, plain)


class Deep(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_overlap_updates_while_backward_runs_and_never_before_the_last_read(tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "UNIT_BYTES", 1)
    torch.manual_seed(0)
    model = zero.shard(Deep(), offload_optimizer="nvme", nvme_dir=str(tmp_path))
    optimizer = zero.optimizer(O.SGD, model, lr=0.1, momentum=0.9, overlap=True)
    run = torch.compile(model, backend="zero", options={"compute": "aten", "bucket_bytes": 0})
    x = torch.randn(8, 64, requires_grad=True)
    run(x).sum().backward()
    optimizer.step()
    order = []
    feed = optimizer.feed
    monkeypatch.setattr(
        optimizer, "feed", lambda unit: (order.extend(id(p) for p in unit.params), feed(unit))
    )
    loss = run(x).sum()
    x.register_hook(lambda g: order.append("backward is over"))
    loss.backward()
    end = order.index("backward is over")
    early = set(order[:end])
    # The gradient of the first layer lands last; those of the last layers did while backward ran.
    assert {id(model.layers[5].weight), id(model.layers[4].weight), id(model.layers[3].weight)} <= early
    assert set(order) >= {id(p) for p in model.parameters()}
    optimizer.step()


def test_overlap_keeps_no_gradients_waiting_for_a_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "UNIT_BYTES", 1)
    monkeypatch.setattr(streaming._Turn, "done", lambda turn: False)  # a disk that is slower than backward
    model = zero.shard(Deep(), offload_optimizer="nvme", nvme_dir=str(tmp_path))
    optimizer = zero.optimizer(O.SGD, model, lr=0.1, momentum=0.9, overlap=True)
    run = torch.compile(model, backend="zero", options={"compute": "aten", "bucket_bytes": 0})
    waiting = []
    feed = optimizer.feed
    monkeypatch.setattr(
        optimizer, "feed", lambda unit: (feed(unit), waiting.append(len(optimizer._stream._waiting)))
    )
    for _ in range(2):  # the second reads states too
        run(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    assert len(waiting) > 2 * MODULE.BUFFERS
    assert set(waiting) == {0}


def test_overlap_waits_for_a_weight_that_is_read_twice(tmp_path):
    """Tied over two frames, and used by two forwards whose losses are summed."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            x = torch.tanh(self.linear(x))
            torch._dynamo.graph_break()
            return self.linear(x)

    def train(tier, make):
        torch.manual_seed(0)
        model = zero.shard(Twice(), offload_optimizer=tier, nvme_dir=str(tmp_path))
        optimizer = make(model)
        run = torch.compile(model, backend="zero", options={"compute": "aten"})
        for i in range(3):
            torch.manual_seed(i)
            (run(torch.randn(4, 64)).square().sum() + run(torch.randn(4, 64)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    want, plain = train("none", lambda m: O.SGD(m.parameters(), lr=0.01, momentum=0.9))
    model, optimizer = train("nvme", lambda m: zero.optimizer(O.SGD, m, lr=0.01, momentum=0.9, overlap=True))
    assert_same(model, optimizer, want, plain)


def test_overlap_and_gradients_that_are_asked_for_change_nothing():
    model = made()
    optimizer = zero.optimizer(O.SGD, model, lr=0.1, overlap=True)
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    before = {n: local(p).clone() for n, p in model.named_parameters()}
    seen = []
    model.last.weight.register_hook(lambda g: seen.append(g))
    (grad,) = torch.autograd.grad(run(torch.ones(2, 64)).sum(), [model.first.weight])
    assert grad.shape == (256, 64)
    assert all(torch.equal(before[n], local(p)) for n, p in model.named_parameters())
    run(torch.ones(2, 64)).sum().backward()
    assert len(seen) == 1  # a parameter with a hook is updated when the hook has seen its gradient
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_overlap_refuses_what_needs_the_gradients(tmp_path):
    model = made()
    optimizer = zero.optimizer(O.SGD, model, lr=0.1, overlap=True)
    x = torch.ones(2, 64)
    model(x).sum().backward()
    with pytest.raises(GradientError, match="max_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(GradientError, match=r"call step\(\) after every backward"):
        model(x).sum().backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(x)
    with pytest.raises(GradientError, match="GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(GradientError, match=r"zero.no_sync accumulates"), zero.no_sync(model):
        pass
    with pytest.raises(GradientError):
        model.first.weight.grad.sum()


@pytest.mark.parametrize("grads", ["none", "nvme"])
@pytest.mark.parametrize("when", ["after a step", "after a backward"])
def test_overlap_ends_with_its_optimizer(when, grads, tmp_path):
    """Also where a scheduler makes a cycle of it, which only the collector ends."""
    tiers = {"offload_grads": grads, "offload_optimizer": "nvme", "nvme_dir": str(tmp_path)}
    model, want = made(**tiers), made()
    plain, optimizer = O.AdamW(want.parameters()), zero.optimizer(O.AdamW, model, overlap=True)
    run, other = (torch.compile(m, backend="zero", options={"compute": "aten"}) for m in (model, want))
    steps(want, plain, 2, forward=other)
    steps(model, optimizer, 2, forward=run)
    states = copy.deepcopy(optimizer.state_dict())
    if when == "after a backward":  # some of whose updates are lost with the optimizer
        run(torch.ones(2, 64)).sum().backward()
        assert type(model.first.weight.grad) is AppliedGrad
    del optimizer
    gc.collect()
    assert all(p.grad is None for p in model.parameters())
    if when == "after a backward":
        want.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        want.zero_grad()
    for pair in ((run, other), (model, want)):  # compiled and eager
        for forward in pair:
            forward(torch.ones(2, 64)).sum().backward()
        for a, b in zip(model.parameters(), want.parameters(), strict=True):
            assert (a.grad is None and b.grad is None) or torch.equal(local(a.grad), local(b.grad))
        assert (region_of(local(model.first.weight.grad)) is not None) == (grads == "nvme")
        model.zero_grad()
        want.zero_grad()
    again = zero.optimizer(O.AdamW, model, overlap=True)
    if when == "after a step":
        again.load_state_dict(states)
        steps(want, plain, 2, begin=2, forward=other, schedule=False)
        steps(model, again, 2, begin=2, forward=run, schedule=False)
        again.zero_grad()
        for (name, a), b in zip(model.named_parameters(), want.parameters(), strict=True):
            assert torch.equal(local(a), local(b)), name


def test_two_overlaps_at_once_are_refused(tmp_path):
    model = made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    one = {"params": [model.first.weight, model.first.bias]}
    first = zero.optimizer(O.SGD, [one], lr=0.1, momentum=0.9, overlap=True)
    rest = [p for p in model.parameters() if all(p is not q for q in one["params"])]
    for _ in range(2):  # what was refused leaves nothing behind
        with pytest.raises(
            OptimizerError, match=r"two zero.optimizer\(overlap=True\) over the same parameters"
        ):
            zero.optimizer(
                O.SGD,
                [{"params": rest}, {"params": [model.first.bias]}],
                lr=0.1,
                momentum=0.9,
                overlap=True,
            )
    second = zero.optimizer(O.SGD, rest, lr=0.1, overlap=True)
    plain = zero.optimizer(O.SGD, model, lr=0.1)
    before = local(model.last.weight).clone()
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(GradientError, match="with these gradients in the backward"):
        plain.step()
    first.step()
    second.step()
    assert not torch.equal(local(model.last.weight), before)


# Devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2, 0)])
def test_a_unit_waits_for_a_device_on_which_any_of_its_parts_is(order, monkeypatch):
    """Scalars are on the accelerator (here "meta") where other parameters are on its host."""
    waited = []

    class Recorded:
        def __init__(self, device):
            self.synchronize = lambda: waited.append(device.type)

    monkeypatch.setattr(torch.accelerator, "current_stream", Recorded)

    def run(*entries):
        waited.clear()
        for e in entries:
            e.param.grad = torch.ones_like(e.param)
        unit = Unit(O.SGD, {"lr": 0.1}, {"lr": 0.1}, MODULE.states_of(O.SGD, {}, {}, torch.ones(1)), [])
        unit.pieces = [Piece(e) for e in entries]
        job = unit.job({e.param: {} for e in entries}, Done())
        job.run(None)
        return waited

    def entry(device, tier):
        return Entry(nn.Parameter(torch.ones(3, device=device)), "a parameter", tier, {}, {})

    three = entry("cpu", "none"), entry("meta", "host"), entry("meta", "none")
    assert run(*(three[k] for k in order)) == ["meta"]
    assert run(entry("cpu", "nvme"), entry("meta", "none")) == []


# Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [O.LBFGS, O.Adafactor, Trust])
def test_what_is_not_elementwise_is_refused(cls):
    with pytest.raises(OptimizerError, match=f"{cls.__name__} is none"):
        zero.optimizer(cls, made())


def test_a_class_that_draws_random_numbers_is_refused():
    class Noisy(O.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p))

    with pytest.raises(OptimizerError, match="Noisy is none"):
        zero.optimizer(Noisy, made())


def test_arguments_that_do_not_fit():
    with pytest.raises(OptimizerError, match="subclass of torch.optim.Optimizer"):
        zero.optimizer(nn.Linear, made())
    for norm in (0, "1"):
        with pytest.raises(OptimizerError, match="max_grad_norm must be"):
            zero.optimizer(O.SGD, made(), max_grad_norm=norm)
    with pytest.raises(OptimizerError, match="differentiable"):
        zero.optimizer(O.SGD, made(), differentiable=True)
    with pytest.raises(OptimizerError, match="must be one of none, host, nvme, not 'disk'"):
        zero.optimizer(O.SGD, [{"params": list(made().parameters()), "offload_optimizer": "disk"}])
    with pytest.raises(OptimizerError, match="belongs to no sharded model"):
        zero.optimizer(O.SGD, [{"params": [nn.Parameter(torch.ones(2))], "offload_optimizer": "nvme"}])
    with pytest.raises(OptimizerError, match="copied or pickled"):
        copy.deepcopy(zero.optimizer(O.SGD, made()))
    with pytest.raises(ConfigError, match="needs nvme_dir"):
        made(offload_optimizer="nvme")


def test_a_plain_optimizer_over_states_in_files_is_refused(tmp_path):
    model = made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(ShardError, match=r"zero.optimizer\(AdamW, model, ...\)"):
        O.AdamW(model.parameters()).step()


def test_a_plain_model_streams_too():
    torch.manual_seed(0)
    want = Net()
    model = copy.deepcopy(want)
    plain, optimizer = O.AdamW(want.parameters()), zero.optimizer(O.AdamW, model)
    steps(want, plain)
    steps(model, optimizer)
    assert_same(model, optimizer, want, plain)


# Ranks -----------------------------------------------------------------------------------------------------------


def _two_ranks(rank, world, transport, overlap, folder):
    MODULE.UNIT_BYTES = 16 << 10

    def train(tier, make, clip=None):
        model = made(offload_optimizer=tier, nvme_dir=folder, transport=transport)
        optimizer = make(model)
        run = torch.compile(model, backend="zero", options={"compute": "aten"})
        for i in range(4):
            torch.manual_seed(10 * i + rank)
            run(torch.randn(8, 64)).square().mean().backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    a = train("none", lambda m: O.AdamW(m.parameters(), fused=True))
    b = train("nvme", lambda m: zero.optimizer(O.AdamW, m, fused=True, overlap=overlap))
    assert_same(*b, *a)
    a = train("none", lambda m: O.AdamW(m.parameters(), fused=True), clip=0.01)
    b = train("nvme", lambda m: zero.optimizer(O.AdamW, m, fused=True, overlap=overlap, max_grad_norm=0.01))
    assert_same(*b, *a)
    return math.isfinite(float(b[1].grad_norm))


@pytest.mark.dist
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_on_two_ranks(transport, overlap, tmp_path):
    assert run_ranks(_two_ranks, 2, transport, overlap, str(tmp_path)) == [True, True]
