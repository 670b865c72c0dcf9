"""A frame while it is compiled: its weights, what has been decided for it, and the context that passes get."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any

from torch import fx

from .. import passes
from ..config import PLACEMENT_FIELDS, Config
from ..cost import hardware
from ..cost.cost import bucket_bytes, smaller_buckets
from ..cost.hardware import HardwareSpec
from ..cost.prefetch import PrefetchChoice
from ..emit.transfer_allocation import kept_bytes
from ..errors import ConfigError
from ..ir import ops
from ..ir.facts import ParamRef
from ..ir.program import Program
from ..passes import Context, Options, ParamPlan, Trace
from ..plan import budget, cross_frame_memory, tiling
from ..plan.dynamic_shape_memory import Sized
from ..ranks.group import speaking
from ..report.report import Frame, Memory
from .capture import Captured, ShardInput
from .loader import Loader

_frames = itertools.count()


class FrameState:
    """What the stages of a frame's compilation share.

    Args:
        captured: the frame as it was captured.
        options: compile fields of :class:`~zero_compiler.Config`, as ``torch.compile(options=...)`` has them.
        loader: where its Programs go.
    """

    def __init__(self, captured: Captured, options: Any, loader: Loader) -> None:
        self.loader = loader
        self.index = next(_frames)
        owners = {s.ref.owner: ops.owner_of(s.ref.owner) for s in captured.shards}
        # Weak: Dynamo keeps a frame, and what compiled it, for as long as the code of the model's class lives.
        self._owners = [(p.key, weakref.ref(p)) for p in speaking(owners.values())]
        self.config = self._config(options)
        if loader.compute is not None:
            self.config = dataclasses.replace(self.config, compute=loader.compute)
        loader.prepare(list(self.policies.values()), self.relatives)
        self.bucket_bytes, why = self._bucket_bytes()
        self.captured = captured
        self.params = {s.ref: self._plan(s) for s in captured.shards}
        self.trace = Trace()
        self.frame = Frame(self.index, self.config, self.params, self.trace, code=captured.code)
        budgets = self.config.memory_budget_bytes, self.config.activation_budget_bytes
        if self.first is not None and any(b is not None for b in budgets):
            self.frame.sized = Sized()
        self.others = cross_frame_memory.frames_of(self.relatives)  # that were compiled before
        self.due = cross_frame_memory.due(self.others, captured.code)
        self.take_buckets(self.bucket_bytes, why)
        self.order: list[ParamRef] = []  # of first use
        self.units: dict[ParamRef, str] = {}
        self.choices: dict[str, PrefetchChoice] = {}  # how far ahead gathers start, by phase
        self.planned: dict[str, Program] = {}  # within a memory budget, before any of them is compiled
        # Backward may run costly operators again; then it gathers more weights, so all ranks hold to one answer.
        self.recompute = self.config.activation_budget_bytes is not None
        # The same of MLPs in tiles of tokens: backward then gathers their biases too.
        self.tile_mlp, self.mlp_bytes = False, None  # type: bool, int | None
        # And of weights of heads, which backward then gathers in tiles.
        self.tile_heads = False
        # Both as in Context.
        self.tiers: tuple[str, ...] = () if self.first is None else self.first.activation_path
        self.away: frozenset[str] | None = frozenset() if self.tiers else None
        self.backward_params: frozenset[ParamRef] | None = None
        self.reduced: frozenset[ParamRef] | None = None
        # Called under zero.no_sync: a budget leaves room for full gradients that wait.
        self.accumulates = any(not policy.sync for policy in self.policies.values())

    @property
    def policies(self) -> dict[str, Any]:
        """The sharded models of this frame, by key; the first one's ranks are those that take part in its calls."""
        return {key: policy for key, ref in self._owners if (policy := ref()) is not None}

    @property
    def relatives(self) -> list[Any]:
        """These, and what else there is of the models that they are parts of: budgets are for all of it."""
        return cross_frame_memory.related(self.policies.values())

    @property
    def first(self) -> Any:
        return next(iter(self.policies.values()), None)

    def report(self) -> None:
        """The frame is compiled: from here on its model shows it."""
        if self.first is not None:
            self.first.frames.append(self.frame)
            self.first.scope.changes += 1

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
        nbytes = bucket_bytes(self.machine, self.world, self.first.transport.shared)
        if self.world == 1:
            return nbytes, "nothing moves between ranks"
        return nbytes, "eight times latency times bandwidth between ranks"

    def smaller_buckets(self) -> list[int]:
        """Sizes that a memory budget may choose instead, falling."""
        if self.config.bucket_bytes is not None or self.first is None:
            return []
        return smaller_buckets(self.machine, self.world, self.first.transport.shared)

    def take_buckets(self, nbytes: int, why: str) -> None:
        """Plan with buckets of so many bytes, and say why in the report."""
        self.bucket_bytes = self.frame.bucket_bytes = nbytes
        self.frame.bucket_why = why

    def _config(self, options: Any) -> Config:
        if not self.policies:
            given = Config.make(None, options or {})
            for name in options or {}:
                if name in PLACEMENT_FIELDS and not (name == "stage" and given.stage == 0):
                    raise ConfigError(
                        f"torch.compile(options={{{name!r}: ...}}): nothing in this model is sharded, and {name} is a "
                        "placement; call zero.shard(model, stage=...) before torch.compile"
                    )
            return given
        if len(self.relatives) > len(self.policies):
            # A part that was taken out of the model counts until it is collected, on all ranks alike from here on.
            gc.collect()
        configs = [[p.config for p in some] for some in (self.policies.values(), self.relatives)]
        return Config.of_parts(*configs).with_options(options)

    def _plan(self, shard: ShardInput) -> ParamPlan:
        policy = self.policies[shard.ref.owner]
        info = policy.params[shard.ref.name]
        path, grad_path = policy.path("params", shard.ref.name), policy.path("grads", shard.ref.name)
        return ParamPlan(
            ref=shard.ref,
            shape=info.layout.shape,
            dtype=info.layout.dtype,
            gather_dtype=info.gather_dtype,
            reduce_dtype=info.reduce_dtype,
            cut=info.layout.cut,
            world=info.layout.world,
            stage=policy.config.stage,
            kept=policy.kept.get(shard.ref.name, False),
            shared=policy.transport.shared,
            path=path,
            grad_path=grad_path[::-1],
            copies=policy.group.copies,
            tile_rows=tiling.tile_rows(
                info.layout,
                info.gather_dtype,
                bool(path or grad_path),
                self._tile_bytes(policy, shard.ref.name),
            ),
            split=info.part is not None and not info.part.placement.is_replicate(),
        )

    def _tile_bytes(self, policy: Any, name: str) -> int | None:
        """What is gathered of a weight at a time: as the user says, else as a budget made it."""
        return self.config.tile_bytes if self.config.tile_bytes is not None else policy.tile_bytes.get(name)

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
        back = phase == "backward"
        gathered, reduced = (self.backward_params, self.reduced) if back else (None, None)
        return Context(self.params, phase, self.units, gathered, reduced, self.machine, self.fused)

    def options(self, phase: str) -> Options:
        """What is chosen of these passes."""
        return Options(
            self.bucket_bytes,
            self.config.tile_bytes,
            self.choices[phase].distances if phase in self.choices else {},
            self.fused and self.config.kernels == "auto",
            self.recompute,
            tile_mlp=self.tile_mlp,
            mlp_bytes=self.mlp_bytes,
            tile_heads=self.tile_heads,
            away=self.away,
            tiers=self.tiers,
            budgeted=(self.config.activation_budget_bytes, self.config.memory_budget_bytes) != (None, None),
        )

    def order_weights(self, graph: fx.Graph) -> None:
        """Take the order of weights, and what is gathered together, from a graph with all of them."""
        self.order = passes.order_of_use(graph)
        self.units = passes.assign_units(self.order, self.params, self.bucket_bytes)

    def plan_again(self) -> None:
        """Plan the weights once more, after a policy's choices for them changed."""
        self.params = self.frame.params = {s.ref: self._plan(s) for s in self.captured.shards}
        self.units = passes.assign_units(self.order, self.params, self.bucket_bytes)

    def memory(self, programs: Sequence[Program]) -> Memory:
        """What the frame takes with these Programs as its phases, together with frames that wait for it."""
        return budget.memory_of(self.relatives, [*programs, *self.waiting], self.kept_bytes())

    def kept_bytes(self) -> int:
        """Of the arenas of kept weights."""
        tables = {p.key: p.runtime.kept_offsets for p in self.relatives if p.runtime is not None}
        return kept_bytes({**tables, **self.loader.kept_offsets()})

    def lay_beside(self, program: Program) -> None:
        """Note what other frames hold while it runs."""
        if program.phase != "inference":
            program.before_bytes = sum(f.saved_bytes for f in self.due.values())
        program.again_bytes = cross_frame_memory.again_bytes(program, self.others, self.captured.code)

    @property
    def waiting(self) -> list[Program]:
        """Of the frames whose backward comes after that of this one."""
        return [p for f in self.due.values() for p in f.programs.values()]

    @property
    def alone(self) -> bool:
        """Whether this frame is all of the forward: what a budget leaves is left to no other."""
        return not self.captured.goes_on and not self.due

    def peak(self, programs: Sequence[Program]) -> int:
        """Of that, what a budget has to allow."""
        memory = self.memory(programs)
        return max(memory.peak, memory.accumulating_peak) if self.accumulates else memory.peak

    @property
    def machine(self) -> HardwareSpec:
        """The one that the user named for any of what is compiled together, else that of the first."""
        if self.first is None:
            return hardware.load(self.config.hardware)
        named = (p.hardware for p in self.policies.values() if p.config.hardware is not None)
        return next(named, self.first.hardware)

    @property
    def world(self) -> int:
        return self.first.group.world if self.first is not None else 1
