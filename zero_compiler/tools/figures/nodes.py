"""ZeRO-Infinity's scale: the largest models on nodes of DGX-2, by where they rest."""

from __future__ import annotations

from collections.abc import Mapping

from ...cost import hardware
from . import papers
from .extended import DEPTHS, IN_FILES, MACHINE, ON_HOST, TILED, ExtendedPlan, Planner, Setup
from .models import Shape
from .table import Fact, Figure, FigureRow, gigabytes, parameters

_DEVICES = 16  # of a node
_AWAY = {"stage": 3, "offload_activations": "host"}
_SMALLER = "16 bytes of a parameter in files, where the paper has 20"
_FULL_HOST = (
    "checkpoints of a row on each rank fill the host before states fill the files; slices share a row"
)

# A width for each number of nodes, so that 120 to 450 layers fill their files.
_WIDTHS = {1: 25600, 2: 25600, 4: 49152, 8: 49152, 16: 65536, 32: 90112, 128: 163840}


def _tiles(width: int) -> dict[str, object]:
    """Larger ones for the widest layers, which else would have hundreds."""
    return {"tile_bytes": (2 if width <= 65536 else 4) << 30}


def _device_bytes() -> int:
    room = hardware.load(MACHINE).plannable_bytes
    assert room is not None  # of a preset
    return room


def nodes(planner: Planner) -> Figure:
    """On 1 to 128 nodes, with everything in files."""
    rows = []
    for count, width in _WIDTHS.items():
        setup = Setup(Shape(0, width), _DEVICES * count, 1, {**_AWAY, **IN_FILES, **_tiles(width)})
        room = {
            "device": _device_bytes(),
            "host": papers.NODE_HOST_BYTES / _DEVICES,
            "nvme": papers.USABLE_FILES_BYTES / _DEVICES,
        }
        plan = planner.most_layers(setup, room, TILED)
        fact = papers.LARGEST_ON_NODES[count]
        why = _FULL_HOST if count == max(_WIDTHS) else "" if fact.low is None else _SMALLER
        rows.append(_row(f"{count:,} node{'s' if count > 1 else ''}", fact, plan, why))
    paper = papers.USABLE_FILES_BYTES / papers.INFINITY_STATE_BYTES
    return Figure(
        "nodes",
        "The largest model on nodes of DGX-2",
        "Parameters, gradients and optimizer states in files, checkpoints on the host, weights in tiles of at most 2 "
        "GiB (of layers wider than 64K: 4 GiB), one row of 1,024 tokens a rank. A node has 16 V100, "
        f"{papers.NODE_HOST_BYTES / 1e12} TB on the host, and {papers.USABLE_FILES_BYTES / 1e12:.0f} TB of files that "
        "can be used. Widths are chosen here.",
        rows,
        (
            f"The paper keeps {papers.INFINITY_STATE_BYTES} bytes of a parameter in files: 2 of a weight, 2 of a "
            "gradient, 4 of a gradient in fp32, and 12 of the master copy and two moments. Here it is 16: a weight, "
            "its gradient and two moments in fp32, since the master copy is what is read. So a node holds a quarter "
            f"more. In the paper's accounting the same files hold {parameters(paper)} a node.",
        ),
    )


_HOST = {"host": papers.NODE_HOST_BYTES / _DEVICES}
_FILES = {**_HOST, "nvme": papers.USABLE_FILES_BYTES / _DEVICES}
_WHOLE_HOST = {"host": papers.NODE_HOST_BYTES}
_WHOLE_FILES = {**_WHOLE_HOST, "nvme": papers.USABLE_FILES_BYTES}
_TO_HOST = {**_AWAY, **ON_HOST}
_TO_FILES = {**_AWAY, **IN_FILES}
_IN_SMALL_TILES = {**_TO_FILES, "tile_bytes": 1 << 30}  # of one device each tile is whole on it
_EFFICIENT = "what the host has room for; the post says how much trains efficiently"
_ROUND = "16 bytes of a parameter on the host, where DeepSpeed has 20; the post names round numbers"

# What, on so many ranks, layers of which width; fields, and bytes of one rank that bound it; the paper's; why.
_PLACEMENTS: tuple[tuple[str, int, int, Mapping[str, object], Mapping[str, float], Fact, str], ...] = (
    ("16 devices, all on the device", 16, 8192, {"stage": 3}, {}, papers.PLACED_ON_DEVICES, ""),
    ("16 devices, states on the host", 16, 8192, _TO_HOST, _HOST, papers.PLACED_ON_HOST, ""),
    ("16 devices, states in files", 16, 25600, _TO_FILES, _FILES, papers.PLACED_IN_FILES, _SMALLER),
    ("one device, states on the host", 1, 8192, _TO_HOST, _WHOLE_HOST, papers.ONE_DEVICE_ON_HOST, _EFFICIENT),
    (
        "one device, states in files",
        1,
        25600,
        _IN_SMALL_TILES,
        _WHOLE_FILES,
        papers.ONE_DEVICE_IN_FILES,
        f"{_SMALLER}; in tiles of 1 GiB",
    ),
    ("256 devices, states on hosts", 256, 25600, _TO_HOST, _HOST, papers.HOST_OF_16_NODES, _ROUND),
    ("512 devices, states on hosts", 512, 32768, _TO_HOST, _HOST, papers.HOST_OF_32_NODES, _ROUND),
)


def placement(planner: Planner) -> Figure:
    """On one node by where model states rest, on one of its devices, and with a host's memory alone."""
    rows = []
    for what, ranks, width, fields, room, fact, why in _PLACEMENTS:
        setup = Setup(Shape(0, width), ranks, 1, {**_tiles(width), **fields})
        depths = TILED if "offload_activations" in fields else DEPTHS
        plan = planner.most_layers(setup, {"device": _device_bytes(), **room}, depths)
        rows.append(_row(what, fact, plan, why))
    return Figure(
        "placement",
        "The largest model by where it rests",
        "The same, on one node of DGX-2 and on one of its devices, by where parameters, gradients and optimizer states "
        "rest; and with them in the memory of 16 and 32 hosts, as the post on ZeRO-3 Offload has them.",
        rows,
    )


def _row(what: str, fact: Fact, plan: ExtendedPlan, why: str = "") -> FigureRow:
    count = plan.setup.shape.parameters
    uses = [f"{gigabytes(plan['device'])} on the device"]
    uses += [f"{gigabytes(plan['host'])} on the host"] if plan["host"] else []
    uses += [f"{gigabytes(plan['nvme'])} in files"] if plan["nvme"] else []
    shown = f"{parameters(count)} ({plan.setup.shape.words()}; a rank: {', '.join(uses)})"
    if plan["device"] > _device_bytes():
        why += f"; it does not fit: {gigabytes(_device_bytes())} can be planned with, and smaller tiles are needed"
    return FigureRow(what, fact, count, shown, why)
