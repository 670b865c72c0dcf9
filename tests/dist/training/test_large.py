"""Training under a quarter of the bytes of its model states, and the losses of the run without a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from marks import thorough

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "large.py"
# 261 million parameters: a quarter of their states must hold Python and torch too.
SIZE = ("--blocks", "13", "--width", "1280", "--vocab", "2048", "--tokens", "16", "--steps", "3")


def run(folder, name, *arguments):
    out = folder / f"{name}.json"
    command = [
        sys.executable,
        str(SCRIPT),
        str(folder),
        "--json",
        str(out),
        "--seconds",
        "0",
        "--compute",
        "aten",
    ]
    done = subprocess.run(
        [*command, *SIZE, *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory):
    return run(tmp_path_factory.mktemp("unlimited"), "none", "--files", "none", "--limit-gib", "0")


@pytest.mark.parametrize("overlap", [False, *thorough(True)])
def test_a_quarter_of_the_model_states_is_enough(overlap, unlimited, tmp_path):
    states = unlimited["built"]["model_states_bytes"]
    assert unlimited["memory"]["sampled_peak_bytes"] > states
    limit = states // 4
    made = run(tmp_path, "files", "--limit-gib", str(limit / 2**30), *(["--overlap"] if overlap else []))
    assert made["losses"] == unlimited["losses"]
    memory = made["memory"]
    if memory["cgroup"] == "yes":  # the kernel kept it within the limit, page cache and all
        assert 0 < memory["cgroup_peak_bytes"] <= limit
    else:  # a sample counts pages of libraries too: of a build for accelerators a third of this limit
        assert 0 < memory["sampled_peak_bytes"] <= limit, memory
    # What had to move moved, and little else. The first step reads libraries too. With overlap the last updates of a
    # backward end in the step of the optimizer.
    due = [sum(x) for x in zip(*made["built"]["must_bytes"]["later"].values(), strict=True)]
    for step in made["steps"][1:]:
        moved = [sum(x) for x in zip(*step["io_bytes"].values(), strict=True)]
        for got, must in zip(moved, due, strict=True):
            assert 0.99 * must <= got <= 1.01 * must + (16 << 20), (moved, due)
