"""Forward and backward graph: what is saved waits on another tier, and comes back in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.alignment import BLOCK_BYTES, block_aligned
from zero_compiler.cost.cost import CostModel, at_hints, hints
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.ir import dump, facts, ops

from .activations import storages
from .base import Context

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
# Why it waits there. What it costs is for the simulation of the Programs to say: this goes by the times of operators.
HIDDEN, BUDGET, PLAN = "the lane is to hide it", "the budget", "the plan file"


@dataclass(frozen=True)
class Saved:
    """A tensor that forward hands to backward and that could wait elsewhere; times are of a run with no stall.

    ``ready_us``: its last use in forward is over, counted from the begin of forward; ``need_us``: its first in
    backward, from the begin of backward. ``out_us`` and ``back_us``: on the lane of each tier on its way, the nearest
    to the compute device first.
    """

    name: str
    op: str
    module: str
    nbytes: int
    ready_us: float
    need_us: float
    out_us: tuple[float, ...]
    back_us: tuple[float, ...]


@dataclass(frozen=True)
class OffloadActivations:
    """Hand a ticket to backward in place of each saved tensor that waits in a file, or in an accelerator's host memory.

    Rajbhandari et al. 2021, section 5.2.3 (there to the host's memory). Before::

        forward:   %a = aten.mm ...         return (..., %a)
        backward:  %a = input               %g = aten.mul %tangents_1, %a

    After::

        forward:   %a = aten.mm ...         %k = zero.offload %a             return (..., %k)
        backward:  %k = input               %p = zero.restore %k             %a = zero.restored %p
                   %g = aten.mul %tangents_1, %a

    From an accelerator to files it goes by way of the host, and backward has ``%b = zero.bring %p`` between the two.

    Without a budget as many tensors go as the lanes hide, the first ones of forward first, since they wait longest: all
    are written before forward ends, and read behind the compute of backward. Under a budget, and where values are
    ``named``, `choose_saved.py` has said which. `place_offloads.py` then places the transfers.

    Refuses: nothing. What stays: inputs of the call and its outputs, which are the caller's; what shares memory with
    another saved tensor, or becomes a gradient; symbolic sizes; what takes less time to move than to begin to.

    Args:
        busy_us: what else the lane of each tier has to do in each phase; () for nothing.
    """

    busy_us: tuple[float, ...] = ()
    away: frozenset[str] | None = None
    tiers: tuple[str, ...] = ("nvme",)
    activation_bytes: int | None = None
    named: bool = False
    name: str = "offload-activations"

    def run(self, forward: fx.Graph, backward: fx.Graph, num_outputs: int, ctx: Context) -> None:
        """Rewrite both graphs in place.

        Args:
            num_outputs: of the user, and of mutated inputs; what follows them is saved for backward.
        """
        if self.away is None or ctx.machine is None:
            return
        found, forward_us = candidates(forward, backward, num_outputs, ctx.machine, self.tiers, ctx.fused)
        if self.activation_bytes is None and not self.named:
            busy = self.busy_us or (0.0,) * len(self.tiers)
            chosen = hidden(found, forward_us, busy) if can_hide(ctx.machine, self.tiers) else []
            free = frozenset(s.name for s in chosen)
        else:
            said = {n.name for n in forward.nodes if facts.goes_away(n)}
            chosen, free = [s for s in found if s.name in said], self.away
        why = PLAN if self.named else HIDDEN if self.activation_bytes is None else BUDGET
        said_of = {s.name: _facts(s, s.name in free, why, self.tiers) for s in chosen}
        rewrite(forward, backward, num_outputs, said_of)


def candidates(
    forward: fx.Graph,
    backward: fx.Graph,
    num_outputs: int,
    machine: HardwareSpec,
    tiers: Sequence[str],
    fused: bool,
) -> tuple[list[Saved], float]:
    """What could wait behind ``tiers``, in the order in which forward is done with it; and the time of forward."""
    (output,) = forward.find_nodes(op="output")
    roots = storages(n for n in forward.nodes if n.op != "output")
    holders: dict[fx.Node, int] = {}
    for n in output.args[0]:
        for r in roots.get(n, ()):
            holders[r] = holders.get(r, 0) + 1
    cost = CostModel(machine)
    last = last_uses(forward, roots)
    done, begun = _clock(forward, cost, fused), _clock(backward, cost, fused, begin=True)
    inputs = {str(n.target): n for n in backward.find_nodes(op="placeholder")}
    leaving = _leaving(backward)
    found = []
    for n in output.args[0][num_outputs:]:
        if not isinstance(n, fx.Node) or n.op != "call_function" or not may_move(n, machine, tiers):
            continue
        (root, *others) = roots[n]
        entry = inputs.get(n.name)
        if (
            others
            or root.op != "call_function"
            or holders[root] != 1
            or entry is None
            or entry in leaving
            or not entry.users
        ):
            continue
        if facts.bytes_of(facts.value(root)) != (nbytes := facts.bytes_of(facts.value(n))):
            continue  # a part of something larger, which would stay for nobody
        need = min(begun[u] for u in entry.users if u.op != "output")
        back, out = zip(*([link.us(nbytes) for link in machine.links(tier)] for tier in tiers), strict=True)
        found.append(
            Saved(
                n.name, dump.target_text(n), facts.module_path(n), nbytes, done[last[root]], need, out, back
            )
        )
    return sorted(found, key=lambda s: (s.ready_us, s.name)), max(done.values(), default=0.0)


def may_move(node: fx.Node, machine: HardwareSpec, tiers: Sequence[str]) -> bool:
    """Whether a value is a tensor of known size, of a block at least, that takes longer to move than to begin to."""
    val = facts.value(node)
    if not isinstance(val, torch.Tensor) or facts.symbols_of(val):
        return False
    least = max(link.latency_us * link.bytes_per_us for tier in tiers for link in machine.links(tier))
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(val)
    return dense and facts.bytes_of(val) >= max(least, BLOCK_BYTES)


def move_us(node: fx.Node, machine: HardwareSpec, tiers: Sequence[str]) -> float:
    """Time of all transfers of a value, out and back."""
    nbytes = facts.bytes_of(facts.value(node))
    return float(sum(link.us(nbytes) for tier in tiers for link in machine.links(tier)))


def can_hide(machine: HardwareSpec, tiers: Sequence[str]) -> bool:
    """Whether tensors move while the device computes, and none of it slows another down."""
    out = {"compute", *("host-device" if tier == "host" else "nvme-write" for tier in tiers)}
    back = {"compute", *("host-device" if tier == "host" else "nvme-read" for tier in tiers)}
    return all(len(lanes.intersection(group)) < 2 for group in machine.shared for lanes in (out, back))


def hidden(found: Sequence[Saved], forward_us: float, busy_us: Sequence[float]) -> list[Saved]:
    """As many as the lanes hide: written before forward ends, read after backward begins, and in time.

    The first are taken first: they wait longest.

    Args:
        busy_us: what else each lane has to do in each phase.
    """
    taken: list[Saved] = []
    ends = list(busy_us)
    for s in found:
        there, now = s.ready_us, []
        for end, us in zip(ends, s.out_us, strict=True):
            there = max(end, there) + us
            now.append(there)
        if there <= forward_us and _in_time([*taken, s], busy_us):
            taken.append(s)
            ends = now
    return taken


def latest_starts(needs: Sequence[tuple[float, float]]) -> list[float]:
    """For reads that are needed in this order, each with its time, when each starts at the latest, on one lane."""
    starts: list[float] = []
    after = float("inf")
    for need_us, read_us in reversed(needs):
        after = min(need_us, after) - read_us
        starts.append(after)
    return starts[::-1]


def _in_time(taken: Sequence[Saved], busy_us: Sequence[float]) -> bool:
    order = sorted(taken, key=lambda s: s.need_us)
    needs = [s.need_us for s in order]
    for lane, busy in enumerate(busy_us):
        needs = latest_starts([(need, s.back_us[lane]) for need, s in zip(needs, order, strict=True)])
        if needs[0] < busy:
            return False
    return True


def _facts(saved: Saved, free: bool, why: str, tiers: tuple[str, ...]) -> facts.Away:
    us = 0.0 if free else sum(saved.out_us) + sum(saved.back_us)
    return facts.Away(saved.name, saved.op, saved.module, tiers, why, saved.nbytes, us)


def rewrite(
    forward: fx.Graph, backward: fx.Graph, num_outputs: int, chosen: Mapping[str, facts.Away]
) -> None:
    """Hand a ticket to backward in place of each of ``chosen``, by name."""
    (output,) = forward.find_nodes(op="output")
    returned = list(output.args[0])
    roots = storages(n for n in forward.nodes if n.op != "output")
    last = last_uses(forward, roots)
    inputs = {str(n.target): n for n in backward.find_nodes(op="placeholder")}
    where = 0
    for k, n in enumerate(returned):
        if k < num_outputs or not isinstance(n, fx.Node) or n.name not in chosen:
            continue
        val = facts.value(n)
        (root,) = roots[n]
        with forward.inserting_after(last[root]):
            ticket = forward.call_function(ops.offload, (n, n.name, where))
        facts.set_value(ticket, facts.fake_empty(forward, (1,), torch.int64, torch.device("cpu")))
        facts.set_away(ticket, chosen[n.name])
        returned[k] = ticket
        old = inputs[n.name]
        with backward.inserting_before(old):
            new = backward.placeholder(f"ticket_{n.name}")
        facts.set_value(new, facts.fake_empty(backward, (1,), torch.int64, torch.device("cpu")))
        with backward.inserting_before(min(old.users)):
            size, stride = list(map(int, val.shape)), list(map(int, val.stride()))
            start = backward.call_function(
                ops.restore, (new, n.name, where, size, stride, val.dtype, val.device)
            )
            staged = chosen[n.name].staged
            there = backward.call_function(ops.bring, (start,)) if staged else start
            back = backward.call_function(ops.restored, (there,))
        for made in (start, there, back):
            facts.set_value(made, facts.value(old))
        if staged:  # until it is brought on it takes nothing of the device's memory
            facts.set_value(start, facts.fake_empty(backward, (0,), val.dtype, torch.device("cpu")))
        facts.set_away(start, chosen[n.name])
        old.replace_all_uses_with(back)
        backward.erase_node(old)
        where += block_aligned(facts.bytes_of(val))
    output.args = (tuple(returned),)
    output.meta.pop("val", None)


def offloaded(backward: fx.Graph) -> list[facts.Away]:
    """What a backward graph has brought back, in the order of forward."""
    found = list(backward.find_nodes(op="call_function", target=ops.restore))
    return [facts.away(n) for n in sorted(found, key=lambda n: n.args[2])]


def last_uses(graph: fx.Graph, roots: Mapping[fx.Node, frozenset[fx.Node]]) -> dict[fx.Node, fx.Node]:
    """The last node that reads each storage, or makes it."""
    last: dict[fx.Node, fx.Node] = {}
    for n in graph.nodes:
        if n.op != "output":
            for used in (n, *n.all_input_nodes):
                for r in roots[used]:
                    last[r] = n
    return last


def _clock(graph: fx.Graph, cost: CostModel, fused: bool, begin: bool = False) -> dict[fx.Node, float]:
    """When each node ends (or begins), by the times of operators alone."""
    known = hints(graph)
    now, out = 0.0, {}
    for n in graph.nodes:
        if begin:
            out[n] = now
        now += node_us(cost, n, fused, known)
        if not begin:
            out[n] = now
    return out


def node_us(cost: CostModel, node: fx.Node, fused: bool, known: Mapping[object, int]) -> float:
    """Time of an operator in a segment; 0 for what computes nothing."""
    if not facts.is_compute(node) or node.target in (ops.unshard, ops.reduce_grad):
        return 0.0
    return at_hints(cost.vector_us(node) if fused and not cost.heavy(node) else cost.node_us(node), known)


def _leaving(backward: fx.Graph) -> set[fx.Node]:
    """What is somebody else's when backward is over: what it returns, and gradients that are under way. A gather (of
    parts) gives new memory, and has read its input when it has been waited for."""
    (output,) = backward.find_nodes(op="output")
    roots = storages(n for n in backward.nodes if n.op != "output")
    sent = [
        n for n in backward.nodes if n.target is ops.reduce_grad or (facts.sends(n) and n.target != _GATHER)
    ]
    return {r for node in (output, *sent) for n in node.all_input_nodes for r in roots[n]}
