"""mypy is given every file of the product under the name by which it is imported."""

from __future__ import annotations

from null.project.test_layers import COMPILED, FILES
from run_mypy import sources


def test_every_module_has_its_name():
    assert {source.module for source in sources()} == {*FILES, *COMPILED}
