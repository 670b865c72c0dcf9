"""The report says of everything that is done in tiles what it is, why, the bytes saved and the time paid."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zero_compiler.errors import MemoryBudgetError
from zero_compiler.tools.planning import report

TOKENS, WIDTH, WIDE, VOCABULARY = 256, 32, 512, 1024
BATCH = (torch.zeros(TOKENS, WIDTH), torch.zeros(TOKENS, dtype=torch.long))
NOTE = re.compile(
    r"tiled: (?P<what>.*): [\d,]+ tiles of [\d,]+ rows( a rank)?, [\d,]+ bytes at a time, for (?P<why>.+); "
    r"saves [\d,]+ bytes; costs ([\d,]+ more transfers? and )?[\d,]+ bytes of memory traffic, [\d,]+ us$"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x, y):
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x), y)


def whys(**fields) -> dict[str, set[str]]:
    """Why each is done in tiles, by what it is."""
    torch._dynamo.reset()
    told = report(Net(), BATCH, 2, **fields)
    said = [n.split(": ", 1)[1] for p in told.frames[0].programs.values() for n in p.notes if ": tiled" in n]
    said += [n for p in told.frames[0].programs.values() for n in p.notes if n.startswith("tiled")]
    out: dict[str, set[str]] = {}
    for note in said:
        assert note in str(told)
        found = NOTE.match(note)
        assert found is not None, note
        what = next(w for w in ("intermediate", "logits", "weight") if w in found["what"])
        out.setdefault(what, set()).add(found["why"])
    return out


SPEED = "products that take 10 times as long as reading the weight again for each"


@pytest.mark.slow
def test_logits_are_tiled_for_little_or_as_the_user_says():
    assert whys()["logits"] == {SPEED}
    assert whys(tile_bytes=VOCABULARY * 4 * 32)["logits"] == {f"tile_bytes={VOCABULARY * 4 * 32:,}"}


@pytest.mark.slow
def test_a_memory_budget_cuts_tiles_smaller_and_says_so():
    torch._dynamo.reset()
    peak = report(Net(), BATCH, 2).memory.peak
    found = whys(memory_budget_bytes=peak - VOCABULARY * 4 * TOKENS // 2)
    assert found["logits"] == {"the memory budget"}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 64 << 10])
def test_mlps_are_tiled_for_a_budget(limit):
    fields = {} if limit is None else {"tile_bytes": limit}
    torch._dynamo.reset()
    with pytest.raises(MemoryBudgetError) as caught:
        report(Net(), BATCH, 2, activation_budget_bytes=1, **fields)
    found = whys(activation_budget_bytes=caught.value.least_bytes, **fields)
    more = "" if limit is None else f" and tile_bytes={limit:,}"
    assert found["intermediate"] == {f"the activation budget{more}"}
