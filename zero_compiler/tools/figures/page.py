"""The page of the documentation that has the figures; the command writes it."""

from __future__ import annotations

from collections.abc import Sequence

from .extended import DEPTHS, MACHINE, TILED
from .table import Figure

_HEAD = f"""# The papers' figures, planned anew

```
zero-compiler figures --markdown docs/figures.md
```

wrote this page: each number of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), ZeRO-Infinity (Rajbhandari et al.
2021, arXiv 2104.07857) and DeepSpeed's posts, beside the one that this compiler plans for the same model on the same
machine. `--only NAME` makes one of them. Nothing is run: times are predicted.

- **Models** are captured as graphs with fake tensors, on any machine: GPT-2 as Megatron-LM writes it, every layer
  checkpointed, products and transfers in half precision over weights that rest in fp32. A model is planned with
  {DEPTHS[0]} layers and with {DEPTHS[1]}, or with {TILED[0]} and {TILED[1]} where its layers are in tiles; each further
  layer adds as much as those did by which the two differ.
- **The machine** is the preset `{MACHINE}`, from data sheets; ranks fill one node after the other.
- **Deviation** is that of the number here from the paper's, or from the nearest end of a range. "Over" is a range
  without an end, and a number {"in a picture"} is not compared: the document does not print it.
"""


def page(figures: Sequence[Figure]) -> str:
    """All of it."""
    return "\n".join([_HEAD, *("\n".join([figure.markdown(), ""]) for figure in figures)])
