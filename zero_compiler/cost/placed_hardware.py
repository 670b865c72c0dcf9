"""What collectives take where the ranks of a job lie on several hosts: each level of the network by its own link."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..ranks.group import Group
from ..ranks.mesh import SHARD
from .hardware import HOST_RANKS, HardwareSpec, HostLink, Link


@dataclass(frozen=True)
class Spread:
    """How the ranks of a collective lie on hosts.

    Args:
        ranks: how many take part.
        hosts: on how many hosts they lie, equally many on each.
        beside: ranks of the job on one host, these included. They do the same at the same time, in groups of their
            own, and share what the host is connected by.
    """

    ranks: int
    hosts: int
    beside: int

    @property
    def on_host(self) -> float:
        """Ranks of one host that take part."""
        return self.ranks / self.hosts


@dataclass(frozen=True)
class PlacedHardware(HardwareSpec):
    """A machine of several hosts, with the ranks of a job on them.

    Args:
        hosts: on how many hosts the job runs.
        ranks_per_host: how many ranks it has on a host, at most.
        spreads: of the ranks along each dimension of the mesh, by its role ("shard", "replicate", "tensor").
        once: the ranks of a host share memory, and every byte crosses to it once (transport "shared+c10d").
    """

    hosts: int = 1
    ranks_per_host: int = 1
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    once: bool = False

    def collective(self, kind: str, world: Any, shared: bool = False, over: str = SHARD) -> Link:
        """Link of a collective of ``world`` ranks; bytes are those of the full (gathered) tensor.

        Ranks of one host take what :class:`HardwareSpec` says. Between hosts a collective takes the time of the slower
        level for the bytes that it has to carry, and, for small messages, the latency of each step at its level:

        - A ring carries ``(ranks - 1) / ranks`` of the full bytes over each of its links, and so into each host and out
          of it. Of its ``ranks - 1`` steps ``hosts - 1`` go from host to host, as NCCL counts them too (an all-reduce:
          twice as many steps and bytes).
        - Where each rank sends to every other one itself, all messages are under way at once: each rank sends its part
          to as many ranks as lie on other hosts.
        - Where bytes cross to a host once, each rank sends its part to one rank of each other host; ranks of a host
          then copy, or add up, in memory.

        What a host is connected by is shared by the ranks that the job has on it.

        Raises:
            ConfigError: there is no such collective of ranks within one host.
        """
        if over == HOST_RANKS:
            return self._within_host(kind, world)
        spread = self._spread(world, over)
        if spread.hosts == 1 or shared or self.between_hosts is None:
            return super().collective(kind, world, shared)
        if self.once and over == SHARD:
            return self._once(kind, spread, self.between_hosts)
        latency_us, byte_us = self._steps(kind, spread, self.between_hosts)
        if spread.on_host > 1:
            inside = super().collective(kind, world)
            byte_us = max(byte_us, 1 / inside.bytes_per_us)
            if self.between_hosts.ring or kind == "all_reduce":
                latency_us += inside.latency_us * (spread.ranks - spread.hosts) / (spread.ranks - 1)
            else:
                latency_us = max(latency_us, inside.latency_us)
        return Link(latency_us, 1 / byte_us)

    def _within_host(self, kind: str, world: int) -> Link:
        """Ranks that share memory lay down their parts there, and each copies all of them from there."""
        inside = super().collective(kind, world)
        if not self.once or world == 1:
            return inside
        return Link(inside.latency_us, self.memory_bytes_per_us / (2 + 2 / world))

    def covers(self, transport: str) -> bool:
        alone = all(s.hosts == s.ranks for s in self.spreads.values())
        return super().covers(transport) or (transport == "c10d" and alone and self.between_hosts is not None)

    def _spread(self, world: int, over: str) -> Spread:
        """Of ranks along a dimension of the mesh; of other ones, as if they had numbers that follow each other."""
        known = self.spreads.get(over)
        if known is not None and known.ranks == world:
            return known
        return Spread(world, -(-world // self.ranks_per_host), self.ranks_per_host)

    def _steps(self, kind: str, spread: Spread, hosts: HostLink) -> tuple[float, float]:
        """Between hosts alone: the latency, and the time of a byte of the full tensor."""
        rounds = 2 if kind == "all_reduce" else 1
        if hosts.ring or kind == "all_reduce":
            rate = spread.on_host * _share(spread, hosts)
            return rounds * (spread.hosts - 1) * hosts.latency_us, rounds * (1 - 1 / spread.ranks) / rate
        return hosts.latency_us, (1 - 1 / spread.hosts) / _share(spread, hosts)

    def reduce_scatter_us(self, world: int, nbytes: int, sent_bytes: int) -> float:
        """Time of a reduce-scatter of ``nbytes``, of which ``sent_bytes`` are what goes from host to host, of all
        ranks."""
        spread = self._spread(world, SHARD)
        if not self.once or self.between_hosts is None or spread.hosts == 1:
            return self.collective("reduce_scatter", world).us(nbytes)
        across_us, passes = self._levels("reduce_scatter", spread, self.between_hosts)
        in_memory = passes / self.memory_bytes_per_us
        return self.between_hosts.latency_us + across_us * sent_bytes + in_memory * nbytes

    def _once(self, kind: str, spread: Spread, hosts: HostLink) -> Link:
        """Each place on a host has a group of its own, of one rank a host. What they do in memory comes before or
        after what crosses, and not beside it (csrc/src/hosts_transport.cc)."""
        across_us, passes = self._levels(kind, spread, hosts)
        steps = 2 * (spread.hosts - 1) if kind == "all_reduce" else 1
        return Link(steps * hosts.latency_us, 1 / (across_us + passes / self.memory_bytes_per_us))

    def _levels(self, kind: str, spread: Spread, hosts: HostLink) -> tuple[float, float]:
        """Of a byte of the full tensor, the time that it takes between hosts, and how often memory moves it."""
        on_host = spread.on_host
        across, part, passes = {
            # A rank receives the parts of its place, and copies the whole.
            "all_gather": (spread.hosts - 1, 1 / spread.ranks, 2.0),
            # It lays down the whole, and adds up what the host's ranks have for its place.
            "reduce_scatter": (spread.hosts - 1, 1 / spread.ranks, 3 + 1 / on_host),
            # The same with the whole for its place, which is reduced across in a ring and copied back.
            "all_reduce": (2 * (spread.hosts - 1), 1 / spread.hosts, 5 + on_host),
        }[kind]
        return across * part / _share(spread, hosts), passes


def _share(spread: Spread, hosts: HostLink) -> float:
    """Bytes a microsecond of one device while all of its host send."""
    return min(hosts.bytes_per_us, hosts.host_bytes_per_us / spread.beside)


def placed(
    spec: HardwareSpec, group: Group, host_of: Mapping[int, int] | None, once: bool = False
) -> HardwareSpec:
    """``spec`` with the ranks of ``group`` on hosts; as it is where it says nothing of what is between hosts.

    Args:
        host_of: on which host each rank of the job is. None: those are only planned for, and ranks fill one host after
            the other, in the order of their numbers.
        once: see :class:`PlacedHardware`.
    """
    if spec.between_hosts is None or spec.devices_per_host is None:
        return spec
    rows = mesh_rows(group, host_of is None)
    ranks = {rank for row in rows[SHARD] for rank in row}
    if len(ranks) == 1:
        return spec
    if host_of is None:
        host_of = {rank: rank // spec.devices_per_host for rank in ranks}
    counts = Counter(host_of[rank] for rank in ranks)
    beside = max(counts.values())
    # Rows that are alike but lie on more or fewer hosts wait for the one that has the longest way.
    spreads = {
        role: Spread(len(some[0]), max(len({host_of[rank] for rank in row}) for row in some), beside)
        for role, some in rows.items()
    }
    plain = {f.name: getattr(spec, f.name) for f in fields(HardwareSpec)}
    return PlacedHardware(**plain, hosts=len(counts), ranks_per_host=beside, spreads=spreads, once=once)


def over_c10d(spec: HardwareSpec) -> HardwareSpec:
    """The same where ranks share no memory."""
    return dataclasses.replace(spec, once=False) if isinstance(spec, PlacedHardware) else spec


def mesh_rows(group: Group, planned: bool) -> dict[str, list[list[int]]]:
    """Along each dimension of the mesh, by its role, the ranks of every collective.

    Args:
        planned: nothing runs. Ranks are numbered in the order of the mesh then, whose tensor is out of reach of the
            fake tensors of a plan.
    """
    if planned:
        columns = group.mesh.shape[-1]
        numbers = [list(range(at, at + columns)) for at in range(0, math.prod(group.mesh.shape), columns)]
        mesh = numbers if len(group.roles) > 1 else numbers[0]
    else:
        with torch._C.DisableTorchFunction():  # of a construction, say, which looks at every use of a tensor
            mesh = group.mesh.mesh.tolist()
    return {role: _along(mesh, dim) for dim, role in enumerate(group.roles)}


def _along(mesh: Sequence[Any], dim: int) -> list[list[int]]:
    """Rows of numbers along one of the dimensions of a mesh of one or two."""
    if not isinstance(mesh[0], list):
        return [list(mesh)]
    return [list(row) for row in (mesh if dim == 1 else zip(*mesh, strict=True))]
