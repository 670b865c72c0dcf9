"""The ranks of one process, each in a thread of its own, that meet wherever they run a Program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from zero_compiler.errors import TransferError

_PATIENCE_S = 120.0  # for the ranks of one process to meet


class Lockstep:
    """Runs a function once a rank, each in a thread of its own, that meet wherever they run a Program.

    So the caller of a Program may be anything that calls it once a rank: autograd, AOTAutograd's wrappers, a
    compiled module. At a meeting one thread computes for all, in the order of the ranks. The other ranks start
    when the first has come to its first meeting, so that what it compiles on the way is compiled once.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._here = threading.local()
        self._meeting: list[Any] = [None] * world
        self._barrier = threading.Barrier(world)
        self._first = threading.Event()

    @property
    def rank(self) -> int:
        """Rank of the running thread."""
        return self._here.rank

    def map(self, fn: Callable[[int], Any]) -> list[Any]:
        """``fn(rank)`` on every rank; raises the error of the lowest rank that has one of its own.

        Raises:
            TransferError: ranks did not meet.
        """
        results: list[Any] = [None] * self.world
        errors: list[BaseException | None] = [None] * self.world

        def body(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = fn(rank)
            except BaseException as error:
                errors[rank] = error
                self._barrier.abort()
            finally:
                self._first.set()

        self._first.clear()
        threads = [threading.Thread(target=body, args=(k,)) for k in range(self.world)]
        for t in threads:
            t.start()
            self._first.wait()
        for t in threads:
            t.join()
        self._barrier.reset()
        waited = [k for k, e in enumerate(errors) if isinstance(e, threading.BrokenBarrierError)]
        own = [e for k, e in enumerate(errors) if e is not None and k not in waited]
        if own:
            raise own[0]
        if waited:
            rest = [k for k in range(self.world) if k not in waited]
            raise TransferError(
                f"ranks {waited} waited {_PATIENCE_S:.0f} s for all {self.world} ranks to run the same Programs"
                + (f"; ranks {rest} have returned without" if rest else "; some came too late")
            ) from errors[waited[0]]
        return results

    def together(self, given: Any, fn: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Every rank brings ``given``; one of them calls ``fn`` on all of it; each gets its own result."""
        self._meeting[self.rank] = given
        self._first.set()
        if self._barrier.wait(timeout=_PATIENCE_S) == 0:
            try:
                self._meeting[:] = list(fn(list(self._meeting)))
            except BaseException:
                self._barrier.abort()
                raise
        self._barrier.wait(timeout=_PATIENCE_S)
        mine, self._meeting[self.rank] = self._meeting[self.rank], None
        return mine
