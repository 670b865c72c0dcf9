"""ZeRO-Infinity's speed: throughput by size, scaling with nodes, and what overlap is worth."""

from __future__ import annotations

from collections.abc import Mapping

from ...cost.timeline import COMPUTE, HOST, LINK, READ, WRITE
from . import papers
from .extended import IN_FILES, MACHINE, ON_HOST, TILED, ExtendedPlan, Planner, Setup
from .models import Shape
from .table import Fact, Figure, FigureRow, gigabytes

_TILES = {"tile_bytes": 2 << 30}
_AWAY = {"stage": 3, "offload_activations": "host", **_TILES}
_TRILLION = Shape(128, 25600)

# Shapes and rows of the paper's table 1, on 512 ranks.
_SIZES: tuple[tuple[str, Shape, int, Mapping[str, object]], ...] = (
    ("0.5T, states on the host", Shape(124, 18432), 7, ON_HOST),
    ("1T, states on the host", _TRILLION, 5, ON_HOST),
    ("5T, states in files", Shape(174, 49152), 3, IN_FILES),
    ("10T, states in files", Shape(200, 65536), 2, IN_FILES),
    ("20T, states in files", Shape(205, 90112), 1, IN_FILES),
)


def _parts(plan: ExtendedPlan) -> str:
    """What a step is made of, in seconds, and what it takes on the device."""
    lanes = {
        "compute": COMPUTE,
        "between ranks": LINK,
        "to and from the host": HOST,
        "reads": READ,
        "writes": WRITE,
    }
    todo = {name: plan[f"lane {lane}"] / 1e6 for name, lane in lanes.items()}
    told = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in todo.items() if seconds >= 0.5)
    return (
        f"a step of {plan.us / 1e6:,.0f} s, {plan['update_us'] / 1e6:,.0f} of it the update; to do: {told}; "
        f"{gigabytes(plan['device'])} on the device"
    )


def throughput(planner: Planner) -> Figure:
    """Of models of 0.5 to 20 trillion parameters on 512 devices."""
    rows = []
    for what, shape, count, fields in _SIZES:
        plan = planner.extended(Setup(shape, 512, count, {**_AWAY, **fields}), TILED)
        fact = papers.THROUGHPUT_1T if shape is _TRILLION else papers.THROUGHPUT
        rows.append(_rate(f"{what}, {count} row{'s' if count > 1 else ''} a rank", fact, plan))
    return Figure(
        "throughput",
        "Throughput on 512 V100",
        f"TFLOP/s of a device, predicted for 32 nodes of `{MACHINE}`, with shapes and rows of the paper's table 1. "
        "Operations are counted as the paper counts them: eight for each parameter and token, two of them of the "
        "forward that backward makes again. The paper slices these models over 4 to 8 ranks as well; here ZeRO is "
        "alone, and large weights are in tiles.",
        rows,
        (_RATES,),
    )


_RATES = (
    "The preset takes half of the peak of 125 TFLOP/s for matrix products. Where compute bounds a step, the prediction "
    "is these 62.5 TFLOP/s, and what the papers' kernels did less than that is the deviation: a rate that is 30% "
    "higher is a step that is 23% shorter. It may even be more than 62.5: backward does not make the last of a layer's "
    "products again, which nothing needs, and 7.3 operations are done for each parameter and token where eight are "
    "counted. Attention's own operations are not counted."
)


def _rate(what: str, fact: Fact, plan: ExtendedPlan) -> FigureRow:
    rate = plan.tflops()
    return FigureRow(what, fact, rate, f"{rate:.1f} TFLOP/s", _parts(plan))


def scaling(planner: Planner) -> Figure:
    """One trillion parameters on 4 to 32 nodes, with as many rows a device on each."""
    rows = []
    plans = {}
    for count in papers.SCALING:
        plan = planner.extended(Setup(_TRILLION, 16 * count, 5, {**_AWAY, **IN_FILES}), TILED)
        plans[count] = plan
        rows.append(_rate(f"{count} nodes, {16 * count} ranks", papers.SCALING[count], plan))
    low, high = min(plans), max(plans)
    first, last, times = plans[low], plans[high], high / low
    faster = times * last.tflops() / first.tflops()
    return Figure(
        "scaling",
        "One trillion parameters on 4 to 32 nodes",
        "128 layers of 25,600 with everything in files, and 5 rows on each rank, whatever their number: all ranks "
        "together do as many times more as there are nodes.",
        rows,
        (
            f"From {low} to {high} nodes the devices together do {faster:.1f} times as much in a second, which is "
            f"{'more' if faster > times else 'less'} than {times:.0f}. Each rank has fewer bytes in files: the update "
            f"takes {first['update_us'] / 1e6:,.0f} s on {low} nodes and {last['update_us'] / 1e6:,.0f} s on {high}, "
            f"and all reads of files {first[f'lane {READ}'] / 1e6:,.0f} s and {last[f'lane {READ}'] / 1e6:,.0f}. A "
            "node gathers as many bytes as before over its own adapters, so that gathers take as long on any number "
            "of them.",
        ),
    )


_SMALL = Shape(10, 8192)  # 8.9 billion parameters


def overlap(planner: Planner) -> Figure:
    """What it is worth that lanes work at once."""
    rows = []
    for count in (2, 16):
        plan = planner.extended(Setup(_SMALL, 64, count, {"stage": 3, **ON_HOST}))
        gain = plan.serial_us / plan.us
        shown = f"{gain:.2f} times as fast ({plan.tflops(plan.serial_us):.1f} to {plan.tflops():.1f} TFLOP/s)"
        rows.append(FigureRow(f"overlap, {count} rows a rank", papers.OVERLAP, gain, shown))
    return Figure(
        "overlap",
        "What overlap is worth",
        "8.9 billion parameters on 64 ranks, with parameters, gradients and states on the host. Without overlap each "
        "lane does what it has to do while the others wait.",
        rows,
    )
