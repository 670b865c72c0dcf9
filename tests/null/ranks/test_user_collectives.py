"""A look at the stacks of other threads: in which collective they wait, and nothing that it keeps."""

from __future__ import annotations

import gc
import threading
import weakref

import torch.distributed as dist

from zero_compiler.ranks import user_collectives


class Kept:
    pass


def test_a_look_at_all_threads_keeps_nothing_of_their_stacks():
    """Without a garbage collection, which training loops turn off."""

    def computes() -> weakref.ref[Kept]:
        held = Kept()
        looking = threading.Thread(
            target=user_collectives.waited_in, args=(None, (threading.main_thread().ident,))
        )
        looking.start()
        looking.join()
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert computes()() is None
    finally:
        gc.enable()


def test_a_collective_is_one_of_its_own_group():
    pg = type("Group", (), {"group_name": "7"})()
    assert user_collectives._is_over(pg, pg)
    assert user_collectives._is_over("7", pg)
    assert not user_collectives._is_over("8", pg)
    assert not user_collectives._is_over(object(), pg)
    assert not user_collectives._is_over(None, pg)
    assert user_collectives._is_over(None, dist.group.WORLD)
