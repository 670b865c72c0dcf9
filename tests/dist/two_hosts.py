"""Two hosts of one machine: network namespaces, in each of which processes are numbered anew.

with two_hosts(rate="1gbit", delay_s=0.002) as hosts:
    ended([started([*host, *torchrun(i, 2), "-m", "zero_compiler", ...]) for i, host in enumerate(hosts)])
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_LONGEST_S = 200  # that a job on two hosts may take
_MTU = 65_000  # of a delayed link: fewer packets for the process that carries them


def environment(**more: str) -> dict[str, str]:
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in left_out} | {"OMP_NUM_THREADS": "1"} | more


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What all of them said, once they have ended; shown where one failed.

    The first host comes last, where it is seen of a long text: without it the others fail too, whatever its reason.
    """
    late = []
    try:
        said = [p.communicate(timeout=_LONGEST_S)[0] for p in processes]
    except subprocess.TimeoutExpired:
        late = [
            f"host {i} has not ended within {_LONGEST_S} s"
            for i, p in enumerate(processes)
            if p.poll() is None
        ]
        for p in processes:
            p.kill()
        said = [p.communicate()[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert all(p.returncode == 0 for p in processes), "\n".join([*reversed(said), *late])
    return said


def started(command: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def torchrun(host: int, ranks: int, launcher: Sequence[str] = ("torch.distributed.run",)) -> list[str]:
    """Begins the command of one host, for so many ranks on each of two.

    Args:
        launcher: what takes the flags of torchrun: a module, and what stands before those flags.
    """
    return [
        *(sys.executable, "-m", *launcher, "--nproc-per-node", str(ranks), "--nnodes", "2"),
        *("--local-addr", f"10.77.0.{host + 1}", "--rdzv-backend", "c10d", "--rdzv-id", "t"),
        *("--rdzv-endpoint", "10.77.0.1:29500"),
        *("--rdzv-conf", f"is_host={host == 0}"),  # names of these hosts say nothing of their addresses
    ]


@contextlib.contextmanager
def two_hosts(rate: str | None = None, delay_s: float = 0.0) -> Iterator[list[list[str]]]:
    """Commands that run another one on each of two hosts, which are connected by "eth0".

    Args:
        rate: of what each sends, as ``tc`` has it; None: as fast as memory.
        delay_s: each packet comes so much later.
    """
    names = [f"zero{os.getpid()}h{i}" for i in range(2)]
    line: subprocess.Popen[str] | None = None

    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        if delay_s:
            script = str(Path(__file__).with_name("delay_line.py"))
            command = [sys.executable, script, *names, str(delay_s)]
            line = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert line.stdout is not None
            if line.stdout.readline() != "ready\n":
                raise OSError("no delayed line between two network namespaces")
        else:
            ends = [["eth0", "netns", name] for name in names]
            ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            if delay_s:
                ip("-n", name, "link", "set", "eth0", "mtu", str(_MTU), "txqueuelen", "2000")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            if rate is not None:
                shape = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate]
                ip("netns", "exec", name, "tc", *shape, "burst", "256kb", "limit", "64mb")
        yield [
            ["ip", "netns", "exec", n, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            for n in names
        ]
    finally:
        if line is not None:
            line.kill()
            line.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def can_have_hosts(rate: str | None = None, delay_s: float = 0.0) -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return False
    try:
        with two_hosts(rate, delay_s) as hosts:
            return subprocess.run([*hosts[0], "true"], capture_output=True).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return False
