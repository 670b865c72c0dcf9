"""ZeRO's first figure: bytes of model states by stage, and what each stage sends."""

from __future__ import annotations

from . import papers
from .extended import ExtendedPlan, Planner, Setup
from .models import Shape
from .table import Figure, FigureRow, gigabytes

RANKS = 64
SHAPE = Shape(layers=33, width=4224)  # 7.497 billion parameters; the paper names no shape
_NAMES = {0: "data parallelism", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
_HALF, _STATES = 2, 12  # bytes of a parameter and of a gradient; of the fp32 copy and two moments

_WHY = {
    0: "4 + 4 + 8 bytes, all in fp32, where the paper has 2 + 2 + 12: as many",
    1: "full weights and waiting gradients in half precision, and a rank's part of 16 bytes instead of 12",
    2: "a rank's part is 16 bytes instead of 14: gradients at rest are fp32",
    3: "a part of 4 + 4 + 8 bytes, where the paper has 2 + 2 + 12: as many",
}


def setup(stage: int) -> Setup:
    """What is planned for a stage."""
    return Setup(SHAPE, RANKS, 1, {"stage": stage}, accumulates=stage == 1)


def paper_bytes(plan: ExtendedPlan, whole: ExtendedPlan, stage: int) -> float:
    """Bytes of a stage as the paper counts them, of as many elements as a plan gives one rank.

    Args:
        whole: the plan of stage 0, in which a rank has all of everything.
    """
    every, own = whole["optimizer"] / 8, plan["optimizer"] / 8  # two fp32 states are assumed
    parameters = own if stage == 3 else every
    gradients = own if stage >= 2 else every
    return _HALF * parameters + _HALF * gradients + _STATES * own


def states(planner: Planner) -> Figure:
    """Bytes of model states: in the paper's accounting, and as planned here."""
    plans = {stage: planner.extended(setup(stage)) for stage in _NAMES}
    rows = []
    for stage, name in _NAMES.items():
        counted = paper_bytes(plans[stage], plans[0], stage)
        fact = papers.STATES[stage]
        rows.append(FigureRow(f"{name}, 2 + 2 + 12 bytes", fact, counted, gigabytes(counted)))
        planned = plans[stage]["states"] + plans[stage]["waiting"]
        rows.append(FigureRow(f"{name}, as it rests here", fact, planned, gigabytes(planned), _WHY[stage]))
    peaks = ", ".join(f"{gigabytes(plans[stage]['device'])} ({name})" for stage, name in _NAMES.items())
    return Figure(
        "states",
        "Model states by stage",
        f"{SHAPE.words()} ({SHAPE.parameters / 1e9:.3f} billion parameters), {RANKS} ranks, Adam in mixed precision. "
        "The first row of each pair counts bytes as the paper does, 2 of parameter, 2 of gradient and 12 of optimizer "
        "states, for the elements that the layouts here give to one rank. The second is what the plan has at rest: "
        "weights, gradients and states in fp32, and the full weights in half precision that stages 1 and 2 keep from "
        "step to step. Stage 1 differs from stage 2 only where gradients of several micro-batches add up.",
        rows,
        (
            "Whole plans, with activations and buffers of transfers for one row of 1,024 tokens on each rank, take "
            f"{peaks}.",
        ),
    )


def volume(planner: Planner) -> Figure:
    """What a rank sends in a step, counted on the transfers of Programs."""
    rows = []
    for stage, name in _NAMES.items():
        plan = planner.extended(setup(2 if stage == 1 else stage))
        gathered = plan["gathered"]
        # An all-reduce is a reduce-scatter and a gather.
        sent = (gathered + plan["reduced"] * (2 if stage == 0 else 1)) / _HALF / SHAPE.parameters
        parts = f"gathered {gathered / 1e9:.2f} GB, reduced {plan['reduced'] / 1e9:.2f} GB"
        parts += (
            "; forward makes the gradients of the head, which backward does not gather" if stage == 3 else ""
        )
        rows.append(FigureRow(name, papers.VOLUME[stage], sent, f"{sent:.3f} ({sent / 2:.2f}x)", parts))
    return Figure(
        "volume",
        "What a step sends",
        f"Elements that a rank sends in a step for each parameter of the same model, on {RANKS} ranks: bytes of full "
        "tensors that the transfers of the Programs carry, in half precision. An all-reduce counts twice, as in the "
        "paper. Stage 1 has the Program of stage 2.",
        rows,
    )
