"""Ranks that stay: one set of processes serves many examples, since to start them costs more than an example.

    pool = Pool(4)
    found = pool.run(body, example, timeout=20.0)   # what body(rank, world, example) returned on each rank
    pool.close()

An example that does not end in time is a failure with the stacks of all ranks. After any failure the set is given up,
for ranks may wait for each other in it; the next example starts a new one.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from .spawn import _CONTEXT, RankFailed, _describe_hang, _load, collect_seldom


class Pool:
    """``world`` ranks of one gloo process group, started when the first example comes.

    Args:
        group_timeout: of the process group, in seconds; longer than any example, so that none ends by it.
    """

    def __init__(self, world: int, group_timeout: float = 300.0) -> None:
        self._world, self._group_timeout = world, group_timeout
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """What ``fn(rank, world, *args)`` returns on each rank; ``fn`` is a function at the top level of a file.

        Raises:
            RankFailed: a rank raised, died, or did not return within ``timeout`` seconds; with traceback or stacks.
        """
        if not self._processes:
            self._start()
            timeout += 60.0  # the imports
        source = (fn.__module__, sys.modules[fn.__module__].__file__, fn.__qualname__)
        try:
            for pipe in self._pipes:
                pipe.send((source, pickle.dumps(args)))
            return self._collect(timeout)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zero-pool-")
        for rank in range(self._world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve,
                args=(theirs, rank, self._world, dict(os.environ), self._folder.name, self._group_timeout),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, timeout: float) -> list[Any]:
        assert self._folder is not None
        results: list[Any] = [None] * self._world
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            # A peer of one that failed may say more, or wait for it for ever.
            left = min(deadline - time.monotonic(), 2.0) if failed else deadline - time.monotonic()
            ready = connection.wait(list(waiting), timeout=max(0.0, left))
            if not ready:
                late = sorted(waiting.values())
                stacks = _describe_hang(late, self._processes, timeout, Path(self._folder.name))
                raise RankFailed("\n".join([*failed.values(), stacks]))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    ok, value = False, "it died"
                if ok:
                    results[rank] = pickle.loads(value)
                else:
                    failed[rank] = f"rank {rank} of {self._world} failed:\n{value}"
        if failed:
            raise RankFailed("\n".join(failed.values()))
        return results

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(
    pipe: Any, rank: int, world: int, environment: dict[str, str], folder: str, group_timeout: float
) -> None:
    """A rank: it calls what comes through the pipe until that is closed."""
    import torch.distributed as dist

    collect_seldom()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(os.path.join(folder, f"stack.{rank}"), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=group_timeout),
        )
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                source, call = pipe.recv()
                try:
                    result = (True, pickle.dumps(_load(*source)(rank, world, *pickle.loads(call))))
                except BaseException:
                    result = (False, traceback.format_exc())
                pipe.send(result)
        os._exit(0)
