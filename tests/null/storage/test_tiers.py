"""Programs that fetch from files, through the reference executor, and what the simulation says of them."""

import dataclasses
import gc
import mmap
import os

import pytest
import torch
from harness import SimulatedModel
from marks import slow
from torch import nn

import zero_compiler as zero
from zero_compiler.cost import hardware
from zero_compiler.cost.simulate import simulate
from zero_compiler.cost.timeline import COMPUTE, READ, WRITE
from zero_compiler.errors import MemoryBudgetError, StorageError, VerifyError
from zero_compiler.ir.instructions import Fetch, WaitFetch
from zero_compiler.ir.program import Program
from zero_compiler.ir.transfers import Hop
from zero_compiler.memory.verify import verify_program
from zero_compiler.storage import stores
from zero_compiler.storage.aio import Engine
from zero_compiler.tools.planning import report


def deep(depth=4, width=16):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


@pytest.mark.slow
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


class TwoDtypes(nn.Module):
    """One layer with small weights at rest in two dtypes, as a router in float32 beside experts in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.narrow) @ self.wide


@pytest.mark.parametrize("world", [2, *slow(3)])
def test_what_is_fetched_together_rests_in_one_dtype(world, tmp_path):
    """Weights of two dtypes at rest are computed with in one: hops from files bring the bytes at rest."""
    inputs = [(torch.randn(3, 8, dtype=torch.bfloat16),) for _ in range(world)]
    outs = []
    for fields in ({}, {"offload_params": "nvme", "nvme_dir": str(tmp_path)}):
        run = SimulatedModel(TwoDtypes(), world, param_dtype=torch.bfloat16, **fields)
        outs.append(run.step(inputs, lambda out: out.float().sum()))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    fetched = {g.names: g.rest_dtype for g in run.programs["forward"].gathers}
    assert fetched == {("narrow",): "bfloat16", ("wide",): "float32"}


def test_weights_of_two_dtypes_in_files_train_as_in_memory(tmp_path):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    seen = []
    for fields in ({}, {"offload_params": "nvme", "nvme_dir": str(tmp_path)}):
        torch._dynamo.reset()
        model = zero.shard(TwoDtypes(), param_dtype=torch.bfloat16, **fields)
        optimizer = zero.optimizer(torch.optim.SGD, model, lr=0.1)
        step = torch.compile(model, backend="zero", options={"compute": "aten"})
        for _ in range(2):
            step(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered(model):
            seen.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 1 << 19])
def test_a_plan_counts_the_buffers_of_gradients_as_a_sharded_model_does(budget, tmp_path):
    fields = {"offload_grads": "nvme", "nvme_dir": str(tmp_path), "memory_budget_bytes": budget}
    inputs = (torch.ones(2, 64),)
    plan = report(deep(3, 64), inputs, 1, **fields).memory
    torch._dynamo.reset()
    model = zero.inspect(zero.shard(deep(3, 64), **fields), inputs).memory
    assert plan == model
    assert plan.host > 0


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
    assert none.busy_us(READ, WRITE) == 0
    # Every chunk is read, and every gradient of a chunk written.
    chunks = sum(g.chunk_bytes for g in program.gathers)
    grads = sum(sum(r.chunk_numels) * 4 for r in program.reduces if not r.replicated)
    assert (files.nbytes(READ), files.nbytes(WRITE)) == (chunks, grads)
    assert files.total_us >= none.total_us
    assert any("files" in line for line in files.lines())
    # A gradient is copied to the buffer that is written, by the thread that computes.
    copies = [s for s in files.spans if s.lane == COMPUTE and s.label.startswith("buffer of")]
    assert sum(s.alone_us for s in copies) == pytest.approx(2 * grads / spec.memory_bytes_per_us)
    # A disk that is slow enough bounds the step, and a fast one does not.
    slow = dataclasses.replace(spec, nvme_read=hardware.Link(1e5, 1.0), nvme_write=hardware.Link(1e5, 1.0))
    assert simulate(program, slow, 2).bound in (READ, WRITE)
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


@pytest.mark.slow
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


# Files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nvme(tmp_path):
    tier = stores.Nvme(str(tmp_path), 0, keep=False)
    yield tier
    tier.close()


def test_files_that_grow_take_little_more_than_what_lies_in_them(nvme, monkeypatch):
    monkeypatch.setattr(stores, "_GROWTH_BYTES", 1 << 20)
    sizes = [70 << 10, 600 << 10, 4 << 10, *[120 << 10] * 30, 600 << 10, 2 << 20, *[8 << 10] * 40]
    kept = [nvme.grow(f"weight {i}", (n // 4,), torch.float32) for i, n in enumerate(sizes)]
    assert len({(id(r.store), r.offset) for r in kept}) == len(sizes)
    assert sum(s.nbytes for s in nvme.stores) <= sum(sizes) + (1 << 20) + (1 << 17)
    assert len(nvme.stores) < len(sizes) / 4


def test_a_disk_with_room_for_a_weight_and_no_more_takes_it(nvme, monkeypatch):
    first = nvme.grow("first", (1 << 14,), torch.float32)
    made = nvme.store

    def store(what, nbytes):
        if nbytes > first.nbytes:
            raise StorageError("no room")
        return made(what, nbytes)

    monkeypatch.setattr(nvme, "store", store)
    assert nvme.grow("second", (1 << 14,), torch.float32).store is not first.store
    with pytest.raises(StorageError, match="no room"):
        nvme.grow("third", (1 << 15,), torch.float32)


class Disagreeing(Engine):
    """On a file system where direct transfers and the page cache do not see each other; ``cached``: nor do plain ones
    and mappings."""

    which, cached = "", False

    def _goes(self, what, file):
        return what == self.which and (file.direct or self.cached)

    def read(self, file, into, offset=0, *, label=""):
        done = super().read(file, into, offset, label=label)
        if self._goes("read", file):
            done.wait()
            into.zero_()  # what the disk holds, and not what lies in the page cache
        return done

    def write(self, file, data, offset=0, *, label=""):
        if self._goes("write", file):
            return super().read(
                file, torch.empty_like(data), offset
            )  # the page cache goes on to be what is seen
        return super().write(file, data, offset, label=label)


@pytest.mark.parametrize("which", ["", "read", "write"])
def test_both_ways_to_a_file_see_each_other_where_its_file_system_says_so_and_where_not(
    which, nvme, monkeypatch
):
    nvme.engine.close()
    nvme.engine = Disagreeing()
    monkeypatch.setattr(Disagreeing, "which", which)
    store = nvme.store("parameters", 64 << 10)
    assert store.file.direct == (which == "")
    first, other = (
        store.allocate(name, (3000,), torch.float32) for name in ("first", "other")
    )  # no whole blocks
    assert not first.tensor.any()
    assert not other.tensor.any()
    buffer = torch.empty(16 << 10, dtype=torch.uint8)
    for k in range(1, 4):
        first.fill(torch.full((3000,), float(k)))
        assert (first.tensor == k).all(), "written by a transfer, read through the handle"
        first.tensor.mul_(2).add_(1)
        span = first.span(0, 12_000, 0)
        store.read(span, buffer).wait()
        assert (buffer[:12_000].view(torch.float32) == 2 * k + 1).all(), "the other way round"
        buffer[:12_000].view(torch.float32).neg_()
        store.write(span, buffer).wait()
        assert (first.tensor == -2 * k - 1).all()
        assert not other.tensor.any()


def test_a_file_system_whose_mappings_agree_with_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Disagreeing, "cached", True)
    monkeypatch.setattr(Disagreeing, "which", "read")
    with Disagreeing() as engine:
        for keep in (False, True):
            with pytest.raises(
                StorageError, match=r"nvme_dir='.*' is on a file system where .* give another nvme_dir"
            ):
                stores.FileStore(engine, str(tmp_path), 4096, "parameters of rank 0", keep=keep)
    assert list(tmp_path.iterdir()) == []


def test_a_handle_takes_no_descriptor(nvme):
    """Models have thousands of tensors, and processes by default a thousand descriptors."""
    store = nvme.store("parameters", 1000 * 4096)
    before = len(os.listdir("/proc/self/fd"))
    regions = [store.allocate(str(k), (k + 1,), torch.float32) for k in range(1000)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert [r.tensor.untyped_storage().nbytes() for r in regions] == [4 * (k + 1) for k in range(1000)]
    assert len({r.tensor.untyped_storage().data_ptr() for r in regions}) == 1000
    assert stores.region_of(regions[7].tensor) is regions[7]


@pytest.mark.slow
def test_errors_about_files_name_the_option_the_file_the_range_and_the_parameter(tmp_path, monkeypatch):
    folder = tmp_path / "f"
    with pytest.raises(
        StorageError, match=rf"nvme_dir='{folder}' takes no file .*parameters of rank 0: No such file"
    ):
        # Gone since the options were looked at.
        stores.Nvme(str(folder), 0, keep=False).store("parameters", 10)
    folder.mkdir()
    fields = {"offload_params": "nvme", "nvme_dir": str(folder), "nvme_keep": True}
    with monkeypatch.context() as patch:
        # A file system without mappings.
        patch.setattr(mmap, "mmap", lambda *a, **k: os.open(folder / "none", 0))
        with pytest.raises(StorageError) as refused:
            zero.shard(nn.Linear(8, 8), **fields)
    assert (
        f"nvme_dir='{folder}' takes files that cannot be mapped into memory, which parameters of rank 0"
        in str(refused.value)
    )
    assert list(folder.iterdir()) == []
    # Of kept files of which the second cannot be made, the first is not left either.
    real = stores._make

    def full(directory, nbytes, label, keep):
        return real(directory, 1 << 60 if label.startswith("gradients") else nbytes, label, keep)

    with monkeypatch.context() as patch:
        patch.setattr(stores, "_make", full)
        with pytest.raises(StorageError, match="gradients of rank 0 need 1,152,921"):
            zero.shard(nn.Linear(8, 8), offload_grads="nvme", **fields)
    assert list(folder.iterdir()) == []
    for keep in (False, True):
        nvme = stores.Nvme(str(folder), 3, keep)
        store = nvme.store("parameters", 64 << 10)
        store.allocate("first", (5000,), torch.float32)
        region = store.allocate("layers.0.wq", (5000,), torch.float32)
        os.ftruncate(store.fd, 24 << 10)
        kept = f", {os.listdir(folder)[0]}" if keep else ""
        with pytest.raises(StorageError) as cut:
            store.read(region.span(0, 20_000, 0), torch.empty(20 << 10, dtype=torch.uint8)).wait()
        assert str(cut.value).startswith(
            f"read of 20480 bytes at offset 20480 of 'parameters of rank 3 in nvme_dir={folder}{kept}' (layers.0.wq) "
            "failed at byte 24576: the file ends there"
        )
        assert (cut.value.label, cut.value.offset) == ("layers.0.wq", 20480)
        with pytest.raises(
            StorageError, match=rf"last has no room left in parameters of rank 3 in nvme_dir={folder}"
        ):
            store.allocate("last", (10_000,), torch.float32)
        nvme.close()
