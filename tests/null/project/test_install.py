"""A plain and an editable install both work, from the root of the checkout and from anywhere else.

The editable one is that which the tests run on: ``make setup`` made it, and compiled the engine. The plain one goes
into a throw-away environment that sees the running interpreter's packages (torch above all) but not this project's
own, and from a copy of the tree, so nothing that is in use is touched. The copy has what was compiled where a build
puts it, so that setuptools packs that, and compiles only what is missing or older than its sources.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PARTS = [
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "CHANGELOG.md",
    "constraints.txt",
    "zero_compiler",
    "passes",
    "runtime",
    "csrc",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(python: Path, *args: str, cwd: Path, **more: str) -> str:
    """What it prints; ``more`` joins the environment."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env = kept | more
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    env["PYTEST_ADDOPTS"] = ""
    done = subprocess.run([str(python), *args], cwd=cwd, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the checkout; what was built lies in the folder of builds alone."""
    target = tmp_path_factory.mktemp("install") / "checkout"
    built = shutil.ignore_patterns("*.so", "*.o", "*.a", "__pycache__", "build", "build-*", "*.egg-info")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=built)
        elif source.exists():
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / part)
    folder = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for built in ("runtime", "zero_compiler/storage"):
        packed = target / "build" / folder / "zero_compiler" / Path(built).name
        packed.mkdir(parents=True)
        for compiled in (ROOT / built).glob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
            shutil.copy2(compiled, packed)
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


def fresh(home: Path, borrowed: Path) -> tuple[Path, Path]:
    """The interpreter of a new environment at ``home``, and the folder of its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], check=True)
    interpreter = home / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(interpreter, "-c", where, cwd=home).strip())
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return interpreter, site


def path_without_ninja(tree: Path) -> str:
    """Only where there is no ninja does setuptools look whether what was compiled is newer than its sources."""
    none = tree.parent / "none"
    none.mkdir(exist_ok=True)
    (none / "ninja").write_text("#!/bin/sh\nexit 1\n")
    (none / "ninja").chmod(0o755)
    return f"{none}{os.pathsep}{os.environ['PATH']}"


def plain(tree: Path, borrowed: Path) -> Path:
    """The interpreter of a fresh environment with the package installed from ``tree``."""
    interpreter, site = fresh(tree.parent / "venv", borrowed)
    path = path_without_ninja(tree)
    # No index: what pyproject.toml asks for must be met by what is there.
    run(interpreter, "-m", "pip", "install", "--no-index", "--no-build-isolation", ".", cwd=tree, PATH=path)
    for built, inside, compiled in (
        ("runtime", "runtime", "_C"),
        ("zero_compiler/storage", "storage", "_aio"),
        ("zero_compiler", "", "_torch_cpp"),
    ):
        assert list((site / "zero_compiler" / inside).glob(f"{compiled}.*so"))
        assert not list((tree / built).glob(f"{compiled}.*so"))
    return interpreter


def editable() -> bool:
    """Whether the tests run on an editable install."""
    try:
        said = distribution("zero-compiler").read_text("direct_url.json")
    except PackageNotFoundError:
        return False
    return bool(said and json.loads(said).get("dir_info", {}).get("editable"))


@pytest.fixture(scope="module", params=["plain", "editable"])
def installed(request, copied, borrowed):
    """An interpreter with the package installed, and the checkout that it was installed from."""
    if request.param == "plain":
        return plain(copied, borrowed), copied
    if not editable():
        pytest.skip("the tests run on an install that is not editable")
    return Path(sys.executable), ROOT


@pytest.fixture
def python(installed):
    return installed[0]


@pytest.fixture
def tree(installed):
    return installed[1]


@pytest.fixture(params=["root", "elsewhere"])
def cwd(request, tree, tmp_path):
    return tree if request.param == "root" else tmp_path


def test_the_backend_is_found_and_packages_and_engine_import(python, cwd):
    run(
        python,
        "-c",
        textwrap.dedent("""
            import sys
            import torch._dynamo as dynamo
            assert "zero" in dynamo.list_backends(exclude_tags=())
            assert "zero_compiler" not in sys.modules
            dynamo.lookup_backend("zero")
            import zero_compiler.passes, zero_compiler.runtime, zero_compiler.ir
            import zero_compiler.runtime._C as engine
            from zero_compiler.storage import _aio, aio
            from zero_compiler import _tree, passes
            assert passes.__name__ == "zero_compiler.passes", passes.__name__
            assert engine.__name__ == "zero_compiler.runtime._C", engine.__name__
            assert _aio.__name__ == "zero_compiler.storage._aio", _aio.__name__
            aio.Engine().close()
        """),
        cwd=cwd,
    )


def test_another_checkout_is_used_whole(copied, tmp_path):
    """Beside an editable install, in the root of a checkout that is not the installed one."""
    if not editable():
        pytest.skip("the tests run on an install that is not editable")
    other = tmp_path / "other"
    shutil.copytree(copied, other, ignore=shutil.ignore_patterns("build"))
    for folder in ("runtime", "zero_compiler", "zero_compiler/storage"):
        for compiled in (ROOT / folder).glob("*.so"):
            shutil.copy2(compiled, other / folder)
    run(
        Path(sys.executable),
        "-c",
        textwrap.dedent("""
            from pathlib import Path
            import zero_compiler, zero_compiler.passes, zero_compiler.runtime._C
            for module in (zero_compiler, zero_compiler.passes, zero_compiler.runtime, zero_compiler.runtime._C):
                assert Path.cwd().resolve() in Path(module.__file__).resolve().parents, module.__file__
        """),
        cwd=other,
    )


def test_module_runs(python, cwd):
    """``python -m`` imports zero_compiler first, and only then looks for what is asked for."""
    run(python, "-m", "zero_compiler.passes.__init__", cwd=cwd)


def test_the_command_runs(python, tmp_path):
    run(python, "-m", "zero_compiler", "--help", cwd=tmp_path)
    run(python.parent / "zero-compiler", "--help", cwd=tmp_path)


def test_pytest_runs_in_the_root(python, tree, tmp_path):
    probe = tmp_path / "test_probe.py"
    probe.write_text(
        "import torch\nimport zero_compiler.passes\nimport zero_compiler.runtime._C\n\ndef test_x():\n    pass\n"
    )
    config = ("-c", "pyproject.toml", "--rootdir", ".", "-p", "no:cacheprovider")
    assert "1 passed" in run(python, "-m", "pytest", *config, str(probe), cwd=tree)


def test_no_top_level_packages_outside_the_root(python, tmp_path):
    run(
        python,
        "-c",
        "import importlib.util as u; found = [n for n in ('passes', 'runtime') if u.find_spec(n)]; assert not found, found",
        cwd=tmp_path,
    )


def test_an_sdist_gives_a_wheel_that_installs_elsewhere_and_uninstalls(copied, borrowed, tmp_path):
    """As ``python -m build`` makes both: the wheel from what the sdist holds."""
    made, home = tmp_path / "made", tmp_path / "other"
    interpreter, site = fresh(home, borrowed)
    before = set(home.rglob("*"))
    hook = f"from setuptools import build_meta; build_meta.build_sdist({str(made)!r})"
    run(interpreter, "-B", "-c", hook, cwd=copied)
    (sdist,) = made.glob("zero_compiler-*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if name.endswith((".so", ".o", ".pyc"))]
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    shutil.copytree(copied / "build", tree / "build")  # what is compiled already
    pack = ("-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(made), ".")
    run(interpreter, *pack, cwd=tree, PATH=path_without_ninja(tree))
    (wheel,) = made.glob("zero_compiler-*.whl")
    # Byte code that Python writes on its own is none of an installer's.
    run(interpreter, "-m", "pip", "install", "--no-index", "--no-compile", str(wheel), cwd=tmp_path)
    found = run(
        interpreter,
        "-B",
        "-c",
        "import zero_compiler.runtime._C as engine; print(engine.__file__)",
        cwd=tmp_path,
    )
    assert Path(found.strip()).is_relative_to(site)
    run(interpreter, "-m", "pip", "uninstall", "-y", "zero-compiler", cwd=tmp_path)
    assert set(home.rglob("*")) == before
