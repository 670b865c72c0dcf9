"""Why a rank could not make its part of a call, and how ranks that wait for what it was to say learn of it."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .. import errors
from ..errors import RankMismatchError, ZeroError
from .group import Group, in_store, store_of

E = TypeVar("E", bound=BaseException)
SOON_S = 3.0  # within which the store is to answer a rank that has an error already
COMPILE, BEGIN = "compile its part of this call", "begin its part of this call"
COMPLETE, BACKWARD = "complete its part of this call", "complete its backward"
STEP, MAKE = "complete a step of its zero.optimizer", "make its zero.optimizer"


@dataclass(frozen=True)
class Failure:
    """``who``: the rank that failed; ``kind``: the class of its error; ``reason``: what the error says; ``what``:
    what it could not do; ``broken``: titles of the models that no rank can call any more."""

    who: str
    kind: str
    reason: str
    what: str = COMPILE
    broken: Sequence[str] = ()

    @staticmethod
    def of(error: BaseException, who: str, what: str = COMPILE, broken: Sequence[str] = ()) -> Failure:
        """That of an error on rank ``who``: its own, or what another rank has told it."""
        told = getattr(error, "failure", None)
        if isinstance(told, Failure):
            return told
        text = str(error)
        # Others add what stands in their stack; ours are one sentence.
        reason = text if isinstance(error, ZeroError) else next(iter(text.strip().splitlines()), "")
        return Failure(who, type(error).__name__, reason, what, broken)

    def text(self) -> str:
        return json.dumps([self.who, self.kind, self.reason, self.what, self.broken])

    @staticmethod
    def read(text: str) -> Failure:
        return Failure(*json.loads(text))

    def error(self) -> ZeroError:
        """What a rank raises that was told: of the same kind, where that is one of ours."""
        kind = getattr(errors, self.kind, None)
        begin = f"{self.who} could not {self.what}"
        if isinstance(kind, type) and issubclass(kind, ZeroError):
            error = kind(f"{begin}: {self.reason}")
        else:
            found = f"{self.kind}: {self.reason}" if self.reason else self.kind
            error = RankMismatchError(f"{begin}: {found}; its own traceback says where")
        error.failure = self
        return error


def mark_known(error: E) -> E:
    """The same error, of which no rank need be told any more: all raise it, or the others know."""
    with contextlib.suppress(AttributeError):
        error._zero_known = True  # type: ignore[attr-defined]
    return error


def is_known(error: BaseException) -> bool:
    return bool(getattr(error, "_zero_known", False))


# Notices -------------------------------------------------------------------------------------------------------

# Calls over each process group that ended because a rank could not make its part. All ranks of a call count it, each
# once: so what one says of a failure is not found by a later attempt. Models over one group count together, since a
# rank may wait in the call of one while another fails in that of the next.
_ended: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def notice(group: Group) -> str:
    """Where ranks of the group look whether another one has failed while they wait for what it was to say."""
    everyone = group.everyone
    return in_store(everyone, f"failed/{ended_calls(group)}")


def ended_calls(group: Group) -> int:
    """How many calls have ended on all ranks of the group because one could not make its part."""
    return _ended.get(group.everyone.pg, 0)


def warn_others(group: Group, failure: Failure) -> None:
    """Let ranks that wait for a text of this rank know that none will come."""
    if not group.one_rank:
        store_of(group, SOON_S).set(notice(group), failure.text())


def noticed(group: Group) -> ZeroError | None:
    """The error that another rank, still there or gone, has posted (:func:`warn_others`); None: none has."""
    group = group.everyone
    with contextlib.suppress(RuntimeError):  # the store is gone as well
        store, name = store_of(group, SOON_S), notice(group)
        if store.check([name]):
            failure = Failure.read(store.get(name).decode())
            return failure.error() if failure.who != group.name_of(group.rank) else None
    return None


def ended(group: Group) -> None:
    """A call has ended on all ranks because one could not make its part: none looks for its notice any more."""
    with contextlib.suppress(RuntimeError):  # the store is gone, or keeps what it has
        store_of(group, SOON_S).delete_key(notice(group))
    passed(group)


_begun: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()


def begun(group: Group) -> str:
    """Names the next call that ranks begin together: its number since the last failure, which some may have had
    before they counted it."""
    pg = group.everyone.pg
    failures, count = _begun.get(pg, (0, 0))
    if failures != _ended.get(pg, 0):
        failures, count = _ended[pg], 0
    _begun[pg] = failures, count + 1
    return f"{failures}/{count}"


def passed(group: Group) -> None:
    """The same on a rank whose peers may still look for its notice."""
    pg = group.everyone.pg
    _ended[pg] = _ended.get(pg, 0) + 1
