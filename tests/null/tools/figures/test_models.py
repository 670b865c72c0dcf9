"""The papers' model: as many parameters as its sizes say, and layers that are made again."""

from __future__ import annotations

import pytest

from zero_compiler.tools.figures.models import Shape, made


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("shape", [Shape(2, 256), Shape(1, 384, vocabulary=512, tokens=64)])
def test_parameters_are_counted(shape):
    model, (x, y) = made(shape, 3)
    assert count(model) == shape.parameters
    assert x.shape == y.shape == (3, shape.tokens)


def test_a_part_has_its_share_of_every_product():
    whole, part = (made(Shape(1, 512, vocabulary=1024, parts=parts), 1)[0] for parts in (1, 4))
    for name, weight in whole.named_parameters():
        if name.endswith("weight") and ("norm" in name or name.startswith("position")):
            continue
        if name.endswith("bias") and not ("qkv" in name or "up" in name):
            continue
        assert 4 * dict(part.named_parameters())[name].numel() == weight.numel(), name
