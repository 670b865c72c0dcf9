"""Operators with weights that are too large to be gathered whole: the numbers of plain PyTorch, and what never exists."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from harness import SimulatedModel
from marks import slow, thorough
from null.graphs import (
    Build,
    aten,
    check_numbers,
    linear_graph,
    lower,
)
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import VerifyError
from zero_compiler.ir import dump, facts
from zero_compiler.layout import Layout, tiled_rows
from zero_compiler.memory.verify import verify_program
from zero_compiler.passes import TileOperators
from zero_compiler.plan.tiling import tile_rows


class Goldens(TestCase):
    def test_tile_operators(self):
        b = Build(world=2, tile_rows={"w": 1}, w=(4, 3))
        x = b.input("x", 2, 3)
        b.done(b.op(aten.mm.default, x, b.op(aten.t.default, b.weight("w"))))
        self.assertExpectedInline(
            dump.text(lower(b, "forward", "tile-operators")),
            """\
%w_shard = input                                                         f32[2,3]                        +24  live 0
%x = input                                                               f32[2,3]                        +24  live 24
%cut_default = zero.cut                                                                                       live 24
%empty_memory_format = aten.empty.memory_format [2, 4], dtype=float32, device=cpu f32[2,4]                        +32  live 56
%view_default = aten.view %empty_memory_format, [2, 2, 2]                f32[2,2,2]                           live 56
%split_tensor = aten.split.Tensor %view_default, 1, 2                    (f32[2,2,1], f32[2,2,1])             live 56
%getitem_1 = getitem %split_tensor, 0                                    f32[2,2,1]                           live 56
%getitem_2 = getitem %split_tensor, 1                                    f32[2,2,1]                           live 56
%w.full = zero.gather [w] tile 1 of 2                                    (f32[2,3])                      +24  live 80
%w = zero.wait %w.full                                                   (f32[2,3])                           live 80
%t_default_1 = aten.t %w                                                 f32[3,2]                             live 80
%mm_default_1 = aten.mm %x, %t_default_1                                 f32[2,2]                        +16  live 72
%cut_default_1 = zero.cut                                                                                     live 72
%view_default_1 = aten.view %mm_default_1, [2, 2, 1]                     f32[2,2,1]                           live 72
%copy__default = aten.copy_ %getitem_1, %view_default_1                  f32[2,2,1]                           live 56
%cut_default_2 = zero.cut                                                                                     live 56
%w.full_2 = zero.gather [w] tile 2 of 2                                  (f32[2,3])                      +24  live 80
%w_2 = zero.wait %w.full_2                                               (f32[2,3])                           live 80
%t_default_2 = aten.t %w_2                                               f32[3,2]                             live 80
%mm_default_2 = aten.mm %x, %t_default_2                                 f32[2,2]                        +16  live 48
%cut_default_3 = zero.cut                                                                                     live 48
%view_default_2 = aten.view %mm_default_2, [2, 2, 1]                     f32[2,2,1]                           live 48
%copy__default_1 = aten.copy_ %getitem_2, %view_default_2                f32[2,2,1]                           live 32
%cut_default_4 = zero.cut                                                                                     live 32
%cut_default_5 = zero.cut                                                                                     live 32
return %empty_memory_format
""",
        )


@pytest.mark.parametrize("form", ["linear", "mm", "conv1d"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("world", "out"), [(1, 8), (2, 8), (2, 7), (3, 7), (4, 9)])
def test_a_linear_layer_in_tiles_keeps_the_numbers(world, out, rows, form):
    check_numbers(linear_graph(world, rows, form, out, inner=out), "forward")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_trial_writes_nothing_for_tiles_that_it_leaves_out(phase):
    """Not even a view of an operand: a weight may be in thousands of tiles."""
    nodes = []
    for rows in (16, 64):
        b = Build(world=2, tile_rows={"w": 1}, w=(2 * rows, 6))
        x = b.input("x", 4, 6)
        if phase == "forward":
            b.done(b.op(aten.mm.default, x, b.op(aten.t.default, b.weight("w"))))
        else:
            g = b.input("tangents_1", 4, 2 * rows)
            b.done(
                b.reduced("w", b.op(aten.mm.default, b.op(aten.t.default, g), x)),
                b.op(aten.mm.default, g, b.weight("w")),
            )
        nodes.append(len(lower(b, phase, some_tiles=True).nodes))
    assert nodes[0] == nodes[1]


def test_the_output_is_not_written_anew_for_each_gradient():
    """It has as many as the model has parameters: all of them together would take their square."""
    b = Build(world=2, tile_rows={"w": 1}, w=(8, 6))
    g, x = b.input("tangents_1", 4, 8), b.input("x", 4, 6)
    b.done(b.reduced("w", b.op(aten.mm.default, b.op(aten.t.default, g), x)))
    graph = lower(b, "backward", "clone-escapes")
    (output,) = graph.find_nodes(op="output")
    (before,) = output.args
    (last,) = output.all_input_nodes
    TileOperators().run(graph, b.context("backward"))
    assert output.args[0] is before
    assert facts.tile(last.args[0].args[0]).last


def test_some_of_many_tiles_tell_what_all_take():
    """The first two and the last: a trial of a large model would write out thousands."""
    gathers, bytes_ = [], []
    for some in (False, True):
        b = Build(world=2, tile_rows={"w": 1}, w=(32, 6))
        b.done(b.op(aten.mm.default, b.input("x", 4, 6), b.op(aten.t.default, b.weight("w"))))
        program, _ = b.program(lower(b, "forward", some_tiles=some), "forward")
        gathers.append([g.tile.index for g in program.gathers])
        bytes_.append((max(program.live), program.buffer_bytes))
    assert gathers == [list(range(16)), [0, 1, 15]]
    assert bytes_[0] == bytes_[1]


# Whole models ------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Every operator with a weight that is known, under any number of rows."""

    def __init__(self, rows: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(rows, 6, padding_idx=1)
        self.conv = nn.Conv1d(6, rows, 3, padding=1)
        self.up = nn.Linear(rows, 4 * rows)
        self.norm = nn.LayerNorm(4 * rows)
        self.down = nn.Linear(4 * rows, rows, bias=False)
        self.experts = nn.Parameter(torch.randn(rows, rows, 3) / 4)
        self.frozen = nn.Linear(3, rows)
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        x = x + self.down(F.gelu(self.norm(self.up(x))))
        x = torch.bmm(x.transpose(0, 1)[: self.experts.shape[0]], self.experts)
        return self.frozen(x)


def ids(rank: int, rows: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, rows, (batch, rows), generator=torch.Generator().manual_seed(rank))


def notes(model: SimulatedModel) -> list[str]:
    return [n for f in model.frames for p in f.programs.values() for n in p.notes]


def run(world: int, rows: int = 12, tol: float = 1e-5, **fields) -> SimulatedModel:
    model = SimulatedModel(Layers(rows), world, bucket_bytes=0, **fields)
    given = [(ids(r, rows),) for r in range(world)]
    model.check(given, lambda out: out.square().sum(), rtol=tol, atol=tol)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "rows", "tile_bytes"),
    [
        (2, 11, 96),
        *slow((3, 13, 96), (4, 12, 96), (2, 12, 250)),
        *thorough((2, 12, 96), (2, 11, 250), (3, 13, 250), (4, 12, 250)),
    ],
)
def test_every_operator_equals_plain(world, rows, tile_bytes):
    model = run(world, rows, stage=3, tile_bytes=tile_bytes)
    assert not [n for n in notes(model) if "whole" in n]
    for program in model.programs.values():
        for g in (g for g in program.gathers if len(g.shapes[0]) > 1):
            # One row a rank is the least that can be gathered.
            row = g.chunk_numels[0] // (g.shapes[0][0] // world) * world * 4
            assert sum(g.chunk_numels) * world * 4 <= max(tile_bytes, row)
    tiled = {r.names[0] for r in model.programs["backward"].reduces if r.tile}
    assert {"embed.weight", "conv.weight", "up.weight", "down.weight", "experts"} <= tiled
    assert "frozen.weight" not in tiled


class Batched(nn.Module):
    """A ``bmm`` whose weight has its rows along one dimension of it: experts, or rows or columns of the result, or what is
    summed over."""

    def __init__(self, along: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = along
        self.weight = nn.Parameter(torch.randn(11, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        if self.along == "experts":
            return torch.bmm(x.expand(11, 4, 3), w)
        w = w.permute(1, 0, 2)  # [3, 11, 5]
        if self.along == "rows":
            return torch.bmm(w, x.expand(3, 4, 5).transpose(1, 2))
        if self.along == "columns":
            return torch.bmm(x.expand(3, 4, 5), w.transpose(1, 2))
        return torch.bmm(x.expand(3, 4, 11), w)


@pytest.mark.slow
@pytest.mark.parametrize("along", ["experts", "rows", "columns", "sum"])
def test_a_bmm_whichever_dimension_the_rows_lie_along(along):
    model = SimulatedModel(Batched(along), 2, stage=3, bucket_bytes=0, tile_bytes=120)
    size = {"experts": 3, "rows": 5, "columns": 5, "sum": 11}[along]
    gen = torch.Generator().manual_seed(1)
    given = [(torch.randn(1, 4, size, generator=gen, requires_grad=True),) for _ in range(2)]
    model.check(given, lambda out: out.square().sum())
    assert not [n for n in notes(model) if "whole" in n]
    assert all(any(g.tile for g in p.gathers) for p in model.programs.values())


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", [nn.Conv2d, *slow(nn.Conv3d)])
def test_convolutions_by_output_channel(kind, last):
    torch.manual_seed(0)
    conv = kind(3, 11, 3, padding=1, stride=2)
    model = SimulatedModel(conv, 2, stage=3, bucket_bytes=0, tile_bytes=700)
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, *[6] * (conv.weight.dim() - 2), generator=gen)
    if last:
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    model.check([(x,), (2 * x,)], lambda out: out.square().sum())
    whole = [n for n in notes(model) if "whole" in n]
    if last:
        assert all("gathered whole: weight" in n and n.endswith("is not contiguous") for n in whole)
    assert bool(whole) == last
    assert any(r.tile for r in model.programs["backward"].reduces)


def test_what_is_laid_and_gradients_of_weights_are_the_same_sums():
    """Bit for bit, where a column of the result, and a row of the gradient, is computed as it is without tiles.

    Of numbers that float32 adds up exactly: how a library sums for another shape of the product is its own affair.
    """
    torch.manual_seed(0)
    net = nn.Linear(8, 24, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.randint(-8, 8, net.weight.shape))
    given = [
        (torch.randint(-8, 8, (16, 8), generator=torch.Generator().manual_seed(r)).float(),) for r in range(2)
    ]
    seen = []
    for tile_bytes in (None, 128):
        model = SimulatedModel(net, 2, stage=3, tile_bytes=tile_bytes)
        out = model.step(given, lambda y: y.sum())
        seen.append([*out, *(rows["weight"].grad for rows in model.rows)])
    assert any(g.tile for g in model.programs["forward"].gathers)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*slow(1), 2])
def test_tiles_are_kept_at_no_stage(stage):
    model = run(2, stage=stage, tile_bytes=300)
    for program in model.programs.values():
        assert {g.names[0] for g in program.gathers if g.tile} & {"up.weight", "down.weight"}
        assert not [g for g in program.gathers if g.tile and g.kept]


@pytest.mark.slow
def test_compiled_segments_give_the_same():
    model = run(2, stage=3, tile_bytes=250, compute="inductor")
    assert not [n for n in notes(model) if "whole" in n]


class Indexed(nn.Module):
    """A table whose rows are counted from its end, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(11, 6))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table[rows]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_rows_that_are_counted_from_the_end(world):
    model = SimulatedModel(Indexed(), world, stage=3, bucket_bytes=0, tile_bytes=96)
    given = [(torch.arange(-11, 11)[r:],) for r in range(world)]
    model.check(given, lambda out: out.square().sum())
    assert [r for r in model.programs["backward"].reduces if r.tile]


@pytest.mark.parametrize("row", [-1, 11])
def test_a_row_that_there_is_not_is_an_error(row):
    """Of 11 rows on 2 ranks the second has one of padding, which is no row of the table."""
    model = SimulatedModel(nn.Embedding(11, 6), 2, stage=3, bucket_bytes=0, tile_bytes=96)
    with pytest.raises(IndexError, match="out of range"):
        model.step([(torch.tensor([3, row]),)] * 2)


# Rules -------------------------------------------------------------------------------------------------------


def layout(rows: int, world: int, width: int = 10) -> Layout:
    return Layout((rows, width), torch.float32, world, sharded=True)


@pytest.mark.parametrize(
    ("rows", "world", "limit", "want"),
    [
        (64, 2, None, 0),
        (64, 2, 64 * 40, 0),  # it fits
        (64, 2, 64 * 40 - 1, 16),
        (64, 2, 1, 1),  # a row a rank at least
        (64, 2, 11 * 80, 8),  # equal tiles where that takes less than twice as many
        (62, 2, 10 * 80, 10),  # 31 rows a rank: none are equal
        (2, 2, 1, 0),  # a row a rank: there is nothing to cut
        (64, 1, 1, 0),  # nothing is gathered
    ],
)
def test_rows_of_a_tile(rows, world, limit, want):
    assert tile_rows(layout(rows, world), torch.float32, far=False, limit_bytes=limit) == want


def test_tiles_of_what_is_cast_and_of_what_rests_in_files():
    one = layout(4096, 1, 1024)
    assert tile_rows(one, torch.bfloat16, far=False, limit_bytes=1 << 20) == 512
    odd = layout(4096, 1, 100)  # 400 bytes a row: 256 rows are 25 blocks of 4096 bytes
    assert tile_rows(odd, torch.float32, far=True, limit_bytes=1) == 256
    assert tile_rows(odd, torch.float32, far=True, limit_bytes=300_000) == 512


@pytest.mark.parametrize(("rows", "world"), [(12, 2), (11, 2), (13, 4), (5, 4)])
def test_every_row_is_in_one_tile(rows, world):
    lay = layout(rows, world)
    for size in range(1, lay.chunk_rows + 1):
        seen = []
        for begin in range(0, lay.chunk_rows, size):
            each = min(size, lay.chunk_rows - begin)
            for theirs, ours in tiled_rows(lay, begin * 10, world * each):
                assert theirs.stop - theirs.start == ours.stop - ours.start <= each
                seen += range(theirs.start, theirs.stop)
        assert sorted(seen) == list(range(rows))


class Wide(nn.Module):
    def __init__(self, inner: int = 6, hidden: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(inner, hidden), nn.Linear(hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def wide(batch: int = 4, size: tuple[int, int] = (6, 48), **fields) -> SimulatedModel:
    model = SimulatedModel(Wide(*size), 2, stage=3, bucket_bytes=0, **fields)
    gen = torch.Generator().manual_seed(1)
    given = [(torch.randn(batch, size[0], generator=gen),) for _ in range(2)]
    model.check(given, lambda out: out.square().mean(), atol=1e-5)
    return model


@pytest.mark.slow
def test_tiles_have_equal_segments():
    counts = []
    for rows in (12, 3):
        model = wide(tile_bytes=2 * rows * 6 * 4)
        assert {
            len([g for g in p.gathers if g.names == ("up.weight",)]) for p in model.programs.values()
        } <= {
            0,  # nobody asks for the gradient of the input
            24 // rows,
        }
        counts.append([len(p.segments) for p in model.programs.values()])
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_which_collectives_run_does_not_depend_on_the_batch():
    # Inductor would take the products of a single row apart.
    seen = set()
    for batch in (1, 5):
        model = wide(batch, tile_bytes=2 * 6 * 6 * 4, compute="inductor")
        seen.add("\n".join(p.collectives() for p in model.programs.values()))
    assert len(seen) == 1
    assert "gather up.weight, tile 2 of 4" in next(iter(seen))


@pytest.mark.slow
def test_any_batch_once_sizes_are_symbols():
    model = SimulatedModel(Wide(), 2, stage=3, bucket_bytes=0, tile_bytes=288, dynamic=True)
    for batch in (4, 7, 30):
        model.check([(torch.randn(batch, 6),)] * 2, lambda out: out.square().sum())
    assert len(model.frames) <= 2
    assert not [n for n in notes(model) if "whole" in n]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "compute"), [*slow((1, "aten")), (2, "aten"), *slow((3, "aten"), (2, "inductor"))]
)
def test_half_precision_gives_what_whole_weights_give(world, compute):
    """Products are rounded once, sums over tiles once: as those of whole weights are."""
    found = []
    for tile_bytes in (1 << 30, 120):
        model = SimulatedModel(
            Wide(),
            world,
            stage=3,
            bucket_bytes=0,
            tile_bytes=tile_bytes,
            param_dtype=torch.bfloat16,
            compute=compute,
        )
        gen = torch.Generator().manual_seed(1)
        model.step(
            [(torch.randn(4, 6, generator=gen),) for _ in range(world)], lambda out: out.square().sum()
        )
        found.append([row.grad.clone() for rows in model.rows for row in rows.values()])
        assert bool([g for p in model.programs.values() for g in p.gathers if g.tile]) == (tile_bytes == 120)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(
            a, b, rtol=4 * torch.finfo(torch.bfloat16).eps, atol=0.02 * b.abs().max().item()
        )


def test_under_autocast_a_cast_is_made_of_the_tile():
    class Cast(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    model = SimulatedModel(Cast(), 2, stage=3, bucket_bytes=0, tile_bytes=120)
    tol = 4 * torch.finfo(torch.bfloat16).eps
    model.check([(torch.randn(4, 6),)] * 2, lambda out: out.square().mean(), rtol=tol, atol=tol)
    assert not [n for n in notes(model) if "whole" in n]


@pytest.mark.slow
def test_a_budget_tiles_the_largest_weights():
    def plan(**fields):
        model = wide(size=(32, 4096), **fields)
        tiled = {g.names[0] for p in model.programs.values() for g in p.gathers if g.tile}
        return tiled, zero.inspect(model.model).memory.peak

    none, whole = plan()
    some, small = plan(tile_bytes=1 << 17)
    assert (none, some) == (set(), {"up.weight", "down.weight"})
    assert small < whole
    assert plan(memory_budget_bytes=whole) == (set(), whole)
    tiled, peak = plan(memory_budget_bytes=(small + whole) // 2)
    assert tiled
    assert peak <= (small + whole) // 2


def test_the_report_names_what_why_and_what_it_costs():
    said = [n for n in notes(wide(tile_bytes=2 * 6 * 6 * 4)) if "tiled:" in n]
    assert [
        n for n in said if "aten.addmm with up.weight: 4 tiles of 6 rows a rank, 288 bytes at a time" in n
    ], said
    assert [n for n in said if "for tile_bytes=288; saves 864 bytes; costs" in n]
    assert [n for n in said if "gradient of up.weight: 4 tiles" in n]


@pytest.mark.slow
def test_the_verifier_sees_a_tile_of_a_gradient_that_is_left_out():
    model = run(2, stage=3, tile_bytes=300)
    program = model.programs["backward"]
    worlds = {model.sharded_model.key: 2}
    verify_program(program, worlds)
    k, first = next((k, r) for k, r in enumerate(program.reduces) if r.tile and r.tile.index == 1)
    program.reduces[k] = replace(first, tile=replace(first.tile, begin=first.tile.begin + 1))
    with pytest.raises(VerifyError, match=r"tile 2 of \d+ begins at element \d+: it is not the next one"):
        verify_program(program, worlds)
    program.reduces[k] = replace(first, tile=None)
    with pytest.raises(VerifyError, match="tile 1 of .*: the whole of it is reduced already"):
        verify_program(program, worlds)


# What is left whole ------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A weight that is multiplied before it is used, and one that is returned."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.scale = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.rand(8, 1))
        self.returns = returns

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.returns:
            return F.linear(x, self.weight), self.weight
        return (F.linear(x, self.weight * self.scale),)


@pytest.mark.parametrize(("returns", "why"), [(False, "aten.mul.Tensor reads it"), (True, "it is returned")])
def test_what_is_left_whole_is_right_and_named(returns, why):
    model = SimulatedModel(Scaled(returns), 2, stage=3, bucket_bytes=0, tile_bytes=64)
    model.check([(torch.randn(4, 6),)] * 2, lambda out: sum(o.sum() for o in out))
    assert [n for n in notes(model) if f"gathered whole: weight, 192 bytes, because {why}" in n], notes(model)


@pytest.mark.slow
def test_convolutions_of_symbolic_sizes_in_half_precision():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(6, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3))
    model = zero.shard(copy.deepcopy(plain), device="cpu", tile_bytes=256, param_dtype="bf16")
    step = torch.compile(model, backend="zero", dynamic=True, options={"compute": "aten"})
    for rows in (2, 3):
        x = torch.randn(rows, 6, 8, 8)
        got, want = step(x), plain(x)
        torch.testing.assert_close(got.float(), want, rtol=5e-2, atol=5e-2)
        got.float().square().mean().backward()
