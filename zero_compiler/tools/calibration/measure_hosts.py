"""Calibration by the ranks of a job on one host or several: each level of links that there is, and one result for all.

Rank 0 measures its host as it would alone, while the others wait. Then all ranks measure what is between hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...cost.hardware import HardwareSpec, HostLink
from ...errors import ConfigError, TransferError
from ...ranks.mesh import make_group
from ...ranks.transport import rank_hosts
from .measure_links import SIZES, fit
from .measuring import lower_quartile

# Time for one size, by which the number of runs is chosen, alike on all ranks; most runs of a small size, whose time a
# rank that waits for a core makes many times longer, and least of a large one; and what one exchange may take.
_SIZE_S, _MOST, _LEAST, _LONGEST_S = 1.5, 1500, 4, 2.0
_GROUP_S = 600  # the others wait for so long while rank 0 measures its host, or is gone


@dataclasses.dataclass(frozen=True)
class JobRanks:
    """The ranks that were started together, and where they are.

    Args:
        hosts: ranks by host, in the order of hosts; as many on each.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @property
    def place(self) -> int:
        """Of this rank, among those of its host."""
        return self._here.index(self.rank)

    @property
    def host(self) -> int:
        return self.hosts.index(self._here)

    @property
    def _here(self) -> tuple[int, ...]:
        return next(ranks for ranks in self.hosts if self.rank in ranks)


def started_together() -> bool:
    """Whether this process is one of several that torchrun, or another launcher that sets its variables, has
    started."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1


@contextlib.contextmanager
def job() -> Iterator[JobRanks]:
    """The process group of the job, for the time of a calibration.

    Raises:
        ConfigError: hosts have different numbers of ranks, or ranks are not numbered host by host, or a rank cannot
            tell on which host it runs.
        TransferError: a rank cannot be reached, or is gone.
    """
    # "gloo" serves objects and CPU ranks; by default there is what serves accelerators beside it.
    backend, timeout = None if _accelerated() else "gloo", datetime.timedelta(seconds=_GROUP_S)
    with _all_there():
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield JobRanks(dist.get_rank(), _by_host(rank_hosts(make_group(None, "cpu"), "calibrate")))
        with _all_there():
            _of_all(None)  # no rank goes while another waits for what it sends
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _all_there() -> Iterator[None]:
    """Around what takes all ranks."""
    try:
        yield
    except (RuntimeError, dist.DistStoreError) as error:
        who, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
        raise TransferError(f"calibration: rank {who} of {world} lost another one: {error}") from error


def together(of: JobRanks, alone: Callable[[], HardwareSpec], say: Callable[[str], None]) -> HardwareSpec:
    """What the job measures, equal on all ranks.

    Args:
        alone: measures one host; called on rank 0 alone.
        say: called with a line before each measurement, on every rank.

    Raises:
        TransferError: a rank is gone.
    """
    found: list[Any] = [alone() if of.rank == 0 else None]
    with _all_there():
        dist.broadcast_object_list(found)
        spec: HardwareSpec = found[0]
        if len(of.hosts) == 1:
            return spec
        link = between_hosts(of, say)
    each, count = len(of.hosts[0]), len(of.hosts)
    source = f"{spec.source}; between {count} hosts with {_counted(each)} each: measured"
    return dataclasses.replace(spec, source=source, devices_per_host=each, between_hosts=link)


def between_hosts(of: JobRanks, say: Callable[[str], None]) -> HostLink:
    """What a rank sends to the next host while it receives as much from the one before: alone, and with all ranks of
    its host. Collective over the job; equal on all ranks."""
    device = _device(of)
    say(f"between {len(of.hosts)} hosts: one rank of each")
    times: dict[int, float] = {}
    for size in SIZES:
        last = max(times, default=size)
        if len(times) < 3 or times[last] * size / last < _LONGEST_S * 1e6:
            times[size] = _exchange_us(of, size, device, of.place == 0)
    lone = fit(list(times), list(times.values()))
    each, rate = len(of.hosts[0]), lone.bytes_per_us
    host = rate
    if each > 1:
        say(f"between {len(of.hosts)} hosts: all {each} ranks of each")
        short = [size for size, us in times.items() if each * us < _LONGEST_S * 1e6]
        small, large = short[-2:] if len(short) > 1 else SIZES[:2]
        less, more = (_exchange_us(of, size, device, True) for size in (small, large))
        host = max(rate, each * (large - small) / max(more - less, 1e-3))
    return HostLink(lone.latency_us, rate, host, ring=device.type != "cpu")


def _exchange_us(of: JobRanks, size: int, device: torch.device, taking_part: bool) -> float:
    """Time of one exchange of so many bytes, on the rank on which it took longest.

    Ranks are started together, and then one exchange follows the other: no rank can begin the next one before it has
    what the rank before it has sent. So many in a row tell the time of one, wherever a single one begins.
    """
    given, got = (torch.ones(size // 4, device=device) for _ in range(2))
    to, back = ((of.hosts[(of.host + step) % len(of.hosts)][of.place]) for step in (1, -1))

    def once() -> None:
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, back), dist.P2POp(dist.isend, given, to)])
        for work in works:
            work.wait()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    def rounds(count: int, each: int) -> list[float]:
        made = []
        for _ in range(count):
            begun = time.perf_counter()
            for _ in range(each if taking_part else 0):
                once()
            made.append((time.perf_counter() - begun) / each * 1e6)
        return made

    rounds(1, 1)  # connections are made
    _of_all(None)
    first = max(_of_all(rounds(1, 1)[0]))
    runs = int(min(_MOST, max(_LEAST, _SIZE_S * 1e6 / max(first, 1.0))))
    _of_all(None)
    times = rounds(max(1, runs // 3), 3)
    return float(max(_of_all(lower_quartile(times) if len(times) > 1 else times[0])))


def _by_host(host_of: Mapping[int, int] | None) -> tuple[tuple[int, ...], ...]:
    """Ranks by host, given the host of each."""
    if host_of is None:
        raise ConfigError(
            "calibration with several ranks: a rank cannot tell on which host it runs (it reads /proc)"
        )
    found: dict[int, list[int]] = {}
    for rank in sorted(host_of):
        found.setdefault(host_of[rank], []).append(rank)
    each = len(host_of) // len(found)
    for ranks in found.values():
        if ranks != list(range(ranks[0], ranks[0] + each)):
            listed = "; ".join(", ".join(map(str, some)) for some in found.values())
            raise ConfigError(
                f"calibration of {len(found)} hosts needs as many ranks on each, with numbers that follow each other, "
                f"and they have ranks {listed}"
            )
    return tuple(tuple(ranks) for ranks in found.values())


def _of_all(mine: object) -> list[Any]:
    """What each rank gives, in the order of ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _accelerated() -> bool:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    here = torch.accelerator.current_accelerator(check_available=True)
    return here is not None and torch.accelerator.device_count() >= local


def _device(of: JobRanks) -> torch.device:
    if not _accelerated():
        return torch.device("cpu")
    torch.accelerator.set_device_index(of.place)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, of.place)


def _counted(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks"
