"""Runs a function on several ranks, each a process of its own with a process group, by default on gloo.

    from dist.spawn import run_ranks

    def body(rank, world, n):
        ...
        return value            # anything that pickles

    def test_it():
        first, second = run_ranks(body, 2, 16)

Processes come from a fork server that has imported torch, its compiler, zero_compiler and the models of transformers
already, so a session pays for the imports once, and not once a rank (the compiler's alone are a second of a rank's
time, and so are those of a first model). Where there is an accelerator each is started afresh: what these imports ask
of CUDA, its number of devices, makes it unusable in processes that fork from theirs.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Collection
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

_PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    *(f"transformers.models.{m}.modeling_{m}" for m in ("gpt2", "llama", "bert", "t5", "vit", "mixtral")),
    "zero_compiler",
    "zero_compiler.compile.backend",
    "zero_compiler.runtime._C",
]


def _context() -> Any:
    if torch.accelerator.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


_CONTEXT = _context()


def collect_seldom() -> None:
    """Compiling makes many objects and few cycles: collections take a fifth of its time, unless they leave alone what
    has been imported, which lives as long as the process, and come seldom."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 10)


class RankFailed(RuntimeError):
    """A rank raised, died or took too long; the text holds its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 150.0,
    group_timeout: float | None = None,
    group: bool = True,
    backend: str = "gloo",
    may_die: Collection[int] = (),
) -> list[Any]:
    """Calls ``fn(rank, world, *args)`` on each of `world` ranks and returns their results in order.

    `fn` is a function at the top level of a file. With `group` there is a default process group on `backend`, whose
    collectives wait for `group_timeout` seconds (by default `timeout`). A rank in `may_die` may exit without a
    result, which is then None. The first rank to raise ends the others.

    A `backend` other than gloo is that of the accelerator: each rank then has a device of its own, as far as there are
    so many.
    """
    with tempfile.TemporaryDirectory(prefix="zero-ranks-") as folder:
        source = (fn.__module__, sys.modules[fn.__module__].__file__, fn.__qualname__)
        call = pickle.dumps(args)
        processes = []
        pipes = []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_rank_main,
                args=(
                    theirs,
                    rank,
                    world,
                    source,
                    call,
                    dict(os.environ),
                    folder,
                    backend if group else None,
                    group_timeout or timeout,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(processes, pipes, timeout, frozenset(may_die), Path(folder))
        finally:
            for pipe in pipes:
                pipe.close()  # what the ranks wait for before they leave
            for process in processes:
                process.join(timeout=5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(
    processes: list, pipes: list, timeout: float, may_die: frozenset[int], folder: Path
) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(_describe_hang(sorted(waiting.values()), processes, timeout, folder))
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                if rank in may_die:
                    continue
                processes[rank].join()
                raise RankFailed(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not ok:
                raise RankFailed(f"rank {rank} of {len(pipes)} failed:\n{value}")
            results[rank] = pickle.loads(value)
    return results


def _describe_hang(ranks: list[int], processes: list, timeout: float, folder: Path) -> str:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    lines = [f"no answer after {timeout:g} s from ranks {ranks}"]
    for rank in ranks:
        stack = folder / f"stack.{rank}"
        lines.append(f"rank {rank}:\n{stack.read_text() if stack.exists() else '(not started)'}")
    return "\n".join(lines)


def _rank_main(pipe, rank, world, source, call, environment, folder, backend, group_timeout) -> None:
    collect_seldom()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
    with open(os.path.join(folder, f"stack.{rank}"), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            result = (True, pickle.dumps(_run(rank, world, source, call, folder, backend, group_timeout)))
        except BaseException:
            result = (False, traceback.format_exc())
        # Ranks leave together: one that left early would close its sockets while a peer still reads from them.
        with contextlib.suppress(BrokenPipeError, EOFError, ConnectionResetError):
            pipe.send(result)
            pipe.recv()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the interpreter's shutdown: after a failure, threads of the group may still wait for peers.
        os._exit(0)


def _run(rank, world, source, call, folder, backend, group_timeout):
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn = _load(*source)
    args = pickle.loads(call)
    if backend is None:
        return fn(rank, world, *args)
    if backend != "gloo":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=group_timeout),
    )
    return fn(rank, world, *args)


def _load(module_name: str, path: str, qualname: str):
    """The function, from its file: pytest may import test files under names that a child cannot import."""
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        first = module_name.partition(".")[0]
        if first not in sys.modules and importlib.util.find_spec(first) is None:
            sys.modules[first] = types.ModuleType(first)  # pickle asks for it
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = sys.modules[module_name]
    for name in qualname.split("."):
        found = getattr(found, name)
    return found
