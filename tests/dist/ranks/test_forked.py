"""A forked child of a rank has no part in its process groups: what would wait there for ever is an error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero

X = torch.ones(2, 8)
OF_TORCH = "autograd's threading in combination with fork"


def _in_child(work: Callable[[], object]) -> str:
    """How ``work`` ends in a forked child: "fine", an error's class and text, or "hangs"."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(15)
        try:
            work()
            said = "fine"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}" if str(error) else traceback.format_exc()
        os.write(write, said.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    ended = os.waitpid(pid, 0)[1]
    return "hangs" if os.WIFSIGNALED(ended) else said


def _gathered(model: nn.Module) -> None:
    with zero.gathered(model):
        pass


def _loaded(items: list, work: Callable[[], object]) -> None:
    """In a worker of a DataLoader, which forks, too."""

    class Calls(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, at: int) -> int:
            items.append(work())
            return at

    multiprocessing.current_process()._config["daemon"] = False  # such processes may have no workers
    list(torch.utils.data.DataLoader(Calls(), num_workers=1, timeout=20, multiprocessing_context="fork"))


def calls(rank: int, world: int) -> list[str]:
    model = zero.shard(nn.Linear(8, 8), device="cpu")
    plain = nn.Linear(8, 8)
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    stage0 = torch.compile(plain, backend="zero", options={"compute": "aten"})
    streamed = zero.optimizer(torch.optim.AdamW, model, lr=0.1, max_grad_norm=1.0)
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    stage0(X).sum().backward()
    run(X).sum().backward()
    waiting = run(X).sum()

    def init() -> None:
        with zero.init(device="cpu"):
            nn.Linear(8, 8)

    refused = {
        "compiled": lambda: run(X),
        "compiled without gradients": lambda: torch.no_grad()(run)(X),
        "backward": lambda: waiting.backward(),
        "eager": lambda: model(X),
        "plain parameters": lambda: stage0(X).sum().backward(),
        "gathered": lambda: _gathered(model),
        "shard": lambda: zero.shard(nn.Linear(8, 8), device="cpu"),
        "init": init,
        "step with a norm": lambda: streamed.step(),
        "another compile": lambda: torch.compile(model, backend="zero", options={"compute": "aten"})(
            torch.ones(3, 5, 8)
        ),
    }
    wrong = []
    # torch 2.15, built for an accelerator, lets no child compute gradients by itself.
    others = _in_child(lambda: nn.Linear(8, 8)(X).sum().backward())
    if others != "fine" and OF_TORCH not in others:
        wrong.append(f"a model of others: {others}")
    for what, work in refused.items():
        said = _in_child(work)
        by_torch = others != "fine" and OF_TORCH in said
        if "forked child of a process with a process group" not in said and not by_torch:
            wrong.append(f"{what}: {said}")
    # What needs no other rank is done, and what has a group of its own.
    for what, work in {
        "step": own.step,
        "state_dict": lambda: {k: v.to_local().clone() for k, v in model.state_dict().items()},
    }.items():
        said = _in_child(work)
        if said != "fine":
            wrong.append(f"{what}: {said}")
    try:
        _loaded([], lambda: run(X))
        wrong.append("a worker of a DataLoader was let compute")
    except RuntimeError as error:
        if "forked child of a process with a process group" not in str(error):
            wrong.append(f"DataLoader: {str(error)[-300:]}")
    # The parent goes on.
    waiting.backward()
    own.step()
    run(X).sum().backward()
    dist.barrier()
    return wrong


@pytest.mark.slow
def test_calls_in_a_forked_child_are_errors():
    for rank, wrong in enumerate(run_ranks(calls, 2)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


def compiled(rank: int, world: int) -> str:
    model = zero.shard(nn.Linear(8, 8), device="cpu")
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    run(X)
    return _in_child(lambda: run(X))


def test_a_compiled_call_in_a_forked_child():
    for said in run_ranks(compiled, 2):
        assert said.startswith("TransferError: this is a forked child of a process with a process group")
