"""A frame that did not compile on this rank, and what its other ranks are to know of that.

They may wait for what this rank was to decide, or in the call itself, which they can make.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from ..errors import ZeroError
from ..ir import ops
from .call_handshake import fail
from .failing import Failure, warn_others
from .group import by_ranks


class Broken:
    """Warns ranks that wait for this one while they compile.

    Args:
        owners: keys of the sharded models of the frame.
        error: why it did not compile.
    """

    def __init__(self, owners: Collection[str], error: BaseException) -> None:
        self._owners = frozenset(owners)
        self._failure: Failure | None = None
        policies = self._policies()
        if policies:
            group = policies[0].group
            self._failure = Failure.of(error, group.everyone.name_of(group.everyone.rank))
            with contextlib.suppress(RuntimeError, ValueError):  # no store: nobody waits at it
                warn_others(group, self._failure)

    def _policies(self) -> list[Any]:
        return by_ranks(p for p in ops.owners() if p.key in self._owners)

    def end_call(self) -> None:
        """Let the call end on all ranks, as it does here. Where no rank could compile and none has before, what they
        have decided on the way is forgotten: it was for sizes or a budget that did not do."""
        policies = self._policies()
        if self._failure is None or not policies or policies[0].protocol.broken is not None:
            return
        new = not any(policy.frames for policy in policies)
        try:
            forgets = fail(policies[0].group, self._failure, new)
        except ZeroError:
            return  # a peer is gone: the reason that this rank has says more
        if forgets:
            for policy in policies:
                policy.agreed.forget()
                if policy.runtime is not None:
                    policy.runtime.kept_offsets.clear()
