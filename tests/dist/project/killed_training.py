"""Runs ``examples/resume.py`` and kills one of its ranks, in each of the first restarts at another random moment.

    torchrun ... killed_training.py KILLS SEED LOG arguments of resume.py

The moment is that of a timer of the kernel's, whose signal ends a process wherever it is, as Python has no handler for
it. It is set when the rank begins a forward, backward, step or save, for a part of the time that one takes: at the end
of that one the rank ends at the latest, but for a save, which may go on beside training. Or it is set when the process
begins, and may then end it anywhere.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

PHASES = ("forward", "backward", "step", "save", "anything")
EXAMPLES = Path(__file__).parents[3] / "examples"


class Kill:
    """Ends this process in the phase ``where``, the ``count``-th time that it gets there."""

    def __init__(self, where: str, count: int, part: float) -> None:
        self._where, self._left, self._part = where, count, part
        self._began = 0.0
        # Of the shortest one yet. The first forward compiles, and a save goes on beside training.
        self._seconds = 0.2 if where == "save" else 1.0

    def begins(self, phase: str) -> None:
        if phase == self._where:
            self._left -= 1
            if self._left == 0:
                signal.setitimer(signal.ITIMER_REAL, self._part * self._seconds + 1e-6)
            self._began = time.perf_counter()

    def ends(self, phase: str) -> None:
        if phase == self._where:
            if self._left == 0 and phase != "save":
                os.kill(os.getpid(), signal.SIGKILL)
            self._seconds = min(self._seconds, time.perf_counter() - self._began)

    def around(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            self.begins(phase)
            found = call(*args, **kwargs)
            self.ends(phase)
            return found

        return inside


def arm(kills: int, seed: str, log: Path) -> None:
    """What of this kill is random is so by the ``seed`` and the number of the restart."""
    restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    draw = random.Random(f"{seed}/{restart}")
    victim, where = draw.randrange(int(os.environ["WORLD_SIZE"])), PHASES[restart % len(PHASES)]
    count, part = draw.randrange(1, 3 if where == "save" else 8), draw.random()
    if restart >= kills or rank != victim:
        return
    with log.open("a") as file:
        file.write(f"restart {restart}: rank {victim}, {where}, time {count}, {part:.2f} of it\n")
    if where == "anything":
        signal.setitimer(signal.ITIMER_REAL, 0.5 + 8 * part)
        where, count = "step", 8  # at the latest
    kill = Kill(where, count, part)
    if where == "save":
        dcp.save, dcp.async_save = kill.around("save", dcp.save), kill.around("save", dcp.async_save)
    compiled = torch.compile

    def compile_(*args: Any, **kwargs: Any) -> Any:
        return kill.around("forward", compiled(*args, **kwargs))

    torch.compile = compile_  # type: ignore[assignment]
    torch.Tensor.backward = kill.around("backward", torch.Tensor.backward)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda *_: kill.begins("step"))
    register_optimizer_step_post_hook(lambda *_: kill.ends("step"))


if __name__ == "__main__":
    arm(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    sys.argv = [str(EXAMPLES / "resume.py"), *sys.argv[4:]]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(sys.argv[0], run_name="__main__")
