"""Parameters, gradients and states in files: the same values as in memory, in every combination."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compare import local
from dist.spawn import run_ranks
from tiered import ALL, Net, assert_same, compiled, made, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.errors import ConfigError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.storage.stores import region_of

O = torch.optim

TIERS = list(itertools.product(("none", "nvme"), repeat=3))


@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_every_combination_on_one_rank(tiers, init, tmp_path):
    want = made(tmp_path)
    losses = train(want, compiled(want), O.AdamW(want.parameters()))
    model = made(tmp_path, init, tiers)
    optimizer = zero.optimizer(O.AdamW, model)
    assert train(model, compiled(model), optimizer) == losses
    assert_same(model, want)
    for name, param in model.named_parameters():
        in_file = tiers[0] == "nvme" and param.dim() > 0
        assert (region_of(local(param)) is not None) == in_file, name
    model(torch.ones(2, 64)).sum().backward()  # eager
    assert (region_of(local(model.inner.weight.grad)) is not None) == (tiers[1] == "nvme")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_and_states_of_the_lower_stages(stage, tmp_path):
    want = made(tmp_path, stage=stage)
    losses = train(want, compiled(want), O.AdamW(want.parameters()))
    model = made(tmp_path, tiers=("none", "nvme", "nvme"), stage=stage)
    run, optimizer = compiled(model), zero.optimizer(O.AdamW, model)
    assert train(model, run, optimizer) == losses
    assert_same(model, want)


def test_gradients_in_files_after_a_backward_that_broke_off(tmp_path):
    model, want = made(tmp_path, tiers=("none", "nvme", "none")), made(tmp_path)
    run, other = compiled(model), compiled(want)

    def stop(grad):
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"):
        x = torch.ones(2, 64, requires_grad=True)
        y = x * 2
        y.register_hook(stop)
        run(y).sum().backward()
    model.zero_grad()
    for r in (run, other):
        r(torch.ones(2, 64)).sum().backward()
    assert torch.equal(local(model.inner.weight.grad), local(want.inner.weight.grad))
    assert region_of(local(model.inner.weight.grad)) is not None


def _ranks(rank, world, transport, folder):
    cases = (
        (("nvme", "none", "none"), {}),
        (("nvme", "nvme", "nvme"), {}),
        ((None,) * 3, {"device_rest_bytes": 60_000}),  # a part of the parameters, and nothing else
    )
    for tiers, fields in cases:
        want = made(folder, transport=transport)
        losses = train(want, compiled(want), O.AdamW(want.parameters()), rank)
        model = made(folder, True, tiers, transport=transport, **fields)
        run = compiled(model)
        optimizer = zero.optimizer(O.AdamW, model)
        assert train(model, run, optimizer, rank) == losses
        assert_same(model, want)
        with zero.gathered(model), zero.gathered(want):
            assert torch.equal(model.inner.weight, want.inner.weight)
        (program,) = {
            p.phase: p
            for p in sharded_models_of(model)[0].frames[0].programs.values()
            if p.phase == "backward"
        }.values()
        assert program.host_bytes > 0
        if fields:
            placed = sharded_models_of(model)[0].tiers.placed
            assert placed.tier("params", "inner.weight") == placed.tier("optimizer", "first.weight") == "nvme"
            assert placed.tier("params", "first.weight") == "none"
    return True


def test_gradients_in_files_of_a_backward_within_another(tmp_path):
    """That of a checkpointed block ends before the one around it, some of whose gradients are there already."""
    model, want = made(tmp_path, tiers=("none", "nvme", "none")), made(tmp_path)
    for m in (model, want):
        inner = m.inner.forward
        m.inner.forward = functools.partial(checkpoint, inner, use_reentrant=True)
        for _ in range(2):  # the second adds to the gradients of the first
            m(torch.ones(2, 64)).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (name == "frozen")
        assert q.grad is None or torch.equal(local(p.grad), local(q.grad)), name


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_on_two_ranks(transport, tmp_path):
    assert run_ranks(_ranks, 2, transport, str(tmp_path)) == [True, True]


def test_files_are_read_one_layer_ahead_into_a_pool_of_two_layers(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    zero.shard(model, nvme_dir=str(tmp_path), offload_params="nvme")
    run = compiled(model, bucket_bytes=0)
    run(torch.randn(4, 256)).sum().backward()
    frame = sharded_models_of(model)[0].frames[0]
    chunk = 256 * 256 * 4
    for phase, program in frame.programs.items():
        ops = [
            (i.op, i.index)
            for i in program.instrs
            if i.op in ("fetch", "wait_fetch", "gather", "compute") and hasattr(i, "index")
        ]
        order = [index for op, index in ops if op == "fetch"]
        # Backward needs no gradient of the input, and so not the first weight.
        assert order == list(range(8 if phase == "forward" else 7))
        for k in order[:-1]:
            # Asked for before the gather of the layer in front of it is needed, and there when it is its turn.
            assert (
                ops.index(("fetch", k + 1)) < ops.index(("wait_fetch", k + 1)) < ops.index(("gather", k + 1))
            )
            assert ops.index(("gather", k)) < ops.index(("fetch", k + 1))
        # One rank computes where the chunk was read to: a layer that computes, the one ahead, and the one that is read.
        assert program.host_bytes == 3 * chunk, phase
    report = zero.inspect(model)
    assert report.memory.files == 8 * chunk
    assert report.memory.host == 3 * chunk
    assert report.memory.parameters == 0
    assert "files" in str(report)


# Handles ---------------------------------------------------------------------------------------------------------


def test_shards_in_files_work_wherever_a_tensor_does(tmp_path):
    model = made(tmp_path, tiers=ALL)
    want = made(tmp_path)
    optimizer, plain = zero.optimizer(O.AdamW, model), O.AdamW(want.parameters())
    run, other = compiled(model), compiled(want)
    train(model, run, optimizer)
    train(want, other, plain)
    # Read after a direct write.
    assert torch.equal(model.inner.weight.full_tensor(), want.inner.weight.full_tensor())
    assert torch.equal(model.inner.weight.norm().full_tensor(), want.inner.weight.norm().full_tensor())
    # Direct read after a write through the mapping.
    for m in (model, want):
        with torch.no_grad():
            m.inner.weight.mul_(0.5)
            m.first.weight.data.add_(0.25)
        with zero.gathered(m, write=True):
            m.last.weight.fill_(0.125)
    x = torch.ones(2, 64)
    assert torch.equal(run(x), other(x))
    # Checkpoints.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    again = made(tmp_path, tiers=ALL)
    into = {"model": again.state_dict()}
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    again.load_state_dict(into["model"])
    assert_same(again, want)
    assert region_of(local(again.inner.weight)) is not None
    loaded = torch.load(tmp_path / "state.pt", weights_only=False)
    third = made(tmp_path, tiers=ALL)
    third.load_state_dict(loaded["model"])
    optimizer = zero.optimizer(O.AdamW, third)
    optimizer.load_state_dict(loaded["optimizer"])
    assert train(third, compiled(third), optimizer, begin=5) == train(want, other, plain, begin=5)
    # A copy has memory of its own.
    twin = copy.deepcopy(model)
    assert region_of(local(twin.inner.weight)) is None
    assert torch.equal(twin(x), model(x))


def test_parameters_of_one_part_alone(tmp_path):
    def build(tier):
        torch.manual_seed(0)
        model = Net()
        zero.shard(model.inner, nvme_dir=str(tmp_path), offload_params=tier, offload_grads=tier)
        return zero.shard(model)

    want, model = build("none"), build("nvme")
    losses = train(want, compiled(want), O.SGD(want.parameters(), lr=0.1))
    assert train(model, compiled(model), O.SGD(model.parameters(), lr=0.1)) == losses
    assert_same(model, want)
    assert region_of(local(model.inner.weight)) is not None
    assert region_of(local(model.first.weight)) is None


def test_param_dtype_needs_no_second_copy(tmp_path):
    want = made(tmp_path, param_dtype=torch.bfloat16)
    losses = train(want, compiled(want), O.AdamW(want.parameters()))
    model = made(tmp_path, tiers=ALL, param_dtype=torch.bfloat16)
    optimizer = zero.optimizer(O.AdamW, model)
    assert train(model, compiled(model), optimizer) == losses
    assert_same(model, want)
    # At rest there is what is there without a cast, and no more than weights, gradients and two states in float32.
    full = made(tmp_path, tiers=ALL)
    other = zero.optimizer(O.AdamW, full)
    train(full, compiled(full), other)
    with_cast, without = (zero.inspect(m).memory for m in (model, full))
    for at in ("parameters", "gradients", "optimizer", "files"):
        assert getattr(with_cast, at) == getattr(without, at), at
    assert 0 < with_cast.files <= 4 * 4 * sum(p.numel() for p in model.parameters())


def test_options_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="needs stage=3, not 2"):
        made(tmp_path, tiers=("nvme", "none", "none"), stage=2)
    with pytest.raises(ConfigError, match='offload_grads="nvme" needs nvme_dir'):
        zero.shard(Net(), offload_grads="nvme")


class _Few(nn.Module):
    """Of three ranks some have no row of a parameter, and of one nobody has."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 1)
        self.last = nn.Linear(1, 4)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.two = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).sum() + self.none.sum() + self.two.sum()


def _few(rank, world, folder):
    seen = []
    for tiers, overlap in itertools.product((("none",) * 3, ("nvme",) * 3), (False, True)):
        torch.manual_seed(0)
        fields = dict(zip(("offload_params", "offload_grads", "offload_optimizer"), tiers, strict=True))
        model = zero.shard(_Few(), nvme_dir=folder, **fields)
        run, optimizer = compiled(model), zero.optimizer(O.AdamW, model, overlap=overlap, max_grad_norm=0.5)
        losses = []
        for i in range(3):
            torch.manual_seed(10 * i + rank)
            loss = run(torch.randn(4, 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seen.append((losses, [local(p).clone() for p in model.parameters()]))
    for losses, rows in seen[1:]:
        assert losses == seen[0][0]
        assert all(map(torch.equal, rows, seen[0][1]))


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_without_rows(tmp_path):
    run_ranks(_few, 3, str(tmp_path))


def test_a_layer_of_half_precision_and_odd_sizes(tmp_path):
    """Nothing is a multiple of a block, and checks are on."""

    def build(**fields):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 77), nn.Tanh(), nn.Linear(77, 3)).to(torch.bfloat16)
        return zero.shard(model, nvme_dir=str(tmp_path), **fields)

    def steps(model):
        run, optimizer = compiled(model), zero.optimizer(O.AdamW, model)
        losses = []
        for i in range(3):
            torch.manual_seed(i)
            loss = run(torch.randn(4, 33, dtype=torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    tiers = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")
    want = build()
    model = build(**tiers, nvme_checksums=True)
    assert steps(model) == steps(want)
    assert_same(model, want)
