"""Training under a quarter of the bytes of its model states, and the losses of the run without a limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "large.py"


def run(folder, name, *arguments):
    out = folder / f"{name}.json"
    command = [sys.executable, str(SCRIPT), str(folder), "--json", str(out), "--seconds", "0", "--compute", "aten"]
    done = subprocess.run([*command, *SIZE, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


# 180 million parameters: a quarter of their states must hold the libraries too.
SIZE = ("--blocks", "13", "--width", "1024", "--tokens", "16", "--steps", "3")


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_a_quarter_of_the_model_states_is_enough(overlap, tmp_path):
    extra = ["--overlap"] if overlap else []
    want = run(tmp_path, "resident", "--files", "none", "--limit-gib", "0", *extra)
    states = want["built"]["model_states_bytes"]
    assert want["memory"]["sampled_peak_bytes"] > states
    limit = states / 4
    made = run(tmp_path, "files", "--limit-gib", str(limit / 2**30), *extra)
    assert made["losses"] == want["losses"]
    memory = made["memory"]
    assert 0 < memory["sampled_peak_bytes"] <= limit, memory
    if memory["cgroup"] == "yes":  # the kernel kept it within the limit, page cache and all
        assert memory["cgroup_peak_bytes"] <= limit
    # What had to move moved, and little else. The first step reads libraries too.
    for step in made["steps"][1:]:
        for phase, must in made["built"]["must_bytes"]["later"].items():
            for got, want_ in zip(step["io_bytes"][phase], must, strict=True):
                assert 0.99 * want_ <= got <= 1.01 * want_ + (16 << 20), (phase, got, want_)
