"""The largest models that V100 of 32 GB train without another tier."""

from __future__ import annotations

from ...cost import hardware
from . import papers
from .extended import MACHINE, Planner, Setup
from .models import Shape
from .table import Fact, Figure, FigureRow, gigabytes, parameters

# Widths are those that the paper's table 4 has for models of these sizes.
_ASKED: tuple[tuple[str, Setup, Fact, str], ...] = (
    (
        "data parallelism, 64 ranks",
        Setup(Shape(0, 1920), 64, 1, {"stage": 0}),
        papers.LARGEST_PLAIN,
        "fused gradients took the paper's baseline 4 bytes of a parameter more (its section 3.2), and fragments up to "
        "30% of memory (section 6.3); here buffers are small and their offsets planned, so that nearly all is left to "
        "states, of which alone the paper has 2B",
    ),
    (
        "stage 1, 64 ranks",
        Setup(Shape(0, 3072), 64, 1, {"stage": 1}, accumulates=True),
        papers.LARGEST_STAGE_1,
        "with two micro-batches, whose full gradients wait; offsets are planned, and nothing is lost to fragments: of "
        "states alone the paper has 7.6B",
    ),
    (
        "stage 2, 128 ranks",
        Setup(Shape(0, 4096), 128, 1, {"stage": 2}),
        papers.LARGEST_STAGE_2,
        "a row on each rank; the paper trains 13B at speed, and has 14.4B of states alone",
    ),
    (
        "stage 2 and model parallelism of 16, 400 ranks",
        Setup(Shape(0, 8192, parts=16), 25, 1, {"stage": 2, "offload_activations": "host"}),
        papers.LARGEST_SLICED,
        "the part that one of 16 ranks has is a model here, on 25 data ranks, with its checkpoints on the host (the "
        "paper's Pa+cpu). The paper trains 170B at speed; by its formula 2 + 14/25 bytes of 200B fill 32 GB",
    ),
)


def largest(planner: Planner) -> Figure:
    """How many parameters fit, by stage."""
    room = hardware.load(MACHINE).plannable_bytes
    assert room is not None  # of a preset
    rows = []
    for what, setup, fact, why in _ASKED:
        plan = planner.most_layers(setup, {"device": room})
        count = plan.setup.shape.parameters
        shown = f"{parameters(count)} ({plan.setup.shape.words()}; {gigabytes(plan['device'])})"
        rows.append(FigureRow(what, fact, count, shown, why))
    return Figure(
        "largest",
        "The largest model on V100 of 32 GB",
        f"As many layers as fit {gigabytes(room)}: what a V100 has less the 2.1 GB that the preset `{MACHINE}` keeps "
        "for its context and the collectives' library. Each rank is given one row of 1,024 tokens, and layers "
        "are checkpointed. Widths are those of the paper's table 4.",
        rows,
    )
