"""Discrete-event simulation of a Program: when each instruction would run, and what bounds the step.

The host walks the instructions in order. A start puts a transfer on its lane, which serves one at a time in
order; a wait blocks the host until the transfer is done. Lanes that share a core or a disk (``HardwareSpec.shared``)
slow each other down: each of ``k`` that are busy runs at ``1/k`` of its speed. Files have a lane of reads and one of
writes, as the engine has: those of one kind begin in order, and while both wait they take turns on the disk.

An optimizer that streams its states goes through them in turns (`streaming.py`), each of which is read,
computed and written back on the same lanes: behind backward, or in it, as soon as gradients are final.

Around the Program stands what Python does for each parameter: local rows go in before a forward, gradients become
``.grad`` after a backward. Where compute shares cores with transfers it is the CPU that computes, and this adds to the
step; an accelerator computes meanwhile, and the step is longer only where Python takes longer than all of that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ..ir.instructions import Instruction, Step, Transfer
from ..ir.program import Program, last_reads
from ..ir.transfers import KeepDesc, ReduceDesc, copy_of, file_of, gradient_of, start_of, wait_for
from ..storage.double_buffer import BUFFERS, Turns
from ..storage.writeback_buffers import write_buffers
from .hardware import HardwareSpec
from .lane_simulator import LaneSimulator, Task, share_cores
from .timeline import HOST, LINK, READ, WRITE, Timeline
from .transfer_costs import transfer_us, transfers, work_us


@dataclass(frozen=True)
class UpdateTurn:
    """What an optimizer updates at once: a unit of it (`updates.py`).

    Args:
        names: owner and name of the parameters; all of their gradients must be there.
        us: time of the update itself.
        read_bytes, written_bytes: of files, through a buffer.
        copied_bytes: of states on an accelerator's host, which are copied to it and back.
        filed: of ``names``, those whose gradients go to files first.
    """

    label: str
    names: frozenset[tuple[str, str]]
    us: float
    read_bytes: int = 0
    written_bytes: int = 0
    copied_bytes: int = 0
    filed: frozenset[tuple[str, str]] = frozenset()

    @property
    def buffered(self) -> bool:
        """Whether it needs a buffer."""
        return bool(self.read_bytes or self.written_bytes)


def simulate(
    program: Program,
    spec: HardwareSpec,
    world: int,
    fetches: bool = True,
    checksums: bool = False,
    params: int | None = None,
    turns: Sequence[UpdateTurn] = (),
    files_budget: int | None = None,
) -> Timeline:
    """Timeline of one run of ``program`` on ``world`` ranks of a machine.

    Args:
        fetches: whether chunks at rest on other tiers take time to come.
        checksums: whether the host sums up what is read from files and written to them (``Config.nvme_checksums``).
        params: number of parameters that the frame takes; None: the Program alone, without Python around it.
        turns: of an optimizer, which begin as soon as nothing of the Program reads their weights, and at its end. The
            gradients that it reduces for them go nowhere else.
        files_budget: the memory budget, if any, of which the buffers of gradients on their way to files are a part.

    Raises:
        ConfigError: the spec lacks a collective that the Program uses.
    """
    execution = _Execution(program, spec, world, fetches, checksums, turns, files_budget)
    python_us = 0.0 if params is None else _python_us(program, spec, params)
    if program.phase != "backward":
        execution.lanes.python(python_us)
    begin = execution.lanes.now
    reached = execution.run()
    if program.phase == "backward":
        execution.lanes.python(python_us)
    execution.end()
    lanes = execution.lanes
    total_us = max(lanes.now, python_us)
    exposed_us = python_us if share_cores(spec) else total_us - lanes.now
    return Timeline(
        total_us,
        lanes.stalled,
        lanes.spans,
        reached,
        lanes.slowed,
        exposed_us,
        execution.away_us(),
        begin,
        lanes.noted,
    )


class _Execution:
    """One run of a Program, instruction by instruction, on simulated lanes."""

    def __init__(
        self,
        program: Program,
        spec: HardwareSpec,
        world: int,
        fetches: bool,
        checksums: bool,
        turns: Sequence[UpdateTurn],
        files_budget: int | None,
    ) -> None:
        self.lanes = LaneSimulator(spec)
        self._program, self._spec, self._fetches = program, spec, fetches
        self._updates = _Updates(turns, program)
        self._files = _FileWork(self.lanes, program, spec, checksums, self._updates.taken, files_budget)
        self._stream = _SimulatedStream(self.lanes, self._files, spec)
        self._link_costs = dict(zip(("gathers", "reduces"), transfers(program, spec, world), strict=True))
        self._tasks: dict[Step, Task | None] = {}  # that were started; None: nothing moves
        self._moved: list[tuple[str, Task]] = []
        self._summed_us = {o.name: 0.0 for o in program.offloads}

    def run(self) -> list[float]:
        """When the host is done with each instruction."""
        reached = []
        for at, instr in enumerate(self._program.instrs):
            self._perform(at, instr)
            reached.append(self.lanes.now)
        return reached

    def end(self) -> None:
        """Updates that nothing has let begin so far, and whatever is still under way."""
        for turn in self._updates.left:
            self._stream.feed(turn)
        self._stream.drain()
        self.lanes.drain()

    def away_us(self) -> dict[str, float]:
        """By how much the step takes longer for each tensor that waits on another tier."""
        out = dict(self._summed_us)
        for name, task in self._moved:
            out[name] += task.stalled_us + task.slowed_us
        return out

    def _perform(self, at: int, instr: Instruction) -> None:
        program = self._program
        if (ended := instr.ends(program)) is not None:
            self.lanes.wait(self._tasks[ended])
            self._summed(ended, self._files.check(self._tasks[ended]))
        if (work := instr.work(program)) is not None:
            self.lanes.compute(work.label, work_us(work, self._spec))
        if (transfer := instr.transfer(program)) is not None:
            self._start(transfer)
        if instr.effects.completes:
            self._land(at, program.reduces[instr.index])

    def _start(self, transfer: Transfer) -> None:
        table, index, _ = step = transfer.step
        if transfer.lane == LINK:
            us, nbytes = self._link_costs[table][index]
        else:
            from_rest = table == "gathers"
            us = transfer_us(transfer, self._spec) if self._fetches or not from_rest else 0.0
            nbytes = transfer.nbytes
        if transfer.lane == WRITE:
            self._summed(step, self._files.sum_up(transfer.label, nbytes))
        self._tasks[step] = task = self.lanes.start(transfer.lane, transfer.label, us, nbytes)
        if table == "offloads" and task is not None:
            self._moved.append((self._program.offloads[index].name, task))

    def _summed(self, step: Step, us: float) -> None:
        """The host has summed up bytes of a transfer for so long."""
        if step.table == "offloads":
            self._summed_us[self._program.offloads[step.which].name] += us

    def _land(self, at: int, r: ReduceDesc) -> None:
        if r.tiers[-1:] == ("nvme",):
            self._files.land(r)
        for turn in self._updates.ready_after(r, at):
            self._stream.feed(turn)
            self._stream.admit()


def _python_us(program: Program, spec: HardwareSpec, params: int) -> float:
    """Time of the host around a phase of a frame with ``params`` parameters; a backward's counts by its gradients."""
    if program.phase != "backward":
        return spec.forward_python.us(params)
    descs: list[ReduceDesc | KeepDesc] = [*program.reduces, *program.keeps]
    made = {(d.owner, name) for d in descs for name in d.names}
    return spec.backward_python.us(len(made))


class _FileWork:
    """What the host does itself for transfers of files: sums of bytes, and gradients that go by way of buffers.

    Of a gradient that is not made in a block that can be written, each part is copied to one
    (`writeback_buffers.py`). Only so much is under way at a time, so a disk that is slower than backward
    makes gradients holds it up.
    """

    def __init__(
        self,
        sim: LaneSimulator,
        program: Program,
        spec: HardwareSpec,
        checksums: bool,
        taken: Collection[tuple[str, str]],
        budget: int | None,
    ) -> None:
        self._sim, self._spec, self._checksums, self._taken = sim, spec, checksums, taken
        nbytes: dict[tuple[str, str], int] = {}  # of each gradient: one in tiles lands in parts
        for r in program.reduces:
            for name, part in self._results(r) if r.tiers[-1:] == ("nvme",) else ():
                nbytes[r.owner, name] = nbytes.get((r.owner, name), 0) + part
        largest: dict[str, int] = {}
        for (owner, _), size in nbytes.items():
            largest[owner] = max(largest.get(owner, 0), size)
        self._buffers = {owner: write_buffers(size, budget) for owner, size in largest.items()}
        self._writing: dict[str, deque[Task]] = {owner: deque() for owner in largest}

    def sum_up(self, label: str, nbytes: int) -> float:
        """How long the host computes for it."""
        if not self._checksums or not nbytes:
            return 0.0
        us = nbytes / self._spec.checksum_bytes_per_us
        self._sim.compute(f"checksums of the {label}", us)
        return us

    def check(self, task: Task | None) -> float:
        """The same of what was read, which is compared with the sums of what was written."""
        if task is None or task.lane != READ:
            return 0.0
        return self.sum_up(task.label, task.nbytes)

    def land(self, r: ReduceDesc) -> None:
        """A reduction whose results go to files has been waited for."""
        results = self._results(r)
        if not results:
            return
        sim, writing, (size, count) = self._sim, self._writing[r.owner], self._buffers[r.owner]
        link = self._spec.nvme_write
        first = True
        for name, nbytes in results:
            begin, label = sim.now, file_of(gradient_of(name))
            direct = name in r.direct and nbytes <= size * count
            copied = not r.copied and not direct
            for at in range(0, nbytes, size):
                part = min(size, nbytes - at)
                while len(writing) >= count or (writing and writing[0].done):
                    sim.wait(writing.popleft())
                if copied:  # what comes from a device is copied on its host, while the device computes
                    sim.compute(
                        f"buffer of the {gradient_of(name)}", 2 * part / self._spec.memory_bytes_per_us
                    )
                self.sum_up(label, part)
                # The requests of one landing are in the engine's queue together: it begins but once.
                us = link.us(part) if first else part / link.bytes_per_us
                task = sim.start(WRITE, label, us, part)
                if task is not None:
                    writing.append(task)
                first = False
            sim.note(start_of(label), begin)

    def _results(self, r: ReduceDesc) -> list[tuple[str, int]]:
        """Bytes of this rank's part of each result of a reduction, but for those that an update takes at once."""
        item = getattr(torch, r.out_dtype).itemsize
        return [
            (name, numel * item)
            for name, numel in zip(r.names, r.chunk_numels, strict=True)
            if (r.owner, name) not in self._taken
        ]


class _Updates:
    """Which turns of an optimizer may begin when, in one Program (see `overlap.py`)."""

    def __init__(self, turns: Sequence[UpdateTurn], program: Program) -> None:
        self._turns = turns
        self._missing = [set(turn.names) for turn in turns]  # gradients that are not final yet
        self._of: dict[tuple[str, str], list[int]] = {}
        for i, turn in enumerate(turns):
            for key in turn.names:
                self._of.setdefault(key, []).append(i)
        self._read = last_reads(program) if turns else {}
        self._filed = frozenset[tuple[str, str]]().union(*(turn.filed for turn in turns))

    @property
    def taken(self) -> Collection[tuple[str, str]]:
        """Gradients that go to an update, and nowhere else."""
        return self._of.keys() - self._filed

    @property
    def left(self) -> list[UpdateTurn]:
        """Those that nothing has let begin so far."""
        return [turn for turn, missing in zip(self._turns, self._missing, strict=True) if missing]

    def ready_after(self, r: ReduceDesc, at: int) -> list[UpdateTurn]:
        """Those that the reduction ``r`` was the last to hold up; it is waited for by instruction ``at``."""
        ready = []
        if r.tile is None or r.tile.last:
            final = [(r.owner, n) for n in r.names if self._read.get((r.owner, n), -1) < at]
            for i in sorted({i for key in final for i in self._of.get(key, ())}):
                if self._missing[i]:
                    self._missing[i].difference_update(final)
                    if not self._missing[i]:
                        ready.append(self._turns[i])
        return ready


@dataclass
class _Moving:
    """A turn with the transfer of it that is under way, if any."""

    sim: LaneSimulator
    turn: UpdateTurn
    task: Task | None

    def done(self) -> bool:
        return self.task is None or self.task.done

    def wait(self) -> None:
        if self.task is not None:
            begin = self.sim.now
            self.sim.wait(self.task)
            self.sim.note(wait_for(self.task.label), begin)


class _SimulatedStream(Turns[UpdateTurn, _Moving]):
    """What `zero_compiler/storage/streaming.py` does, with the time that it takes."""

    def __init__(self, sim: LaneSimulator, files: _FileWork, spec: HardwareSpec) -> None:
        super().__init__()
        self._sim, self._files, self._spec, self._free = sim, files, spec, BUFFERS

    def _has_buffer(self, job: UpdateTurn) -> bool:
        return not job.buffered or self._free > 0

    def _read(self, job: UpdateTurn) -> None:
        self._free -= job.buffered
        read = self._move(READ, file_of(job.label), job.read_bytes)
        self._reading.append(_Moving(self._sim, job, read))

    def _compute(self, turn: _Moving) -> None:
        job, files = turn.turn, self._files
        files.check(turn.task)
        copy, file = copy_of(job.label), file_of(job.label)
        self._sim.wait(self._move(HOST, copy, job.copied_bytes))
        self._sim.compute(job.label, job.us)
        self._sim.wait(self._move(HOST, copy, job.copied_bytes))
        files.sum_up(file, job.written_bytes)
        turn.task = self._move(WRITE, file, job.written_bytes)

    def _give_back(self, turn: _Moving) -> None:
        self._free += turn.turn.buffered

    def _move(self, lane: str, label: str, nbytes: int) -> Task | None:
        if not nbytes:
            return None
        if lane != HOST:
            self._sim.note(start_of(label), self._sim.now)
        read, write = self._spec.links("host" if lane == HOST else "nvme")
        return self._sim.start(lane, label, (write if lane == WRITE else read).us(nbytes), nbytes)
