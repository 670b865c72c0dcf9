"""Compute segments: compiled once per distinct structure.

Two segments are equal when their graphs are, with names taken out: operators, constants, and the sizes,
strides, dtypes, devices and aliasing of their inputs. The layers of a transformer share one artifact, so the
number of segments that Inductor compiles does not grow with depth.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import inductor_options
from ..ir import dump, facts
from ..memory import generated_code
from ..memory.segment_graph import SegmentGraph
from ..ranges import profiled

log = logging.getLogger("zero_compiler")

_aten_ops = torch.ops.aten
# Views, copies, allocations and writes in place, which tiles stand between (see `expand_tiles.py`): there is
# nothing to fuse, and Inductor would write into a copy first.
_ALONE = frozenset(
    {
        operator.getitem,
        _aten_ops.split.Tensor,
        _aten_ops.view.default,
        _aten_ops.slice.Tensor,
        _aten_ops.clone.default,
        _aten_ops.constant_pad_nd.default,
        _aten_ops.empty.memory_format,
        _aten_ops.full.default,
        _aten_ops.copy_.default,
        _aten_ops.add_.Tensor,
        _aten_ops.addmm_.default,
    }
)

SegmentFn = Callable[[list[object]], Sequence[Any]]


@dataclass(frozen=True)
class Artifact:
    """What segments of one structure are compiled to: the digest of it, the callable, and what its code does with
    memory, where it has code of its own that can be followed."""

    key: str
    run: SegmentFn
    generated: generated_code.Generated | None = None


def structure(seg: SegmentGraph) -> str:
    """Text that is equal for segments that one artifact serves."""
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    ins = dict.fromkeys(seg.ins)
    roots = {n: frozenset((n,)) for n in seg.ins}
    facts.extend_alias_roots(roots, seg.body)
    # Where an input begins in its storage is of no account, unless an operator counts from there.
    absolute = any(n.target is torch.ops.aten.as_strided.default for n in seg.body)
    begins = {
        n: 0 if absolute else facts.value(n).storage_offset()
        for n in seg.ins
        if isinstance(facts.value(n), torch.Tensor) and facts.value(n).layout is torch.strided
    }

    def begin(node: fx.Node) -> object:
        return next((begins[r] for r in roots[node] if r in begins), 0)

    def ref(a: fx.node.Argument) -> object:
        return names[a] if isinstance(a, fx.Node) else _constant(a)

    for i, node in enumerate((*seg.ins, *seg.body)):
        names[node] = f"%{i}"
        if node in ins:
            lines.append(f"in {_meta(facts.value(node), begin(node))}")
        elif node.op == "get_attr":
            lines.append(f"const {id(_attribute(seg.root, node.target))}")
        else:
            args = facts.mapped(ref, (node.args, node.kwargs))
            shares = sorted(names[r] for r in roots[node])
            lines.append(f"{dump.target_text(node)} {args} {_meta(facts.value(node), begin(node))} {shares}")
    lines.append(f"out {[names[n] for n in seg.outs]} {_meta([facts.value(n) for n in seg.outs])}")
    return "\n".join(lines)


def _constant(a: object) -> object:
    return f"{type(a).__name__}:{a}"


def _attribute(gm: fx.GraphModule, target: object) -> object:
    obj: object = gm
    for part in str(target).split("."):
        obj = getattr(obj, part)
    return obj


def _meta(val: object, begin: object = 0) -> str:
    if isinstance(val, torch.Tensor):
        strides = ",".join(str(s) for s in val.stride()) if val.layout is torch.strided else str(val.layout)
        return (
            f"{val.dtype}[{','.join(str(s) for s in val.shape)}]({strides})+{_offset(val, begin)}{val.device}"
        )
    if isinstance(val, (list, tuple)):
        return "(" + ",".join(_meta(v) for v in val) + ")"
    return str(val)


def _offset(val: torch.Tensor, begin: fx.node.Argument) -> object:
    return val.storage_offset() - begin if val.layout is torch.strided else 0


class SegmentCompiler:
    """Compiles segments and remembers them by structure; one a model.

    Args:
        patches: fields of ``torch._inductor.config``, by name, as they are to be meanwhile.
    """

    def __init__(self, compute: str, patches: Mapping[str, object] | None = None) -> None:
        self.compute = compute
        self._patches = dict(patches or {})
        self._done: dict[tuple[str, bool, bool], Artifact] = {}
        self._constants: list[
            object
        ] = []  # held, since structures name their ids: no other object may get one
        self.compiled = 0

    def compile(
        self, seg: SegmentGraph, is_inference: bool, is_backward: bool, fuse: bool = True
    ) -> Artifact:
        """The artifact of a segment, whose graph stays as it is.

        Args:
            fuse: False: operators run one by one, for segments of which :func:`alike_one_by_one` is true.
        """
        key = _key(seg)
        done = self._done.get((key, is_inference, fuse))
        if done is None:
            self.compiled += 1
            constants = [n for n in seg.body if n.op == "get_attr"]
            self._constants += [_attribute(seg.root, n.target) for n in constants]
            fuses = fuse and self.compute == "inductor" and any(_fusible(n) for n in seg.body)
            if fuses:
                done = _inductor(seg, is_inference, is_backward, self._patches)
            else:
                done = Artifact(key, _aten(seg) if fuse else _as_promised(_aten(seg), seg))
            self._done[(done.key, is_inference, fuse)] = done
        return done


def _key(seg: SegmentGraph) -> str:
    """Digest of its structure, and of what is known now of the sizes in it: code may rely on that."""
    text, mode = structure(seg), torch._guards.detect_fake_mode(seg.inputs)
    known = getattr(mode, "shape_env", None)
    symbols = {s for value in seg.inputs for s in facts.symbols_of(value)}
    if symbols and known is not None:
        ranges = sorted(f"{s}: {known.var_to_range.get(s)}" for s in symbols)
        guards = {str(g.expr) for g in known.guards}
        later = {str(a.expr) for asserts in known.deferred_runtime_asserts.values() for a in asserts}
        text = "\n".join([text, *ranges, *sorted(guards | later)])
    return hashlib.sha256(text.encode()).hexdigest()


def _fusible(node: fx.Node) -> bool:
    """Whether a compiler can do more than call the operator."""
    return facts.is_compute(node) and node.target not in _ALONE


def alike_one_by_one(seg: SegmentGraph) -> bool:
    """Whether the operators of a segment, run one by one, do what the code that Inductor writes for them does.

    Its random numbers come of a seed, so that backward may draw them again; eager kernels of the same operators do not
    read it. And what a higher-order operator holds is not known from its graph.
    """
    targets = [n.target for n in seg.body if n.op == "call_function"]
    return not any(
        isinstance(t, torch._ops.HigherOrderOperator) or str(t).startswith("prims.inductor_") for t in targets
    )


def _as_promised(run: SegmentFn, seg: SegmentGraph) -> SegmentFn:
    """Results with the strides that the graph has for them: code that reads them was compiled for these."""
    (output,) = seg.graph.find_nodes(op="output")
    strides: list[tuple[int, ...] | None] = [
        v.stride() if isinstance(v := facts.value(n), torch.Tensor) and not facts.symbols_of(v) else None
        for n in output.args[0]
    ]

    def call(args: list[object]) -> Sequence[object]:
        return [
            out
            if stride is None or out.stride() == stride
            else torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device).copy_(out)
            for out, stride in zip(run(args), strides, strict=True)
        ]

    return call


def _first_name(node: fx.Node) -> str:
    """Of an attribute, as it stands in the module of the graph."""
    return str(node.target).partition(".")[0]


def _aten(seg: SegmentGraph) -> SegmentFn:
    gm = seg.gm
    boxed = getattr(fx.graph, "_BoxedCodeGen", None)
    gm.graph.set_codegen(fx.graph.CodeGen() if boxed is None else boxed())
    gm.recompile()
    # The code with the constants that it reads: the module has the graph too, with a value for each node.
    held = {name: getattr(gm, name) for name in map(_first_name, gm.graph.find_nodes(op="get_attr"))}
    forward: Any = types.MethodType(type(gm).forward, types.SimpleNamespace(**held))
    if boxed is not None:
        return forward  # takes the list and drops each input after its last use

    def run(args: list[object]) -> Sequence[object]:
        given = tuple(args)
        args.clear()
        return forward(*given)

    return run


def _inductor(
    seg: SegmentGraph, is_inference: bool, is_backward: bool, patches: Mapping[str, object]
) -> Artifact:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    _call_in_place_products()
    gm = facts.copy_module(seg.gm)  # Inductor rewrites what it is given
    output = next(iter(gm.graph.find_nodes(op="output")))
    # Values between segments keep the strides that the graph promises: the reader was compiled for them.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    output.meta["original_output_strides"] = [
        n.meta["val"].stride() if isinstance(n.meta.get("val"), torch.Tensor) else None
        for n in output.args[0]
    ]
    gm.recompile()
    mode = torch._guards.detect_fake_mode(seg.inputs)
    with V.set_fake_mode(mode), _strides_not_reported(), inductor_options.in_force(patches):
        compiled: Any = compile_fx_inner(gm, seg.inputs, is_inference=is_inference, is_backward=is_backward)
    # It may hold for some sizes alone, by guards that were added on the way: the frame is compiled anew for others, and
    # so is this.
    generated = generated_code.read(getattr(compiled, "source_code", ""), seg.graph, seg.inputs)
    return Artifact(_key(seg), _called_directly(compiled), generated)


def _called_directly(compiled: Any) -> SegmentFn:
    """What Inductor made, without what it does around a call: it records the first one for its caches, and names each
    in profiles. Around a small segment that takes as long as the segment."""
    if getattr(compiled, "current_callable", None) is None:
        return compiled
    direct: SegmentFn | None = None

    def call(args: list[object]) -> Sequence[object]:
        nonlocal direct
        if direct is not None and not profiled():
            return direct(args)
        out = compiled(args)
        direct = compiled.current_callable
        return out

    return call


@functools.cache
def _call_in_place_products() -> None:
    # Inductor calls an operator that it has no lowering for, as `addmm_` is to be called here; but with CI set in the
    # environment it refuses those that could be decomposed, a check of its own tables. So it is told.
    from torch._inductor import lowering

    if _aten_ops.addmm_.default not in lowering.lowerings:
        lowering.make_fallback(
            _aten_ops.addmm_.default, layout_constraint=lowering.constrain_to_fx_strides, warn=False
        )


@contextlib.contextmanager
def _strides_not_reported() -> Iterator[None]:
    # Inductor reports the strides of a whole forward's outputs here; a segment is not one.
    context = torch._guards.TracingContext.try_get()
    if context is None:
        yield
        return
    saved, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = saved
