"""The one printer of graphs: a line a node, with parameter names, sizes and the live bytes after it."""

from __future__ import annotations

import re

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from . import facts, ops

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
    torch.uint8: "u8",
}


def type_text(val: object) -> str:
    """``f32[4, 8]`` for a tensor, the expression for a symbolic number, a list for several."""
    if isinstance(val, torch.Tensor):
        sizes = ",".join(str(s) for s in val.shape)
        return f"{_SHORT.get(val.dtype, str(val.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(val, (list, tuple)):
        return "(" + ", ".join(type_text(v) for v in val) + ")"
    return "" if val is None else str(val)


def target_text(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}.{target._schema.name.split('::')[1]}"
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    return getattr(target, "__name__", str(target))


def outline(graph: fx.Graph) -> str:
    """Names, operators, operands and types of a graph with markers: what is equal on ranks whose shards have different
    numbers of rows, and in every process."""
    marked = graph.find_nodes(op="call_function", target=ops.unshard)
    shards = {n.args[0] for n in marked}
    lines = []
    for node in graph.nodes:
        if node in shards:
            lines.append(f"{node.name} = rows")
        elif node.target in (ops.unshard, ops.reduce_grad):
            lines.append(f"{node.name} = {target_text(node)} {node.args[0]} {node.args[2]} {node.args[4]}")
        elif node.op == "output":
            lines.append(f"return {node.args}")
        else:
            lines.append(
                f"{node.name} = {node.op} {target_text(node)} {node.args} {node.kwargs} {type_text(facts.value(node))}"
            )
    return without_addresses("\n".join(lines))


def without_addresses(text: str) -> str:
    """A text in which objects have been written by their default form, which names where each lies."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def live_bytes(graph: fx.Graph) -> list[tuple[int, int]]:
    """For each node, bytes that it allocates and bytes live after it and after the last uses that it is.

    Storages count once, however many views name them. A gathered weight lives from its gather to its
    release; where there is none, to its last use.
    """
    roots = facts.alias_roots(graph)
    nodes = list(graph.nodes)
    size: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    owner: dict[fx.Node, frozenset[fx.Node]] = {}
    for i, node in enumerate(nodes):
        if node.op == "placeholder" or facts.is_compute(node) and roots[node] == frozenset((node,)):
            size[node] = facts.bytes_of(facts.value(node))
        elif node.target in (ops.gather, ops.reduce, ops.restore, ops.bring):
            size[node] = facts.bytes_of(facts.value(node))
        held = {node}
        for r in roots[node]:
            held |= _through_wait(r)
        owner[node] = frozenset(h for h in held if h in size)
        for used in (node, *node.all_input_nodes):
            for h in owner.get(used, ()):
                last[h] = i
    end = len(nodes)
    for node in nodes:
        if node.op == "output":
            for used in node.all_input_nodes:
                for h in owner[used]:
                    last[h] = end
    dying: dict[int, int] = {}
    for h, i in last.items():
        dying[i] = dying.get(i, 0) + size[h]
    rows, live = [], 0
    for i, node in enumerate(nodes):
        live += size.get(node, 0)
        freed = dying.get(i, 0)
        rows.append((size.get(node, 0), live - freed))
        live -= freed
    return rows


def _through_wait(node: fx.Node) -> set[fx.Node]:
    """The transfer behind an element of a wait."""
    out = {node}
    while facts.is_element(node) or node.target is ops.wait:
        node = node.args[0]
        out.add(node)
    return out


def text(graph: fx.Graph) -> str:
    """The graph, one line a node; a wait and the names of its tensors share one."""
    names = _names(graph)
    lines = []
    before = 0
    for node, (born, live) in zip(graph.nodes, live_bytes(graph), strict=True):
        if not facts.is_element(node):
            freed = before - live if node.target is ops.release else 0
            lines.append(_line(node, born, freed, live, names).rstrip())
        before = live
    return "\n".join(lines) + "\n"


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    """What nodes are called in a dump: transfers and what they bring have the names of their parameters."""
    names: dict[fx.Node, str] = {}
    taken: dict[str, int] = {}

    def give(node: fx.Node, name: str) -> None:
        count = taken[name] = taken.get(name, 0) + 1
        names[node] = name if count == 1 else f"{name}_{count}"

    shards = {n.args[0]: n.args[4] for n in graph.find_nodes(op="call_function", target=ops.unshard)}
    for node in graph.nodes:
        if node in shards:
            give(node, f"{shards[node]}.shard")
        elif node.target in (ops.gather, ops.reduce):
            refs = facts.params(node)
            what = refs[0].name if len(refs) == 1 else f"{refs[0].name}..{refs[-1].name}"
            give(node, f"{what}.full" if node.target is ops.gather else f"{what}.sum")
        elif facts.is_element(node) and node.args[0].target is ops.wait:
            start = node.args[0].args[0]
            name = facts.params(start)[node.args[1]].name
            give(node, name if start.target is ops.gather else f"{name}.grad")
        else:
            give(node, node.name)
    return names


def _tile(node: fx.Node) -> str:
    tile = facts.tile(node)
    return f" tile {tile.index + 1} of {tile.of}" if tile else ""


def _line(node: fx.Node, born: int, freed: int, live: int, names: dict[fx.Node, str]) -> str:
    def arg(a: fx.node.Argument) -> str:
        if isinstance(a, fx.Node):
            return f"%{names[a]}"
        if isinstance(a, (list, tuple)):
            return "[" + ", ".join(arg(x) for x in a) + "]"
        if isinstance(a, torch.dtype):
            return str(a).removeprefix("torch.")
        return repr(a) if isinstance(a, str) else str(a)

    if node.op == "output":
        return "return " + ", ".join(arg(a) for a in tree_leaves(node.args[0]))
    name = f"%{names[node]}"
    if node.target is ops.release:
        head = f"zero.release {', '.join(arg(a) for a in node.args[0])}"
    elif node.target is ops.keep_part:
        head = f"zero.keep_part {', '.join(arg(a) for a in node.args[0])}"
    elif node.target is ops.wait:
        elements = sorted((u for u in node.users if facts.is_element(u)), key=lambda u: u.args[1])
        head = f"{', '.join(arg(e) for e in elements) or name} = zero.wait {arg(node.args[0])}"
    elif node.op == "placeholder":
        head = f"{name} = input"
    elif node.op == "get_attr":
        head = f"{name} = constant {node.target}"
    elif node.target in (ops.unshard, ops.reduce_grad):
        head = f"{name} = {target_text(node)} {arg(node.args[0])} [{node.args[4]}]"
    elif node.target in (ops.offload, ops.restore):
        head = f"{name} = {target_text(node)} {arg(node.args[0])} [{node.args[1]}]"
    elif node.target in (ops.write, ops.offloaded, ops.discard):
        head = f"{' ' * len(name)}   {target_text(node)} {arg(node.args[0])}"
    elif node.target is ops.gather:
        over = f" over {node.args[5]}" if facts.over_host(node) else ""
        head = (
            f"{name} = zero.gather [{', '.join(ref.name for ref in facts.params(node))}]{_tile(node)}{over}"
        )
    elif node.target is ops.reduce:
        head = f"{name} = zero.reduce {', '.join(arg(a) for a in node.args[0])}{_tile(node)}"
    else:
        args = [arg(a) for a in node.args] + [f"{k}={arg(v)}" for k, v in node.kwargs.items()]
        head = f"{name} = {target_text(node)} {', '.join(args)}"
    tail = type_text(facts.value(node))
    delta = f"+{born}" if born else f"-{freed}" if freed else ""
    return f"{head:<72} {tail:<24} {delta:>10}  live {live}"
