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
from zero_compiler.program import Constant, Program
from zero_compiler.runtime.reference import Rank, Reference
from zero_compiler.verify import verify_program

WIDTH = 8

# Of a value `v` that floats, of the frame `f`, which has its inputs: another value.
STEPS = {
    "first": lambda f, v: f.model.first(v),
    "second": lambda f, v: f.model.second(v),
    "relu": lambda f, v: torch.relu(v),
    "view": lambda f, v: v[:, 1:],
    "transposed": lambda f, v: v.transpose(0, 1).transpose(0, 1),
    "whole view": lambda f, v: v.view_as(v),
    "detached": lambda f, v: v.detach(),
    "no grad": lambda f, v: f.without_grad(v),
    "in place": lambda f, v: (v * 1.5).add_(1),
    "times the size": lambda f, v: v * f.x.size(1),
    "times a number": lambda f, v: v * f.number,
    "times a float": lambda f, v: v * f.real,
    "input again": lambda f, v: f.again,
    "input": lambda f, v: f.x,
    "other input": lambda f, v: f.other,
    "view of an input": lambda f, v: f.x[:1],
    "whole view of an input": lambda f, v: f.x.view(f.x.shape),
    "written input": lambda f, v: f.other.mul_(0.5),
    "view of a written input": lambda f, v: f.other.mul_(0.5)[:, :1],
    "buffer": lambda f, v: f.model.seen,
    "written buffer": lambda f, v: f.model.seen.add_(v.detach().mean()),
    "fixes the size": lambda f, v: v + (torch.ones(7).view(1, -1, 1) if f.x.size(1) == 7 else 0),
    "break": lambda f, v: f.breaks(v),
}
# The same, and not read by what follows.
ENDS = {
    "size": lambda f, v: f.x.size(1),
    "shape": lambda f, v: f.x.shape,
    "shape of a value": lambda f, v: v.shape,
    "product of sizes": lambda f, v: f.x.size(1) * WIDTH + 1,
    "float of a size": lambda f, v: f.x.size(1) * 0.5,
    "bool of a size": lambda f, v: f.x.size(1) > 5,
    "complex of a size": lambda f, v: complex(f.x.size(1), 1.0),
    "number": lambda f, v: f.number,
    "number and size": lambda f, v: f.number + f.x.size(1),
    "float": lambda f, v: f.real,
    "float and size": lambda f, v: f.real * f.x.size(1),
    "flag": lambda f, v: f.flag,
    "flag and size": lambda f, v: f.flag and f.x.size(1) > 5,
    "given complex": lambda f, v: f.wave,
    "complex and size": lambda f, v: f.wave * f.x.size(1),
    "true": lambda f, v: True,
    "none": lambda f, v: None,
    "complex": lambda f, v: 1 + 2j,
    "text": lambda f, v: "text",
    "dtype": lambda f, v: v.dtype,
    "device": lambda f, v: v.device,
    "again": lambda f, v: v,
    "sum": lambda f, v: v.sum(),
    "complex tensor": lambda f, v: torch.complex(v.double(), v.double()),
    "integers": lambda f, v: (v > 0).to(torch.int64),
    "mask": lambda f, v: v > 0,
    "range": lambda f, v: torch.arange(f.x.size(1)),
    "constant": lambda f, v: torch.tensor([1.0, 2.0]),
    "filled": lambda f, v: torch.full((f.x.size(1),), 3.0),
    "empty": lambda f, v: v[:, :0],
    "pair": lambda f, v: (v, v.size(0)),
    "mapping": lambda f, v: {"value": v, "length": f.x.size(1)},
}


class Frame:
    """The inputs of a call, for the steps."""

    def __init__(self, model, x, again, other, number, real, flag, wave):
        self.model, self.x, self.again, self.other = model, x, again, other
        self.number, self.real, self.flag, self.wave = number, real, flag, wave

    def breaks(self, value):
        torch._dynamo.graph_break()
        return value * 1.0

    def without_grad(self, value):
        with torch.no_grad():
            return value * 2.0


class Model(nn.Module):
    def __init__(self, steps, ends):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.steps, self.ends = steps, ends

    def forward(self, x, again, other, number, real, flag, wave, nothing=None):
        frame = Frame(self, x, again, other, number, real, flag, wave)
        value, out = self.first(x), [nothing]
        for step in self.steps:
            made = STEPS[step](frame, value)
            out.append(made)
            value = made if made.dim() == 3 else value
        for end in self.ends:
            out.append(ENDS[end](frame, value))
        return out


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
        if backend == "zero":
            zero.shard(self.model, stage=3, device="cpu", compute=compute)
        self.call = torch.compile(self.model, backend=backend)

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
    plain = Model(steps, ends)
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


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_output_at_once(mode):
    check(["relu", "view of an input", "fixes the size", "break"], list(ENDS), (5, 7), mode, trained=False)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
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
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    ends=st.lists(st.sampled_from(sorted(ENDS)), max_size=5),
)
def test_random_frames_of_fused_segments(steps, ends):
    check(steps, ends, (5, 7), torch.enable_grad, trained=True, compute="inductor")
