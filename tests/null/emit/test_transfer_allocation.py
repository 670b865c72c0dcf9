"""Temporary buffers do not grow with the model, and what lives long lies apart from what lives short: the constant
buffers (CB) and memory defragmentation (MD) of ZeRO-R (Rajbhandari et al. 2020, section 6).

Every bound is shown on a model and on one of ten times the layers.
"""

from __future__ import annotations

import copy
import gc
import sys

import pytest
import torch
from marks import thorough
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.ir.instructions import Gather, Reduce, Release, WaitGather, WaitReduce
from zero_compiler.ir.program import Program
from zero_compiler.memory.live import moments
from zero_compiler.ranks.transport import Transport
from zero_compiler.report.frame import Frame
from zero_compiler.runtime import _C
from zero_compiler.storage import aio, writeback_buffers
from zero_compiler.tools.planning import plan, report

WIDTH, TOKENS, LAYERS = 32, 16, 4  # from four layers on as much is under way as ever will be
LAYER = (2 * WIDTH * WIDTH + 3 * WIDTH) * 4 + 2 * WIDTH * WIDTH * 4  # bytes of a block's parameters
POOLS = ("transient_bytes", "slots_bytes", "own_bytes", "host_bytes")
SHARED = "in shared memory"
CONFIGS = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "cast": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "files": {"offload_params": "nvme", "offload_grads": "nvme", "bucket_bytes": 0},
    "tiles": {"tile_bytes": WIDTH * WIDTH * 4},
    f"stage 3, {SHARED}": {},
    f"cast, {SHARED}": {"param_dtype": torch.bfloat16, "bucket_bytes": 0},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return x.square().mean()


def planned(layers: int, grad: bool = True, width: int = WIDTH, **fields) -> Frame:
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        (frame,) = plan(
            Net(layers, width), (torch.ones(TOKENS, width),), 2, **{"bucket_bytes": LAYER // 2, **fields}
        )
    return frame


def lifetimes(program: Program) -> dict[str, set[str]]:
    """For each pool, how long live what the Program puts there: "short" ends in this call, "long" does not."""
    ends = {(type(i), i.index) for i in program.instrs if isinstance(i, (Release, WaitGather, WaitReduce))}
    out: dict[str, set[str]] = {}
    for instr in program.instrs:
        if isinstance(instr, Gather) and not (g := program.gathers[instr.index]).home:
            life = "short" if (Release, instr.index) in ends else "long"
            out.setdefault("kept" if g.kept else "slots" if g.shared else "transient", set()).add(life)
            if g.staging >= 0:
                out.setdefault("transient", set()).add(
                    "short" if (WaitGather, instr.index) in ends else "long"
                )
            for hop in g.hops:
                out.setdefault(hop.pool, set()).add("short" if (WaitGather, instr.index) in ends else "long")
        elif isinstance(instr, Reduce) and (r := program.reduces[instr.index]).staging >= 0:
            pool = "own" if r.shared else "transient"
            out.setdefault(pool, set()).add("short" if (WaitReduce, instr.index) in ends else "long")
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "of", ["stage 3", *thorough("files", "tiles", f"cast, {SHARED}", "stage 2", "cast", f"stage 3, {SHARED}")]
)
def test_arenas_are_as_large_at_ten_times_the_layers(of, tmp_path, monkeypatch):
    """Gathered weights, casts of them, staging of reductions, and chunks of files."""
    monkeypatch.setattr(Transport, "shared", SHARED in of)
    fields = dict(CONFIGS[of])
    if "offload_params" in fields:
        fields["nvme_dir"] = str(tmp_path)
    few, many = planned(LAYERS, **fields), planned(10 * LAYERS, **fields)
    for phase, program in few.programs.items():
        sizes = {pool: getattr(program, pool) for pool in POOLS}
        assert sizes == {pool: getattr(many.programs[phase], pool) for pool in POOLS}
        # Three buckets are under way at most, of the two copies that a bucket of two ranks takes.
        assert program.buffer_bytes <= 3 * 2 * LAYER + 4096
        for pool, lives in lifetimes(many.programs[phase]).items():
            assert lives == {"long" if pool == "kept" else "short"}, (phase, pool)
    assert sum(getattr(p, pool) for p in few.programs.values() for pool in POOLS) > 0


@pytest.mark.slow
def test_arenas_of_tiles_are_as_large_at_ten_times_the_bytes_of_a_weight():
    """Two tiles of a weight are there at once, and three of a gradient; biases are gathered whole."""
    tile, wide = 4096, 3 * WIDTH + 5  # of 8 KiB and of 82 KiB
    fields = {"tile_bytes": tile, "bucket_bytes": 0}
    for width in (WIDTH, wide):
        for program in planned(LAYERS, width=width, **fields).programs.values():
            assert 0 < program.buffer_bytes <= 2 * (2 + 3) * tile + 16 * 4 * width, (width, program.phase)


@pytest.mark.slow
def test_weights_that_a_budget_keeps_lie_apart_from_those_that_it_does_not():
    peak = report(Net(LAYERS), (torch.ones(TOKENS, WIDTH),), 2, bucket_bytes=0).memory.peak
    frame = planned(LAYERS, bucket_bytes=0, memory_budget_bytes=peak + LAYER)
    seen = [lifetimes(p) for p in frame.programs.values()]
    assert {pool for s in seen for pool in s} >= {"kept", "transient"}
    for s in seen:
        assert s.get("kept", {"long"}) == {"long"}
        assert s.get("transient", {"short"}) == {"short"}


@pytest.mark.slow
def test_a_forward_without_gradients_holds_as_much_at_ten_times_the_layers():
    few, many = (planned(n, grad=False).programs["inference"] for n in (LAYERS, 10 * LAYERS))
    assert max(few.live) == max(many.live)


@pytest.mark.slow
def test_beside_gradients_and_what_is_saved_a_step_holds_as_much_at_ten_times_the_layers():
    """With every block in a region of ``torch.utils.checkpoint``, its input is what is saved of it."""
    most = []
    for layers in (LAYERS, 10 * LAYERS):
        programs = planned(layers).programs
        most.append({phase: max(m.others for m in moments(p)) for phase, p in programs.items()})
    few, many = most
    assert many["backward"] - few["backward"] == 9 * LAYERS * TOKENS * WIDTH * 4
    assert many["forward"] - few["forward"] == 9 * LAYERS * TOKENS * WIDTH * 4


@pytest.mark.slow
def test_a_measured_step_takes_as_much_beside_what_rests():
    """Forward and backward that cast, clipping, and an update: on one rank, by the meter of the allocator. When the
    update begins all gradients are there, and nothing that was saved."""
    _C.meter_install()
    most = []
    for layers in (LAYERS, 10 * LAYERS):
        torch._dynamo.reset()
        gc.collect()
        base = _C.meter_current()
        model = zero.shard(
            Net(layers), param_dtype=torch.bfloat16, reduce_dtype=torch.float32, bucket_bytes=0
        )
        step = torch.compile(model, backend="zero", options={"compute": "aten"})
        optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-3, fused=True)
        for _ in range(2):  # the first makes what lives long
            _C.meter_reset_peak()
            step(torch.ones(TOKENS, WIDTH)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        count = len(list(model.parameters()))
        most.append(_C.meter_peak() - base)
        del model, step, optimizer
    few, many = most
    rests = 4 * LAYER  # a block's parameters, gradients and two states
    assert abs(many - few - 9 * LAYERS * rests) <= 64 * count, most


@pytest.mark.slow
def test_a_layer_trains_in_less_memory_than_its_weight_takes(tmp_path, monkeypatch):
    """4 MiB of weight in 1 MiB: parameters, gradients and states in files, and the weight in tiles.

    The parameters that are loaded are others than those that were made on meta.
    """
    monkeypatch.setattr(sys.modules[zero.optimizer.__module__], "SUB_GROUP_BYTES", 1 << 16)
    monkeypatch.setattr(writeback_buffers, "_WRITE_BYTES", 1 << 14)
    torch.manual_seed(0)
    plain = nn.Linear(512, 2048)
    kinds = {f"offload_{kind}": "nvme" for kind in ("params", "grads", "optimizer")}

    def losses(run, optimizer):
        out = []
        for k in range(3):
            x = torch.randn(8, 512, generator=torch.Generator().manual_seed(k)).requires_grad_()
            loss = run(x).square().mean()
            loss.backward()  # reads the weight, too
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out

    _C.meter_install()
    torch._dynamo.reset()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(512, 2048)
    zero.shard(model, nvme_dir=str(tmp_path), tile_bytes=1 << 17, **kinds)
    zero.load_safetensors(model, tmp_path / "model.safetensors")
    optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-3, fused=True)
    gc.collect()
    base, buffers = _C.meter_current(), aio.live_bytes()
    _C.meter_reset_peak()
    got = losses(torch.compile(model, backend="zero", options={"compute": "aten"}), optimizer)
    grown = _C.meter_peak() - base + aio.live_bytes() - buffers  # these are taken once, and stay
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    outside = 4 * 8 * 2048 * 4  # the batch, and what is made of it outside of the model
    assert 0 < grown <= zero.inspect(model).memory.peak + outside <= plain.weight.nbytes // 2


# Eager code: optimizers and norms -------------------------------------------------------------------------------


def taken(layers: int, make, run, dtype=torch.float32) -> tuple[int, int]:
    """Bytes that ``run`` takes at most while it runs, once states are there; and the number of parameters."""
    model = zero.shard(Net(layers).to(dtype))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = make(model)
    for _ in range(2):  # the first makes what lives long
        gc.collect()
        base = _C.meter_current()
        _C.meter_reset_peak()
        run(model, optimizer)
        most = _C.meter_peak() - base
    return most, len(list(model.parameters()))


@pytest.mark.parametrize(
    "kw",
    [{"fused": True}, {"fused": True, "max_grad_norm": 0.1}, {"foreach": True}, {"foreach": False}],
    ids=str,
)
@pytest.mark.slow
def test_an_optimizer_makes_no_temporaries_of_the_size_of_the_model(kw, monkeypatch):
    """A unit's at most: torch's ``foreach`` kernels hold square roots of all second moments that they are given."""
    monkeypatch.setattr(sys.modules[zero.optimizer.__module__], "SUB_GROUP_BYTES", LAYER)
    _C.meter_install()

    def make(model):
        return zero.optimizer(torch.optim.AdamW, model, lr=1e-3, **kw)

    (few, _), (many, count) = (taken(n, make, lambda m, o: o.step()) for n in (LAYERS, 10 * LAYERS))
    assert many <= few + 64 * count  # numbers of a step, one a parameter
    assert few <= 3 * LAYER


def test_the_buffers_of_states_in_files_are_as_large_at_ten_times_the_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[zero.optimizer.__module__], "SUB_GROUP_BYTES", LAYER)
    sizes = []
    for layers in (LAYERS, 10 * LAYERS):
        model = zero.shard(Net(layers), offload_optimizer="nvme", nvme_dir=str(tmp_path))
        sizes.append(zero.optimizer(torch.optim.AdamW, model, lr=1e-3).buffer_bytes)
    assert sizes[0] == sizes[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_the_buffers_of_states_in_files_leave_room_within_a_budget(overlap, tmp_path):
    """32 MiB are streamed in a step: in one unit, or within a budget in many."""
    torch.manual_seed(0)
    plain = nn.Linear(1024, 2048, bias=False)
    kinds = {f"offload_{kind}": "nvme" for kind in ("params", "grads", "optimizer")}
    x, trained, sizes = torch.randn(8, 1024), [], []
    for budget in (None, 32 << 20, 16 << 20):
        torch._dynamo.reset()
        model = zero.shard(
            copy.deepcopy(plain),
            nvme_dir=str(tmp_path),
            memory_budget_bytes=budget,
            tile_bytes=1 << 20,
            **kinds,
        )
        optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-3, fused=True, overlap=overlap)
        call = torch.compile(model, backend="zero", options={"compute": "aten"})
        for _ in range(2):
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(model.weight.full_tensor())
        sizes.append(optimizer.buffer_bytes)
        assert budget is None or zero.inspect(call).memory.peak <= budget
    assert sizes[0] >= 4 * 24 << 20  # a unit is the whole of it
    assert 0 < sizes[1] <= 4 << 20
    assert 0 < sizes[2] <= 2 << 20
    assert torch.equal(trained[0], trained[1])
    assert torch.equal(trained[0], trained[2])


def test_a_refusal_names_the_buffers(tmp_path):
    model = zero.shard(
        nn.Linear(1024, 2048), nvme_dir=str(tmp_path), offload_optimizer="nvme", memory_budget_bytes=4 << 20
    )
    optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-3, fused=True)
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    with pytest.raises(MemoryBudgetError, match=f"buffers of files {optimizer.buffer_bytes:,}\\)"):
        call(torch.randn(8, 1024))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clipping_takes_a_few_numbers_a_parameter(dtype):
    _C.meter_install()

    def clip(model, _):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    few, many = (taken(n, lambda m: None, clip, dtype) for n in (LAYERS, 10 * LAYERS))
    assert many[0] <= few[0] + 64 * many[1]
    assert few[0] < LAYER
