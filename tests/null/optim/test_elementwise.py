"""Which optimizers may be streamed, and what they keep for a parameter."""

from __future__ import annotations

import pytest
import torch

from zero_compiler.errors import OptimizerError
from zero_compiler.optim.elementwise import declared, states_of


class Coupled(torch.optim.SGD):
    """Divides by the norm of the whole gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm())
        return super().step(closure)


@pytest.mark.parametrize(
    ("cls", "kw", "kept"),
    [
        (torch.optim.SGD, {"lr": 0.1}, set()),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer"}),
        (torch.optim.AdamW, {}, {"exp_avg", "exp_avg_sq"}),
    ],
)
def test_states_of_elementwise_optimizers(cls, kw, kept):
    options = cls([torch.zeros(2, requires_grad=True)], **kw).param_groups[0]
    states = states_of(cls, kw, {k: v for k, v in options.items() if k != "params"}, torch.zeros(4, 4))
    assert set(states.tensors) == kept
    assert all(dtype == torch.float32 for dtype in states.tensors.values())


def test_a_class_that_couples_elements_is_found_by_trying():
    options = Coupled([torch.zeros(2, requires_grad=True)], lr=0.1).param_groups[0]
    with pytest.raises(OptimizerError, match="Coupled"):
        states_of(
            Coupled, {"lr": 0.1}, {k: v for k, v in options.items() if k != "params"}, torch.zeros(4, 4)
        )


def test_known_classes_are_refused_by_name():
    with pytest.raises(OptimizerError, match="Adafactor"):
        declared(torch.optim.Adafactor)
