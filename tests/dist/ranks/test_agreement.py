"""Ranks that do not make the same calls: an error on every rank, never a hang; and what is no fault.

A group's timeout is 20 s here, far above what any step takes: an error that comes sooner was found by the ranks'
agreement, and not by waiting.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.faulty import ATEN, GROUP_TIMEOUT, batch, expect, net, ranks, use
from dist.spawn import run_ranks
from machines import machine
from marks import thorough
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import GradientError, RankMismatchError, ShardError
from zero_compiler.ranks import call_handshake

pytestmark = [pytest.mark.dist, pytest.mark.alone]


# --- ranks that disagree about the model -------------------------------------------------------------------------


def disagree_at_shard(rank, world):
    out = {}
    out["width"] = expect(
        RankMismatchError,
        lambda: zero.shard(net(6 + rank)),
        "the model given to zero.shard",
        "parameter first.weight: [6, 4]",
        "parameter first.weight: [7, 4]",
        f"on rank 0 of {world}",
        f"on rank 1 of {world}",
    )
    out["stage"] = expect(
        RankMismatchError,
        lambda: zero.shard(net(), stage=2 + min(rank, 1)),
        "'stage = 2' on rank 0",
        "'stage = 3' on rank 1",
    )
    out["config"] = expect(
        RankMismatchError,
        lambda: zero.shard(net(), param_dtype="bf16" if rank else None),
        "param_dtype = None",
        "param_dtype = bfloat16",
    )
    dtype = torch.float64 if rank == world - 1 else torch.float32
    out["dtype"] = expect(
        RankMismatchError, lambda: zero.shard(net().to(dtype)), "torch.float64", f"rank {world - 1}"
    )

    def longer():
        model = net()
        if rank == 1:
            model.extra = nn.Parameter(torch.ones(2))
        zero.shard(model)

    out["more"] = expect(RankMismatchError, longer, "extra")
    with tempfile.TemporaryDirectory() as folder:
        described = {latency: f"{folder}/{latency}.json" for latency in (1.0, 2.0)}
        for latency, path in described.items():
            with open(path, "w") as f:
                json.dump(machine(latency_us=latency), f)
        zero.shard(net(), hardware=described[1.0])  # what ranks call the file does not matter
        out["hardware"] = expect(
            RankMismatchError,
            lambda: zero.shard(net(), hardware=described[2.0 if rank == 1 else 1.0]),
            "'hardware = test, ",
            "on rank 0",
            "on rank 1",
        )
    # Nothing is left behind: the next model is fine.
    model = zero.shard(net())
    use(model, "compiled")(batch()).backward()
    assert isinstance(model.first.weight.grad, DTensor)
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_models_or_configs(world):
    results = ranks(disagree_at_shard, world)
    for case in results[0]:
        texts = {r[case][0] for r in results}
        assert len(texts) == 1, texts  # all ranks say the same
        assert all(r[case][1] < GROUP_TIMEOUT / 2 for r in results)


# --- ranks in different calls ------------------------------------------------------------------------------------


def other_call(rank, world, how, stage):
    torch._dynamo.reset()
    out = {}

    # another branch
    model = zero.shard(net(), stage=stage)
    call = use(model, how)
    call(batch()).backward()
    out["branch"] = expect(
        RankMismatchError, lambda: call(batch(), rank % 2), "ranks are in different calls", "other."
    )

    # one evaluates while its peer trains
    model = zero.shard(net(), stage=stage)
    call = use(model, how)

    def evaluate_or_train():
        for _ in range(2):
            if rank == 0:
                with torch.no_grad():
                    call(batch())
            else:
                call(batch()).backward()

    out["evaluates"] = expect(RankMismatchError, evaluate_or_train, "ranks are in different calls")

    # one leaves out a backward
    model = zero.shard(net(), stage=stage)
    call = use(model, how)

    def skip_a_backward():
        loss = call(batch())
        if rank == 0:
            loss.backward()
        call(batch())

    out["backward"] = expect(RankMismatchError, skip_a_backward, "ranks are in different calls")

    # one runs a backward under no_sync
    model = zero.shard(net(), stage=stage)
    call = use(model, how)

    def one_under_no_sync():
        if rank == 0:
            with zero.no_sync(model):
                call(batch()).backward()
        else:
            call(batch()).backward()
        call(batch())

    out["no_sync"] = expect(RankMismatchError, one_under_no_sync, "ranks are in different calls")

    # one enters gathered
    model = zero.shard(net(), stage=stage)
    call = use(model, how)

    def one_gathers():
        if rank == 0:
            with zero.gathered(model):
                pass
        else:
            call(batch())

    out["gathered"] = expect(RankMismatchError, one_gathers, "zero.gathered")

    # two models of the same kind, called in another order
    actor, critic = zero.shard(net(seed=1), stage=stage), zero.shard(net(seed=2), stage=stage)
    calls = [use(actor, how), use(critic, how)]
    for c in calls:
        c(batch()).backward()
    losses = [c(batch()) for c in calls]  # interleaved, and in one order: fine
    for loss in losses:
        loss.backward()
    order = calls if rank == 0 else calls[::-1]

    def in_another_order():
        for c in order:
            c(batch()).backward()

    out["order"] = expect(RankMismatchError, in_another_order, "ranks are in different calls", "'model ")
    losses = [c(batch()) for c in calls]

    def backwards_in_another_order():
        for loss in losses if rank == 0 else losses[::-1]:
            loss.backward()

    out["backward order"] = expect(
        RankMismatchError, backwards_in_another_order, "ranks are in different calls"
    )
    return out


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize(("world", "stage"), [(2, 3), *thorough((2, 1)), (3, 3)])
def test_ranks_in_different_calls(how, world, stage):
    results = ranks(other_call, world, how, stage)
    for case in results[0]:
        texts = {r[case][0] for r in results}
        assert len(texts) == 1, texts
        assert all(r[case][1] < GROUP_TIMEOUT for r in results), (case, [r[case][1] for r in results])


def eager_and_compiled(rank, world):
    model = zero.shard(net())
    call = use(model, "compiled")

    def calls():
        (call if rank else model)(batch())

    told = expect(RankMismatchError, calls, "eager gather of first.weight", "phase forward")
    # As where the other rank, which serves the store, has ended before this one has read what that was in.
    with mock.patch.object(call_handshake, "laid_text", return_value=None):
        mine = "phase forward" if rank else "eager gather of first.weight"
        unread = f"rank {rank} of 2 begins '{mine}', and the call of rank {1 - rank} of 2 could not be read"
        expect(RankMismatchError, calls, unread)
    return told


def test_one_rank_compiles_and_another_does_not():
    first, second = ranks(eager_and_compiled, 2)
    assert first[0] == second[0]


# --- what is no fault --------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11)

    def forward(self, ids):
        h = self.embed(ids)
        h = h + torch.softmax(h @ h.transpose(-1, -2), -1) @ self.mix(h)
        return self.head(h).logsumexp(-1).mean()


def own_lengths(rank, world, stage):
    """Ranks see their own lengths; one of them recompiles alone, more than once."""
    torch.manual_seed(0)
    plain = Tokens()
    torch.manual_seed(0)
    model = zero.shard(Tokens(), stage=stage)
    call = use(model, "compiled")
    lengths = [5, 5, 5, 5] if rank == 0 else [4, 9, 3, 7]
    extra = torch.compile(lambda x: x * 2, backend="zero", options=ATEN)
    for step, n in enumerate(lengths):
        ids = torch.randint(11, (2, n), generator=torch.Generator().manual_seed(10 * step + rank))
        if rank == 1:
            extra(torch.ones(step + 1))  # frames that the other rank does not have
        call(ids).backward()
        plain(ids).backward()
    for p in plain.parameters():
        dist.all_reduce(p.grad)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / world, msg=name, rtol=1e-5, atol=1e-6)
    return len(model._zero.sharded_model.frames)


@pytest.mark.parametrize("stage", [*thorough(2), 3])
def test_ranks_with_their_own_lengths_and_recompiles(stage):
    frames = ranks(own_lengths, 2, stage)
    assert frames[0] < frames[1]  # so one did compile alone


def a_copy_on_one_rank(rank, world):
    import copy

    model = zero.shard(net())
    if rank == 0:
        copy.deepcopy(model)  # e.g. kept for a checkpoint; no collective
    after = zero.shard(net())
    for m in (model, after):
        use(m, "compiled")(batch()).backward()
        m(batch()).backward()
    twin = copy.deepcopy(after)
    use(twin, "compiled")(batch()).backward()
    return True


def test_a_copy_made_on_one_rank_disturbs_no_other_model():
    assert ranks(a_copy_on_one_rank, 2) == [True, True]


# --- gathered(write=True) ----------------------------------------------------------------------------------------


def writes(rank, world):
    model = zero.shard(net(), stage=3)
    before = {n: p.to_local().clone() for n, p in model.named_parameters()}

    def differ():
        with zero.gathered(model, write=True):
            model.first.weight.fill_(1)
            model.second.bias.fill_(rank)

    text, _seconds = expect(RankMismatchError, differ, "'second.bias'", "nothing was written")
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), before[name]), name
    use(model, "compiled")(batch()).backward()
    with zero.gathered(model, write=True):
        torch.manual_seed(5)
        for p in model.parameters():
            p.normal_()
    torch.manual_seed(5)
    for p in model.parameters():
        assert torch.equal(p.full_tensor(), torch.empty(p.shape).normal_())

    # An exception on every rank keeps what was written.
    try:
        with zero.gathered(model, write=True):
            model.first.bias.fill_(3)
            raise KeyError("in the body")
    except KeyError:
        pass
    assert torch.equal(model.first.bias.full_tensor(), torch.full((6,), 3.0))
    return text


def another_shape(rank, world):
    model = zero.shard(net(), stage=3)
    before = {n: p.to_local().clone() for n, p in model.named_parameters()}

    def on_one_rank():
        with zero.gathered(model, write=True):
            model.first.weight.fill_(1)
            if rank == 1:
                model.second.bias.data = torch.zeros(9)

    said = "parameter 'second.bias' has shape (9,) at exit, expected (3,)"
    told = () if rank == 1 else (f"rank 1 of {world} could not begin its part of this call",)
    _text, seconds = expect(ShardError, on_one_rank, said, *told)
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), before[name]), name
    use(model, "compiled")(batch()).backward()
    return seconds


def test_gathered_with_another_shape_on_one_rank():
    assert max(ranks(another_shape, 3)) < GROUP_TIMEOUT / 2


def hooked_on_one_rank(rank, world):
    """A rank that may not begin its part of a call says so before the others wait for it."""
    model = zero.shard(net(), stage=3)
    call = use(model, "compiled")
    if rank == 1:
        model.second.weight.register_hook(lambda grad: None)
    loss = call(batch())

    def backward():
        with zero.no_sync(model):
            loss.backward()

    told = () if rank == 1 else (f"rank 1 of {world} could not begin its part of this call",)
    return expect(GradientError, backward, "parameter 'second.weight' has a hook", *told)


def test_a_hook_on_one_rank_where_gradients_wait():
    assert max(seconds for _, seconds in ranks(hooked_on_one_rank, 3)) < GROUP_TIMEOUT / 2


# --- a forward that writes to its weights ------------------------------------------------------------------------


class Clipped(nn.Module):
    """As many write a limit of norms, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6, bias=False)
        self.rows = 0

    def forward(self, x):
        with torch.no_grad():
            if self.rows:
                self.inner.weight[: self.rows].mul_(0.5)
        return self.inner(x).square().mean()


def writes_in_forward(rank, world):
    model, slowest = zero.shard(Clipped(), stage=3), 0.0
    before = model.inner.weight.to_local().clone()
    for model.rows in (1, 6):
        _text, seconds = expect(
            ShardError, lambda: model(batch()), "writes to parameter 'inner.weight' in place"
        )
        slowest = max(slowest, seconds)
        assert torch.equal(model.inner.weight.to_local(), before)
    model.rows = 0
    model(batch()).backward()
    return slowest


def test_an_eager_forward_that_writes_to_a_weight():
    assert max(ranks(writes_in_forward, 3)) < GROUP_TIMEOUT / 2


def test_gathered_with_different_values():
    texts = ranks(writes, 3)
    assert len(set(texts)) == 1


# --- ranks that come late ----------------------------------------------------------------------------------------


def late(rank, world, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    if rank == 0:
        time.sleep(1.5)
    began = time.monotonic()
    zero.shard(net())
    return time.monotonic() - began


def test_waiting_for_a_late_rank_is_silent(capfd):
    """A store of torchrun's kind writes two lines for each wait that is over without an answer."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    _, waited = run_ranks(late, 2, port, group=False)
    assert waited > 1.0
    assert "waitForInput" not in capfd.readouterr().err
