"""The ``torch.compile`` entry: wires the stages of the compiler together."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    RestartAnalysis,
    ShortenTraceback,
    SkipFrame,
    exceptions_allowed_to_be_fallback,
)
from torch.utils._python_dispatch import _disable_current_modes

from .. import inductor_options, passes
from ..call_stack import in_one_piece
from ..cost.cost import CostModel
from ..cost.transfer_costs import within_host_us
from ..emit.no_sync_program import accumulating
from ..emit.recordable import unrecordable
from ..emit.segments import SegmentCompiler
from ..errors import CaptureError, VerifyError, ZeroError
from ..ir import facts, ops
from ..ir.program import Program
from ..ir.recorded_phase import written_inputs
from ..memory.verify import verify_accumulating
from ..params import eager, recompile_limit
from ..params.optimizer_guards import STALE, guard_optimizers, held_elsewhere
from ..params.penalties import watch_outputs
from ..params.refusals import look_for_late_hooks, process_wide_hooks
from ..plan import dynamic_shape_memory, tiling
from ..ranks.failing import mark_known
from ..ranks.failure_broadcast import Broken
from ..ranks.peer_connections import working
from ..replicated import averaged_modules
from ..replicated.parameters import is_replicated
from ..report.frame import Frame
from ..runtime.autograd_bridge import ForwardWeights, LocalRows
from ..sharded import kept_weights, parameter_errors
from ..sharded.managed_parameters import check_not_replaced
from ..storage.resident_memory import Footprint
from ..tensors.full_weight import AsParameter
from . import garbage, stored_plans
from .budget_check import check_budget, lend_gradients
from .budget_search import Fitting
from .capture import (
    Captured,
    WeightOutput,
    WeightView,
    check_gradients,
    check_outputs,
    lower_parameters,
    owners_in,
)
from .frame_state import FrameState
from .loader import EngineLoader, Loader
from .parameter_guards import KnownParameters, drop_guards
from .phase_lowering import Lowering
from .segment_codegen import compile_segments
from .single_backward import once_differentiable


def zero(
    gm: fx.GraphModule, example_inputs: Sequence[object], *, options: object = None, mode: object = None
) -> Callable[..., object]:
    """Backend ``"zero"`` of ``torch.compile``.

    Args:
        gm, example_inputs: a captured frame and its inputs, as Dynamo gives them.
        options: compile fields of :class:`~zero_compiler.Config`; ``torch.compile(options=...)``.

    An error of ours is raised by the call of the frame and not in here, where Dynamo would wrap it in one of
    its own: the user meets a :class:`~zero_compiler.errors.ConfigError` as such, when an option is unknown,
    contradicts the shard, or belongs to ``zero.shard``. The other ranks of the call learn of any error.
    """
    try:
        with working("the compilation of a call of its model"):
            return _compile(gm, example_inputs, options, mode)
    except (*exceptions_allowed_to_be_fallback, RestartAnalysis, SkipFrame):
        raise  # Dynamo captures the frame in another way
    except Exception as error:
        ours = parameter_errors.computes_with_shards() if parameter_errors.mixes(error) else error
        broken = Broken(owners_in(gm), ours)
        of_any_size = any(isinstance(given, torch.SymInt) for given in example_inputs)
        if isinstance(ours, ZeroError) and not (ours.failure or ours.passing or of_any_size):
            return _raiser(ours, broken)
        with _disable_current_modes():
            broken.end_call()
        mark_known(error)
        if isinstance(ours, ZeroError):
            # Another rank's failure, one that passes, or one of a graph that other sizes find too, in place of those
            # that were compiled for them: the same call may do when it is tried again, so nothing may be left to be
            # found.
            raise _handed_on(mark_known(ours), inspect.currentframe()) from None
        raise


averaged_modules.watch_compiled(
    lambda backend: getattr(backend, "compiler_fn", backend) is zero, guard_optimizers
)


def _handed_on(error: ZeroError, frame: object) -> ZeroError:
    """The same error, of a class that Dynamo does not wrap in one of its own.

    Args:
        frame: the first one that its traceback is to show.
    """
    kind, text = type(error), str(error)
    named = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__init__": ShortenTraceback.__init__,
        "__str__": lambda _: text,  # without the advice that Dynamo adds to what fails in it
    }
    handed_on = type(kind.__name__, (kind, ShortenTraceback), named)
    again: ZeroError = handed_on(*error.args, first_useful_frame=frame)
    again.__dict__.update(vars(error))
    return again


def _raiser(error: ZeroError, broken: Broken) -> Callable[..., object]:
    # Not the error itself, whose traceback holds the graph.
    kind, args, told = type(error), error.args, vars(error)

    @torch._dynamo.disable(reason="a frame that did not compile")
    def call(*_: object) -> Callable[..., object]:
        broken.end_call()
        again = kind(*args)
        again.__dict__.update(told)
        raise mark_known(again)

    return call


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[object], options: object, mode: object
) -> Callable[..., object]:
    if mode is not None:  # torch.compile takes a mode or options, and not both
        options = {"mode": mode}
    if torch._dynamo.config.compiled_autograd or compiled_autograd.compiled_autograd_enabled:
        raise CaptureError(
            'backend "zero" compiles the backward of a call with its forward, and does not go with compiled autograd, '
            "which captures it anew: set torch._dynamo.config.compiled_autograd to False"
        )
    guard_optimizers()
    call = compile_with(gm, example_inputs, options, EngineLoader())
    _watch_limit(gm, options)
    return call


def compile_with(
    gm: fx.GraphModule, example_inputs: Sequence[object], options: object, loader: Loader
) -> Callable[..., object]:
    """The callable that Dynamo is given for a frame whose Programs go to ``loader``."""
    for p in example_inputs:
        if isinstance(p, torch.nn.Parameter) and STALE in p.__dict__:
            raise held_elsewhere(*p.__dict__[STALE])
    plain_ones = {id(p) for p in example_inputs if is_replicated(p)}
    for sharded_model in ops.owners() if plain_ones else ():
        check_not_replaced(sharded_model.places, plain_ones)
    owners = map(ops.owner_of, owners_in(gm))
    measured = next((p.footprint for p in owners if p.footprint is not None), None)
    with contextlib.nullcontext() if measured is None else measured.compiles():
        compiled, captured, frame = compile_frame(gm, example_inputs, options, loader)
    sources = [getattr(p, "_dynamo_source", None) for p in gm.graph.find_nodes(op="placeholder")]
    if captured.shards or captured.weights or captured.writes:
        drop_guards(sources[s.arg] for s in captured.shards)
        params = [example_inputs[s.arg] for s in captured.shards]
        known = KnownParameters(params, [s.ref for s in captured.shards])
        compiled = _entry(compiled, captured, frame, known, measured)
    # Parameters that are not sharded, all of them or those beside a sharded part, are averaged as at stage 0.
    groups = [ops.owner_of(key).group.everyone for key in owners_in(gm)]
    interrupted = bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))
    return averaged_modules.watched(compiled, example_inputs, sources, groups, interrupted)


def _watch_limit(gm: fx.GraphModule, options: object) -> None:
    """What is compiled here may pass Dynamo's ``recompile_limit`` later on."""
    compiles_again = functools.partial(torch.compile, backend=zero, options=options, dynamic=True)
    context = torch._guards.TracingContext.try_get()
    for owner in owners_in(gm):
        scope = ops.owner_of(owner).scope
        scope.compile = compiles_again
        recompile_limit.watch(getattr(context, "traced_code", None), scope)


@in_one_piece
def compile_frame(
    gm: fx.GraphModule, example_inputs: Sequence[object], options: object, loader: Loader
) -> tuple[Callable[..., object], Captured, Frame]:
    """Compile a frame: its callable on local rows, how it was captured (see `capture.py`), and its plan."""
    with garbage.older_objects_set_aside(len(gm.graph.nodes)) as collect:
        return _compile_frame(gm, example_inputs, options, loader, collect)


def _compile_frame(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    options: object,
    loader: Loader,
    collect: Callable[[], None],
) -> tuple[Callable[..., object], Captured, Frame]:
    captured, inputs = lower_parameters(gm, example_inputs)
    compiler = _FrameCompiler(captured, options, loader, collect)
    state = compiler.state
    # The backward is compiled with the forward: its plan is known before step 1.
    whole = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with compiler.as_given(), stored_plans.holding(state), whole, compiler.inductor_options():
        compiled = aot_autograd(
            fw_compiler=_lent(compiler.forward),
            bw_compiler=_lent(compiler.backward),
            inference_compiler=_lent(compiler.inference),
            partition_fn=_lent(compiler.partition),
            decompositions=compiler.decompositions(),
            keep_inference_input_mutations=True,
        )(captured.gm, inputs)
        check_budget(state)
    lend_gradients(state)
    state.report()
    stored_plans.keep(state)
    compiler.forget()
    return once_differentiable(compiled), captured, state.frame


def _lent(method: Callable[..., object]) -> Callable[..., object]:
    """``method`` of an object that is not kept alive by it.

    AOTAutograd keeps its compilers for as long as what they made. This one would keep the graphs of all that was tried.
    """
    weak = weakref.WeakMethod(method)

    def call(*args: object, **kwargs: object) -> object:
        found = weak()
        assert found is not None, "a frame is compiled once, with its backward"
        return found(*args, **kwargs)

    return call


def _entry(
    compiled: Callable[..., Any],
    captured: Captured,
    frame: Frame,
    known: KnownParameters,
    measured: Footprint | None,
) -> Callable[..., object]:
    """Give ``compiled`` the local rows of the parameters that Dynamo passes."""
    shards, keep = captured.shards, captured.keep
    writes, refs = captured.writes, [s.ref for s in shards]  # and not `captured`, which has a graph
    owners = list(dict.fromkeys(ref.owner for ref in refs))
    shard_args = [s.arg for s in shards]
    in_backward = (
        frame.in_backward
    )  # not a frozen weight at the bottom, and not one that is read under no_grad
    refs_in_backward = [s.ref for s in shards if s.ref in in_backward]
    args_in_backward = [s.arg for s in shards if s.ref in in_backward]
    # Where each argument of the rewritten graph comes from: (True, k-th shard) or (False, Dynamo's argument).
    sources: list[tuple[bool, int]] = []
    at = {s.at: k for k, s in enumerate(shards)}
    hooks = process_wide_hooks()
    rest = iter(keep)
    for i in range(len(shards) + len(keep)):
        sources.append((True, at[i]) if i in at else (False, next(rest)))

    @torch._dynamo.disable(reason="entry of a compiled frame")
    def call(*args: Any) -> Any:
        if measured is not None:
            measured.settle()
        for write in writes:
            sharded_model = ops.owner_of(write.owner)
            write.run(args, sharded_model.params[write.name].layout, sharded_model.group.rank)
        params = [args[i] for i in shard_args]
        known.check(params)
        kept_weights.check(args[i] for i in keep)
        look_for_late_hooks(hooks)
        scope = ops.owner_of(owners[0]).scope if owners else None
        if scope is not None and scope.calls:  # eager code of the same forward runs around this frame
            scope.compiled_reads.update(map(id, params))
            scope.refuse_lost_hooks()
        if params and torch.is_grad_enabled():
            # The graph of autograd keeps the models that its backward needs.
            models = {key: ops.owner_of(key) for key in owners}
            weights = ForwardWeights(refs_in_backward, models, [args[i] for i in args_in_backward])
            rows = LocalRows.apply(refs, models, frame, *params)
        else:
            rows = [p._local_tensor for p in params]
        given = [rows[k] if shard else args[k] for shard, k in sources]
        if not params or not torch.is_grad_enabled():
            return compiled(*given)
        outputs = compiled(*given, before_backward=weights.check)
        watch_outputs(outputs, models[owners[0]].group)
        return outputs

    returned = captured.weights, captured.views
    return _with_weights(call, *returned) if any(returned) else call


def _with_weights(
    frame: Callable[..., Iterable[Any]], weights: Sequence[WeightOutput], views: Sequence[WeightView]
) -> Callable[..., object]:
    """``frame``, and the full weights that it returns as code in the forward of a model is to see them."""
    returned: list[WeightOutput | WeightView] = [*weights, *views]

    @torch._dynamo.disable(reason="entry of a compiled frame")
    def call(*args: Any) -> object:
        out = list(frame(*args))
        for w in weights:
            if w.taken:
                out[w.at] = eager.read(args[w.arg], ops.owner_of(w.ref.owner), w.ref.name)
            else:
                out[w.at] = AsParameter.apply(out[w.at])
        for o in returned:
            scope, whole = ops.owner_of(o.ref.owner).scope, isinstance(o, WeightOutput)
            kept_weights.add(scope, o.ref.name, args[o.arg], out[o.at], whole)
        return out

    return call


class _FrameCompiler:
    """Compiles the phases of one frame; AOTAutograd calls its methods."""

    def __init__(self, captured: Captured, options: Any, loader: Loader, collect: Callable[[], None]) -> None:
        self.captured = captured
        self.collect_garbage = collect
        self.state = state = FrameState(captured, options, loader)
        self.lowering = Lowering(state)
        self.segments = self._segment_compiler()
        self.fitting = Fitting(state, self.lowering, self.segments)
        # AOTAutograd keeps the graph of backward and the values of its inputs with what it compiles, to compile them
        # later, which they are by now.
        self._backward: fx.GraphModule | None = None
        self._inputs: list[object] = []

    def forget(self) -> None:
        """The frame is compiled: graphs that are kept with it are emptied."""
        for gm in (self.captured.gm, self._backward):
            if gm is not None:
                garbage.empty(gm)
        self._inputs.clear()

    def _segment_compiler(self) -> SegmentCompiler:
        state, config = self.state, self.state.config
        made = SegmentCompiler(config.compute, inductor_options.patches(config.mode, config.inductor))
        if state.first is None:
            return made
        # Frames of one model share artifacts: a graph break or another phase does not compile a layer again.
        known = state.first.compilers
        return known.setdefault((config.compute, config.mode, config.inductor), made)

    def inductor_options(self) -> contextlib.AbstractContextManager[object]:
        """What the user asks of Inductor holds for its decompositions and its passes over the joint graph, too."""
        config = self.state.config
        if not self.state.fused:
            return contextlib.nullcontext()
        return inductor_options.in_force(inductor_options.patches(config.mode, config.inductor))

    def decompositions(self) -> object:
        state = self.state
        if not state.fused:
            return None
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
        if state.config.memory_budget_bytes is not None or any(p.tile_rows for p in state.params.values()):
            # Whether an operator with a weight is one may not depend on the sizes of its other operands.
            return {op: rule for op, rule in table.items() if op not in tiling.WHOLE}
        return table

    @contextlib.contextmanager
    def as_given(self) -> Iterator[None]:
        """Where a plan file was edited, what the verifier refuses follows from that."""
        try:
            yield
        except VerifyError as error:
            if self.state.given is None:
                raise
            raise self.state.given.plan.refuse(f"what follows from it cannot be run: {error}") from error

    def partition(
        self, gm: fx.GraphModule, inputs: Sequence[object], **kwargs: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Rewrite the joint graph and partition it into forward and backward."""
        if self._backward is None:
            check_outputs(self.captured.gm)
            garbage.empty(self.captured.gm)  # it is traced
        check_gradients(gm.graph, self.captured.differentiated)
        if self.state.fused:
            _inductor_joint_passes(gm, inputs)
        # What backward makes again is no part of it: it is not known yet.
        self.state.frame.flops, self.state.frame.products_us = CostModel(self.state.machine).products(
            gm.graph
        )
        self.state.frame.blas_us = passes.blas_us(gm.graph, self.state.machine)
        self.collect_garbage()  # of tracing
        graphs = self.fitting.partition(gm, inputs, **kwargs)
        self.lowering.choose_precision(graphs)  # of both phases of a step together
        self.collect_garbage()  # of the search
        self._backward = graphs["backward"]  # of higher-order operators within come before it
        return graphs["forward"], graphs["backward"]

    def forward(self, gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return self._phase(gm, "forward")

    def backward(self, gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        _nothing_donated()
        if isinstance(inputs, list):
            self._inputs = inputs
        return self._phase(gm, "backward")

    def inference(self, gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        state = self.state
        if state.fused:
            _inductor_joint_passes(gm, inputs)
        return self._phase(self.fitting.inference(gm), "inference")

    def _phase(self, gm: fx.GraphModule, phase: str) -> Callable[..., object]:
        state = self.state
        emitted = self.lowering.phase(gm, phase).emitted
        if state.given is not None:
            state.given.check_distances(emitted.program, state.choice)
        state.frame.planned_sizes.update(dynamic_shape_memory.planned_sizes(emitted.graph))
        emitted, fns = compile_segments(emitted, self.segments, phase, state)
        program = emitted.program
        if state.frame.sized is not None:
            state.frame.sized.add(emitted)
        timeline = self.lowering.simulated(program)
        state.frame.add(program, state.kept_bytes(), timeline, state.choice.prefetch[phase])
        if phase == "backward":
            state.frame.within_host_us = within_host_us(program, state.machine, state.world)
        later = self._backward if phase == "forward" else None
        written = written_inputs(later.graph) if later is not None else frozenset()
        recorded = state.recorded(gm.graph, phase, written)
        if recorded is not None:
            direct = unrecordable(emitted.segments, state.first.group.device.type)
            state.frame.recorded[phase] = replace(recorded, direct=direct)
        self._dump(program, phase, "program.txt")
        if program.reduces:
            self._accumulating(program)
        del emitted
        self.collect_garbage()
        return _boxed(state.loader.load(program, fns, state.frame))

    def _accumulating(self, program: Program) -> None:
        """Show what a backward does under ``zero.no_sync``."""
        state = self.state
        owners = {r.owner for r in program.reduces}
        kept = accumulating(program, owners)
        verify_accumulating(kept, program, owners, {ref.owner: p.world for ref, p in state.params.items()})
        state.frame.accumulating = kept, self.lowering.simulated(kept)
        self._dump(kept, program.phase, "program_no_sync.txt")

    def _dump(self, program: Program, folder: str, name: str) -> None:
        directory = self.state.dump_dir()
        if directory:
            with open(os.path.join(directory, folder, name), "w") as f:
                f.write(program.text() + "\n")


def _nothing_donated() -> None:
    # AOTAutograd lists inputs of the whole backward that its compiler may overwrite. Inductor would take the
    # numbers for those of a segment's inputs, where they name gathered weights and what later segments read.
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _inductor_joint_passes(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    device = next(
        (t.device for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)), None
    )
    # What takes the place of an operator that changes nothing (a product with 1) is given all that is known of its
    # result, strides too; its own strides are those by which a segment that reads it is compiled.
    values = {node: node.meta["val"] for node in gm.graph.nodes if "val" in node.meta}
    outputs, sharing = gm.graph.output_node().args[0], _sharing(gm.graph)
    # Its patterns of random operators make fake values.
    with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
        joint_graph_passes(gm, device)
    for node in gm.graph.nodes:
        if node in values:
            node.meta["val"] = values[node]
    _copy_what_shares(gm.graph, outputs, sharing)


def _sharing(graph: fx.Graph) -> list[set[object]]:
    """Of each output: the inputs, and the numbers of the outputs before it, with which it shares memory."""
    roots = facts.alias_roots(graph)
    outputs = [roots.get(out, frozenset()) for out in graph.output_node().args[0]]
    return [
        {root for root in mine if root.op == "placeholder"}
        | {k for k, before in enumerate(outputs[:at]) if mine & before}
        for at, mine in enumerate(outputs)
    ]


def _copy_what_shares(graph: fx.Graph, before: Sequence[Any], sharing: Sequence[set[object]]) -> None:
    """An output that was memory of its own remains so, as the caller may write to it: in torch 2.15 Inductor returns an
    input, or another output, in place of its product with 1, and such a write would change both."""
    end = graph.output_node()
    outputs = list(end.args[0])
    copied: set[object] = set()
    for at, (shared, now) in enumerate(zip(sharing, _sharing(graph), strict=True)):
        if now - shared - copied:
            copied.add(at)
            with graph.inserting_before(end):
                outputs[at] = graph.call_function(torch.ops.aten.clone.default, (outputs[at],))
            outputs[at].meta = dict(before[at].meta)
    end.args = (type(end.args[0])(outputs),)


def _boxed(fn: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(fn)
    def run(args: list[object]) -> object:
        return fn(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
