"""The defaults, Inductor's kernels over whatever way there is between ranks: the curve of plain eager PyTorch.

Of test_models.py's families BERT and ViT are left out: their kernels are those of the other encoder and decoders.

All ranks compile the same kernels, which lie in one cache: the second to ask waits for the first.
"""

from __future__ import annotations

import pytest
from curves import Case, check
from marks import thorough

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# Kernels take long to compile: one model has more stages than the one that cuts the most. Stages 1 and 2 are one plan.
STAGES = {"odd": (0, 1, 3)}


@pytest.mark.parametrize(
    "names",
    [
        ["gpt2"],
        ["broken", "mixed-dtypes", "sometimes"],
        *thorough(["llama", "nested"], ["mixtral"], ["resnet", "lora"], ["t5"], ["lstm", "odd"]),
    ],
    ids="-".join,
)
@pytest.mark.timeout(900)
def test_models(names: list[str]) -> None:
    check(2, [Case(n, stage, compute="inductor") for n in names for stage in STAGES.get(n, (3,))])


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_four_ranks() -> None:
    """The kernels are those of two ranks, since segments see full weights; what is cut, sent and summed is not."""
    check(4, [Case("gpt2", 3, compute="inductor", steps=5)])
