"""Checkpoints of `torch.distributed.checkpoint` in one folder, of which a restarted job finds the newest whole one.

DCP writes and reads the files, for any number of ranks. What a restart needs beyond that is here, and is names:

    step-00000120             a whole checkpoint, as dcp.save has written it
    .unfinished-00000140      one that is being written, or was when the job was killed

A checkpoint gets its name by one rename, once what all ranks have written is on the disk, and loses it by one before
the first of its files is removed. So whenever a rank is killed, what has a name is whole. The first rank renames; on
several hosts the folder is on a disk that all of them share.
"""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """Made by all ranks together, whose calls are collective.

    Args:
        folder: of this run; made where it does not exist.
        keep: how many whole checkpoints stay, at least 1; older ones are removed.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder, self._keep = folder, keep
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        # A save beside training has collectives of its own, which must not come between those of training.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: Future[Any] | None = None
        if self._first:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob(".unfinished-*"):  # of a job that was killed
                shutil.rmtree(path)

    def save(self, step: int, state: dict[str, Any], *, beside: bool = False) -> None:
        """Save the ``state`` after a step, and remove the oldest checkpoint.

        Args:
            beside: return once the state is copied, and write it while training goes on (``dcp.async_save``). The next
                save waits for that, and so does :meth:`wait`.

        Raises:
            CheckpointException: that could not be written, or the one before could not, on some rank. Those before are
                whole.
        """
        self.wait()
        unfinished = self._folder / f".unfinished-{step:08}"
        writer = dcp.FileSystemWriter(unfinished, sync_files=True)
        if not beside:
            dcp.save(state, storage_writer=writer, process_group=self._group)
            self._name(unfinished, step)  # on the first rank DCP is done when it knows that every rank is
            return
        saving = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        self._pending = self._thread.submit(lambda: (saving.result(), self._name(unfinished, step)))

    def wait(self) -> None:
        """Until no save is under way.

        Raises:
            CheckpointException: it failed on some rank.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, state: dict[str, Any]) -> int | None:
        """Load the newest whole checkpoint into ``state``; the step after which it was saved, None if there is none."""
        found = [self.steps()[-1:] if self._first else []]
        if self._group is not None:
            dist.broadcast_object_list(found, group=self._group)  # all take the one that the first rank sees
        for step in found[0]:
            dcp.load(state, checkpoint_id=self._folder / f"step-{step:08}", process_group=self._group)
            return step
        return None

    def steps(self) -> list[int]:
        """After which a whole checkpoint was saved, in order."""
        names = (NAME.fullmatch(name) for name in os.listdir(self._folder))
        return sorted(int(name[1]) for name in names if name is not None)

    def _name(self, unfinished: Path, step: int) -> None:
        if not self._first:
            return
        os.replace(unfinished, self._folder / f"step-{step:08}")
        for old in self.steps()[: -self._keep]:
            leaving = self._folder / f".unfinished-{old:08}"
            os.replace(self._folder / f"step-{old:08}", leaving)
            shutil.rmtree(leaving)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)  # the names outlive a power failure
        os.close(folder)
