"""Builds the engine, ``zero_compiler.runtime._C``, file I/O, ``zero_compiler.storage._aio``, and what
torch's C++ interface has and its Python has not, ``zero_compiler._torch_cpp``, from csrc/. The rest is declared in
pyproject.toml.

One build serves CPU and accelerator machines alike: the engine uses c10's generic streams and events and
links no accelerator library. File I/O uses no torch at all, and liburing where the compiler finds it (at least 2.2;
``ZERO_LIBURING=0`` builds without it, as on a machine that has none).
"""

import os
import platform
import runpy
import subprocess
import sys
import tempfile
from glob import glob
from pathlib import Path

import pybind11
import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths


def sources_of(folder: str, bindings: str) -> list[str]:
    sources = sorted(glob(f"{folder}/*.cc"))
    if not sources or not os.path.exists(bindings):
        sys.exit(
            f"setup.py: the engine's sources are not there: {folder}/*.cc, {bindings}. Is the checkout whole?"
        )
    return [*sources, bindings]


def has_liburing() -> bool:
    if os.environ.get("ZERO_LIBURING") == "0":
        return False
    compiler = os.environ.get("CXX", "c++").split()
    with tempfile.TemporaryDirectory() as scratch:
        probe = ["-std=c++20", "csrc/probe_liburing.cc", "-o", f"{scratch}/probe", "-luring"]
        try:
            return subprocess.run([*compiler, *probe], capture_output=True, check=False).returncode == 0
        except OSError:
            return False  # the build below says what is wrong with the compiler


# Products and sums are rounded one after the other on every machine, as torch's operators are.
flags = [
    "-O3",
    "-g1",
    "-std=c++20",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffp-contract=off",
]

# System headers: warnings in torch's own headers must not stop a build with -Werror.
system_includes = [flag for path in include_paths() for flag in ("-isystem", path)]
engine = CppExtension(
    "zero_compiler.runtime._C",
    sources_of("csrc/src", "csrc/bindings.cc"),
    extra_compile_args=[*flags, *system_includes],
)
torch_cpp = CppExtension(
    "zero_compiler._torch_cpp",
    [
        *sources_of("csrc/src/ranges", "csrc/torch_bindings.cc"),
        "csrc/frame_bindings.cc",
        "csrc/optimizer_bindings.cc",
        "csrc/recorded_bindings.cc",
    ],
    extra_compile_args=[*flags, *system_includes],
)
for extension in (engine, torch_cpp):
    extension.include_dirs = [os.path.abspath("csrc/include")]  # ninja runs in another folder

uring = has_liburing()
aio = Extension(
    "zero_compiler.storage._aio",
    sources_of("csrc/src/aio", "csrc/aio_bindings.cc"),
    extra_compile_args=[*flags, "-isystem", pybind11.get_include()],
    include_dirs=[os.path.abspath("csrc/include")],
    define_macros=[("ZERO_HAVE_LIBURING", "1")] if uring else [],
    libraries=["uring"] if uring else [],
    language="c++",
)


class BuildEngine(BuildExtension):
    """Keeps the object files in one folder for each Python and torch, so that only edited files are compiled
    again, whichever way the build was started (editable installs use a temporary folder otherwise)."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = f"build/engine-py{platform.python_version()}-torch{torch.__version__}"

    def build_extensions(self) -> None:
        # Without ninja, setuptools takes an engine that is newer than its sources for up to date, whichever torch it
        # was compiled for.
        build = runpy.run_path("zero_compiler/engine_build.py")
        for extension in (engine, torch_cpp):
            compiled = Path(self.get_ext_fullpath(extension.name))
            if compiled.exists() and build["built_for"](compiled) != build["release_of"](torch.__version__):
                self.force = True
        super().build_extensions()


setup(ext_modules=[engine, aio, torch_cpp], cmdclass={"build_ext": BuildEngine})
