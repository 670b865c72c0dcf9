"""What becomes of a model and an optimizer that a library has made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from zero_compiler.config import Config
from zero_compiler.errors import IntegrationError
from zero_compiler.integrations.prepared import shard_and_compile, streamed
from zero_compiler.optim.optimizer import StreamedOptimizer


def sequential(opt: Any) -> Any:
    parts = [lr_scheduler.LinearLR(opt, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(opt, 10)]
    return lr_scheduler.SequentialLR(opt, parts, [3])


def chained(opt: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(opt, 0.9)]
    )


def alone(opt: Any) -> Any:
    return lr_scheduler.LambdaLR(opt, [lambda n: 1 / (1 + n), lambda n: 1 / (2 + n)])


def both(folder: Path) -> tuple[Any, Any]:
    """An optimizer of two groups, and the zero.optimizer that replaced it."""
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 3e-3}]
    opt = torch.optim.AdamW(groups, lr=1e-2)
    config = Config.make(None, {"compute": "aten", "offload_optimizer": "nvme", "nvme_dir": str(folder)})
    shard_and_compile(model, config, optimizers=[opt])
    new = streamed(opt, config)
    assert isinstance(new, StreamedOptimizer)
    return opt, new


@pytest.mark.parametrize("make", [sequential, chained, alone])
def test_a_scheduler_of_the_replaced_optimizer_goes_on_after_a_load(make, tmp_path):
    plain = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1e-2, 3e-3)])
    expected = rates(plain, make(plain), 7)
    old, new = both(tmp_path)
    sched = make(old)  # as one that is never prepared
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert rates(new, sched, 2) == expected[:2]
    for at in (2, 4):
        saved = new.state_dict(), sched.state_dict()
        old, new = both(tmp_path)
        sched = make(old)
        new.load_state_dict(saved[0])
        sched.load_state_dict(saved[1])
        assert rates(new, sched, 2) == expected[at : at + 2]


def rates(opt: Any, sched: Any, steps: int) -> list[list[float]]:
    said = []
    for _ in range(steps):
        opt.step()
        sched.step()
        said.append([group["lr"] for group in opt.param_groups])
    return said


def test_states_of_the_replaced_optimizer_are_refused(tmp_path):
    """It would save none, and load them for nobody."""
    old, new = both(tmp_path)
    for call in (old.state_dict, lambda: old.load_state_dict(new.state_dict())):
        with pytest.raises(IntegrationError, match="this AdamW was replaced by a zero.optimizer"):
            call()
