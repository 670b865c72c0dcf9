"""The only reader and writer of ``node.meta`` keys, and the questions that passes ask of a node.

Sizes are in elements or bytes as the name says; symbolic sizes are taken at their hints.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from . import ops

_PARAMS = "zero_params"
_UNIT = "zero_unit"
_NOTE = "zero_note"
_REASON = "zero_reason"
_TILING = "zero_tiling"
_TILE = "zero_tile"
_RETURNED = "zero_returned"
_STAYS = "zero_stays"
_AWAY = "zero_away"
_GOES_AWAY = "zero_goes_away"
_DIRECT = "zero_direct"


class ParamRef(NamedTuple):
    """A managed parameter: key of the sharded model that owns it, and its qualified name there."""

    owner: str
    name: str


def value(node: fx.Node) -> Any:
    """Fake value of a node: a tensor, a symbolic number, or a list of them; None where there is none."""
    return node.meta.get("val")


def set_value(node: fx.Node, val: object) -> None:
    node.meta["val"] = val


def params(node: fx.Node) -> tuple[ParamRef, ...]:
    """Parameters that a transfer moves, in order."""
    return node.meta[_PARAMS]


def set_params(node: fx.Node, refs: Iterable[ParamRef]) -> None:
    node.meta[_PARAMS] = tuple(refs)


def unit(node: fx.Node) -> str:
    """Name of the unit (the repeated block, as ``h.3``) that a transfer serves."""
    return node.meta.get(_UNIT, "")


def set_unit(node: fx.Node, name: str) -> None:
    node.meta[_UNIT] = name


@dataclass(frozen=True)
class Tile:
    """Part of a weight or of a gradient: of every rank's padded chunk ``rows`` rows from row ``begin`` on.

    What is gathered of it lies rank after rank: row ``j`` of the full weight, which rank ``j // chunk_rows`` holds,
    is row ``(j // chunk_rows) * rows + j % chunk_rows - begin`` of the tile.
    """

    begin: int
    rows: int
    index: int
    of: int

    @property
    def last(self) -> bool:
        return self.index == self.of - 1


def tile(node: fx.Node) -> Tile | None:
    """What part of its only parameter a transfer moves; None: all of it."""
    return node.meta.get(_TILE)


def set_tile(node: fx.Node, tile: Tile) -> None:
    node.meta[_TILE] = tile


def stays(node: fx.Node) -> bool:
    """Whether a value that is made of weights alone is made where it stands, and not before its first reader."""
    return _STAYS in node.meta


def set_stays(node: fx.Node) -> fx.Node:
    node.meta[_STAYS] = True
    return node


def note(node: fx.Node) -> str | None:
    """A sentence for the report."""
    return node.meta.get(_NOTE)


def set_note(node: fx.Node, text: str) -> None:
    node.meta[_NOTE] = text


def add_note(graph: fx.Graph, text: str) -> None:
    """A sentence that belongs to no node that stays."""
    (output,) = graph.find_nodes(op="output")
    output.meta[_NOTE] = "\n".join([*(output.meta.get(_NOTE) or "").splitlines(), text])


def reason(node: fx.Node) -> str:
    """Why backward makes the value again."""
    if _REASON in node.meta:
        return node.meta[_REASON]
    return "a region of torch.utils.checkpoint" if user_region(node) else "cheaper than to read it back"


def set_reason(node: fx.Node, text: str) -> None:
    node.meta[_REASON] = text


@dataclass(frozen=True)
class TileOutput:
    """One result of a tile: ``rows`` is the dimension that runs over tiles, or None for what is added up.

    ``product``: the tile returns two matrices, and their product is what is added up.
    """

    rows: int | None
    product: bool = False


@dataclass(frozen=True)
class Columns:
    """How the rows of a weight run through a ``zero.tiled``, which can then be done for a tile of the weight at a time.

    Args:
        size: how many of them the weight has, or a tile of it.
        inputs: for each input, the dimension that is split as the weight's rows are; None for what is read whole.
        outputs: for each output, how those of tiles of the weight make the whole: "sum", "max" or "logsumexp" of them,
            or the dimension along which they are laid.
    """

    size: int
    inputs: tuple[int | None, ...]
    outputs: tuple[str | int, ...]


@dataclass(frozen=True)
class Tiling:
    """What a ``zero.tiled`` does on one tile.

    Args:
        graph: takes the number of rows of the tile (with ``columns``, then their number), then a tile of every input
            that has rows and the whole of the others; returns the outputs one after the other.
        inputs: for each input, the dimension that is split into tiles; None for what every tile reads whole.
        total: rows of all tiles together; ``tiles`` of them, of equally many rows but for the last.
        what: is computed, in words.
        row_bytes: what never exists whole, a row of it.
        reread_bytes: what every tile reads or writes again.
        us: time of all products in it on the machine of the plan, at hints; 0 where that is not asked for.
        columns: how the rows of a weight run through it; None where it needs its weights whole.
        whole: why it needs the weight whole, where it is larger than what is to be gathered at once; a clause.
        why: what tiles of this size are for, in words.
        asked: how many tiles that makes; a memory budget may make more of them.
    """

    graph: fx.Graph
    inputs: tuple[int | None, ...]
    outputs: tuple[TileOutput, ...]
    total: int | torch.SymInt
    tiles: int
    what: str
    row_bytes: int
    reread_bytes: int
    us: float = 0.0
    columns: Columns | None = None
    whole: str = ""
    why: str = ""
    asked: int = 0

    @property
    def tile(self) -> int:
        """Rows of a tile, at hints."""
        return -(-hint(self.total) // self.tiles)


def tiling(node: fx.Node) -> Tiling:
    """What a ``zero.tiled`` does on one tile."""
    return node.meta[_TILING]


def set_tiling(node: fx.Node, tiling: Tiling) -> None:
    node.meta[_TILING] = tiling


def tag_recompute(node: fx.Node, sharded_model: object, graph_id: int) -> None:
    """Tell the partitioner what to do with a forward value that backward needs."""
    node.meta["recompute"] = sharded_model
    node.meta["ac_graph_id"] = graph_id


def user_region(node: fx.Node) -> bool:
    """True inside a ``torch.utils.checkpoint`` region of the user."""
    return "recompute" in node.meta


def copy_region(src: fx.Node, dst: fx.Node) -> None:
    """Have ``dst`` belong to the region of the user in which ``src`` is, if any."""
    for key in ("recompute", "ac_graph_id"):
        if key in src.meta:
            dst.meta[key] = src.meta[key]


@dataclass(frozen=True)
class Away:
    """A tensor that waits on another tier between forward and backward.

    Args:
        name, op, module: of the node that makes it.
        tiers: those on its way from the compute device, where it rests last: "host" or "nvme", or one after the other.
        why: it is there, in words.
        nbytes: that are not held meanwhile.
        us: what it costs. In a graph, the time of its transfers, both ways, where the lane is not to hide them. In the
            report, by how much the simulated Programs take longer for them.
    """

    name: str
    op: str
    module: str
    tiers: tuple[str, ...]
    why: str
    nbytes: int
    us: float

    @property
    def tier(self) -> str:
        return self.tiers[-1]

    @property
    def staged(self) -> bool:
        """Whether it stops on the host on its way between an accelerator and a file."""
        return len(self.tiers) > 1


def away(node: fx.Node) -> Away:
    """What a ``zero.offload`` takes away, and a ``zero.restore`` brings back."""
    return node.meta[_AWAY]


def set_away(node: fx.Node, away: Away) -> None:
    node.meta[_AWAY] = away


def goes_away(node: fx.Node) -> bool:
    """Whether a value of forward is to wait on another tier until backward reads it."""
    return _GOES_AWAY in node.meta


def send_away(node: fx.Node) -> None:
    node.meta[_GOES_AWAY] = True


def direct(node: fx.Node) -> tuple[str, ...]:
    """Of what a reduction reduces, names of gradients that are made in memory from which they go to files."""
    return node.meta.get(_DIRECT, ())


def set_direct(node: fx.Node, names: Iterable[str]) -> None:
    node.meta[_DIRECT] = tuple(names)


def module_path(node: fx.Node) -> str:
    """Qualified name of the innermost module that the node came from, or ''."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return path.removeprefix("L['self'].").removeprefix("L['self']")


def is_compute(node: fx.Node) -> bool:
    """True for a node that runs on the compute device, as against a transfer or the graph's frame."""
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    if node.target in ops.BORDERS:
        return False
    return not is_element(node)


def replace_all(new_of: Mapping[fx.Node, fx.Node]) -> None:
    """Read ``new_of[n]`` wherever ``n`` is read.

    Every reader is rewritten once. Node by node, the output of a backward would be copied, with its thousands of
    gradients, for each of them.
    """
    for reader in dict.fromkeys(user for old in new_of for user in old.users):
        reader.args = map_arg(reader.args, lambda n: new_of.get(n, n))
        reader.kwargs = map_arg(reader.kwargs, lambda n: new_of.get(n, n))


def is_element(node: fx.Node) -> bool:
    """True for ``getitem`` of a transfer: a name for one of its tensors, no work."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and node.args[0].target in ops.TRANSFERS
    )


def is_weight(node: fx.Node) -> bool:
    """True for a gathered full weight: an element of the wait of a gather."""
    if not is_element(node):
        return False
    waited = node.args[0]
    return waited.target is ops.wait and waited.args[0].target is ops.gather


def over_host(node: fx.Node) -> bool:
    """Whether a gather is one of second shards, among the ranks of a host."""
    return len(node.args) > 5 and node.args[5] == "host"


def is_pure(node: fx.Node) -> bool:
    """True where running the node twice, or later, is running it once: no mutation, no draw of random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def sends(node: fx.Node) -> bool:
    """Whether the node is a collective of the user's (or the wait for one), as tensor parallelism has them."""
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional"


def made_of_weights(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Markers of weights, and nodes computed from weights alone, each with the markers behind it.

    Where markers are lowered, gathered weights take their place. What depends on gradients is not among them.
    """
    backward: set[fx.Node] = set()
    made: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if is_tangent(node):
            backward.add(node)
        elif any(i in backward for i in inputs):
            backward.add(node)
        elif node.target is ops.unshard or is_weight(node):
            made[node] = {node}
        elif node.op != "call_function" or not is_pure(node):
            continue
        elif (inputs := [i for i in inputs if not _is_number(i)]) and all(i in made for i in inputs):
            made[node] = set().union(*(made[i] for i in inputs))
    return made


def _is_number(node: fx.Node) -> bool:
    """A size, say, which a weight may be expanded to."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def is_tangent(node: fx.Node) -> bool:
    """Whether the node is the gradient of an output that a backward is given: AOTAutograd names them so."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def depends_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Of a joint graph, what belongs to backward: gradients of outputs, and all that is made of them."""
    out: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node):
            out.add(node)
        elif any(i in out for i in node.all_input_nodes):
            out.add(node)
    return out


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs that the node writes to, by the operator's schema."""
    if node.op != "call_function":
        return []
    out: list[fx.Node] = []
    for i, name in _written_arguments(node.target):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        out.extend(n for n in leaves(given) if isinstance(n, fx.Node))
    return out


@functools.cache
def _written_arguments(target: fx.node.Target) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operator writes to."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple(
        (i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write
    )


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs whose storage the node's result may share, by the operator's schema."""
    if node.op != "call_function":
        return []
    target = node.target
    if target is operator.getitem:
        return [node.args[0]] if not is_element(node) else []
    arguments = _aliased_arguments(target)
    if arguments is None:
        return list(node.all_input_nodes)  # a higher-order operator may return anything that it was given
    args, out = node.args, list[fx.Node]()
    for i, name in arguments:
        given = args[i] if i < len(args) else node.kwargs.get(name)
        if isinstance(given, fx.Node):
            out.append(given)
        else:
            out.extend(n for n in leaves(given) if isinstance(n, fx.Node))
    return out


@functools.cache
def _aliased_arguments(target: fx.node.Target) -> tuple[tuple[int, str], ...] | None:
    """Places and names of the arguments whose storage an operator's result may share, or that it writes to; None: it
    has no schema that would say so.

    reshape and its kin alias only sometimes, and say so with no annotation: they are composite and do not stand in
    lowered graphs. `contiguous`-like no-ops do not stand there either.
    """
    if target is torch.ops._c10d_functional.wait_tensor.default:
        return ((0, "tensor"),)  # the result is the tensor that it waits for, and its schema does not say so
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    arguments = enumerate(schema.arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None)


def alias_roots(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """For every node, the nodes whose storage its result may share (itself where it allocates)."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    extend_alias_roots(roots, graph.nodes)
    return roots


def extend_alias_roots(roots: dict[fx.Node, frozenset[fx.Node]], nodes: Iterable[fx.Node]) -> None:
    """The same of ``nodes``, in the order of their graph, which read one another and what has ``roots`` already."""
    for node in nodes:
        shared = aliased_inputs(node)
        if not shared:
            roots[node] = frozenset((node,))
        elif len(shared) == 1:
            roots[node] = roots[shared[0]]
        else:
            roots[node] = frozenset().union(*(roots[s] for s in shared))


class Sizes:
    """Numbers for the symbols in sizes, to stand in place of those that the capture saw."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self._values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self._known: dict[object, int | None] = {}

    def of(self, size: sympy.Expr) -> int | None:
        """The number of an expression; None where it has other symbols."""
        if size not in self._known:
            number = size.xreplace(self._values)
            self._known[size] = int(number) if number.is_number else None
        return self._known[size]


def mapped(change: Callable[[object], object], given: object) -> Any:
    """Arguments of a node with each of them, in lists and dicts too, changed. As ``tree_map``, which takes longer for
    the few that there are than the rest of what is done for a node."""
    if isinstance(given, list):
        return [mapped(change, item) for item in given]
    if type(given) is tuple:
        return tuple([mapped(change, item) for item in given])
    if isinstance(given, dict):
        return {key: mapped(change, item) for key, item in given.items()}
    return change(given)


def leaves(val: object) -> Iterable[object]:
    """What a value or an argument consists of: most often itself alone, which is told without a walk, or a list."""
    if not isinstance(val, (tuple, list, dict)):
        return (val,)
    if isinstance(val, dict) or any(isinstance(item, (tuple, list, dict)) for item in val):
        return tree_leaves(val)
    return val


def bytes_of(val: object, sizes: Sizes | None = None) -> int:
    """Bytes of the tensors in a fake value, at ``sizes`` or at hints; views count as if they were whole."""
    return sum(_tensor_bytes(t, sizes) for t in leaves(val) if isinstance(t, torch.Tensor))


def saved_storages(
    backward: fx.Graph, sizes: Sizes | None = None
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, int]]:
    """What forward saved, by storage: for every saved tensor the first with its storage, and for that the bytes.

    A view that is saved (v of a product that made q, k and v) keeps the whole storage alive.
    """
    first: dict[StorageWeakRef, fx.Node] = {}
    owner: dict[fx.Node, fx.Node] = {}
    nbytes: dict[fx.Node, int] = {}
    for node in backward.find_nodes(op="placeholder"):
        # AOTAutograd's names: what forward was given is the caller's, the rest forward made and nobody else holds.
        if str(node.target).startswith("primals"):
            continue
        val = value(node)
        if not isinstance(val, torch.Tensor):
            owner[node], nbytes[node] = node, bytes_of(val, sizes)
            continue
        storage = val.untyped_storage()
        owner[node] = first.setdefault(StorageWeakRef(storage), node)
        whole = max(hint(storage.nbytes(), sizes), _tensor_bytes(val, sizes))
        nbytes[owner[node]] = max(nbytes.get(owner[node], 0), whole)
    return owner, nbytes


def saved_bytes(backward: fx.Graph, sizes: Sizes | None = None) -> int:
    """Bytes of what forward made and hands to backward, or to its caller."""
    saved = saved_storages(backward, sizes)[1]
    handed = sum(nbytes for node, nbytes in saved.items() if not is_tangent(node))
    return handed + returned_bytes(backward, sizes)


def set_returned(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> None:
    """Note in ``backward`` what its forward has made for the caller, alone or as well.

    Args:
        num_outputs: of what forward returns, the first so many are the caller's; the rest goes to backward, which takes
            tensors in the same order.
    """
    (output,), (end,) = (graph.find_nodes(op="output") for graph in (forward, backward))
    roots = alias_roots(forward)
    returned: dict[fx.Node, object] = {}
    for node in output.args[0][:num_outputs]:
        for r in roots.get(node, ()):
            if r.op != "placeholder":
                returned[r] = (
                    value(node) if r.target is ops.unshard else value(r)
                )  # of a weight a copy goes out
    given, taken = (
        [n for n in nodes if isinstance(n, fx.Node) and isinstance(value(n), torch.Tensor)]
        for nodes in (output.args[0][num_outputs:], backward.find_nodes(op="placeholder"))
    )
    for here, there in zip(given, taken, strict=False):
        there.meta[_RETURNED] = not roots[here].isdisjoint(returned)
    saved = frozenset().union(*(roots[n] for n in given))
    end.meta[_RETURNED] = [val for r, val in returned.items() if r not in saved]


def is_returned(node: fx.Node) -> bool:
    """Whether what backward takes was returned to the caller as well, who may hold it for longer."""
    return bool(node.meta.get(_RETURNED, False))


def returned_bytes(graph: fx.Graph, sizes: Sizes | None = None) -> int:
    """Of a backward, bytes of what its forward has made for the caller alone."""
    (output,) = graph.find_nodes(op="output")
    return sum(bytes_of(val, sizes) for val in output.meta.get(_RETURNED, ()))


def _tensor_bytes(t: torch.Tensor, sizes: Sizes | None) -> int:
    return hint(t.numel(), sizes) * t.element_size()


def hint(size: Any, sizes: Sizes | None = None) -> int:
    """A number for a size that may be symbolic: of ``sizes``, else what the capture saw."""
    if isinstance(size, torch.SymInt):
        number = None if sizes is None else sizes.of(size.node.expr)
        if number is not None:
            return number
        given = size.node.hint
        # Data-dependent sizes have no hint; the plan then counts one row.
        return 1 if given is None else int(given)
    return int(size)


def symbols_of(val: object) -> set[sympy.Symbol]:
    """Free symbols in the sizes and strides of a fake value."""
    out: set[sympy.Symbol] = set()
    for leaf in leaves(val):
        if isinstance(leaf, torch.Tensor):
            if leaf._has_symbolic_sizes_strides:
                out |= set(free_symbols(leaf))
        elif isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            out |= set(free_symbols(leaf))
    return out


# Results of operators on fake values, by operator and layout of what it is given.
Results = dict[object, object]


def share_results(graph: fx.Graph, results: Results) -> None:
    """Let nodes that are written into a graph take values from ``results``, which grows: equal operators on operands of
    one layout then share a fake value. It tells bytes and layouts, and no more whose storage it is."""
    graph._zero_results = results


def shared_results(graph: fx.Graph) -> Results | None:
    """What was given to :func:`share_results`; None: every node has a value of its own."""
    return getattr(graph, "_zero_results", None)


def fake_empty(
    graph: fx.Graph, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A fake contiguous tensor in the fake mode of the graph; on meta where the graph has none. Where results are
    shared, it is the same for all of one layout."""
    known = shared_results(graph)
    layout = "empty", shape, dtype, device
    if known is None:
        return _fake_empty(graph, shape, dtype, device)
    if layout not in known:
        known[layout] = _fake_empty(graph, shape, dtype, device)
    made: Any = known[layout]
    return made


def _fake_empty(
    graph: fx.Graph, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    mode = getattr(graph, "_zero_fake_mode", None)
    if mode is None:
        mode = torch._guards.detect_fake_mode([value(n) for n in graph.nodes])
        graph._zero_fake_mode = mode
    if mode is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    with mode:
        return torch.empty(shape, dtype=dtype, device=device)


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module whose graph can be rewritten; attributes are shared.

    Code is written for it when it runs: a copy that only bytes are asked of does without.
    """
    graph = _Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
        env[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        env[node].meta.update(node.meta)
    return _LazyGraphModule(gm, graph)


_SET_ARGS, _SET_KWARGS = vars(fx.Node)["args"].__set__, vars(fx.Node)["kwargs"].__set__


class _Graph(fx.Graph):
    """A graph that makes nodes in two thirds of the time: torch looks through the arguments of each for symbolic sizes,
    to warn of them, unless they are set afterwards (by the property itself: on its way there a node would be taken out
    of the graph's table of nodes and put back)."""

    def create_node(
        self,
        op: str,
        target: fx.node.Target,
        args: tuple[fx.node.Argument, ...] | None = None,
        kwargs: dict[str, fx.node.Argument] | None = None,
        name: str | None = None,
        type_expr: object = None,
    ) -> fx.Node:
        node = super().create_node(op, target, None, None, name, type_expr)
        if args:
            _SET_ARGS(node, args)
        if kwargs:
            _SET_KWARGS(node, kwargs)
        return node
