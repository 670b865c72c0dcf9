"""Training on an accelerator: one rank in this process, two gloo ranks on one device, and ranks with one each."""

import copy
import json
import os

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from machines import machine
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError, ShardError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="needs an accelerator (CUDA or another one)"
    ),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(30, 64)
        self.h = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 10, bias=False)

    def forward(self, x, y):
        x = self.inp(x)
        for layer in self.h:
            x = x + torch.nn.functional.gelu(layer(x))
        return torch.nn.functional.cross_entropy(self.out(self.norm(x)), y)


def _train(model, loss_of, rank, steps=10):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return _train_on(next(model.parameters()).device, loss_of, optimizer, steps, rank)


def _train_on(device, loss_of, optimizer, steps=10, rank=0):
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 30, generator=generator).to(device)
        y = torch.randint(0, 10, (16,), generator=generator).to(device)
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("others", [{}, {"offload_params": "nvme", "offload_optimizer": "nvme"}], ids=str)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_activations_on_the_host_and_in_files(tier, others, tmp_path):
    fast = {"latency_us": 1e-6, "bytes_per_us": 1e9}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(host_device=fast, nvme_read=fast, nvme_write=fast)))
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    plain = Net().to(device)

    def losses(**fields):
        torch._dynamo.reset()
        model = zero.shard(
            copy.deepcopy(plain), hardware=str(path), nvme_dir=str(tmp_path), **others, **fields
        )
        optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-2)
        step = torch.compile(model, backend="zero", options={"compute": "aten"})
        out = []
        for k in range(5):
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(512, 30, generator=generator).to(device)
            y = torch.randint(0, 10, (512,), generator=generator).to(device)
            loss = step(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out, model

    want, _ = losses()
    got, model = losses(offload_activations=tier)
    assert got == want
    assert {r.tier for r in zero.inspect(model).frames[0].offloaded} == {tier}


@pytest.mark.parametrize("compute", ["aten", "inductor"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_trains_as_plain_torch(stage, compute):
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    plain = Net().to(device)
    model = zero.shard(copy.deepcopy(plain), stage=stage)
    want = _train(plain, torch.compile(plain, backend="aot_eager"), 0)
    got = _train(model, torch.compile(model, backend="zero", options={"compute": compute}), 0)
    if compute == "aten":
        assert got == want
    else:
        # Fused kernels keep float32 but not the order of sums.
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_step_allocates_nothing_new_for_transfers():
    device = torch.accelerator.current_accelerator()
    model = zero.shard(Net().to(device), stage=3)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    _train(model, step, 0, steps=2)
    before = model._zero.sharded_model.runtime.engine.counters()["allocations"]
    _train(model, step, 0, steps=3)
    assert model._zero.sharded_model.runtime.engine.counters()["allocations"] == before


def _as_ddp(rank, world, stage):
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    plain = Net().to(device)
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    model = zero.shard(plain, stage=stage, device=device)
    want = _train(reference, reference, rank)
    got = _train(model, torch.compile(model, backend="zero", options={"compute": "aten"}), rank)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return model._zero.sharded_model.storage.transport.name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_gloo_ranks_on_one_device_train_as_ddp(stage):
    assert run_ranks(_as_ddp, 2, stage) == ["c10d", "c10d"]


# On the backend that torch has for the device (NCCL on CUDA), with a device a rank. ------------------------------


def _own_backend():
    return dist.get_default_backend_for_device(torch.accelerator.current_accelerator())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_on_the_backend_of_the_device_trains_as_ddp(stage):
    assert run_ranks(_as_ddp, 1, stage, backend=_own_backend(), timeout=120.0) == ["local"]


two_devices = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two accelerators, one for each rank"
)


def _backends(beside: bool) -> str:
    """``beside``: with gloo for tensors of the CPU, over which ranks then agree."""
    device = torch.accelerator.current_accelerator().type
    return f"cpu:gloo,{device}:{_own_backend()}" if beside else _own_backend()


@two_devices
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_on_the_backend_of_the_device_train_as_ddp(stage, beside):
    assert run_ranks(_as_ddp, 2, stage, backend=_backends(beside), timeout=120.0) == ["c10d", "c10d"]


def _different_calls(rank, world):
    device = torch.accelerator.current_accelerator()
    model = zero.shard(Net().to(device), device=device)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    x, y = torch.ones(16, 30, device=device), torch.zeros(16, dtype=torch.long, device=device)
    step(x, y).backward()
    with pytest.raises(RankMismatchError, match="different calls"), torch.set_grad_enabled(rank == 1):
        step(x, y)


@two_devices
def test_ranks_in_different_calls_on_the_backend_of_the_device():
    run_ranks(_different_calls, 2, backend=_own_backend(), timeout=120.0, group_timeout=30.0)


@pytest.mark.parametrize(
    ("params", "grads"), [("host", None), ("host", "nvme"), ("nvme", None), ("nvme", "nvme")]
)
def test_shards_on_the_host_and_in_files(params, grads, tmp_path):
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    plain = Net().to(device)

    def losses(**fields):
        torch._dynamo.reset()
        model = zero.shard(copy.deepcopy(plain), nvme_dir=str(tmp_path), **fields)
        step = torch.compile(model, backend="zero", options={"compute": "aten"})
        optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-2, eps=1e-3)
        return _train_on(device, step, optimizer), model

    want, _ = losses()
    got, model = losses(offload_params=params, offload_grads=grads)
    # The update runs on the host, whose kernels may round otherwise.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert {p.device.type for p in model.parameters() if p.dim()} == {"cpu"}
    memory = zero.inspect(model).memory
    assert memory.parameters == memory.gradients == memory.optimizer == memory.host == 0
    assert memory.apart > 0


def test_plain_optimizers_update_shards_on_the_host():
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    plain = Net().to(device)
    model = zero.shard(copy.deepcopy(plain), offload_params="host")
    got = _train_on(
        device,
        torch.compile(model, backend="zero", options={"compute": "aten"}),
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3),
    )
    want = _train_on(device, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert all(local.is_pinned() for p in model.parameters() if (local := p._local_tensor).numel())


def test_what_is_written_to_gathered_weights_goes_to_shards_on_the_host():
    model = zero.shard(Net(), stage=3, offload_params="host")
    with zero.gathered(model, write=True):
        assert model.inp.bias.device.type == torch.accelerator.current_accelerator().type
        model.inp.bias.fill_(2.0)
    assert model.inp.bias.to_local().device.type == "cpu"
    assert (model.inp.bias.to_local() == 2.0).all()


def test_the_device_holds_no_more_than_was_planned_with_shards_on_the_host():
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    model = zero.shard(
        nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24))).to(device),
        offload_params="host",
    )
    step = torch.compile(model, backend="zero", options={"compute": "aten", "bucket_bytes": 0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 1024, device=device)
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(device)
    for _ in range(3):
        torch.accelerator.reset_peak_memory_stats(device)
        step(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    grown = torch.accelerator.max_memory_allocated(device) - before
    assert grown <= zero.inspect(model).memory.peak + (1 << 20)


BLAS = 64 << 20  # its workspaces, one for each thread that computes


def test_compiled_code_in_half_precision_holds_about_what_was_planned():
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    width, rows = 1024, 1 << 14
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)
    ]
    model = zero.shard(nn.Sequential(*blocks).to(device), param_dtype="bf16")
    step = torch.compile(model, backend="zero")
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    before = torch.accelerator.memory_allocated(device) - sum(p.to_local().nbytes for p in model.parameters())
    for _ in range(3):
        torch.accelerator.reset_peak_memory_stats(device)
        step(x).float().square().mean().backward()
        model.zero_grad()
    measured = torch.accelerator.max_memory_allocated(device) - before
    memory = zero.inspect(model).memory
    planned = memory.peak - memory.optimizer
    loss = 3 * rows * width * 4  # in eager code
    assert measured <= planned + loss + BLAS
    assert planned <= 1.25 * measured


def test_more_leaves_than_the_device_has_memory_for():
    """The host is ahead of the device: what has left is memory for what is computed next all the same."""
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    width, rows = 1024, 1 << 14
    model = zero.shard(
        nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(12))).to(device),
        activation_budget_bytes=4 * rows * width * 4,
        offload_activations="host",
    )
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    x = torch.randn(rows, width, device=device)
    stats = torch.accelerator.memory_stats
    before = stats(device)["active_bytes.all.current"] - sum(p.to_local().nbytes for p in model.parameters())
    for _ in range(3):
        torch.accelerator.reset_peak_memory_stats(device)
        if device.type == "cuda":
            torch.cuda._sleep(10**8)
        step(x).square().mean().backward()
        model.zero_grad()
    # Of what other streams may still read the allocator says that it is active, though nobody holds it.
    grown = stats(device)["active_bytes.all.peak"] - before
    memory = zero.inspect(model).memory
    assert zero.inspect(model).frames[0].offloaded
    assert grown <= memory.peak - memory.optimizer + 3 * x.nbytes + BLAS


def test_a_call_cannot_be_recorded_into_a_graph():
    device = torch.accelerator.current_accelerator()
    if device.type != "cuda":
        pytest.skip("graphs of CUDA")
    model = zero.shard(Net().to(device), stage=3)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    x, y = torch.ones(16, 30, device=device), torch.zeros(16, dtype=torch.long, device=device)
    step(x, y).backward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ShardError, match="recorded into a graph of the device"), torch.cuda.graph(graph):
        step(x, y)


# A layer that the device could hold, and is not to. -------------------------------------------------------------


class Layer(nn.Module):
    """One weight, of values that take no time to draw."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("meta"):
            self.linear = nn.Linear(width, width, bias=False, dtype=dtype)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
        torch.outer(a, b / width**0.5, out=self.linear.weight.data)

    def forward(self, x, y):
        return (self.linear(x) - y).float().square().mean()


def steps_of(layer, loss_of, device, count=3, rows=16):
    """Losses, and gradients of the inputs, for which backward reads the weight."""
    weight = layer.linear.weight
    optimizer = torch.optim.SGD([weight], lr=0.1 * weight.shape[0])
    found = []
    for k in range(count):
        generator = torch.Generator().manual_seed(k)
        x, y = (
            torch.randn(rows, weight.shape[1], generator=generator).to(device, weight.dtype) for _ in "xy"
        )
        x.requires_grad_()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), x.grad.float().norm().item()))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_of_64k_by_64k_trains_in_less_than_its_weight(dtype):
    """8 or 16 GiB of weight under half of that on the device: it rests on the host, and passes in tiles."""
    device, width = torch.accelerator.current_accelerator(), 1 << 16
    nbytes = width * width * dtype.itemsize
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, _ = torch.accelerator.get_memory_info()
    if (
        room < 5 * nbytes or free < 3 * nbytes
    ):  # plain PyTorch's weight, gradient and products; ours beside the copy
        pytest.skip(
            f"needs {5 * nbytes >> 30} GiB of free memory on the host and {3 * nbytes >> 30} on the device"
        )
    plain = Layer(width, dtype).to(device)
    want = steps_of(plain, plain, device)
    del plain
    torch.accelerator.empty_cache()

    budget = nbytes // 2
    model = zero.shard(Layer(width, dtype), device=device, offload_params="host", memory_budget_bytes=budget)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    got = steps_of(model, step, device)
    grown = torch.accelerator.max_memory_allocated(device) - before
    torch.testing.assert_close(got, want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=0)
    report = zero.inspect(model)
    assert report.memory.peak <= budget
    assert grown <= report.memory.peak + BLAS
    (frame,) = report.frames
    assert all(any(g.tile for g in p.gathers) for p in frame.programs.values())
