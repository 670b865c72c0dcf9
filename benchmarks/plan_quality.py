"""How good the plans are that a memory budget finds: their predicted step beside that of plans drawn at random.

    python benchmarks/plan_quality.py --draws 200 --json plan_quality.json

Draws are of what the search chooses from: sizes of buckets, whether costly operators are run again, how many bytes of
activations are saved, tiles of MLPs, heads and logits, tiles of weights of each size, kept weights, and distances of
gathers. A budget is the least peak that the drawn plans have, and a part of what lies between that and the peak of the
plan without a budget. Nothing is run: models are on the meta device, and predicted times are equal on any machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import common
import models
import torch
from torch import nn

from zero_compiler import passes
from zero_compiler.compile.search.measure_orders import MeasureOrders
from zero_compiler.cost.prefetch import PrefetchChoice
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.plan import tiling
from zero_compiler.tools import planning

PARTS = (0.75, 0.4, 0.1)


@dataclass(frozen=True)
class Case:
    """A model, its ranks and the machine that it is planned for."""

    make: Callable[[], nn.Module]
    tokens: tuple[int, int]
    world: int
    fields: dict[str, Any]

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(*self.tokens, dtype=torch.long)
        return x, x


BF16 = {"param_dtype": torch.bfloat16}
CASES = {
    "GPT, 2 layers of 25600, 512 H100": Case(
        lambda: models.gpt(2, 25600, 50304, 1024), (1, 1024), 512, {"hardware": "dgx-h100", **BF16}
    ),
    "GPT, 2 layers of 2048, 8 H100": Case(
        lambda: models.gpt(2, 2048, 50304, 1024), (8, 1024), 8, {"hardware": "dgx-h100", **BF16}
    ),
    "GPT, 4 layers of 1024, 16 V100": Case(
        lambda: models.gpt(4, 1024, 8192, 1024), (4, 1024), 16, {"hardware": "dgx-2-v100"}
    ),
    "GPT, 2 layers of 1024, laptop": Case(
        lambda: models.gpt(2, 1024, 8192, 1024), (4, 256), 2, {"hardware": "laptop"}
    ),
    "Llama, 2 layers of 4096, 64 A100": Case(
        lambda: models.llama(2, 4096, 11008, 32000, 2048), (2, 2048), 64, {"hardware": "dgx-a100", **BF16}
    ),
    "Llama, 2 layers of 1024, laptop": Case(
        lambda: models.llama(2, 1024, 2816, 32000, 256), (2, 256), 4, {"hardware": "laptop"}
    ),
}


@dataclass(frozen=True)
class Plan:
    """Predicted bytes and time of a step."""

    peak: int
    us: float


def report(case: Case, **fields: Any) -> Plan:
    """The plan of a case.

    Raises:
        MemoryBudgetError: there is none within the budget.
    """
    torch._dynamo.reset()
    with torch.device("meta"):
        model = case.make()
        inputs = case.inputs()
    told = planning.report(model, inputs, case.world, **case.fields, **fields)
    us = sum(t.total_us for f in told.frames for t in f.timelines.values())
    return Plan(told.memory.peak, us)


def drawn(case: Case, count: int) -> list[Plan]:
    """Plans of a case, drawn at random."""
    out: list[Plan] = []

    def draw_all(orders: MeasureOrders, partition: Any, planned: Any, graphs: Any, budget_bytes: int) -> Any:
        draw, before = random.Random(0), orders.state.choice
        while len(out) < count:
            orders.adopt(before)
            orders.state.plan_again()
            out.append(_draw(draw, orders, partition))
        orders.adopt(before)
        orders.state.plan_again()
        return partition(None)

    fit, MeasureOrders.fit_memory = MeasureOrders.fit_memory, draw_all
    try:
        report(case, memory_budget_bytes=1 << 60)
    finally:
        MeasureOrders.fit_memory = fit
    return out


def _draw(draw: random.Random, orders: MeasureOrders, partition: Any) -> Plan:
    state, lowering = orders.state, orders.lowering
    buckets = [state.choice.bucket_bytes, *state.smaller_buckets()]
    orders.adopt(
        replace(
            state.choice,
            bucket_bytes=draw.choice(buckets),
            recompute=draw.random() < 0.5,
            tile_mlp=draw.random() < 0.25,
            tile_heads=draw.random() < 0.25,
        )
    )
    graphs = partition(None)
    if draw.random() < 0.5:
        try:
            graphs = partition(int(draw.random() * orders.overrun.held_bytes(graphs)))
        except MemoryBudgetError as refused:
            graphs = partition(refused.least_bytes)
    for _ in range(draw.choice((0, 0, 1, 2, 4, 8))):
        passes.finer([gm.graph for gm in graphs.values()])
    weights = {}
    if draw.random() < 0.75:
        for ref in orders.weight_tiles.undecided(graphs):
            nbytes = state.params[ref].gather_bytes
            weights.setdefault(nbytes, draw.choice((None, *(nbytes >> k for k in range(1, 7)))))
        state.try_tiles(
            {
                ref: weights[nbytes]
                for ref in orders.weight_tiles.undecided(graphs)
                if (nbytes := state.params[ref].gather_bytes) and (weights[nbytes] or 0) >= tiling.LEAST_BYTES
            }
        )
    share = draw.choice((0.0, 0.0, 0.25, 0.5, 1.0))
    tables = {key: dict(table) for key, table in state.loader.kept_offsets().items()}
    keeps = [ref for ref, plan in state.params.items() if plan.sharded and not plan.tile_rows]
    state.try_kept({ref: draw.random() < share for ref in keeps})
    far = draw.choice((1, 1, 2, 4))
    units = dict.fromkeys(state.choice.units.values())
    ahead = {unit: draw.randint(1, far) for unit in units}
    prefetch = {phase: PrefetchChoice("", ahead) for phase in graphs}
    state.choice = replace(state.choice, prefetch=prefetch)
    programs = [lowering._lowered(gm, phase).emitted.program for phase, gm in graphs.items()]
    plan = Plan(state.peak(programs), sum(lowering.simulated(p).total_us for p in programs))
    for key, table in state.loader.kept_offsets().items():
        table.clear()
        table.update(tables.get(key, {}))
    return plan


def compared(case: Case, draws: list[Plan], parts: tuple[float, ...] = PARTS) -> list[dict[str, Any]]:
    """For each budget the plan that is found, beside the fastest of those drawn that fit it."""
    free, least = report(case), min(plan.peak for plan in draws)
    rows = []
    for part in parts:
        budget_bytes = int(least + part * (free.peak - least))
        fitting = [plan for plan in draws if plan.peak <= budget_bytes]
        try:
            found = report(case, memory_budget_bytes=budget_bytes)
        except MemoryBudgetError:
            found = None
        rows.append(
            {
                "budget": budget_bytes,
                "free_us": free.us,
                "fitting": len(fitting),
                "drawn_us": min(plan.us for plan in fitting),
                "found_us": found.us if found else None,
            }
        )
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--json")
    args = parser.parse_args()
    m = common.machine()
    rows: list[dict[str, Any]] = []
    for name in args.case or CASES:
        draws = drawn(CASES[name], args.draws)
        rows += [{"case": name, **row} for row in compared(CASES[name], draws)]
        print(name, rows[-len(PARTS) :], flush=True)
    head = [
        "model",
        "budget, GB",
        "no budget, ms",
        "drawn that fit",
        "best drawn, ms",
        "found, ms",
        "found / drawn",
    ]
    table = [
        [
            r["case"],
            f"{r['budget'] / 1e9:.3f}",
            f"{r['free_us'] / 1e3:.2f}",
            str(r["fitting"]),
            f"{r['drawn_us'] / 1e3:.2f}",
            f"{r['found_us'] / 1e3:.2f}" if r["found_us"] else "refused",
            f"{r['found_us'] / r['drawn_us']:.3f}" if r["found_us"] else "",
        ]
        for r in rows
    ]
    title = f"Predicted time of a step, beside the best of {args.draws} plans drawn at random"
    common.print_table(title, head, table)
    if args.json:
        text = common.heading("Quality of plans", m) + common.table(title, head, table)
        common.save(args.json, {"machine": m, "rows": rows}, text)


if __name__ == "__main__":
    main()
