"""Kernels over lists of shards count as writes: to a backward that has yet to read them, and to checksums of files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ShardError

O = torch.optim


def made(**fields) -> nn.Module:
    torch.manual_seed(0)
    return zero.shard(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), device="cpu", **fields)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["foreach", "fused", "by hand"])
def test_a_step_between_forward_and_backward_is_an_error(how, compiled):
    model = made()
    run = torch.compile(model, backend="zero", options={"compute": "aten"}) if compiled else model
    opt = O.AdamW(model.parameters(), lr=0.1, **({} if how == "by hand" else {how: True}))
    run(torch.ones(2, 64)).square().sum().backward()
    loss = run(torch.ones(2, 64)).square().sum()
    if how == "by hand":
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.9)
    else:
        opt.step()
    opt.zero_grad()
    # Eager code of the only rank computes with the parameters themselves: autograd says it in its own words.
    ours, words = (
        (ShardError, "was modified in place between forward and backward"),
        (RuntimeError, "modified"),
    )
    error, match = ours if compiled else words
    with pytest.raises(error, match=match):
        loss.backward()


def _value(m):
    nn.utils.clip_grad_value_(m.parameters(), 0.001)


def _norm(m):
    nn.utils.clip_grad_norm_(m.parameters(), 0.001)


def _unscale(m):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(O.SGD(m.parameters(), lr=0.1))


def _by_hand(m):
    torch._foreach_mul_([p.grad for p in m.parameters()], 0.5)


@pytest.mark.parametrize("write", [_value, _norm, _unscale, _by_hand])
def test_gradients_in_files_with_checksums_may_be_written_to(write, tmp_path):
    files = {"nvme_dir": str(tmp_path), "offload_grads": "nvme", "nvme_checksums": True}
    want, model = made(), made(**files)
    plain, opt = O.SGD(want.parameters(), lr=0.1), zero.optimizer(O.SGD, model, lr=0.1)
    for m, o in ((want, plain), (model, opt)):
        for _ in range(2):
            m(torch.ones(2, 64)).sum().backward()
            with torch.no_grad():
                write(m)
            o.step()
            o.zero_grad()
    for p, q in zip(want.parameters(), model.parameters(), strict=True):
        assert torch.equal(p._local_tensor, q._local_tensor)


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_parameters_in_files_with_checksums_may_be_stepped(how, tmp_path):
    model = made(nvme_dir=str(tmp_path), offload_params="nvme", nvme_checksums=True)
    want = made()
    for m in (want, model):
        opt = O.AdamW(m.parameters(), lr=0.1, **{how: True})
        for _ in range(3):
            m(torch.ones(2, 64)).sum().backward()
            opt.step()
            opt.zero_grad()
    for p, q in zip(want.parameters(), model.parameters(), strict=True):
        assert torch.equal(p._local_tensor, q._local_tensor)


def test_writes_under_a_parameter_count_too(tmp_path):
    """Through ``to_local()``: the rows of a parameter have a count of their own."""
    models = made(), made(nvme_dir=str(tmp_path), offload_params="nvme", nvme_checksums=True)
    runs = [torch.compile(m, backend="zero", options={"compute": "aten"}) for m in models]
    x, seen = torch.ones(2, 64), []
    for m, run in zip(models, runs, strict=True):
        seen.append([run(x)])
        with torch.no_grad():
            next(m.parameters()).to_local().clamp_(-0.05, 0.05)
        seen[-1].append(run(x))
    assert all(map(torch.equal, *seen))
    assert not torch.equal(seen[0][0], seen[0][1])
