"""The folder of checkpoints of the examples: what has a name there is whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("checkpoints", None)
    from checkpoints import Checkpoints

    return lambda keep=2: Checkpoints(tmp_path / "run", keep)


def state(value):
    return {"x": torch.full((3,), float(value))}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("beside", [False, True])
def test_the_newest_are_kept_and_the_newest_is_loaded(tmp_path, made, beside):
    checkpoints = made()
    assert checkpoints.load(state(0)) is None
    for step in (1, 5, 20):
        value = state(step)
        checkpoints.save(step, value, beside=beside)
        value["x"].zero_()  # training goes on
    checkpoints.wait()
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000005", "step-00000020"]
    found = state(0)
    assert made().load(found) == 20
    assert found["x"].tolist() == [20.0] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("beside", [False, True])
def test_a_save_that_fails_leaves_the_ones_before(tmp_path, made, beside, monkeypatch):
    checkpoints = made()
    checkpoints.save(1, state(1))
    with monkeypatch.context() as patch:
        patch.setattr(
            dcp.FileSystemWriter, "finish", raising
        )  # all files are there, and that it is whole is not said
        if beside:
            checkpoints.save(2, state(2), beside=True)
        with pytest.raises(CheckpointException, match="disk is full"):
            checkpoints.wait() if beside else checkpoints.save(2, state(2))
    assert checkpoints.steps() == [1]
    assert ".unfinished-00000002" in os.listdir(tmp_path / "run")
    found = state(0)
    again = made()
    assert os.listdir(tmp_path / "run") == ["step-00000001"]
    assert again.load(found) == 1
    assert found["x"].tolist() == [1.0] * 3


def raising(*_, **__):
    raise OSError("the disk is full")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_one_that_is_removed_loses_its_name_first(tmp_path, made, monkeypatch):
    checkpoints = made(1)
    checkpoints.save(1, state(1))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", raising)  # killed before the first file is gone
        with pytest.raises(OSError, match="full"):
            checkpoints.save(2, state(2))
    assert sorted(os.listdir(tmp_path / "run")) == [".unfinished-00000001", "step-00000002"]
    assert made(1).load(state(0)) == 2
