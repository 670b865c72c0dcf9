"""Time of all passes, and of what follows them, on synthetic graphs of many nodes.

    python benchmarks/pass_time.py --nodes 10000,30000,100000

Layers of about 25 nodes, forward and backward together, a weight and a bias each. Nothing is captured, compiled or run.
The time has in it every pass on the joint graph, on forward and on backward, with the verifier after each and a lint
at the end; emission with the plan of the arenas, live bytes and the verifier of the Program; the search for prefetch
distances and the simulation of the timeline. Each size runs in a fresh process. Beside it stands what one `lint` of the
lowered graphs takes: torch's own walk over all nodes, linear in their number, shows what larger graphs lose to the
caches.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import common
from bench import _list

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

PARTS = ("joint passes", "phase passes", "emission", "search and timeline")


def main() -> None:
    call = common.called()
    if call is not None:
        common.answer(call, measure(call["nodes"]))
    parser = common.parser(__doc__)
    parser.add_argument("--nodes", type=_list, default=["10000", "30000", "100000"])
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    rows = []
    for nodes in map(int, args.nodes):
        (row,) = common.run_ranks(os.path.abspath(__file__), {"nodes": nodes}, 1)
        rows.append(row)
        print(f"  {row['nodes']} nodes: {sum(row['s'].values()):.1f} s", flush=True)
    head = ["nodes", *(f"{p} s" for p in PARTS), "all s", "us a node", "one lint s", "all / lint"]
    table = []
    for r in rows:
        total = sum(r["s"].values())
        cells = [f"{r['s'][p]:.2f}" for p in PARTS]
        ratios = [f"{total / r['nodes'] * 1e6:.0f}", f"{r['lint_s']:.2f}", f"{total / r['lint_s']:.0f}"]
        table.append([str(r["nodes"]), *cells, f"{total:.2f}", *ratios])
    title = "Time of the passes on synthetic graphs, CPU seconds"
    common.print_table(title, head, table)
    if args.json:
        text = common.heading("Time of the passes", m) + common.table(title, head, table)
        common.save(args.json, {"machine": m, "rows": rows}, text)


def measure(wanted: int) -> dict[str, Any]:
    from null.compile.test_compile_time import joint, layered
    from null.graphs import lower, lower_joint

    from zero_compiler.cost import hardware, prefetch
    from zero_compiler.cost.simulate import simulate
    from zero_compiler.plan import schedule

    seconds = dict.fromkeys(PARTS, 0.0)
    layers = wanted // 25
    whole = joint(layers)
    forward, backward = layered(layers)
    nodes = len(forward.graph.nodes) + len(backward.graph.nodes)
    gc.collect()
    gc.freeze()

    def timed(part: str, start: float) -> None:
        seconds[part] += time.process_time() - start

    start = time.process_time()
    lower_joint(whole)
    timed(PARTS[0], start)
    machine = hardware.load("dgx-h100")
    lint = 0.0
    for build, phase in ((forward, "forward"), (backward, "backward")):
        start = time.process_time()
        graph = lower(build, phase, bucket_bytes=256)
        timed(PARTS[1], start)
        start = time.process_time()
        graph.lint()
        lint += time.process_time() - start
        start = time.process_time()
        program, emitted = build.program(graph, phase)
        timed(PARTS[2], start)
        program = dataclasses.replace(program, segment_us=[10.0] * len(emitted.segments))
        start = time.process_time()
        look = schedule.look(program, machine, 2)
        prefetch.distances(look.phase, 1 << 20)
        simulate(program, machine, 2)
        timed(PARTS[3], start)
    return {"nodes": nodes, "s": seconds, "lint_s": lint}


if __name__ == "__main__":
    main()
