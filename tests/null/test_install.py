"""A plain and an editable install both work, from the root of the checkout and from anywhere else.

Each install goes into a throw-away environment that sees the running interpreter's packages (torch above all)
but not this project's own, and from a copy of the tree, so nothing that is in use is touched.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = [
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "zero_compiler",
    "passes",
    "runtime",
    "csrc",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(python: Path, *args: str, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    env["PYTEST_ADDOPTS"] = ""
    done = subprocess.run([str(python), *args], cwd=cwd, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout without anything that was built."""
    target = tmp_path_factory.mktemp("install") / "checkout"
    built = shutil.ignore_patterns("*.so", "*.o", "*.a", "__pycache__", "build", "build-*", "*.egg-info")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=built)
        elif source.exists():
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / part)
    return target


@pytest.fixture(scope="module")
def borrowed(tmp_path_factory):
    """A folder of links to every package of the running interpreter except this project."""
    folder = tmp_path_factory.mktemp("borrowed")
    for site in (Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")):
        for entry in site.iterdir() if site.is_dir() else ():
            ours = entry.name.startswith(("zero_compiler", "__editable__"))
            if not ours and entry.suffix != ".pth" and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module", params=["plain", "editable"])
def python(request, tree, borrowed):
    """The interpreter of a fresh environment with the package installed. The environments follow each other at
    one path, so that the second install finds the objects that the first one compiled. Plain comes first, while
    the tree holds no engine."""
    home = tree.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], check=True)
    interpreter = home / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(interpreter, "-c", where, cwd=home).strip())
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    # No index: what pyproject.toml asks for must be met by what is there.
    kind = ["-e", "."] if request.param == "editable" else ["."]
    run(interpreter, "-m", "pip", "install", "--no-index", "--no-build-isolation", *kind, cwd=tree)
    for compiled in ("_C", "_aio"):
        assert any((tree / "runtime").glob(f"{compiled}.*so")) == (request.param == "editable")
    return interpreter


@pytest.fixture(params=["root", "elsewhere"])
def cwd(request, tree, tmp_path):
    return tree if request.param == "root" else tmp_path


def test_packages_and_engine_import(python, cwd):
    run(
        python,
        "-c",
        textwrap.dedent("""
            import torch
            import zero_compiler.passes, zero_compiler.runtime, zero_compiler.ir
            import zero_compiler.runtime._C as engine
            from zero_compiler.runtime import _aio, aio
            from zero_compiler import _tree, passes
            assert passes.__name__ == "zero_compiler.passes", passes.__name__
            assert engine.__name__ == "zero_compiler.runtime._C", engine.__name__
            assert _aio.__name__ == "zero_compiler.runtime._aio", _aio.__name__
            aio.Engine().close()
        """),
        cwd=cwd,
    )


def test_module_runs(python, cwd):
    """``python -m`` imports zero_compiler first, and only then looks for what is asked for."""
    run(python, "-m", "zero_compiler.passes.__init__", cwd=cwd)
    if (ROOT / "zero_compiler" / "__main__.py").exists():
        run(python, "-m", "zero_compiler", "--help", cwd=cwd)
    if (ROOT / "zero_compiler" / "cli.py").exists():
        run(python.parent / "zero-compiler", "--help", cwd=cwd)


def test_pytest_runs_in_the_root(python, tree):
    probe = tree / "tests" / "null" / "test_probe.py"
    probe.parent.mkdir(parents=True, exist_ok=True)
    probe.write_text(
        "import torch\nimport zero_compiler.passes\nimport zero_compiler.runtime._C\n\ndef test_x():\n    pass\n"
    )
    assert "1 passed" in run(python, "-m", "pytest", "-p", "no:cacheprovider", str(probe), cwd=tree)


def test_no_top_level_packages_outside_the_root(python, tmp_path):
    run(
        python,
        "-c",
        "import importlib.util as u; found = [n for n in ('passes', 'runtime') if u.find_spec(n)]; assert not found, found",
        cwd=tmp_path,
    )


def test_backend_is_found_by_entry_point(python, cwd):
    code = "import torch._dynamo; print(torch._dynamo.list_backends(exclude_tags=()))"
    assert "'zero'" in run(python, "-c", code, cwd=cwd)
    if (ROOT / "zero_compiler" / "backend.py").exists():
        run(
            python,
            "-c",
            "from torch._dynamo.backends.registry import lookup_backend as f; f('zero')",
            cwd=cwd,
        )
