"""What was compiled for another torch is refused before it is loaded, by one sentence."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_compiler import _torch_cpp, engine_build
from zero_compiler.runtime import _C

ROOT = Path(__file__).resolve().parents[3]
MARK = b"zero_compiler engine compiled for torch "


@pytest.mark.parametrize("compiled", [_C, _torch_cpp], ids=["engine", "torch_cpp"])
def test_what_is_compiled_names_its_torch(compiled):
    assert engine_build.built_for(Path(compiled.__file__)) == engine_build.release_of(torch.__version__)


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", "2.13.0"), ("2.14.1+cu130", "2.14.1"), ("2.15.0.dev20260901+cpu", "2.15.0")],
)
def test_builds_for_a_cpu_and_for_an_accelerator_are_of_one_release(version, release):
    assert engine_build.release_of(version) == release


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"\x7fELF" + MARK + b"2.13.0\0", "torch 2.13.0"), (b"\x7fELF", "a torch that it does not name")],
)
def test_an_engine_for_another_torch_is_refused(tmp_path, content, named):
    compiled = tmp_path / "_C.so"
    compiled.write_bytes(content)
    with pytest.raises(ImportError) as refused:
        engine_build.check(compiled, "2.14.1+cu130")
    assert f"was compiled for {named}, and this is torch 2.14.1+cu130; compile it" in str(refused.value)
    assert refused.value.path == str(compiled)


@pytest.mark.parametrize("name", [engine_build.ENGINE, engine_build.TORCH_CPP])
def test_what_would_be_loaded_is_looked_at(monkeypatch, name):
    engine_build.check_installed(name)
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    with pytest.raises(ImportError, match=r"and this is torch 9\.9\.0"):
        engine_build.check_installed(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "module"),
    [
        (_C, "zero_compiler.compile.backend"),
        (_C, "zero_compiler.runtime._C"),
        (_torch_cpp, "zero_compiler"),
    ],
)
def test_it_is_not_loaded(tmp_path, compiled, module):
    """Of a file that is no library at all, the loader would say that its header is wrong."""
    built = shutil.ignore_patterns(Path(compiled.__file__).name, "__pycache__")
    shutil.copytree(ROOT / "zero_compiler", tmp_path / "zero_compiler", ignore=built)
    for folder in ("passes", "runtime"):  # where an installed package has them
        shutil.copytree(ROOT / folder, tmp_path / "zero_compiler" / folder, ignore=built)
    place = tmp_path.joinpath(*compiled.__name__.split(".")[:-1])
    (place / Path(compiled.__file__).name).write_bytes(b"\x7fELF" + MARK + b"1.0.0\0")
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the engine of zero-compiler")
    assert f"was compiled for torch 1.0.0, and this is torch {torch.__version__}; compile it" in last
