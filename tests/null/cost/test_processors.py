"""What is known of kinds of processors, and what a machine plans with that nobody has calibrated."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest
import torch
from null.graphs import Build, aten, lower, names_of

from zero_compiler.cost import hardware, processors
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.cost.processors import PROCESSORS, kind_in

NAMES = [kind.name for kind in PROCESSORS]
ZEN5, ZEN4 = "AMD Zen 5", "AMD Zen 4"


def cpuinfo(vendor="AuthenticAMD", family=25, flags="fpu sse2 avx2 avx512f avx512_bf16"):
    one = (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\nflags\t\t: {flags}\n"
    )
    return f"{one}\n{one}"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({}, ZEN4),
        ({"family": 26}, ZEN5),
        ({"flags": "fpu avx2"}, None),  # Zen 3
        ({"family": 26, "flags": "fpu avx2"}, None),  # a hypervisor that hides AVX-512
        ({"family": 27}, None),
        ({"vendor": "GenuineIntel", "family": 6, "flags": "avx512f amx_bf16"}, "Intel Xeon with AMX"),
        ({"vendor": "GenuineIntel", "family": 6}, None),
    ],
)
def test_a_processor_says_which_kind_it_is(said, name):
    kind = kind_in(cpuinfo(**said))
    assert (kind and kind.name) == name


@pytest.mark.parametrize("text", ["", "\n\n", "processor : 0\nFeatures : fp asimd\n", "nothing of the kind"])
def test_what_says_nothing_is_of_no_known_kind(text):
    assert kind_in(text) is None


@pytest.fixture
def asks(monkeypatch, tmp_path):
    """Makes this machine say so of its processor; nothing was calibrated."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    processors.here.cache_clear()

    def says(text: str | None) -> None:
        file = tmp_path / "cpuinfo"
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(processors, "_CPUINFO", Path(file))

    yield says
    processors.here.cache_clear()


def test_a_machine_without_such_a_file_or_with_other_libraries_is_of_no_known_kind(asks, monkeypatch):
    asks(None)
    assert processors.here() == ""
    asks(cpuinfo())
    processors.here.cache_clear()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert processors.here() == ""
    assert hardware.load() == hardware.load("laptop")


@pytest.mark.parametrize("name", NAMES)
def test_a_known_kind_gives_the_preset_its_own_rates(name):
    kind, spec = processors.named(name), hardware.uncalibrated(name)
    assert datetime.date.fromisoformat(kind.measured) <= datetime.date.today()
    assert spec.name == f"laptop with cores of {name}"
    assert kind.measured in spec.source
    plain = hardware.load("laptop")
    assert spec.digest() != plain.digest()
    assert HardwareSpec.from_dict(spec.to_dict()) == spec
    same = {"name": plain.name, "source": plain.source}
    assert dataclasses.replace(spec, **same, **{n: getattr(plain, n) for n in kind.rates()}) == plain


def test_only_a_machine_that_nobody_named_or_calibrated_takes_them(asks, tmp_path):
    asks(cpuinfo(family=26))
    assert hardware.load() == hardware.uncalibrated(ZEN5) != hardware.load("laptop")
    assert hardware.load(processor="") == hardware.load("laptop")
    assert hardware.load(processor=ZEN4) == hardware.uncalibrated(ZEN4)
    assert not hardware.load("laptop").onednn_flops_per_us
    assert hardware.load("laptop", processor=ZEN5) == hardware.load("laptop")
    file = hardware.cache_path()
    file.parent.mkdir(parents=True)
    file.write_text(hardware.load("dgx-h100").to_json())
    assert hardware.load() == hardware.load("dgx-h100")


def test_large_products_go_to_onednn_where_it_is_known_to_be_faster():
    """Of 1024 rows by a square weight of 512, as in a small transformer."""

    def chosen(kind: str) -> list[str]:
        b = Build(w=(512, 512))
        b.done(b.op(aten.mm.default, b.input("x", 1024, 512), b.weight("w")))
        machine = hardware.uncalibrated(kind)
        return [
            n
            for n in names_of(lower(b, "forward", machine=machine, kernels=True))
            if "mm" in n or "onednn" in n
        ]

    assert chosen(ZEN5) == ["zero.onednn_linear"]
    assert chosen("Intel Xeon with AMX") == ["aten.mm"]
    assert chosen("") == ["aten.mm"]
