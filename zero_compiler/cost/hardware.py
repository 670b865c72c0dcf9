"""What a machine can do: the numbers that plans are made from.

A spec is data: measured once by ``zero-compiler calibrate`` or one of the presets. Compilation only reads it,
so the same spec gives the same plan on every rank and in every run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]

from ..errors import ConfigError
from ..ir.transfers import LANES
from ..json_fields import as_list, check_fields, read_json, shown
from . import processors

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
TRANSPORTS = ("c10d", "shared")
# Of a device's bytes, one part in so many is left free where its description does not say how many: 5.4 GB of 85.9 GB.
# A CUDA context takes about 0.5 GB, buffers of NCCL 0.3 to 2 GB, and an allocator of blocks leaves some 3% unused.
RESERVE_PARTS = 16
HOST_RANKS = "host"  # what a collective is over that has the ranks of one host alone
_UNCALIBRATED = "laptop"  # the preset
_BASE_DTYPE = "float32"  # whose rate stands for those of dtypes that were not measured


def _check_number(name: str, value: Any, least: int | None = None, finite: bool = False) -> None:
    """At ``least`` so much, and finite; None: above 0. What is infinitely fast is no mistake, unless it is told to be
    ``finite``; what is not a number is one; an expression of sizes that are not known yet is let pass."""
    if isinstance(value, sympy.Expr):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if not number or not (value > 0 if least is None else value >= least):
        wanted = "> 0" if least is None else f">= {least}"
        raise ConfigError(f"hardware spec: {name} must be a number {wanted}, not {shown(value)}")
    largest = sys.float_info.max if finite or least is not None or isinstance(value, int) else math.inf
    if value > largest:
        raise ConfigError(f"hardware spec: {name} must be a finite number, not {shown(value)}")


def _check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"hardware spec: {name} must be one of {', '.join(known)}, not {shown(value)}")


def _check_rates(name: str, rates: object) -> None:
    if not isinstance(rates, dict) or _BASE_DTYPE not in rates:
        raise ConfigError(
            f"hardware spec: {name} must give a rate for {_BASE_DTYPE!r}, and may for other dtypes, not {shown(rates)}"
        )
    for dtype, rate in rates.items():
        _check_number(f"{name}[{dtype!r}]", rate)


@dataclass(frozen=True)
class Link:
    """A transfer of ``n`` bytes takes ``latency_us + n / bytes_per_us``.

    Raises:
        ConfigError: a number that no link can have.
    """

    latency_us: float
    bytes_per_us: float

    def __post_init__(self) -> None:
        _check_number("latency_us of a link", self.latency_us, 0)
        _check_number("bytes_per_us of a link", self.bytes_per_us)

    def us(self, nbytes: Any) -> Any:
        return self.latency_us + nbytes / self.bytes_per_us


@dataclass(frozen=True)
class Collective:
    """One kind of collective (of ``KINDS``) over ``world`` ranks and one of ``TRANSPORTS``; bytes are those of the full
    (gathered) tensor.

    Raises:
        ConfigError: there is no such kind, transport or number of ranks.
    """

    kind: str
    transport: str
    world: int
    link: Link

    def __post_init__(self) -> None:
        _check_one_of("kind of a collective", self.kind, KINDS)
        _check_one_of("transport of a collective", self.transport, TRANSPORTS)
        _check_number("world of a collective", self.world, 2)


@dataclass(frozen=True)
class HostLink:
    """What the devices of a host reach those of other hosts over: the second level of a network, above the links
    within a host. All rates are of bytes that are sent while as many are received.

    Args:
        latency_us: of a message between devices of two hosts, from the call that sends it to the one that has it.
        bytes_per_us: of one device while no other one of its host sends.
        host_bytes_per_us: of all devices of one host together, over all adapters that the host has.
        ring: whether collectives pass bytes on from device to device, as NCCL's do, so that each crosses to a host
            once. Else each rank sends to every other one itself, as CPU ranks do over gloo, and bytes cross to a host
            once for each rank there. (What ranks share memory for inside a host crosses once in any case.)

    Raises:
        ConfigError: a number that no link can have.
    """

    latency_us: float
    bytes_per_us: float
    host_bytes_per_us: float
    ring: bool = True

    def __post_init__(self) -> None:
        _check_number("latency_us of a link between hosts", self.latency_us, 0)
        for name in ("bytes_per_us", "host_bytes_per_us"):
            _check_number(f"{name} of a link between hosts", getattr(self, name))
        if not isinstance(self.ring, bool):
            raise ConfigError(
                f"hardware spec: ring of a link between hosts must be true or false, not {shown(self.ring)}"
            )


@dataclass(frozen=True)
class PythonTime:
    """What Python, autograd and torch's guards take around a Program: ``call_us`` and ``param_us`` a parameter."""

    call_us: float = 0.0
    param_us: float = 0.0

    def us(self, params: int) -> float:
        return self.call_us + params * self.param_us


@dataclass(frozen=True)
class HardwareSpec:
    """One rank's share of a machine.

    Args:
        name: of the machine; ``source`` says where the numbers come from, ``date`` when (ISO).
        matmul_flops_per_us: by dtype name, at sizes that fill the machine, without what ``matmul_traffic`` adds.
        memory_bytes_per_us: streaming bandwidth of the device's memory, bytes read plus bytes written.
        vector_per_us, special_per_us: elements a microsecond through one vector instruction (sum, product), and
            through one function that takes many (exponential, error function, root), on data in cache, float32.
        vector_share, special_share: what share of these it is in other dtypes, by name; 1 where that was not measured.
        kernel_us: host and launch time of one kernel.
        memory_bytes, host_memory_bytes, nvme_bytes: of one rank: of the compute device, the host, and drives for
            ``nvme_dir``. None: not known, and a plan says so where it needs them.
        device_reserve_bytes: of ``memory_bytes``, what a plan leaves free for what it does not count: the context of
            the device, buffers of the collectives' library, workspaces and fragmentation; where the CPU computes,
            Python, libraries and holes in the heap. None: one part in 16 (`RESERVE_PARTS`).
        onednn_flops_per_us: on CPUs, by dtype name, the same through oneDNN where torch would take its BLAS; empty
            where that was not measured.
        matmul_traffic: of the time that a matrix product's operands and result take at ``memory_bytes_per_us``, how
            many times it comes on top of arithmetic. 0: it is hidden behind it (roofline), as on devices that load
            while they compute, and in files of versions that did not measure it. Libraries for CPUs first copy operands
            into the order in which they read them (Goto and van de Geijn, "Anatomy of high-performance matrix
            multiplication", 2008): each byte is read, written and read again, and it is 1 to 3.
        collectives: within one host: measured kinds, transports and world sizes; others are extrapolated.
        host_device, nvme_read, nvme_write: links of one rank.
        shared: groups of lanes that share a core or a disk and so do not overlap.
        checksum_bytes_per_us: bytes that the host sums up for ``nvme_checksums``. Calibrated; where it was not, what
            was seen in training steps on one core of a server with AVX-512 that others used too (8 to 12 GB/s).
        forward_python, backward_python: time of the host around a forward by its parameters, and around a backward by
            their gradients; 0 in files of versions that did not measure it.
        devices_per_host: how many ranks a plan puts on one host. None, as in files of versions that knew of one level
            only: any number of ranks is taken to be on one host.
        between_hosts: what hosts are connected by. None: not known, and collectives take the time that they would take
            within one host. See `placed_hardware.py`.

    Raises:
        ConfigError: a number that no machine can have.
    """

    name: str
    source: str
    date: str
    matmul_flops_per_us: dict[str, float]
    memory_bytes_per_us: float
    vector_per_us: float
    special_per_us: float
    kernel_us: float
    memory_bytes: int | None
    host_memory_bytes: int | None
    collectives: tuple[Collective, ...]
    host_device: Link
    nvme_read: Link
    nvme_write: Link
    shared: tuple[tuple[str, ...], ...] = field(default_factory=tuple)
    onednn_flops_per_us: dict[str, float] = field(default_factory=dict)
    vector_share: dict[str, float] = field(default_factory=dict)
    special_share: dict[str, float] = field(default_factory=dict)
    matmul_traffic: float = 0.0
    checksum_bytes_per_us: float = 10000.0
    forward_python: PythonTime = PythonTime()
    backward_python: PythonTime = PythonTime()
    nvme_bytes: int | None = None
    device_reserve_bytes: int | None = None
    devices_per_host: int | None = None
    between_hosts: HostLink | None = None

    def __post_init__(self) -> None:
        _check_rates("matmul_flops_per_us", self.matmul_flops_per_us)
        for python in ("forward_python", "backward_python"):
            for name in ("call_us", "param_us"):
                _check_number(f"{name} of {python}", getattr(getattr(self, python), name), 0)
        for name in ("onednn_flops_per_us", "vector_share", "special_share"):
            if getattr(self, name) != {}:
                _check_rates(name, getattr(self, name))
        for name in (
            "memory_bytes_per_us",
            "vector_per_us",
            "special_per_us",
            "checksum_bytes_per_us",
        ):
            _check_number(name, getattr(self, name))
        for name in ("memory_bytes", "host_memory_bytes", "nvme_bytes", "device_reserve_bytes"):
            if getattr(self, name) is not None:
                _check_number(
                    name, getattr(self, name), 0 if name == "device_reserve_bytes" else None, finite=True
                )
        for name in ("name", "source", "date"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"hardware spec: {name} must be a text, not {shown(getattr(self, name))}")
        for name in ("kernel_us", "matmul_traffic"):
            _check_number(name, getattr(self, name), 0)
        for lane in (lane for group in self.shared for lane in group):
            _check_one_of("a lane in `shared`", lane, LANES)
        if self.devices_per_host is not None:
            _check_number("devices_per_host", self.devices_per_host, 1)
            if not isinstance(self.devices_per_host, int):
                raise ConfigError(
                    f"hardware spec: devices_per_host must be a whole number, not {shown(self.devices_per_host)}"
                )
        elif self.between_hosts is not None:
            raise ConfigError("hardware spec: between_hosts needs devices_per_host, which is missing")

    def collective(self, kind: str, world: Any, shared: bool = False, over: str = "shard") -> Link:
        """Link of a collective over the process group, or over memory that ranks share, with all ranks on one host.

        That of the nearest measured world size, its bandwidth scaled by the ring's share. ``world`` may be symbolic
        (sympy): then that of the largest, and the numbers of the link are expressions. ``over`` names the ranks (the
        role of a mesh dimension), which matters where they lie on several hosts (:class:`PlacedHardware`).

        A ring moves ``(world - 1) / world`` of the full bytes over each link, in ``world - 1`` steps (Patarasuk
        and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).

        Raises:
            ConfigError: the spec has no such collective.
        """
        if world == 1:
            return Link(0.0, float("inf"))
        symbolic = isinstance(world, sympy.Expr)
        transport = "shared" if shared else "c10d"
        rows = [c for c in self.collectives if c.kind == kind and c.transport == transport]
        if not rows:
            raise ConfigError(
                f"hardware spec {self.name!r} has no {kind} over {transport}, which {world} ranks need; "
                f"`zero-compiler calibrate --world {world}` measures it on this machine"
            )
        near = min(rows, key=lambda c: -c.world if symbolic else (abs(c.world - world), c.world))
        if near.world == world:
            return near.link
        share = ((near.world - 1) / near.world) / ((world - 1) / world)
        steps = (world - 1) / (near.world - 1)
        return Link(near.link.latency_us * steps, near.link.bytes_per_us * share)

    @property
    def reserve_bytes(self) -> int:
        """Of the compute device, what a plan leaves free; see ``device_reserve_bytes``. 0 where nothing is known."""
        if self.memory_bytes is None:
            return 0
        stated = self.device_reserve_bytes
        return int(self.memory_bytes) // RESERVE_PARTS if stated is None else int(stated)

    @property
    def plannable_bytes(self) -> int | None:
        """Bytes of the compute device that a plan may use; None where they are not known."""
        return None if self.memory_bytes is None else max(0, int(self.memory_bytes) - self.reserve_bytes)

    def covers(self, transport: str) -> bool:
        """Whether every kind of collective over this transport (of ``TRANSPORTS``) is known, at some world size."""
        return {c.kind for c in self.collectives if c.transport == transport} == set(KINDS)

    def links(self, tier: str) -> tuple[Link, Link]:
        """Links of one rank from a tier ("host" or "nvme"), and to it."""
        return (self.host_device, self.host_device) if tier == "host" else (self.nvme_read, self.nvme_write)

    def to_dict(self) -> dict[str, Any]:
        """The fields of a file."""
        names = {f.name for f in fields(HardwareSpec)}
        return {name: value for name, value in asdict(self).items() if name in names}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    def digest(self) -> str:
        """Eight hexadecimal digits that stand for all numbers in it: ranks must plan for the same machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    @staticmethod
    def from_dict(data: dict[str, Any]) -> HardwareSpec:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigError: a field is missing or unknown, or has a value that it cannot have.
        """
        _check_fields("it", HardwareSpec, data)
        data = dict(data)
        rows = []
        for at, row in enumerate(_list("collectives", data["collectives"])):
            what = f"collectives[{at}]"
            _check_fields(what, Collective, row)
            rows.append(_made(what, Collective, row | {"link": _made(f"link of {what}", Link, row["link"])}))
        data["collectives"] = tuple(rows)
        for name in ("host_device", "nvme_read", "nvme_write"):
            data[name] = _made(name, Link, data[name])
        for name in ("forward_python", "backward_python"):
            data[name] = _made(name, PythonTime, data.get(name, {}))
        if data.get("between_hosts") is not None:
            data["between_hosts"] = _made("between_hosts", HostLink, data["between_hosts"])
        shared = _list("shared", data.get("shared", ()))
        data["shared"] = tuple(tuple(_list("a group in `shared`", group)) for group in shared)
        return HardwareSpec(**data)


def _list(what: str, data: object) -> Sequence[Any]:
    return as_list("hardware spec", what, data)


def _check_fields(what: str, kind: type, data: object) -> None:
    """``data`` has the fields of the class ``kind``.

    Raises:
        ConfigError: it is no dictionary, or a field is missing or unknown.
    """
    known = {f.name: f for f in fields(kind)}
    needed = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    check_fields("hardware spec", what, data, known, needed)


def _made(what: str, kind: type, data: Any) -> object:
    """The object of the class ``kind`` that ``data`` describes, the field ``what`` of a spec."""
    _check_fields(what, kind, data)
    try:
        return kind(**data)
    except ConfigError as error:
        said = str(error).removeprefix("hardware spec: ")
        raise ConfigError(f"hardware spec: {what}: {said}") from None


def presets() -> list[str]:
    """Names of the machines that come with the package."""
    folder = resources.files("zero_compiler") / "presets"
    return sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))


def cache_path() -> Path:
    """Where ``zero-compiler calibrate`` keeps this machine's spec."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "zero_compiler" / "hardware.json"


def load(name: str | None = None, processor: str | None = None) -> HardwareSpec:
    """A preset, a file, or (None) this machine's calibration, else the preset ``laptop`` with what is known of the kind
    of its processor.

    Args:
        processor: that kind, by its name in `processors.py`, where ranks have agreed on one; None: this machine's.

    Raises:
        ConfigError: no such preset or file, or one that describes no machine.
    """
    if is_assumed(name):
        return uncalibrated(processors.here() if processor is None else processor)
    if name is None:
        return _read(cache_path(), "run `zero-compiler calibrate` again, or remove it")
    folder = resources.files("zero_compiler") / "presets"
    preset = folder / f"{name}.json"
    if preset.is_file():
        return _read(preset, "install zero_compiler again")
    if os.path.isfile(name):
        return _read(Path(name), f"`zero-compiler calibrate --output {name}` writes one for this machine")
    raise ConfigError(f"hardware {name!r} is neither a file nor a preset; presets: {', '.join(presets())}")


def is_assumed(name: str | None) -> bool:
    """Whether nobody has said what machine plans are made for: it was not named, and this one was not calibrated."""
    return name is None and not cache_path().is_file()


def uncalibrated(processor: str) -> HardwareSpec:
    """What stands for a machine that nobody has calibrated or named: two CPU cores, of this kind where it is known."""
    spec, kind = load(_UNCALIBRATED), processors.named(processor)
    if kind is None:
        return spec
    return replace(
        spec,
        name=f"{spec.name} with cores of {kind.name}",
        source=f"matrix products, memory and launches: {kind.name}, {kind.measured}; all else: {spec.source}",
        **kind.rates(),  # type: ignore[arg-type]
    )


def _read(path: Traversable, what_to_do: str) -> HardwareSpec:
    return read_json(path, HardwareSpec.from_dict, what_to_do)
