"""What operators hold while they run, measured beside what is counted for them."""

from __future__ import annotations

import gc

import pytest
import torch
from marks import thorough
from torch.fx.experimental.proxy_tensor import make_fx

from zero_compiler.memory.workspaces import workspaces
from zero_compiler.runtime import _C


@pytest.mark.slow
@pytest.mark.parametrize("laid", ["as the query", "rows together"])
@pytest.mark.parametrize("length", [*thorough(100), 256, 800])
def test_attention_holds_what_is_known_of_it(length, laid):
    def attention(q, k, v, grad):
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return (
            out,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, sums, 0.0, True
            ),
        )

    given = [torch.randn(2, length, 4, 64).transpose(1, 2) for _ in range(4)]
    if laid == "rows together":
        given[3] = given[3].contiguous()
    gm = make_fx(attention, tracing_mode="fake")(*given)
    own = workspaces(gm.graph)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, sums = forward(*given[:3], 0.0, True)
    measured = meter_beside(lambda: forward(*given[:3], 0.0, True))
    assert measured == own["_scaled_dot_product_flash_attention_for_cpu"]
    measured = meter_beside(lambda: backward(given[3], *given[:3], out, sums, 0.0, True))
    # Sums of rows are made by each thread as it begins: not all may be there at once.
    rows = torch.get_num_threads() * 256 * 4
    assert measured <= own["_scaled_dot_product_flash_attention_for_cpu_backward"] <= measured + rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_no_more_is_held_than_is_read_and_returned(dtype):
    x, w, grad = (torch.randn(n, m).to(dtype) for n, m in ((192, 256), (320, 256), (192, 320)))
    for a, b in ((x, w.t()), (grad, w), (grad.t(), x)):
        gm = make_fx(torch.mm, tracing_mode="fake")(a, b)
        assert meter_beside(lambda a=a, b=b: torch.mm(a, b)) <= workspaces(gm.graph)["mm"]

    def attention(q, k, v, grad):
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sums, 0.0, True
        )

    aten = torch.ops.aten
    given = [torch.randn(2, 256, 4, 64).to(dtype).transpose(1, 2) for _ in range(4)]
    own = workspaces(make_fx(attention, tracing_mode="fake")(*given).graph)
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, sums = forward(*given[:3], 0.0, True)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert meter_beside(lambda: forward(*given[:3], 0.0, True)) <= own[name]
    assert (
        meter_beside(lambda: backward(given[3], *given[:3], out, sums, 0.0, True)) <= own[f"{name}_backward"]
    )


def test_a_matrix_with_neither_rows_nor_columns_in_one_piece_is_copied():
    a, b = torch.randn(64, 128)[:, ::2], torch.randn(64, 64)
    gm = make_fx(torch.mm, tracing_mode="fake")(a, b)
    assert workspaces(gm.graph)["mm"] == meter_beside(lambda: torch.mm(a, b)) == 64 * 64 * 4


_CONVOLUTIONS = {
    # picture, weight, and what is not as usual
    "weights larger than pictures": ((2, 512, 4, 4), (512, 512, 3, 3), {}),
    "pictures larger than weights": ((4, 16, 64, 64), (16, 16, 3, 3), {}),
    "channels that fill no block": ((4, 3, 33, 35), (7, 3, 3, 3), {}),
    "patches": ((4, 3, 64, 64), (256, 3, 16, 16), {"stride": 16, "padding": 0}),
    "a channel a group": ((4, 64, 32, 32), (64, 1, 3, 3), {"groups": 64}),
    "groups": ((4, 64, 32, 32), (64, 16, 3, 3), {"groups": 4}),
    "apart": ((4, 64, 32, 32), (64, 64, 3, 3), {"stride": 2, "dilation": 2}),
    "one dimension": ((4, 64, 256), (64, 64, 3), {}),
    "three dimensions": ((2, 16, 8, 16, 16), (16, 16, 3, 3, 3), {}),
    "transposed": ((2, 64, 16, 16), (64, 32, 3, 3), {"transposed": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *thorough(torch.float64)], ids=str)
@pytest.mark.parametrize("case", _CONVOLUTIONS)
def test_convolutions_hold_no_more_than_is_counted(case, dtype):
    shape, weight, more = _CONVOLUTIONS[case]
    at = {"stride": 1, "padding": 1, "dilation": 1, "transposed": False, "groups": 1} | more
    each = [[at[k]] * (len(shape) - 2) for k in ("stride", "padding", "dilation")]
    args = (*each, at["transposed"], [0] * (len(shape) - 2), at["groups"])
    made = weight[1] * at["groups"] if at["transposed"] else weight[0]
    x, w, b = (torch.randn(s).to(dtype) for s in (shape, weight, (made,)))

    def forward(x, w, b):
        return torch.ops.aten.convolution(x, w, b, *args)

    def backward(grad, x, w):
        return torch.ops.aten.convolution_backward(grad, x, w, [made], *args, [True] * 3)

    grad = torch.randn_like(forward(x, w, b))
    for name, fn, given in (("", forward, (x, w, b)), ("_backward", backward, (grad, x, w))):
        known = workspaces(make_fx(fn, tracing_mode="fake")(*given).graph)[f"convolution{name}"]
        assert meter_beside(lambda fn=fn, given=given: fn(*given)) <= known


def meter_beside(run) -> int:
    """Most bytes that a call holds beside its results."""
    run()
    _C.meter_install()
    try:
        gc.collect()
        _C.meter_reset_peak()
        before = _C.meter_current()
        kept = run()
        return _C.meter_peak() - (_C.meter_current() if kept is not None else before)
    finally:
        _C.meter_uninstall()
