"""Scripts in benchmarks/ run, on what is smallest; their figures are not looked at.

``large.py`` and ``resident.py`` have tests of their own, ``io_deepspeed.py`` needs DeepSpeed, and the others that are
left out take minutes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dist.two_hosts import can_have_hosts
from marks import thorough

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
PRESET = str(SCRIPTS.parent / "zero_compiler" / "presets" / "laptop.json")
CALLS = {
    "allocator": "--model tiny --steps 2 --warmup 1 --hardware PRESET",
    "bench": "--model tiny --modes ddp,fsdp2,zero3 --steps 2 --warmup 2 --hardware PRESET",
    "device_layer": "--layer 64 --hardware PRESET",
    "device_step_time": "--model tiny --dtype fp32 --steps 2 --warmup 2 --hardware PRESET",
    "export": "DIR --mib 4 --layers 2 --rounds 1",
    "gpu_predicted": "DIR",
    "host_overhead": "--layers 3 --modes fsdp2,zero3 --steps 2 --ranks 2",
    "largest_model": "DIR --device-gib 1 --most-blocks 2 --width 64 --vocab 64 --tokens 64 --hardware PRESET",
    "longest_sequence": "--layers 1 --width 64 --vocab 64 --first 32 --most 64 --hardware PRESET",
    "memory": "--model tiny --modes ddp,zero3 --steps 1 --warmup 2 --hardware PRESET",
    "one_layer": "DIR --inputs 128 --outputs 512 --limit-mib 0 --budget-mib 6 --steps 2 --hardware none",
    "pass_time": "--nodes 1000",
    "peer_failure": "--places 'before zero.init' --jobs 1",
    "planning": "--model tiny --parts 0.5",
    "predict": "--model tiny --steps 2 --warmup 2 --hardware PRESET",
    "quantised_losses": "--steps 10 --width 16 --layers 1",
    "ranges": "--layers 3 --rounds 3",
    "start_time": "--models tiny --modes zero3 --ranks 1 --warm 1",
    "states_on_host": "--model tiny --steps 2 --hardware PRESET",
    "tiers": "DIR --blocks 1 --width 64 --vocab 64 --tokens 8 --steps 2 --seconds 0.1 --compute aten --hardware PRESET"
    " --only none --only 'all in files'",
    "two_hosts": "--model tiny --modes ddp,fsdp2,zero2,zero3 --rate 1gbit --steps 2 --warmup 2 --hardware PRESET",
    "where": "--model tiny --steps 2 --hardware PRESET",
    "without": "DIR --cases weights --size tiny --compute aten --steps 1 --warmup 1 --hardware PRESET",
}
LEFT_OUT = {
    "activations",
    "buys",
    "compile_time",
    "gpu",  # has a test of its own
    "integrations",  # needs transformers, accelerate and Lightning
    "io_deepspeed",
    "large",
    "plan_quality",
    "planned_code",
    "resident",
}
PARTS = {"common", "limits", "models", "modes", "one_device", "simple_fsdp", "transformers_models"}


def test_every_script_is_run_or_left_out():
    assert {p.stem for p in SCRIPTS.glob("*.py")} == CALLS.keys() | LEFT_OUT | PARTS


# The others share with these how they begin, measure and save.
OFTEN = ("one_layer", "pass_time")


@pytest.mark.parametrize("script", [*OFTEN, *thorough(*(s for s in CALLS if s not in OFTEN))])
def test_it_runs_and_saves_what_it_found(script, tmp_path):
    if script == "two_hosts" and not can_have_hosts():
        pytest.skip("needs root, ip, tc and unshare: network namespaces")
    out = tmp_path / "out.json"
    words = shlex.split(CALLS[script].replace("PRESET", PRESET).replace("DIR", str(tmp_path)))
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *words, "--json", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(out.read_text())["machine"]
    assert out.with_suffix(".md").read_text().startswith("# ")


def stages_of_a_gpu(folder: Path, only: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(PRESET, folder / "the-CPU.json")
    words = [str(folder), "--results", str(folder), "--only", only]
    command = [sys.executable, str(SCRIPTS / "gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.thorough
def test_stages_of_a_gpu_follow_each_other_and_leave_their_results(tmp_path):
    done = stages_of_a_gpu(tmp_path, "b,d,f")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads((tmp_path / "stages.json").read_text())
    assert {name: row["how"] for name, row in told.items()} == dict.fromkeys("bdf", "done")
    assert [r["stage"] for r in json.loads((tmp_path / "f.json").read_text())["rows"]] == ["b"]
    assert (tmp_path / "f.md").read_text().startswith("# Predicted beside measured")


def test_stages_of_a_gpu_have_names(tmp_path):
    done = stages_of_a_gpu(tmp_path, "b,x")
    assert done.returncode == 2
    assert "--only: there is no stage x; there are a to f" in done.stderr
