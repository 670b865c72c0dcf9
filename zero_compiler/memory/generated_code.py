"""Bytes that a compiled segment holds, read from the code that Inductor wrote for it.

That code allocates by name, says when a buffer lies in another, and deletes each after its last use. It need not hold
what the graph does: a pointwise result with several readers is computed in each of them, and what it is computed from
lives on in its place; kernels are reordered; of what is fused nothing is allocated.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import fx

from ..ir import facts
from ..torch_versions import TELLS_SIZES

log = logging.getLogger("zero_compiler")

_WITHOUT_OVERLOADS = ("extern_kernels", "inductor")
_LIBRARIES = ("aten", *_WITHOUT_OVERLOADS)  # whose operators the code calls
_FUNCTIONS = {"math": math, "max": max, "min": min, "abs": abs, "round": round}  # in expressions of sizes


class _Unknown(Exception):
    """The code does something that is not followed."""


@dataclass(frozen=True)
class _New:
    """A buffer of its own."""

    name: str
    size: CodeType
    stride: CodeType
    itemsize: int

    def nbytes(self, numbers: Mapping[str, object]) -> int:
        return _extent(_numbers(self.size, numbers), _numbers(self.stride, numbers)) * self.itemsize


@dataclass(frozen=True)
class _Alias:
    name: str
    of: str


@dataclass(frozen=True)
class _Free:
    name: str


@dataclass(frozen=True)
class _Number:
    """A size under a name of its own; or something else under a name, which then has no number."""

    name: str
    value: CodeType


@dataclass(frozen=True)
class _Results:
    """What an operator returns: each result that gets a name; and of a list, under ``name``, those that do not, with
    what each may be, as the graph has it. A list holds all of them."""

    name: str
    named: list[_New] = field(default_factory=list)
    others: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _KernelCall:
    """An operator is called, by its name."""

    operator: str


_Step = _New | _Alias | _Free | _Number | _Results | _KernelCall


class Generated:
    """What the code of a segment allocates and frees, in order.

    Args:
        inputs: names of its inputs.
        steps: what it does with memory.
    """

    def __init__(self, inputs: Sequence[str], steps: Sequence[_Step]) -> None:
        self._inputs, self._steps = inputs, steps
        self.operators = frozenset(step.operator for step in steps if isinstance(step, _KernelCall))

    def most(
        self,
        given: Sequence[object],
        dying: Sequence[bool],
        sizes: facts.Sizes | None = None,
        beside: Mapping[str, int] | None = None,
    ) -> int:
        """Most bytes held at once: of inputs that die in the segment, of what it makes, and of what it returns.

        Args:
            given: fake values of the inputs.
            dying: of each, whether nobody else holds it.
            sizes: for symbols; None: as the capture saw them.
            beside: bytes that an operator of this name takes while it runs.
        """
        numbers: dict[str, object] = dict(_FUNCTIONS)
        held = _Held()
        for name, value, gone in zip(self._inputs, given, dying, strict=True):
            if isinstance(value, torch.Tensor):
                held.make(name, facts.bytes_of(value, sizes) if gone else 0)
            elif isinstance(value, (int, torch.SymInt)):
                numbers[name] = facts.hint(value, sizes)
        for step in self._steps:
            match step:
                case _New():
                    held.make(step.name, step.nbytes(numbers))
                case _Alias() if step.of in numbers:
                    numbers[step.name] = numbers[step.of]
                case _Alias():
                    held.share(step.name, step.of)
                case _Free():
                    held.drop(step.name)
                case _Number():
                    with contextlib.suppress(NameError):
                        numbers[step.name] = _evaluated(step.value, numbers)
                case _Results():
                    for new in step.named:
                        held.make(new.name, new.nbytes(numbers))
                    others = (max(facts.bytes_of(v, sizes) for v in each) for each in step.others)
                    listed = [new.name for new in step.named if new.name != step.name]
                    if listed or step.others:
                        held.gather(step.name, listed, sum(others))
                case _KernelCall():
                    held.record_peak((beside or {}).get(step.operator, 0))
        return held.most


@dataclass
class _Held:
    """Buffers live as long as a name for them does."""

    most: int = 0
    _live: int = 0
    _of: dict[str, str] = field(default_factory=dict)  # the name that each was made under
    _bytes: dict[str, int] = field(default_factory=dict)
    _names: dict[str, set[str]] = field(default_factory=dict)
    _lists: dict[str, list[str]] = field(default_factory=dict)  # the names under which each holds its results

    def make(self, name: str, nbytes: int) -> None:
        self.drop(name)
        self._of[name], self._bytes[name], self._names[name] = name, nbytes, {name}
        self._live += nbytes
        self.record_peak(0)

    def share(self, name: str, other: str) -> None:
        if other not in self._of:  # a constant of the code, which no call allocates
            return
        first = self._of[other]
        if self._of.get(name) != first:
            self.drop(name)
        self._of[name] = first
        self._names[first].add(name)

    def gather(self, name: str, results: Sequence[str], others: int) -> None:
        """A list of ``results`` and of other ones of so many bytes, which lives until its name is dropped."""
        self.make(name, others)
        self._lists[name] = [f"{name}: {result}" for result in results]
        for own, result in zip(self._lists[name], results, strict=True):
            self.share(own, result)

    def drop(self, name: str) -> None:
        for own in self._lists.pop(name, ()):
            self.drop(own)
        first = self._of.pop(name, None)
        if first is None:
            return
        self._names[first].discard(name)
        if not self._names[first]:
            self._live -= self._bytes.pop(first)
            del self._names[first]

    def record_peak(self, beside: int) -> None:
        """What is held now, and so many bytes for a moment."""
        self.most = max(self.most, self._live + beside)


def _evaluated(code: CodeType, names: Mapping[str, object]) -> Any:
    # Inductor's own text, which the process runs anyway.
    return eval(code, {"__builtins__": {}}, dict(names))


def _numbers(code: CodeType, names: Mapping[str, object]) -> tuple[int, ...]:
    return tuple(int(n) for n in _evaluated(code, names))


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of a storage that holds a strided tensor."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def read(source: str, graph: fx.Graph, inputs: Sequence[object]) -> Generated | None:
    """What the code that Inductor wrote for a graph holds; None where it does something that is not followed.

    Args:
        graph: that was compiled; it tells the dtypes of what operators return, of which the code has only the sizes.
        inputs: their fake values.
    """
    try:
        reader = _CodeReader(graph)
        reader.read(source)
        out = Generated(reader.inputs, reader.steps)
        out.most(inputs, [True] * len(inputs))
    except Exception as error:  # whatever the code does: it is not for a count to refuse what compiles
        log.debug("what the code of a segment holds is not known: %s", error)
        return None
    return out


class _CodeReader:
    def __init__(self, graph: fx.Graph) -> None:
        self.inputs: list[str] = []
        self.steps: list[_Step] = []
        self._values: dict[str, list[Any]] = {}  # of the operators of the graph
        self._views: set[str] = set()  # those that return what they are given
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                name = str(node.target).split(".")[1]
                self._values.setdefault(name, []).append(facts.value(node))
                if any(r.alias_info is not None for r in node.target._schema.returns):
                    self._views.add(name)
        self._calls: dict[str, tuple[str, _Results]] = {}  # operators, by the name of what they return
        self._indices: set[tuple[str, int]] = set()  # of a list of results those that are taken
        self._unsized: dict[str, tuple[str, int | None]] = {}  # results: of which call, and which of a list

    def read(self, source: str) -> None:
        (call,) = (
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and node.name == "call"
        )
        self._body(call.body)
        for name, (operator, results) in self._calls.items():
            values = self._values.get(operator, ())
            if name in self._unsized and values and all(isinstance(v, (tuple, list)) for v in values):
                del self._unsized[name]
                rest = [i for i in range(max(map(len, values))) if (name, i) not in self._indices]
                results.others.extend([v[i] for v in values if i < len(v)] for i in rest)
        if self._unsized:
            raise _Unknown(f"no size of {sorted(self._unsized)}")

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for stmt in body:
            match stmt:
                case ast.With(body=inner):  # a guard of a device
                    self._body(inner)
                case ast.Assign(targets=[target], value=ast.Name("args")):
                    self.inputs += [n.id for n in _elements(target) if isinstance(n, ast.Name)]
                case ast.Assign(targets=[ast.Name(name)], value=value):
                    self._assign(name, value)
                case ast.Delete(targets=targets):
                    self._delete(targets)
                case ast.Expr(value=ast.Call() as made):
                    self._call(made)
                case ast.Expr(value=ast.Constant()) | ast.Return() | ast.Pass():
                    pass
                case _:
                    raise _Unknown(ast.unparse(stmt))

    def _delete(self, targets: Sequence[ast.expr]) -> None:
        names = (n.id for t in targets for n in _elements(t) if isinstance(n, ast.Name))
        self.steps += [_Free(name) for name in names]

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(function), args=[size, stride, *rest], keywords=more) if (
                function.startswith("empty_strided")
            ):
                self.steps.append(_New(name, _code(size), _code(stride), _itemsize(rest, more)))
            case ast.Call(func=ast.Name("reinterpret_tensor"), args=[ast.Name(of), *_]):
                self.steps.append(_Alias(name, of))
            case ast.Name(of) if of in self._unsized:
                # the one result of an operator, whose size is told under this name
                self._unsized[name] = self._unsized.pop(of)
                self.steps.append(_Alias(of, name))
            case ast.Name(of):
                self.steps.append(_Alias(name, of))
            case ast.Subscript(value=ast.Name(of), slice=ast.Constant(int(index))) if of in self._calls:
                values = [v[index] for v in self._values.get(self._calls[of][0], ())]
                if any(isinstance(v, torch.Tensor) for v in values):
                    self._indices.add((of, index))
                    self._unsized[name] = of, index
            case _ if not name.startswith("buf"):
                self.steps.append(_Number(name, _code(value)))
            case ast.Call(keywords=given) if any((k.arg or "").startswith("out") for k in given):
                self._call(value)  # its results have names already
            case ast.Call():
                results = _Results(name)
                self.steps.append(results)
                operator = self._call(value)
                if operator in self._views:
                    raise _Unknown(f"{operator} may return a view")
                self._calls[name] = operator, results
                self._unsized[name] = name, None
            case _:
                raise _Unknown(ast.unparse(value))

    def _call(self, made: ast.Call) -> str:
        """Follow a call; the operator of the graph that it is, or ""."""
        match made:
            case ast.Call(func=ast.Name(function), args=[ast.Name(name), size, stride, *_]) if (
                function in TELLS_SIZES
            ):
                if name in self._unsized:
                    of, index = self._unsized.pop(name)
                    operator, results = self._calls[of]
                    results.named.append(
                        _New(name, _code(size), _code(stride), self._most_itemsize(operator, index))
                    )
                return ""
        # Of torch's functions only operators: the code for a device also has torch set it.
        text = ast.unparse(made.func)
        words = text.removeprefix("torch.ops.").split(".")
        last = words[-2:]  # an operator and its overload, or a kernel alone
        found = next((word for word in last if word in self._values), "")
        if found or text.startswith("torch.ops.") or words[0] in _LIBRARIES:
            self.steps.append(_KernelCall(found or last[words[0] in _WITHOUT_OVERLOADS]))
        return found

    def _most_itemsize(self, operator: str, index: int | None) -> int:
        values = [v if index is None else v[index] for v in self._values.get(operator, ())]
        sizes = [v.dtype.itemsize for v in values if isinstance(v, torch.Tensor)]
        if not sizes:
            raise _Unknown(f"no dtype of what {operator!r} returns")
        return max(sizes)


def _elements(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, (ast.Tuple, ast.List)):
        yield from node.elts
    else:
        yield node


def _code(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "size", "eval")


def _itemsize(rest: Sequence[ast.expr], more: Sequence[ast.keyword]) -> int:
    for node in (*rest, *(k.value for k in more)):
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr=name) if isinstance(
                dtype := getattr(torch, name, None), torch.dtype
            ):
                return dtype.itemsize
    raise _Unknown("no dtype of a new buffer")
