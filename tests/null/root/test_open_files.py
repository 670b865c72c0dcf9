"""A process that may open few files is told that, and which limit that is, wherever it meets it."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from null.small import batch, mlp

import zero_compiler as zero
from zero_compiler.errors import ZeroError


def _train(directory: str, **fields) -> None:
    model = zero.shard(
        mlp(), device="cpu", nvme_dir=directory, offload_params="nvme", offload_grads="nvme", **fields
    )
    opt = zero.optimizer(torch.optim.AdamW, model, lr=0.1)
    for _ in range(2):
        model(batch()).sum().backward()
        opt.step()
        opt.zero_grad()


def _with_limit(limit: int, directory: str, **fields) -> str:
    """How training ends in a child that may have so many files open, and cannot raise that."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            _train(directory, **fields)
            said = "fine"
        except ZeroError as error:
            said = str(error)
        except BaseException as error:
            said = f"not ours: {type(error).__name__}: {error}"
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(said) if said else "hangs"


def print_ends(directory: str, keep: bool) -> None:
    """How training ends under each limit, up to the first under which it ends well."""
    _train(directory)  # imports what it needs
    gc.collect()
    for limit in range(3, 100, 1 if keep else 4):
        said = _with_limit(limit, directory, nvme_keep=keep)
        print(json.dumps([limit, said]), flush=True)
        if said == "fine":
            return


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_too_few_open_files(keep, tmp_path):
    # In a process of its own: threads that other tests have left would be missing in the children of a fork.
    code = f"from null.root.test_open_files import print_ends; print_ends({str(tmp_path)!r}, {keep})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, env=env)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    for limit, said in ends[:-1]:
        assert f"may have {limit} files open at a time: raise that limit (ulimit -n)" in said, said
        assert "\n" not in said
    assert len(ends) > 1
    assert ends[-1][1] == "fine"
