"""Seconds until the other ranks of a job end when one of them goes, and the sentence with which they do.

    python benchmarks/peer_failure.py --json peer_failure.json

The rank that goes is killed (SIGKILL), stopped (SIGSTOP) or raises an exception that nobody catches, wherever
others may have to wait for it. Nobody ends the other ranks, which are processes of this machine over gloo, compute is
"aten". For a rank that is stopped the timeout of the process group counts, which is short here; else it is two
minutes, and no case comes near. At last a rank that takes longer than the timeout for its part of a plan, which is no
error. "without gloo" has headers go by a collective, as on a group of an accelerator's backend alone.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

SHORT_S = 6.0  # timeout of the group where a rank is stopped
PATIENCE_S = 45.0
# Ranks, which of them goes, and whether they may use gloo for headers.
# The first of these goes through all places, the others through some.
JOBS = ((2, 1, True), (3, 0, True), (3, 2, True), (2, 1, False))
SOME = (
    "before zero.shard",
    "in zero.shard",
    "in zero.init",
    "deciding a plan",
    "compiling",
    "making a zero.optimizer",
    "in zero.gathered(write=True)",
    "in zero.load_safetensors",
    "in a backward",
)


def main() -> None:
    from dist.leaving import HOWS, PLACES

    parser = common.parser(__doc__)
    parser.add_argument("--places", default="", help="only those whose name has this in it")
    parser.add_argument(
        "--jobs",
        type=lambda s: [int(k) for k in s.split(",")],
        default=list(range(1, len(JOBS) + 1)),
        help="of the kinds of jobs, by number",
    )
    parser.add_argument("--at-once", type=int, default=1, help="cases that run at the same time")
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    slow = measure((2, 0, True, "deciding a plan", "slow"))
    print(slow_line(slow), flush=True)
    results: list[dict[str, Any]] = []
    for job in args.jobs:
        world, gone, gloo = JOBS[job - 1]
        places = [p for p in PLACES if args.places in p and (job == 1 or p in SOME)]
        cases = [(world, gone, gloo, place, how) for place in places for how in HOWS]
        with ThreadPoolExecutor(args.at_once) as pool:
            rows = list(pool.map(measure, cases))
        results += rows
        common.print_table(*shown(rows))
        if args.json:
            common.save(args.json, {"machine": m, "rows": [*results, slow]}, markdown(m, results, slow))


def markdown(m: dict[str, Any], results: list[dict[str, Any]], slow: dict[str, Any]) -> str:
    text = common.heading("Ranks that go, and when the others end", m)
    for world, gone, gloo in JOBS:
        rows = [r for r in results if (r["world"], r["gone"], r["gloo"]) == (world, gone, gloo)]
        if rows:
            text += common.table(*shown(rows)) + "\n"
    return text + slow_line(slow) + "\n"


def shown(rows: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, head and rows of the table of one kind of job."""
    from dist.leaving import HOWS

    of = {(row["place"], row["how"]): row for row in rows}
    title = f"{rows[0]['world']} ranks, of which rank {rows[0]['gone']} goes"
    head = ["place", *(f"{how} s" for how in HOWS), "the others say, where it was killed", "where it raised"]
    cells = [
        [
            place,
            *(seconds(of[place, how]) for how in HOWS),
            said(of[place, "killed"]),
            said(of[place, "raising"]),
        ]
        for place in dict.fromkeys(row["place"] for row in rows)
    ]
    return title + ("" if rows[0]["gloo"] else ", without gloo"), head, cells


def slow_line(slow: dict[str, Any]) -> str:
    others = [kind for _, kind, _ in slow["ranks"]]
    return (
        f"Rank 0 takes {2 * SHORT_S:.0f} s for its part of a plan, and the timeout is {SHORT_S:.0f} s: all ranks "
        f"{' and '.join(dict.fromkeys(others))}."
    )


def measure(case: tuple[int, int, bool, str, str]) -> dict[str, Any]:
    from dist.leaving import LONG_S, leave

    world, gone, gloo, place, how = case
    timeout_s = SHORT_S if how in ("stopped", "slow") else LONG_S
    ends = leave(place, how, world, gone, timeout_s, gloo, patience_s=PATIENCE_S, slow_s=2 * SHORT_S)
    return {
        **dict(zip(("world", "gone", "gloo", "place", "how"), case, strict=True)),
        "group_timeout_s": timeout_s,
        "ranks": list(ends.values()),
    }


def seconds(row: dict[str, Any]) -> str:
    """Of the last of the others; of one that did not end, that it waits."""
    last = max(at for at, _, _ in row["ranks"])
    return "waits" if any(kind == "" for _, kind, _ in row["ranks"]) else f"{last:.1f}"


def said(row: dict[str, Any]) -> str:
    """The error of the first of the others, without what stands after the sentence."""
    _, kind, text = row["ranks"][0]
    text = re.sub(
        r"\[/\S*?/gloo/", "[gloo/", text.split("; its own traceback")[0].split(". This is typically")[0]
    )
    return f"{kind}: {text}".replace("|", "/") if kind else "-"


if __name__ == "__main__":
    main()
