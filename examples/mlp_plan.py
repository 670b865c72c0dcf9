"""The plan of a two-layer MLP, explained line by line: start here to learn to read a plan.

python examples/mlp_plan.py                                             one process
torchrun --standalone --nproc-per-node 2 examples/mlp_plan.py           two ranks
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_compiler as zero

BATCH, INNER, OUTER = 16, 256, 64

# What a line of the captured graph is, by how it goes on after "%name = ".
GRAPH = {
    "input": "rows of a weight that lie on this rank (.shard), the batch, or the gradient of the output",
    "zero.unshard": "here the model reads a full weight; [its name]",
    "zero.reduce_grad": "here a full gradient is complete, and each rank is due its rows of the mean; [its name]",
    "aten.": "arithmetic: result, operator, inputs; type and shape, bytes allocated (+), bytes live after it",
    "return": "the output for the caller, then the gradients",
}

# What a line of the program is, by its first word.
PROGRAM = {
    "gather": "start fetching a weight's rows from all ranks into the arena; compute goes on meanwhile",
    "wait": "block until a transfer is done; from here its result may be read",
    "compute": "run a piece of the graph, compiled as one function, for the modules named",
    "release": "no later line reads the weight: its place in the arena may be used again",
    "reduce-scatter": "start summing a full gradient over the ranks; each rank gets its own rows of the mean",
    "all-reduce": "the same for a parameter that cannot be cut: every rank gets all of the mean",
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(OUTER, INNER, bias=False)
        self.second = nn.Linear(INNER, OUTER, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def explained(lines: Iterable[str], table: dict[str, str]) -> str:
    """``lines``, each kind preceded by its explanation where it comes first."""
    out, seen = [], set()
    for line in lines:
        body = line.split(" = ", 1)[-1]
        kind = next((k for k in table if body.startswith(k)), "")
        if kind and kind not in seen:
            seen.add(kind)
            out.append(f"# {kind.rstrip('.')}: {table[kind]}")
        out.append(line)
    return "\n".join(out)


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as scratch:
        dump = Path(os.environ.setdefault("ZERO_DUMP", scratch))
        # 4096 bytes: each of these small weights travels alone, so that the plan shows one transfer a weight.
        # By default transfers this small share one, and CPU ranks of one host move no weights at all: they read
        # them in memory that they share. "aten" runs operators one by one, and compiles nothing.
        model = zero.shard(MLP(), stage=3, device="cpu", bucket_bytes=4096, transport="c10d")
        compiled = torch.compile(model, backend="zero", options={"compute": "aten"})
        x = torch.randn(BATCH, OUTER)
        compiled(x).square().mean().backward()
        if rank == 0:
            captured = (dump / "frame0" / "joint" / "00-captured.txt").read_text().splitlines()
            report = zero.inspect(compiled)
            show(captured, report, ranks)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def show(captured: list[str], report: Any, ranks: int) -> None:
    print(
        f"BEFORE: what the compiler captured, forward and backward in one graph ({ranks} rank{'s' * (ranks > 1)})\n"
    )
    print(explained(captured, GRAPH))
    for phase, program in report.frames[0].programs.items():
        print(f"\nAFTER: the {phase} program, all that a rank does, in order")
        print(
            f"arena: {program.transient_bytes:,} bytes for weights and gradients on their way; it counts as live\n"
        )
        print(explained(program.text().splitlines(), PROGRAM))
    m = report.memory
    weight = 4 * INNER * OUTER
    print(f"\nMEMORY of this rank, in bytes (one full weight: 4 x {INNER} x {OUTER} = {weight:,})\n")
    rows = [
        (
            "parameters",
            m.parameters,
            f"both weights, {'cut in ' + str(ranks) if ranks > 1 else 'whole on one rank'}",
        ),
        ("gradients", m.gradients, "the same rows"),
        ("optimizer states", m.optimizer, "two fp32 values a parameter, as Adam keeps"),
        (
            "arena",
            m.arena,
            "the largest of the programs' arenas" if m.arena else "one rank fetches nothing, and needs none",
        ),
        ("at rest", m.at_rest, "the sum: what lies there between steps"),
        (
            "programs",
            m.programs,
            "most that a program holds at once: activations, and gradients as they arise",
        ),
        ("predicted peak", m.peak, "known before the first step"),
    ]
    for name, value, why in rows:
        print(f"{name:<18}{value:>10,}   {why}")


if __name__ == "__main__":
    sys.exit(main())
