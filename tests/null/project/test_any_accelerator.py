"""What runs names no accelerator: it asks torch.accelerator and c10 for whichever there is.

What plans for one that is not here has to name it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"cuda|cudnn|cublas|nvtx|nvcc", re.IGNORECASE)

# What stands in for an accelerator that is planned for and is not here.
ABSENT = {
    "zero_compiler/tools/absent_device.py",
    "csrc/include/zero/absent_device.h",
    "csrc/src/absent_device.cc",
}
# What else may name one, each with its reason.
ALLOWED = {
    (
        "zero_compiler/construct/unsharded_mode.py",
        "cuda",
    ): "Tensor.cuda is among the calls of users that convert a tensor",
    ("zero_compiler/memory/workspaces.py", "cudnn"): "one of torch's operators of attention",
    ("zero_compiler/inductor_options.py", "triton.cudagraphs"): "an option of Inductor, which is off",
    (
        "zero_compiler/ranks/mesh.py",
        'device must be one of torch, such as "cpu" or "cuda", not ',
    ): "an example",
    ("runtime/recorded_segments.py", "cuda"): "whose graphs have one interface in every release of torch",
    ("runtime/recorded_segments.py", "CUDAGraph"): "the same",
    ("zero_compiler/tools/figures/extended.py", "cuda"): "the papers' devices, which are planned for",
    (
        "zero_compiler/tools/cli.py",
        "kind of device that computes: cpu or cuda, which need not be here",
    ): "the help of --device",
    ("zero_compiler/tools/model_source.py", "CUDA"): "what an error of torch says where a model asks for it",
}


def spoken(source: str) -> set[str]:
    """Names and strings of Python source that name CUDA; comments and docstrings may."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in prose:
            continue
        words = [v for _, v in ast.iter_fields(node) if isinstance(v, str)]
        if isinstance(node, ast.Global | ast.Nonlocal):
            words += node.names
        found |= {w for w in words if NAMED.search(w)}
    return found


def code(source: str) -> str:
    """C++ without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)


def test_python():
    files = [
        ROOT / "setup.py",
        *(f for part in ("zero_compiler", "passes", "runtime") for f in (ROOT / part).rglob("*.py")),
    ]
    assert len(files) > 50
    found = {(str(f.relative_to(ROOT)), word) for f in files for word in spoken(f.read_text())}
    assert {(file, word) for file, word in found if file not in ABSENT} == set(ALLOWED)


def test_cpp():
    files = [f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".h", ".cc", ".cpp", ".txt", ".cmake")]
    assert len(files) > 20
    assert not {
        (str(f.relative_to(ROOT)), line)
        for f in files
        if str(f.relative_to(ROOT)) not in ABSENT
        for line in code(f.read_text()).splitlines()
        if NAMED.search(line) and "absent_device::stand_in" not in line
    }


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "import torch.cuda as fast",
        'x.to("cuda:0")',
        'x.to(f"cuda:{i}")',
        "is_cuda = x",
        "def f(cuda): pass",
        "f(cuda=1)",
        "getattr(x, 'is_cuda')",
    ],
)
def test_what_names_it_is_found(line):
    assert spoken(f'"""About CUDA."""  # cuda\n{line}')
    assert not spoken('"""About CUDA."""  # cuda\nx = 1')


def test_comments_are_no_code():
    assert not NAMED.search(code("int a; // CUDA\n/* cuda\n */ int b;"))
    assert NAMED.search(code("#include <ATen/cuda/CUDAContext.h> // why"))
