"""Builds the engine, ``zero_compiler.runtime._C``, from csrc/. The rest is declared in pyproject.toml.

One build serves CPU and accelerator machines alike: the engine uses c10's generic streams and events and
links no accelerator library.
"""

import os
import platform
import sys
from glob import glob

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

sources = sorted(glob("csrc/src/*.cc")) + ["csrc/bindings.cc"]
missing = [path for path in sources if not os.path.exists(path)]
if missing or len(sources) == 1:
    sys.exit(
        f"setup.py: the engine's sources are not there: {missing or 'csrc/src/*.cc'}. Is the checkout whole?"
    )

# System headers: warnings in torch's own headers must not stop a build with -Werror.
system_includes = [flag for path in include_paths() for flag in ("-isystem", path)]
engine = CppExtension(
    "zero_compiler.runtime._C",
    sources,
    extra_compile_args=[
        "-O3",
        "-g1",
        "-std=c++20",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        *system_includes,
    ],
)
engine.include_dirs = [os.path.abspath("csrc/include")]  # ninja runs in another folder


class BuildEngine(BuildExtension):
    """Keeps the object files in one folder for each Python and torch, so that only edited files are compiled
    again, whichever way the build was started (editable installs use a temporary folder otherwise)."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = f"build/engine-py{platform.python_version()}-torch{torch.__version__}"


setup(ext_modules=[engine], cmdclass={"build_ext": BuildEngine})
