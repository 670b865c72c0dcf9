"""What a compiled frame does not take: forward-mode AD, named with a way out."""

from __future__ import annotations

import pytest
import torch
from null.small import ATEN
from null.tensors.test_transforms import tangent_of, tied

import zero_compiler as zero
from zero_compiler.errors import GradientError


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False])
def test_forward_mode_of_a_compiled_model(recorded):
    """It is refused, or right: torch 2.15 runs a call with a tangent eagerly, those before it compile it."""
    torch._dynamo.reset()
    call = torch.compile(zero.shard(tied(), device="cpu", **ATEN), backend="zero")
    got, said = None, ""
    try:
        with torch.set_grad_enabled(recorded):
            got = tangent_of(call)
    except GradientError as error:
        said = str(error)
    if got is None:
        assert "forward-mode AD" in said
    else:
        torch.testing.assert_close(got, tangent_of(tied()))
