"""A rank that goes while others wait for it: it is killed, stopped, or raises, in each place where it can be.

    from dist.leaving import PLACES, leave

    seconds, kind, text = leave("in zero.shard", "killed", world=2, gone=1)[0]

Ranks are processes that nobody ends when one of them has ended. They meet at a store that rank 0 serves, as most do.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dist.spawn import _CONTEXT
from machines import machine
from torch import nn

import zero_compiler as zero

HOWS = ("killed", "stopped", "raising")
LONG_S = 120.0  # a timeout that nobody may wait for
OPTIONS = {"compute": "aten", "bucket_bytes": 1}
Fail = Callable[[], None]
_fails: dict[str, Fail] = {}


@torch.library.custom_op("leaving::here", mutates_args=())
def here(x: torch.Tensor, phase: str) -> torch.Tensor:
    if phase in _fails:
        _fails[phase]()
    return x.clone()


@here.register_fake
def _(x: torch.Tensor, phase: str) -> torch.Tensor:
    return torch.empty_like(x)


here.register_autograd(lambda ctx, grad: (here(grad, "backward"), None))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(here(torch.tanh(self.first(x)), "forward"))


class Job:
    """What a rank does, up to the place and behind it.

    Args:
        fail: makes this rank go; None on the others.
    """

    def __init__(self, rank: int, fail: Fail | None, folder: str, transport: str) -> None:
        self.rank, self.fail, self.folder, self.transport = rank, fail, folder, transport
        self.model: nn.Module = Net()
        self.call: Any = None

    def sharded(self, **fields: Any) -> nn.Module:
        torch.manual_seed(0)
        self.model = zero.shard(Net(), device="cpu", transport=self.transport, **fields)
        self.call = torch.compile(self.model, backend="zero", dynamic=False, options=OPTIONS)
        return self.model

    def trained(self) -> Any:
        """After a step."""
        self.sharded()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step(optimizer)
        return optimizer

    def step(self, optimizer: Any = None) -> None:
        loss = self.call(torch.ones(4, 16) + self.rank).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    def go_on(self) -> None:
        """Until a peer is missed."""
        for _ in range(4):
            self.step()

    def fails_in(self, owner: Any, name: str) -> None:
        """This rank goes where it calls a function, if it is the one that does."""
        if self.fail is not None:
            fail = self.fail
            assert hasattr(owner, name), f"{owner} has no {name}"
            setattr(owner, name, lambda *_, **__: fail())

    def go(self) -> None:
        if self.fail is not None:
            self.fail()


def before_shard(job: Job) -> None:
    job.go()
    job.sharded()


def before_init(job: Job) -> None:
    job.go()
    with zero.init(device="cpu"):
        Net()


def in_shard(job: Job) -> None:
    from zero_compiler.sharded.chunk_storage import ChunkStorage

    job.fails_in(ChunkStorage, "choose_transport")
    job.sharded()


def in_shard_early(job: Job) -> None:
    """Between the ranks' meeting and their agreement."""
    job.fails_in(sys.modules["zero_compiler.params.shard"], "collect")
    job.sharded()


def in_shard_values(job: Job) -> None:
    """As rank 0 sends its values."""
    from zero_compiler.sharded import blocking_transfers

    job.fails_in(blocking_transfers, "scatter_from_first")
    job.sharded()


def in_init(job: Job) -> None:
    with zero.init(device="cpu"):
        first = nn.Linear(16, 16)
        job.go()
        job.model = nn.Sequential(first, Net())


def in_init_end(job: Job) -> None:
    from zero_compiler.sharded.chunk_storage import ChunkStorage

    job.fails_in(ChunkStorage, "check_placed")
    with zero.init(device="cpu", transport=job.transport):
        job.model = Net()
    job.call = job.model
    job.go_on()


def deciding(job: Job) -> None:
    from zero_compiler.compile.loader import EngineLoader

    job.transport = "c10d"  # on two cores, or with what ranks read where it rests, there is nothing to decide
    hardware = Path(job.folder) / f"hardware.{job.rank}.json"
    hardware.write_text(json.dumps(machine()))
    job.sharded(hardware=str(hardware))
    job.fails_in(EngineLoader, "decide")
    job.go_on()


def compiling(job: Job) -> None:
    from zero_compiler.compile import backend

    job.sharded()
    job.fails_in(backend, "compile_segments")
    job.go_on()


def before_compiling(job: Job) -> None:
    """The others look for its process when it is gone."""
    job.sharded()
    job.go()
    time.sleep(2.0)
    job.go_on()


def making_optimizer(job: Job) -> None:
    from zero_compiler.optim.optimizer import StreamedOptimizer

    job.sharded()
    job.step()
    job.fails_in(StreamedOptimizer, "_allocate")
    job.fails_in(StreamedOptimizer, "_adopt")
    zero.optimizer(torch.optim.AdamW, job.model)
    job.go_on()


def stepping(job: Job) -> None:
    job.sharded()
    optimizer = zero.optimizer(torch.optim.AdamW, job.model)
    job.step(optimizer)
    if job.fail is not None:
        fail = job.fail
        optimizer.register_step_pre_hook(lambda *_: fail())
    optimizer.step()
    job.go_on()


def stepping_clipped(job: Job) -> None:
    job.sharded()
    optimizer = zero.optimizer(torch.optim.AdamW, job.model, max_grad_norm=1.0)
    job.step(optimizer)
    if job.fail is not None:
        fail = job.fail
        optimizer.register_step_pre_hook(lambda *_: fail())
    job.step(optimizer)
    job.go_on()


def torch_step(job: Job) -> None:
    optimizer = job.trained()
    if job.fail is not None:
        fail = job.fail
        optimizer.register_step_pre_hook(lambda *_: fail())
    job.step(optimizer)
    job.go_on()


def entering_gathered(job: Job) -> None:
    from zero_compiler.params import contexts

    job.trained()
    job.fails_in(contexts, "_open")
    with zero.gathered(job.model):
        pass
    job.go_on()


def in_gathered(job: Job) -> None:
    job.trained()
    with zero.gathered(job.model):
        job.go()
    job.go_on()


def in_gathered_write(job: Job) -> None:
    job.trained()
    with zero.gathered(job.model, write=True):
        job.go()
    job.go_on()


def leaving_gathered_write(job: Job) -> None:
    from zero_compiler.params import contexts

    job.trained()
    job.fails_in(contexts, "_check_equal")
    with zero.gathered(job.model, write=True):
        pass
    job.go_on()


def in_no_sync(job: Job) -> None:
    job.trained()
    with zero.no_sync(job.model):
        job.step()
        job.go()
    job.go_on()


def inspecting(job: Job) -> None:
    job.trained()
    job.fails_in(sys.modules["zero_compiler.tools.inspect"], "report_of")
    zero.inspect(job.model)
    job.go_on()


def loading_safetensors(job: Job) -> None:
    from safetensors.torch import save_file

    from zero_compiler.params import load

    job.trained()
    path = os.path.join(job.folder, f"weights.{job.rank}.safetensors")
    save_file(Net().state_dict(), path)
    job.fails_in(load, "_load")
    zero.load_safetensors(job.model, path)
    job.go_on()


def loading_state_dict(job: Job) -> None:
    job.trained()
    state = job.model.state_dict()
    job.go()
    job.model.load_state_dict(state)
    job.go_on()


def in_forward(job: Job) -> None:
    job.trained()
    if job.fail is not None:
        _fails["forward"] = job.fail
    job.go_on()


def in_backward(job: Job) -> None:
    job.trained()
    if job.fail is not None:
        _fails["backward"] = job.fail
    job.go_on()


def in_eager_forward(job: Job) -> None:
    job.sharded()
    job.call = job.model
    job.step()
    if job.fail is not None:
        _fails["forward"] = job.fail
    job.go_on()


def in_eager_backward(job: Job) -> None:
    job.sharded()
    job.call = job.model
    job.step()
    if job.fail is not None:
        _fails["backward"] = job.fail
    job.go_on()


def saving_checkpoint(job: Job) -> None:
    import torch.distributed.checkpoint as dcp

    job.trained()
    job.fails_in(dcp.FileSystemWriter, "write_data")
    dcp.save(job.model.state_dict(), checkpoint_id=os.path.join(job.folder, "checkpoint"))
    job.go_on()


def in_own_code(job: Job) -> None:
    job.trained()
    job.go()
    job.go_on()


PLACES: dict[str, Callable[[Job], None]] = {
    "before zero.shard": before_shard,
    "in zero.shard, before ranks agree": in_shard_early,
    "in zero.shard": in_shard,
    "in zero.shard, as values are sent": in_shard_values,
    "before zero.init": before_init,
    "in zero.init": in_init,
    "at the end of zero.init": in_init_end,
    "deciding a plan": deciding,
    "before compiling": before_compiling,
    "compiling": compiling,
    "making a zero.optimizer": making_optimizer,
    "in its step": stepping,
    "in its step that clips": stepping_clipped,
    "in a torch optimizer's step": torch_step,
    "entering zero.gathered": entering_gathered,
    "in zero.gathered": in_gathered,
    "in zero.gathered(write=True)": in_gathered_write,
    "leaving zero.gathered(write=True)": leaving_gathered_write,
    "in zero.no_sync": in_no_sync,
    "in zero.inspect": inspecting,
    "in zero.load_safetensors": loading_safetensors,
    "in load_state_dict": loading_state_dict,
    "in a forward": in_forward,
    "in a backward": in_backward,
    "in an eager forward": in_eager_forward,
    "in an eager backward": in_eager_backward,
    "in a checkpoint's save": saving_checkpoint,
    "in its own code": in_own_code,
}


def leave(
    place: str,
    how: str,
    world: int = 2,
    gone: int = 1,
    group_timeout_s: float = LONG_S,
    gloo: bool = True,
    transport: str = "auto",
    patience_s: float = 60.0,
    slow_s: float = 0.0,
) -> dict[int, tuple[float, str, str]]:
    """Of every other rank the seconds after which it ended, with which error, and its text. One that did not end by then
    has ``patience_s``, no error, and for a text what it has printed, with the stacks of its threads.

    Args:
        how: one of `HOWS`, or "slow": nobody goes, and rank ``gone`` needs ``slow_s`` there.
        gloo: whether ranks may use it for headers. It carries all else too, since there is no other backend here.
    """
    with socket.socket() as listener, tempfile.TemporaryDirectory(prefix="zero-leaving-") as folder:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        pipes, processes = {}, []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe()
            args = (
                theirs,
                rank,
                world,
                port,
                place,
                how,
                gone,
                group_timeout_s,
                gloo,
                transport,
                folder,
                slow_s,
            )
            process = _CONTEXT.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        try:
            ends = _collected(pipes, gone, how, patience_s)
            return {
                rank: end if end[1] else (*end[:2], _stacks(processes[rank], folder, rank))
                for rank, end in ends.items()
            }
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collected(
    pipes: dict[Any, int], gone: int, how: str, patience_s: float
) -> dict[int, tuple[float, str, str]]:
    waiting, ends, went = dict(pipes), {}, None
    end = time.monotonic() + 90.0
    while len(ends) < len(pipes) - 1 and waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]
            try:
                said = pipe.recv()
            except (EOFError, ConnectionResetError):
                del waiting[pipe]
                if rank != gone:
                    ends[rank] = (time.monotonic(), "died", "")
                continue
            if rank == gone and said[1] == "":
                went = said[0]
                end = went + patience_s
                if how == "slow":
                    continue  # it ends, too
            elif rank != gone:
                ends[rank] = said
            del waiting[pipe]
    assert went is not None, f"rank {gone} never came to the place: {ends}"
    for rank in pipes.values():
        if rank != gone and rank not in ends:
            ends[rank] = (went + patience_s, "", "")
    return {rank: (at - went, kind, text) for rank, (at, kind, text) in sorted(ends.items())}


def _stacks(process: Any, folder: str, rank: int) -> str:
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)
    return Path(folder, f"log.{rank}").read_text()


def _rank_main(
    pipe, rank, world, port, place, how, gone, group_timeout_s, gloo, transport, folder, slow_s
) -> None:
    log = Path(folder) / f"log.{rank}"
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    timeout = datetime.timedelta(seconds=group_timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    if not gloo:
        from zero_compiler.ranks import call_handshake

        call_handshake.has_gloo = lambda _: False
    dist.barrier()

    def fail() -> None:
        time.sleep(0.5)  # the others wait by then
        pipe.send((time.monotonic(), "", ""))
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "raising":
            raise ValueError("out of luck")

    def is_slow() -> None:
        fail()
        time.sleep(slow_s)

    job = Job(rank, None if rank != gone else is_slow if how == "slow" else fail, folder, transport)
    if how == "slow" and rank == gone and place == "deciding a plan":
        job.fail = None
        _slow(fail, slow_s)
    try:
        PLACES[place](job)
        said = (time.monotonic(), "ended well", "")
    except BaseException as error:
        said = (time.monotonic(), type(error).__name__, str(error))
        if rank == gone:
            raise  # as a script does
    with contextlib.suppress(OSError):
        pipe.send(said)
    if how == "slow":
        dist.barrier()  # nobody leaves before the others have read
    os._exit(0)


def _slow(fail: Fail, seconds: float) -> None:
    """This rank takes long to decide its first plan."""
    from zero_compiler.compile.loader import EngineLoader

    real, pending = EngineLoader.decide, [seconds]

    def decide(*args: Any, **kw: Any) -> str:
        if pending:
            fail()
            time.sleep(pending.pop())
        return real(*args, **kw)

    EngineLoader.decide = decide  # type: ignore[method-assign]
