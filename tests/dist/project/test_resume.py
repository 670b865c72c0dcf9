"""``examples/resume.py``: a job whose ranks are killed has the losses of one that was let alone."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import thorough

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
KILLED = str(Path(__file__).with_name("killed_training.py"))
RESUME = str(ROOT / "examples" / "resume.py")
FILES = ("--offload-params", "nvme", "--offload-optimizer", "nvme")
STEPS, SAVE_EVERY = 100, 4


def train(
    folder: Path, *given: str, ranks: int = 2, restarts: int = 0, script: tuple[str, ...] = (RESUME,)
) -> list[tuple[int, str]]:
    """Steps with their losses, in the order in which they were made."""
    (folder / "files").mkdir(exist_ok=True)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    fixed = ("--folder", folder / "run", "--compute", "aten", "--nvme-dir", folder / "files")
    size = ("--save-every", str(SAVE_EVERY), "--batch", "8", "--layers", "1")
    command = [
        sys.executable, *launcher, "--max-restarts", str(restarts), *script, *map(str, fixed), *size, *given
    ]  # fmt: skip
    held = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ZERO_DUMP")
    env = {k: v for k, v in os.environ.items() if k not in held} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=560, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return [(int(n), loss) for n, loss in re.findall(r"step +(\d+)  loss (\S+)", done.stdout)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Losses of a job that nobody kills, and that saves nothing before its end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    losses = dict(train(folder, "--steps", str(STEPS), "--save-every", "1000"))
    assert list(losses) == list(range(1, STEPS + 1))
    assert float(losses[STEPS]) < float(losses[1]) - 0.5
    return losses


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kills", "given"),
    [
        pytest.param(4, ("--beside", *FILES), id="some-beside-files"),
        *thorough((20, ()), (20, ("--beside",)), (20, ("--beside", *FILES))),
    ],
)
def test_a_killed_job_has_the_losses_of_one_that_is_not(tmp_path, undisturbed, kills, given):
    """In forward, backward, step and save, and wherever it is by then, one after the other."""
    log = tmp_path / "log"
    script = (KILLED, str(kills), os.environ.get("ZERO_TEST_SEED", "0"), str(log))
    made = train(tmp_path, "--steps", str(STEPS), *given, restarts=kills, script=script)
    told = log.read_text()
    wrong = [f"step {n}: {loss} instead of {undisturbed[n]}" for n, loss in made if loss != undisturbed[n]]
    assert not wrong, told + "\n".join(wrong)
    assert told.count("restart") == kills, told
    steps = [n for n, _ in made]
    assert set(steps) == set(range(1, STEPS + 1))
    # What was lost is what was made since the last save, and each time it goes on from one.
    begins = [b for a, b in itertools.pairwise(steps) if b != a + 1]
    assert begins, told
    assert all((b - 1) % SAVE_EVERY == 0 for b in begins), begins
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        f"step-{STEPS - SAVE_EVERY:08}",
        f"step-{STEPS:08}",
    ]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A folder with the checkpoint of step 8 of 16, without dropout, which each rank draws for itself; and losses."""
    folder = tmp_path_factory.mktemp("halfway")
    losses = dict(train(folder, "--steps", "16", "--dropout", "0", "--keep", "9"))
    for later in (12, 16):
        shutil.rmtree(folder / "run" / f"step-{later:08}")
    return folder / "run", losses


@pytest.mark.parametrize(
    ("ranks", "given"),
    thorough((4, FILES), (1, ()), (1, FILES), (2, FILES), (4, ())),
)
def test_other_ranks_and_tiers_go_on_with_the_same_samples(tmp_path, halfway, ranks, given):
    saved, wanted = halfway
    shutil.copytree(saved, tmp_path / "run")
    made = train(tmp_path, "--steps", "16", "--dropout", "0", *given, ranks=ranks)
    assert [n for n, _ in made] == list(range(9, 17))
    for n, loss in made:
        assert float(loss) == pytest.approx(float(wanted[n]), rel=1e-5), n
