"""A rank whose process ends, stops or raises, wherever others may wait for it: they end soon, and say who it was.

Nobody ends them: each case is a job whose ranks nobody watches. The group's timeout is far above what they may wait.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch.distributed as dist
from dist.leaving import LONG_S, PLACES, leave
from dist.spawn import run_ranks
from marks import slow, thorough
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.errors import ShardError, TransferError, ZeroError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.ranks import agreement, call_handshake, peer_connections

pytestmark = [pytest.mark.dist, pytest.mark.alone]
SOON_S = 15.0
# Names of ours that mean nothing to a reader, and numbers of processes.
INTERNAL = re.compile(r"process \d+|pid|[0-9a-f]{8,}|decided/|zero/")
# There torch itself waits, and raises what its backend says.
TORCHS_OWN = "in a checkpoint's save"
QUICK = "in zero.shard"
OTHERS = [place for place in PLACES if place not in (QUICK, TORCHS_OWN)]
# Of each kind of place one, for tests that are the same in all of them: the others are combined by `make test-all`.
SAMPLE = (
    "before zero.shard",
    "in zero.init",
    "deciding a plan",
    "before compiling",
    "making a zero.optimizer",
    "in zero.gathered(write=True)",
    "in zero.load_safetensors",
    "in a backward",
)


def sampled(places: Iterable[str], sample: Collection[str] = SAMPLE) -> list[Any]:
    """The places, of which those outside of the sample are thorough."""
    return [value for p in places for value in ([p] if p in sample else thorough(p))]


def check(ends: dict[int, tuple[float, str, str]], *parts: str, soon_s: float = SOON_S) -> None:
    for seconds, kind, text in ends.values():
        assert kind, f"waits for {seconds:.0f} s: {text}"
        assert seconds < soon_s, (seconds, text)
        assert all(part in text for part in parts), text
        assert not INTERNAL.search(text), text


@pytest.mark.parametrize("place", [QUICK, *slow(*SAMPLE), *thorough(*(p for p in OTHERS if p not in SAMPLE))])
def test_a_rank_that_is_killed(place):
    check(leave(place, "killed"), "rank 1 of 2", " is gone: its process has ended")


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_collective_of_torch():
    check(leave(TORCHS_OWN, "killed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", sampled(p for p in PLACES if p not in (TORCHS_OWN, "before zero.shard", "before zero.init"))
)
def test_a_rank_that_raises_in_a_call_has_said_why(place):
    if place in (
        "in its own code",
        "before compiling",
        "in load_state_dict",
        "in a torch optimizer's step",
        "in an eager forward",
        "in an eager backward",
    ):
        check(leave(place, "raising"), "rank 1 of 2", " is gone: its process has ended")
    else:
        check(leave(place, "raising"), "rank 1 of 2", "ValueError: out of luck")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "gone"), [(3, 0), *thorough((2, 0), (3, 1))])
@pytest.mark.parametrize(
    "place",
    ["before zero.shard", "deciding a plan", "in a backward", *thorough("in zero.init", "in zero.gathered")],
)
def test_any_rank_may_go(place, world, gone):
    """Rank 0 serves the store too."""
    ends = leave(place, "killed", world, gone)
    check(ends, f"rank {gone} of {world}", " is gone")
    assert all(re.search(rf"rank {gone} of {world}(, which)? is gone", text) for *_, text in ends.values()), (
        ends
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "before zero.shard",
        "deciding a plan",
        "in its step that clips",
        *thorough("in zero.shard", "in zero.init", "compiling", "in zero.gathered"),
    ],
)
def test_a_rank_that_goes_from_a_group_without_gloo(place):
    """Before its first call it is known by its connection to the store."""
    check(leave(place, "killed", gloo=False), "rank 1 of 2", " is gone: its process has ended")


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ["in zero.shard", "in a backward", *thorough("before zero.shard", "in zero.init", "in zero.gathered")],
)
def test_for_a_rank_that_is_stopped_the_timeout_counts(place):
    timeout_s = 6.0
    ends = leave(place, "stopped", group_timeout_s=timeout_s)
    check(ends, "rank 1 of 2", soon_s=timeout_s + SOON_S)
    assert all(seconds > timeout_s - 2.0 for seconds, _, _ in ends.values()), ends


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "before zero.shard",
        "deciding a plan",
        *thorough(
            "in zero.shard",
            "in zero.init",
            "compiling",
            "making a zero.optimizer",
            "in zero.gathered(write=True)",
            "in a backward",
        ),
    ],
)
@pytest.mark.parametrize("gloo", [True, *thorough(False)])
def test_for_a_rank_that_is_stopped_and_serves_the_store_the_timeout_counts(place, gloo):
    """No request to the store is answered any more, of no thread."""
    timeout_s = 6.0
    ends = leave(place, "stopped", world=3, gone=0, group_timeout_s=timeout_s, gloo=gloo)
    check(ends, soon_s=timeout_s + SOON_S)
    assert any("rank 0 of 3" in text for _, _, text in ends.values()), ends


@pytest.mark.slow
def test_a_rank_that_plans_for_long_is_waited_for():
    ends = leave("deciding a plan", "slow", gone=0, group_timeout_s=5.0, slow_s=12.0)
    assert [kind for _, kind, _ in ends.values()] == ["ended well"]


@pytest.mark.slow
def test_a_rank_that_comes_late_to_a_group_without_gloo():
    """It is connected to the store, so nobody takes it for gone."""
    ends = leave("before zero.shard", "slow", gloo=False, slow_s=4.0)
    assert all(kind == "ended well" and seconds > 4.0 for seconds, kind, _ in ends.values()), ends


def fails_and_stays(rank: int, world: int) -> str:
    """Rank 1 has an error before the ranks meet in zero.shard, and does something else then; all go on later."""
    text = ""
    if rank == 1:
        with pytest.raises(ShardError) as error:
            zero.shard("no model")  # type: ignore[arg-type]
        time.sleep(3.0)
    else:
        start = time.monotonic()
        with pytest.raises(ShardError) as error:
            zero.shard(nn.Linear(4, 4), device="cpu")
        assert time.monotonic() - start < 2.5
    text = str(error.value)
    model = zero.shard(nn.Linear(4, 4), device="cpu")
    with zero.gathered(model):
        pass
    return text


@pytest.mark.parametrize("gloo", [True, *slow(False)])
def test_a_rank_that_cannot_shard_and_stays(gloo):
    first, second = run_ranks(
        fails_and_stays if gloo else fails_without_gloo, 2, timeout=60.0, group_timeout=LONG_S
    )
    assert second == "zero.shard takes an nn.Module, not str"
    assert first == f"rank 1 of 2 could not complete its zero.shard: {second}"


def fails_without_gloo(rank: int, world: int) -> str:
    call_handshake.has_gloo = lambda _: False
    return fails_and_stays(rank, world)


def destroys(rank: int, world: int) -> str:
    """Rank 1 destroys the process group while rank 0 waits for what it was to say; its threads end with it."""
    model = zero.shard(nn.Linear(4, 4), device="cpu")
    group = sharded_models_of(model)[0].group
    text = ""
    if rank == 1:
        dist.destroy_process_group()
    else:
        with pytest.raises(TransferError) as error:
            agreement.agree(group, "test", "what is said in a test", "one")
        text = str(error.value)
        dist.destroy_process_group()
    end = time.monotonic() + 10.0
    while any(t.name == "zero-peers" for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return text


def test_a_rank_that_destroys_the_group_answers_no_more():
    first, _ = run_ranks(destroys, 2, timeout=60.0, group_timeout=LONG_S)
    assert first == (
        "what is said in a test: rank 0 of 2 waited for an answer in vain: rank 1 of 2 is gone: it has destroyed the "
        "process group, after zero.shard"
    )


def leaves_a_child(rank: int, world: int) -> str:
    """A process that was forked from rank 1 outlives it, as a worker that loads data may for a while."""
    model = zero.shard(nn.Linear(4, 4), device="cpu")
    group = sharded_models_of(model)[0].group
    if rank == 1:
        if os.fork() == 0:
            time.sleep(20.0)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(TransferError) as error:
        agreement.agree(group, "test", "what is said in a test", "one")
    assert time.monotonic() - start < 10.0
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_leaves_a_forked_child():
    first, _ = run_ranks(leaves_a_child, 2, timeout=60.0, group_timeout=LONG_S, may_die=(1,))
    assert "rank 1 of 2 is gone: its process has ended" in first


def cannot_connect(rank: int, world: int) -> list[Any]:
    """Where no connection can be made, ranks agree as before."""
    if rank == 1:
        peer_connections.Peers._connect = refused  # type: ignore[method-assign]
    model = zero.shard(nn.Linear(4, 4), device="cpu")
    with zero.gathered(model):
        return [tuple(model.weight.shape)]


def refused(*_: Any) -> None:
    raise OSError("no way there")


def test_ranks_that_cannot_be_connected():
    assert run_ranks(cannot_connect, 2, timeout=60.0) == [[(4, 4)]] * 2


def goes_from_a_part(rank: int, world: int) -> str:
    """Rank 3 goes before the ranks of a mesh of two dimensions, which rank 4 is none of, make their process group."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    text = ""
    if rank < 3:
        with pytest.raises(ZeroError) as error:
            zero.shard(nn.Linear(4, 4), device="cpu", mesh=mesh)
        text = str(error.value)
    assert time.monotonic() - start < SOON_S
    return text


@pytest.mark.slow
def test_a_rank_that_goes_before_a_mesh_over_part_of_the_job_has_its_group():
    said = run_ranks(goes_from_a_part, 5, timeout=60.0, group_timeout=LONG_S, may_die=(3,))
    assert all(" is gone: its process has ended" in text for text in said[:3]), said
