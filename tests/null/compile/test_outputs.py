"""What goes into a compiled frame and comes out of it is what AOTAutograd alone makes of the same code: values, types,
aliases, gradients."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import zero_compiler as zero
from zero_compiler.ir.program import Constant, Program
from zero_compiler.memory.verify import verify_program
from zero_compiler.runtime.reference import Rank, Reference

WIDTH = 8

# Each makes of a value `v` that floats, and of what the frame was given, another one, that later ones may read.
STEPS = {
    "first": "made = self.first(v)",
    "second": "made = self.second(v)",
    "relu": "made = torch.relu(v)",
    "view": "made = v[:, 1:]",
    "transposed": "made = v.transpose(0, 1).transpose(0, 1)",
    "whole view": "made = v.view_as(v)",
    "detached": "made = v.detach()",
    "no grad": "with torch.no_grad(): made = v * 2.0",
    "in place": "made = (v * 1.5).add_(1)",
    "times the size": "made = v * size",
    "times a number": "made = v * number",
    "times a float": "made = v * real",
    "input": "made = x",
    "input again": "made = again",
    "other input": "made = other",
    "view of an input": "made = x[:1]",
    "whole view of an input": "made = x.view(x.shape)",
    "written input": "made = other.mul_(0.5)",
    "view of a written input": "made = other.mul_(0.5)[:, :1]",
    "buffer": "made = self.seen",
    "written buffer": "made = self.seen.add_(v.detach().mean())",
    "fixes the size": "made = v + torch.ones(7).view(1, -1, 1) if size == 7 else v * 1.0",
    "break": "torch._dynamo.graph_break(); made = v * 1.0",
}
# Results that nothing reads.
ENDS = {
    "size": "size",
    "shape": "x.shape",
    "shape of a value": "v.shape",
    "product of sizes": f"size * {WIDTH} + 1",
    "float of a size": "size * 0.5",
    "bool of a size": "size > 5",
    "complex of a size": "complex(size, 1.0)",
    "number": "number",
    "number and size": "number + size",
    "float": "real",
    "float and size": "real * size",
    "flag": "flag",
    "flag and size": "flag and size > 5",
    "given complex": "wave",
    "complex and size": "wave * size",
    "true": "True",
    "none": "None",
    "complex": "1 + 2j",
    "text": "'text'",
    "dtype": "v.dtype",
    "device": "v.device",
    "again": "v",
    "sum": "v.sum()",
    "complex tensor": "torch.complex(v.double(), v.double())",
    "integers": "(v > 0).to(torch.int64)",
    "mask": "v > 0",
    "range": "torch.arange(size)",
    "constant": "torch.tensor([1.0, 2.0])",
    "filled": "torch.full((size,), 3.0)",
    "empty": "v[:, :0]",
    "pair": "(v, v.size(0))",
    "mapping": "{'value': v, 'length': size}",
}


def written(steps, ends):
    """A forward in straight lines: behind a graph break within a loop Dynamo compiles nothing."""
    lines = ["v, size = self.first(x), x.size(1)"]
    for k, step in enumerate(steps):
        lines += [STEPS[step], f"made_{k} = made", "v = made if made.dim() == 3 else v"]
    results = ["nothing", *(f"made_{k}" for k in range(len(steps))), *(ENDS[end] for end in ends)]
    lines.append(f"return [{', '.join(results)}]")
    given = "self, x, again, other, number, real, flag, wave, nothing=None"
    space = {"torch": torch}
    exec(f"def forward({given}):\n" + "\n".join(f"    {line}" for line in lines), space)
    return space["forward"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))


def leaves(value):
    """In order, with tuples and mappings taken apart and nothing else."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def told(out, inputs):
    """All of a result but the numbers in its tensors."""
    found = leaves(out)
    lines = [repr(torch.utils._pytree.tree_structure(out))]
    known = [*inputs, *found]
    for value in found:
        if not isinstance(value, torch.Tensor):
            lines.append(f"{type(value).__name__} {value!r}")
            continue
        same = [k for k, other in enumerate(known) if other is value]
        shares = [
            k
            for k, other in enumerate(known)
            if isinstance(other, torch.Tensor) and value.numel() and storage(other) == storage(value)
        ]
        grad = value.requires_grad, value.grad_fn is None, value.is_leaf, value.is_inference()
        kind = type(value).__name__, value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
        lines.append(f"{kind} {grad} is {same} shares {shares}")
    return lines


class Way:
    """One way to run a model: its outputs, and the gradients of all that they are made of."""

    def __init__(self, plain, backend, compute):
        torch._dynamo.reset()
        self.model = copy.deepcopy(plain)
        options = {}
        if backend == "zero":
            zero.shard(self.model, stage=3, device="cpu")
            options = {"options": {"compute": compute}}  # of frames without weights too
        self.call = torch.compile(self.model, backend=backend, **options)

    def run(self, size, mode, trained):
        x = torch.randn(2, size, WIDTH, generator=torch.Generator().manual_seed(size))
        x.requires_grad_(trained)
        other = x.detach() * 2  # written to, so no leaf that is trained
        given = [x, other, self.model.seen]
        self.model.zero_grad()
        with mode():
            out = self.call(x, x, other, size + 3, size / 4, size != 5, complex(1, size))
        lines = told(out, given)
        values = [v for v in leaves(out) if isinstance(v, torch.Tensor)]
        numbers = [v.detach().clone() for v in [*given, *values]]
        ends = [v.real if v.is_complex() else v for v in values if v.requires_grad]
        if ends:
            sum((k + 1) * v.sum().float() for k, v in enumerate(ends)).backward()
        grads = [x.grad, *(p.grad for p in self.model.parameters())]
        grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        return lines, numbers, grads


def check(steps, ends, sizes, mode, trained, compute="aten"):
    plain = type("Written", (Model,), {"forward": written(steps, ends)})()
    runs = []
    for backend in ("aot_eager", "zero"):
        way = Way(plain, backend, compute)
        runs.append([way.run(size, mode, trained) for size in sizes])
    for (lines, numbers, grads), (want_lines, want_numbers, want_grads) in zip(runs[1], runs[0], strict=True):
        assert lines == want_lines
        torch.testing.assert_close(numbers, want_numbers)
        assert [g is None for g in grads] == [g is None for g in want_grads]
        for g, want in zip(grads, want_grads, strict=True):
            if g is not None:
                torch.testing.assert_close(g, want)


def test_constants_of_a_program():
    outputs = [0, Constant(7), None, Constant(True), Constant(0.5), Constant(1 + 2j), Constant(float("inf"))]
    tables = {"gathers": [], "reduces": [], "segments": [], "transient_bytes": 0}
    program = Program(phase="inference", num_inputs=1, num_values=1, instrs=[], outputs=outputs, **tables)
    verify_program(program, {})
    again = Program.from_dict(json.loads(program.to_json()))
    assert again == program
    assert [type(v.value) for v in again.outputs if isinstance(v, Constant)] == [
        int,
        bool,
        float,
        complex,
        float,
    ]
    x = torch.ones(2)
    (out,) = Reference(again, [], {}, [Rank({})]).run([[x]])
    assert out[0] is x
    assert out[1:] == [7, None, True, 0.5, 1 + 2j, float("inf")]


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.slow
def test_a_size_that_what_follows_has_fixed():
    check(["fixes the size", "break"], ["size"], (5, 7), torch.enable_grad, trained=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_output_at_once(mode):
    check(["relu", "view of an input", "fixes the size", "break"], list(ENDS), (5, 7), mode, trained=False)


@pytest.mark.slow
@settings(max_examples=32, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    ends=st.lists(st.sampled_from(sorted(ENDS)), max_size=5),
    sizes=st.lists(st.sampled_from([1, 4, 5, 7]), min_size=1, max_size=3),
    mode=st.sampled_from(MODES),
    trained=st.booleans(),
)
def test_random_frames(steps, ends, sizes, mode, trained):
    check(steps, ends, sizes, mode, trained)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    ends=st.lists(st.sampled_from(sorted(ENDS)), max_size=5),
)
def test_random_frames_of_fused_segments(steps, ends):
    check(steps, ends, (5, 7), torch.enable_grad, trained=True, compute="inductor")
