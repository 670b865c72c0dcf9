"""Numbers of 8 bits in blocks with scales: how far from the truth they may come back, and what they do not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from zero_compiler.quantised_blocks import (
    BLOCK,
    DTYPES,
    blocks_in,
    dequantise,
    pack,
    packed_bytes,
    quantise,
    round_trip,
    unpack,
)

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
both = pytest.mark.parametrize("wire", DTYPES.values(), ids=DTYPES)
SHAPES = [(1, 1), (3, 5), (4, 255), (2, 256), (3, 257), (5, 1000), (7, 3, 3)]


def rows(*shape, scale=1.0, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def bound(x, wire):
    """By how much each number may be off: half a step of 8 bits, and a few roundings of float32."""
    flat = x.float().reshape(x.shape[0], -1)
    out = torch.empty_like(flat)
    for at in range(0, flat.shape[1], BLOCK):
        block = flat[:, at : at + BLOCK]
        most = block.abs().amax(dim=1, keepdim=True)
        # int8: half of most / 127. float8: 3 bits behind the point, and steps of 2**-9 near zero.
        half = most / 254 if wire is INT8 else torch.maximum(block.abs() / 16, most / 448 * 2**-10)
        out[:, at : at + BLOCK] = half * (1 + 1e-5) + block.abs() * 1e-6
    return out.view(x.shape)


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_what_comes_back_is_within_half_a_step(wire, shape, scale):
    x = rows(*shape, scale=scale)
    back = round_trip(x, wire, torch.float32)
    assert (back.shape, back.dtype) == (x.shape, torch.float32)
    assert bool(((back - x).abs() <= bound(x, wire)).all())
    assert not torch.equal(back, x) or x.numel() == 1


@both
def test_the_largest_of_a_block_comes_back_nearly_whole(wire):
    x = rows(6, 700)
    back = round_trip(x, wire, torch.float32)
    for at in range(0, 700, BLOCK):
        most = x[:, at : at + BLOCK].abs().amax(dim=1)
        torch.testing.assert_close(back[:, at : at + BLOCK].abs().amax(dim=1), most, rtol=3e-7, atol=0.0)


@both
def test_zeros_come_back_as_zeros_and_so_does_what_has_no_normal_scale(wire):
    x = torch.zeros(3, 300)
    x[1, 299] = torch.finfo(torch.float32).tiny  # its scale would be subnormal
    x[2, 0] = 1e-45
    assert not round_trip(x, wire, torch.float32).any()


@both
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_no_finite_number_is_nan_and_its_neighbours_are_not(wire, bad):
    x = rows(3, 600)
    x[1, 300] = bad
    back = round_trip(x, wire, torch.float32)
    assert bool(back[1, BLOCK : 2 * BLOCK].isnan().all())
    back[1, BLOCK : 2 * BLOCK] = x[1, BLOCK : 2 * BLOCK] = 0.0
    assert bool(((back - x).abs() <= bound(x, wire)).all())


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_travel_as_what_they_are(wire, dtype):
    x = rows(4, 300).to(dtype)
    back = round_trip(x, wire, dtype)
    assert back.dtype is dtype
    exact = round_trip(x.float(), wire, torch.float32)
    assert torch.equal(back, exact.to(dtype))


@both
def test_neither_other_rows_nor_padding_change_a_row(wire):
    x = rows(9, 300)
    whole = round_trip(x, wire, torch.float32)
    for begin, end in ((0, 1), (2, 7), (8, 9)):
        assert torch.equal(round_trip(x[begin:end], wire, torch.float32), whole[begin:end])
    padded = torch.cat([x, torch.full((3, 300), torch.nan)])
    assert torch.equal(round_trip(padded, wire, torch.float32)[:9], whole)


@both
def test_what_has_travelled_once_travels_unchanged_from_then_on(wire):
    once = round_trip(rows(5, 400), wire, torch.float32)
    torch.testing.assert_close(round_trip(once, wire, torch.float32), once, rtol=1e-6, atol=0.0)


@both
@pytest.mark.parametrize("shape", [*SHAPES, (0, 7)], ids=str)
def test_packed_rows_are_numbers_and_scales(wire, shape):
    x = rows(*shape).flatten(1)
    numel, row = x.numel(), x.shape[1]
    packed = pack(x.view(-1), row, wire)
    assert (
        packed.numel()
        == packed_bytes(numel, row)
        == (numel and (numel + 3) // 4 * 4 + 4 * shape[0] * blocks_in(row))
    )
    out = torch.full((numel,), torch.nan)
    unpack(packed, numel, row, wire, out)
    assert torch.equal(out.view(x.shape), round_trip(x, wire, torch.float32))
    if numel:
        numbers, scales = quantise(x, wire)
        assert torch.equal(dequantise(numbers, scales, torch.float32), out.view(x.shape))


def test_rows_that_are_not_contiguous_travel_as_their_values():
    x = rows(300, 4).t()
    assert torch.equal(round_trip(x, INT8, torch.float32), round_trip(x.contiguous(), INT8, torch.float32))


def test_integers_are_nearest_with_ties_to_even_and_never_minus_128():
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, 126.49]])
    numbers, scales = quantise(x, INT8)
    assert scales.tolist() == [[1.0]]
    assert numbers.tolist() == [[127, -127, 0, 2, -2, 126]]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_changes_nothing(default):
    x = rows(3, 300)
    want = pack(x.view(-1), 300, INT8)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(pack(x.view(-1), 300, INT8), want)
        assert round_trip(x, INT8, torch.float32).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("most", "x"), [(240.0, 120.0), (152.0, 76.0), (204.0, 102.0)])
def test_a_factor_is_rounded_once(most, x):
    """Half of the largest lies between two steps: a factor that is rounded twice takes the other one than the engine."""
    by = np.float32(127) / np.float32(most)
    (numbers,), _ = quantise(torch.tensor([[most, x]], dtype=torch.bfloat16), INT8)
    assert numbers.tolist() == [127, int(np.rint(np.float32(x) * by))]


@both
def test_short_rows_are_not_made_longer(wire, monkeypatch):
    """Rows of an embedding may be far shorter than a block."""
    wide = []
    pad = functional.pad
    monkeypatch.setattr(
        functional, "pad", lambda rows, by: wide.append(pad(rows, by).numel()) or pad(rows, by)
    )
    round_trip(rows(64, 16), wire, torch.float32)
    assert wide == [64 * 16, 64 * 16]
