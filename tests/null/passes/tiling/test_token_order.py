"""Losses that are given their columns before their tokens, as PyTorch has them for several dimensions of tokens."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from harness import SimulatedModel
from heads import VOCAB, WIDTH, Head, batch
from marks import slow, thorough
from null.graphs import aten, columns_first_graph
from torch import nn

import zero_compiler as zero
from zero_compiler.ir import dump
from zero_compiler.passes.tiling.token_order import columns_last

ROW = VOCAB * 4


class Goldens(TestCase):
    def test_columns_last(self):
        b = columns_first_graph()
        (head,) = (n for n in b.graph.nodes if n.target is aten.mm.default and n.args[0].name == "x")
        want = b.by_markers(b.graph)
        columns_last(b.graph, head)
        torch.testing.assert_close(b.by_markers(b.graph), want)
        text = re.sub(r"\s+[+-]?\d*\s+live \d+$", "", dump.text(b.graph), flags=re.MULTILINE)
        self.assertExpectedInline(
            text,
            """\
%w.shard = input                                                         f32[3,4]
%x = input                                                               f32[6,4]
%tangents_1 = input                                                      f32[]
%w_full = zero.unshard %w.shard [w]                                      f32[5,4]
%t_default = aten.t %w_full                                              f32[4,5]
%mm_default = aten.mm %x, %t_default                                     f32[6,5]
%view_default = aten.view %mm_default, [2, 3, 5]                         f32[2,3,5]
%logsumexp_default_1 = aten.logsumexp %view_default, [2]                 f32[2,3]
%sum_default = aten.sum %logsumexp_default_1                             f32[]
%unsqueeze_default_2 = aten.unsqueeze %logsumexp_default_1, 2            f32[2,3,1]
%sub_tensor_1 = aten.sub.Tensor %view_default, %unsqueeze_default_2      f32[2,3,5]
%exp_default_1 = aten.exp %sub_tensor_1                                  f32[2,3,5]
%expand_default_1 = aten.expand %tangents_1, [2, 3, 1]                   f32[2,3,1]
%mul_tensor_1 = aten.mul.Tensor %expand_default_1, %exp_default_1        f32[2,3,5]
%reshape_default = aten.reshape %mul_tensor_1, [6, 5]                    f32[6,5]
%mm_default_1 = aten.mm %reshape_default, %w_full                        f32[6,4]
%t_default_1 = aten.t %reshape_default                                   f32[5,6]
%mm_default_2 = aten.mm %t_default_1, %x                                 f32[5,4]
%reduce_grad_default = zero.reduce_grad %mm_default_2 [w]                f32[3,4]
return %sum_default, %mm_default_1, %reduce_grad_default
""",
        )


WHOLE, CUT = 17 * ROW, 1000  # tile_bytes: the head's weight is gathered whole, in tiles


def plain(m, h, labels):
    return F.cross_entropy(m.head(h).transpose(1, 2), labels)


def smoothed(m, h, labels):
    return F.cross_entropy(m.head(h).permute(0, 2, 1), labels, label_smoothing=0.1)


def weighted(m, h, labels):
    return F.cross_entropy(m.head(h).transpose(1, 2), labels, weight=m.classes)


def shifted_and_capped(m, h, labels):
    logits = 10 * torch.tanh(m.head(h) / 10)
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum") / 7


def with_z(m, h, labels):
    logits = m.head(h).float().transpose(1, 2)
    return F.cross_entropy(logits, labels) + 1e-2 * (logits.logsumexp(1) ** 2).mean()


def masked(m, h, labels):
    each = F.cross_entropy(m.head(h).mT, labels, reduction="none")
    keep = (labels % 2).float()
    return (each * keep).sum() / keep.sum()


def one_text(m, h, labels):
    return F.cross_entropy(m.head(h[1:]).mT, labels[1:], reduction="none").sum() / 7


def one_token(m, h, labels):
    return F.cross_entropy(m.head(h[:, 2:3]).mT, labels[:, 2:3], reduction="sum")


def three_dimensions(m, h, labels):
    logits = m.head(h.view(2, 2, -1, WIDTH))
    return F.cross_entropy(logits.permute(0, 3, 1, 2), labels.view(2, 2, -1))


def tokens_first(m, h, labels):
    """[tokens, columns, batch]"""
    return F.cross_entropy(m.head(h.transpose(0, 1)).mT, labels.t())


def wide_labels(m, h, labels):
    """As many probabilities as logits, laid as these are."""
    soft = F.one_hot(labels.clamp(0), VOCAB).float() * 0.9 + 0.1 / VOCAB
    return F.cross_entropy(m.head(h).mT, soft.mT)


LOSSES = [
    plain,
    smoothed,
    weighted,
    shifted_and_capped,
    with_z,
    masked,
    one_text,
    one_token,
    three_dimensions,
    tokens_first,
    wide_labels,
]
# Sums over the vocabulary that are found in one sweep over its tiles.
IN_ONE_SWEEP = [plain, smoothed, shifted_and_capped, with_z, masked, three_dimensions]


def notes(model: SimulatedModel) -> list[str]:
    return [n for f in model.frames for p in f.programs.values() for n in p.notes]


@pytest.mark.parametrize("of", [plain, *slow(*LOSSES[1:])], ids=lambda f: f.__name__)
def test_every_loss_is_tiled_and_equal_to_plain(of):
    model = SimulatedModel(Head(of, True), 2, stage=3, tile_bytes=WHOLE)
    model.check([batch(0, 32), batch(1, 32)], lambda out: 3 * out)
    said = notes(model)
    assert [n for n in said if "tiled: logits of head.weight, their gradient with them in forward:" in n], (
        said
    )
    assert not [n for n in said if "left whole" in n]


@pytest.mark.slow
@pytest.mark.parametrize("of", IN_ONE_SWEEP, ids=lambda f: f.__name__)
def test_in_tiles_of_the_vocabulary_too(of):
    model = SimulatedModel(Head(of, True), 2, stage=3, tile_bytes=CUT)
    model.check([batch(0, 32), batch(1, 32)], lambda out: 3 * out)
    assert [n for n in notes(model) if "tiled: logits of head.weight, summed over the vocabulary" in n]
    assert not [n for n in notes(model) if "left whole" in n or "gathered whole: head" in n], notes(model)


@pytest.mark.slow
@pytest.mark.parametrize("of", [smoothed, *thorough(masked)], ids=lambda f: f.__name__)
def test_compiled_segments_give_the_same(of):
    model = SimulatedModel(Head(of), 2, stage=3, tile_bytes=WHOLE, compute="inductor")
    model.check([batch(0, 32), batch(1, 32)], lambda out: 3 * out)
    assert [n for n in notes(model) if "4 tiles of 16 rows" in n]


@pytest.mark.slow
def test_any_length_once_sizes_are_symbols():
    model = SimulatedModel(Head(masked), 2, stage=3, tile_bytes=WHOLE, dynamic=True)
    for length in (32, 43, 60):
        model.check([batch(0, length), batch(1, length)], lambda out: out)
    assert not [n for n in notes(model) if "left whole" in n]
    assert len(model.frames) == 2


def test_evaluation_is_tiled_too():
    model = SimulatedModel(Head(plain), 2, stage=3, tile_bytes=WHOLE)
    model.check([batch(0, 32), batch(1, 32)])
    assert [n for n in notes(model) if "tiled: logits of head.weight: 4 tiles of 16 rows" in n]


def mixes_tokens(m, h, labels):
    return F.nll_loss(m.head(h).mT.log_softmax(1).cumsum(2), labels)


def returns_all(m, h, labels):
    soft = m.head(h).mT.log_softmax(1)
    return F.nll_loss(soft, labels), soft


def as_an_image(m, h, labels):
    logits = m.head(h).mT.unsqueeze(2).expand(-1, -1, 3, -1)
    return F.cross_entropy(logits, labels[:, None].expand(-1, 3, -1))


def views(m, h, labels):
    """What eager code has in one piece it may view."""
    soft = m.head(h).mT.log_softmax(1)
    return F.nll_loss(soft.view(2, VOCAB, -1), labels) + soft.view(-1)[3]


LEFT = {
    views: "takes the dimensions of tokens apart",
    mixes_tokens: "takes the dimensions of tokens apart",
    returns_all: "takes the dimensions of tokens apart",
    as_an_image: "no log-softmax, log-sum-exp or maximum of them is found",
}


@pytest.mark.slow
@pytest.mark.parametrize("of", LEFT, ids=lambda f: f.__name__)
def test_what_is_left_whole_is_right_and_named(of):
    model = SimulatedModel(Head(of), 2, stage=3, tile_bytes=4 * ROW)
    model.check([batch(0), batch(1)], lambda out: (out[0] if isinstance(out, tuple) else out).sum())
    (why,) = {n for n in notes(model) if "left whole" in n}
    assert LEFT[of] in why


def test_what_is_returned_lies_as_it_does_in_eager_code():
    model = zero.shard(Head(returns_all), device="cpu")
    run = torch.compile(model, backend="zero", options={"compute": "aten", "tile_bytes": 4 * ROW})
    assert run(*batch(0))[1].stride() == Head(returns_all)(*batch(0))[1].stride()


@pytest.mark.slow
def test_time_does_not_grow_with_the_ways_through_what_is_made_of_labels():
    """A chain in which each number is read twice has as many ways as two to the power of its length."""

    def of(m, h, labels):
        weight = labels.clamp(0).float() / 100
        for _ in range(100):
            weight = weight * torch.sigmoid(weight)
        return F.cross_entropy(m.head(h).mT * (1 + weight)[:, None], labels)

    model = SimulatedModel(Head(of), 2, stage=3, tile_bytes=WHOLE)
    model.check([batch(0, 32), batch(1, 32)], lambda out: out)


def test_a_permutation_that_keeps_tokens_together_stays():
    """Nothing is written anew where nothing is to be gained."""

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, x, labels):
            return F.nll_loss(self.head(x).t().log_softmax(0).t(), labels)

    model = SimulatedModel(Columns(), 2, stage=3, tile_bytes=WHOLE)
    given = [(torch.randn(64, WIDTH), torch.randint(0, VOCAB, (64,))) for _ in range(2)]
    model.check(given, lambda out: out)
    assert [n for n in notes(model) if "4 tiles of 16 rows" in n]
