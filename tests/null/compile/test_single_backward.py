"""What a compiled frame does not take: forward-mode AD, named with a way out."""

from __future__ import annotations

import pytest
import torch
from null.small import ATEN
from null.tensors.test_transforms import tangent_of, tied

import zero_compiler as zero
from zero_compiler.errors import GradientError


@pytest.mark.slow
def test_forward_mode_of_a_compiled_model():
    torch._dynamo.reset()
    call = torch.compile(zero.shard(tied(), device="cpu", **ATEN), backend="zero")
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded), pytest.raises(GradientError, match="forward-mode AD"):
            tangent_of(call)
