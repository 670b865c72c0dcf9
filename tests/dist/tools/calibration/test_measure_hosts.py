"""Calibration under torchrun on two hosts: both levels of links, in one file, by which collectives take their time."""

from __future__ import annotations

import json
import sys

import pytest
from dist.two_hosts import can_have_hosts, ended, started, torchrun, two_hosts

from zero_compiler.cost import hardware

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.alone]

# What one host measures of itself takes a minute, and is tested by itself.
OF_ONE_HOST = """
import dataclasses, os, sys
import torch
import zero_compiler.tools.calibration.calibrate as calibrate
from zero_compiler.cost import hardware
from zero_compiler.tools import cli
torch.set_num_threads(1)

def measure(worlds, directory, say, threads):
    say(f"rank {os.environ['RANK']} measures {worlds}")
    return dataclasses.replace(hardware.load("laptop"), name="mine")

calibrate.calibrate = measure
"""
OUTPUT = OF_ONE_HOST + 'sys.argv[1:] = ["calibrate", "--output", sys.argv[1]]\ncli.main()\n'
CACHES = (
    OF_ONE_HOST
    + """
os.environ["XDG_CACHE_HOME"] = os.path.join(sys.argv[1], os.environ["GROUP_RANK"])
sys.argv[1:] = ["calibrate"]
cli.main()
"""
)
# Engines of both transports, with what is predicted of their transfers.
PREDICTED = """
import json, os, statistics, sys, time
import torch
import torch.distributed as dist
from zero_compiler.cost import hardware
from zero_compiler.cost.placed_hardware import over_c10d, placed
from zero_compiler.ranks.mesh import make_group
from zero_compiler.ranks.transport import choose, rank_hosts
from zero_compiler.runtime import _C
from zero_compiler.tools.calibration.measure_hosts import job, together
torch.set_num_threads(1)
rows = {}
with job() as of:
    spec = together(of, lambda: hardware.load("laptop"), lambda line: None)
    group = make_group(None, "cpu")
    world, way = group.world, choose(group, "auto", "test", [])
    once = placed(spec, group, rank_hosts(group, "test"), once=True)
    for name, machine, more in (
        ("c10d", over_c10d(once), {"series": 1}), ("once", once, {"series": 2, "hosts": way.hosts.for_engine()})
    ):
        engine = _C.Engine(group.pg, group.rank, world, **more)
        full = torch.ones(1 << 22)
        part = full[: full.numel() // world].clone()
        scratch = engine.add_arena(2 * full.nbytes, torch.device("cpu"))
        gather = engine.add_gather(scratch, full.dtype, "gather", [(part.numel(), [full.numel()], 0)], -1)
        args = "reduce", [(part.numel(), [full.numel()])], 0, False, full.dtype, world
        reduce = engine.add_reduce(scratch, full.dtype, *args)

        def gathered():
            engine.gather_start(gather, [part])
            engine.gather_wait(gather)
            engine.release(gather)

        def reduced():
            engine.reduce_start(reduce, [full])
            engine.reduce_wait(reduce)

        for kind, call in (("all_gather", gathered), ("reduce_scatter", reduced)):
            times = []
            for _ in range(6):
                dist.barrier()
                begun = time.perf_counter()
                call()
                times.append((time.perf_counter() - begun) * 1e6)
            found = [None] * world
            dist.all_gather_object(found, statistics.median(times[1:]))
            rows[f"{name} {kind}"] = [machine.collective(kind, world).us(full.nbytes), max(found)]
        engine.close()
    if of.rank == 0:
        json.dump({"rows": rows, "between": dataclasses.asdict(spec.between_hosts)}, open(sys.argv[1], "w"))
""".replace("import json, os", "import dataclasses, json, os")


def on_two_hosts(tmp_path, script: str, ranks: int, rate: str, delay_s: float = 0.0) -> list[str]:
    """What each host said that ran the script, given the path "out"."""
    if not can_have_hosts(rate, delay_s):
        pytest.skip("needs root, ip, tc and unshare: network namespaces")
    (tmp_path / "script.py").write_text(script)
    with two_hosts(rate, delay_s) as hosts:
        return ended(
            [
                started(
                    [*host, *torchrun(i, ranks), str(tmp_path / "script.py"), str(tmp_path / "out")],
                    GLOO_SOCKET_IFNAME="eth0",
                )
                for i, host in enumerate(hosts)
            ]
        )


def test_a_slow_link_with_a_delay_is_found(tmp_path):
    """1 Gbit/s is 125 bytes a microsecond. gloo sends when it has heard that the receiver is ready: a message takes two
    ways of 2 ms."""
    first, second = on_two_hosts(tmp_path, OUTPUT, 1, "1gbit", 0.002)
    spec = hardware.load(str(tmp_path / "out"))
    assert (spec.name, spec.devices_per_host) == ("mine", 1)
    assert "between 2 hosts with one rank each: measured" in spec.source
    link = spec.between_hosts
    assert 0.85 * 125 < link.bytes_per_us < 1.15 * 125
    assert link.host_bytes_per_us == link.bytes_per_us
    assert 4000 / 1.5 < link.latency_us < 4000 * 1.5
    assert not link.ring
    # One rank measures, tells and writes.
    assert "rank 0 measures [1]" in first
    assert "between 2 hosts: one rank of each" in first
    assert "kept in" in first
    assert "measures" not in second
    assert "kept in" not in second
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == ["out"]


def test_ranks_of_one_host_write_one_file_of_one_level(tmp_path):
    (tmp_path / "script.py").write_text(OUTPUT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (said,) = ended([started([*launch, str(tmp_path / "script.py"), str(tmp_path / "out")])])
    spec = hardware.load(str(tmp_path / "out"))
    assert (spec.devices_per_host, spec.between_hosts) == (None, None)
    assert said.count("rank 0 measures [2]") == said.count("kept in") == 1
    assert "rank 1" not in said


def test_each_host_keeps_what_all_have_measured(tmp_path):
    """A job on these hosts is refused where they plan for different machines."""
    on_two_hosts(tmp_path, CACHES, 1, "2gbit")
    kept = [tmp_path / "out" / host / "zero_compiler" / "hardware.json" for host in "01"]
    first, second = (path.read_text() for path in kept)
    assert first == second
    assert json.loads(first)["devices_per_host"] == 1


def test_collectives_take_the_time_that_is_predicted_for_two_levels(tmp_path):
    """Two ranks a host share 1 Gbit/s. Over c10d 16.8 MB cross twice; once where ranks of a host share memory."""
    on_two_hosts(tmp_path, PREDICTED, 2, "1gbit")
    found = json.loads((tmp_path / "out").read_text())
    assert 0.85 * 125 < found["between"]["host_bytes_per_us"] < 1.15 * 125
    for name, (predicted, measured) in found["rows"].items():
        assert 0.75 * measured < predicted < 1.25 * measured, (name, found)
    for kind in ("all_gather", "reduce_scatter"):
        assert found["rows"][f"once {kind}"][1] < 0.65 * found["rows"][f"c10d {kind}"][1], found
