"""Joint graph: what forward saves for backward fits a number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zero_compiler.cost.cost import CostModel
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.errors import MemoryBudgetError, PassRefused
from zero_compiler.ir import facts

from .activations import Activations, Choice
from .base import Context, NamedValues
from .offload_activations import may_move, move_us
from .tag_recompute import REGION

_CUTS = 24  # minimum cuts at most, each at another price
_TRIALS = 64  # single changes tried at most where nothing else fits
_SINGLE = 8  # and where there is room for some


Cuts = dict[float, frozenset[str]]  # what a minimum cut saves, by price of a byte


@dataclass(frozen=True)
class ChooseSaved:
    """Say of every value that backward wants whether it is saved or made again: within the budget, at least time.

    Before::

        %a = aten.mm %x, %w
        %b = aten.gelu %a
        %g = aten.mm %tangents_1, %b

    After, where the bytes of ``%a`` and ``%b`` are not to be had: both tagged ``MUST_RECOMPUTE``, ``%x`` tagged
    ``MUST_SAVE``.

    Bytes get a price. At each price the best choice is a minimum cut (see :class:`.activations.Activations`); the
    prices that matter are found one from the other, as slopes between choices. The fastest choice that fits is taken,
    and goes as far towards the next faster one as its room allows, layer by layer. Regions of the user's own
    ``torch.utils.checkpoint`` stay as they are. Random operators are never run twice, nor is a lookup in a table. A
    weight that backward gathers serves what is made again and the gradient alike; none is gathered for the former
    alone unless it is small.

    Where values are ``named``, nothing is chosen: these are tagged so.

    Refuses: a budget smaller than the least that backward has to hold; a name of nothing in forward, or of what can be
    neither saved, nor made again, nor wait elsewhere, as it is to be.
    """

    activation_bytes: int | None = None
    bucket_bytes: int = 0
    recompute: bool = False
    away: frozenset[str] | None = None
    tiers: tuple[str, ...] = ("nvme",)
    named: NamedValues | None = None
    # What was found for a copy of the same joint graph; grows, and depends on nothing else.
    min_cuts: Cuts = field(default_factory=dict, compare=False)
    name: str = "choose-saved"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        if (self.activation_bytes is None and self.named is None) or ctx.machine is None:
            return
        acts = Activations(
            graph,
            ctx.forward_outputs,
            CostModel(ctx.machine),
            fused=ctx.fused,
            small_bytes=self.bucket_bytes,
            recompute=self.recompute,
            known=self.min_cuts,
            away_us=self._away_us(ctx.machine),
        )
        if self.named is not None:
            tag_named(acts, self.named)
        else:
            assert self.activation_bytes is not None
            tag(acts, choose(acts, self.activation_bytes))

    def _away_us(self, machine: HardwareSpec) -> Callable[[fx.Node], float | None]:
        """Time that it costs to keep a value on another tier: nothing where the lane hides it."""

        def us(node: fx.Node) -> float | None:
            if self.away is None or not may_move(node, machine, self.tiers):
                return None
            return 0.0 if node.name in self.away else move_us(node, machine, self.tiers)

        return us


def choose(acts: Activations, budget_bytes: int) -> Choice:
    """The fastest choice found that fits.

    Raises:
        MemoryBudgetError: none does.
    """

    def worth_a_look(fast: Choice, small: Choice) -> bool:
        return fast.peak_bytes > budget_bytes and small.saved_bytes <= budget_bytes

    found = _frontier(acts, worth_a_look)
    fits = [c for c in found if c.peak_bytes <= budget_bytes]
    if not fits and acts.away_us:
        found = _all(acts)
        fits = [c for c in found if c.peak_bytes <= budget_bytes]
    if not fits:
        least = _smallest(acts)
        if least.peak_bytes > budget_bytes:
            error = MemoryBudgetError(
                f"activation_budget_bytes={budget_bytes:,} is {least.peak_bytes - budget_bytes:,} bytes too small: "
                f"backward must hold {least.peak_bytes:,} bytes of activations at least; give {least.peak_bytes:,}, or "
                "a smaller batch"
            )
            error.least_bytes = least.peak_bytes
            raise error
        fits = [least]
    best = min(fits, key=lambda c: (c.us, c.peak_bytes))
    faster = [c for c in found if c.us < best.us]
    if not faster:
        return best
    return _toward(acts, best, max(faster, key=lambda c: c.us), budget_bytes)


def _frontier(acts: Activations, worth_a_look: Callable[[Choice, Choice], bool]) -> list[Choice]:
    """Choices that are best at some price of a byte, from the fastest to the smallest.

    Between two of them lie others, as long as the two are ``worth_a_look``.
    """
    fast, small = acts.at(0.0), acts.at(2.0 * sum(acts.us.values()) + 1.0)
    found, todo = [fast, small], [(fast, small)]
    for _ in range(_CUTS):
        if not todo:
            break
        a, b = todo.pop(0)
        if b.saved_bytes >= a.saved_bytes or b.us <= a.us or not worth_a_look(a, b):
            continue
        c = acts.at((b.us - a.us) / (a.saved_bytes - b.saved_bytes))
        if (c.again, c.away) not in (
            (a.again, a.away),
            (b.again, b.away),
        ) and b.saved_bytes < c.saved_bytes < a.saved_bytes:
            found.append(c)
            todo += [(a, c), (c, b)]
    return sorted(found, key=lambda c: (-c.saved_bytes, c.us))


def _all(acts: Activations) -> list[Choice]:
    """The whole frontier, and each choice of it with all that can be in files: where these are slow, a minimum cut
    makes again what is small, and knows nothing of the peak while it is made."""
    found = _frontier(acts, lambda fast, small: True)
    if acts.away_us:
        found += [acts.choice(c.again, acts.away_us) for c in found]
    return sorted(found, key=lambda c: (-c.saved_bytes, c.us))


def _smallest(acts: Activations) -> Choice:
    """The choice of the lowest peak that was found.

    To save less than it does is to make longer chains again, which pays as long as these are not the peak.
    """
    found = _all(acts)
    best = min(found, key=lambda c: c.peak_bytes)
    less = [c for c in found if c.saved_bytes < best.saved_bytes][:1]
    for goal, part in [(c, p) for c in less for p in _parts(acts, best, c)][:_TRIALS]:
        tried = _moved(acts, best, goal, part)
        if tried.peak_bytes < best.peak_bytes:
            best = tried
    return best


def _toward(acts: Activations, start: Choice, goal: Choice, budget_bytes: int) -> Choice:
    """Go from ``start``, which fits, towards ``goal``, which does not, by as many parts of the difference as fit.

    Between two neighbours of the frontier lie the choices that save a tensor in some layers and not in others.
    """
    parts = _parts(acts, start, goal)
    best, fit, over = start, 0, len(parts)
    while over - fit > 1:
        some = (fit + over) // 2
        tried = _moved(acts, start, goal, frozenset().union(*parts[:some]))
        if tried.peak_bytes <= budget_bytes:
            best, fit = tried, some
        else:
            over = some
    for part in parts[fit + 1 :][:_SINGLE]:
        tried = _moved(acts, best, goal, part)
        if tried.peak_bytes <= budget_bytes and tried.us < best.us:
            best = tried
    return best


def _moved(acts: Activations, start: Choice, goal: Choice, part: frozenset[fx.Node]) -> Choice:
    """``start``, and for the values in ``part`` as ``goal`` has it."""
    again, away = ((a - part) | (b & part) for a, b in ((start.again, goal.again), (start.away, goal.away)))
    return acts.choice(again, away)


def _parts(acts: Activations, a: Choice, b: Choice) -> list[frozenset[fx.Node]]:
    """Connected parts of the values that two choices treat differently, in the order of the graph."""
    nodes = (a.again ^ b.again) | (a.away ^ b.away)
    out: list[frozenset[fx.Node]] = []
    seen: set[fx.Node] = set()
    for first in sorted(nodes, key=acts.place.__getitem__):
        if first in seen:
            continue
        part, todo = set(), [first]
        while todo:
            n = todo.pop()
            if n not in part:
                part.add(n)
                todo += [m for m in (*n.all_input_nodes, *n.users) if m in nodes]
        seen |= part
        out.append(frozenset(part))
    return out


def tag(acts: Activations, choice: Choice) -> None:
    """Tell the partitioner."""
    for n in acts.forward:
        if n.op != "call_function":
            continue
        if n in choice.again or n in acts.forced:
            facts.set_reason(n, "a region of torch.utils.checkpoint" if n in acts.forced else "the budget")
            facts.tag_recompute(n, CheckpointPolicy.MUST_RECOMPUTE, REGION)
        elif n in choice.saved or n in choice.away:
            facts.tag_recompute(n, CheckpointPolicy.MUST_SAVE, 0)
        if n in choice.away:
            facts.send_away(n)


def tag_named(acts: Activations, named: NamedValues) -> None:
    """Tell the partitioner what is given.

    Raises:
        PassRefused: a name is of nothing in forward, or of what cannot be as it is to be.
    """
    by_name = {n.name: n for n in acts.forward if n.op == "call_function"}
    for name in sorted(named.moved):
        n = by_name.get(name)
        if n is None:
            raise PassRefused(f"there is no value {name!r} in forward")
        if name in named.again and _is_held(acts, n):
            raise PassRefused(
                f"value {name!r} cannot be made again: it draws random numbers, writes, or is sent between ranks, or "
                "it reads a weight that backward does not gather"
            )
        if name not in named.again and (n in acts.forced or not acts.savable(n)):
            why = (
                "is made again by what it is"
                if n in acts.forced
                else "is a view or a list, without bytes of its own"
            )
            raise PassRefused(f"value {name!r} cannot be saved: it {why}")
        if name in named.away and n not in acts.away_us:
            raise PassRefused(
                f"value {name!r} cannot wait elsewhere: no tier was given for activations, the caller holds it, or it "
                "is so small that a transfer takes longer to begin than to move it"
            )
    for n in by_name.values():
        if n.name in named.again and n not in acts.forced:
            facts.set_reason(n, "the plan file")
            facts.tag_recompute(n, CheckpointPolicy.MUST_RECOMPUTE, REGION)
        elif n.name in named.saved or n.name in named.away:
            facts.tag_recompute(n, CheckpointPolicy.MUST_SAVE, 0)
        if n.name in named.away:
            facts.send_away(n)


def _is_held(acts: Activations, node: fx.Node) -> bool:
    """Whether a value is not made again, nor what it is one of several results of, or a view of."""
    behind = (i for i in node.all_input_nodes if i in acts.place and i.op == "call_function")
    return node in acts.held or any(_is_held(acts, i) for i in behind if not acts.savable(i))
