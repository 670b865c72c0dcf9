"""Why a rank could not compile its part of a call, as the other ranks of the call are told."""

from __future__ import annotations

import json
from dataclasses import dataclass

from . import errors
from .errors import RankMismatchError, ZeroError


@dataclass(frozen=True)
class Failure:
    """``who``: the rank that failed; ``kind``: the class of its error; ``reason``: what the error says."""

    who: str
    kind: str
    reason: str

    @staticmethod
    def of(error: BaseException, who: str) -> Failure:
        """That of an error on rank ``who``: its own, or what another rank has told it."""
        told = getattr(error, "failure", None)
        if isinstance(told, Failure):
            return told
        text = str(error)
        # Others add what stands in their stack; ours are one sentence.
        reason = text if isinstance(error, ZeroError) else next(iter(text.strip().splitlines()), "")
        return Failure(who, type(error).__name__, reason)

    def text(self) -> str:
        return json.dumps([self.who, self.kind, self.reason])

    @staticmethod
    def read(text: str) -> Failure:
        return Failure(*json.loads(text))

    def error(self) -> ZeroError:
        """What a rank raises that was told: of the same kind, where that is one of ours."""
        kind = getattr(errors, self.kind, None)
        begin = f"{self.who} could not compile its part of this call"
        if isinstance(kind, type) and issubclass(kind, ZeroError):
            error = kind(f"{begin}: {self.reason}")
        else:
            error = RankMismatchError(f"{begin}: {self.kind}: {self.reason}; its own traceback says where")
        error.failure = self
        return error
