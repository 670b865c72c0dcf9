"""For which torch the compiled modules that use torch were made, found without loading them.

Both are C++ against torch's headers, so each fits only the release that it was compiled with: under another one it does
not load (an undefined symbol), or loads and misreads torch's objects. The release therefore stands in the compiled file
as text, and is read before Python loads that.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

ENGINE = "zero_compiler.runtime._C"
TORCH_CPP = "zero_compiler._torch_cpp"
# Followed by the release and a zero byte (csrc/include/zero/compiled_for.h).
_MARK = b"zero_compiler engine compiled for torch "


def built_for(extension: Path) -> str | None:
    """The release of torch for which a compiled engine was made, such as "2.13.0"; None where the file does not say."""
    _, mark, rest = extension.read_bytes().partition(_MARK)
    return rest.partition(b"\0")[0].decode() if mark else None


def release_of(version: str) -> str:
    """The release that a version of torch belongs to: builds for a CPU and for an accelerator fit the same engine."""
    return re.split(r"[^\d.]", version)[0].strip(".")


def check(extension: Path, version: str) -> None:
    """Refuse an engine that was compiled for another torch.

    Args:
        extension: the compiled file.
        version: of the torch that is to use it.

    Raises:
        ImportError: it was compiled for another release, or does not say for which.
    """
    found = built_for(extension)
    if found != release_of(version):
        raise ImportError(
            f"the engine of zero-compiler ({extension}) was compiled for "
            f"{f'torch {found}' if found else 'a torch that it does not name'}, and this is torch {version}; compile "
            "it for this one: pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall "
            "zero-compiler (in a checkout, -e . in place of the name)",
            path=str(extension),
        )


def check_installed(module: str) -> None:
    """Check the compiled ``module`` that Python would load; where there is none, its import says so.

    Raises:
        ImportError: it was compiled for another torch.
    """
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:
        check(Path(spec.origin), torch.__version__)
