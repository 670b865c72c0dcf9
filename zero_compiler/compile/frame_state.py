"""A frame while it is compiled: its weights, what has been decided for it, and the context that passes get."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from .. import inductor_options, passes
from ..config import PLACEMENT_FIELDS, Config
from ..cost import hardware
from ..cost.cost import bucket_bytes, launch_bytes, smaller_buckets
from ..cost.hardware import HardwareSpec
from ..emit.emit import Emitted
from ..emit.transfer_allocation import kept_bytes
from ..errors import ConfigError
from ..ir import ops
from ..ir.decisions import SavedValues
from ..ir.facts import ParamRef
from ..ir.program import Program
from ..ir.recorded_phase import RecordedPhase, given_bytes, recorded_phase
from ..memory.live import most_made
from ..passes import Context, ParamPlan, PassOptions, Trace
from ..plan import budget, cross_frame_memory, tiling
from ..plan.dynamic_shape_memory import Sized
from ..ranks.group import speaking
from ..report.decisions import part_prefixes
from ..report.frame import Frame
from ..report.memory import Memory
from ..runtime.recorded_segments import RECORDERS
from ..sharded.gather_wire import sum_wire_of, wire_of
from ..sharded.sharded_model import ShardedModel
from .capture import Captured, ShardInput
from .found_decisions import FrameIdentity, Partitioned, found_decisions, identity_of
from .given_decisions import GivenDecisions, given_decisions
from .loader import Loader
from .plan_choice import PlanChoice

_frames = itertools.count()


class FrameState:
    """What the stages of a frame's compilation share.

    Args:
        captured: the frame as it was captured.
        options: compile fields of :class:`~zero_compiler.Config`, as ``torch.compile(options=...)`` has them.
        loader: where its Programs go.
    """

    def __init__(self, captured: Captured, options: dict[str, object] | None, loader: Loader) -> None:
        self.loader = loader
        self.index = next(_frames)
        owners = {s.ref.owner: ops.owner_of(s.ref.owner) for s in captured.shards}
        # Weak: Dynamo keeps a frame, and what compiled it, for as long as the code of the model's class lives.
        self._owners = [(p.key, weakref.ref(p)) for p in speaking(owners.values())]
        self.config = self._config(options)
        # Units are those of the segments that will run, also where these are not made now.
        self._will_fuse = self.config.compute == "inductor"
        self._records_graphs = inductor_options.records_graphs(self.config.mode)
        if loader.compute is not None:  # in place of Inductor, whose options are for nothing then
            self.config = dataclasses.replace(self.config, compute=loader.compute, mode=None, inductor=None)
        loader.prepare(list(self.sharded_models.values()), self.relatives)
        self.given = given_decisions(self.config, loader, list(self.sharded_models.values()), self.relatives)
        self.reads: tuple[ParamRef, ...] = ()  # as forward reads weights, once its joint graph is known
        self.identity: FrameIdentity | None = None  # once its joint graph is known, or that of its inference
        self.partitioned = Partitioned(SavedValues(), {})
        # The file of a plan of this frame that another start may find, or has found.
        self.stored_at: Path | None = None
        self.captured = captured
        nbytes, why = self._bucket_bytes()
        self.tiers: tuple[str, ...] = (
            () if self.first is None else self.first.tiers.activation_path
        )  # as in Context
        # What the search for a plan has chosen so far. With a budget of activations backward may run costly operators
        # again from the start.
        self.choice = PlanChoice(
            nbytes,
            recompute=self.config.activation_budget_bytes is not None,
            away=frozenset() if self.tiers else None,
        )
        self.params = {s.ref: self._plan(s) for s in captured.shards}
        self.trace = Trace()
        # Of a plan that was given the report has the decisions, wherever its file lies.
        shown = self.config if self.config.plan is None else dataclasses.replace(self.config, plan=None)
        self.frame = Frame(self.index, shown, self.params, self.trace, code=captured.code)
        budgets = self.config.memory_budget_bytes, self.config.activation_budget_bytes
        if self.first is not None and any(b is not None for b in budgets):
            self.frame.sized = Sized()
        self.others = cross_frame_memory.frames_of(self.relatives)  # that were compiled before
        self.due = cross_frame_memory.due(self.others, captured.code)
        self.set_bucket_bytes(nbytes, why)
        self.planned: dict[str, Program] = {}  # within a memory budget, before any of them is compiled

    @property
    def reduces_each(self) -> bool:
        """Called where a library accumulates, whose gradients are reduced each time: a budget leaves room for those of
        earlier micro-batches, beside which the next ones are made."""
        return any(not p.sync and not p.defers for p in self.sharded_models.values())

    @property
    def accumulates(self) -> bool:
        """Called under zero.no_sync: a budget leaves room for full gradients that wait."""
        return any(sharded_model.defers for sharded_model in self.sharded_models.values())

    @property
    def sharded_models(self) -> dict[str, ShardedModel]:
        """The sharded models of this frame, by key; the first one's ranks are those that take part in its calls."""
        return {key: sharded_model for key, ref in self._owners if (sharded_model := ref()) is not None}

    @property
    def relatives(self) -> list[ShardedModel]:
        """These, and what else there is of the models that they are parts of: budgets are for all of it."""
        return cross_frame_memory.related(self.sharded_models.values())

    @property
    def first(self) -> Any:
        return next(iter(self.sharded_models.values()), None)

    def report(self) -> None:
        """The frame is compiled: from here on its model shows it."""
        if self.first is not None:
            if self.identity is not None:
                each = any(p.agreed.reduces_each for p in self.sharded_models.values())
                self.frame.decisions = found_decisions(
                    self.identity, self.choice, self.partitioned, self.frame, self.unit_name, each
                )
            self.first.frames.append(self.frame)
            self.first.scope.changes += 1

    def begin(self, graph: fx.Graph, kind: str) -> None:
        """Note which frame this is and how it reads weights, and take from a plan file what that says of it.

        Args:
            graph: as it was captured.

        Raises:
            ConfigError: the file is about other frames.
        """
        self.reads = passes.forward_reads(graph)
        if self.first is None:
            return
        prefixes = part_prefixes(self.relatives)
        weights = [f"{prefixes[s.ref.owner]}{s.ref.name}" for s in self.captured.shards]
        self.identity = identity_of(self.captured.code, weights, kind, graph)
        if self.given is not None:
            self._look_up(kind)

    def hold_to(self, stored: GivenDecisions) -> None:
        """Hold to the plan that an earlier start has found of this very graph; what all of the model's ranks agreed on
        then is agreed on already."""
        assert self.identity is not None
        self.given = stored
        self.plan_again()
        self._look_up(self.identity.kind)

    def _look_up(self, kind: str) -> None:
        """Take what the plan that is given says of this frame."""
        assert self.given is not None
        assert self.identity is not None
        self.given.look_up(self.identity)
        self.given.check_gathered(self.params)
        given = self.given.frame
        if given is None:
            return
        self.set_bucket_bytes(given.bucket_bytes, given.bucket_why)
        self.choice = dataclasses.replace(
            self.choice,
            recompute=given.recompute,
            tile_mlp=given.tile_mlp,
            mlp_bytes=given.mlp_tile_bytes,
            tile_heads=given.tile_heads,
        )
        if not self.given.exact:
            self.given.hold_kept(self.params, kind)
            self.plan_again()

    @property
    def is_given(self) -> bool:
        """Whether a plan file has decided all of this very graph: nothing is searched for."""
        return self.given is not None and self.given.exact

    def given_distances(self, phase: str) -> dict[str, int] | None:
        """How far ahead gathers start, by unit, where a plan file says so."""
        return None if self.given is None else self.given.distances(phase, list(self.choice.units.values()))

    def settled(self, key: str) -> str | None:
        """What a plan file, or an earlier compilation, has decided for all ranks; None: nothing."""
        given = None if self.given is None else self.given.said(key.partition("/")[0])
        return self.first.agreed.decided.get(key) if given is None else given

    def unit_name(self, unit: str) -> str:
        """A unit as plan files name it."""
        owner, _, name = unit.partition(":")
        return f"{part_prefixes(self.relatives)[owner]}{name}"

    @property
    def fused(self) -> bool:
        """Whether segments are compiled to fused regions."""
        return self.config.compute == "inductor"

    def _bucket_bytes(self) -> tuple[int, str]:
        """How large buckets are unless a budget asks for less, and why."""
        if self.config.bucket_bytes is not None:
            return self.config.bucket_bytes, "as bucket_bytes says"
        if self.first is None:
            return 0, "nothing is sharded"
        nbytes = bucket_bytes(self.machine, self.world, self.first.storage.transport.shared)
        if self.world == 1:
            return nbytes, "nothing moves between ranks"
        return nbytes, "eight times latency times bandwidth between ranks"

    def _join_bytes(self, bucket_bytes: int) -> int:
        """Within how many bytes repeated blocks share a unit. On several ranks none do, since what a unit gathers is in
        memory at once, and none under a budget of it. Nor where operators are not fused: the host starts each of them
        anyway."""
        if not self._will_fuse or self.world > 1 or self.config.memory_budget_bytes is not None:
            return 0
        return max(bucket_bytes, launch_bytes(self.machine))

    def smaller_buckets(self) -> list[int]:
        """Sizes that a memory budget may choose instead, falling."""
        if self.config.bucket_bytes is not None or self.first is None:
            return []
        return smaller_buckets(self.machine, self.world, self.first.storage.transport.shared)

    def set_bucket_bytes(self, nbytes: int, why: str) -> None:
        """Plan with buckets of so many bytes, and say why in the report."""
        self.choice = dataclasses.replace(self.choice, bucket_bytes=nbytes)
        self.frame.bucket_bytes = nbytes
        self.frame.bucket_why = why

    def _config(self, options: dict[str, object] | None) -> Config:
        if not self.sharded_models:
            given = Config.make(None, options or {})
            for name in options or {}:
                if name in PLACEMENT_FIELDS and not (name == "stage" and given.stage == 0):
                    raise ConfigError(
                        f"torch.compile(options={{{name!r}: ...}}): nothing in this model is sharded, and {name} is a "
                        "placement; call zero.shard(model, stage=...) before torch.compile"
                    )
            return given
        if len(self.relatives) > len(self.sharded_models):
            # A part that was taken out of the model counts until it is collected, on all ranks alike from here on.
            gc.collect()
        configs = [[p.config for p in some] for some in (self.sharded_models.values(), self.relatives)]
        return Config.of_parts(*configs).with_options(options)

    def _plan(self, shard: ShardInput) -> ParamPlan:
        sharded_model = self.sharded_models[shard.ref.owner]
        info = sharded_model.params[shard.ref.name]
        path, grad_path = (
            sharded_model.tiers.path("params", shard.ref.name),
            sharded_model.tiers.path("grads", shard.ref.name),
        )
        kept = self.choice.kept.get(shard.ref, sharded_model.agreed.kept.get(shard.ref.name, False))
        return ParamPlan(
            ref=shard.ref,
            shape=info.layout.shape,
            dtype=info.layout.dtype,
            gather_dtype=info.gather_dtype,
            reduce_dtype=info.reduce_dtype,
            sharded=info.layout.sharded,
            world=info.layout.world,
            stage=sharded_model.config.stage,
            kept=kept,
            second=sharded_model.storage.second_ranks if info.layout.sharded and not kept else 0,
            shared=sharded_model.storage.transport.shared,
            path=path,
            grad_path=grad_path[::-1],
            copies=sharded_model.group.copies,
            wire=wire_of(sharded_model, shard.ref.name),
            sum_wire=sum_wire_of(sharded_model, shard.ref.name),
            sum_hosts=sharded_model.storage.transport.between,
            tile_rows=tiling.tile_rows(
                info.layout,
                info.gather_dtype,
                bool(path or grad_path),
                self._tile_bytes(sharded_model, shard.ref),
            ),
            split=info.part is not None and not info.part.placement.is_replicate(),
        )

    def _tile_bytes(self, sharded_model: ShardedModel, ref: ParamRef) -> int | None:
        """What is gathered of a weight at a time: as the user says, else as is tried, or was made for a budget."""
        if self.config.tile_bytes is not None and self.given is None:
            return self.config.tile_bytes
        return self.choice.tile_bytes.get(ref, sharded_model.agreed.tile_bytes.get(ref.name))

    def dump_dir(self) -> str | None:
        """The folder for graphs and Programs, where the user asked for them."""
        base = os.environ.get("ZERO_DUMP")
        if not base or (self.first is not None and self.first.group.everyone.rank != 0):
            return None
        folder = os.path.join(base, f"frame{self.index}")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"ZERO_DUMP={base!r} is no folder for dumps ({error.strerror}); name one that can be written to"
            ) from error
        return folder

    def context(self, phase: str) -> Context:
        """The facts of the graph of a phase, or of the joint graph ("joint")."""
        back, choice = phase == "backward", self.choice
        gathered, reduced = (choice.backward_params, choice.reduced) if back else (None, None)
        second = frozenset[ParamRef]() if phase == "joint" or choice.second is None else choice.second
        reads = self.reads if back else ()
        return Context(
            self.params, phase, choice.units, reads, gathered, second, reduced, self.machine, self.fused
        )

    def options(self, phase: str) -> PassOptions:
        """What is chosen of these passes."""
        choice = self.choice
        distances = choice.prefetch[phase].distances if phase in choice.prefetch else {}
        return PassOptions(
            choice.bucket_bytes,
            self.config.tile_bytes,
            {unit: distance for unit, distance in distances.items() if distance > 1},
            self.fused and self.config.kernels == "auto",
            choice.recompute,
            tile_mlp=choice.tile_mlp,
            mlp_bytes=choice.mlp_bytes,
            tile_heads=choice.tile_heads,
            away=choice.away,
            tiers=self.tiers,
            named=choice.named,
            budgeted=(self.config.activation_budget_bytes, self.config.memory_budget_bytes) != (None, None),
        )

    def order_weights(self, graph: fx.Graph) -> None:
        """Take the order of weights, and what is gathered together, from a graph with all of them."""
        self.choice = dataclasses.replace(self.choice, order=tuple(passes.order_of_use(graph)))
        self._assign_units()

    def _assign_units(self) -> None:
        nbytes = self.choice.bucket_bytes
        units = passes.assign_units(list(self.choice.order), self.params, nbytes, self._join_bytes(nbytes))
        self.choice = dataclasses.replace(self.choice, units=units)

    def plan_again(self) -> None:
        """Plan the weights once more, after what is tried, or was agreed on, for them has changed."""
        self.params = self.frame.params = {s.ref: self._plan(s) for s in self.captured.shards}
        self._assign_units()

    def try_tiles(self, tile_bytes: Mapping[ParamRef, int | None]) -> None:
        """Plan with weights in tiles of at most so many bytes, of which nothing is agreed; {}: as is agreed."""
        self.choice = dataclasses.replace(self.choice, tile_bytes=tile_bytes)
        self.plan_again()

    def try_kept(self, kept: Mapping[ParamRef, bool]) -> None:
        """The same of weights that stay gathered."""
        self.choice = dataclasses.replace(self.choice, kept=kept)
        self.plan_again()

    def recorded(
        self, graph: fx.Graph, phase: str, written: frozenset[str] = frozenset()
    ) -> RecordedPhase | None:
        """What graphs of the device record of a phase, as AOTAutograd has it; None: nothing. See
        :func:`~zero_compiler.ir.recorded_phase.recorded_phase`."""
        device = None if self.first is None else self.first.group.device.type
        if device not in RECORDERS or not self._records_graphs:
            return None
        shards = {s.at for s in self.captured.shards}
        return recorded_phase(graph, phase, shards, self.frame.num_outputs, written)

    def with_recorded_bytes(self, emitted: Emitted, phase: str) -> Emitted:
        """The same with what graphs of the device take for its segments."""
        recorded = self.recorded(emitted.graph, phase)
        if recorded is None:
            return emitted
        made = most_made(emitted.program, emitted.graph, emitted.numbers, emitted.segments)
        nbytes = made + given_bytes(emitted.graph, recorded)
        return dataclasses.replace(
            emitted, program=dataclasses.replace(emitted.program, recorded_bytes=nbytes)
        )

    def memory(self, programs: Sequence[Program]) -> Memory:
        """What the frame takes with these Programs as its phases, together with frames that wait for it."""
        return budget.memory_of(self.relatives, [*programs, *self.waiting], self.kept_bytes())

    def kept_bytes(self) -> int:
        """Of the arenas of kept weights."""
        tables = {p.key: p.runtime.kept_offsets for p in self.relatives if p.runtime is not None}
        return kept_bytes({**tables, **self.loader.kept_offsets()})

    def beside_others(self, program: Program) -> Program:
        """The same with what other frames hold while it runs."""
        before = 0 if program.phase == "inference" else sum(f.saved_bytes for f in self.due.values())
        again = cross_frame_memory.again_bytes(program, self.others, self.captured.code)
        return dataclasses.replace(program, before_bytes=before, again_bytes=again)

    @property
    def waiting(self) -> list[Program]:
        """Of the frames whose backward comes after that of this one."""
        return [p for f in self.due.values() for p in f.programs.values()]

    @property
    def is_whole_forward(self) -> bool:
        """Whether this frame is all of the forward: what a budget leaves is left to no other."""
        return not self.captured.goes_on and not self.due

    def peak(self, programs: Sequence[Program]) -> int:
        """Of that, what a budget has to allow."""
        every, accumulates = [*programs, *self.waiting], self.accumulates
        memory = budget.memory_of(self.relatives, every, self.kept_bytes(), accumulates)
        if accumulates:
            return max(memory.peak, memory.accumulating_peak)
        return memory.peak + memory.gradients if self.reduces_each else memory.peak

    @property
    def machine(self) -> HardwareSpec:
        """The one that the user named for any of what is compiled together, else that of the first."""
        if self.first is None:
            return hardware.load(self.config.hardware)
        named = (p.hardware for p in self.sharded_models.values() if p.config.hardware is not None)
        return next(named, self.first.hardware)

    @property
    def world(self) -> int:
        return self.first.group.world if self.first is not None else 1
