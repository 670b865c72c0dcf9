"""Logits and loss tile by tile: the numbers of plain PyTorch, what never exists, and what is left whole."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from harness import SimulatedModel
from heads import LOSSES, VOCAB, WIDTH, Head, batch, flat
from marks import slow, thorough
from null.graphs import head_graph, lower, lower_joint
from null.passes.tiling.test_expand_tiles import tiled_head
from torch import nn

import zero_compiler as zero
from zero_compiler.ir import dump


class Goldens(TestCase):
    def test_tile_loss(self):
        self.assertExpectedInline(
            dump.text(tiled_head(40).graph),
            """\
%w.shard = input                                                         f32[3,4]                        +48  live 48
%x = input                                                               f32[6,4]                        +96  live 144
%tangents_1 = input                                                      f32[]                            +4  live 148
%w_full = zero.unshard %w.shard [w]                                      f32[5,4]                        +80  live 180
%t_default = aten.t %w_full                                              f32[4,5]                             live 180
%full_default = aten.full [], 1, dtype=float32, device=cpu               f32[]                            +4  live 184
%tiled_default = zero.tiled [%x, %w_full, %full_default, %t_default], 'loss0' (f32[], f32[6,4], f32[5,4])       +180  live 184
%getitem = getitem %tiled_default, 0                                     f32[]                                live 184
%getitem_1 = getitem %tiled_default, 1                                   f32[6,4]                             live 184
%getitem_2 = getitem %tiled_default, 2                                   f32[5,4]                             live 184
%mul_tensor_2 = aten.mul.Tensor %getitem_2, %tangents_1                  f32[5,4]                        +80  live 264
%reduce_grad_default = zero.reduce_grad %mul_tensor_2 [w]                f32[3,4]                        +48  live 232
%mul_tensor_1 = aten.mul.Tensor %getitem_1, %tangents_1                  f32[6,4]                        +96  live 324
return %getitem, %mul_tensor_1, %reduce_grad_default
""",
        )


ROW = VOCAB * 4  # bytes of the logits of a token
TILE = (
    17 * ROW
)  # not less than the weight of the head, which else is gathered in tiles: see test_vocabulary.py
# bf16 products of a tile are rounded once each, and their sum over tiles once.
TOL = {"upcast": 2 * torch.finfo(torch.bfloat16).eps}


def notes(model: SimulatedModel) -> list[str]:
    return [n for f in model.frames for p in f.programs.values() for n in p.notes]


@pytest.mark.parametrize("tile_bytes", [1, 2 * ROW, 1 << 40])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_passes_keep_the_numbers(world, tile_bytes):
    b = head_graph(world=world)
    want = b.by_markers(b.graph)
    lower_joint(b, tile_bytes=tile_bytes)
    got = b.by_reference(lower(b, "forward"), "forward")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [*thorough(False), True])
@pytest.mark.parametrize("of", LOSSES)
def test_every_loss_is_tiled_and_equal_to_plain(of, bias):
    model = SimulatedModel(Head(of, bias), 2, stage=3, tile_bytes=TILE)
    tol = TOL.get(of, 1e-5)
    model.check([batch(0, 32), batch(1, 32)], lambda out: 3 * out, rtol=tol, atol=tol)
    assert [
        n for n in notes(model) if "tiled: logits of head.weight, their gradient with them in forward:" in n
    ], notes(model)
    assert not [n for n in notes(model) if "left whole" in n]
    assert [g.names for g in model.programs["backward"].gathers if "head.weight" in g.names] == []


@pytest.mark.slow
@pytest.mark.parametrize("of", ["weighted", *thorough("plain", "shifted-and-capped", "with-z", "smoothed")])
def test_compiled_segments_give_the_same(of):
    model = SimulatedModel(Head(of, True), 2, stage=3, tile_bytes=TILE, compute="inductor")
    model.check([batch(0, 32), batch(1, 32)], lambda out: 3 * out)
    assert [n for n in notes(model) if "4 tiles of 16 rows" in n]


@pytest.mark.parametrize("stage", [*slow(0, 2), 3])
def test_tied_ends_at_every_stage(stage):
    model = SimulatedModel(Head("shifted", tied=True), 2, stage=stage, tile_bytes=TILE)
    model.check([batch(0, 32), batch(1, 32)], lambda out: out)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["with-z", *thorough("plain", "shifted")])
def test_any_length_once_sizes_are_symbols(of):
    model = SimulatedModel(Head(of), 2, stage=3, tile_bytes=TILE, dynamic=True)
    frames = []
    for length in (32, 43, 60, 70, 35):
        model.check([batch(0, length), batch(1, length)], lambda out: out)
        frames.append(len(model.frames))
    # Of two sequences: four tiles hold 68 tokens, eight 136, and then there are sixteen.
    assert frames == [1, 2, 2, 3, 3]
    assert 0 < max(at_a_time(model)) <= TILE


def at_a_time(model: SimulatedModel) -> list[int]:
    """Bytes of logits that the tiles of every graph make at a time."""
    said = [re.search(r"tiled: logits .* rows, ([\d,]+) bytes at a time", n) for n in notes(model)]
    return [int(m[1].replace(",", "")) for m in said if m is not None]


@pytest.mark.slow
def test_as_many_texts_as_tokens_once_sizes_are_symbols():
    """Dynamo takes equal sizes for one symbol, and the number of tokens for its square."""
    model = SimulatedModel(Head(), 2, stage=3, tile_bytes=TILE, dynamic=True)
    for size in (6, 8):
        given = [tuple(t[:, :size].repeat(size, 1)[:size] for t in batch(rank, 32)) for rank in range(2)]
        model.check(given, lambda out: out)
    assert [n for n in notes(model) if "tiled: logits" in n], notes(model)
    assert len(model.frames) == 1


def test_evaluation_is_tiled_too():
    model = SimulatedModel(Head(), 2, stage=3, tile_bytes=TILE)
    model.check([batch(0, 32), batch(1, 32)])
    assert [
        n
        for n in notes(model)
        if f"tiled: logits of head.weight: 4 tiles of 16 rows, 3,904 bytes at a time, for tile_bytes={TILE:,}; "
        "saves 11,712 bytes" in n
    ]


@pytest.mark.slow
def test_which_collectives_run_does_not_depend_on_sizes():
    for tile_bytes in (1 << 30, ROW, None):
        seen = set()
        for length in (2, 64):
            model = SimulatedModel(Head(), 2, stage=3, tile_bytes=tile_bytes)
            model.check([batch(0, length), batch(1, length)], lambda out: out)
            seen.add("\n".join(p.collectives() for p in model.programs.values()))
        assert len(seen) == 1


@pytest.mark.slow
def test_tiles_have_equal_segments():
    counts = set()
    for tiles in (4, 16):
        model = SimulatedModel(Head(bias=True), 1, stage=3, tile_bytes=16 // tiles * ROW)
        model.check([batch(0)], lambda out: out)
        counts.add(len(model.programs["forward"].segments))
    assert len(counts) == 1


@pytest.mark.slow
def test_peak_falls_by_the_logits():
    """Whole: logits, their log-softmax and gradient of n tokens are there at once, 3 n V in all, or more. In tiles of
    r: 3 r V, and the gradients of hidden states and weight, which are made in forward (n H + V H)."""
    n, r = 512, 8
    peaks = {}
    for tile in (n, r):
        model = SimulatedModel(Head(), 1, stage=3, tile_bytes=tile * ROW)
        model.check([batch(0, n // 2)], lambda out: out)
        peaks[tile] = max(max(p.live) for p in model.programs.values())
    saved = 3 * (n - r) * VOCAB * 4 - 2 * (n + VOCAB) * WIDTH * 4
    assert peaks[n] - peaks[r] >= saved


@pytest.mark.slow
def test_a_budget_makes_tiles_smaller():
    def plan(**fields):
        model = SimulatedModel(Head(), 1, stage=3, **fields)
        model.check([batch(0, 256)], lambda out: out)
        (note,) = (n for n in notes(model) if "tiled: logits" in n)
        return note, zero.inspect(model.model).memory

    whole, small = (plan(tile_bytes=rows * ROW) for rows in (512, 32))
    assert "1 tiles of 512 rows" in whole[0]
    assert small[1].peak < whole[1].peak
    note, memory = plan(tile_bytes=512 * ROW, memory_budget_bytes=small[1].peak)
    assert "16 tiles of 32 rows" in note
    assert memory.peak == small[1].peak


def test_how_often_the_largest_logit_is_right():
    def with_accuracy(m, h, labels):
        logits = m.head(h)
        right = logits.argmax(-1) == labels
        return F.cross_entropy(flat(logits), labels.view(-1)), right.float().mean()

    model = SimulatedModel(Head(with_accuracy), 2, stage=3, tile_bytes=TILE)
    model.check([batch(0, 32), batch(1, 32)], lambda out: out[0])
    assert [n for n in notes(model) if "tiled: logits of head.weight" in n], notes(model)


# What is left whole ------------------------------------------------------------------------------------------


def returns_logits(m, h, labels):
    logits = m.head(h)
    return F.cross_entropy(flat(logits), labels.view(-1)), logits


def mixes_tokens(m, h, labels):
    logits = m.head(h)
    return F.nll_loss(flat(logits.log_softmax(-1).cumsum(1)), labels.view(-1))


def multiplies_again(m, h, labels):
    soft = m.head(h).log_softmax(-1).exp() @ m.embed.weight
    return soft.square().mean()


def uses_all_and_some(m, h, labels):
    logits = m.head(h)
    z = (torch.logsumexp(logits, -1) ** 2).mean()
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)) + z


def returns_each(m, h, labels):
    return F.cross_entropy(flat(m.head(h)), labels.view(-1), reduction="none")


def needs_the_mean_first(m, h, labels):
    each = F.cross_entropy(flat(m.head(h)), labels.view(-1), reduction="none")
    return (each - each.mean()).square().sum()


def two_slices(m, h, labels):
    """As long as each other: tokens before and after one."""
    logits = m.head(h)
    before = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
    return before + F.cross_entropy(logits[:, 1:].reshape(-1, VOCAB), labels[:, :-1].reshape(-1))


def two_lengths(m, h, labels):
    """As models write it that predict several tokens."""
    logits = m.head(h)
    one = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
    return one + F.cross_entropy(logits[:, :-2].reshape(-1, VOCAB), labels[:, 2:].reshape(-1))


LEFT = {
    two_slices: "tokens are sliced in two ways",
    two_lengths: "tokens are sliced in two ways",
    returns_logits: "the logits are returned: return the loss alone from what is compiled",
    mixes_tokens: "nothing is known of how aten.cumsum.default treats tokens",
    multiplies_again: "multiplies them again in forward",
    uses_all_and_some: "tokens that are sliced away are used too",
    returns_each: "the loss is not reduced to one number inside of what is compiled",
    needs_the_mean_first: "its gradient is a sum of several that cannot be told apart in forward",
}


@pytest.mark.slow
@pytest.mark.parametrize("of", LEFT, ids=lambda f: f.__name__)
def test_what_is_left_whole_is_right_and_named(of):
    model = SimulatedModel(Head(of), 2, stage=3, tile_bytes=4 * ROW)
    model.check([batch(0), batch(1)], lambda out: (out[0] if isinstance(out, tuple) else out).sum())
    (why,) = {n for n in notes(model) if "left whole" in n}
    assert "left whole: f32[16,61], logits of head.weight, because" in why
    assert LEFT[of] in why


def looks_up_the_first_tokens(m, h, labels):
    return -m.head(h).log_softmax(-1).gather(-1, labels[:, 1:].clamp(0)[..., None]).sum()


def looks_up_some(m, h, labels):
    return -flat(m.head(h)).log_softmax(-1).gather(1, labels.view(-1)[:5].clamp(0)[:, None]).sum()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("of", [looks_up_the_first_tokens, looks_up_some], ids=lambda f: f.__name__)
def test_an_index_of_fewer_tokens_names_the_first_ones(of, train):
    """As torch has it. In tiles every tile would have its own first ones."""
    model = SimulatedModel(Head(of), 1, stage=3, tile_bytes=4 * ROW)
    model.check([batch(0)], (lambda out: out) if train else None)
    (why,) = {n for n in notes(model) if "left whole" in n}
    assert "aten.gather.default reads some of the tokens alone" in why


def squeezes_both(m, h, labels):
    """The first of the two dimensions has all tokens, and stays."""
    logp = flat(m.head(h)).log_softmax(-1)
    return -logp.gather(1, labels.view(-1, 1).clamp(0)).squeeze((0, 1)).mean()


def test_tiles_of_one_token_keep_their_dimension():
    for rows in (1, 3):  # sixteen tokens in tiles of three: the last one has one
        model = SimulatedModel(Head(squeezes_both), 1, stage=3, tile_bytes=rows * ROW)
        model.check([batch(0)], lambda out: out)
        assert [n for n in notes(model) if "tiled: logits" in n], notes(model)


class Labelled(nn.Module):
    """Tokens with a label alone go on, as many as there are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, h, labels):
        keep = labels >= 0
        h = h[keep]
        return F.cross_entropy(self.head(h + self.down(torch.relu(self.up(h)))), labels[keep])


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_as_many_tokens_as_data_say_are_whole(train):
    torch._dynamo.reset()
    gen = torch.Generator().manual_seed(0)
    plain = Labelled()
    model = zero.shard(copy.deepcopy(plain), device="cpu", stage=3, tile_bytes=4 * ROW)
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.set_grad_enabled(train):
        for count in (5, 11):
            labels = torch.randint(0, VOCAB, (16,), generator=gen)
            labels[count:] = -100
            h = torch.randn(16, WIDTH, generator=gen)
            want, got = plain(h, labels), run(h, labels)
            torch.testing.assert_close(got, want)
            if train:
                want.backward()
                got.backward()
    said = [n for f in zero.inspect(model).frames for p in f.programs.values() for n in p.notes]
    assert [
        n for n in said if "logits of head.weight, because how many tokens there are depends on data" in n
    ], said
    for p, q in zip(model.parameters(), plain.parameters(), strict=True) if train else ():
        torch.testing.assert_close(p.grad._local_tensor, q.grad)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["plain", "smoothed", "gathered"])
def test_nothing_but_ignored_labels(of):
    model = SimulatedModel(Head(of), 1, stage=3, tile_bytes=4 * ROW)
    ids, labels = batch(0)
    given = [(ids, torch.full_like(labels, -100))]
    want, grads, _ = model.eager(given, lambda out: out)
    torch.testing.assert_close(model.step(given, lambda out: out), want, equal_nan=True)
    assert torch.isnan(want[0])
    for name, row in model.rows[0].items():
        torch.testing.assert_close(row.grad, grads[name], equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


_AFTERWARDS = {
    "nan_to_num": torch.nan_to_num,
    "where": lambda loss: torch.where(loss.isnan(), 0.0, loss),
    "squared": lambda loss: loss**2,
    "over itself": lambda loss: loss / loss.detach(),
    "focal": lambda loss: (1 - torch.exp(-loss)) ** 2 * loss,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nan_to_num", "squared", *thorough("where", "over itself", "focal")])
@pytest.mark.parametrize("tile_bytes", [None, 4 * ROW])
def test_nothing_but_ignored_labels_before_more_is_made_of_the_loss(how, tile_bytes):
    class After(Head):
        def forward(self, ids, labels):
            return _AFTERWARDS[how](super().forward(ids, labels))

    model = SimulatedModel(After("plain"), 1, stage=3, tile_bytes=tile_bytes)
    ids, labels = batch(0)
    for given in ([(ids, torch.full_like(labels, -100))], [(ids, labels)]):
        want, grads, _ = model.eager(given, lambda out: out)
        torch.testing.assert_close(model.step(given, lambda out: out), want, equal_nan=True)
        for name, row in model.rows[0].items():
            assert torch.isfinite(grads[name]).all()
            torch.testing.assert_close(row.grad, grads[name])
    assert notes(model)


def by_softmax_and_log(m, h, labels):
    return -m.head(h).softmax(-1).log().gather(-1, labels.clamp(0)[..., None]).mean()


def binary(m, h, labels):
    return F.binary_cross_entropy_with_logits(m.head(h), F.one_hot(labels.clamp(0), VOCAB).float())


def by_angle(m, h, labels):
    logits = F.linear(F.normalize(h, dim=-1), F.normalize(m.head.weight, dim=-1))
    return (logits - F.one_hot(labels.clamp(0), VOCAB)).square().mean()


def by_einsum(m, h, labels):
    logits = torch.einsum("btd,vd->btv", h, m.head.weight)
    return (logits.sigmoid() - F.one_hot(labels.clamp(0), VOCAB)).square().mean()


NOT_KNOWN = [by_softmax_and_log, binary, by_angle, by_einsum]


@pytest.mark.slow
@pytest.mark.parametrize("of", NOT_KNOWN, ids=lambda f: f.__name__)
def test_a_head_that_is_not_recognised_is_right_and_named(of):
    model = SimulatedModel(Head(of), 2, stage=3, tile_bytes=8 * ROW)
    model.check([batch(0), batch(1)], lambda out: out.square().sum())
    (why,) = {n for n in notes(model) if "logits" in n}
    assert "left whole: f32[" in why
    assert "logits of head.weight, because no log-softmax, log-sum-exp or maximum of them is found" in why


def by_angle_and_softmax(m, h, labels):
    logits = 8 * F.linear(F.normalize(h, dim=-1), F.normalize(m.head.weight, dim=-1))
    return F.cross_entropy(flat(logits), labels.view(-1))


@pytest.mark.slow
@pytest.mark.parametrize("tile_bytes", [8 * ROW, 1000])
def test_a_weight_that_is_computed(tile_bytes):
    """It is whole, and the logits are in tiles."""
    model = SimulatedModel(Head(by_angle_and_softmax), 2, stage=3, tile_bytes=tile_bytes)
    model.check([batch(0, 32), batch(1, 32)], lambda out: 3 * out)
    assert [n for n in notes(model) if "tiled: logits of head.weight, their gradient" in n], notes(model)
    assert 0 < max(at_a_time(model)) <= tile_bytes


def test_what_a_model_returns_may_be_no_logits():
    model = SimulatedModel(Head(lambda m, h, labels: m.head(h)), 2, stage=3, tile_bytes=8 * ROW)
    model.check([batch(0), batch(1)], lambda out: out.square().sum())
    assert not [n for n in notes(model) if "logits" in n]


def test_what_is_made_at_once_by_a_head_that_is_not_recognised_is_no_matter():
    model = SimulatedModel(Head(binary), 2, stage=3, tile_bytes=1 << 40)
    model.check([batch(0), batch(1)], lambda out: out)
    assert not [n for n in notes(model) if "logits" in n]


def test_float16_keeps_what_a_scaled_loss_saves_from_rounding():
    """One in 4,096 tokens has a gradient that float16 rounds to a hundredth of itself, unless the loss is scaled."""

    def in_half(m, h, labels):
        logits = F.linear(h.half(), m.head.weight.half())
        return F.cross_entropy(flat(logits.float()), labels.view(-1))

    model = SimulatedModel(Head(in_half), 1, stage=3, tile_bytes=TILE)
    given = [batch(0, 2048)]
    _, grads, _ = model.eager(given, lambda out: out * 2**16)
    model.step(given, lambda out: out * 2**16)
    want = grads["head.weight"]
    off = (model.rows[0]["head.weight"].grad - want).norm() / want.norm()
    assert off < torch.finfo(torch.float16).eps
    assert [n for n in notes(model) if "needs the factor that the loss is scaled by" in n], notes(model)


def test_in_evaluation_too():
    model = SimulatedModel(Head(needs_the_mean_first), 2, stage=3, tile_bytes=4 * ROW)
    model.check([batch(0), batch(1)])
    (why,) = (n for n in notes(model) if "left whole" in n)
    assert "must be known before, and needs the sum over all tokens" in why


def test_a_head_that_is_narrower_than_its_input_is_no_matter():
    model = SimulatedModel(nn.Sequential(nn.Linear(16, 5), nn.LogSoftmax(-1)), 2, stage=3, tile_bytes=1)
    model.check([(torch.randn(4, 16),)] * 2, lambda out: out.sum())
    assert not [n for n in notes(model) if "logits" in n]
