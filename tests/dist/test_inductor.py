"""The defaults, Inductor's kernels over whatever way there is between ranks: the curve of plain eager PyTorch.

All ranks compile the same kernels, which lie in one cache: the second to ask waits for the first.
"""

from __future__ import annotations

import pytest
from curves import Case, check

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    "names",
    [["gpt2", "llama"], ["bert", "resnet"], ["lstm", "odd"], ["broken", "nested"]],
    ids="-".join,
)
@pytest.mark.timeout(900)
def test_every_kind_of_model(names: list[str]) -> None:
    check(2, [Case(name, 3, compute="inductor") for name in names])


@pytest.mark.timeout(900)
def test_every_stage() -> None:
    check(2, [Case(name, stage, compute="inductor") for name in ("gpt2", "odd") for stage in (0, 1, 2)])
