"""zero.optimizer against the same class with the same arguments, resident: equal in every bit."""

import copy
import math

import pytest
import torch
from compare import local
from dist.spawn import run_ranks
from dist.streamed import MODULE, Net, assert_same, made, steps
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, OptimizerError, RankMismatchError, ShardError, StorageError
from zero_compiler.optim.updates import Done, Entry, Piece, SubGroup
from zero_compiler.storage.stores import region_of

pytestmark = pytest.mark.usefixtures("small_sub_groups")

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
        entries = [p.entry for u in optimizer._sub_groups for p in u.pieces if p.entry.regions]
        assert entries or (cls is O.SGD and "momentum" not in kw)
        for entry in entries:
            for key, value in optimizer.state[entry.param].items() if entry.param in optimizer.state else ():
                if key in entry.regions:
                    assert region_of(local(value)) is entry.regions[key]
        assert any(not p.whole for u in optimizer._sub_groups for p in u.pieces) or not entries
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
    tiers = {p.entry.name: p.entry.tier for u in optimizer._sub_groups for p in u.pieces}
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


@pytest.mark.parametrize("number", [int, float])
@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize(("cls", "kw"), [c for c in CLASSES if c[0] not in (O.SGD, Lion)])
def test_a_checkpoint_of_an_older_torch(cls, kw, tier, number, tmp_path):
    """Whose counts of steps are numbers, and which does not know all options."""
    want, model = made(), made(offload_optimizer=tier, nvme_dir=str(tmp_path))
    plain, optimizer = cls(want.parameters(), **kw), zero.optimizer(cls, model, **kw)
    for m, o in ((want, plain), (model, optimizer)):
        steps(m, o, schedule=False)
        saved = copy.deepcopy(o.state_dict())
        for state in saved["state"].values():
            state["step"] = number(state["step"])
        for group in saved["param_groups"]:
            del group["maximize"], group["differentiable"]
        o.load_state_dict(saved)
        steps(m, o, begin=4, schedule=False)
    assert_same(model, optimizer, want, plain)


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


class Late(O.Optimizer):
    """Begins to keep a state of another type when it is told."""

    def __init__(self, params, lr=1e-3, late=0.0):
        super().__init__(params, {"lr": lr, "late": late})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(p)
                state["sum"].add_(p.grad)
                if group["late"] and "late" not in state:
                    state["late"] = torch.zeros_like(p, dtype=torch.bfloat16)
                if group["late"]:
                    state["late"].mul_(group["late"]).add_(p.grad)
                    p.add_(state["late"], alpha=-group["lr"])
                p.add_(state["sum"], alpha=-group["lr"])


# The class, what it is made with here, what it begins with or is loaded with, and the option that changes then.
LATER = {
    "an option": (O.SGD, {"lr": 0.1}, {"lr": 0.1}, ("momentum", 0.9)),
    "an option, and half blocks": (Late, {}, {}, ("late", 0.5)),
    "a checkpoint with more": (O.AdamW, {}, {"amsgrad": True}, None),
    "a checkpoint with other ones": (O.SGD, {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, None),
    "a checkpoint with fewer": (O.AdamW, {"amsgrad": True}, {}, None),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize("brought", LATER)
def test_states_that_come_later(brought, tier, overlap, tmp_path, monkeypatch):
    cls, kw, theirs, change = LATER[brought]
    monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 4 << 10)
    want, model = made(), made(offload_optimizer=tier, offload_grads="nvme", nvme_dir=str(tmp_path))
    plain, optimizer = cls(want.parameters(), **theirs), zero.optimizer(cls, model, overlap=overlap, **kw)
    steps(want, plain, 2, schedule=False)
    if change is None:
        model.load_state_dict(copy.deepcopy(want.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    else:
        steps(model, optimizer, 2, schedule=False)
        for o in (plain, optimizer):
            o.param_groups[0][change[0]] = change[1]
    steps(want, plain, 3, begin=2, schedule=False)
    steps(model, optimizer, 3, begin=2, schedule=False)
    assert_same(model, optimizer, want, plain)
    held = [v for v in optimizer.state[model.first.weight].values() if v.dim()]
    assert all((region_of(local(v)) is not None) == (tier == "nvme") for v in held)
    assert any(not p.whole for u in optimizer.sub_groups for p in u.pieces)


class Counted(O.Optimizer):
    """Counts its steps in the group, under a key that nobody gave."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(p.grad, alpha=-group["lr"] / group["count"])


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_class_adds_to_a_group_is_of_the_state_dict(overlap, tmp_path):
    want, model = made(), made(offload_grads="nvme", nvme_dir=str(tmp_path))
    plain, optimizer = Counted(want.parameters()), zero.optimizer(Counted, model, overlap=overlap)
    steps(want, plain, 2, schedule=False)
    steps(model, optimizer, 2, schedule=False)
    again = zero.optimizer(Counted, made(), overlap=overlap)
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["count"] == 2
    steps(want, plain, 2, begin=2, schedule=False)
    steps(model, optimizer, 2, begin=2, schedule=False)
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


# Devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2, 0)])
def test_a_sub_group_waits_for_a_device_on_which_any_of_its_parts_is(order, monkeypatch):
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
        sub_group = SubGroup(
            O.SGD, {"lr": 0.1}, {"lr": 0.1}, MODULE.states_of(O.SGD, {}, {}, torch.ones(1)), []
        )
        sub_group.pieces = [Piece(e) for e in entries]
        job = sub_group.job({e.param: {} for e in entries}, Done())
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


class Elsewhere(O.Optimizer):
    """Keeps its momentum, or the parameters themselves, where no state of theirs is."""

    what = ""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.velocity = {}
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.mine if self.what == "parameters" else self.param_groups[0]["params"]:
            if p.grad is not None:
                v = self.velocity.get(p) if self.what == "momentum" else None
                self.velocity[p] = p.grad.clone() if v is None else v.mul_(0.9).add_(p.grad)
                p.add_(self.velocity[p], alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("what", ["momentum", "parameters"])
def test_a_class_that_keeps_something_of_a_parameter_elsewhere_is_refused(what, monkeypatch):
    monkeypatch.setattr(Elsewhere, "what", what)
    with pytest.raises(
        OptimizerError, match=r"it keeps something of a parameter elsewhere than in self.state\["
    ):
        zero.optimizer(Elsewhere, made())


def test_a_class_that_draws_random_numbers_is_refused():
    class Noisy(O.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p))

    with pytest.raises(OptimizerError, match="Noisy is none"):
        zero.optimizer(Noisy, made())


class Shared(O.SGD):
    """Keeps for all parameters together what ``where`` says."""

    where = ""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                p.add_(p.grad, alpha=-group["lr"] / (1 + i if self.where == "index" else 1))
        if self.where == "state":
            self.state["k"] = self.state.get("k", 0) + 1
        if self.where == "attribute":
            self.count = getattr(self, "count", 0) + 1


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("state", "it keeps state 'k' for all parameters together"),
        ("attribute", "it keeps a number, 'count', for all parameters together"),
        ("index", "a step on two parameters differs from steps on each of them alone"),
    ],
)
def test_a_class_that_couples_parameters_is_refused(where, why, monkeypatch):
    monkeypatch.setattr(Shared, "where", where)
    with pytest.raises(OptimizerError, match=f"Shared is none: {why}; use"):
        zero.optimizer(Shared, made(), lr=0.1)
    monkeypatch.setattr(Shared, "where", "")
    zero.optimizer(Shared, made(), lr=0.1)


def test_a_group_that_found_no_room_leaves_nothing_behind(tmp_path, monkeypatch):
    model = made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    optimizer = zero.optimizer(O.AdamW, [model.last.weight])

    def full(*args):
        raise StorageError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer), "_allocate", full)
        with pytest.raises(StorageError, match="no room"):
            optimizer.add_param_group({"params": [model.first.weight]})
    (sharded_model,) = optimizer._sharded_models()
    assert set(sharded_model.optimizers) == {"last.weight"}
    optimizer.add_param_group({"params": [model.first.weight]})
    assert set(sharded_model.optimizers) == {"last.weight", "first.weight"}


def test_arguments_that_do_not_fit():
    with pytest.raises(OptimizerError, match="subclass of torch.optim.Optimizer"):
        zero.optimizer(nn.Linear, made())
    for norm in (0, "1"):
        with pytest.raises(OptimizerError, match="max_grad_norm must be"):
            zero.optimizer(O.SGD, made(), max_grad_norm=norm)
    with pytest.raises(OptimizerError, match="overlap must be True or False, not 'no'"):
        zero.optimizer(O.SGD, made(), overlap="no")
    with pytest.raises(OptimizerError, match="a parameter group has .* twice; give each parameter once"):
        zero.optimizer(O.SGD, [*made().parameters()] * 2, lr=0.1)
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
    MODULE.SUB_GROUP_BYTES = 16 << 10

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


def _without_gradients(rank, world):
    """One rank has dropped its gradients; it would be alone, and its peer in the sum of the norm."""
    model = made()
    optimizer = zero.optimizer(O.AdamW, model, max_grad_norm=1.0)
    model(torch.ones(2, 64)).sum().backward()
    if rank == 1:
        optimizer.zero_grad()
    with pytest.raises(RankMismatchError, match="there are no gradients of sharded parameters' on rank 1"):
        optimizer.step()
    return True


@pytest.mark.dist
def test_a_norm_of_which_one_rank_has_no_part_is_an_error_on_all():
    assert run_ranks(_without_gradients, 2, timeout=60.0) == [True, True]


@pytest.mark.dist
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_on_two_ranks(transport, overlap, tmp_path):
    assert run_ranks(_two_ranks, 2, transport, overlap, str(tmp_path)) == [True, True]
