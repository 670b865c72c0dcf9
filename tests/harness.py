"""A model on N ranks in one process, through the whole compiler and the reference executor.

run = SimulatedModel(model, world=2, stage=3)
outs = run.step([(x0,), (x1,)], loss=lambda out: out.sum())   # forward and backward on every rank
run.check(outs)                                               # against plain eager PyTorch
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lockstep import Lockstep
from torch import nn
from torch.utils import _pytree as pytree

from zero_compiler.compile.backend import compile_frame
from zero_compiler.compile.loader import PlanLoader
from zero_compiler.config import PLACEMENT_FIELDS, Config
from zero_compiler.emit.no_sync_program import accumulating
from zero_compiler.ir.facts import ParamRef
from zero_compiler.ir.program import Program
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.params.shard import shard_over
from zero_compiler.report.frame import Frame
from zero_compiler.runtime.reference import Rank, Reference
from zero_compiler.tools.planning import planned_group


class SimulatedModel(PlanLoader):
    """``model`` sharded over ``world`` simulated ranks and compiled; the plain model is kept for comparison."""

    compute = None  # as a loader: as the options say

    def __init__(
        self,
        model: nn.Module,
        world: int,
        *,
        dynamic: bool | None = False,
        compute: str = "aten",
        copies: int = 1,
        **fields: Any,
    ) -> None:
        self.plain = copy.deepcopy(model)
        self.model = copy.deepcopy(model)
        self.world = world * copies  # all ranks; those of each copy, in turn, hold the model once
        self.copies = copies
        self.ranks_lock = Lockstep(self.world)
        self.options = {k: v for k, v in fields.items() if k not in PLACEMENT_FIELDS} | {"compute": compute}
        fulls = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        placement = {k: v for k, v in fields.items() if k in PLACEMENT_FIELDS}
        shard_over(self.model, planned_group(world, copies=copies), Config.make(None, placement))
        (self.sharded_model,) = sharded_models_of(self.model)
        self.layouts = {
            ParamRef(self.sharded_model.key, n): i.layout for n, i in self.sharded_model.params.items()
        }
        self.ranks = [
            Rank(
                {
                    ref: lay.shard_rows(fulls[ref.name], k % world).view(-1)
                    for ref, lay in self.layouts.items()
                }
            )
            for k in range(self.world)
        ]
        # Leaves that autograd sees: this rank's rows of its chunks.
        self.rows: list[dict[str, torch.Tensor]] = [
            {
                ref.name: self.ranks[k]
                .chunks[ref][: lay.rows(k % world) * lay.row_numel if lay.sharded else None]
                .view(lay.local_shape(k % world))
                .detach()
                .requires_grad_(self.sharded_model.param(ref.name).requires_grad)
                for ref, lay in self.layouts.items()
            }
            for k in range(self.world)
        ]
        self._buffers = {id(b): [b.clone() for _ in range(self.world)] for b in self.model.buffers()}
        super().__init__()
        self.sync = True  # backwards reduce; else they run the Program of zero.no_sync
        self.frames: list[Frame] = []
        self.references: list[Reference] = []
        torch._dynamo.reset()
        self.compiled = torch.compile(self.model, backend=self._backend, dynamic=dynamic)

    # As a loader it takes Programs as a plan does, and runs them.
    def load(
        self, program: Program, segments: Sequence[Any], frame: Frame
    ) -> Callable[[list[Any]], list[Any]]:
        # Through JSON: what is not in the serialised Program cannot matter.
        program = Program.from_dict(program.to_dict())
        reference = Reference(program, segments, self.layouts, self.ranks, self.copies)
        self.references.append(reference)
        if not program.reduces:
            return lambda inputs: self.ranks_lock.together(inputs, reference.run)
        kept = Program.from_dict(accumulating(program, {self.sharded_model.key}).to_dict())
        quiet = Reference(kept, segments, self.layouts, self.ranks, self.copies)
        return lambda inputs: self.ranks_lock.together(inputs, (reference if self.sync else quiet).run)

    def _backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, captured, frame = compile_frame(gm, inputs, self.options, self)
        self.frames.append(frame)
        shards = {s.at: s.ref.name for s in captured.shards}
        count = len(shards) + len(captured.keep)

        @torch._dynamo.disable
        def call(*args: Any) -> Any:
            rank = self.ranks_lock.rank
            rest = iter(captured.keep)
            given = []
            for i in range(count):
                if i in shards:
                    given.append(self.rows[rank][shards[i]])
                else:
                    arg = args[next(rest)]
                    given.append(self._buffers.get(id(arg), [arg] * self.world)[rank])
            return compiled(*given)

        return call

    @property
    def programs(self) -> dict[str, Program]:
        """Programs of the last frame, by phase."""
        return self.frames[-1].programs

    # Running -----------------------------------------------------------------------------------------------

    def step(
        self, inputs: Sequence[tuple[Any, ...]], loss: Callable[[Any], torch.Tensor] | None = None
    ) -> list[Any]:
        """Forward on every rank; with ``loss`` backward too, into the gradients of ``rows``."""

        def body(rank: int) -> Any:
            if loss is None:
                with torch.no_grad():
                    return self.compiled(*inputs[rank])
            out = self.compiled(*inputs[rank])
            loss(out).backward()
            return pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), out)

        return self.ranks_lock.map(body)

    def eager(
        self, inputs: Sequence[tuple[Any, ...]], loss: Callable[[Any], torch.Tensor] | None = None
    ) -> tuple[list[Any], dict[str, torch.Tensor | None], list[nn.Module]]:
        """Outputs, mean gradients and the models (for their buffers) of plain PyTorch on each rank's inputs."""
        outs, models = [], []
        for rank in range(self.world):
            model = copy.deepcopy(self.plain)
            models.append(model)
            with torch.no_grad():
                for mine, buffer in zip(self.model.buffers(), model.buffers(), strict=True):
                    buffer.copy_(self._buffers[id(mine)][rank])
            with torch.set_grad_enabled(loss is not None):
                out = model(*copy.deepcopy(inputs[rank]))
                if loss is not None:
                    loss(out).backward()
            outs.append(pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), out))
        grads: dict[str, torch.Tensor | None] = {}
        for name, _ in self.plain.named_parameters():
            each = [dict(m.named_parameters())[name].grad for m in models]
            grads[name] = None if all(g is None for g in each) else sum(each) / self.world  # type: ignore[arg-type]
        return outs, grads, models

    def check(
        self,
        inputs: Sequence[tuple[Any, ...]],
        loss: Callable[[Any], torch.Tensor] | None = None,
        *,
        rtol: float = 1e-5,
        atol: float = 1e-6,
    ) -> list[Any]:
        """One step, equal to eager in outputs, gradients and buffers."""
        want, grads, models = self.eager(inputs, loss)
        for rows in self.rows:
            for row in rows.values():
                row.grad = None
        got = self.step(inputs, loss)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
        self.check_gradients(grads, rtol=rtol, atol=atol)
        for rank in range(self.world):
            for (name, _), mine, theirs in zip(
                self.plain.named_buffers(), self.model.buffers(), models[rank].buffers(), strict=True
            ):
                torch.testing.assert_close(
                    self._buffers[id(mine)][rank],
                    theirs,
                    rtol=rtol,
                    atol=atol,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
        return got

    def check_gradients(
        self, grads: Mapping[str, torch.Tensor | None], *, rtol: float = 1e-5, atol: float = 1e-6
    ) -> None:
        """Every rank has its rows of these.

        A gradient is a sum that is taken in another order here, and an element of it may be what large terms leave of
        each other: ``atol`` is a part of the largest element, and at least of 1.
        """
        for rank in range(self.world):
            for ref, layout in self.layouts.items():
                row, full = self.rows[rank][ref.name], grads[ref.name]
                if full is None:
                    assert row.grad is None, f"{ref.name} has a gradient that eager has not"
                    continue
                part = rank % layout.world
                start = layout.start(part) if layout.sharded else 0
                mine = full[start : start + layout.rows(part)] if layout.sharded else full
                assert row.grad is not None, f"{ref.name} has no gradient on rank {rank}"
                largest = max(1.0, float(full.abs().max())) if full.numel() else 1.0
                torch.testing.assert_close(
                    row.grad,
                    mine,
                    rtol=rtol,
                    atol=atol * largest,
                    msg=lambda m, n=ref.name: f"gradient of {n}: {m}",
                )
