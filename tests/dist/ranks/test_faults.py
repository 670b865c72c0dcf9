"""Ranks that die, fail or are interrupted: an error on every rank, never a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from dist.faulty import GROUP_TIMEOUT, batch, expect, net, ranks, use
from dist.spawn import RankFailed
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ShardError, TransferError

pytestmark = [pytest.mark.dist, pytest.mark.alone]


_deadly: set[str] = set()  # the phases in which this rank dies


@torch.library.custom_op("user::deadly", mutates_args=())
def deadly(x: torch.Tensor, phase: str) -> torch.Tensor:
    if phase in _deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()


@deadly.register_fake
def _(x, phase):
    return torch.empty_like(x)


deadly.register_autograd(lambda ctx, grad: (deadly(grad, "backward"), None))


class Mortal(nn.Module):
    """A rank may die amid its computation, in either phase: between a weight before and one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x):
        return self.second(deadly(torch.relu(self.first(x)), "forward")).square().mean()


def die_in_mid_step(rank, world, how, stage, transport, where):
    torch.manual_seed(0)
    model = Mortal()
    if stage is not None:
        zero.shard(model, stage=stage, transport=transport)
        assert model._zero.sharded_model.storage.transport.name == transport
    call = use(model, how)
    for _ in range(2):
        call(batch()).backward()
    if rank == 1 and where != "between":
        _deadly.add(where)

    def step():
        loss = call(batch())
        if rank == 1 and where == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()

    text, seconds = expect(TransferError, step)
    again, soon = expect(TransferError, step)
    return text, seconds, again, soon


@pytest.mark.parametrize(
    ("how", "world", "stage", "transport", "where"),
    [
        ("compiled", 3, 3, "c10d", "between"),
        ("compiled", 3, 3, "shared", "between"),
        ("eager", 2, 3, "c10d", "between"),
        ("compiled", 2, 3, "c10d", "forward"),
        ("compiled", 2, 3, "shared", "forward"),
        ("compiled", 3, 3, "c10d", "backward"),
        ("compiled", 2, 3, "shared", "backward"),
        ("compiled", 3, 2, "shared", "between"),
        ("compiled", 2, 2, "c10d", "backward"),
        ("compiled", 3, 0, "c10d", "backward"),
        ("compiled", 2, 0, "c10d", "forward"),
        ("compiled", 3, None, None, "backward"),
        ("compiled", 2, None, None, "between"),
    ],
)
def test_a_rank_is_killed_in_mid_step(how, world, stage, transport, where):
    """At each stage, and of a plain model (None)."""
    results = ranks(die_in_mid_step, world, how, stage, transport, where, may_die={1})
    for rank, result in enumerate(results):
        if rank == 1:
            assert result is None
            continue
        text, seconds, _again, soon = result
        assert f"rank {rank} of {world}" in text or "rank 1 of" in text, text
        what = ("forward", "backward", "gradient", "gather", "reduce", "the end of a call")
        assert any(word in text for word in what), text
        # A death closes sockets and shows in shared memory: nobody has to wait for the end of the time.
        assert seconds < GROUP_TIMEOUT, text
        assert soon < GROUP_TIMEOUT / 2


@torch.library.custom_op("user::fragile", mutates_args=())
def fragile(x: torch.Tensor) -> torch.Tensor:
    if x.abs().max() > 100:
        raise ValueError("fragile broke")
    return x.clone()


@fragile.register_fake
def _(x):
    return torch.empty_like(x)


fragile.register_autograd(lambda ctx, grad: grad)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x):
        return self.second(fragile(self.first(x))).square().mean()


def raise_in_a_program(rank, world):
    torch.manual_seed(0)
    model = zero.shard(Fragile())
    call = use(model, "compiled")
    call(batch()).backward()
    before = {n: p.to_local().clone() for n, p in model.named_parameters()}
    expect(ValueError, lambda: call(batch() * 1e4), "fragile broke")
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), before[name])
    if world == 1:
        call(batch()).backward()  # goes on as if nothing had been
        return None
    # Peers may stand anywhere in the sequence: the model says so at every later call, and at once.
    text, seconds = expect(
        TransferError,
        lambda: call(batch()),
        "an earlier call of the model broke off on rank",
        "ValueError: fragile broke",
    )
    assert seconds < GROUP_TIMEOUT / 2
    expect(TransferError, lambda: model(batch()), "an earlier call of the model broke off")
    # Another model of the same process is not touched.
    use(zero.shard(net()), "compiled")(batch()).backward()
    return text


def test_an_exception_in_the_middle_of_a_program():
    texts = ranks(raise_in_a_program, 2)
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 2" in text


def test_an_exception_in_the_middle_of_a_program_of_one_rank():
    assert ranks(raise_in_a_program, 1, group=False) == [None]


SCRIPT = """
    import os, sys, time, torch, torch.distributed as dist
    from datetime import timedelta
    import zero_compiler as zero

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    model = zero.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    for step in range(100000):
        call(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
        if step == 3:
            if "exception" in sys.argv and rank == 1:
                raise RuntimeError("the loop of rank 1 broke")
            os.write(1, f"pid {os.getpid()} running\\n".encode())  # one write: ranks share the pipe
        time.sleep(0.01)
"""


def launch(tmp_path, *args):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        *args,
    ]
    # A parent that runs in the background may ignore interrupts, and its children would inherit that.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def gone(pid, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_an_exception_in_the_loop_of_one_rank_ends_all(tmp_path):
    job = launch(tmp_path, "exception")
    try:
        output, _ = job.communicate(timeout=150)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    assert "the loop of rank 1 broke" in output


def test_ctrl_c_ends_all_ranks(tmp_path):
    job = launch(tmp_path)
    pids = []
    try:
        for line in job.stdout:
            if line.startswith("pid "):
                pids.append(int(line.split()[1]))
            if len(pids) == 2:
                break
        assert len(pids) == 2
        os.killpg(job.pid, signal.SIGINT)  # what a terminal sends to the whole process group
        job.communicate(timeout=60)
        assert all(gone(pid) for pid in pids)
        assert job.returncode != 0
    finally:
        # The ranks stand in sessions of their own.
        for pid in (job.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def raise_on_one_rank(rank, world):
    model = zero.shard(net())
    use(model, "compiled")(batch()).backward()
    if rank == 1:
        raise KeyError("rank 1 fails")
    use(model, "compiled")(batch()).backward()


def test_run_ranks_names_the_rank_that_failed():
    with pytest.raises(RankFailed, match="rank 1"):
        ranks(raise_on_one_rank, 2)


def no_group_yet(rank, world):
    """A model sharded before its process group was made."""
    os.environ.pop("WORLD_SIZE", None)
    model = zero.shard(net())
    model(batch()).backward()
    import tempfile

    file = os.path.join(tempfile.gettempdir(), f"zero-late-{os.getppid()}")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    texts = [
        expect(ShardError, lambda c=c: c(batch()), "made after zero.shard")[0]
        for c in (model, use(model, "compiled"))
    ]
    dist.barrier()
    if rank == 0 and os.path.exists(file):
        os.unlink(file)
    return texts


def test_a_real_group_made_after_sharding():
    for texts in ranks(no_group_yet, 2, group=False):
        assert len(texts) == 2
