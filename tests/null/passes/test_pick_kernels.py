"""Large float32 products go to the faster library, where one was measured."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from expecttest import TestCase
from null.graphs import (
    Build,
    aten,
    check_numbers,
    lower,
    names_of,
)
from torch import nn

import zero_compiler as zero
from zero_compiler.cost import hardware
from zero_compiler.cost.cost import CostModel
from zero_compiler.ir import dump, ops


class Goldens(TestCase):
    def test_pick_kernels(self):
        b = three_products()
        graph = lower(b, "forward", "pick-kernels", **ON)
        text = dump.text(graph)
        self.assertExpectedInline(
            text[text.index("%permute") :],
            """\
%permute_default_1 = aten.permute %onednn_linear_default, [1, 0]         f32[16,16]                           live 2240
%onednn_linear_default_1 = zero.onednn_linear %t_default, %permute_default_1, None f32[16,16]                    +1024  live 3264
%mm_default_1 = aten.mm %onednn_linear_default, %w                       f32[16,2]                      +128  live 1152
return %onednn_linear_default_1, %mm_default_1
""",
        )


# Launches take as long as the BLAS takes for 1,000 operations, so products below 2,000 stay with it.
MACHINE = dataclasses.replace(
    hardware.load("laptop"),
    matmul_flops_per_us={"float32": 1000.0},
    onednn_flops_per_us={"float32": 2000.0},
    kernel_us=0.2,
)
ON = {"machine": MACHINE, "kernels": True}


def three_products(rows: int = 16, **kw) -> Build:
    """With a bias, with a transposed view of a weight, and a small one."""
    b = Build(b=(16,), v=(16, 16), w=(16, 2), **kw)
    x = b.input("x", rows, 16)
    first = b.op(aten.addmm.default, b.weight("b"), x, b.op(aten.permute.default, b.weight("v"), [1, 0]))
    second = b.op(aten.mm.default, b.op(aten.t.default, first), first)
    small = b.op(aten.mm.default, first, b.weight("w"))
    b.done(second, small)
    return b


@pytest.mark.parametrize("world", [1, 2, 3])
def test_numbers(world):
    check_numbers(three_products(world=world), "forward", **ON)


def count(build: Build, **fields) -> int:
    return names_of(lower(build, "forward", "pick-kernels", **fields)).count("zero.onednn_linear")


def test_small_products_stay():
    assert count(three_products(rows=16), **ON) == 2
    assert count(three_products(rows=2), **ON) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"machine": MACHINE},  # the user wants torch's own
        {"kernels": True},  # nothing is known of the machine
        {"kernels": True, "machine": dataclasses.replace(MACHINE, onednn_flops_per_us={})},
        {"kernels": True, "machine": dataclasses.replace(MACHINE, onednn_flops_per_us={"float32": 900.0})},
        {"kernels": True, "machine": dataclasses.replace(MACHINE, onednn_flops_per_us={"float32": 1100.0})},
    ],
)
def test_nothing_changes_without_a_faster_library(fields):
    assert count(three_products(), **fields) == 0


def test_what_both_libraries_copy_counts_for_both():
    """Of 16 rows 8.2 us by the BLAS, and 5.1 by oneDNN with its launches: with 20 us of copies it is clearly faster,
    with 40 it is not."""
    for share, chosen in ((0.0, 2), (2.0, 2), (4.0, 0)):
        machine = dataclasses.replace(MACHINE, memory_bytes_per_us=307.2, matmul_traffic=share)
        assert count(three_products(rows=16), kernels=True, machine=machine) == chosen


def test_left_alone():
    b = Build(w=(32, 32))
    x = b.input("x", 32, 32)
    w = b.weight("w")
    scaled = b.op(aten.addmm.default, x, x, w, beta=2)
    added = b.op(aten.addmm.default, x, x, w)
    half = b.op(aten.mm.default, *(b.op(aten.to.dtype, n, torch.bfloat16) for n in (x, w)))
    b.done(scaled, added, half)
    assert count(b, **ON) == 0


def test_the_report_says_so():
    b = three_products()
    program, _ = b.program(lower(b, "forward", **ON), "forward")
    assert [n for n in program.notes if "2 of 3 float32 matrix products go to oneDNN" in n]


def test_cost():
    graph = lower(three_products(), "forward", "pick-kernels", **ON)
    (first, *_) = graph.find_nodes(op="call_function", target=ops.onednn_linear)
    cost = CostModel(dataclasses.replace(MACHINE, memory_bytes_per_us=1e9))
    assert cost.flops(first) == 2 * 16**3
    assert cost._arithmetic_us(first) == pytest.approx(2 * 16**3 / 2000)


@pytest.mark.slow
def test_trains_as_plain_pytorch_does(tmp_path):
    torch._dynamo.reset()
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.to_json())
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False))
    ours = zero.shard(copy.deepcopy(plain), device="cpu", hardware=str(path))
    compiled = torch.compile(ours, backend="zero")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]
    for rows in (32, 32, 48, 40):  # further sizes: the batch is symbolic
        x = torch.randn(rows, 64)
        for call, opt in zip((plain, compiled), optimizers, strict=True):
            call(x).square().mean().backward()
            opt.step()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad.to_local(), p.grad, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(q.to_local(), p, rtol=1e-5, atol=1e-6)
        for opt in optimizers:
            opt.zero_grad()
    notes = [n for f in zero.inspect(compiled).frames for p in f.programs.values() for n in p.notes]
    assert any("oneDNN" in n for n in notes)
