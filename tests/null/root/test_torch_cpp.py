"""Tensors that count their writes together, and storages that are given other memory."""

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


def test_a_storage_moves_with_all_that_looks_at_it():
    under = bytearray(16)
    tensor = torch.frombuffer(under, dtype=torch.float32)
    tensor.copy_(torch.arange(4.0))
    at = tensor.data_ptr()
    assert not torch_cpp.move_if_shared(tensor)
    assert tensor.data_ptr() == at
    rows = tensor.view(2, 2)[1:]
    assert torch_cpp.move_if_shared(tensor)
    assert tensor.data_ptr() != at
    assert rows.data_ptr() == tensor.data_ptr() + 8
    torch.frombuffer(under, dtype=torch.float32).zero_()
    assert rows.tolist() == [[2.0, 3.0]]
    with pytest.raises(RuntimeError, match="a storage on meta"):
        torch_cpp.move_if_shared(torch.empty(1, device="meta"))
