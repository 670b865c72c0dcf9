"""A layer that is wider than a device is large, in tiles."""

from __future__ import annotations

from ...cost import hardware
from . import papers
from .extended import IN_FILES, MACHINE, ExtendedPlan, Planner, Setup
from .models import Shape
from .table import Figure, FigureRow, gigabytes

_WIDTH = 65536
_PIECE = 2 << 30  # bytes that may lie in one piece
_RANKS = 16


def setup(width: int, tiled: bool) -> Setup:
    """A model of one layer; its vocabulary is small, so that the layer is what it takes."""
    fields: dict[str, object] = {"stage": 3, **IN_FILES, "offload_activations": "host"}
    if tiled:
        fields["tile_bytes"] = _PIECE
    return Setup(Shape(1, width, vocabulary=2048), _RANKS, 1, fields)


def wide_layer(planner: Planner) -> Figure:
    """One layer of hidden size 64K: whole, and in tiles."""
    whole, tiled = (planner.whole(setup(_WIDTH, tiles)) for tiles in (False, True))
    room = hardware.load(MACHINE).plannable_bytes
    assert room is not None  # of a preset
    both = whole["largest gather"] + whole["largest reduction"]
    tiles = whole["largest gather"] / tiled["largest gather"]
    rows = [
        FigureRow("weight and gradient of its largest operator", papers.WIDE_BOTH, both, gigabytes(both)),
        FigureRow(
            "each of them in one piece",
            papers.WIDE_EACH,
            whole["largest gather"],
            f"{gigabytes(whole['largest gather'])}, {gigabytes(whole['largest reduction'])}",
        ),
        FigureRow(
            "tiles, for pieces of 2 GiB",
            papers.WIDE_TILED,
            tiles,
            f"{tiles:.0f} tiles of {gigabytes(tiled['largest gather'])}",
        ),
    ]
    return Figure(
        "wide-layer",
        "A layer of hidden size 64K",
        f"One layer of {_WIDTH:,} on {_RANKS} ranks, with parameters, gradients and states in files. Its largest "
        "operator is the first of the MLP, from 64K to 256K.",
        rows,
        (
            f"Whole, the plan takes {_parts(whole)} on a rank; in tiles {_parts(tiled)}, where a V100 has "
            f"{gigabytes(room)} to plan with. A step is predicted to take {whole.us / 1e6:.1f} s whole, on a device "
            f"that had the room, and {tiled.us / 1e6:.1f} s in tiles.",
        ),
    )


def _parts(plan: ExtendedPlan) -> str:
    return f"{gigabytes(plan['device'])} ({gigabytes(plan['arena'])} of it buffers of transfers)"
