"""From Dynamo's graph to AOTAutograd: sharded parameters enter as their plain local rows.

Dynamo sees ``weight(param, owner, name)`` with the DTensor parameter as a graph input. AOTAutograd would flatten that
subclass at every call. Instead the graph is given the local rows as plain leaf inputs of ``zero.unshard``, and the
runtime links them to the parameters (`runtime/autograd_bridge.py`).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ..errors import CaptureError
from ..ir import ops
from ..ir.facts import ParamRef
from ..params.weight_op import managed, placed, weight
from ..sharded import parameter_errors
from ..tensors import transforms
from ..torch_versions import TRANSFORM_BEGINNINGS
from .captured_writes import CapturedWrite, extract_writes

log = logging.getLogger("zero_compiler")


@dataclass(frozen=True)
class ShardInput:
    """A managed parameter among the inputs of a captured frame.

    ``arg`` is its position among Dynamo's arguments, ``at`` the position of its local rows among those of
    the rewritten graph.
    """

    arg: int
    at: int
    ref: ParamRef


@dataclass(frozen=True)
class WeightOutput:
    """A full weight among what a frame returns to Dynamo, at position ``at``.

    Where other frames follow the graph has None there (``taken``), and it is gathered eagerly, from the parameter at
    position ``arg`` among Dynamo's arguments: then it has a gradient of its own, and none where these make none.
    """

    at: int
    arg: int
    ref: ParamRef
    taken: bool


@dataclass(frozen=True)
class WeightView:
    """What a frame returns at position ``at`` is a view of the full weight of ``ref``, which is argument ``arg``."""

    at: int
    arg: int
    ref: ParamRef


@dataclass(frozen=True)
class Captured:
    """A frame's graph with local rows for parameters; ``keep`` lists Dynamo's arguments that it still takes.

    ``weights`` are full weights that it returns, most of them to code behind a graph break; ``views`` are of others;
    ``differentiated`` are the parameters to which the gradient of an output comes in plain PyTorch.
    ``code`` names what Dynamo compiles: the same when it compiles that again, another behind a graph break or for other
    weights; "" where it does not say. ``goes_on``: a graph break has ended the frame, and others follow. ``writes`` are
    done to the rows before the graph runs.
    """

    gm: fx.GraphModule
    shards: list[ShardInput]
    keep: list[int]
    weights: list[WeightOutput]
    differentiated: frozenset[ParamRef]
    code: str = ""
    goes_on: bool = False
    writes: Sequence[CapturedWrite] = ()
    views: Sequence[WeightView] = ()


def _refuse_writes(gm: fx.GraphModule, taken: Sequence[CapturedWrite]) -> None:
    """A gathered weight is a copy, so a write to it in forward would be lost, unless it is one of ``taken``."""
    for write in taken:
        if ops.owner_of(write.owner).params[write.name].part is not None:
            raise CaptureError(parameter_errors.written(write.name))
    for sub in gm.modules():
        if not isinstance(sub, fx.GraphModule):
            continue
        names: dict[int, str] = {}  # by storage of the gathered weight
        for node in sub.graph.nodes:
            value = node.meta.get("example_value")
            if transforms.wrapped(value):
                continue  # a weight is none, and neither is a view of one: they come from below all transforms
            if node.target is weight and isinstance(value, torch.Tensor):
                names[value.untyped_storage()._cdata] = node.args[2]
            # Dynamo has run the frame on these values: writes to them, to views of them and, apart, to .data of them
            # have been counted.
            if isinstance(value, FakeTensor) and not value.is_inference() and value._version:
                name = names.get(value.untyped_storage()._cdata)
                if name is not None:
                    raise CaptureError(parameter_errors.written(name))
            # Dynamo leaves this call out where it changes nothing, and the value that it was given in any case.
            if node.op == "call_method" and node.target == "requires_grad_":
                source = node.args[0]
                if isinstance(source, fx.Node) and source.target is weight:
                    raise CaptureError(parameter_errors.frozen_inside(str(source.args[2])))
            for written in _written_by_list(node):
                name = names.get(written.untyped_storage()._cdata)
                if name is not None:
                    raise CaptureError(parameter_errors.written(name))


def _written_by_list(node: fx.Node) -> list[FakeTensor]:
    """What ``torch._foreach_*_`` writes to: nobody has counted that."""
    called = getattr(node.target, "__name__", "")
    if node.op != "call_function" or not (called.startswith("_foreach_") and called.endswith("_")):
        return []
    values = [n.meta.get("example_value") for n in node.args[0] if isinstance(n, fx.Node)]
    return [v for v in values if isinstance(v, FakeTensor)]


def _refuse_assignment(gm: fx.GraphModule) -> None:
    """A frame that ends before ``weight.data = value``, which code behind it would do to the gathered copy alone.

    The same in a function that the frame calls, and gives a weight: then it ends before the call.
    """
    ended = getattr(gm, "compile_subgraph_reason", None)
    if "mutate tensor data attribute" not in getattr(ended, "reason", ""):
        return
    in_callee = len(getattr(ended, "user_stack", ())) > 1
    (output,) = gm.graph.find_nodes(op="output")
    left = [n for n in output.all_input_nodes if n.target is weight]
    values = [n for n in output.all_input_nodes if isinstance(n.meta.get("example_value"), torch.Tensor)]
    for node in left:
        copy = node.meta["example_value"]
        other = [v.meta["example_value"] for v in values if v is not node]
        foreign = [v.untyped_storage()._cdata != copy.untyped_storage()._cdata for v in other]
        # The frame leaves what is on its stack first: the value just before that to which it is assigned.
        at = values.index(node)
        given = at > 0 and foreign[at - 1] and other[at - 1].shape == copy.shape
        if in_callee or given or (all(foreign) and any(v.shape == copy.shape for v in other)):
            raise CaptureError(parameter_errors.written(str(node.args[2])))


def owners_in(gm: fx.GraphModule) -> set[str]:
    """Keys of the sharded models whose weights a frame reads."""
    graphs = [sub.graph for sub in gm.modules() if isinstance(sub, fx.GraphModule)]
    return {str(n.args[1]) for g in graphs for n in g.find_nodes(op="call_function", target=weight)}


# Long: the steps by which parameters become inputs of their local rows, in their order, each a function of its own.
def lower_parameters(gm: fx.GraphModule, example_inputs: Sequence[object]) -> tuple[Captured, list[object]]:
    """A copy of ``gm`` in which every DTensor parameter that is gathered is replaced by its local rows, and its inputs.

    These are apart, since among them is the batch, which nothing may keep.

    Raises:
        CaptureError: a marker reads something that is not a parameter of this frame.
        ShardError: another parameter stands where one was sharded.
    """
    mode = torch._guards.detect_fake_mode(list(example_inputs))
    if mode is None:
        context = torch._guards.TracingContext.try_get()
        mode = context.fake_mode if context is not None else None
    if mode is None:
        mode = torch._subclasses.fake_tensor.FakeTensorMode(
            shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()
        )
    goes_on = bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))
    _refuse_assignment(gm)
    gm = _copy(gm)
    _remove_placed(gm)
    _remove_unused(gm)
    _read_below_transforms(gm)
    writes = extract_writes(gm)
    _refuse_writes(gm, writes)
    _hoist_reads(gm)
    _read_once_where_hooked(gm, goes_on)
    _read_with_gradients(gm)
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    views = _views_returned(gm, placeholders)
    weights = _weights_returned(gm, placeholders, taken=goes_on)
    reached = _reached_by_gradients(gm)
    differentiated: set[ParamRef] = set()
    inputs: list[Any] = []
    shards: list[ShardInput] = []
    keep: list[int] = []
    for arg, (node, example) in enumerate(zip(placeholders, example_inputs, strict=True)):
        if isinstance(example, DTensor) and not node.users:
            gm.graph.erase_node(node)  # only written to, or used behind a graph break
            continue
        if isinstance(example, DTensor):
            fulls = {id(marker.meta.get("example_value")) for marker in _markers_of(node)}
            refs = _lower_one(gm, node, example)
            if refs is not None:
                local_node, ref = refs
                if fulls & reached:
                    differentiated.add(ref)
                if node.users:
                    keep.append(arg)
                    inputs.append(example)
                    node.append(local_node)
                else:
                    gm.graph.erase_node(node)
                shards.append(ShardInput(arg, len(inputs), ref))
                inputs.append(_fake_local(mode, example, ref))
                continue
        keep.append(arg)
        inputs.append(example)
    for name, region in _reads_inside(gm):
        raise CaptureError(
            f"weight {name!r} is read inside {region}, whose operands the compiler does not follow; read it before, "
            "and pass it in"
        )
    for node in gm.graph.find_nodes(op="call_function", target=weight):
        raise CaptureError(
            f"weight {node.args[2]!r} is gathered from {node.args[0]}, which is no parameter of this frame"
        )
    gm.recompile()
    captured = Captured(
        gm,
        shards,
        keep,
        weights,
        frozenset(differentiated),
        code=_code(shards),
        goes_on=goes_on,
        writes=writes,
        views=views,
    )
    return captured, inputs


def _code(shards: Sequence[ShardInput]) -> str:
    """Which code Dynamo compiles, and of which weights, in words that outlive its caches."""
    context = torch._guards.TracingContext.try_get()
    codes = context.traced_code if context is not None else None  # its own comes first
    if not codes:
        return ""
    code = codes[0]
    # Behind several breaks in one line stand functions of one name, and blocks of one class share its code.
    names = sorted(f"{s.ref.owner} {s.ref.name}" for s in shards)
    told = f"{zlib.crc32(code.co_code):08x} {zlib.crc32(repr(names).encode()):08x}"
    return f"{code.co_filename}:{code.co_firstlineno} {code.co_name} {told}"


def check_outputs(gm: fx.GraphModule) -> None:
    """A frame that is trained returns no DTensors: their gradients would enter the joint graph in parts.

    Raises:
        CaptureError: it returns one.
    """
    (output,) = gm.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        if isinstance(node.meta.get("example_value"), DTensor):
            raise CaptureError(
                f"a compiled frame returns a DTensor, {node.name!r}, and gradients of it are not followed; end the "
                "plan of parallelize_module with use_local_output=True (and output_layouts=Replicate() where the "
                "loss needs the whole), or put the loss into the forward"
            )


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    # Dynamo reads its own graph again after the backend has returned.
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        if hasattr(node, "_dynamo_source"):
            env[node]._dynamo_source = node._dynamo_source
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    return copy


def _read_below_transforms(gm: fx.GraphModule) -> None:
    """Move reads of weights before the first transform of torch.func that the frame begins: to all of them a weight is
    a constant, and AOTAutograd traces what stands between their beginning and their end through their levels."""
    first = next((n for n in gm.graph.nodes if n.target in TRANSFORM_BEGINNINGS), None)
    if first is None:
        return
    for node in gm.graph.find_nodes(op="call_function", target=weight):
        if node > first and node.args[0].op == "placeholder":
            first.prepend(node)


def _bodies(gm: fx.GraphModule, node: fx.Node) -> list[tuple[fx.Node, fx.GraphModule]]:
    """Graphs that a higher-order operator is given, as a region of ``torch.utils.checkpoint``."""
    out = []
    for arg in node.args:
        if isinstance(arg, fx.Node) and arg.op == "get_attr":
            body = getattr(gm, str(arg.target), None)
            if isinstance(body, fx.GraphModule):
                out.append((arg, body))
    return out


def _remove_placed(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=placed):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def _remove_unused(gm: fx.GraphModule) -> None:
    """Take out reads of weights of which only the dtype, the device or the like was asked: Dynamo has answered that."""
    for node in gm.graph.find_nodes(op="call_function", target=weight):
        if not node.users:
            gm.graph.erase_node(node)


def _read_once_where_hooked(gm: fx.GraphModule, goes_on: bool) -> None:
    """Let a weight that the forward registers a hook on be one tensor: in plain PyTorch the hook is given the whole
    gradient of the parameter, whichever of its reads it was registered on."""
    hooks = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "register_hook"]
    for node in hooks:
        if node.args[0].target is not weight:
            continue
        if goes_on:
            raise CaptureError(parameter_errors.hooked(str(node.args[0].args[2])))
        first, *others = sorted(_markers_of(node.args[0].args[0]))
        for other in others:
            other.replace_all_uses_with(first)
            gm.graph.erase_node(other)


def _hoist_reads(gm: fx.GraphModule) -> None:
    """Move reads of weights out of regions with one body: the region is given the full weight instead.

    A checkpointed region is made again in backward; the gather before it is, too, as that of any weight.
    """
    for k, node in enumerate(list(gm.graph.nodes)):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        found = _bodies(gm, node)
        if len(found) != 1 or node.args[0] is not found[0][0]:
            continue
        attribute, body = found[0]
        body = _copy(body)
        _remove_placed(body)
        _hoist_reads(body)
        placeholders = list(body.graph.find_nodes(op="placeholder"))
        args = list(node.args[1:])
        if len(placeholders) != len(args):
            continue
        for i, inner in enumerate(placeholders):
            markers = _markers_of(inner)
            if not markers:
                continue
            with gm.graph.inserting_before(node):
                full = gm.graph.call_function(weight, (args[i], *markers[0].args[1:]))
            full.meta = dict(markers[0].meta)
            with body.graph.inserting_after(placeholders[-1]):
                given = body.graph.placeholder(f"{inner.name}_full")
            given.meta = dict(markers[0].meta)
            placeholders.append(given)
            args.append(full)
            for marker in markers:
                marker.replace_all_uses_with(given)
                body.graph.erase_node(marker)
        # Operands that nothing reads any more, so that the frame need not be given the parameter itself.
        for i in reversed(range(len(args))):
            if not placeholders[i].users and isinstance(args[i], fx.Node) and i < len(node.args) - 1:
                body.graph.erase_node(placeholders[i])
                del args[i]
        body.recompile()
        name = f"{attribute.target}_zero_{k}"
        setattr(gm, name, body)
        with gm.graph.inserting_before(node):
            fresh = gm.graph.get_attr(name)
        node.args = (fresh, *args)
        if not attribute.users:
            gm.graph.erase_node(attribute)


def _read_with_gradients(gm: fx.GraphModule) -> None:
    """Move reads of weights out of regions under ``torch.no_grad``: what is read there may be used elsewhere."""
    if not torch.is_grad_enabled():
        return
    begin: fx.Node | None = None
    for node in list(gm.graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            begin = None if node.args[0] else begin or node
        elif node.target is weight and begin is not None and node.args[0].op == "placeholder":
            begin.prepend(node)


def _weights_returned(gm: fx.GraphModule, placeholders: Sequence[fx.Node], taken: bool) -> list[WeightOutput]:
    """Full weights among the outputs; where they are ``taken`` the graph returns None in their places."""
    (output,) = gm.graph.find_nodes(op="output")
    (returned,) = output.args
    if not isinstance(returned, (list, tuple)):
        return []
    found, left = [], list(returned)
    for at, node in enumerate(returned):
        if isinstance(node, fx.Node) and node.target is weight and node.args[0] in placeholders:
            ref = ParamRef(str(node.args[1]), str(node.args[2]))
            found.append(WeightOutput(at, placeholders.index(node.args[0]), ref, taken))
            left[at] = None
    if not taken:
        return found
    output.args = (type(returned)(left),)
    for node in returned:
        if isinstance(node, fx.Node) and node.target is weight and not node.users:
            gm.graph.erase_node(node)
    return found


def _views_returned(gm: fx.GraphModule, placeholders: Sequence[fx.Node]) -> list[WeightView]:
    """Views of full weights among the outputs: Dynamo has made them of values that share a storage."""
    (output,) = gm.graph.find_nodes(op="output")
    of: dict[int, fx.Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=weight):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and node.args[0] in placeholders:
            of[value.untyped_storage()._cdata] = node
    found = []
    for at, node in enumerate(output.args[0] if isinstance(output.args[0], (list, tuple)) else ()):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not isinstance(value, FakeTensor) or node.target is weight or value.layout is not torch.strided:
            continue
        source = of.get(value.untyped_storage()._cdata)
        if source is not None:
            ref = ParamRef(str(source.args[1]), str(source.args[2]))
            found.append(WeightView(at, placeholders.index(source.args[0]), ref))
    return found


def _reached_by_gradients(gm: fx.GraphModule) -> set[int]:
    """Ids of the full weights to which the gradient of an output comes.

    Dynamo has run the frame on values without data, of which full weights are leaves, and autograd has followed it.
    """
    (output,) = gm.graph.find_nodes(op="output")
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    found: set[int] = set()
    waiting: list[Any] = [v.grad_fn for v in tensors]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            waiting += [following for following, _ in node.next_functions]
    return found


def check_gradients(joint: fx.Graph, differentiated: frozenset[ParamRef]) -> None:
    """Say of which parameters the gradient is lost between Dynamo's graph and the joint one.

    A warning and no error: of an operator that hands no gradient on, what it has been given is among them too.
    """
    kept = {
        ParamRef(*node.args[-2:]) for node in joint.find_nodes(op="call_function", target=ops.reduce_grad)
    }
    lost = sorted(ref.name for ref in differentiated - kept)
    if lost:
        log.warning(
            "this compiled forward uses parameter %r where plain PyTorch would give it a gradient, and the compiled "
            "backward makes none%s; if p.grad is missing without torch.compile too, nothing is wrong, else leave this "
            "part uncompiled (torch.compiler.disable)",
            lost[0],
            f" (nor of {len(lost) - 1} others)" if len(lost) > 1 else "",
        )


def _markers_of(param: fx.Node) -> list[fx.Node]:
    return [u for u in param.users if u.target is weight]


def _reads_inside(gm: fx.GraphModule) -> list[tuple[str, str]]:
    """Weights that regions still read, each with the name of its region."""
    out = []
    for node in gm.graph.nodes:
        for _, body in _bodies(gm, node) if node.op == "call_function" else ():
            region = getattr(node.target, "__name__", str(node.target))
            for inner in body.graph.nodes:
                if inner.target is weight:
                    out.append((str(inner.args[2]), region))
            out += _reads_inside(body)
    return out


def _lower_one(gm: fx.GraphModule, node: fx.Node, example: Any) -> tuple[fx.Node, ParamRef] | None:
    """Give the readers of the local rows of ``node`` a placeholder of their own; None where nothing is gathered."""
    marked = _markers_of(node)
    if not marked:
        return None
    refs = [ParamRef(str(m.args[1]), str(m.args[2])) for m in marked]
    with gm.graph.inserting_before(node):
        local = gm.graph.placeholder(f"{node.name}_local")
    local._dynamo_source = None
    # A parameter that was tied after zero.shard is read under two names: one will do.
    ref = min(refs)
    for marker, read in zip(marked, refs, strict=True):
        info = managed(example, read.name, ops.owner_of(read.owner))
        with gm.graph.inserting_before(marker):
            full = gm.graph.call_function(
                ops.unshard, (local, info.layout.shape, info.gather_dtype, ref.owner, ref.name)
            )
        full.meta = dict(marker.meta)
        marker.replace_all_uses_with(full)
        gm.graph.erase_node(marker)
    return local, ref


def _fake_local(mode: Any, param: Any, ref: ParamRef) -> torch.Tensor:
    """The rows as the graph sees them: on the device that computes, wherever they rest."""
    local = param._local_tensor
    with torch.no_grad():
        planned = isinstance(local, FakeTensor)
        fake = local.detach() if planned else mode.from_tensor(local.detach(), static_shapes=True)
        device = ops.owner_of(ref.owner).tiers.computes_on(ref.name, local)
        if device != fake.device:
            with fake.fake_mode:
                fake = torch.empty_like(fake, device=device)
    return fake.requires_grad_(param.requires_grad and local.dtype.is_floating_point)
