"""Which classes of modules have code that writes in place."""

from __future__ import annotations

from torch import nn

from zero_compiler.sharded.write_detector import may_write


class Reads(nn.Module):
    def forward(self, x):
        return x * 2


class Writes(nn.Module):
    def forward(self, x):
        self.weight.mul_(2)
        return x


class Inherits(Writes):
    pass


class ByData(nn.Module):
    def forward(self, x):
        return self.weight.data


def test_code_with_words_that_write_is_found():
    assert [may_write(c) for c in (Reads, Writes, Inherits, ByData)] == [False, True, True, True]


def test_modules_of_torch_are_not_searched():
    assert not may_write(nn.BatchNorm1d)
