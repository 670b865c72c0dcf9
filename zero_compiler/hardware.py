"""What a machine can do: the numbers that plans are made from.

A spec is data: measured once by ``zero-compiler calibrate`` or one of the presets. Compilation only reads it,
so the same spec gives the same plan on every rank and in every run.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import ConfigError

LANES = ("compute", "device-device", "host-device", "nvme-host")


@dataclass(frozen=True)
class Link:
    """A transfer of ``n`` bytes takes ``latency_us + n / bytes_per_us``."""

    latency_us: float
    bytes_per_us: float

    def us(self, nbytes: Any) -> Any:
        return self.latency_us + nbytes / self.bytes_per_us


@dataclass(frozen=True)
class Collective:
    """One kind of collective over ``world`` ranks; bytes are those of the full (gathered) tensor."""

    kind: str  # "all_gather" | "reduce_scatter" | "all_reduce"
    transport: str  # "c10d" | "shared"
    world: int
    link: Link


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
        matmul_flops_per_us: by dtype name, at sizes that fill the machine.
        memory_bytes_per_us: streaming bandwidth of the device's memory, bytes read plus bytes written.
        vector_per_us, special_per_us: elements a microsecond through one vector instruction (sum, product), and
            through one function that takes many (exponential, error function, root), on data in cache, float32.
        kernel_us: host and launch time of one kernel.
        memory_bytes, host_memory_bytes: of one rank.
        onednn_flops_per_us: on CPUs, by dtype name, the same through oneDNN where torch would take its BLAS; empty
            where that was not measured.
        collectives: measured kinds, transports and world sizes; others are extrapolated.
        host_device, nvme_read, nvme_write: links of one rank.
        shared: groups of lanes that share a core or a disk and so do not overlap.
        forward_python, backward_python: time of the host around a forward by its parameters, and around a backward by
            their gradients; 0 in files of versions that did not measure it.
    """

    name: str
    source: str
    date: str
    matmul_flops_per_us: dict[str, float]
    memory_bytes_per_us: float
    vector_per_us: float
    special_per_us: float
    kernel_us: float
    memory_bytes: int
    host_memory_bytes: int
    collectives: tuple[Collective, ...]
    host_device: Link
    nvme_read: Link
    nvme_write: Link
    shared: tuple[tuple[str, ...], ...] = field(default_factory=tuple)
    onednn_flops_per_us: dict[str, float] = field(default_factory=dict)
    forward_python: PythonTime = PythonTime()
    backward_python: PythonTime = PythonTime()

    def collective(self, kind: str, world: int, shared: bool = False) -> Link:
        """Link of a collective over the process group, or over memory that ranks share.

        That of the nearest measured world size, its bandwidth scaled by the ring's share.

        A ring moves ``(world - 1) / world`` of the full bytes over each link, in ``world - 1`` steps (Patarasuk
        and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).

        Raises:
            ConfigError: the spec has no such collective.
        """
        if world == 1:
            return Link(0.0, float("inf"))
        transport = "shared" if shared else "c10d"
        rows = [c for c in self.collectives if c.kind == kind and c.transport == transport]
        if not rows:
            raise ConfigError(
                f"hardware spec {self.name!r} has no {kind} over {transport}; calibrate this machine"
            )
        near = min(rows, key=lambda c: (abs(c.world - world), c.world))
        if near.world == world:
            return near.link
        share = ((near.world - 1) / near.world) / ((world - 1) / world)
        steps = (world - 1) / (near.world - 1)
        return Link(near.link.latency_us * steps, near.link.bytes_per_us * share)

    def links(self, tier: str) -> tuple[Link, Link]:
        """Links of one rank from a tier ("host" or "nvme"), and to it."""
        return (self.host_device, self.host_device) if tier == "host" else (self.nvme_read, self.nvme_write)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    def digest(self) -> str:
        """Eight hexadecimal digits that stand for all numbers in it: ranks must plan for the same machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    @staticmethod
    def from_dict(data: dict[str, Any]) -> HardwareSpec:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigError: a field is missing or unknown.
        """
        try:
            data = dict(data)
            data["collectives"] = tuple(
                Collective(c["kind"], c["transport"], c["world"], Link(**c["link"]))
                for c in data["collectives"]
            )
            for name in ("host_device", "nvme_read", "nvme_write"):
                data[name] = Link(**data[name])
            for name in ("forward_python", "backward_python"):
                data[name] = PythonTime(**data.get(name, {}))
            data["shared"] = tuple(tuple(group) for group in data.get("shared", ()))
            return HardwareSpec(**data)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"hardware spec: {error}; see `zero-compiler calibrate`") from None


def presets() -> list[str]:
    """Names of the machines that come with the package."""
    folder = resources.files("zero_compiler") / "presets"
    return sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))


def cache_path() -> Path:
    """Where ``zero-compiler calibrate`` keeps this machine's spec."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "zero_compiler" / "hardware.json"


def load(name: str | None = None) -> HardwareSpec:
    """A preset, a file, or (None) this machine's calibration, else the preset ``laptop``.

    Raises:
        ConfigError: no such preset or file.
    """
    if name is None:
        path = cache_path()
        if path.is_file():
            return HardwareSpec.from_dict(json.loads(path.read_text()))
        name = "laptop"
    folder = resources.files("zero_compiler") / "presets"
    preset = folder / f"{name}.json"
    if preset.is_file():
        return HardwareSpec.from_dict(json.loads(preset.read_text()))
    if os.path.isfile(name):
        return HardwareSpec.from_dict(json.loads(Path(name).read_text()))
    raise ConfigError(f"hardware {name!r} is neither a file nor a preset; presets: {', '.join(presets())}")
