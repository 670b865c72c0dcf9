"""The examples, run as a user runs them: in processes of their own, under torchrun or alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from marks import thorough

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SHORT = ["--compute", "aten", "--layers", "1", "--width", "64", "--batch", "4", "--context", "32"]
both = pytest.mark.parametrize("ranks", [*thorough(1), 2])


def command(name: str, *args: str, ranks: int = 1) -> list[str]:
    script = [str(EXAMPLES / name), *args]
    if ranks == 1:
        return [sys.executable, *script]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *script,
    ]


def environment() -> dict[str, str]:
    held = ("ZERO_DUMP", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in held} | {"OMP_NUM_THREADS": "1"}


def run(cwd: Path, *given: str, code: int = 0, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        given, cwd=cwd, env=environment(), text=True, capture_output=True, timeout=timeout, check=False
    )
    assert done.returncode == code, f"{given}\n{done.stdout}\n{done.stderr}"
    return done


def figures(text: str, row: str) -> list[int]:
    line = next(x for x in text.splitlines() if x.startswith(row))
    return [int(x.replace(",", "")) for x in re.findall(r"\d[\d,]*", line.removeprefix(row))]


@both
def test_demo(tmp_path, ranks):
    done = run(tmp_path, *command("demo.py", "--steps", "4", *SHORT, ranks=ranks))
    lines = done.stdout.splitlines()
    losses = [x for x in lines if "validation loss" in x]
    assert re.fullmatch(r"validation loss: \d+\.\d+", losses[-1])
    assert 4.0 < float(losses[-1].split(": ")[1]) < 6.0  # log(256) = 5.55 at the start, and four steps
    assert sum(x.startswith("tokens/s: ") for x in lines) == 1
    assert "step    4 of 4" in done.stdout
    for rank in range(ranks):
        at_rest, planned_rest, peak, planned_peak, _ = figures(done.stdout, f"rank {rank}")
        batch = 2 * 8 * 4 * 32
        # Beside the plan: the batch, the loss and the reduction that tells it.
        assert planned_rest <= at_rest <= planned_rest + batch + 4096
        assert peak <= planned_peak + batch + 4096
    folder = tmp_path / ".zero" / "demo"
    assert str(folder.relative_to(tmp_path)) in done.stdout
    assert (folder / "frame0" / "backward" / "program.txt").stat().st_size > 0
    assert json.loads((folder / "plan.json").read_text())["world"] == ranks
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.alone
def test_demo_with_its_defaults(tmp_path):
    """What README says of ``make demo``: two ranks, under three minutes, from log(256) = 5.5 nats a byte to below 2.8."""
    start = time.monotonic()
    done = run(tmp_path, *command("demo.py", "--ranks", "2"))
    seconds = time.monotonic() - start
    losses = [float(x) for x in re.findall(r"training loss ([\d.]+)  norm", done.stdout)]
    assert losses[0] > 4.5
    assert float(done.stdout.splitlines()[-1].removeprefix("validation loss: ")) < 2.8
    for rank in range(2):
        _, _, peak, planned, _ = figures(done.stdout, f"rank {rank}")
        assert planned / 2 < peak <= planned + 2 * 8 * 8 * 128 + 4096  # the batch and the loss
    # With the imports and the compilation, on two cores that nothing else uses.
    assert seconds < 180, done.stdout


def children(pid: int) -> list[int]:
    """Processes that ``pid`` has started and that run yet."""
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """A process that has ended may stand in the table until somebody asks for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("when", "whole_group", "compute"),
    [
        ("compiling", True, "aten"),
        ("step    1", True, "aten"),
        ("step    1", False, "aten"),
        ("compiling", True, "inductor"),
    ],
)
def test_demo_ends_on_an_interrupt(tmp_path, when, whole_group, compute):
    """All ranks leave at once, whether they compile or train, and whoever hears it: ``kill`` tells the parent alone,
    Ctrl-C on a terminal every process of its group. Nobody prints a traceback, and nobody stays behind, Inductor's
    compilers neither."""
    given = command("demo.py", "--ranks", "2", "--steps", "5000", *SHORT, "--compute", compute)
    env = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    demo = subprocess.Popen(
        given, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    for line in demo.stdout:
        if line.startswith(when):
            break
    ranks = children(demo.pid)
    assert len(ranks) >= 2
    if compute == "inductor":
        wait_for(lambda: any(children(pid) for pid in ranks), 60)
        ranks += [child for pid in ranks for child in children(pid)]
    time.sleep(0.5)
    start = time.monotonic()
    os.killpg(demo.pid, signal.SIGINT) if whole_group else demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert demo.returncode == 130, f"{out}\n{err}"
    assert "Traceback" not in out + err
    assert "interrupted" in err
    wait_for(lambda: not any(runs(pid) for pid in ranks), 5)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--width", "100"], "--width: must be a multiple of 32"),
        (["--steps", "0"], "--steps: must be at least 1"),
        (["--stage", "4"], "--stage: invalid choice"),
        (["--lr", "-1"], "--lr: must be above 0"),
    ],
)
def test_demo_refuses_wrong_arguments(tmp_path, args, words):
    done = run(tmp_path, *command("demo.py", "--ranks", "2", *args), code=2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def plan_of_the_mlp(cwd: Path, ranks: int) -> str:
    return run(cwd, *command("mlp_plan.py", ranks=ranks)).stdout


@both
def test_mlp_plan(tmp_path, ranks):
    text = plan_of_the_mlp(tmp_path, ranks)
    for kind in (
        "input",
        "zero.unshard",
        "zero.reduce_grad",
        "gather",
        "wait",
        "compute",
        "release",
        "reduce-scatter",
    ):
        assert f"# {kind}: " in text
    assert "gather          second.weight float32[64, 256]" in text
    assert "compute         segment 0: first" in text
    assert figures(text, "parameters")[0] == 2 * 65536 // ranks


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the page shows the names of torch 2.13's graph"
)
def test_the_page_on_plans_shows_what_mlp_plan_prints(tmp_path):
    text = plan_of_the_mlp(tmp_path, 2)
    page = (ROOT / "docs" / "reading-plans.md").read_text()
    before, after = text.split("\nAFTER", 1)
    assert before.strip() in page
    assert ("AFTER" + after).split("\nMEMORY")[0].strip() in page


@both
def test_decorated(tmp_path, ranks):
    done = run(tmp_path, *command("decorated.py", ranks=ranks))
    held = [int(x.replace(",", "")) for x in re.findall(r"rank \d: ([\d,]+) of", done.stdout)]
    assert len(held) == ranks
    assert sum(held) == 301_066
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("ranks", [*thorough(1), 2])
def test_finetune_transformers(tmp_path, ranks):
    pytest.importorskip("transformers")
    where = tmp_path / "checkpoint"
    given = ["--steps", "6", "--compute", "aten", "--checkpoint", str(where)]
    done = run(tmp_path, *command("finetune_transformers.py", *given, ranks=ranks))
    after, before = re.search(r"load: ([\d.]+) \(before: ([\d.]+)\)", done.stdout).groups()
    assert after == before
    assert (where / ".metadata").exists()
    losses = [float(x) for x in re.findall(r"step +\d+  loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
