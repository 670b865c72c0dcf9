"""Gradients on their way: from a backward's segments through reductions to those that wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_compiler.errors import TransferError
from zero_compiler.ir.instructions import Compute, Reduce
from zero_compiler.ir.program import Program
from zero_compiler.ir.transfers import ReduceDesc
from zero_compiler.ranks import peer_waits
from zero_compiler.sharded import grads
from zero_compiler.torch_cpp import Rows, Values, all_contiguous

from .model import ModelRuntime

_NONE = Values(())


@dataclass(frozen=True)
class Loaded:
    """A reduction that the engine of ``runtime`` knows under ``index``.

    ``rows``: shape and strides of this rank's rows of each gradient, which are the beginning of its chunk.
    ``one_rank``: there is no other, and the gradients are what the reduction gives.
    """

    runtime: ModelRuntime
    index: int
    desc: ReduceDesc
    rows: Rows
    one_rank: bool


def load(runtime: ModelRuntime, r: ReduceDesc) -> Loaded:
    """Tell the engine of a reduction."""
    group = runtime.sharded_model.group
    index = runtime.engine.add_reduce(
        runtime.own if r.shared else runtime.transient,
        getattr(torch, r.dtype),
        r.label,
        list(zip(r.chunk_numels, map(list, r.shapes), strict=True)),
        r.staging,
        r.replicated,
        getattr(torch, r.out_dtype if group.across is None else r.dtype),
        float(group.data_ranks),
        r.passes or r.cast_last,
        wire=getattr(torch, r.wire) if r.wire else None,
    )
    if r.tile is not None and r.tile.index == 0:
        numel = runtime.sharded_model.params[r.names[0]].layout.chunk_numel
        device = torch.device("cpu") if r.copied else runtime.sharded_model.group.device
        runtime.engine.expect_output(numel * getattr(torch, r.out_dtype).itemsize, device, bool(r.tiers))
    rows = [_rows(runtime, name) for name in r.names]
    same = r.dtype == r.out_dtype and r.grad_dtype in ("", r.dtype)
    whole = group.data_ranks == 1 and r.tile is None and not r.tiers
    one_rank = same and whole and [shape for shape, _ in rows] == list(r.shapes)
    return Loaded(runtime, index, r, Rows(rows), one_rank)


def _rows(runtime: ModelRuntime, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sharded_model = runtime.sharded_model
    shape = sharded_model.params[name].layout.local_shape(sharded_model.group.rank)
    return shape, torch.empty(shape, device="meta").stride()


@dataclass(frozen=True)
class _Sum:
    """An all-reduce under way between ranks with the same rows, of the ``chunks`` of reduction ``which``."""

    work: Any
    which: int
    outs: Values
    final: Sequence[bool]
    chunks: Sequence[torch.Tensor]
    label: str


class Reductions:
    """What a call of one Program reduces and keeps.

    Args:
        known: its reductions.
        runtimes: of each owner that the Program names.
    """

    def __init__(
        self, program: Program, known: dict[ReduceDesc, Loaded], runtimes: dict[str, ModelRuntime]
    ) -> None:
        self._all = [known[r] for r in program.reduces]
        self.owners = {r.owner: runtimes[r.owner] for r in program.reduces}
        self._keeps = [(runtimes[k.owner], k) for k in program.keeps]
        self._read = {v for i in program.instrs if isinstance(i, (Compute, Reduce)) for v in i.ins}
        self._summing: list[_Sum] = []
        # Results on the device, what they become on its host, and the event of the copy.
        self._leaving: dict[int, tuple[Sequence[torch.Tensor], list[torch.Tensor], torch.Event | None]] = {}
        self._tiles: dict[tuple[str, str], torch.Tensor] = {}  # gradients of which some tiles have landed
        self._handed_over: dict[int, list[torch.Tensor]] = {}  # of reductions on the only rank

    def check_unhooked(self) -> None:
        """Gradients that are kept go to no hook of the user's before they are reduced.

        Raises:
            ZeroError: see :func:`zero_compiler.sharded.grads.check_unhooked`.
        """
        for runtime, keep in self._keeps:
            for name in keep.names:
                grads.check_unhooked(runtime.sharded_model.param(name), name)

    def forget(self) -> None:
        """After an error: nothing is on its way any more."""
        self._summing.clear()
        self._leaving.clear()
        self._tiles.clear()
        self._handed_over.clear()

    def start(self, which: int, given: list[torch.Tensor]) -> None:
        """Start to reduce ``given``, with what an earlier backward has left of the same gradients."""
        loaded = self._all[which]
        runtime, r = loaded.runtime, loaded.desc
        sharded_model = runtime.sharded_model
        if grads.PendingGrad.ever_made:
            dtype = getattr(torch, r.dtype)
            for k, name in enumerate(r.names):
                param = sharded_model.param(name)
                given[k] = grads.to_reduce(sharded_model, name, param, given[k], dtype, r.tile)
        if loaded.one_rank and all_contiguous(given):
            self._handed_over[which] = given
        else:
            runtime.engine.reduce_start(loaded.index, given)

    def keep(self, which: int, given: list[torch.Tensor]) -> None:
        """Leave gradients for a later backward to reduce."""
        runtime, keep = self._keeps[which]
        sharded_model, dtype = runtime.sharded_model, getattr(torch, keep.dtype)
        for name, grad in zip(keep.names, given, strict=True):
            grads.keep(sharded_model.param(name), grad, dtype, sharded_model.params[name].layout, keep.tile)

    def store(self, env: list[object], which: int) -> None:
        """Wait for a reduction whose result goes to the host, and start the copy."""
        self.finish_sums(env)
        self._reduced(env, which, _NONE, ())

    def reads(self, outs: Sequence[int]) -> bool:
        """Whether an instruction computes with what a reduction gives."""
        return not self._read.isdisjoint(outs)

    def wait(self, env: list[object], which: int, outs: Values, final: Sequence[bool], read: bool) -> None:
        """Give a result to those that wait for it. ``final``: nothing reads the weight from here on. ``read``: see
        :meth:`reads`."""
        runtime, r = self._all[which].runtime, self._all[which].desc
        self.finish_sums(env)
        if not r.copied:
            self._reduced(env, which, outs, final)
            if read:
                self.finish_sums(env)
            return
        _, chunks, event = self._leaving.pop(which)
        runtime.aside.wait(event)
        if r.tile is not None or runtime.sharded_model.sinks or read:
            runtime.aside.await_copy(event)  # the host reads it at once
        self._deliver(env, which, outs, final, chunks)

    def finish_sums(self, env: list[object]) -> None:
        """Wait for what is summed between ranks with the same rows."""
        for s in self._summing:
            try:
                if s.work is not None:
                    peer_waits.wait(s.work, self._all[s.which].runtime.sharded_model.group)
            except RuntimeError as error:
                raise TransferError(f"{s.label} failed: {str(error).splitlines()[0]}") from error
            out_dtype = getattr(torch, self._all[s.which].desc.out_dtype)
            self._send(env, s.which, s.outs, s.final, [c.to(out_dtype) for c in s.chunks])
        self._summing.clear()

    def _reduced(self, env: list[object], which: int, outs: Values, final: Sequence[bool]) -> None:
        """Wait for a reduction; what it gives goes where it is to go."""
        loaded = self._all[which]
        runtime, r = loaded.runtime, loaded.desc
        chunks: Sequence[torch.Tensor] | None = self._handed_over.pop(which, None)
        if chunks is None:
            chunks = runtime.engine.reduce_wait(loaded.index)
        across = runtime.sharded_model.group.across
        if across is None:
            self._send(env, which, outs, final, chunks)
            return
        # Sums of equal rows meet while the next gradients are computed: nothing waits for them before the end.
        given = [c for c in chunks if c.numel()]
        work = across.pg.allreduce_coalesced(given) if given else None
        self._summing.append(_Sum(work, which, outs, final, chunks, f"{r.label} between replicas"))

    def _send(
        self,
        env: list[object],
        which: int,
        outs: Values,
        final: Sequence[bool],
        chunks: Sequence[torch.Tensor],
    ) -> None:
        """Give reduced rows to those that wait for them, or start to copy them to the host."""
        runtime, r = self._all[which].runtime, self._all[which].desc
        if not r.copied:
            self._deliver(env, which, outs, final, chunks)
            return
        self._leaving[which] = (chunks, *runtime.aside.to_host(chunks))

    def _deliver(
        self,
        env: list[object],
        which: int,
        outs: Values,
        final: Sequence[bool],
        chunks: Sequence[torch.Tensor],
    ) -> None:
        """Give gradients to those that wait for them."""
        loaded = self._all[which]
        runtime, r = loaded.runtime, loaded.desc
        sharded_model = runtime.sharded_model
        if r.tile is not None:
            whole = self._laid(runtime, r, chunks[0], final[0])
            if whole is None:
                return
            chunks = [whole]
        out: list[Any] = loaded.rows.of(chunks)
        if sharded_model.sinks:
            for k, (name, last) in enumerate(zip(r.names, final, strict=True)):
                done = last and grads.is_last_call(sharded_model, name)
                if grads.deliver(sharded_model, name, sharded_model.param(name), out[k], done):
                    out[k] = None
        outs.put(env, out)

    def _laid(
        self, runtime: ModelRuntime, r: ReduceDesc, part: torch.Tensor, final: bool
    ) -> torch.Tensor | None:
        """Lay a tile of a gradient beside those before it; all of this rank's rows with the last one."""
        assert r.tile is not None
        sharded_model, (name, *_) = runtime.sharded_model, r.names
        done = r.tile.last and final and grads.is_last_call(sharded_model, name)
        if grads.deliver_part(sharded_model, name, sharded_model.param(name), part, r.tile, done):
            return None
        key, numel = (r.owner, r.names[0]), runtime.sharded_model.params[r.names[0]].layout.chunk_numel
        if r.tile.index == 0:
            self._tiles[key] = runtime.engine.acquire_output(numel, part.dtype, part.device, bool(r.tiers))
        self._tiles[key][r.tile.begin : r.tile.begin + part.numel()].copy_(part)
        return self._tiles.pop(key) if r.tile.last else None
