"""New nodes with their fake values, for passes that write more than one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map
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

    def __call__(self, target: Any, *args: object, **kwargs: Any) -> fx.Node:
        args, kwargs = tree_map(
            lambda a: self.number(a) if isinstance(a, torch.SymInt) else a, (args, kwargs)
        )
        given = tree_map(lambda a: facts.value(a) if isinstance(a, fx.Node) else a, (args, kwargs))
        with self.fake():
            val = target(*given[0], **given[1])
        return self.node(target, args, kwargs, val)

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
        args, kwargs = tree_map(
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
            return self(torch.ops.aten.view.default, node, list(sizes))
        except (RuntimeError, ValueError):
            copy = self(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)
            return self(torch.ops.aten.view.default, copy, list(sizes))

    def empty(self, sizes: Sequence[fx.node.Argument], like: torch.Tensor) -> torch.Tensor:
        """A fake contiguous value."""
        with self.fake():
            return torch.empty(list(sizes), dtype=like.dtype, device=like.device)

    def fake(self) -> contextlib.AbstractContextManager[object]:
        return self.mode if self.mode is not None else contextlib.nullcontext()


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Has an emitter make the nodes, so that they have values."""

    def __init__(self, emit: Emitter) -> None:
        super().__init__(emit.graph)
        self._emit = emit

    def create_node(
        self, kind: str, target: object, args: fx.node.Argument, kwargs: fx.node.Argument, *_: Any, **__: Any
    ) -> fx.Node:
        assert kind == "call_function"
        return self._emit(target, *args, **kwargs)
