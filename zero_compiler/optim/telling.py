"""Tells other ranks of an error in making or stepping an optimizer: none waits there, so their next call raises."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ..errors import ZeroError
from ..ranks.failing import STEP, is_known, mark_known
from ..ranks.failure_broadcast import fail_later
from ..ranks.group import Group
from ..replicated.parameters import averaged_over
from ..sharded.sharded_model import ShardedModel


def groups_of(sharded_models: Iterable[ShardedModel], params: Iterable[object] = ()) -> list[Group]:
    """All ranks that train ``sharded_models``, and those that average plain ``params``; no group twice, and in
    one order on all ranks."""
    found = [p.group.everyone for p in sorted(sharded_models, key=lambda p: p.identity.made)]
    found += [group.everyone for group in averaged_over(params)]
    return list({id(group.pg): group for group in found if not (group.one_rank or group.destroyed)}.values())


Returned = TypeVar("Returned")


class Telling:
    """What an optimizer tells other ranks of its errors."""

    _known: BaseException | None = None

    def _peers(self) -> list[Group]:
        """Groups of the ranks that are told."""
        raise NotImplementedError

    def tell(self, error: BaseException, what: str) -> None:
        """Let peers know that this rank could not do ``what``, unless they do.

        Args:
            what: see :class:`~zero_compiler.ranks.failing.Failure`.
        """
        known, self._known = self._known, None
        if error is known or is_known(error) or (isinstance(error, ZeroError) and error.failure is not None):
            return
        mark_known(error)
        for group in self._peers():
            fail_later(group, error, what)

    @contextlib.contextmanager
    def _known_to_peers(self) -> Iterator[None]:
        """What fails in here need not be told: the peers are in it too, or it is not ours."""
        try:
            yield
        except BaseException as error:
            self._known = error
            raise


def tells(step: Callable[..., Returned]) -> Callable[..., Returned]:
    """``step`` of a :class:`Telling` optimizer, with the hooks around it: what breaks it off on one rank is told."""

    @functools.wraps(step)
    def call(self: Telling, *args: object, **kw: object) -> Returned:
        try:
            return step(self, *args, **kw)
        except BaseException as error:
            self.tell(error, STEP)
            raise

    call.hooked = True  # type: ignore[attr-defined]  # torch would put a user's hooks outside
    return call
