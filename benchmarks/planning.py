"""Seconds that planning takes, without a memory budget and under ever smaller ones; nothing is run or compiled.

    python benchmarks/planning.py deep-60 --parts 0.8 0.5 0.2

A budget is what rests, and a part of what else the peak without a budget takes. Seconds are of the processor: of one
thread, so that other work of the machine counts little. `lowered` is how often a phase ran through all passes, and
`cut` how often the joint graph was partitioned: equal on any machine.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import models
import torch

from zero_compiler import fitting, planning
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.lowering import Lowering


def counted(owner: Any, name: str, seen: list[str]) -> None:
    """Note every call of a function."""
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return plain(*args, **kwargs)

    setattr(owner, name, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=sorted(models.MODELS))
    parser.add_argument("--parts", type=float, nargs="*", default=[0.8, 0.5, 0.2])
    parser.add_argument("--hardware", default="laptop")
    args = parser.parse_args()
    seen: list[str] = []
    counted(Lowering, "_lowered", seen)
    counted(fitting, "min_cut_rematerialization_partition", seen)
    spec = models.MODELS[args.model]
    with torch.device("meta"):
        model = spec.make()
        tokens = torch.zeros(spec.batch, spec.length, dtype=torch.long)

    def plan(**fields: Any) -> Any:
        torch._dynamo.reset()
        seen.clear()
        begin = time.process_time()
        try:
            memory = planning.report(model, (tokens, tokens), 2, hardware=args.hardware, **fields).memory
            what = f"peak {memory.peak:,}"
        except MemoryBudgetError as error:
            memory, what = None, str(error).split(":")[0]
        seconds, lowered = time.process_time() - begin, seen.count("_lowered")
        budget = f"{fields['memory_budget_bytes']:,}" if fields else "none"
        print(
            f"budget {budget:>15}  {seconds:7.1f} s  lowered {lowered:3}  cut {len(seen) - lowered:2}  {what}",
            flush=True,
        )
        return memory

    plan()  # the first one also loads what planning needs
    free = plan()
    for part in args.parts:
        plan(memory_budget_bytes=int(free.at_rest + part * (free.peak - free.at_rest)))


if __name__ == "__main__":
    main()
