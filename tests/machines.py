"""Hardware for tests: made so that the plan under test is the right one."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def machine(
    latency_us: float = 1.0, bytes_per_us: float = 10_000.0, share: bool = False, **fields: Any
) -> dict[str, Any]:
    """A spec, as JSON values, whose lanes overlap unless they ``share`` cores, with these links between ranks.

    Python takes no time around Programs: what tests look at is inside.
    """
    preset = resources.files("zero_compiler") / "presets" / "laptop.json"
    spec = json.loads(preset.read_text())
    for row in spec["collectives"]:
        row["link"] = {"latency_us": latency_us, "bytes_per_us": bytes_per_us}
    spec["shared"] = [["compute", "device-device"]] if share else []
    spec["forward_python"] = spec["backward_python"] = {}
    # One level of links, as of versions that knew no other.
    spec["devices_per_host"] = spec["between_hosts"] = None
    return spec | {"name": "test"} | fields
