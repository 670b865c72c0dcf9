"""Updates while backward runs: ``zero.optimizer(overlap=True)``.

A gradient that is reduced goes straight to the update of its parameter, as soon as nothing in this backward reads
the weight any more: no weight changes under a backward that has yet to use it, and no gradient waits in memory for
``step()``. What cannot be told in time (a weight that other frames or eager code use too, a parameter with hooks) is
updated at the end of the backward.

Where gradients rest in files, some go there first, and their updates read them (`RestTiers.goes_by_file`): those that
wait for the norm of all, those that come in tiles, and under a budget of memory all, since the buffers of files have
their part of it, and gradients on their way to updates none.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ..errors import OptimizerError
from ..ir import ops
from ..ranks.failing import STEP
from ..replicated.end_of_backward import averages_follow
from ..replicated.parameters import check_averaged
from ..sharded import grads
from ..sharded.grads import AppliedGrad
from ..sharded.sharded_model import ShardedModel
from ..storage import heap
from .updates import Entry, OverlappedOptimizer, SubGroup

if TYPE_CHECKING:
    from ..sharded.files import GradientFiles
    from ..sharded.sharded_model import ShardedModel


class Overlap:
    """The updates of one optimizer in one backward. Fed by the reductions of compiled frames, and by autograd."""

    uses_up = True

    def __init__(self, optimizer: OverlappedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._sub_groups: list[SubGroup] = []
        self._of: dict[int, tuple[Entry, list[SubGroup]]] = {}
        self._task: int | None = None  # autograd's number of the backward that runs
        self._missing: dict[
            int, set[int]
        ] = {}  # of each sub-group that has not run, parameters without a final gradient
        self._hooks: list[RemovableHandle] = []
        self.hooks: set[int] = set()  # the ids of these
        self._params: list[weakref.ref[torch.Tensor]] = []
        self._names: dict[
            int, tuple[weakref.ref[ShardedModel], str]
        ] = {}  # of each parameter of a sharded model
        self._sharded_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()  # whose gradients come here
        self._failed: Exception | None = None  # why nothing more of this backward is updated
        self._partly = False  # a backward has begun to update, and has not ended
        self.due = False  # one has updated, and no step() came since
        self._first = True  # no backward has ended yet
        self._apart = contextlib.ExitStack()
        self._end_of_life = weakref.finalize(self, _remove, self._hooks, self._params, self._sharded_models)
        self._end_of_life.atexit = False
        _all.add(self)

    def end(self) -> None:
        """Let go of all gradients; so does the end of the optimizer."""
        self._of.clear()
        for sharded_model in self._sharded_models:
            for name in [n for n, sink in sharded_model.sinks.items() if sink is self]:
                del sharded_model.sinks[name]
        self._end_of_life()

    def check_free(self, params: Sequence[object]) -> None:
        """Nobody else takes the gradients of ``params``.

        Raises:
            OptimizerError: another optimizer does.
        """
        if self._taken(params):
            gc.collect()  # it may be gone and not collected yet: a scheduler makes a cycle of it
            if self._taken(params):
                raise OptimizerError(
                    "two zero.optimizer(overlap=True) over the same parameters would each use up the gradients of the "
                    "other; delete the first one and what refers to it (LR schedulers), or leave overlap out"
                )

    def _taken(self, params: Sequence[object]) -> bool:
        return any(id(p) in other._of for other in list(_all) if other is not self for p in params)

    def watch(self, sub_groups: Sequence[SubGroup]) -> None:
        """Take over the parameters of ``sub_groups``."""
        me = weakref.ref(self)

        def accumulated(param: torch.Tensor) -> None:
            if (overlap := me()) is not None:
                overlap.enter()

        for sub_group in sub_groups:
            self._sub_groups.append(sub_group)
            for piece in sub_group.pieces:
                param = piece.entry.param
                if id(param) not in self._of:
                    if param.requires_grad:
                        self._hooks.append(param.register_post_accumulate_grad_hook(accumulated))
                        self.hooks.add(self._hooks[-1].id)
                    self._params.append(weakref.ref(param))
                    self._of[id(param)] = (piece.entry, [])
                self._of[id(param)][1].append(sub_group)
        for sharded_model in ops.owners():
            for name in sharded_model.places:
                if id(sharded_model.find(name)) in self._of:
                    self._sharded_models.add(sharded_model)
                    sharded_model.sinks[name] = self
                    self._names[id(sharded_model.find(name))] = weakref.ref(sharded_model), name

    # In a backward -----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The first gradient of a backward begins a round; one round needs a ``step()`` before the next.

        Raises:
            GradientError: gradients of an earlier backward are used up and not stepped.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self.check_ended()
        if self.due or any(type(p.grad) is AppliedGrad for u in self._sub_groups for p in u.params):
            if (optimizer := self._optimizer()) is not None:
                optimizer.check_whole()
            raise grads.used_up(again=True)
        self._task, self._failed = task, None
        if (optimizer := self._optimizer()) is not None:
            self._guarded(optimizer.link_groups)
            self._guarded(optimizer.place_found)
        self._apart.close()  # of a backward that broke off
        if (
            self._first
        ):  # gradients come and go between states that are made, and what lives on with each of them
            self._apart.enter_context(heap.apart())
        self._missing = {id(u): {id(p) for p in u.params if p.requires_grad} for u in self._sub_groups}
        grads.at_end(self._end, self._broke_off)

    def land(self, param: DTensor, local: torch.Tensor, final: bool) -> bool:
        """See :class:`~zero_compiler.sharded.grads.Sink`."""
        if id(param) not in self._of:
            return False  # one that was replaced: ``step()`` says so
        self.enter()
        files = self._files_of(param, False)
        if files is None:
            grads.publish(param, local)
        elif not files.land(param, local, final):
            return False
        if final:
            self._ready(param)
        return True

    def land_part(self, param: DTensor, part: torch.Tensor, begin: int, last: bool, final: bool) -> bool:
        """See :class:`~zero_compiler.sharded.grads.Sink`; an update waits for the whole of its gradient."""
        files = self._files_of(param, True) if id(param) in self._of else None
        if files is None:
            return False
        self.enter()
        taken = files.land_part(param, part, begin, last, final)
        if taken and last and final:
            self._ready(param)
        return taken

    def _files_of(self, param: torch.Tensor, tiled: bool) -> GradientFiles | None:
        """Who takes a gradient to its file; None for one that goes from memory to its update."""
        sharded_model, name = self._owner(param)
        optimizer = self._optimizer()
        if sharded_model is None or optimizer is None:
            return None
        files = sharded_model.gradients.files_of(name)
        # What is added to a gradient that went there goes there too, so that sums are in the order of autograd's.
        there = files is not None and files.has(name)
        return files if there or sharded_model.tiers.goes_by_file(name, optimizer.early, tiled) else None

    def _owner(self, param: object) -> tuple[ShardedModel | None, str]:
        """The sharded model of a parameter, and its name there."""
        ref, name = self._names.get(id(param), (None, ""))
        return (ref() if ref is not None else None), name

    def _ready(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not optimizer.early:
            return
        entry, sub_groups = self._of[id(param)]
        sharded_model, name = self._owner(param)
        if sharded_model is not None and (files := sharded_model.gradients.files_of(name)) is not None:
            self._guarded(lambda: optimizer.receive(partial(files.finish, name)))
        entry.claim_grad()
        for sub_group in sub_groups:
            missing = self._missing.get(id(sub_group))
            if missing is not None:
                missing.discard(id(param))
                if not missing:
                    del self._missing[id(sub_group)]
                    self._feed(optimizer, sub_group)

    def _feed(self, optimizer: OverlappedOptimizer, sub_group: SubGroup) -> None:
        """Begin the update of ``sub_group``. An error waits for the end of the backward: raised here, it would leave
        peers alone in the collectives that are still to come."""

        def update() -> None:
            self._partly = True
            optimizer.feed(sub_group)

        self._guarded(update)

    def _guarded(self, update: Callable[[], None]) -> None:
        """A part of the updates, unless one before it failed; how it fails is for the end of the backward."""
        if self._failed is None:
            try:
                update()
            except Exception as error:
                self._failed = error

    @property
    def broke_off(self) -> bool:
        """Whether a backward ended, by an error or Ctrl-C, after some of its updates, and nobody was told yet."""
        return self._partly

    def check_ended(self) -> None:
        """No backward broke off after some of its updates, by an error or Ctrl-C.

        Raises:
            OptimizerError: one did.
        """
        if (optimizer := self._optimizer()) is not None and self.broke_off:
            self._partly = False
            optimizer.break_off("a backward with overlap=True broke off after some of its updates")

    def check_stepped(self) -> None:
        """No backward has updated parameters without a ``step()`` since.

        Raises:
            GradientError: one did: its step cannot be left out.
        """
        if self.due:
            raise grads.used_up(again=True)

    def _broke_off(self) -> None:
        """No update of this backward writes to a parameter or state any more: whoever called it may load others. Where
        none has, gradients are what they are without overlap: those of the part of the backward that ran."""
        if (optimizer := self._optimizer()) is not None:
            optimizer.give_up()
        if not self._partly:
            self._give_back()

    def _give_back(self) -> None:
        for entry, _ in self._of.values():
            entry.give_back()

    def _end(self) -> None:
        """The backward is over: nothing reads weights any more, and all gradients are there.

        Raises:
            GradientError: before any was used, where they are those of this rank alone.
            StorageError: of an update.
        """
        params = [p for u in self._sub_groups for p in u.params]
        if averages_follow(params):
            grads.at_end(self._end, self._broke_off)  # after them
            return
        optimizer, self._task, self._first = self._optimizer(), None, False
        self._apart.close()
        if optimizer is None or not optimizer.early:
            return
        check_averaged(params)
        for sharded_model in self._sharded_models:
            self._guarded(partial(optimizer.receive, sharded_model.gradients.finish))
        for entry, _ in self._of.values():
            entry.claim_grad()
        for sub_group in self._sub_groups:
            if self._missing.pop(id(sub_group), None) is not None:
                self._feed(optimizer, sub_group)
        self._guarded(optimizer.complete)
        if self._failed is not None and not self._partly:
            self._give_back()
        self.due, self._partly = self._partly, False
        failed, self._failed = self._failed, None
        if failed is not None:
            optimizer.tell(failed, STEP)
            raise failed

    def finish(self) -> None:
        """After ``step()``, or a ``load_state_dict`` after one that broke off: there are no gradients."""
        self.due = self._partly = False
        self._missing.clear()
        for sub_group in self._sub_groups:
            for param in sub_group.params:
                param.grad = None


# Of this process: two may not take the gradients of one parameter.
_all: weakref.WeakSet[Overlap] = weakref.WeakSet()


def _remove(
    hooks: list[RemovableHandle],
    params: list[weakref.ref[torch.Tensor]],
    sharded_models: weakref.WeakSet[ShardedModel],
) -> None:
    """The optimizer is gone: gradients come to ``.grad`` again, or to files where they rest there."""
    for hook in hooks:
        hook.remove()
    for ref in params:
        if (param := ref()) is not None and type(param.grad) is AppliedGrad:
            param.grad = None
    for sharded_model in sharded_models:
        sharded_model.gradients.restore_sinks()
