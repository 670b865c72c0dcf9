"""zero.optimizer(overlap=True): updates while backward runs, with the values of updates after it."""

import copy
import gc

import pytest
import torch
from compare import local
from dist.streamed import MODULE, assert_same, made, steps
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.errors import GradientError, OptimizerError
from zero_compiler.sharded.grads import AppliedGrad
from zero_compiler.storage import streaming
from zero_compiler.storage.stores import region_of

pytestmark = pytest.mark.usefixtures("small_sub_groups")

O = torch.optim


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_overlap_gives_the_same_values(compiled, tier, tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 4 << 10)
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
    monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 1)
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
        optimizer, "feed", lambda sub_group: (order.extend(id(p) for p in sub_group.params), feed(sub_group))
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


class Behind(nn.Module):
    """A parameter that is never final before the large weight that comes after it."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))
        self.large = nn.Linear(96, 128)

    def forward(self, x):
        return self.large(x)


@pytest.mark.parametrize("slow", [False, True])
def test_overlap_updates_all_of_a_weight_that_lies_beside_one_without_a_gradient(slow, tmp_path, monkeypatch):
    """Where the beginning of the weight shared a sub-group with the other parameter, its end was updated before it, and the
    beginning not at all."""
    monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 64 << 10)
    if not slow:
        monkeypatch.setattr(streaming._StreamedTurn, "done", lambda turn: turn.wait() or True)

    def train(make, **fields):
        torch.manual_seed(0)
        model = zero.shard(Behind(), **fields)
        optimizer = make(model)
        run = torch.compile(model, backend="zero", options={"compute": "aten"})
        for i in range(3):
            torch.manual_seed(i)
            run(torch.randn(8, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    want = train(lambda m: O.AdamW(m.parameters()))
    tier = {"offload_optimizer": "nvme", "nvme_dir": str(tmp_path)}
    model, optimizer = train(lambda m: zero.optimizer(O.AdamW, m, overlap=True), **tier)
    assert any(
        p.entry.param is model.large.weight and not p.whole for u in optimizer.sub_groups for p in u.pieces
    )
    assert_same(model, optimizer, *want)


def test_overlap_keeps_no_gradients_waiting_for_a_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 1)
    monkeypatch.setattr(
        streaming._StreamedTurn, "done", lambda turn: False
    )  # a disk that is slower than backward
    model = zero.shard(Deep(), offload_optimizer="nvme", nvme_dir=str(tmp_path))
    optimizer = zero.optimizer(O.SGD, model, lr=0.1, momentum=0.9, overlap=True)
    run = torch.compile(model, backend="zero", options={"compute": "aten", "bucket_bytes": 0})
    waiting = []
    feed = optimizer.feed
    monkeypatch.setattr(
        optimizer,
        "feed",
        lambda sub_group: (feed(sub_group), waiting.append(len(optimizer._stream._waiting))),
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_overlap_and_regions_that_are_made_again(reentrant):
    """One that reenters is a backward of its own: the second finds the step begun."""

    class Regions(Deep):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = zero.shard(Regions())
    optimizer = zero.optimizer(O.SGD, model, lr=0.1, overlap=True)
    loss = model(torch.randn(8, 64, requires_grad=True)).sum()
    if reentrant:
        with pytest.raises(GradientError, match="to torch.utils.checkpoint give use_reentrant=False"):
            loss.backward()
    else:
        loss.backward()
        optimizer.step()


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


@pytest.fixture
def slow_files(monkeypatch):
    """Nothing is read before somebody waits for it."""
    real = streaming._StreamedTurn.done
    monkeypatch.setattr(streaming._StreamedTurn, "done", lambda turn: turn.job is None and real(turn))


def test_what_is_loaded_after_a_backward_is_not_written_over(slow_files, tmp_path):
    want, model = made(), made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    plain, optimizer = O.AdamW(want.parameters()), zero.optimizer(O.AdamW, model, overlap=True)
    for m, o in ((want, plain), (model, optimizer)):
        steps(m, o, 2, schedule=False)
        saved = copy.deepcopy((m.state_dict(), o.state_dict()))
        m(torch.ones(2, 64)).sum().backward()  # and the loop finds that it was not to be
        m.load_state_dict(saved[0])
        o.load_state_dict(saved[1])
        o.zero_grad()
        steps(m, o, 3, begin=2, schedule=False)
    assert_same(model, optimizer, want, plain)


def test_a_group_of_larger_sub_groups_may_come_between_backward_and_step(monkeypatch, tmp_path):
    # Of the weight that is there, the first piece is updated in the backward, and the second waits for its file.
    real = streaming._StreamedTurn.done
    monkeypatch.setattr(
        streaming._StreamedTurn, "done", lambda t: t.job is None or (t.job.writes[0].offset == 0 and real(t))
    )
    want, model = made(), made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    plain = O.AdamW([want.first.weight])
    optimizer = zero.optimizer(O.AdamW, [model.first.weight], overlap=True)
    assert len(optimizer.sub_groups) > 1
    for m, o in ((want, plain), (model, optimizer)):
        steps(m, o, 2, schedule=False)
        m.zero_grad()
        m(torch.ones(2, 64)).sum().backward()
        monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 64 << 10)
        o.add_param_group({"params": [m.scale, m.last.weight, m.last.bias, m.first.bias]})
        o.step()
        m.zero_grad()
        monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 16 << 10)
    assert_same(model, optimizer, want, plain)


def test_a_checkpoint_is_the_way_on_after_a_backward_that_broke_off(slow_files, tmp_path):
    def stop(grad):
        raise ValueError("the user's")

    want, model = made(), made(offload_optimizer="nvme", nvme_dir=str(tmp_path))
    plain, optimizer = O.AdamW(want.parameters()), zero.optimizer(O.AdamW, model, overlap=True)
    for m, o in ((want, plain), (model, optimizer)):
        steps(m, o, 2, schedule=False)
        saved = copy.deepcopy((m.state_dict(), o.state_dict()))
        x = torch.ones(2, 64, requires_grad=True)
        y = x * 2
        y.register_hook(stop)
        with pytest.raises(ValueError, match="the user's"):
            torch.compile(m, backend="zero", options={"compute": "aten"})(y).sum().backward()
        m.load_state_dict(saved[0])
        o.load_state_dict(saved[1])
        o.zero_grad()
        steps(m, o, 3, begin=2, schedule=False)
    assert_same(model, optimizer, want, plain)
