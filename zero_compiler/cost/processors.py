"""What a core of a known kind of processor does in matrix products, for machines that nobody has calibrated.

Which of the CPU's libraries computes a product faster is a property of the processor, by up to a factor of two. A
processor says which kind it is; nothing is measured here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """A kind of processor.

    Args:
        name: of the kind.
        vendor, family, flag: by which Linux tells it (/proc/cpuinfo): "vendor_id", "cpu family", and one of "flags".
        measured: when, as an ISO date: medians of calibrations with one thread a rank and all cores busy, rounded.
        matmul_flops_per_us, onednn_flops_per_us, matmul_traffic, memory_bytes_per_us, kernel_us: as in
            :class:`~zero_compiler.cost.hardware.HardwareSpec`: all that the choice between libraries follows from.
    """

    name: str
    vendor: str
    family: int
    flag: str
    measured: str
    matmul_flops_per_us: Mapping[str, float]
    onednn_flops_per_us: Mapping[str, float]
    matmul_traffic: float
    memory_bytes_per_us: float
    kernel_us: float

    def rates(self) -> dict[str, object]:
        """Fields of a hardware description."""
        return {
            "matmul_flops_per_us": dict(self.matmul_flops_per_us),
            "onednn_flops_per_us": dict(self.onednn_flops_per_us),
            "matmul_traffic": self.matmul_traffic,
            "memory_bytes_per_us": self.memory_bytes_per_us,
            "kernel_us": self.kernel_us,
        }


# torch's BLAS is MKL in all of them. It does not use the wider half of an AMD processor's vectors.
PROCESSORS = (
    Processor(
        name="AMD Zen 5",
        vendor="AuthenticAMD",
        family=26,
        flag="avx512f",
        measured="2026-11-24",
        matmul_flops_per_us={
            "float32": 112_000.0,
            "bfloat16": 470_000.0,
            "float16": 5_900.0,
            "float64": 55_000.0,
        },
        onednn_flops_per_us={"float32": 229_000.0},
        matmul_traffic=0.0,  # not measured then: it is in the rates
        memory_bytes_per_us=23_000.0,
        kernel_us=1.9,
    ),
    Processor(
        name="AMD Zen 4",
        vendor="AuthenticAMD",
        family=25,
        flag="avx512f",  # Zen 3 is of the same family
        measured="2026-11-27",
        matmul_flops_per_us={
            "float32": 93_000.0,
            "bfloat16": 200_000.0,
            "float16": 2_400.0,
            "float64": 46_000.0,
        },
        onednn_flops_per_us={"float32": 106_000.0},
        matmul_traffic=2.0,
        memory_bytes_per_us=21_000.0,
        kernel_us=2.8,
    ),
    Processor(
        name="Intel Xeon with AMX",
        vendor="GenuineIntel",
        family=6,
        flag="amx_bf16",
        measured="2026-11-25",
        matmul_flops_per_us={
            "float32": 217_000.0,
            "bfloat16": 1_400_000.0,
            "float16": 210_000.0,
            "float64": 106_000.0,
        },
        onednn_flops_per_us={"float32": 184_000.0},
        matmul_traffic=2.2,
        memory_bytes_per_us=13_600.0,
        kernel_us=2.0,
    ),
)


def named(name: str) -> Processor | None:
    """The kind of that name; None where none is known by it."""
    return next((kind for kind in PROCESSORS if kind.name == name), None)


@functools.cache
def here() -> str:
    """The name of the kind of this machine's processor; "" where it is none of these, or where torch has other
    libraries than these were measured with."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return ""
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return ""
    kind = kind_in(text)
    return "" if kind is None else kind.name


def kind_in(cpuinfo: str) -> Processor | None:
    """The kind of the first processor in such a text; None where it is not known."""
    rows = (line.split(":", 1) for line in cpuinfo.split("\n\n", 1)[0].splitlines() if ":" in line)
    said = {key.strip(): value.strip() for key, value in rows}
    flags = said.get("flags", "").split()
    for kind in PROCESSORS:
        same = (said.get("vendor_id"), said.get("cpu family")) == (kind.vendor, str(kind.family))
        if same and kind.flag in flags:
            return kind
    return None
