"""Whether all ranks come to a call that a library lets one rank make alone.

Such a call cannot simply begin with a collective: where one rank makes it alone, the others are in a barrier of the
user's, say, and all would wait for the timeout of the process group. Ranks say through the store that they are here.
"""

from __future__ import annotations

import time

from ..errors import TransferError
from .failing import begun, noticed
from .group import Group, group_timeout_s, in_store, store_of
from .peer_connections import of
from .peer_waits import Wait

_LOOK_S = 0.02
TOGETHER_S = 300.0  # long enough for a rank that writes or uploads alone before it comes


def all_come(group: Group, what: str, within_s: float | None = None) -> bool:
    """Whether all ranks enter ``what``, each within ``within_s`` of the first (by default ``TOGETHER_S``, or the
    timeout of the process group where that is less). False on a
    rank that has waited for longer, or that a peer waits for in another call or in a collective of the user's: that
    rank then tells the others what has become of its call.

    Raises:
        TransferError: a rank is gone.
    """
    group = group.everyone
    if group.one_rank:
        return True
    within_s = min(TOGETHER_S, group_timeout_s(group)) if within_s is None else within_s
    of(group)  # ranks that wait for each other are connected
    store, call = store_of(group), f"came/{begun(group)}"
    names = [in_store(group, f"{call}/{rank}") for rank in range(group.world)]
    store.set(names[group.rank], "")
    for rank, name in enumerate(names):
        with Wait(group, rank, what, within_s) as wait:
            while not store.check([name]):
                if noticed(group) is not None:
                    return True  # the ranks that are left meet, and are told
                if (gone := wait.gone()) is not None:
                    raise TransferError(f"{what}: {group.name_of(group.rank)} waited in vain: {gone}")
                if wait.crossed() is not None or wait.left_s() < 0:
                    return False
                time.sleep(_LOOK_S)
    return True
