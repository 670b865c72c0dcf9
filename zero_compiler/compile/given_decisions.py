"""The decisions of a plan file, as the compilation of a frame holds to them.

A frame whose graph is the one that the plan was made for is compiled as the plan says, and nothing is searched for.
One of other sizes (a shorter batch), or with other operators (another ``compute``), takes all from the plan that ranks
agree on: tiles of weights, buckets, distances, what is kept. What forward saves is chosen anew there.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from .. import passes
from ..config import Config
from ..errors import ConfigError, RankMismatchError
from ..ir import facts
from ..ir.decisions import TRAINING, FrameDecisions, SavedValues, dtype_name
from ..ir.facts import ParamRef
from ..ir.plan_file import PlanFile, load
from ..ir.program import Program
from ..json_fields import shown
from ..passes.base import NamedValues, ParamPlan
from ..ranks.failing import mark_known
from ..report.decisions import made_for, part_prefixes
from ..sharded.sharded_model import ShardedModel
from .found_decisions import FrameIdentity, gathered_units, tiled
from .loader import Loader
from .plan_choice import PlanChoice

log = logging.getLogger("zero_compiler")
_AGREED = "plan"  # under which is noted which plan a model is compiled with
_NO_PLAN = "no plan"


def given_decisions(
    config: Config, loader: Loader, sharded_models: Sequence[ShardedModel], relatives: Sequence[ShardedModel]
) -> GivenDecisions | None:
    """What a plan file says of a model, which all ranks hold to; None where none is given.

    Raises:
        ConfigError: the file is no plan, or one of another model.
        RankMismatchError: another rank holds to another one.
    """
    if not sharded_models:
        return None  # a frame between those that read parameters: nothing is decided of it
    first = sharded_models[0]
    plan = None if config.plan is None else _loaded(config.plan, first.agreed.plan)
    _agree(plan, loader, first)
    first.agreed.plan = plan
    if plan is None:
        return None
    given = GivenDecisions(plan, relatives)
    given.check(config)
    given.hold_gathers()
    return given


def _loaded(path: str, known: PlanFile | None) -> PlanFile:
    """A plan file; one that was read before, and is gone since, as it was."""
    if known is not None and known.path == path and not os.path.exists(path):
        return known
    return load(path)


def _agree(plan: PlanFile | None, loader: Loader, first: ShardedModel) -> None:
    """All ranks hold to the same decisions from the first compilation on. Those without a plan say so and go on; who
    has one waits to hear what all of them have."""
    mine = _NO_PLAN if plan is None else f"{plan.decisions.digest} of {plan.path!r}"
    before = first.agreed.decided.get(_AGREED)
    if before is not None and _digest(before) == _digest(mine):
        return
    if before is not None:
        raise ConfigError(
            f"this model was compiled with {_told(before)} before, and now with {_told(mine)}; all of a model is "
            "compiled with one: shard a new one to compile it with another"
        )
    texts = loader.tell_plan(first, mine, plan is not None)
    for rank, theirs in enumerate(texts):
        if _digest(theirs) != _digest(texts[0]):  # the same two on every rank that has a plan
            name_of = first.group.everyone.name_of
            error = RankMismatchError(
                f"ranks disagree about the plan: {name_of(rank)} compiles with {_told(theirs)}, {name_of(0)} with "
                f"{_told(texts[0])}; give every rank the same file"
            )
            # Who has none has not waited, and does not know.
            raise error if _NO_PLAN in texts else mark_known(error)
    first.agreed.decided[_AGREED] = mine


def _digest(text: str) -> str:
    return text if text == _NO_PLAN else text.partition(" ")[0]


def _told(text: str) -> str:
    return _NO_PLAN if text == _NO_PLAN else f"the plan with decisions {text}"


class GivenDecisions:
    """A plan file beside the sharded models that it is for.

    ``frame``: what it says of the frame that is compiled, once :meth:`look_up` has found that; ``exact``: of the very
    graph.
    """

    def __init__(self, plan: PlanFile, relatives: Sequence[ShardedModel]) -> None:
        self.plan = plan
        self.frame: FrameDecisions | None = None
        self.exact = False
        self._compute: str | None = None  # of the model that the plan is for, once that was checked
        # Weak: Dynamo keeps what compiled a frame for as long as the code of the model's class lives.
        self._refs = [weakref.ref(model) for model in relatives]
        self._prefixes = part_prefixes(relatives)

    @property
    def _models(self) -> list[ShardedModel]:
        return [model for ref in self._refs if (model := ref()) is not None]

    def name_of(self, ref: ParamRef) -> str:
        """A weight as the plan names it."""
        return f"{self._prefixes[ref.owner]}{ref.name}"

    def unit_name(self, unit: str) -> str:
        """A unit as the plan names it."""
        owner, _, name = unit.partition(":")
        return f"{self._prefixes[owner]}{name}"

    # What the plan is bound to -----------------------------------------------------------------------------------

    def check(self, config: Config) -> None:
        """The plan was made for such a model, on as many ranks, with its tensors where they rest.

        Raises:
            ConfigError: naming the first that differs.
        """
        self._check_ranks(config)
        every = [(m, info) for m in self._models for info in m.params.values()]
        names = {self.name_of(ParamRef(m.key, info.name)): (m, info) for m, info in every}
        self.plan.check_weights(
            {name: (info.shape, dtype_name(info.layout.dtype)) for name, (_, info) in names.items()}
        )
        for name, (model, info) in names.items():
            for kind, tier in self.plan.weight(name).rests.items():
                found = model.tiers.tier(kind, info.name)
                if tier != found:
                    raise self.plan.refuse(
                        f"{kind} of {name!r} rest on {tier!r} there, and on {found!r} here; where tensors rest belongs "
                        "to zero.shard: give it this plan too, zero.shard(model, plan=...)"
                    )

    def _check_ranks(self, config: Config) -> None:
        was, now = self.plan.decisions.made_for, made_for(self._models, config)
        self._compute = now.compute
        for what in ("world", "replicas", "tensor_ranks"):
            one, other = getattr(was, what), getattr(now, what)
            if one != other:
                words = {
                    "world": "ranks that shard",
                    "replicas": "replicas",
                    "tensor_ranks": "tensor-parallel ranks",
                }
                raise self.plan.refuse(
                    f"it was made for {one:,} {words[what]}, and there are {other:,}; make a plan for as many"
                )
        for name, value in now.config.items():
            if (
                was.config.get(name) != value
            ):  # what a file of an earlier version lacks was not asked for then
                raise self.plan.refuse(
                    f"it was made with {name}={was.config.get(name)!r}, and the model has {name}={value!r}; give the "
                    "same, or make another plan"
                )
        for frame in self.plan.decisions.frames:
            if config.bucket_bytes not in (None, frame.bucket_bytes):
                raise self.plan.refuse(
                    f"it has bucket_bytes={frame.bucket_bytes:,} for the {frame.title}, and the option "
                    f"bucket_bytes={config.bucket_bytes:,} was given as well; give it once"
                )

    # What holds for all of the model -----------------------------------------------------------------------------

    def hold_gathers(self) -> None:
        """Weights are gathered in such tiles, and travel so."""
        for model in self._models:
            for name in model.params:
                row = self.plan.weight(self.name_of(ParamRef(model.key, name)))
                model.agreed.tile_bytes[name] = row.tile_bytes
                model.agreed.quantised[name] = row.quantised

    def check_gathered(self, params: Mapping[ParamRef, ParamPlan]) -> None:
        """What is decided of how these weights are gathered can be.

        Raises:
            ConfigError: naming the weight of which it cannot.
        """
        for ref, plan in params.items():
            name = self.name_of(ref)
            row = self.plan.weight(name)
            if row.tile_bytes is not None and row.tile_bytes < plan.gather_bytes and not plan.tile_rows:
                raise self.plan.refuse(
                    f"weight {name!r} has tile_bytes={row.tile_bytes:,}, and it is not gathered in tiles: it has one "
                    "dimension, or lies whole on this rank, or has fewer rows than tiles of whole blocks; write null"
                )
            if row.quantised and plan.wire is None:
                raise self.plan.refuse(
                    f"weight {name!r} has quantised=true, and it does not travel in 8 bits: gather_dtype does not ask "
                    "for that, or nothing of it is sent (one rank, or ranks that share memory), or it has one "
                    "dimension, or is so small that packing would take longer than the link of this machine saves; "
                    "write false"
                )
            if not row.kept:
                continue
            whole = f"stays gathered at stage {plan.stage}" if plan.sharded else "is on every rank whole"
            why = (
                f"{whole}, whatever is written there"
                if not plan.sharded or plan.stage != 3
                else "is gathered in tiles, which are gathered anew for every use"
                if plan.tile_rows
                else "rests on another tier, from where it is gathered anew for every use"
                if plan.path
                else ""
            )
            if why:
                raise self.plan.refuse(f"weight {name!r} has kept=true, and {why}; write false")

    def hold_kept(self, params: Mapping[ParamRef, ParamPlan], kind: str) -> None:
        """These weights stay gathered, or do not: from when what is trained of the plan is compiled, as it was when the
        plan was made."""
        if kind != TRAINING and any(f.kind == TRAINING for f in self.plan.decisions.frames):
            return
        models = {model.key: model for model in self._models}
        for ref, plan in params.items():
            if plan.sharded and plan.stage == 3:
                models[ref.owner].agreed.kept[ref.name] = self.plan.weight(self.name_of(ref)).kept

    # What holds for a frame ---------------------------------------------------------------------------------------

    def look_up(self, identity: FrameIdentity) -> None:
        """Find what the plan says of a frame, which may be nothing.

        Raises:
            ConfigError: it has nothing of what is trained; or what was edited in it is about another graph.
        """
        # Of one that is called otherwise (`model.compile()`) the function has another name.
        known = self.plan.decisions.frames
        rows = [f for f in known if (f.reads, f.kind) == (identity.reads, identity.kind)]
        alike = [(f.graph == identity.graph, f.function == identity.function) for f in rows]
        self.frame = rows[max(range(len(rows)), key=alike.__getitem__)] if rows else None
        self.exact = self.frame is not None and self.frame.graph == identity.graph
        if self.frame is None and identity.kind == TRAINING:
            has = [f.title for f in known if f.kind == TRAINING]
            raise self.plan.refuse(
                f"it was made for another forward: it has no training of {identity.function}, which reads "
                f"{identity.reads}; it has {'; '.join(has) or 'none'}; make a plan of this model as it is compiled"
            )
        if self.frame is not None and not self.exact:
            self._say_other(self.frame, identity.inputs)

    def _say_other(self, frame: FrameDecisions, inputs: Sequence[str]) -> None:
        made = self.plan.decisions.made_for
        why = (
            f"inputs are {', '.join(inputs)} here"
            if tuple(inputs) != frame.inputs
            else f"its operators differ: the plan was made with torch {made.torch} and compute={made.compute!r}, and "
            f"this is torch {torch.__version__} and compute={self._compute!r}"
        )
        if frame.values.edited:
            raise self.plan.refuse(
                f"values of the {frame.title}, were edited, and they name those of another graph: {why}; compile the "
                "graph that the plan was made for, or leave values as the compiler wrote them"
            )
        log.warning(
            "plan %r: the %s, has another graph here (%s): what forward saves, and tiles of tokens, are chosen anew; "
            "all else is as the plan says",
            self.plan.path,
            frame.title,
            why,
        )

    @property
    def values(self) -> SavedValues:
        """What forward hands to backward, of the very graph."""
        assert self.frame is not None
        return self.frame.values

    def are_these(self, found: SavedValues, parts_first: bool) -> bool:
        """Whether values that a partition has are those of the plan.

        Args:
            parts_first: nothing waits elsewhere yet.
        """
        wanted = self.values
        if parts_first:
            return {*wanted.saved, *wanted.away} == set(found.saved) and set(wanted.made_again) == set(
                found.made_again
            )
        return wanted.digest == found.digest

    def named(self, found: SavedValues, tiers: Sequence[str], parts_first: bool) -> NamedValues:
        """The values of the plan, for passes.

        Args:
            found: what a partition has without them.

        Raises:
            ConfigError: they cannot be given here.
        """
        wanted = self.values
        if parts_first:
            raise self.plan.refuse(
                "values of forward were edited, and with partition_activations=True they are not held to, since "
                "tensor-parallel ranks choose their parts together; leave them as the compiler wrote them"
            )
        if wanted.away and not tiers:
            raise self.plan.refuse(
                f"value {min(wanted.away)!r} is to be away, and there is no tier for it: give zero.shard "
                'offload_activations="host" or "nvme"'
            )
        saved, again, away = (frozenset(names) for names in (wanted.saved, wanted.made_again, wanted.away))
        there = (saved & found.saved.keys()) | (again & found.made_again.keys()) | (away & found.away.keys())
        return NamedValues(saved, again, away, (saved | again | away) - there)

    def check_values(self, found: SavedValues) -> None:
        """What a partition has that was given the values of the plan: it has them so.

        Raises:
            ConfigError: naming one that is otherwise.
        """
        wanted = self.values
        for names, have, what in (
            (wanted.made_again, {**found.saved, **found.away}, "made again, and is saved"),
            (wanted.saved, {**found.made_again, **found.away}, "saved, and is not"),
            (wanted.away, {**found.made_again, **found.saved}, "away, and is not"),
        ):
            for name in sorted(names.keys() & have.keys()):
                raise self.plan.refuse(
                    f"value {name!r} is to be {what}, as far as backward has a use for it: no partition of this graph "
                    "has it so; leave it where the compiler had it"
                )

    def said(self, what: str) -> str | None:
        """What the plan says of something that ranks would agree on in the search for a plan."""
        frame = self.frame
        if frame is None:
            return None
        answers: dict[str, object] = {
            "order": "last",
            "buckets": frame.bucket_bytes,
            "buckets-inference": frame.bucket_bytes,
            "recompute": frame.recompute,
            "mlp-memory": frame.tile_mlp,
            "mlp-activations": frame.tile_mlp,
            "heads": frame.tile_heads,
            "reduces-each": frame.reduce_each_micro_batch,
        }
        return str(answers[what]) if what in answers else None

    def distances(self, phase: str, units: Sequence[str]) -> dict[str, int] | None:
        """How far ahead gathers of units start, by unit; None: the plan does not say."""
        if self.frame is None:
            return None
        table = self.frame.distances[phase]
        return {unit: table.get(self.unit_name(unit), 1) for unit in units}

    def check_distances(self, program: Program, choice: PlanChoice) -> None:
        """Each distance of the plan is of a unit that the phase gathers, and none is more than there are units. A unit
        that another edit has made one of others, or that is kept, may be left in at 1.

        Raises:
            ConfigError: naming the one that is not.
        """
        if self.frame is None:
            return
        phase, units = program.phase, [self.unit_name(unit) for unit in gathered_units(program, choice)]
        for name, distance in self.frame.distances[phase].items():
            if name not in units and distance == 1:
                continue
            if name not in units:
                raise self.plan.refuse(
                    f"distances.{phase} names {shown(name)}, which that phase does not gather; it gathers "
                    f"{', '.join(map(repr, units)) or 'nothing'}"
                )
            if distance > len(units):
                raise self.plan.refuse(
                    f"distances.{phase} has {distance:,} for {name!r}, and that phase gathers {len(units)} units; "
                    f"give a whole number from 1 to {len(units)}"
                )

    def set_tiles(self, graphs: Mapping[str, fx.GraphModule]) -> None:
        """Have what is done in tiles done in as many as the plan says.

        Raises:
            ConfigError: it names what is not done in tiles, or more tiles than there are rows for.
        """
        assert self.frame is not None
        for phase, gm in graphs.items():
            table, nodes = self.frame.tiles[phase], tiled(gm.graph)
            for name, count in table.items():
                if name not in nodes:
                    raise self.plan.refuse(
                        f"tiles.{phase} names {shown(name)}, which is not done in tiles; what is: "
                        f"{', '.join(map(repr, nodes)) or 'nothing'}"
                    )
                total = max(1, facts.hint(facts.tiling(nodes[name]).total))
                if count > total or -(-total // -(-total // count)) != count:
                    raise self.plan.refuse(
                        f"tiles.{phase} has {count:,} for {name!r}, which has {total:,} rows: some tiles would be "
                        f"empty; give a number that divides {total:,}"
                    )
            passes.set_tiles(
                gm.graph, [table.get(n, t) for n, t in zip(nodes, passes.tiles_in(gm.graph), strict=True)]
            )
