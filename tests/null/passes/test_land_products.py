"""Gradients that rest in files are made where they are written from."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json

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
from null.passes.test_pick_kernels import MACHINE
from torch import nn

import zero_compiler as zero
from zero_compiler.ir import dump, ops
from zero_compiler.ir.instructions import Reduce
from zero_compiler.storage import aio, writeback_buffers


class Goldens(TestCase):
    def test_land_products(self):
        graph = lower(gradients(), "backward", "land-products")
        text = dump.text(graph)
        self.assertExpectedInline(
            text[text.index("%g = input") :],
            """\
%g = input                                                               f32[4,512]                    +8192  live 16384
%t_default = aten.t %g                                                   f32[512,4]                           live 16384
%land_mm_default = zero.land_mm %t_default, %x, 'm'                      f32[512,512]               +1048576  live 1064960
%t_default_1 = aten.t %x                                                 f32[512,4]                           live 1064960
%land_mm_default_1 = zero.land_mm %t_default_1, %g, 'm'                  f32[512,512]               +1048576  live 2105344
%t_default_2 = aten.t %land_mm_default_1                                 f32[512,512]                         live 2105344
%t_default_3 = aten.t %t_default_2                                       f32[512,512]                         live 2105344
%sum_dim_int_list = aten.sum.dim_IntList %g, [0]                         f32[512]                      +2048  live 2099200
%b.sum = zero.reduce %sum_dim_int_list                                   (f32[512])                    +2048  live 2099200
%v.sum = zero.reduce %land_mm_default                                    (f32[512,512])             +1048576  live 2099200
%w.sum = zero.reduce %t_default_3                                        (f32[512,512])             +1048576  live 2099200
%b.grad = zero.wait %b.sum                                               (f32[512])                           live 2099200
%v.grad = zero.wait %v.sum                                               (f32[512,512])                       live 2099200
%w.grad = zero.wait %w.sum                                               (f32[512,512])                       live 2099200
return %b.grad, %v.grad, %w.grad
""",
        )


SIDE = 512  # a square of float32 is 1 MiB, the least that lands so


def gradients(
    world: int = 1, tier: tuple[str, ...] = ("nvme",), side: int = SIDE, rows: int = 4, **kw
) -> Build:
    """Of a weight by a product, of another by way of a transposition and back, and of a bias."""
    b = Build(world, b=(side,), v=(side, side), w=(side, side), **kw)
    b.plans = {ref: dataclasses.replace(p, grad_path=tier) for ref, p in b.plans.items()}
    x, g = b.input("x", rows, side), b.input("g", rows, side)
    gt = b.op(aten.t.default, g)
    v = b.op(aten.mm.default, gt, x)
    w = b.op(aten.mm.default, b.op(aten.t.default, x), g)
    w = b.op(aten.t.default, b.op(aten.t.default, w))
    bias = b.op(aten.sum.dim_IntList, g, [0])
    b.done(b.reduced("b", bias), b.reduced("v", v), b.reduced("w", w))
    return b


def count(build: Build) -> int:
    return names_of(lower(build, "backward", "land-products")).count("zero.land_mm")


@pytest.mark.parametrize("world", [1, 2])
def test_numbers(world):
    check_numbers(gradients(world), "backward")


def test_products_land():
    b = gradients()
    program, _ = b.program(lower(b, "backward"), "backward")
    assert names_of(b.graph).count("zero.land_mm") == 2
    assert sorted(n for r in program.reduces for n in r.direct) == ["v", "w"]
    assert type(program).from_dict(program.to_dict()) == program


@pytest.mark.parametrize(
    "fields",
    [
        {"world": 2},
        {"tier": ()},
        {"tier": ("nvme", "host")},
        {"side": SIDE - 8},
        {"gather_dtype": torch.bfloat16},
        {"gather_dtype": torch.bfloat16, "summed": torch.float32},
    ],
    ids=str,
)
def test_left_alone(fields):
    if "gather_dtype" in fields:
        summed = {"reduce_dtype": fields.pop("summed")} if "summed" in fields else {}
        b = Build(1, w=(SIDE, SIDE), **fields)
        b.plans = {ref: dataclasses.replace(p, grad_path=("nvme",), **summed) for ref, p in b.plans.items()}
        x, g = (b.op(aten.to.dtype, b.input(n, 4, SIDE), torch.bfloat16) for n in "xg")
        b.done(b.reduced("w", b.op(aten.mm.default, b.op(aten.t.default, g), x)))
    else:
        b = gradients(**fields)
    assert count(b) == 0


@pytest.mark.parametrize("also", ["is returned", "is read", "is no product", "lies otherwise"])
def test_so_is_what_may_not_land(also):
    b = Build(1, w=(SIDE, SIDE))
    b.plans = {ref: dataclasses.replace(p, grad_path=("nvme",)) for ref, p in b.plans.items()}
    x, g = b.input("x", SIDE, SIDE), b.input("g", SIDE, SIDE)
    w = b.op(aten.mm.default, x, g)
    grad, more = w, []
    if also == "is returned":
        more = [w]
    elif also == "is read":
        more = [b.op(aten.sum.default, b.op(aten.t.default, w))]
    elif also == "is no product":
        grad = b.op(aten.add.Tensor, w, g)
    else:
        grad = b.op(aten.t.default, w)
    b.done(b.reduced("w", grad), *more)
    assert count(b) == 0


FASTER = dataclasses.replace(
    MACHINE,
    matmul_flops_per_us={"float32": 1e5},
    onednn_flops_per_us={"float32": 1.2e5},
    memory_bytes_per_us=1e4,
    kernel_us=1.0,
)


@pytest.mark.parametrize(("rows", "lands"), [(4, 2), (4096, 0)])
def test_what_another_library_makes_is_left_to_it(rows, lands):
    """Where it is faster, wherever the gradient rests: two libraries add in two orders."""
    for tier in (("nvme",), ()):
        graph = lower(
            gradients(rows=rows, tier=tier), "backward", "pick-kernels", machine=FASTER, kernels=True
        )
        assert names_of(graph).count("zero.land_mm") == (lands if tier else 0)
        assert names_of(graph).count("zero.onednn_linear") == 2 - lands


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_files_change_no_bit_where_another_library_is_faster(tmp_path, one_thread):
    """At 500 rows it is, by less than a copy of the gradient takes. On one thread both add in orders of their own."""
    spec = tmp_path / "machine.json"
    spec.write_text(json.dumps(FASTER.to_dict()))
    x, losses = torch.randn(500, SIDE, generator=torch.Generator().manual_seed(5)), []
    for fields in ({"offload_grads": "none"}, ALL | {"offload_grads": "nvme"}):
        _, ours = model_in_files(tmp_path, **fields, hardware=str(spec))
        run, optimizer = torch.compile(ours, backend="zero"), zero.optimizer(torch.optim.Adam, ours)
        losses.append([])
        for _ in range(4):
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def model_in_files(tmp_path, **fields):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(SIDE, 2 * SIDE), nn.GELU(), nn.Linear(2 * SIDE, SIDE, bias=False))
    fields = {"offload_grads": "nvme"} | fields
    ours = zero.shard(copy.deepcopy(plain), device="cpu", nvme_dir=str(tmp_path), **fields)
    return plain, ours


def assert_same_gradients(plain, ours, **tolerance):
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad.to_local(), p.grad, **({"rtol": 0, "atol": 0} | tolerance))


X = torch.randn(8, SIDE, generator=torch.Generator().manual_seed(5))
ALL = {"offload_params": "nvme", "offload_optimizer": "nvme"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, ALL, {"nvme_checksums": True}, {"tile_bytes": 1 << 20}],
    ids=["grads", "all", "sums", "tiles"],
)
def test_trains_as_plain_pytorch_does(fields, tmp_path, monkeypatch):
    """Bit by bit, with gradients of one backward, of two that are added, and that were kept for later. In tiles the
    gradient of the activations between both layers is summed tile by tile, in another order."""
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if "tile_bytes" in fields else {}
    landed, write = [], writeback_buffers.Landing.write
    monkeypatch.setattr(
        writeback_buffers.Landing,
        "write",
        lambda self, *a: (landed.append(self.made_here(a[1])), write(self, *a))[1],
    )
    plain, ours = model_in_files(tmp_path, **fields)
    run = torch.compile(ours, backend="zero", options={"compute": "aten"})
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    optimizer = zero.optimizer(torch.optim.AdamW, ours, fused=True)
    for how in ("once", "once", "twice", "kept", "once"):
        if how == "kept":
            with zero.no_sync(ours):
                run(X).square().mean().backward()
            plain(X).square().mean().backward()
        elif how == "twice":
            for call in (run, plain):
                call(X * 2).square().mean().backward()
        loss, want = run(X).square().mean(), plain(X).square().mean()
        torch.testing.assert_close(loss, want, **({"rtol": 0, "atol": 0} | tolerance))
        loss.backward()
        want.backward()
        assert_same_gradients(plain, ours, **tolerance)
        for o in (optimizer, theirs):
            o.step()
            o.zero_grad()
        if how == "once":
            assert landed.count(True) >= 2
        landed.clear()
    (frame,) = zero.inspect(run).frames
    backward = frame.programs["backward"]
    assert {
        n for i in backward.instrs if isinstance(i, Reduce) for n in backward.reduces[i.index].direct
    } == {
        "0.weight",
        "2.weight",
    }


@pytest.mark.thorough
def test_by_inductor_too(tmp_path):
    plain, ours = model_in_files(tmp_path)
    run = torch.compile(ours, backend="zero")
    for _ in range(2):
        for m in (run, plain):
            m(X).square().mean().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad.to_local(), p.grad, rtol=1e-5, atol=1e-6)
            p.grad = q.grad = None
    for p in ours.parameters():
        assert p.grad is None


def test_hooks_see_the_gradient(tmp_path):
    plain, ours = model_in_files(tmp_path)
    run, seen = torch.compile(ours, backend="zero", options={"compute": "aten"}), []
    ours[0].weight.register_hook(lambda g: seen.append(g.to_local().clone()))
    for m in (run, plain):
        m(X).square().mean().backward()
    assert torch.equal(seen[0], plain[0].weight.grad)
    assert_same_gradients(plain, ours)


@pytest.mark.slow
def test_memory_is_used_again_and_within_the_plan(tmp_path):
    _, ours = model_in_files(tmp_path)
    run = torch.compile(ours, backend="zero", options={"compute": "aten"})
    gc.collect()  # what tests before left in cycles
    files, before = ops.owners()[-1].gradients.written, aio.live_bytes()
    for _ in range(4):
        run(X).square().mean().backward()
        ours.zero_grad()
        # How many blocks it takes depends on how soon the disk is done with those before.
        assert 0 < aio.live_bytes() - before <= files.buffer_bytes


def test_a_gradient_larger_than_may_be_under_way_goes_in_parts(tmp_path, monkeypatch):
    """A budget leaves less for what is on its way than one gradient takes."""
    landed, write = [], writeback_buffers.Landing.write
    monkeypatch.setattr(
        writeback_buffers.Landing,
        "write",
        lambda self, *a: (landed.append(self.made_here(a[1])), write(self, *a))[1],
    )
    plain, ours = model_in_files(tmp_path, memory_budget_bytes=14 << 20, offload_optimizer="nvme")
    sharded_model = ops.owners()[-1]
    assert sharded_model.gradients.written.buffer_bytes < 2 << 20
    run = torch.compile(ours, backend="zero", options={"compute": "aten"})
    for m in (run, plain):
        m(X).square().mean().backward()
    assert_same_gradients(plain, ours)
    assert not any(landed)
    assert sharded_model.gradients.written.landing().limit == sharded_model.gradients.written.buffer_bytes
