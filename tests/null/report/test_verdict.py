"""Whether a plan fits its hardware: by tier, in one line, and what is not known is not guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_compiler.cost.hardware import load
from zero_compiler.report.verdict import amount, verdict_of

H100 = load("dgx-h100")
GB = 10**9


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (286_300_000_000, "286.3 GB"),
        (3_840_000_000_000, "3.8 TB"),
    ],
)
def test_bytes_are_said_in_decimal_units(nbytes, text):
    assert amount(nbytes) == text


def test_a_plan_that_does_not_fit_says_what_it_needs_and_what_there_is():
    found = verdict_of(H100, {"device": 286_300_000_000})
    assert found.fits is False
    assert found.line() == (
        "does not fit dgx-h100: 286.3 GB of 85.9 GB on the device (5.4 GB of it reserved)"
    )


def test_the_reserve_is_a_part_that_a_plan_may_not_use():
    room = H100.memory_bytes - H100.reserve_bytes
    assert H100.plannable_bytes == room
    assert verdict_of(H100, {"device": room}).fits is True
    assert verdict_of(H100, {"device": room + 1}).fits is False


def test_tiers_beside_the_device_are_named_where_a_plan_uses_them_and_what_is_too_much_comes_first():
    found = verdict_of(H100, {"device": GB, "host": 10**12, "nvme": 5 * GB})
    assert found.line() == (
        "does not fit dgx-h100: 1.0 TB of 274.9 GB on the host, 1.0 GB of 85.9 GB on the device (5.4 GB of it "
        "reserved), 5.0 GB of 3.8 TB in files"
    )
    assert [use["tier"] for use in found.to_dict()["tiers"]] == ["device", "host", "nvme"]
    assert len(verdict_of(H100, {"device": GB, "host": 0}).tiers) == 1


def test_bytes_that_the_hardware_does_not_tell_are_not_guessed():
    spec = replace(H100, nvme_bytes=None)
    found = verdict_of(spec, {"device": GB, "nvme": GB})
    assert found.fits is None
    assert found.line().startswith("not known whether it fits dgx-h100: ")
    assert "1.0 GB in files (how much there is, is not known)" in found.line()
    # What is too much of another tier is known all the same.
    assert verdict_of(spec, {"device": 100 * GB, "nvme": GB}).fits is False
    assert verdict_of(spec, {"device": GB}).fits is True
    nothing = replace(H100, memory_bytes=None)
    assert (nothing.plannable_bytes, nothing.reserve_bytes) == (None, 0)
    assert verdict_of(nothing, {"device": GB}).fits is None


def test_what_only_rests_yet_may_be_too_much_and_is_never_said_to_fit():
    assert verdict_of(H100, {"device": GB}, planned=False).fits is None
    assert (
        verdict_of(H100, {"device": GB}, planned=False)
        .line()
        .startswith("not planned yet; at rest on dgx-h100")
    )
    assert verdict_of(H100, {"device": 100 * GB}, planned=False).fits is False


def test_the_preset_that_stands_for_a_machine_that_was_not_calibrated_is_said_to():
    assert (
        verdict_of(H100, {"device": GB}, assumed="this machine was not calibrated")
        .line()
        .startswith(
            "fits dgx-h100 (taken because no hardware was named and this machine was not calibrated): "
        )
    )
