"""Programs that fetch from files, through the reference executor, and what the simulation says of them."""

import dataclasses
import gc

import pytest
import torch
from harness import SimulatedModel
from marks import slow
from torch import nn

import zero_compiler as zero
from zero_compiler import hardware
from zero_compiler.errors import MemoryBudgetError, VerifyError
from zero_compiler.planning import report
from zero_compiler.program import Fetch, Hop, Program, WaitFetch
from zero_compiler.simulate import COMPUTE, DISK, simulate
from zero_compiler.verify import verify_program


def deep(depth=4, width=16):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


@pytest.mark.parametrize("fields", [{}, {"param_dtype": torch.bfloat16}, {"bucket_bytes": 0}], ids=str)
@pytest.mark.parametrize("world", [*slow(1), 2, *slow(3)])
def test_fetched_weights_are_there_and_nowhere_overwritten(world, fields, tmp_path):
    run = SimulatedModel(deep(), world, offload_params="nvme", nvme_dir=str(tmp_path), **fields)
    inputs = [(torch.randn(3, 16),) for _ in range(world)]
    tolerance = {"rtol": 0.05, "atol": 0.05} if fields.get("param_dtype") else {}
    if not tolerance:
        run.check(inputs, lambda out: out.sum())
    else:
        run.step(inputs, lambda out: out.sum())
    for program in run.programs.values():
        assert program.host_bytes > 0
        assert any(isinstance(i, Fetch) for i in program.instrs)


def planned(**fields):
    (frame,) = report(deep(8, 64), (torch.ones(2, 64),), 2, bucket_bytes=0, **fields).frames
    return frame.programs["backward"]


def test_the_verifier_sees_a_gather_that_does_not_wait_for_its_file(tmp_path):
    program = planned(offload_params="nvme", nvme_dir=str(tmp_path))
    worlds = {g.owner: 2 for g in program.gathers}
    verify_program(program, worlds)
    assert Program.from_dict(program.to_dict()) == program
    broken = dataclasses.replace(
        program, instrs=[i for i in program.instrs if not (isinstance(i, WaitFetch) and i.index == 2)]
    )
    with pytest.raises(VerifyError, match="gather 2 is fetching, must be fetched"):
        verify_program(broken, worlds)
    # A read that the file system would refuse.
    between = Hop("nvme", "host", (1,))
    g = [dataclasses.replace(x, hops=(between,) if x.hops else ()) for x in program.gathers]
    with pytest.raises(VerifyError, match="gather of .*: .* is read to byte 1, no multiple of 4096"):
        verify_program(dataclasses.replace(program, gathers=g), worlds)
    # Two chunks that lie there at the same time.
    hop = Hop("nvme", "host", (0,))
    g = [dataclasses.replace(x, hops=(hop,) if x.hops else ()) for x in program.gathers]
    with pytest.raises(VerifyError, match=r"planned memory \(host\)"):
        verify_program(dataclasses.replace(program, gathers=g), worlds)


@pytest.mark.slow
def test_the_simulation_has_a_lane_for_files(tmp_path):
    spec = hardware.load("laptop")
    plain = planned()
    program = planned(offload_params="nvme", offload_grads="nvme", nvme_dir=str(tmp_path))
    none, files = simulate(plain, spec, 2), simulate(program, spec, 2)
    assert none.busy_us(DISK) == 0
    # Every chunk is read, and every gradient of a chunk written.
    chunks = sum(g.chunk_bytes for g in program.gathers)
    grads = sum(sum(r.chunk_numels) * 4 for r in program.reduces if not r.replicated)
    assert files.nbytes(DISK) == chunks + grads
    assert files.total_us >= none.total_us
    assert any("files" in line for line in files.lines())
    # A disk that is slow enough bounds the step, and a fast one does not.
    slow = dataclasses.replace(spec, nvme_read=hardware.Link(1e5, 1.0), nvme_write=hardware.Link(1e5, 1.0))
    assert simulate(program, slow, 2).bound == DISK
    fast = dataclasses.replace(
        spec,
        nvme_read=hardware.Link(0.0, 1e9),
        nvme_write=hardware.Link(0.0, 1e9),
        collectives=tuple(dataclasses.replace(c, link=hardware.Link(0.0, 1e9)) for c in spec.collectives),
    )
    assert simulate(program, fast, 2).bound == COMPUTE


def test_planning_makes_no_file(tmp_path):
    made = report(
        deep(),
        (torch.ones(2, 16),),
        2,
        offload_params="nvme",
        offload_grads="nvme",
        offload_optimizer="nvme",
        nvme_dir=str(tmp_path),
    )
    assert made.memory.parameters == made.memory.gradients == made.memory.optimizer == 0
    local = 4 * (8 * 16 + 8) * 4
    assert made.memory.files == local * 4  # one of parameters, one of gradients, two of states
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tier", [*slow("none"), "nvme"])
@pytest.mark.parametrize(
    ("cls", "kw", "states"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 2),
        (torch.optim.AdamW, {"amsgrad": True}, 3),
    ],
)
def test_states_are_counted_as_the_optimizer_keeps_them(cls, kw, states, tier, tmp_path):
    model = zero.shard(deep(), offload_optimizer=tier, nvme_dir=str(tmp_path))
    numel = sum(p.numel() for p in model.parameters())
    before = zero.inspect(model).memory
    assert before.assumed == 8 * numel
    assert "assumed" in str(zero.inspect(model))
    optimizer = zero.optimizer(cls, model, lr=0.1, **kw)
    memory = zero.inspect(model).memory
    want = 4 * numel * states
    assert (memory.optimizer, memory.files) == ((want, 0) if tier == "none" else (0, want))
    assert memory.assumed == 0
    # Buffers of a step are there where something passes through them: whole blocks of each state of each tensor.
    assert memory.host == (4 * 8 * states * 4096 if tier == "nvme" else 0)
    assert memory.peak == 4 * numel * 2 + memory.optimizer + memory.host
    assert "as its zero.optimizer keeps them" in str(zero.inspect(model))
    del optimizer
    gc.collect()
    assert zero.inspect(model).memory == before


def test_the_budget_counts_the_states_that_there_are(tmp_path):
    model = zero.shard(deep())
    numel = sum(p.numel() for p in model.parameters())
    options = {
        "compute": "aten",
        "memory_budget_bytes": 4 * numel * 3,
    }  # Adam alone takes four times the parameters
    x = torch.ones(1, 16)
    with pytest.raises(MemoryBudgetError, match=f"optimizer states {8 * numel:,}"):
        torch.compile(model, backend="zero", options=options)(x)
    torch._dynamo.reset()
    optimizer = zero.optimizer(torch.optim.SGD, model, lr=0.1)
    torch.compile(model, backend="zero", options=options)(x).sum().backward()
    optimizer.step()
