"""Ranks that share memory and die, break off or never come: the peers are told, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch
from dist.sharing import batch, loss_of, make, train
from dist.spawn import run_ranks

from zero_compiler.errors import RankMismatchError, TransferError
from zero_compiler.params.modules import sharded_models_of

pytestmark = [pytest.mark.dist, pytest.mark.alone]


def mappings():
    with open("/proc/self/maps") as f:
        return sum("zero-segment" in line for line in f)


def descriptors():
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "zero-segment" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


def no_leak(rank, world):
    before = set(os.listdir("/dev/shm"))
    for _ in range(3):
        train("shared", rank, steps=1)
        never_called = make("shared")
        del never_called
        torch._dynamo.reset()
        gc.collect()
    assert mappings() == 0, mappings()
    assert descriptors() == 0, descriptors()
    assert [n for n in set(os.listdir("/dev/shm")) - before if "zero" in n] == []
    return True


def forgotten(rank, world):
    """Dynamo keeps the Programs of a class, and so what they hold, until it is told to forget them."""
    held = []
    for stage in (3, 2, 3):
        train("shared", rank, steps=1, stage=stage)
        gc.collect()
        held.append((mappings(), descriptors()))
    return held


def test_memory_that_ranks_share_goes_with_its_model_and_not_with_the_compiled_code():
    assert run_ranks(forgotten, 2, timeout=120.0) == [[(0, 0)] * 3] * 2


def test_nothing_is_left_of_a_dropped_model():
    assert run_ranks(no_leak, 2, timeout=120.0) == [True] * 2


def killed(rank, world):
    _model, compiled = make("shared")
    loss_of(compiled, batch(rank, 0)).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(TransferError, match="rank 1"):
        loss_of(compiled, batch(rank, 1))
    with pytest.raises(TransferError, match="rank 1"):
        loss_of(compiled, batch(rank, 2))
    return time.monotonic() - begin


def test_a_killed_rank_is_named():
    before = set(os.listdir("/dev/shm"))
    (seconds, _) = run_ranks(killed, 2, timeout=60.0, may_die={1})
    assert seconds < 5.0
    assert {n for n in set(os.listdir("/dev/shm")) - before if "zero" in n} == set()


def gives_up(rank, world):
    model, compiled = make("shared")
    loss_of(compiled, batch(rank, 0)).backward()
    if rank == 1:
        sharded_models_of(model)[0].runtime.engine.abandon("Stop: no more")
    with pytest.raises(TransferError, match="Stop: no more"):
        loss_of(compiled, batch(rank, 1)).backward()
    return True


def test_a_rank_that_breaks_off_tells_why():
    assert run_ranks(gives_up, 2, timeout=60.0) == [True] * 2


def interrupted(rank, world):
    """Ctrl-C on a rank that waits for its peer to begin a call."""
    _model, compiled = make("shared")
    loss_of(compiled, batch(rank, 0)).backward()
    store = torch.distributed.distributed_c10d._get_default_store()

    def interrupt():
        time.sleep(1.0)  # until this rank waits for the other
        os.kill(os.getpid(), signal.SIGINT)
        store.set("interrupted", "")

    if rank == 0:
        store.wait(["interrupted"])
    else:
        threading.Thread(target=interrupt).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt if rank == 1 else RankMismatchError) as error:
        loss_of(compiled, batch(rank, 1)).backward()
    assert time.monotonic() - began < 10
    if rank == 0:
        assert "rank 1 of 2 could not complete its part of this call: KeyboardInterrupt;" in str(error.value)
    with pytest.raises(TransferError, match="broke off.*KeyboardInterrupt"):
        compiled(batch(rank, 2))
    return True


def test_ctrl_c_between_the_meeting_and_the_first_transfer_ends_the_call_on_all():
    assert run_ranks(interrupted, 2, timeout=60.0, group_timeout=20.0) == [True] * 2


def forked(rank, world):
    """A forked copy of a rank, as a worker that loads data is, drops what it has of the model and ends."""
    model, compiled = make("shared")
    loss_of(compiled, batch(rank, 0)).backward()
    child = os.fork()
    if child == 0:
        sharded_models_of(model)[0].runtime.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    loss_of(compiled, batch(rank, 1)).backward()
    return True


def test_a_forked_copy_disturbs_nobody():
    assert run_ranks(forked, 2, timeout=60.0, group_timeout=15.0) == [True] * 2


def different_calls(rank, world):
    _model, compiled = make("shared")
    loss_of(compiled, batch(rank, 0)).backward()
    with torch.no_grad():
        compiled(batch(rank, 0))
    with pytest.raises(RankMismatchError, match="different calls"):
        if rank == 0:
            with torch.no_grad():
                compiled(batch(rank, 1))
        else:
            compiled(batch(rank, 1))
    return True


def test_different_calls_are_told():
    assert run_ranks(different_calls, 2, timeout=60.0) == [True] * 2


def late_forever(rank, world):
    _model, compiled = make("shared")
    if rank == 1:
        time.sleep(4.0)
        return None
    with pytest.raises(TransferError, match="rank 1"):
        loss_of(compiled, batch(rank, 0))
    return True


def test_a_rank_that_never_comes_is_named():
    assert run_ranks(late_forever, 2, timeout=60.0, group_timeout=1.5)[0] is True
