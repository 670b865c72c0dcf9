"""The ``torch.compile`` entry: wires the stages of the compiler together and holds no logic of its own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch._functorch.config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from . import budget, grads, hardware, live, passes, plain, schedule, tiling
from .capture import Captured, ShardInput, check_outputs, lower_parameters
from .config import PLACEMENT_FIELDS, Config
from .cost import CostModel, at_hints, bucket_bytes, hints
from .emit import Emitted, emit
from .errors import ConfigError, ZeroError
from .group import decide, show
from .guards import guard_optimizers
from .hardware import HardwareSpec
from .ir import facts, ops, spec
from .ir.facts import ParamRef
from .passes import Context, ParamPlan, Trace, run_passes
from .program import Program
from .report import Frame, Memory
from .runtime.model import ModelRuntime
from .runtime.session import Session
from .runtime.shards import LocalRows
from .saving import Phases, held_bytes, within_activations, within_memory
from .schedule import Choice
from .segments import SegmentCompiler
from .simulate import simulate
from .slots import kept_bytes

log = logging.getLogger("zero_compiler")
_frames = itertools.count()


def zero(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: Any = None
) -> Callable[..., Any]:
    """Backend ``"zero"`` of ``torch.compile``.

    Args:
        gm, example_inputs: a captured frame and its inputs, as Dynamo gives them.
        options: compile fields of :class:`~zero_compiler.Config`; ``torch.compile(options=...)``.

    An error of ours is raised by the call of the frame and not in here, where Dynamo would wrap it in one of
    its own: the user meets a :class:`~zero_compiler.errors.ConfigError` as such, when an option is unknown,
    contradicts the shard, or belongs to ``zero.shard``.
    """
    try:
        return _compile(gm, example_inputs, options, mode)
    except ZeroError as error:
        return _raiser(error)
    except RuntimeError as error:
        if not grads.mixes(error):
            raise
        return _raiser(grads.computes_with_shards())


def _raiser(error: ZeroError) -> Callable[..., Any]:
    kind, args = type(error), error.args  # not the error itself, whose traceback holds the graph

    @torch._dynamo.disable(reason="a frame that did not compile")
    def call(*_: Any) -> Any:
        raise kind(*args)

    return call


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Any, mode: Any
) -> Callable[..., Any]:
    if mode is not None:
        raise ConfigError(
            f'torch.compile(mode={mode!r}) is not an option of backend "zero"; use options={{...}}'
        )
    guard_optimizers()
    compiled, captured, _ = compile_frame(gm, example_inputs, options, EngineLoader())
    # Parameters that are not sharded, all of them or those beside a sharded part, are averaged as at stage 0.
    return plain.watched(_entry(compiled, captured) if captured.shards else compiled, example_inputs)


class Loader(Protocol):
    """Where Programs go: what runs them, and the table of weights that they keep."""

    def prepare(self, policies: Sequence[Any]) -> None:
        """Called once a frame, before anything is compiled."""

    def kept_offsets(self) -> Mapping[str, dict[str, int]]:
        """The tables that :func:`emit` grows, one an owner."""

    def decide(self, policy: Any, key: str, text: str) -> str:
        """What all ranks of the model hold to from now on, given what this rank would choose."""

    def show(self, policy: Any, text: str) -> list[str]:
        """Texts of all tensor-parallel ranks of the model, in order, given this rank's."""

    def load(self, program: Program, segments: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """A callable that runs ``program`` on a list of inputs, which it may empty."""


class EngineLoader:
    """Runs Programs through the engine, over the process group of the model.

    Args:
        binding: whether what is decided stands for all ranks; a rank that only looks at a plan may be alone.
    """

    def __init__(self, binding: bool = True) -> None:
        self.binding = binding
        self.runtimes: dict[str, ModelRuntime] = {}
        self.first: ModelRuntime | None = None

    def prepare(self, policies: Sequence[Any]) -> None:
        for policy in policies:
            policy.group.check_still_valid()
            if policy.runtime is None:
                policy.runtime = ModelRuntime(policy)
            self.runtimes[policy.key] = policy.runtime
        self.first = policies[0].runtime if policies else None

    def kept_offsets(self) -> Mapping[str, dict[str, int]]:
        return {key: runtime.kept_offsets for key, runtime in self.runtimes.items()}

    def decide(self, policy: Any, key: str, text: str) -> str:
        if self.binding:
            policy.distances[key] = text = decide(policy.group, f"prefetch/{policy.serial}/{key}", text)
        return text

    def show(self, policy: Any, text: str) -> list[str]:
        if not self.binding:
            return [text]
        if text not in policy.shown:  # a rank that compiles again, alone, need not ask
            key = f"shown/{policy.serial}/{len(policy.shown)}"
            policy.shown[text] = show(policy.group.tensor, key, text, "partition_activations")
        return list(policy.shown[text])

    def load(self, program: Program, segments: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        return Session(program, segments, self.runtimes, self.first).run


def compile_frame(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Any, loader: Loader
) -> tuple[Callable[..., Any], Captured, Frame]:
    """Compile a frame: its callable on local rows, how it was captured (see `capture.py`), and its plan."""
    captured = lower_parameters(gm, example_inputs)
    compiler = _FrameCompiler(captured, options, loader)
    with _backward_ahead():
        compiled = aot_autograd(
            fw_compiler=compiler.forward,
            bw_compiler=compiler.backward,
            inference_compiler=compiler.inference,
            partition_fn=compiler.partition,
            decompositions=compiler.decompositions(),
            keep_inference_input_mutations=True,
        )(captured.gm, captured.inputs)
    compiler.lend_gradients()
    compiler.check_budget()
    return compiled, captured, compiler.frame


def _backward_ahead() -> contextlib.AbstractContextManager[Any]:
    """Compile the backward with the forward: its plan is known before step 1."""
    config = torch._functorch.config
    if hasattr(config, "force_non_lazy_backward_lowering"):
        return config.patch(force_non_lazy_backward_lowering=True)
    return contextlib.nullcontext()  # older torch does so by itself


def _entry(compiled: Callable[..., Any], captured: Captured) -> Callable[..., Any]:
    """Give ``compiled`` the local rows of the parameters that Dynamo passes."""
    shards, keep = captured.shards, captured.keep
    names = [s.ref.name for s in shards]
    owners = {s.ref.owner for s in shards}
    shard_args = [s.arg for s in shards]
    # Where each argument of the rewritten graph comes from: (True, k-th shard) or (False, Dynamo's argument).
    sources: list[tuple[bool, int]] = []
    at = {s.at: k for k, s in enumerate(shards)}
    rest = iter(keep)
    for i in range(len(shards) + len(keep)):
        sources.append((True, at[i]) if i in at else (False, next(rest)))

    @torch._dynamo.disable(reason="entry of a compiled frame")
    def call(*args: Any) -> Any:
        params = [args[i] for i in shard_args]
        if torch.is_grad_enabled():
            # The graph of autograd keeps the models that its backward needs.
            rows = LocalRows.apply(names, [ops.owner_of(key) for key in owners], *params)
        else:
            rows = [p._local_tensor for p in params]
        return compiled(*[rows[k] if shard else args[k] for shard, k in sources])

    return call


@dataclass(frozen=True)
class _Lowered:
    """A scheduled graph and its Program."""

    gm: fx.GraphModule
    emitted: Emitted


class _FrameCompiler:
    """Compiles the phases of one frame; AOTAutograd calls its methods."""

    def __init__(self, captured: Captured, options: Any, loader: Loader) -> None:
        self.loader = loader
        self.index = next(_frames)
        owners = {s.ref.owner: ops.owner_of(s.ref.owner) for s in captured.shards}
        # Weak: Dynamo keeps a frame, and what compiled it, for as long as the code of the model's class lives.
        self._owners = [
            (key, weakref.ref(p)) for key, p in sorted(owners.items(), key=lambda kv: kv[1].serial)
        ]
        self.config = self._config(options)
        loader.prepare(list(self.policies.values()))
        self.bucket_bytes = self._bucket_bytes()
        self.captured = captured
        self.params = {s.ref: self._plan(s) for s in captured.shards}
        self.segments = self._segment_compiler()
        self.trace = Trace()
        self.frame = Frame(self.index, self.config, self.params, self.trace)
        if self.first is not None:
            self.first.frames.append(self.frame)
        self.order: list[ParamRef] = []  # of first use
        self.units: dict[ParamRef, str] = {}
        self.choices: dict[str, Choice] = {}  # how far ahead gathers start, by phase
        # Backward may run costly operators again; then it gathers more weights, so all ranks hold to one answer.
        self.recompute = self.config.activation_budget_bytes is not None
        self.cuts: dict[float, frozenset[str]] = {}
        self.backward_params: frozenset[ParamRef] | None = None
        self.reduced: frozenset[ParamRef] | None = None

    @property
    def policies(self) -> dict[str, Any]:
        """The sharded models of this frame, by key, in the order in which they were made."""
        return {key: policy for key, ref in self._owners if (policy := ref()) is not None}

    @property
    def first(self) -> Any:
        return next(iter(self.policies.values()), None)

    def _bucket_bytes(self) -> int:
        if self.config.bucket_bytes is not None:
            return self.config.bucket_bytes
        if self.first is None:
            return 0
        return bucket_bytes(self.first.hardware, self.first.group.world, self.first.transport.shared)

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
        return next(iter(self.policies.values())).config.with_options(options)

    def _segment_compiler(self) -> SegmentCompiler:
        if self.first is None:
            return SegmentCompiler(self.config.compute)
        # Frames of one model share artifacts: a graph break or another phase does not compile a layer again.
        known = self.first.compilers
        return known.setdefault(self.config.compute, SegmentCompiler(self.config.compute))

    def _plan(self, shard: ShardInput) -> ParamPlan:
        policy = self.policies[shard.ref.owner]
        info = policy.params[shard.ref.name]
        filed = policy.placed.tier("params", shard.ref.name) == "nvme"
        grad_filed = policy.placed.tier("grads", shard.ref.name) == "nvme"
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
            filed=filed,
            grad_filed=grad_filed,
            copies=policy.group.copies,
            tile_rows=tiling.tile_rows(
                info.layout, info.gather_dtype, filed or grad_filed, self._tile_bytes(policy, shard.ref.name)
            ),
            split=info.part is not None and not info.part.placement.is_replicate(),
        )

    def _tile_bytes(self, policy: Any, name: str) -> int | None:
        """What is gathered of a weight at a time: as the user says, else as a budget made it."""
        return self.config.tile_bytes if self.config.tile_bytes is not None else policy.tile_bytes.get(name)

    def decompositions(self) -> Any:
        if self.config.compute == "inductor":
            from torch._inductor.decomposition import select_decomp_table

            table = select_decomp_table()
            if self.config.memory_budget_bytes is not None or any(p.tile_rows for p in self.params.values()):
                # Whether an operator with a weight is one may not depend on the sizes of its other operands.
                return {op: rule for op, rule in table.items() if op not in tiling.WHOLE}
            return table
        return None

    def _dump_dir(self) -> str | None:
        base = os.environ.get("ZERO_DUMP")
        if not base or (self.first is not None and self.first.group.everyone.rank != 0):
            return None
        return os.path.join(base, f"frame{self.index}")

    def _context(self, phase: str) -> Context:
        back = phase == "backward"
        gathered, reduced = (self.backward_params, self.reduced) if back else (None, None)
        return Context(
            self.params,
            phase,
            self.bucket_bytes,
            self.units,
            gathered,
            reduced,
            self.config.tile_bytes,
            self._machine(),
            self.choices[phase].distances if phase in self.choices else {},
            self.config.compute == "inductor" and self.config.kernels == "auto",
            recompute=self.recompute,
            fused=self.config.compute == "inductor",
        )

    def _joint(self, gm: fx.GraphModule, outputs: int, activation_bytes: int | None) -> None:
        context = replace(
            self._context("joint"), forward_outputs=outputs, activation_bytes=activation_bytes, cuts=self.cuts
        )
        run_passes(gm.graph, passes.JOINT, context, self.trace, self._dump_dir())
        self.order = passes.order_of_use(gm.graph)
        self.units = passes.assign_units(self.order, self.params, self.bucket_bytes)

    # Called by AOTAutograd -----------------------------------------------------------------------------------

    def partition(
        self, gm: fx.GraphModule, inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Rewrite the joint graph and cut it into forward and backward."""
        check_outputs(self.captured.gm)
        if self.config.compute == "inductor":
            _inductor_joint_passes(gm, inputs)
        activations, memory = self.config.activation_budget_bytes, self.config.memory_budget_bytes

        def cut(nbytes: int | None) -> Phases:
            """Forward and backward whose activations take at most so many bytes."""
            joint = gm if activations is None and memory is None else facts.copy_module(gm)
            self._joint(joint, kwargs["num_fwd_outputs"], nbytes)
            self.backward_params = passes.gathered_in_backward(
                joint.graph, self.params, self.bucket_bytes, self.recompute
            )
            self.reduced = spec.reduced_by(joint.graph)
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
            spec.verify_partition(forward.graph, kwargs["num_fwd_outputs"])
            return {"forward": forward, "backward": backward}

        graphs = cut(None)
        if activations is not None:
            graphs = within_activations(cut, graphs, activations)
        if memory is not None and self.policies:
            if not self.recompute and self._may_recompute(self._over_in_small_tiles(graphs, memory) > 0):
                self.recompute = True
                self.cuts.clear()
                graphs = cut(None)  # backward gathers more weights now
            graphs = within_memory(
                cut, graphs, functools.partial(self._over_in_small_tiles, budget_bytes=memory)
            )
        if self.config.partition_activations:
            self._partition_activations(graphs, kwargs["num_fwd_outputs"])
        if memory is not None and self.policies:
            self._spend_budget(graphs, memory)
        self.frame.held_bytes = held_bytes(graphs)
        self.frame.remade = passes.remade(
            graphs["backward"].graph, CostModel(self._machine()), self.config.compute == "inductor"
        )
        return graphs["forward"], graphs["backward"]

    def _over_in_small_tiles(self, graphs: Phases, budget_bytes: int) -> int:
        """By how many bytes the plan of ``graphs`` passes the budget, with tiles as small as it takes."""
        while (over := self._trial_peak(graphs) - budget_bytes) > 0 and passes.finer(graphs["forward"].graph):
            pass
        return over

    def _may_recompute(self, wanted: bool) -> bool:
        """What was decided for all ranks, now or before."""
        key = schedule.key_of("recompute", list(self.units.values()))
        decided = self.first.distances.get(key) or self.loader.decide(self.first, key, str(wanted))
        return decided == str(True)

    def _partition_activations(self, graphs: Phases, num_outputs: int) -> None:
        """Once for what budgets have chosen: how often they choose again may differ between ranks."""
        policy = next((p for p in self.policies.values() if p.group.tensor is not None), None)
        if policy is None:
            raise ConfigError(
                "partition_activations=True needs tensor-parallel ranks, which save the same activations: give "
                'zero.shard a mesh with a dimension called "tp" and call parallelize_module before it, or leave it out'
            )
        peers, show = policy.group.tensor, functools.partial(self.loader.show, policy)
        cut = passes.PartitionActivations(str(peers.pg.group_name), peers.world, show)
        cut.run(graphs["forward"].graph, graphs["backward"].graph, num_outputs, self._context("joint"))

    def _spend_budget(self, graphs: Phases, budget_bytes: int) -> None:
        """Plan both phases with every weight released, and keep what fits in the room that is left.

        What does not fit even so is tried again with the largest weights in tiles. Prefetch comes next: its buffers
        serve one unit after the other, in both phases, where the bytes of a kept weight save one gather.
        """
        if self.config.tile_bytes is None:
            self._tile_weights(graphs, budget_bytes)
        lowered = self._settled(graphs)
        programs = [low.emitted.program for low in lowered.values()]
        policies = list(self.policies.values())
        memory = self._memory(programs)
        budget.check(memory, budget_bytes, budget.peak_at(programs), policies[0].group.world)
        budget.keep(policies, self.params, self.backward_params or (), budget_bytes - memory.peak)
        self._plan_again()

    def _tile_weights(self, graphs: Mapping[str, fx.GraphModule], budget_bytes: int) -> None:
        """Gather the largest weights in tiles of half the bytes, and again, until the plan fits.

        Decided once for a weight, by rank 0 for all.
        """
        undecided = tiling.undecided(self.policies, self.params)
        if not undecided:
            return
        while self._trial_peak(graphs) > budget_bytes:
            limit = tiling.largest_bytes([self.params[ref] for ref in undecided]) // 2
            before = self.params
            if limit < tiling.LEAST_BYTES:
                break
            tiling.note(self.policies, undecided, limit)
            self._plan_again()
            if self.params == before:
                break
        tiling.settle(self.policies, undecided)
        self._plan_again()

    def _plan_again(self) -> None:
        self.params = self.frame.params = {s.ref: self._plan(s) for s in self.captured.shards}
        self.units = passes.assign_units(self.order, self.params, self.bucket_bytes)

    def _trial_peak(self, graphs: Mapping[str, fx.GraphModule]) -> int:
        """Predicted peak of both phases as they are."""
        lowered = [self._lowered(facts.copy_module(gm), phase) for phase, gm in graphs.items()]
        return self._memory([low.emitted.program for low in lowered]).peak

    def _memory(self, programs: Sequence[Program]) -> Memory:
        return budget.memory_of(
            list(self.policies.values()), programs, kept_bytes(self.loader.kept_offsets())
        )

    def lend_gradients(self) -> None:
        """Between two backwards, let activations have the bytes of gradients where that lowers the peak."""
        mine = list(self.frame.programs.values())
        policies = list(self.policies.values())
        if not policies or not mine:
            return
        others = [p for policy in policies for f in policy.frames for p in f.programs.values()]
        gradients = budget.memory_of(policies, mine, 0).gradients
        most = max(live.most(p, gradients) for p in (*mine, *others))
        idle = live.idle_bytes(mine, gradients, most)
        for program in mine:
            if program.phase != "backward":
                program.idle_bytes = idle

    def check_budget(self) -> None:
        """What was compiled fits the budget.

        Raises:
            MemoryBudgetError: it does not.
        """
        if self.config.memory_budget_bytes is None or not self.policies:
            return
        policies, programs = list(self.policies.values()), list(self.frame.programs.values())
        memory = budget.memory_of(policies, programs, self.frame.kept_bytes)
        budget.check(
            memory, self.config.memory_budget_bytes, budget.peak_at(programs), policies[0].group.world
        )

    def forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._phase(gm, "forward")

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _nothing_donated()
        return self._phase(gm, "backward")

    def inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.config.compute == "inductor":
            _inductor_joint_passes(gm, inputs)
        run_passes(gm.graph, passes.INFERENCE, self._context("joint"), self.trace, self._dump_dir())
        self.order = passes.order_of_use(gm.graph)
        self.units = passes.assign_units(self.order, self.params, self.bucket_bytes)
        return self._phase(gm, "inference")

    def _phase(self, gm: fx.GraphModule, phase: str) -> Callable[..., Any]:
        low = self._lowered(gm, phase) if self._is_settled(phase) else self._settled({phase: gm})[phase]
        program = low.emitted.program
        fns = self._compile_segments(program, low.emitted.segments, phase)
        timeline = simulate(program, self._machine(), self._world())
        self.frame.add(program, kept_bytes(self.loader.kept_offsets()), timeline, self.choices[phase])
        directory = self._dump_dir()
        if directory:
            with open(os.path.join(directory, phase, "program.txt"), "w") as f:
                f.write(program.text() + "\n")
        return _boxed(self.loader.load(program, fns))

    def _lowered(self, gm: fx.GraphModule, phase: str, segment_us: list[float] | None = None) -> _Lowered:
        """Run the passes of a phase on its graph, and emit its Program with the predicted time of every segment."""
        run_passes(gm.graph, passes.PHASE, self._context(phase), self.trace, self._dump_dir())
        emitted = emit(gm, self.params, phase, self.loader.kept_offsets())
        if segment_us is None:
            cost, fused = CostModel(self._machine()), self.config.compute == "inductor"
            known = hints(gm.graph)
            segment_us = [at_hints(cost.region_us(seg.gm.graph, fused), known) for seg in emitted.segments]
        emitted.program.segment_us = segment_us
        return _Lowered(gm, emitted)

    def _is_settled(self, phase: str) -> bool:
        """Whether the distances of a phase are known: nothing was to decide, or it was decided before."""
        if phase not in self.choices:
            why = schedule.nothing_to_decide(self.params, phase, self._machine(), self._world())
            units = list(self.units.values())
            if why is not None:
                self.choices[phase] = Choice(why)
            elif (text := self.first.distances.get(schedule.key_of(phase, units))) is not None:
                self.choices[phase] = Choice("decided when first compiled", schedule.from_text(text, units))
        return phase in self.choices

    def _settled(self, graphs: Mapping[str, fx.GraphModule]) -> dict[str, _Lowered]:
        """Lower copies of phases, with distances that are decided here where they are not known yet."""
        decided = {phase: self._is_settled(phase) for phase in graphs}
        low = {phase: self._lowered(facts.copy_module(gm), phase) for phase, gm in graphs.items()}
        looks = {
            phase: schedule.look(low[phase].emitted.program, self._machine(), self._world())
            for phase in graphs
            if not decided[phase]
        }
        if not looks:
            return low
        spare = self.config.memory_budget_bytes
        if spare is not None:
            spare -= self._memory([x.emitted.program for x in low.values()]).peak
        units = list(self.units.values())

        def again(phase: str) -> _Lowered:
            times = low[phase].emitted.program.segment_us  # starts stand where segments end anyway
            return self._lowered(facts.copy_module(graphs[phase]), phase, times)

        def over(found: Mapping[str, Mapping[str, int]]) -> int:
            self.choices.update({phase: Choice("", chosen) for phase, chosen in found.items()})
            peak = self._memory([again(phase).emitted.program for phase in graphs]).peak
            return peak - (self.config.memory_budget_bytes or 0)

        found = schedule.choose(looks, spare, over)
        for phase, seen in looks.items():
            key = schedule.key_of(phase, units)
            text = self.loader.decide(self.first, key, schedule.to_text(found[phase], units))
            chosen = schedule.from_text(text, units)
            why = seen.explained(chosen, schedule.room_text(seen, spare))
            self.choices[phase] = Choice(why, chosen)
            if self.choices[phase].ahead:
                low[phase] = again(phase)
        return low

    def _machine(self) -> HardwareSpec:
        return self.first.hardware if self.first is not None else hardware.load(self.config.hardware)

    def _world(self) -> int:
        return self.first.group.world if self.first is not None else 1

    def _compile_segments(self, program: Program, segments: Sequence[Any], phase: str) -> list[Any]:
        keys: dict[str, int] = {}
        fns = []
        for seg in segments:
            key, fn = self.segments.compile(seg, phase == "inference", phase == "backward")
            fns.append(fn)
            if key not in keys:
                keys[key] = len(keys)
                program.segments.append(seg.gm.print_readable(print_output=False))
            program.structures.append(keys[key])
        return fns


def _nothing_donated() -> None:
    # AOTAutograd lists inputs of the whole backward that its compiler may overwrite. Inductor would take the
    # numbers for those of a segment's inputs, where they name gathered weights and what later segments read.
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _inductor_joint_passes(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    device = next(
        (t.device for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)), None
    )
    # Its patterns of random operators make fake values.
    with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
        joint_graph_passes(gm, device)


def _boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def run(args: list[Any]) -> Any:
        return fn(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
