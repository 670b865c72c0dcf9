"""Logits and loss in tiles of the head's weight: the numbers of plain PyTorch, what never exists, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from harness import SimulatedModel
from heads import LOSSES, VOCAB, WIDTH, Head, batch, flat
from marks import slow, thorough
from null.graphs import Build, head_graph, lower, lower_joint
from null.passes.tiling.test_tile_loss import TOL, notes
from torch import nn

import zero_compiler as zero
from zero_compiler.ir import dump

TILE = 800  # bytes: 12 rows of 61 in each of two tiles, and so many tokens


def tiled(world: int, rows: int, tile_bytes: int) -> Build:
    b = head_graph(world=world, tile_rows={"w": rows})
    lower_joint(b, tile_bytes=tile_bytes)
    return b


@pytest.mark.parametrize("tile_bytes", [1, 40, 1 << 40])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_passes_keep_the_numbers(world, rows, tile_bytes):
    b = head_graph(world=world)
    want = b.by_markers(b.graph)
    b = tiled(world, rows, tile_bytes)
    got = b.by_reference(lower(b, "forward"), "forward")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


class Golden(TestCase):
    def test_joint_graph(self):
        self.assertExpectedInline(
            dump.text(tiled(2, 1, 40).graph),
            """\
%w.shard = input                                                         f32[3,4]                        +48  live 48
%x = input                                                               f32[6,4]                        +96  live 144
%tangents_1 = input                                                      f32[]                            +4  live 148
%w_full = zero.unshard %w.shard [w]                                      f32[5,4]                        +80  live 180
%t_default = aten.t %w_full                                              f32[4,5]                             live 180
%iota_default = prims.iota 5, start=1, step=1, dtype=int64, device=cpu, requires_grad=False i64[5]                          +40  live 220
%tiled_default = zero.tiled [%iota_default, %x, %t_default], 'loss0.sums' (f32[6,1])                      +24  live 244
%getitem = getitem %tiled_default, 0                                     f32[6,1]                             live 244
%squeeze_dim = aten.squeeze.dim %getitem, 1                              f32[6]                               live 244
%unsqueeze_default_2 = aten.unsqueeze %squeeze_dim, 1                    f32[6,1]                             live 244
%expand_default_1 = aten.expand %tangents_1, [6]                         f32[6]                               live 244
%unsqueeze_default_3 = aten.unsqueeze %expand_default_1, 1               f32[6,1]                             live 244
%tiled_default_1 = zero.tiled [%iota_default, %x, %t_default, %unsqueeze_default_2, %unsqueeze_default_3, %w_full], 'loss0.grads' (f32[6,4], f32[5,4])           +176  live 200
%getitem_1 = getitem %tiled_default_1, 0                                 f32[6,4]                             live 200
%getitem_2 = getitem %tiled_default_1, 1                                 f32[5,4]                             live 200
%reduce_grad_default = zero.reduce_grad %getitem_2 [w]                   f32[3,4]                        +48  live 248
%sum_default_1 = aten.sum %squeeze_dim                                   f32[]                            +4  live 228
return %sum_default_1, %getitem_1, %reduce_grad_default
""",
        )

    def test_a_tile_of_the_gradient(self):
        text = dump.text(lower(tiled(2, 1, 1 << 40), "forward", "expand-tiles")).splitlines()
        first = next(i for i, line in enumerate(text) if "zero.reduce" in line)
        self.assertExpectedInline(
            "\n".join(text[first - 14 : first + 2]),
            """\
%gt_scalar_3 = aten.gt.Scalar %view_default_8, 0                         b8[2]                            +2  live 334
%full_default_5 = aten.full [], 0.0, dtype=float32, device=cpu           f32[]                            +4  live 338
%view_default_9 = aten.view %gt_scalar_3, [1, 2]                         b8[1,2]                              live 338
%t_default_5 = aten.t %w_4                                               f32[4,2]                             live 338
%mm_default_6 = aten.mm %x, %t_default_5                                 f32[6,2]                        +48  live 386
%sub_tensor_10 = aten.sub.Tensor %mm_default_6, %unsqueeze_default_2     f32[6,2]                        +48  live 386
%exp_default_10 = aten.exp %sub_tensor_10                                f32[6,2]                        +48  live 386
%mul_tensor_1 = aten.mul.Tensor %unsqueeze_default_3, %exp_default_10    f32[6,2]                        +48  live 386
%where_self_3 = aten.where.self %view_default_9, %mul_tensor_1, %full_default_5 f32[6,2]                        +48  live 380
%t_default_6 = aten.t %where_self_3                                      f32[2,6]                             live 380
%cut_default_14 = zero.cut                                                                                    live 380
%addmm__default = aten.addmm_ %full_default_4, %where_self_3, %w_4       f32[6,4]                             live 348
%mm_default_7 = aten.mm %t_default_6, %x                                 f32[2,4]                        +32  live 332
%cut_default_15 = zero.cut                                                                                    live 332
%w.sum = zero.reduce %mm_default_7 tile 1 of 3                           (f32[3,4])                      +48  live 348
%cut_default_16 = zero.cut                                                                                    live 348""",
        )


def check(model: SimulatedModel, of: str = "plain", length: int = 8, scale: float = 3.0) -> SimulatedModel:
    tol = TOL.get(of, 1e-5)
    model.check([batch(r, length) for r in range(model.world)], lambda out: scale * out, rtol=tol, atol=tol)
    return model


def parts_of(model: SimulatedModel, name: str = "head.weight") -> dict[str, tuple[int, int]]:
    """Tiles of a weight that are gathered in each phase, and reduced."""
    return {
        phase: (
            sum(name in g.names and g.tile is not None for g in p.gathers),
            sum(name in r.names and r.tile is not None for r in p.reduces),
        )
        for phase, p in model.programs.items()
    }


@pytest.mark.parametrize("bias", [*thorough(False), True])
@pytest.mark.parametrize("of", LOSSES)
@pytest.mark.slow
def test_every_loss_equals_plain(of, bias):
    model = check(SimulatedModel(Head(of, bias), 2, stage=3, tile_bytes=TILE), of)
    said = notes(model)
    assert not [n for n in said if "whole" in n], said
    tiles = parts_of(model)
    assert tiles["forward"] == (tiles["backward"][0], 0)
    assert tiles["backward"][0] == tiles["backward"][1] > 1


@pytest.mark.parametrize("of", ["plain", *slow("smoothed", "shifted-and-capped")])
@pytest.mark.parametrize("stage", [*slow(2), 3])
@pytest.mark.slow
def test_a_tied_embedding(stage, of):
    model = check(SimulatedModel(Head(of, tied=True), 2, stage=stage, tile_bytes=TILE), of)
    assert not [n for n in notes(model) if "whole" in n]
    gathered, reduced = parts_of(model, "embed.weight")["backward"]
    assert (
        gathered == 2 * reduced
    )  # once for the input's gradient, once for that which is added to the embedding's


@pytest.mark.parametrize("world", [*slow(1, 3), 4])
@pytest.mark.slow
def test_any_number_of_ranks(world):
    check(SimulatedModel(Head("weighted", True), world, stage=3, tile_bytes=TILE), "weighted")


@pytest.mark.slow
@pytest.mark.parametrize("of", ["shifted-and-capped", *thorough("weighted", "with-z")])
def test_compiled_segments_give_the_same(of):
    model = check(SimulatedModel(Head(of, True), 2, stage=3, tile_bytes=TILE, compute="inductor"), of)
    said = notes(model)
    assert [n for n in said if "tiled: logits of head.weight, summed over the vocabulary" in n], said
    assert not [n for n in said if "head.weight" in n and "whole" in n], said


@pytest.mark.slow
def test_any_length_once_sizes_are_symbols():
    model = SimulatedModel(Head("shifted"), 2, stage=3, tile_bytes=TILE, dynamic=True)
    for length in (8, 11, 30):
        check(model, length=length)
    assert len(model.frames) <= 3  # one more each time that tiles of tokens have to double
    assert not [n for n in notes(model) if "whole" in n]


def test_evaluation_sweeps_once():
    model = SimulatedModel(Head(), 2, stage=3, tile_bytes=TILE)
    model.check([batch(0), batch(1)])
    (said,) = (n for n in notes(model) if "tiled: logits" in n)
    assert "tiled: logits of head.weight, summed over the vocabulary" in said
    assert set(parts_of(model)) == {"inference"}


@pytest.mark.slow
def test_frozen_weights_and_frozen_inputs():
    for name in ("head", "embed"):
        head = Head()
        getattr(head, name).requires_grad_(False)
        model = check(SimulatedModel(head, 2, stage=3, tile_bytes=TILE))
        assert not [n for n in notes(model) if "head.weight" in n and "whole" in n]


@pytest.mark.slow
def test_two_losses_of_one_head():
    """Each has its own sweeps, and a tile of the weight's gradient is their sum."""

    def twice(m, h, labels):
        again = F.cross_entropy(flat(m.head(h.flip(0))), labels.flip(0).view(-1))
        return F.cross_entropy(flat(m.head(h)), labels.view(-1)) + again / 2

    model = check(SimulatedModel(Head(twice), 2, stage=3, tile_bytes=TILE))
    assert not [n for n in notes(model) if "whole" in n]
    gathered, reduced = parts_of(model)["backward"]
    assert gathered == 4 * reduced  # for each loss, one for the input's gradient and one for the weight's


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.slow
def test_half_precision_gives_what_whole_weights_give(world):
    """Logits are bfloat16, what is summed over tiles is float32."""
    found = []
    for tile_bytes in (1 << 30, TILE // 2):
        model = SimulatedModel(
            Head("smoothed"), world, stage=3, tile_bytes=tile_bytes, param_dtype=torch.bfloat16
        )
        (out, *_) = model.step([batch(r) for r in range(world)], lambda out: out)
        found.append([out, *(row.grad.clone() for rows in model.rows for row in rows.values())])
        assert (parts_of(model)["forward"][0] > 1) == (tile_bytes < 1 << 30)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(
            a, b, rtol=4 * torch.finfo(torch.bfloat16).eps, atol=0.02 * b.abs().max().item()
        )


@pytest.mark.thorough
@pytest.mark.slow
def test_a_tied_embedding_in_compiled_segments():
    model = SimulatedModel(Head(tied=True), 2, stage=3, tile_bytes=TILE, compute="inductor")
    check(model)
    assert not [n for n in notes(model) if "whole" in n]


def summed_before_a_write(m, h, labels):
    """Logits are read for the result alone, which comes behind all writes to inputs."""
    out = F.cross_entropy(flat(m.head(h)) + m.prior, labels.view(-1), reduction="sum")
    m.prior.mul_(3.0)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("tile_bytes", [TILE, WIDTH * VOCAB * 4])
def test_what_is_written_to_later_is_read_before(train, tile_bytes):
    """In tiles of as many bytes as the weight has, that is whole, and tokens are in tiles alone."""
    net = Head(summed_before_a_write)
    net.register_buffer("prior", torch.linspace(0, 1, VOCAB))
    model = SimulatedModel(net, 2, stage=3, tile_bytes=tile_bytes)
    given = [batch(rank, 32) for rank in range(2)]
    if train:
        model.check(given, lambda out: out)
    else:
        want = [copy.deepcopy(net)(*given[rank]).detach() for rank in range(2)]
        torch.testing.assert_close(model.step(given), want, rtol=1e-5, atol=1e-5)
    assert any("logits" in n for n in notes(model))


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["aten", *slow("inductor")])
@pytest.mark.parametrize("label", [-1, VOCAB])
def test_a_label_that_is_no_word_is_an_error(label, compute):
    model = SimulatedModel(Head(), 2, stage=3, tile_bytes=TILE, compute=compute)
    ids, labels = batch(0)
    labels[1, 3] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        model.step([(ids, labels)] * 2)


@pytest.mark.slow
def test_logits_of_minus_infinity():
    """Words that are forbidden, all of a tile of them, and targets among the others."""

    def forbidding(m, h, labels):
        logits = m.head(h) + torch.where(torch.arange(VOCAB) < 45, 0.0, float("-inf"))
        return F.cross_entropy(flat(logits), labels.view(-1) % 45)

    check(SimulatedModel(Head(forbidding), 2, stage=3, tile_bytes=TILE))


@pytest.mark.slow
def test_which_collectives_run_does_not_depend_on_sizes():
    seen = set()
    for length in (2, 64):
        model = check(SimulatedModel(Head(), 2, stage=3, tile_bytes=TILE), length=length)
        seen.add("\n".join(p.collectives() for p in model.programs.values()))
    assert len(seen) == 1


# Memory ------------------------------------------------------------------------------------------------------


class Large(nn.Module):
    """A head whose weight is larger than all else."""

    def __init__(self, rows: int = 4096, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.head = nn.Linear(width, rows, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.first(x))), labels)


def large(**fields) -> SimulatedModel:
    model = SimulatedModel(Large(), 2, stage=3, bucket_bytes=0, **fields)
    gen = torch.Generator().manual_seed(3)
    given = [
        (torch.randn(16, 64, generator=gen), torch.randint(0, 4096, (16,), generator=gen)) for _ in range(2)
    ]
    model.check(given, lambda out: out)
    return model


@pytest.mark.slow
def test_peak_falls_by_the_weight_and_its_gradient():
    """Whole: the weight, and its gradient, which forward makes. In ``n`` tiles: at most three tiles of the weight (in
    use, arriving, staged) and three of the gradient (being made, two under way), beside this rank's half of it."""
    weight = 4096 * 64 * 4
    peaks, segments = [], []
    for tile_bytes in (weight, weight // 8, weight // 32):
        model = large(tile_bytes=tile_bytes)
        peaks.append(max(max(p.live) for p in model.programs.values()))
        segments.append([len(p.segments) for p in model.programs.values()])
    assert segments[1] == segments[2]  # all tiles share what they compile to
    for peak, n in zip(peaks[1:], (8, 32), strict=True):
        assert peaks[0] - peak >= 2 * weight - weight // 2 - 6 * weight // n


@pytest.mark.slow
def test_a_budget_asks_for_it():
    def plan(**fields):
        model = large(**fields)
        return parts_of(model), zero.inspect(model.model).memory.peak

    whole, small = plan(tile_bytes=1 << 30), plan(tile_bytes=1 << 17)
    assert small[1] < whole[1]
    tiles, peak = plan(memory_budget_bytes=small[1] + (1 << 17))
    assert tiles["forward"][0] > 1
    assert peak <= small[1] + (1 << 17)


# What is gathered whole --------------------------------------------------------------------------------------


def entropy(m, h, labels):
    logits = flat(m.head(h))
    p = logits.log_softmax(-1)
    return F.nll_loss(p, labels.view(-1)) + (p.exp() * p).sum(-1).mean()


def soft(m, h, labels):
    targets = torch.ones(labels.numel(), VOCAB).cumsum(0)
    return -(flat(m.head(h)).log_softmax(-1) * targets).mean()


REFUSED = {
    soft: "%cumsum, as large as the logits, is made elsewhere",
    entropy: "aten.mul.Tensor is summed over the vocabulary, and is known only when another such sum is",
}


def adds_one_column(m, h, labels):
    """What is added has more columns than the index: torch reads the first."""
    logp = flat(m.head(h)).log_softmax(-1)
    at = labels.view(-1).clamp(0)[:, None]
    return -(torch.zeros_like(logp).scatter_add(-1, at, logp.detach()) * logp).sum() / 3


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("tile_bytes", [TILE, 4 * VOCAB * 4])
def test_what_is_added_at_labels_and_not_read_is_not_added(tile_bytes, train):
    model = SimulatedModel(Head(adds_one_column), 2, stage=3, tile_bytes=tile_bytes)
    model.check([batch(0), batch(1)], (lambda out: out) if train else None)


@pytest.mark.parametrize("of", REFUSED, ids=lambda f: f.__name__)
@pytest.mark.slow
def test_what_is_gathered_whole_is_right_and_named(of):
    model = check(SimulatedModel(Head(of), 2, stage=3, tile_bytes=TILE), scale=1.0)
    why = f"gathered whole: head.weight, 3,904 bytes, because {REFUSED[of]}"
    assert [n for n in notes(model) if why in n], notes(model)
    assert [
        n for n in notes(model) if "tiled: logits of head.weight, their gradient with them in forward" in n
    ]


@pytest.mark.slow
def test_a_weight_that_backward_reads_whole():
    class Kept(Head):
        def __init__(self) -> None:
            super().__init__(kept)
            self.scale = nn.Parameter(torch.ones(()))

    def kept(m, h, labels):
        logits = flat(m.head(h))
        return F.cross_entropy(logits, labels.view(-1)) + (m.scale * m.head.weight.detach()).square().mean()

    model = check(SimulatedModel(Kept(), 2, stage=3, tile_bytes=TILE))
    assert [n for n in notes(model) if "gathered whole: head.weight" in n], notes(model)


@pytest.mark.slow
def test_a_weight_whose_rows_are_no_words():
    class Turned(Head):
        def __init__(self) -> None:
            super().__init__(lambda m, h, labels: F.cross_entropy(flat(h @ m.turned), labels.view(-1)))
            self.turned = nn.Parameter(self.head.weight.detach().t().clone())
            del self.head

    model = check(SimulatedModel(Turned(), 2, stage=3, tile_bytes=TILE))
    why = "gathered whole: turned, 3,904 bytes, because its rows are not the vocabulary"
    assert [n for n in notes(model) if why in n], notes(model)
