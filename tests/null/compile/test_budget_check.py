"""What was compiled is counted once more, beside the budget that its plan was made for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_compiler.compile import budget_check
from zero_compiler.errors import VerifyError
from zero_compiler.tools.planning import report


def planned(**fields):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    return report(model, (torch.ones(8, 64),), 2, compute="aten", **fields)


@pytest.mark.slow
def test_every_program_is_counted_by_the_verifier_too(monkeypatch):
    peak, rooms = planned().memory.peak, []
    verify = budget_check.verify_program

    def with_less(program, worlds, room, gradients, less=0):
        rooms.append(room)
        verify(program, worlds, room - less, gradients)

    monkeypatch.setattr(budget_check, "verify_program", with_less)
    planned()
    assert rooms == []  # nothing is held to
    planned(memory_budget_bytes=peak)
    assert len(rooms) == 2
    monkeypatch.setattr(budget_check, "verify_program", lambda *args: with_less(*args, less=max(rooms)))
    with pytest.raises(VerifyError):
        planned(memory_budget_bytes=peak)
