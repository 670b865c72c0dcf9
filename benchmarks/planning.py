"""Time that planning takes, without a memory budget and under ever smaller ones; nothing is run or compiled.

    python benchmarks/planning.py --model gpt-6x512 --parts 0.8,0.5,0.2 --json planning.json

A budget is what rests, and a part of what else the peak without a budget takes. Seconds are of the processor: of one
thread, so that other work of the machine counts little. "lowered" is how often a phase ran through all passes, and
"cut" how often the joint graph was partitioned: equal on any machine.
"""

from __future__ import annotations

import time
from typing import Any

import common
import models
import torch

from zero_compiler.compile import budget_search
from zero_compiler.compile.phase_lowering import Lowering
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.tools import planning

RANKS = 2


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=sorted(models.MODELS), default="gpt-6x512")
    parser.add_argument(
        "--parts", type=lambda text: [float(x) for x in text.split(",")], default=[0.8, 0.5, 0.2]
    )
    parser.add_argument(
        "--hardware", default="laptop", help="a preset, or what `zero-compiler calibrate` wrote"
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    print(common.machine_text(m), flush=True)
    seen: list[str] = []
    counted(Lowering, "_lowered", seen)
    counted(budget_search, "min_cut_rematerialization_partition", seen)
    spec = models.MODELS[args.model]
    with torch.device("meta"):
        model = spec.make()
        tokens = torch.zeros(spec.batch, spec.length, dtype=torch.long)
    rows: list[dict[str, Any]] = []

    def plan(**fields: Any) -> Any:
        torch._dynamo.reset()
        seen.clear()
        begin = time.process_time()
        try:
            memory = planning.report(model, (tokens, tokens), RANKS, hardware=args.hardware, **fields).memory
        except MemoryBudgetError:
            memory = None
        rows.append(
            {
                "budget": fields.get("memory_budget_bytes"),
                "s": time.process_time() - begin,
                "lowered": seen.count("_lowered"),
                "cut": seen.count("min_cut_rematerialization_partition"),
                "peak": memory.peak if memory else None,
            }
        )
        return memory

    plan()  # the first one also loads what planning needs
    rows.clear()
    free = plan()
    for part in args.parts:
        plan(memory_budget_bytes=int(free.at_rest + part * (free.peak - free.at_rest)))
    head = ["budget, bytes", "CPU s", "lowered", "cut", "peak, bytes"]
    table = [
        [
            f"{r['budget']:,}" if r["budget"] else "none",
            f"{r['s']:.1f}",
            r["lowered"],
            r["cut"],
            f"{r['peak']:,}" if r["peak"] else "refused",
        ]
        for r in rows
    ]
    title = f"{args.model}, {RANKS} ranks"
    common.print_table(title, head, table)
    if args.json:
        text = common.heading("Time of planning", m) + common.table(title, head, table)
        common.save(args.json, {"machine": m, "rows": rows}, text)


def counted(owner: Any, name: str, seen: list[str]) -> None:
    """Note every call of a function."""
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return plain(*args, **kwargs)

    setattr(owner, name, call)


if __name__ == "__main__":
    main()
