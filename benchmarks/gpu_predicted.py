"""Predicted beside measured, from the results that the stages of `gpu.py` have left in a folder.

python benchmarks/gpu_predicted.py RESULTS --json FILE
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common
from one_device import GIB

HEAD = [
    "stage",
    "what",
    "peak, GiB",
    "planned",
    "measured / planned",
    "step, ms",
    "planned",
    "measured / planned",
]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = [row for name in "abcde" for row in rows_of(name, args.results / f"{name}.json")]
    result = {"machine": common.machine(), "rows": rows}
    shown = [row_text(row) for row in rows]
    text = common.heading("Predicted beside measured", result["machine"])
    text += common.table(
        "Peak on the device, and time of a step (planned: of forward and backward)", HEAD, shown
    )
    if args.json:
        common.save(args.json, result, text)
    print(text)


def rows_of(name: str, file: Path) -> list[dict[str, Any]]:
    """Those of a stage that have a measured peak and a planned one."""
    if not file.exists():
        return []
    told = json.loads(file.read_text())
    found = []
    for row in (r for key in ("times", "activations", "layer", "largest", "rows") for r in told.get(key, [])):
        peak = row.get("peak_bytes", row.get("peak"))
        planned = row.get("planned_bytes", row.get("planned"))
        if isinstance(planned, dict):
            planned = planned.get("peak")
        if peak and planned:
            what = row.get("model", row.get("way", "one layer"))
            found.append({"stage": name, "what": what, "peak": peak, "planned": planned} | times_of(row))
    return found


def times_of(row: dict[str, Any]) -> dict[str, float]:
    if "planned_ms" not in row:
        return {}
    measured = row.get("zero_ms") or row.get("ms") or [1e3 * s for s in row["s"]]
    return {"ms": common.spread(measured)["median"], "planned_ms": row["planned_ms"]}


def row_text(r: dict[str, Any]) -> list[str]:
    text = [
        r["stage"],
        r["what"],
        f"{r['peak'] / GIB:.2f}",
        f"{r['planned'] / GIB:.2f}",
        f"{r['peak'] / r['planned']:.3f}",
    ]
    if "ms" not in r:
        return [*text, "", "", ""]
    return [*text, f"{r['ms']:.1f}", f"{r['planned_ms']:.1f}", f"{r['ms'] / r['planned_ms']:.2f}"]


if __name__ == "__main__":
    main()
