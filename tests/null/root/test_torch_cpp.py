"""Tensors that count their writes together."""

import pytest
import torch

from zero_compiler import torch_cpp


def test_autograd_notices_a_write_to_the_other():
    saved, other = torch.ones(3), torch.ones(3)
    torch_cpp.share_version_counters([saved], [other])
    loss = (torch.ones(3, requires_grad=True) * saved).sum()
    other.add_(1)
    assert saved._version == other._version == 1
    assert torch.equal(saved, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
