"""Training with shards and gradients on the host of an accelerator, in whose place a CPU stands."""

from __future__ import annotations

import itertools
import types
from unittest import mock

import pytest
import torch
from compare import local
from marks import thorough
from tiered import Net, assert_same, compiled, made, train
from torch import nn, optim

import zero_compiler as zero
from zero_compiler.errors import ConfigError, ShardError
from zero_compiler.layout import layout_of
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.params.shard import sharded_parameter
from zero_compiler.runtime.tier_copies import Aside
from zero_compiler.sharded.rest_tiers import RestTiers
from zero_compiler.storage.stores import region_of
from zero_compiler.tools.planning import planned_group

pytestmark = pytest.mark.usefixtures("on_accelerator")


# Running ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_combination_of_the_three_options(tmp_path):
    """On a CPU all of them; on an accelerator (a CPU in its place) those that are not refused."""
    kinds = ("none", "host", "nvme")
    refused = set()

    def steps(model):
        optimizer = zero.optimizer(optim.AdamW, model, lr=0.01)
        run, losses = compiled(model), []
        for i in range(2):
            for k in range(2):  # the second adds to the gradients of the first
                loss = run(torch.linspace(-1, i + k, 128).view(2, 64)).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        states = [local(v).clone() for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
        return losses, [local(p).clone() for p in model.parameters()], states

    def small(tiers):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 24), nn.Tanh())
        fields = dict(zip(("offload_params", "offload_grads", "offload_optimizer"), tiers, strict=True))
        return zero.shard(model, nvme_dir=str(tmp_path), **fields)

    losses, params, states = steps(small(("none",) * 3))
    assert len(states) == 3 * len(params)
    for tiers, apart in itertools.product(itertools.product(kinds, repeat=3), (False, True)):
        with mock.patch.object(RestTiers, "apart", apart):
            try:
                model = small(tiers)
            except ConfigError:
                refused.add((tiers, apart))
                continue
            got = steps(model)
            assert got[0] == losses, tiers
            assert all(map(torch.equal, got[1] + got[2], params + states)), tiers
            in_file = [
                region_of(local(model[0].weight)) is not None,
                zero.inspect(model).memory.files >= 4 * sum(p.numel() for p in model.parameters()),
            ]
            assert in_file == [tiers[0] == "nvme", "nvme" in tiers], tiers
    want = {
        (t, True)
        for t in itertools.product(kinds, repeat=3)
        if (t[1] != "none" if t[0] == "none" else "none" in t[1:])
    }
    assert refused == want


CHAINS = [("host", None), ("host", "host"), ("host", "nvme"), ("nvme", None), ("nvme", "nvme")]


CAST, TILES = {"param_dtype": torch.bfloat16}, {"tile_bytes": 8192}
MET = [*((*chain, {}) for chain in CHAINS), ("host", "nvme", CAST), ("nvme", "nvme", TILES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "grads", "fields"),
    [
        *MET,
        *thorough(
            *(c for c in ((*chain, more) for chain in CHAINS for more in (CAST, TILES)) if c not in MET)
        ),
    ],
    ids=str,
)
def test_one_rank_trains_as_with_everything_on_the_device(params, grads, fields, tmp_path):
    want = made(tmp_path, **fields)
    losses = train(want, compiled(want), optim.AdamW(want.parameters()))
    model = made(tmp_path, offload_params=params, offload_grads=grads, **fields)
    got = train(model, compiled(model), optim.AdamW(model.parameters()))
    if "tile_bytes" in fields:  # one rank has no tiles of what is on its device: other sums
        torch.testing.assert_close(got, losses)
    else:
        assert got == losses
        assert_same(model, want)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tier", [*thorough(None), "host", "nvme"])
def test_states_are_beside_the_shards_or_in_files(tier, overlap, tmp_path):
    def steps(model):
        optimizer = zero.optimizer(optim.AdamW, model, overlap=overlap)
        run, losses = compiled(model), []
        for i in range(3):
            torch.manual_seed(i)
            loss = run(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    want = made(tmp_path)
    model = made(tmp_path, offload_params="host", offload_optimizer=tier)
    assert steps(model) == steps(want)
    assert_same(model, want)
    memory = zero.inspect(model).memory
    assert memory.optimizer == 0 or tier != "nvme"
    assert (memory.files > 0) == (tier == "nvme")


@pytest.mark.slow
def test_eager_code_and_windows_and_checkpoints(tmp_path):
    want, model = made(tmp_path), made(tmp_path, offload_params="host")
    x = torch.ones(2, 64)
    for m in (want, model):
        m(x).sum().backward()
    assert torch.equal(local(model.inner.weight.grad), local(want.inner.weight.grad))
    with zero.gathered(model, write=True):
        model.inner.weight.fill_(0.5)
    assert torch.equal(local(model.inner.weight), torch.full((200, 200), 0.5))
    model.load_state_dict(want.state_dict())
    assert_same(model, want)
    run, other = compiled(model), compiled(want)
    assert torch.equal(run(x), other(x))
    with torch.no_grad():
        for m in (model, want):
            m.first.weight.mul_(0.5)
    assert torch.equal(run(x), other(x))


@pytest.mark.slow
def test_accumulation_without_communication(tmp_path):
    want, model = made(tmp_path), made(tmp_path, offload_params="host")
    for m in (want, model):
        run = compiled(m)
        with zero.no_sync(m):
            run(torch.ones(2, 64)).sum().backward()
        run(torch.full((2, 64), 0.5)).sum().backward()
    for (name, a), b in zip(model.named_parameters(), want.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(local(a.grad), local(b.grad)), name


@pytest.mark.slow
@pytest.mark.parametrize("tier", [*thorough("host"), "nvme"])
def test_a_model_that_is_built_on_the_host(tier, tmp_path):
    want = made(tmp_path)
    torch.manual_seed(0)
    with zero.init(nvme_dir=str(tmp_path), offload_params=tier):
        model = Net()
    assert_same(model, want)
    assert train(model, compiled(model), optim.AdamW(model.parameters())) == train(
        want, compiled(want), optim.AdamW(want.parameters())
    )


@pytest.mark.slow
def test_a_call_that_broke_off_leaves_nothing_behind(tmp_path):
    want, model = made(tmp_path), made(tmp_path, offload_params="host")
    run, other = compiled(model), compiled(want)
    run(torch.ones(2, 64)).sum().backward()
    model.zero_grad()
    session_of = model._zero.sharded_model.frames[0]
    assert session_of.programs["backward"].device_bytes > 0

    def stop(grad):
        raise ValueError("the user's")

    x = torch.ones(2, 64, requires_grad=True)
    y = x * 2
    y.register_hook(stop)
    with pytest.raises(ValueError, match="the user's"):
        run(y).sum().backward()
    model.zero_grad()
    for r in (run, other):
        r(torch.full((2, 64), 0.5)).sum().backward()
    assert torch.equal(local(model.inner.weight.grad), local(want.inner.weight.grad))


# On the host of another device -----------------------------------------------------------------------------------


def test_rows_on_the_host_stay_there():
    """torch copies what it is given to the device of a mesh."""
    group = planned_group(2, "cuda")
    layout = layout_of(torch.empty(5, 3), 2, 3)
    param = sharded_parameter(group, layout, torch.zeros(3, 3), True)
    assert (param.device.type, param.device_mesh.device_type) == ("cpu", "cuda")
    assert param.shape == (5, 3)
    param.grad = torch.distributed.tensor.DTensor.__new__(
        torch.distributed.tensor.DTensor, torch.ones(3, 3), param._spec, requires_grad=False
    )
    optim.AdamW([param], lr=0.1).step()
    assert local(param).abs().sum() > 0


def test_copies_run_behind_what_was_computed_and_are_waited_for(monkeypatch):
    """In which order the device is told of what, by streams that only note it."""
    told: list[str] = []

    class Event:
        def query(self):
            return False

        def synchronize(self):
            told.append("host waits")

    class Stream:
        def wait_stream(self, other):
            told.append("copies wait for compute")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def record_event(self):
            told.append("copied")
            return Event()

    current = types.SimpleNamespace(wait_event=lambda event: told.append("compute waits for copies"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    aside = Aside(torch.device("cpu"), Stream())
    event = aside.to_device([torch.zeros(2)], [torch.ones(2)])
    assert told == ["copies wait for compute", "copied"]
    aside.wait(event)
    assert told[2:] == ["compute waits for copies"]
    aside.reads(event, [(0, 100)])
    aside.spare(100, 200)  # nothing reads there
    assert told[3:] == []
    aside.spare(50, 60)
    assert told[3:] == ["host waits"]
    aside.finish()
    assert told[4:] == ["host waits"]
    aside.spare(50, 60)
    aside.finish()
    assert told[5:] == []


# Refusals --------------------------------------------------------------------------------------------------------


def test_states_that_were_told_to_rest_elsewhere_need_our_optimizer(tmp_path):
    model = made(tmp_path, offload_params="host", offload_optimizer="nvme")
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(ShardError, match="make it as zero.optimizer"):
        optim.AdamW(model.parameters()).step()


@pytest.mark.slow
def test_what_is_frozen_at_first_trains_on_the_host_later(tmp_path):
    """Its gradient is where the parameter is."""
    seen = []
    for tiers in (("none",) * 3, ("host", "host", "host")):
        torch.manual_seed(0)
        model = Net()
        model.inner.requires_grad_(False)
        fields = dict(zip(("offload_params", "offload_grads", "offload_optimizer"), tiers, strict=True))
        model = zero.shard(model, nvme_dir=str(tmp_path), **fields)
        run = compiled(model)
        losses = train(model, run, optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
        model.inner.requires_grad_(True)
        opt = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses += train(model, run, opt)
        seen.append(losses)
        (sharded_model,) = sharded_models_of(model)
        assert sharded_model.tiers.placed.tier("grads", "inner.weight") == tiers[1]
    assert seen[0] == seen[1]
