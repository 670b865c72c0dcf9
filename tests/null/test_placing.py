"""Which tier each tensor rests on: under budgets what costs most to move stays nearest."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from torch import nn

import zero_compiler as zero
from zero_compiler import hardware
from zero_compiler.config import Config
from zero_compiler.errors import ConfigError, MemoryBudgetError
from zero_compiler.layout import Layout
from zero_compiler.modules import policies_of
from zero_compiler.placing import TRANSFERS, Given, Resting, cost_us, place, tiers_of
from zero_compiler.planning import report
from zero_compiler.runtime.stores import region_of

SPEC = hardware.load("laptop")
EVERYWHERE = ("none", "host", "nvme")


def total_us(tensors, tiers):
    return sum(cost_us(t.kind, t.nbytes, tiers[t.kind, t.name], SPEC) for t in tensors)


def fits(tensors, tiers, room):
    held = {tier: sum(t.nbytes for t in tensors if tiers[t.kind, t.name] == tier) for tier in room}
    return all(limit is None or held[tier] <= limit for tier, limit in room.items())


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(sorted(TRANSFERS)),
        st.integers(1, 900),
        st.sampled_from([EVERYWHERE, EVERYWHERE, ("nvme",)]),
    ),
    min_size=1,
    max_size=7,
).map(lambda rows: [Resting(kind, str(i), n, tiers) for i, (kind, n, tiers) in enumerate(rows)])


@given(TENSORS, st.integers(0, 3000))
@settings(max_examples=150, deadline=None)
def test_two_tiers_are_filled_as_well_as_can_be(tensors, device_bytes):
    """Sizes below the steps of the knapsack: no other placement that fits moves less."""
    room = {"none": device_bytes, "nvme": None}
    placed = place(tensors, room, SPEC).tiers
    assert fits(tensors, placed, room)
    best = min(
        total_us(tensors, tiers)
        for choice in itertools.product(*([x for x in t.tiers if x in room] for t in tensors))
        if fits(tensors, tiers := {(t.kind, t.name): c for t, c in zip(tensors, choice, strict=True)}, room)
    )
    assert total_us(tensors, placed) == pytest.approx(best)


@given(TENSORS, st.integers(0, 2000), st.integers(0, 2000))
@settings(max_examples=100, deadline=None)
def test_three_tiers_hold_what_they_may(tensors, device_bytes, host_bytes):
    room = {"none": device_bytes, "host": host_bytes, "nvme": None}
    placed = place(tensors, room, SPEC).tiers
    assert fits(tensors, placed, room)
    assert all(placed[t.kind, t.name] in t.tiers for t in tensors)
    # Nothing is farther away than it must be.
    for t in tensors:
        for tier in EVERYWHERE[: EVERYWHERE.index(placed[t.kind, t.name])]:
            if tier in t.tiers:
                assert not fits(tensors, placed | {(t.kind, t.name): tier}, room)


def test_parameters_stay_nearest():
    """A shard in a file is read three times a step and written once; a gradient, or a state, once each."""
    params = {f"w{i}": Given(Layout((256, 256), torch.float32, 1, True), i < 3, False) for i in range(4)}
    chunk = 256 * 256 * 4
    config = Config(device_rest_bytes=4 * chunk, nvme_dir="/")
    placed = tiers_of(config, False, params, SPEC)
    assert {k for k, tier in placed.tiers.items() if tier == "none"} == {("params", n) for n in params}
    assert placed.why[:3] == (
        f"parameters of 4 of 4 on the device: {4 * chunk:,} bytes",
        f"gradients of 3 of 3 in files: {3 * chunk:,} bytes, "
        + _ms("grads", 3, chunk)
        + " ms of transfers a step",
        f"optimizer states of 3 of 3 in files: {6 * chunk:,} bytes, "
        + _ms("optimizer", 3, 2 * chunk)
        + " ms of transfers a step",
    )
    # What is told is not asked: gradients stay, and parameters make room for them.
    told = tiers_of(
        Config(device_rest_bytes=4 * chunk, nvme_dir="/", offload_grads="none"), False, params, SPEC
    )
    assert [told.tier("grads", f"w{i}") for i in range(3)] == ["none"] * 3
    assert sorted(told.tier("params", n) for n in params) == ["none"] + ["nvme"] * 3
    # Where every weight is kept gathered there is no tier for parameters but the device.
    lower = tiers_of(Config(stage=2, device_rest_bytes=4 * chunk, nvme_dir="/"), False, params, SPEC)
    assert {lower.tier("params", n) for n in params} == {"none"}


def test_small_tensors_stay_whatever_the_room():
    """They are far below a step of the knapsack, and cost most per byte."""
    params = {f"b{i}": Given(Layout((64,), torch.float32, 1, True), True, False) for i in range(500)}
    params |= {f"w{i}": Given(Layout((1024, 1024), torch.float32, 1, True), True, False) for i in range(50)}
    placed = tiers_of(Config(device_rest_bytes=100 << 20, nvme_dir="/"), False, params, SPEC)
    assert {placed.tier(kind, f"b{i}") for kind in TRANSFERS for i in range(500)} == {"none"}
    held = sum(placed.tier("params", f"w{i}") == "none" for i in range(50))
    assert held == 24  # 4 MiB each; the small ones take half a MiB


def _ms(kind, count, nbytes):
    return f"{count * cost_us(kind, nbytes, 'nvme', SPEC) / 1e3:,.1f}"


def test_with_an_accelerator_states_alone_move():
    params = {"w": Given(Layout((256, 256), torch.float32, 1, True), True, False)}
    chunk = 256 * 256 * 4
    fields = {"device_rest_bytes": 2 * chunk, "nvme_dir": "/"}
    host = tiers_of(Config(host_rest_bytes=2 * chunk, **fields), True, params, SPEC)
    assert [host.tier(kind, "w") for kind in TRANSFERS] == ["none", "none", "host"]
    files = tiers_of(Config(host_rest_bytes=chunk, **fields), True, params, SPEC)
    assert files.tier("optimizer", "w") == "nvme"


def test_what_does_not_fit_is_one_error():
    params = {"w": Given(Layout((256, 256), torch.float32, 1, True), True, False)}
    chunk = 256 * 256 * 4
    with pytest.raises(MemoryBudgetError) as error:
        tiers_of(Config(device_rest_bytes=chunk), False, params, SPEC)
    assert str(error.value) == (
        f"device_rest_bytes={chunk:,} is {3 * chunk:,} bytes too small for this rank: {4 * chunk:,} bytes can rest "
        f"nowhere else (parameters {chunk:,}, gradients {chunk:,}, optimizer states {2 * chunk:,}), of {4 * chunk:,} in "
        f"all; give device_rest_bytes of at least {4 * chunk:,}, nvme_dir for a tier of files, or more ranks, which "
        "share these bytes"
    )
    with pytest.raises(
        MemoryBudgetError,
        match=f"nvme_rest_bytes={chunk:,} is {2 * chunk:,} bytes too small .* larger nvme_rest_bytes",
    ):
        tiers_of(
            Config(
                device_rest_bytes=0,
                nvme_rest_bytes=chunk,
                nvme_dir="/",
                offload_params="nvme",
                offload_grads="nvme",
            ),
            False,
            {"w": Given(Layout((256, 256), torch.float32, 1, True), False, False)}
            | {"v": Given(Layout((512, 256), torch.float32, 1, True), False, False)},
            SPEC,
        )
    with pytest.raises(ConfigError, match="host_rest_bytes is for accelerators"):
        tiers_of(Config(device_rest_bytes=0, host_rest_bytes=0), False, params, SPEC)
    with pytest.raises(ConfigError, match="nvme_rest_bytes needs nvme_dir"):
        Config(device_rest_bytes=0, nvme_rest_bytes=0)
    with pytest.raises(ConfigError, match="nothing does without device_rest_bytes"):
        Config(nvme_rest_bytes=0, nvme_dir="/")
    with pytest.raises(ConfigError, match="device_rest_bytes must be a number of bytes"):
        Config(device_rest_bytes=-1)


def deep(init=False, **fields):
    torch.manual_seed(0)

    def build():
        layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
        return nn.Sequential(*layers, nn.Linear(32, 4))

    if init:
        with zero.init(**fields):
            return build()
    return zero.shard(build(), **fields)


def train(model, optimizer):
    torch._dynamo.reset()
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = run(torch.randn(4, 32)).square().mean()
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("init", [*slow(False), True])
@pytest.mark.parametrize("share", [*slow(0.0, 0.15), 0.4, *slow(1.0)])
def test_mixed_placements_train_as_one_does(share, init, tmp_path):
    want = deep()
    numel = sum(p.numel() for p in want.parameters())
    losses = train(want, zero.optimizer(torch.optim.AdamW, want))
    budget = int(share * 16 * numel)
    model = deep(init, device_rest_bytes=budget, nvme_dir=str(tmp_path))
    assert train(model, zero.optimizer(torch.optim.AdamW, model)) == losses
    (policy,) = policies_of(model)
    made = zero.inspect(model)
    memory = made.memory
    assert memory.parameters + memory.gradients + memory.optimizer <= budget
    assert memory.parameters + memory.gradients + memory.optimizer + memory.files == 16 * numel
    assert (memory.files == 0) == (share == 1.0)
    assert made.to_dict()["placement"] == list(policy.placed.why)
    assert f"at rest: {policy.placed.why[0]}" in str(made)
    for row in made.params:
        param = policy.param(row["name"])
        assert (region_of(param._local_tensor) is not None) == (row["tiers"]["params"] == "nvme")
    kinds = {row["tiers"]["params"] for row in made.params}
    assert kinds == ({"nvme"} if share == 0 else {"none", "nvme"} if share == 0.15 else {"none"})


def test_a_parameter_group_has_its_own(tmp_path):
    model = deep(device_rest_bytes=0, nvme_dir=str(tmp_path))
    params = dict(model.named_parameters())
    last = {n: p for n, p in params.items() if n.startswith("4")}
    optimizer = zero.optimizer(
        torch.optim.AdamW,
        [
            {"params": [p for n, p in params.items() if n not in last]},
            {"params": list(last.values()), "offload_optimizer": "none"},
        ],
    )
    train(model, optimizer)
    for name, param in params.items():
        state = optimizer.state[param]["exp_avg"]
        assert (region_of(state._local_tensor) is None) == (name in last)
    assert zero.inspect(model).memory.optimizer == 8 * sum(p.numel() for p in last.values())


def test_planning_places_and_makes_no_file(tmp_path):
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    made = report(layers, (torch.ones(2, 32),), 2, device_rest_bytes=0, nvme_dir=str(tmp_path))
    assert made.memory.parameters == made.memory.gradients == made.memory.optimizer == 0
    assert made.memory.files == 4 * (32 * 32 + 32) * 16 // 2
    assert list(tmp_path.iterdir()) == []
