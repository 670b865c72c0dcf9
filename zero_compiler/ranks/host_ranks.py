"""The ranks of one host among those over which a model is partitioned: they share its second shards."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import ShardError, TransferError
from .group import DESTROYED, Group, group_timeout_s, link_to
from .mesh import group_over
from .peer_waits import answered
from .transport import Segment, Transport, segment_within


@dataclass(frozen=True)
class HostRanks:
    """How the ranks of a host gather from each other.

    Args:
        ranks: how many they are.
        place: of this rank among them.
        segment: memory that they share; None: they talk over a process group.
        link: :func:`link_to` that process group; None, without a segment: nothing runs.
    """

    ranks: int
    place: int = 0
    segment: Segment | None = None
    link: weakref.ref[dist.ProcessGroup] | None = None

    def for_engine(self) -> tuple[dist.ProcessGroup | None, object]:
        """A process group, or what an engine takes of memory that the ranks share.

        Raises:
            TransferError: the process group has been destroyed.
        """
        if self.segment is not None:
            return None, (None, self.place, self.segment.for_engine())
        pg = None if self.link is None else self.link()
        if pg is None:
            raise TransferError(DESTROYED)
        return pg, None


def ranks_of_host(rows: Sequence[Sequence[int]], host_of: Mapping[int, int] | None) -> int:
    """How many ranks of a host share second shards; 0 where all that hold parts of a weight are on one host.

    Args:
        rows: the ranks that hold parts of the same weights, for each of the replicas.
        host_of: on which host each rank is; None: one of them cannot tell.

    Raises:
        ShardError: they do not lie on hosts so that second shards are all alike, or have any use.
    """
    if host_of is None:
        raise ShardError(
            'second_shard="host" needs to know on which host each rank is, and one of them cannot tell (it reads '
            "/proc); leave it out"
        )
    found = {_spread(row, host_of) for row in rows}
    if len(found) > 1:
        raise ShardError(
            'second_shard="host" needs every replica to lie on as many hosts as the others, and they lie on '
            f"{', '.join(str(hosts) for hosts, _ in sorted(found))}; leave it out"
        )
    ((hosts, ranks),) = found
    if hosts == 1:
        return 0
    if ranks == 1:
        raise ShardError(
            f'second_shard="host" would keep every weight whole, since each of {hosts} hosts has one rank; leave it '
            "out, or give stage=2, which keeps them"
        )
    return ranks


def _spread(row: Sequence[int], host_of: Mapping[int, int]) -> tuple[int, int]:
    """On how many hosts the ranks of a row are, and how many on each.

    Raises:
        ShardError: they are not equally many, one host after the other.
    """
    runs: list[list[int]] = []
    for rank in sorted(row):  # as a process group has them, whatever their order in the mesh
        if runs and host_of[runs[-1][0]] == host_of[rank]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if len(runs) > len({host_of[rank] for rank in row}) or len({len(run) for run in runs}) > 1:
        listed = "; ".join(", ".join(map(str, run)) for run in runs)
        raise ShardError(
            'second_shard="host" needs as many ranks on each host as on the others, with numbers that follow each '
            f"other, and hosts have ranks {listed}; leave it out"
        )
    return len(runs), len(runs[0])


def connect(group: Group, key: str, ranks: int, transport: Transport) -> HostRanks:
    """Let the ranks of this host gather from each other: in memory where the transport of the model shares it too.
    Collective over them.

    Args:
        key: names the model in the store.
        ranks: how many they are.
    """
    if group.link is None:
        return HostRanks(ranks)
    place, first = group.rank % ranks, group.rank - group.rank % ranks
    if transport.between > 1:
        return HostRanks(ranks, place, segment_within(group, key, list(range(first, first + ranks))))
    numbers = dist.get_process_group_ranks(group.pg)[first : first + ranks]
    with answered(group, "making of the process group of a host"):
        pg = group_over(numbers, group_timeout_s(group))
    return HostRanks(ranks, place, link=link_to(pg))
