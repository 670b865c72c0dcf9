"""A planner of figures that plans nothing: what a plan has is reckoned."""

from __future__ import annotations

from dataclasses import replace

from zero_compiler.cost.timeline import COMPUTE, HOST, LINK, PYTHON, READ, WRITE
from zero_compiler.tools.figures.extended import Planner, Setup


class GivenPlanner(Planner):
    """16 bytes of each parameter, partitioned, where the fields put them; time is that of eight operations for each
    parameter and token, and an update that reads and writes 28 bytes."""

    def __init__(self) -> None:
        super().__init__(lambda line: None)
        self.planned: list[Setup] = []

    def _planned(self, setup, layers):
        shape = replace(setup.shape, layers=layers)
        self.planned.append(replace(setup, shape=shape))
        own = shape.parameters / shape.parts / (setup.ranks if setup.fields.get("stage") else 1)
        away = str(setup.fields.get("offload_params", "none"))
        compute = 8 * shape.parameters * setup.rows * shape.tokens / 62.5e6
        update = 28 * own / 1600 if away == "nvme" else 28 * own / 720e3
        rest = {"none": 0.0, "host": 0.0, "nvme": 0.0} | {away: 16 * own}
        piece = 8.0 * shape.width**2
        if "tile_bytes" in setup.fields:
            piece = min(piece, float(setup.fields["tile_bytes"]))
        return {
            "optimizer": 8 * own,
            "states": rest["none"],
            "arena": 1e9,
            "programs": 2e9,
            "waiting": 0.0,
            "host": rest["host"],
            "nvme": rest["nvme"],
            "forward_us": compute / 4,
            "backward_us": 3 * compute / 4,
            "update_us": update,
            "gathered": 2.0 * shape.parameters,
            "reduced": 2.0 * shape.parameters,
            "largest gather": piece,
            "largest reduction": piece,
            **{f"lane {lane}": compute for lane in (COMPUTE, HOST, LINK, PYTHON, READ, WRITE)},
        }
