"""New nodes with their fake values, for passes that write more than one."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from zero_compiler.ir import facts

_COPIED = ("nn_module_stack", "fwd_nn_module_stack", "seq_nr")


class Emitter:
    """Calls operators at the graph's point of insertion; new nodes belong to the module of ``origin``."""

    def __init__(self, graph: fx.Graph, origin: fx.Node) -> None:
        self.graph, self.origin = graph, origin
        self.made: list[fx.Node] = []
        # One value tells the mode: of as many emitters as layers, each may not look at the whole graph.
        values = (facts.value(n) for n in graph.nodes)
        self.mode = torch._guards.detect_fake_mode(
            next((v for v in values if isinstance(v, FakeTensor)), None)
        )

    def __call__(self, target: object, *args: object, **kwargs: object) -> fx.Node:
        symbolic = False

        def known_value(a: object) -> object:
            nonlocal symbolic
            if isinstance(a, fx.Node):
                return facts.value(a)
            symbolic = symbolic or isinstance(a, torch.SymInt)
            return a

        given = facts.mapped(known_value, (args, kwargs))
        if symbolic:
            args, kwargs = facts.mapped(
                lambda a: self.number(a) if isinstance(a, torch.SymInt) else a, (args, kwargs)
            )
            given = facts.mapped(known_value, (args, kwargs))
        if target is operator.getitem:  # no operator runs, and what it is taken from may be long
            return self.node(target, args, kwargs, given[0][0][given[0][1]])
        known = facts.shared_results(self.graph)
        layout = None if known is None else _layout((target, *given[0], given[1]))
        if known is None or layout is None:
            return self.node(target, args, kwargs, self._value(target, given))
        if layout not in known:
            known[layout] = self._value(target, given)
        return self.node(target, args, kwargs, known[layout])

    def _value(self, target: fx.node.Target, given: fx.node.Argument) -> object:
        with self.fake():
            return target(*given[0], **given[1])

    def node(
        self,
        target: fx.node.Target,
        args: tuple[fx.node.Argument, ...],
        kwargs: dict[str, fx.node.Argument],
        val: object,
    ) -> fx.Node:
        """A node whose value is known."""
        node = self.graph.call_function(target, args, kwargs)
        self.made.append(node)
        facts.set_value(node, val)
        for key in _COPIED:
            if key in self.origin.meta:
                node.meta[key] = self.origin.meta[key]
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` in ``dtype``, by the operator that both ways to compute know.

        Inductor takes ``aten._to_copy`` for one that was taken apart before.
        """
        same = facts.value(node).dtype == dtype
        return node if same else self(torch.ops.prims.convert_element_type.default, node, dtype)

    def like(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """``node`` once more, on other operands."""
        args, kwargs = facts.mapped(
            lambda a: env.get(a, a) if isinstance(a, fx.Node) else a, (node.args, node.kwargs)
        )
        return self(node.target, *args, **kwargs)

    def number(self, size: torch.SymInt) -> fx.Node | int:
        """A symbolic size as a node, computed from the inputs of the graph; as a number, where it is known by now."""
        expr = size.node.expr
        if not expr.free_symbols:
            return int(expr)
        tracer = _Tracer(self)
        env = {symbol: fx.Proxy(self._symbol(symbol), tracer) for symbol in expr.free_symbols}
        made: fx.Proxy = sympy_interp(PythonReferenceAnalysis, env, expr)
        return made.node

    def _symbol(self, symbol: object) -> fx.Node:
        for node in self.graph.find_nodes(op="placeholder"):
            val = facts.value(node)
            if isinstance(val, torch.SymInt) and val.node.expr == symbol:
                return node
        for node in self.graph.find_nodes(op="placeholder"):
            val = facts.value(node)
            for dim, size in enumerate(val.shape if isinstance(val, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return self(torch.ops.aten.sym_size.int, node, dim)
        raise ValueError(f"no input has the size {symbol}")

    def reshaped(self, node: fx.Node, sizes: Sequence[object]) -> fx.Node:
        """``node`` with other sizes; copied where they cannot be a view of it."""
        have = facts.value(node).shape
        if len(have) == len(sizes) and all(
            a is b or (type(a) is type(b) is int and a == b) for a, b in zip(have, sizes, strict=True)
        ):
            return node
        try:
            if _is_view(facts.value(node), sizes):
                return self(torch.ops.aten.view.default, node, list(sizes))
        except (RuntimeError, ValueError):
            pass
        copy = self(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)
        return self(torch.ops.aten.view.default, copy, list(sizes))

    def empty(self, sizes: Sequence[fx.node.Argument], like: torch.Tensor) -> torch.Tensor:
        """A fake contiguous value."""
        with self.fake():
            return torch.empty(list(sizes), dtype=like.dtype, device=like.device)

    def fake(self) -> contextlib.AbstractContextManager[object]:
        return self.mode if self.mode is not None else contextlib.nullcontext()


def _is_view(tensor: torch.Tensor, sizes: Sequence[object]) -> bool:
    """Whether a tensor of these sizes can be a view of ``tensor``; True where sizes are symbolic, which the operator
    knows then. To have the operator refuse takes longer than all else that is done for a node.

    Dimensions from the last one on that lie one after the other in memory are one; each of these has to be some of
    ``sizes``, as in torch (``computeStride`` in ATen/TensorUtils.cpp).
    """
    shape, stride = tensor.shape, tensor.stride()
    if not shape or not all(type(n) is int and n > 0 for n in (*shape, *sizes)):
        return True
    left = [n for n in sizes if isinstance(n, int)]
    begin, numel = stride[-1:], 1
    for d in reversed(range(len(shape))):
        numel *= shape[d]
        if d and (shape[d - 1] == 1 or stride[d - 1] == numel * begin[0]):
            continue
        made = 1
        while left and (made < numel or left[-1] == 1):
            made *= left.pop()
        if made != numel:
            return False
        begin, numel = stride[d - 1 : d], 1
    return not left


def _layout(given: object) -> object:
    """What an operator's result follows from, of a value that it is given, to be compared; None: that is not known."""
    if isinstance(given, torch.Tensor):
        if given._has_symbolic_sizes_strides:
            return None
        return given.shape, given.stride(), given.dtype, given.device
    if isinstance(given, dict):
        given = [item for pair in given.items() for item in pair]
    if isinstance(given, (list, tuple)):
        inside = [_layout(item) for item in given]
        return None if None in inside else (type(given) is tuple, *inside)
    if isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    return type(given), given  # 1, 1.0 and True are equal, and give results of other types


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Has an emitter make the nodes, so that they have values."""

    def __init__(self, emit: Emitter) -> None:
        super().__init__(emit.graph)
        self._emit = emit

    def create_node(
        self,
        kind: str,
        target: object,
        args: fx.node.Argument,
        kwargs: fx.node.Argument,
        *_: object,
        **__: object,
    ) -> fx.Node:
        assert kind == "call_function"
        return self._emit(target, *args, **kwargs)
