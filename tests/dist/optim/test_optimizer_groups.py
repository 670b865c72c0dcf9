"""zero.optimizer where a user edits parameter groups, leaves out steps, or has parameters of several kinds."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import GradientError, OptimizerError, StorageError
from zero_compiler.storage import stores

O = torch.optim


def made(**fields) -> nn.Module:
    torch.manual_seed(0)
    return zero.shard(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)), device="cpu", **fields)


def groups_of(model: nn.Module) -> list[dict]:
    return [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": list(model[2].parameters()), "lr": 0.01},
    ]


def step(model, opt):
    model(torch.ones(2, 16)).square().sum().backward()
    opt.step()
    opt.zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p._local_tensor, q._local_tensor) for p, q in pairs)


@pytest.mark.parametrize("overlap", [False, True])
def test_another_dictionary_in_the_place_of_a_group(overlap):
    want, model = made(), made()
    plain = O.SGD(groups_of(want))
    opt = zero.optimizer(O.SGD, groups_of(model), overlap=overlap)
    for m, o in ((want, plain), (model, opt)):
        step(m, o)
        o.param_groups[0] = {**o.param_groups[0], "lr": 0.5}
        step(m, o)
    assert same(want, model)


def _delete(o):
    del o.param_groups[1]


def _drop(o):
    del o.param_groups[1]["params"][1]


def _move(o):
    o.param_groups[0]["params"].append(o.param_groups[1]["params"].pop(1))


def _add(o):
    o.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("edit", [_delete, _drop, _move, _add])
def test_a_parameter_that_changes_its_group_is_refused(edit, overlap):
    model = made()
    opt = zero.optimizer(O.SGD, groups_of(model), overlap=overlap)
    step(model, opt)
    before = [p._local_tensor.clone() for p in model.parameters()]
    edit(opt)
    what = "of shape \\[3\\]" if edit is _add else "2\\.(weight|bias)"
    with pytest.raises(
        OptimizerError, match=f"parameter {what} was put into or taken out of a parameter group"
    ):
        step(model, opt)
    after = [p._local_tensor for p in model.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_there_still_after_an_edit_that_is_refused(overlap):
    model, want = made(), made()
    opt = zero.optimizer(O.SGD, groups_of(model), overlap=overlap)
    taken = opt.param_groups[1]["params"].pop(1)
    with pytest.raises(OptimizerError, match="taken out of a parameter group"):
        step(model, opt)
    opt.param_groups[1]["params"].append(taken)
    opt.step()
    opt.zero_grad()
    step(model, opt)
    plain = O.SGD(groups_of(want))
    for _ in range(2):
        step(want, plain)
    assert same(want, model)


class Own(O.Optimizer):
    """Puts an entry of its own into its groups."""

    def __init__(self, params, lr=0.1, scale=2.0):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group["scale"] = scale

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * group["scale"])


def test_a_class_that_completes_its_groups_itself():
    want, model = made(), made()
    for m, opt in ((want, Own(want.parameters())), (model, zero.optimizer(Own, model))):
        step(m, opt)
        step(m, opt)
    assert same(want, model)


def test_what_is_taken_out_of_a_group_stays_out():
    """A schedule that is made later begins at the rate that there is, as with a plain optimizer."""
    model = made()
    opt = zero.optimizer(O.SGD, model, lr=1.0)
    O.lr_scheduler.StepLR(opt, 1, 0.1)
    step(model, opt)
    del opt.param_groups[0]["initial_lr"]
    opt.param_groups[0]["lr"] = 0.01
    step(model, opt)
    assert "initial_lr" not in opt.param_groups[0]
    O.lr_scheduler.StepLR(opt, 1, 0.1)
    assert opt.param_groups[0]["initial_lr"] == 0.01


class Raises(nn.Module):
    now = False

    @torch._dynamo.disable
    def forward(self, x):
        x = x * 1.0
        x.register_hook(self._look)
        return x

    def _look(self, grad):
        if Raises.now:
            raise ValueError("the user's own")


@pytest.mark.parametrize("grads", ["none", "nvme"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("go_on", ["zero_grad", "accumulate"])
def test_a_batch_that_is_skipped_after_an_error_in_backward(go_on, compiled, grads, tmp_path):
    """With sub-groups that nothing has begun to update: no gradient of the broken batch is used later, unless the user adds
    to it, as without overlap."""

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), Raises(), nn.Linear(32, 4))

    def train(model, forward, opt):
        for i in range(4):
            torch.manual_seed(10 + i)
            Raises.now = i == 1
            try:
                forward(torch.randn(8, 16)).square().mean().backward()
            except ValueError:
                if go_on == "zero_grad":
                    opt.zero_grad()
                continue
            opt.step()
            opt.zero_grad()
        Raises.now = False

    want = made()
    train(want, want, O.SGD(want.parameters(), lr=0.1))
    model = zero.shard(made(), device="cpu", offload_grads=grads, nvme_dir=str(tmp_path))
    forward = torch.compile(model, backend="zero", options={"compute": "aten"}) if compiled else model
    train(model, forward, zero.optimizer(O.SGD, model, lr=0.1, overlap=True))
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p._local_tensor, q.detach())


@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_a_step_of_overlapped_updates_cannot_be_left_out(how):
    """Parameters are updated already; by ``model.zero_grad()`` it is found in the next backward."""
    model = made()
    opt = zero.optimizer(O.SGD, model, lr=0.1, overlap=True)
    model(torch.ones(2, 16)).sum().backward()
    if how == "model":
        model.zero_grad()
    with pytest.raises(GradientError, match=r"has updated parameters with these gradients.*call step\(\)"):
        opt.zero_grad() if how == "optimizer" else model(torch.ones(2, 16)).sum().backward()
    opt.step()
    opt.zero_grad()
    step(model, opt)


def test_a_checkpoint_may_be_loaded_in_place_of_a_step():
    model = made()
    opt = zero.optimizer(O.SGD, model, lr=0.1, overlap=True)
    weights, states = {k: v.clone() for k, v in model.state_dict().items()}, opt.state_dict()
    model(torch.ones(2, 16)).sum().backward()
    model.load_state_dict(weights)
    opt.load_state_dict(states)
    step(model, opt)
    want = made()
    step(want, O.SGD(want.parameters(), lr=0.1))
    assert same(want, model)


class Mixed(nn.Module):
    """A sharded part beside a plain one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = zero.shard(nn.Linear(8, 8), device="cpu"), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_norm_of_shards_and_plain_gradients(overlap):
    torch.manual_seed(0)
    want = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    want(torch.ones(2, 8)).sum().backward()
    norm = nn.utils.clip_grad_norm_(want.parameters(), 1.0)
    model = Mixed()
    opt = zero.optimizer(O.SGD, model, lr=0.1, max_grad_norm=1.0, overlap=overlap)
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    torch.testing.assert_close(opt.grad_norm, norm)
    O.SGD(want.parameters(), lr=0.1).step()
    for p, q in zip((*model.a.parameters(), *model.b.parameters()), want.parameters(), strict=True):
        torch.testing.assert_close(getattr(p, "_local_tensor", p.detach()), q.detach())


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Parameter(torch.randint(-5, 5, (8, 8), dtype=torch.int8), requires_grad=False)
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        return self.l(x @ self.q.float())


@pytest.mark.parametrize("cls", [O.AdamW, O.SGD])
def test_a_frozen_parameter_of_integers_is_left_as_it_is(cls):
    model = zero.shard(Quantized(), device="cpu")
    before = model.q._local_tensor.clone()
    opt = zero.optimizer(cls, model, lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    assert torch.equal(model.q._local_tensor, before)
    assert model.q not in opt.state


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_groups_of_one_optimizer_share_a_file(tmp_path):
    model = zero.shard(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(30))),
        device="cpu",
        offload_optimizer="nvme",
        nvme_dir=str(tmp_path),
    )
    before = _open()
    opt = zero.optimizer(O.AdamW, [{"params": [p]} for p in model.parameters()])
    assert len(opt.param_groups) == 60
    assert _open() - before <= 12


def test_too_many_open_files_are_called_so(tmp_path, monkeypatch):
    model = made(offload_optimizer="nvme", nvme_dir=str(tmp_path))

    def full(fd, nbytes):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(stores, "Mapping", full)
    with pytest.raises(
        StorageError,
        match=r"Too many open files; this process may have \d+ files open .* raise that limit \(ulimit -n\)",
    ):
        zero.optimizer(O.AdamW, model)
    assert not os.listdir(tmp_path)
