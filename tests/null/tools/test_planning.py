"""Plans without ranks: what they cannot be made of, and what rests before anything is captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_compiler.errors import CaptureError
from zero_compiler.tools.planning import report, rest


class Raises(nn.Linear):
    def forward(self, x):
        if x.shape[0] == 2:
            raise RuntimeError("two rows are too few")
        return super().forward(x)


def test_what_the_forward_raises_is_said_with_its_place():
    with pytest.raises(
        CaptureError,
        match=r"^the forward of Raises cannot be captured.*: /.*test_planning\.py:16: RuntimeError: two rows",
    ):
        report(Raises(4, 4), (torch.ones(2, 4),), compute="aten")
    torch._dynamo.reset()
    with pytest.raises(CaptureError, match=r"must have same reduction dim"):
        report(Raises(4, 4), (torch.ones(3, 5),), compute="aten")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"stage": 0}, {"stage": 2}, {"stage": 3, "offload_optimizer": "nvme"}], ids=str
)
def test_what_rests_is_known_without_a_capture(tmp_path, fields):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 30))
    if "offload_optimizer" in fields:
        fields = fields | {"nvme_dir": str(tmp_path)}
    early = rest(model, 4, **fields)
    planned = report(model, (torch.ones(2, 64),), 4, compute="aten", **fields).memory
    for what in ("parameters", "gradients", "optimizer", "files", "apart"):
        assert getattr(early, what) == getattr(planned, what), what
    assert not any(tmp_path.iterdir())
