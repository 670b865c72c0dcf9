"""What runs have left in a directory of theirs, as ``zero-compiler doctor`` lists it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
import torch
from null.small import mlp
from typer.testing import CliRunner

import zero_compiler as zero
from zero_compiler.errors import ConfigError
from zero_compiler.tools.cli import app
from zero_compiler.tools.kept_files import kept_files

LEAVES = """
import os, sys, torch
import zero_compiler as zero
model = zero.shard(torch.nn.Linear(64, 64), device="cpu", nvme_dir=sys.argv[1], offload_params="nvme", nvme_keep=True)
os._exit(9)  # as one that is killed
"""


def _said(*directories) -> str:
    flags = [part for directory in directories for part in ("--nvme-dir", str(directory))]
    return CliRunner().invoke(app, ["doctor", *flags]).output


def test_files_of_a_run_that_lasts_are_not_to_be_removed(tmp_path):
    model = zero.shard(mlp(), device="cpu", nvme_dir=str(tmp_path), offload_params="nvme", nvme_keep=True)
    (tmp_path / "notes.txt").write_text("of the user")
    (tmp_path / "zero-results").write_text("of the user, too")
    kept = list(kept_files(str(tmp_path)))
    assert [k.in_use for k in kept] == [True] * len(kept) != []
    assert {k.pid for k in kept} == {os.getpid()}
    said = _said(tmp_path)
    assert f"in use by process {os.getpid()}" in said
    assert "rm --" not in said
    assert "notes.txt" not in said
    assert "zero-results" not in said
    del model


def test_a_file_that_is_held_open_is_in_use_whoever_made_it(tmp_path):
    """In another container the process has another number."""
    model = zero.shard(mlp(), device="cpu", nvme_dir=str(tmp_path), offload_params="nvme", nvme_keep=True)
    for name in os.listdir(tmp_path):
        os.rename(tmp_path / name, tmp_path / name.replace(f"-{os.getpid()}-", "-4194999-", 1))
    assert {(k.pid, k.in_use) for k in kept_files(str(tmp_path))} == {(4194999, True)}
    del model


def test_a_number_that_another_process_has_now(tmp_path):
    path = tmp_path / f"zero-{os.getpid()}-0123abcd-parameters-of-rank-0"
    path.write_bytes(bytes(5000))
    os.utime(path, (1e9, 1e9))
    assert [k.in_use for k in kept_files(str(tmp_path))] == [False]


@pytest.mark.slow
def test_what_an_ended_run_has_left_is_listed_and_removed_as_it_says(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], check=False)
    assert done.returncode == 9
    kept = list(kept_files(str(tmp_path)))
    assert [k.in_use for k in kept] == [False]
    assert kept[0].nbytes >= 64 * 64 * 4
    said = _said(tmp_path)
    assert f"{kept[0].path}: {kept[0].nbytes:,} bytes, left by process {kept[0].pid}, which has ended" in said
    line = next(line for line in said.splitlines() if "are freed by: " in line)
    subprocess.run(shlex.split(line.partition("are freed by: ")[2]), check=True)
    assert list(kept_files(str(tmp_path))) == []


def test_a_directory_that_is_not_there(tmp_path):
    found = CliRunner().invoke(app, ["doctor", "--nvme-dir", str(tmp_path / "none")])
    assert isinstance(found.exception, ConfigError)
    assert "cannot be listed: No such file or directory" in str(found.exception)


def test_files_without_a_name_leave_nothing(tmp_path):
    model = zero.shard(mlp(), device="cpu", nvme_dir=str(tmp_path), offload_params="nvme")
    assert list(kept_files(str(tmp_path))) == []
    assert isinstance(next(model.parameters()), torch.nn.Parameter)
