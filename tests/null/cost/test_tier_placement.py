"""Which tier each tensor rests on: under budgets what costs most to move stays nearest."""

import itertools
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow, thorough
from standin import accelerator
from torch import nn

import zero_compiler as zero
from zero_compiler.config import Config
from zero_compiler.construct.lazy_construction import Placement
from zero_compiler.cost import hardware
from zero_compiler.cost.tier_placement import (
    TRANSFERS,
    Given,
    Resting,
    Together,
    _of,
    cost_us,
    place,
    tiers_of,
)
from zero_compiler.errors import ConfigError, MemoryBudgetError
from zero_compiler.layout import Layout
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.storage.stores import region_of
from zero_compiler.tools.planning import report

SPEC = hardware.load("laptop")
EVERYWHERE = ("none", "host", "nvme")
KINDS = tuple(TRANSFERS)


def alone(rows):
    """Tensors of CPU ranks, each by itself."""
    return [
        Together((Resting(kind, str(i), n),), tuple((tier,) for tier in tiers))
        for i, (kind, n, tiers) in enumerate(rows)
    ]


def of_accelerator(sizes, **fields):
    """Parameters of an accelerator, each with what belongs to it."""
    given = {
        f"w{i}": Given(Layout((n,), torch.float32, 1, sharded), trainable)
        for i, (n, sharded, trainable) in enumerate(sizes)
    }
    return [item for name, g in given.items() for item in _of(Config(**fields), True, name, g)]


def solved(items, room):
    """The least cost of all placements that fit, by trying every one; None where none does."""
    best = None
    for choice in itertools.product(*(item.options for item in items)):
        taken = dict.fromkeys(EVERYWHERE, 0)
        for item, tiers in zip(items, choice, strict=True):
            for t, tier in zip(item.tensors, tiers, strict=True):
                taken[tier] += t.nbytes
        if all(room.get(tier, 0) is None or n <= room.get(tier, 0) for tier, n in taken.items()):
            us = sum(sum(i.costs_us(tiers, SPEC)) for i, tiers in zip(items, choice, strict=True))
            best = us if best is None else min(best, us)
    return best


def of_placed(items, placed):
    """Cost of a placement, and what it takes of each tier; it is one of the options of every item."""
    us, taken = 0.0, dict.fromkeys(EVERYWHERE, 0)
    for item in items:
        tiers = tuple(placed.tiers[t.kind, t.name] for t in item.tensors)
        assert tiers in item.options
        us += sum(item.costs_us(tiers, SPEC))
        for t, tier in zip(item.tensors, tiers, strict=True):
            taken[tier] += t.nbytes
    return us, taken


def check(items, room):
    best = solved(items, room)
    if best is None:
        with pytest.raises(MemoryBudgetError):
            place(items, room, SPEC)
        return
    us, taken = of_placed(items, place(items, room, SPEC))
    assert all(room.get(tier) is None or n <= room[tier] for tier, n in taken.items())
    assert us == pytest.approx(best)


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(1, 900),
        st.sampled_from([EVERYWHERE, EVERYWHERE, ("nvme",)]),
    ),
    min_size=1,
    max_size=7,
).map(alone)
LIMIT = st.one_of(st.none(), st.integers(0, 3000))
PARAMS = st.lists(
    st.tuples(st.integers(1, 200), st.sampled_from([True, True, True, False]), st.booleans()),
    min_size=1,
    max_size=4,
)


@given(TENSORS, LIMIT, LIMIT, LIMIT)
@settings(max_examples=200, deadline=None)
def test_as_well_as_can_be(tensors, device_bytes, host_bytes, nvme_bytes):
    """No placement that fits moves less, and where there is none it is an error."""
    check(tensors, {"none": device_bytes, "host": host_bytes, "nvme": nvme_bytes})


WISHES = st.sampled_from(
    [
        {},
        {"offload_optimizer": "none"},
        {"offload_optimizer": "host"},
        {"offload_params": "host"},
        {"offload_params": "nvme", "offload_grads": "host"},
        {"stage": 2},
    ]
)


@given(PARAMS, st.integers(0, 4000), LIMIT, LIMIT, WISHES)
@settings(max_examples=200, deadline=None)
def test_an_accelerator_as_well_as_can_be(sizes, device_bytes, host_bytes, nvme_bytes, wishes):
    fields = {"device_rest_bytes": device_bytes, "host_rest_bytes": host_bytes, "nvme_rest_bytes": nvme_bytes}
    items = of_accelerator(sizes, nvme_dir="/", **fields, **wishes)
    for item in items:
        for tiers in item.options:
            by_kind = {t.kind: tier for t, tier in zip(item.tensors, tiers, strict=True)}
            away = by_kind["params"] != "none"
            assert away == (by_kind.get("grads", by_kind["params"]) != "none")
            assert not away or by_kind.get("optimizer") != "none"
            for field, tier in wishes.items():
                kind = field.removeprefix("offload_")
                # What is not cut, every rank has on its device.
                assert by_kind.get(kind, tier) == tier or field == "stage" or by_kind["params"] == "none"
    check(items, {"none": device_bytes, "host": host_bytes, "nvme": nvme_bytes})


@given(PARAMS, st.integers(0, 4000), LIMIT)
@settings(max_examples=100, deadline=None)
def test_an_error_says_how_much_is_enough(sizes, device_bytes, host_bytes):
    """With the budget that it names at what it names everything fits, and with a byte less it does not."""
    fields = {"device_rest_bytes": device_bytes, "host_rest_bytes": host_bytes}
    room = {"none": device_bytes, "host": host_bytes}
    items = of_accelerator(sizes, **fields)
    try:
        place(items, room, SPEC)
    except MemoryBudgetError as error:
        over, field, least = re.search(
            r"is ([\d,]+) bytes too small.*give (\w+) of at least ([\d,]+)", str(error)
        ).groups()
        least = int(least.replace(",", ""))
        tier = "none" if field == "device_rest_bytes" else "host"
        assert least - room[tier] == int(over.replace(",", ""))
        place(items, room | {tier: least}, SPEC)
        with pytest.raises(MemoryBudgetError):
            place(items, room | {tier: least - 1}, SPEC)


def bound_us(items, room):
    """What no placement can be cheaper than: bytes of a tier may be bought at any price, and budgets are given it back."""
    options = Counter(tuple(item.option(tiers, SPEC) for tiers in item.options) for item in items)
    prices = [10 ** (k / 32) for k in range(-160, -80)]
    return max(
        -a * room["none"]
        - b * room["host"]
        + sum(
            n * min(o.cost + a * o.nbytes[0] + b * o.nbytes[1] for o in found) for found, n in options.items()
        )
        for a in prices
        for b in prices
    )


@pytest.mark.slow
def test_many_parameters():
    """Far beyond what is exact: the budgets are kept, and no placement costs 3% less."""
    sizes = [(1 << 20, True, True)] * 400 + [(1 << 18, True, True)] * 100 + [(1024, True, True)] * 2000
    total = 16 * sum(n for n, *_ in sizes)
    room = {"none": total // 3, "host": total // 3, "nvme": None}
    items = of_accelerator(sizes, device_rest_bytes=room["none"], host_rest_bytes=room["host"], nvme_dir="/")
    placed = place(items, room, SPEC)
    us, taken = of_placed(items, placed)
    for tier in ("none", "host"):
        assert 0 <= room[tier] - taken[tier] < 16 << 20  # less than one parameter more would take
    assert bound_us(items, room) <= us < 1.03 * bound_us(items, room)
    assert {placed.tier("params", f"w{i}") for i in range(500, 2500)} == {"none"}  # latency counts most


def test_parameters_stay_nearest():
    """A shard in a file is read three times a step and written once; a gradient, or a state, once each."""
    params = {f"w{i}": Given(Layout((256, 256), torch.float32, 1, True), i < 3) for i in range(4)}
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
    params = {f"b{i}": Given(Layout((64,), torch.float32, 1, True), True) for i in range(500)}
    params |= {f"w{i}": Given(Layout((1024, 1024), torch.float32, 1, True), True) for i in range(50)}
    placed = tiers_of(Config(device_rest_bytes=100 << 20, nvme_dir="/"), False, params, SPEC)
    assert {placed.tier(kind, f"b{i}") for kind in TRANSFERS for i in range(500)} == {"none"}
    held = sum(placed.tier("params", f"w{i}") == "none" for i in range(50))
    assert held == 24  # 4 MiB each; the small ones take half a MiB


def _ms(kind, count, nbytes):
    return f"{count * cost_us(kind, nbytes, 'nvme', SPEC) / 1e3:,.1f}"


def test_with_an_accelerator():
    """Updates on the host move a gradient and two copies of the weight; states that come to the device move more."""
    params = {f"w{i}": Given(Layout((256, 256), torch.float32, 1, True), True) for i in range(3)}
    chunk = 256 * 256 * 4

    def at(name, **fields):
        placed = tiers_of(Config(device_rest_bytes=6 * chunk, nvme_dir="/", **fields), True, params, SPEC)
        return [placed.tier(kind, name) for kind in KINDS]

    every = {name: at(name, host_rest_bytes=12 * chunk) for name in params}
    assert sorted(every.values()) == [["host"] * 3, ["host"] * 3, ["none"] * 3]
    # Where that is all the room that the host has, states alone go there.
    assert {tuple(at(n, host_rest_bytes=6 * chunk, offload_params="none")) for n in params} == {
        ("none", "none", "host")
    }
    # Nothing on the host without a budget for it, or a word.
    assert {x for n in params for x in at(n)} == {"none", "nvme"}
    assert [at(n, offload_params="host") for n in params] == [["host"] * 3] * 3
    # Where every weight is kept gathered, parameters stay.
    assert {at(n, stage=2, host_rest_bytes=12 * chunk)[0] for n in params} == {"none"}


def test_budgets_that_only_one_placement_keeps():
    """The device takes what files cannot, although something else there would save more."""
    tensors = alone([("params", 600, ("none", "nvme")), ("grads", 1000, ("none", "nvme"))])
    placed = place(tensors, {"none": 1000, "nvme": 600}, SPEC)
    assert placed.tiers == {("params", "0"): "nvme", ("grads", "1"): "none"}


def test_what_does_not_fit_is_one_error():
    params = {"w": Given(Layout((256, 256), torch.float32, 1, True), True)}
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
        match=f"nvme_rest_bytes={chunk:,} is {2 * chunk:,} bytes too small .* give nvme_rest_bytes of at least {3 * chunk:,}, or more ranks",
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
            {"w": Given(Layout((256, 256), torch.float32, 1, True), False)}
            | {"v": Given(Layout((512, 256), torch.float32, 1, True), False)},
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
@pytest.mark.parametrize("init", [*thorough(False), True])
@pytest.mark.parametrize("share", [*slow(0.0, 0.15), 0.4, *slow(1.0)])
def test_mixed_placements_train_as_one_does(share, init, tmp_path):
    want = deep()
    numel = sum(p.numel() for p in want.parameters())
    losses = train(want, zero.optimizer(torch.optim.AdamW, want))
    budget = int(share * 16 * numel)
    model = deep(init, device_rest_bytes=budget, nvme_dir=str(tmp_path))
    assert train(model, zero.optimizer(torch.optim.AdamW, model)) == losses
    (sharded_model,) = sharded_models_of(model)
    made = zero.inspect(model)
    memory = made.memory
    assert memory.parameters + memory.gradients + memory.optimizer <= budget
    assert memory.parameters + memory.gradients + memory.optimizer + memory.files == 16 * numel
    assert (memory.files == 0) == (share == 1.0)
    assert made.to_dict()["placement"] == list(sharded_model.tiers.placed.why)
    assert f"at rest: {sharded_model.tiers.placed.why[0]}" in str(made)
    for row in made.params:
        param = sharded_model.param(row["name"])
        assert (region_of(param._local_tensor) is not None) == (row["tiers"]["params"] == "nvme")
    kinds = {row["tiers"]["params"] for row in made.params}
    assert kinds == ({"nvme"} if share == 0 else {"none", "nvme"} if share == 0.15 else {"none"})


@pytest.mark.slow
@pytest.mark.parametrize("init", [*thorough(False), True])
@pytest.mark.parametrize(
    ("device", "host"),
    [(0.3, 0.3), *slow((0.0, None), (0.5, 0.5), (0.6, None), (0.1, 0.3), (1.0, 0.0), (0.55, 0.45))],
)
def test_an_accelerator_trains_with_mixed_placements(device, host, init, tmp_path):
    """A CPU in its place: tensors of one model on the device, on the host and in files."""
    with accelerator():
        want = deep()
        numel = sum(p.numel() for p in want.parameters())
        losses = train(want, zero.optimizer(torch.optim.AdamW, want))
        fields = {"device_rest_bytes": int(device * 16 * numel), "nvme_dir": str(tmp_path)}
        if host is not None:
            fields["host_rest_bytes"] = int(host * 16 * numel)
        model = deep(init, **fields)
        assert train(model, zero.optimizer(torch.optim.AdamW, model)) == losses
        for one, other in zip(want.parameters(), model.parameters(), strict=True):
            assert torch.equal(one._local_tensor, other._local_tensor)
        made = zero.inspect(model)
    (sharded_model,) = sharded_models_of(model)
    taken = dict.fromkeys(EVERYWHERE, 0)
    for (kind, name), tier in sharded_model.tiers.placed.tiers.items():
        taken[tier] += sharded_model.params[name].layout.bytes_local() * (2 if kind == "optimizer" else 1)
    assert sum(taken.values()) == 16 * numel
    assert taken["none"] <= fields["device_rest_bytes"]
    assert taken["host"] <= fields.get("host_rest_bytes", 0)
    memory = made.memory
    assert memory.parameters + memory.gradients + memory.optimizer == taken["none"]
    assert memory.files == taken["nvme"]
    assert memory.apart >= taken["host"]
    if (device, host) == (0.3, 0.3) and not init:
        assert {row["tiers"]["params"] for row in made.params} == {"none", "host"}
        assert all(taken.values())


@pytest.mark.slow
def test_a_plain_optimizer_takes_what_lies_beside_its_parameters(tmp_path):
    """On the host too; what rests in files it cannot keep there, and says so."""
    with accelerator():
        model = deep(device_rest_bytes=0, host_rest_bytes=1 << 20)
        assert set(sharded_models_of(model)[0].tiers.placed.tiers.values()) == {"host"}
        want = deep()
        assert train(model, torch.optim.AdamW(model.parameters())) == train(
            want, torch.optim.AdamW(want.parameters())
        )
        files = deep(device_rest_bytes=20_000, nvme_dir=str(tmp_path))
        with pytest.raises(zero.errors.ShardError, match=r"make it as zero\.optimizer"):
            train(files, torch.optim.AdamW(files.parameters()))


class Side:
    """What construction asks of a group whose device is an accelerator."""

    device = torch.device("cuda")


def test_construction_for_an_accelerator_leaves_room_for_what_belongs_to_a_parameter():
    weight = nn.Parameter(torch.empty(256, 256))
    layout, chunk = Layout((256, 256), torch.float32, 1, True), 256 * 256 * 4

    def tiers(count=6, param=weight, **fields):
        placement = Placement(Config(**fields), Side(), None)
        return [placement.tier(layout, param) for _ in range(count)]

    budgets = {"device_rest_bytes": 9 * chunk, "host_rest_bytes": 5 * chunk, "nvme_dir": "/"}
    assert tiers(**budgets) == ["none", "none", "host", "nvme", "nvme", "nvme"]
    assert tiers(12, nn.Parameter(weight, requires_grad=False), **budgets)[8:] == ["none", *["host"] * 3]
    assert set(tiers(**budgets, offload_grads="none")) == {"none"}
    assert set(tiers(**budgets, stage=2)) == {"none"}
    assert tiers(offload_params="host") == ["host"] * 6
    params = {f"w{i}": Given(layout, True, tier) for i, tier in enumerate(tiers(**budgets))}
    placed = tiers_of(Config(**budgets), True, params, SPEC)
    assert [placed.tier("params", n) for n in params] == [g.tier for g in params.values()]


@pytest.mark.slow
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
