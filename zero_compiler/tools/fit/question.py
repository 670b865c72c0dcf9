"""What is asked, and the answer in words."""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...cost import hardware
from ...errors import ConfigError, ZeroError
from ...report.verdict import amount
from ..fitting_plan import Asked
from ..limits import MOST_RANKS
from ..model_source import ModelSource, model_source
from ..planning import Say
from . import search as found_by
from .estimate import LAYERS, WHOLE, Estimate, Estimator
from .search import OutOfTime, Search, words
from .settings import REMADE, Setting, settings

_UNKNOWN = re.compile(r"(?<=[=(,\s])\?(?=\s*[,)])")
_CLASSES = {
    "adamw": "AdamW",
    "adam": "Adam",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "sgd-momentum": "SGD",
    "sgd": "SGD",
}
_MOST = 1 << 20  # of a value that is looked for


@dataclass(frozen=True)
class Question:
    """A question to ``zero-compiler fit``.

    Args:
        model: as the command line names it; one argument may be ``?``, whose largest value is looked for.
        world: ranks; None: how many does it take?
        batch, sequence: rows and tokens; None, of rows: which suits best?
        global_batch: rows of a step on all ranks, or None: as many as one call of each rank takes.
        seconds: to look for an answer; None: as many as it takes.
    """

    model: str
    fields: Mapping[str, object]
    world: int | None = None
    batch: int | None = None
    sequence: int | None = None
    device: str = "cpu"
    replicas: int = 1
    global_batch: int | None = None
    seconds: float | None = None

    def check(self) -> None:
        """Before anything takes long.

        Raises:
            ConfigError: it cannot be answered.
        """
        count = len(_UNKNOWN.findall(self.model))
        if count > 1:
            raise ConfigError(
                f"MODEL {self.model!r} has {count} arguments that are '?'; one can be looked for: give the others"
            )
        if "?" in self.model and not count:
            raise ConfigError(
                f"MODEL {self.model!r}: '?' stands for the value of an argument, as in my:make(layers=?)"
            )
        if count and self.world is None:
            raise ConfigError(
                f"MODEL {self.model!r} asks for the largest model that fits: say on how many ranks, --world"
            )
        if self.fields.get("memory_budget_bytes") is None and self.machine.plannable_bytes is None:
            raise ConfigError(
                f"hardware {self.machine.name!r} does not say how many bytes its device has, so that anything fits; "
                "give --memory-budget-bytes, or memory_bytes in its file"
            )
        if self.world is not None and self.world % self.replicas:
            raise ConfigError(
                f"--replicas {self.replicas:,} must divide --world {self.world:,}; give a number that does"
            )
        if self.global_batch is not None and self.world is not None:
            of = self.world * (self.batch or 1)
            if self.global_batch % of:
                raise ConfigError(
                    f"--global-batch {self.global_batch:,} must be a multiple of the {of:,} rows that "
                    f"{self.world:,} ranks take at once; give one that is"
                )

    @property
    def machine(self) -> hardware.HardwareSpec:
        named = self.fields.get("hardware")
        return hardware.load(None if named is None else str(named))

    @property
    def room_bytes(self) -> int | None:
        """Of the device, for a plan."""
        given, room = self.fields.get("memory_budget_bytes"), self.machine.plannable_bytes
        if given is None:
            return room
        return int(str(given)) if room is None else min(room, int(str(given)))

    def source(self, value: int | None = None) -> ModelSource:
        """The model, with the argument that is looked for."""
        text = self.model if value is None else _UNKNOWN.sub(str(value), self.model)
        return model_source(text, self.batch, self.sequence)

    def asked(self, source: ModelSource, world: int) -> Asked:
        fields = {k: v for k, v in self.fields.items() if k != "memory_budget_bytes"}
        return Asked(source, world, self.device, fields, source.batch, self.replicas)


@dataclass
class Answer:
    """What was found; see :meth:`text`."""

    question: Question
    search: Search | None = None
    value: int | None = None  # of what was looked for
    world: int | None = None  # that it takes, where nobody said
    seconds: float = 0.0
    ended: str = ""
    source: ModelSource | None = None

    @property
    def fits(self) -> bool:
        return self.search is not None and bool(self.search.pool)

    @property
    def known(self) -> bool:
        """Whether the search came to an end, or has found something by then."""
        return self.fits or not self.ended

    # Long: the lines of the answer, in their order.
    def text(self) -> str:
        """All of it."""
        found, question = self.search, self.question
        if found is None:
            return f"no answer yet: {self.ended or 'nothing was found'}"
        room = amount(found.room_bytes) if found.room_bytes is not None else "all"
        lines = [
            f"model: {self.source.about.partition(';')[0] if self.source else question.model}",
            f"machine: {question.machine.name}, {room} of a device to plan with, {self.ranks:,} ranks"
            + (" (the fewest that were found to do)" if self.world is not None else ""),
        ]
        if self.value is not None:
            lines.append(f"the largest that fits: {_UNKNOWN.sub(str(self.value), question.model)}")
        lines.append(
            f"{found.weighed:,} settings weighed, {found.fitting:,} fit by a sketch; {found.plans} plans made in "
            f"{self.seconds:,.0f} s" + (f"; {self.ended}" if self.ended else "")
        )
        if not self.fits:
            return "\n".join([*lines, self._nothing()])
        if found.largest is not None:
            lines.append(
                f"most rows a rank that fit, by a sketch and of powers of two: {found.largest.setting.batch:,} "
                f"({words(found.largest.setting)})"
            )
        lines += ["", *self._table()]
        best = found.best
        if best is None:
            lines += [
                "",
                "none of these was planned with all layers in that time: give --seconds more of it",
            ]
            best = min(found.front, key=lambda e: (e.how != LAYERS, *found_by.rank(e)))
            if best.setting.activations == REMADE and best.setting.activation_budget_bytes is None:
                # How much is made again, the compiler then finds out.
                best = replace(best, setting=replace(best.setting, memory_budget_bytes=found.room_bytes))
        lines += ["", f"best: {words(best.setting)} ({_known(best, found)})"]
        if best.report is not None:
            lines += [f"  {line}" for line in best.report.step.lines()]
        lines += ["to see its plan:", f"  {self.command(best.setting)}", "to train so:"]
        lines += [f"  {line}" for line in self.code(best.setting)]
        lines += [f"not taken: {line}" for line in found.refused]
        return "\n".join(lines)

    @property
    def ranks(self) -> int:
        return self.world or self.question.world or 1

    def _table(self) -> list[str]:
        assert self.search is not None
        rows: list[tuple[str, ...]] = [
            ("", f"us a {self._unit()}", "ms a step", "device", "host", "files", "known from", "setting")
        ]
        for e in self.search.front:
            far = [amount(e.nbytes.get(tier, 0)) if e.nbytes.get(tier) else "" for tier in ("host", "nvme")]
            mark = "*" if e is self.search.best else ""
            rows.append(
                (
                    mark,
                    f"{e.us_each:.3g}",
                    f"{e.us / 1e3:,.1f}",
                    amount(e.nbytes["device"]),
                    *far,
                    _known(e, self.search),
                    words(e.setting),
                )
            )
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True) if w).rstrip() for row in rows]

    def _unit(self) -> str:
        assert self.search is not None
        return next((e.unit for e in self.search.front if e.unit), "rows").removesuffix("s")

    def _nothing(self) -> str:
        assert self.search is not None
        if not self.known:
            return f"no answer yet: {self.ended}; give more time, --seconds"
        near = self.search.nearest
        what = "nothing that was weighed fits"
        if near is None:
            return f"{what}; give other options"
        device, room = near.nbytes["device"], self.search.room_bytes or 0
        take = f"takes {amount(device)} of {amount(room)} on the device"
        if device <= room:
            take = "takes more than there is on another tier"
        return f"{what}: the nearest, {words(near.setting)}, {take}; give more ranks, or another machine"

    def command(self, setting: Setting) -> str:
        """The line that shows its plan."""
        question = self.question
        model = question.model if self.value is None else _UNKNOWN.sub(str(self.value), question.model)
        given = {k: v for k, v in question.fields.items() if k not in ("hardware", "memory_budget_bytes")}
        change = setting.change(given)
        if setting.batch is None or (self.source is not None and self.source.batch is None):
            change = replace(change, batch=None)
        named = question.fields.get("hardware")
        flags = [f"--hardware {named}"] if named is not None else []
        flags += [change.flags()]
        flags += [f"--{k.replace('_', '-')} {v}" for k, v in given.items()]
        flags += [f"--sequence {question.sequence}"] if question.sequence is not None else []
        flags += [f"--device {question.device}"] if question.device != "cpu" else []
        if question.replicas > 1 and "--replicas" not in change.flags():
            flags.append(f"--replicas {question.replicas}")
        return f"zero-compiler plan {_quoted(model)} {' '.join(flags)} --brief"

    def code(self, setting: Setting) -> list[str]:
        """Lines of a training script."""
        given = {k: v for k, v in self.question.fields.items() if k != "memory_budget_bytes"}
        fields = {**given, **setting.fields()}
        told = ", ".join(f"{k}={v!r}" for k, v in fields.items())
        lines = []
        if setting.replicas > 1:
            lines.append(
                f'mesh = init_device_mesh("{self.question.device}", ({setting.replicas}, {setting.ranks}), '
                'mesh_dim_names=("replicate", "shard"))'
            )
            told = f"mesh=mesh, {told}"
        lines.append(f"model = zero.shard(model, {told})")
        lines.append('model = torch.compile(model, backend="zero")')
        kind = _CLASSES[str(given.get("optimizer", "adamw"))]
        if setting.tiers:
            lines.append(f"opt = zero.optimizer(torch.optim.{kind}, model)")
        else:
            lines.append(f"opt = torch.optim.{kind}(model.parameters())")
        if setting.micro_batches > 1:
            lines.append(
                f"# {setting.micro_batches} micro-batches a step, all but the last under zero.no_sync(model)"
            )
        return lines


def _known(estimate: Estimate, found: Search) -> str:
    if estimate.how == WHOLE:
        return "whole plan"
    return f"1 and 2 of {found.layers} layers" if estimate.how == LAYERS else "sketch"


def _quoted(text: str) -> str:
    """For a shell, readable: in double quotes where it has single ones."""
    readable = "'" in text and not re.search(r'["$`\\!]', text)
    return f'"{text}"' if readable else shlex.quote(text)


def answer(question: Question, say: Say) -> Answer:
    """Look for one. Ctrl-C, and the end of the time, leave the best that was found so far.

    Raises:
        ZeroError: what is asked cannot be planned.
    """
    question.check()
    out, begin = Answer(question), time.monotonic()
    try:
        with found_by.within(question.seconds):
            _look(question, out, say)
    except KeyboardInterrupt:
        out.ended = "interrupted"
    except OutOfTime:
        out.ended = f"{question.seconds:,.0f} s were over"
    out.seconds = time.monotonic() - begin
    return out


def _look(question: Question, out: Answer, say: Say) -> None:
    if _UNKNOWN.search(question.model):
        _look_for_value(question, out, say)
        return
    say(f"building {question.model}")
    source = out.source = question.source()
    any_batch = source.batch is not None and question.batch is None
    world, estimator = question.world, None
    if world is None:
        say("looking for the fewest ranks")
        world, estimator = found_by.least_world(
            question.asked(source, 1), any_batch, question.room_bytes, say
        )
        world = out.world = world or MOST_RANKS
    while True:
        asked = question.asked(source, world)
        out.search = Search(asked, question.room_bytes)
        if estimator is not None:
            estimator.asked = asked
        found_by.search(asked, question.global_batch, any_batch, out.search, say, estimator)
        if out.fits or question.world is not None or world * 2 > MOST_RANKS:
            return
        world = out.world = world * 2  # a sketch was wrong


def _look_for_value(question: Question, out: Answer, say: Say) -> None:
    """The largest value of which a setting fits by its sketch, and a search with that."""
    assert question.world is not None
    known: dict[object, list[object]] = {}

    def tried(value: int) -> bool:
        say(f"trying {_UNKNOWN.sub(str(value), question.model)}")
        source = question.source(value)
        any_batch = False  # one row is what a largest model has room for
        asked = question.asked(source, question.world or 1)
        estimator = Estimator(asked, any_batch, lambda line: None, known)  # type: ignore[arg-type]
        room, spec = question.room_bytes, estimator.spec
        return any(
            estimator.sketch(s).fits(spec, room)
            for s in settings(asked, asked.world, question.global_batch, any_batch)
            if s.replicas == question.replicas
        )

    low, high = 0, 1
    while high <= _MOST and _is_tried(tried, high, low):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if _is_tried(tried, middle, low) else (low, middle)
    if not low:
        out.source, out.value = question.source(1), None
        out.search = Search(question.asked(out.source, question.world), question.room_bytes)
        found_by.fits(
            out.search.asked,
            question.global_batch,
            False,
            out.search,
            Estimator(out.search.asked, False, say, known),  # type: ignore[arg-type]
        )
        return
    while low:
        out.value, out.source = low, question.source(low)
        asked = question.asked(out.source, question.world)
        out.search = Search(asked, question.room_bytes)
        estimator = Estimator(asked, False, say, known)  # type: ignore[arg-type]
        found_by.search(asked, question.global_batch, False, out.search, say, estimator)
        if out.fits:
            return
        low -= max(1, low // 32)


def _is_tried(tried: Callable[[int], bool], value: int, least: int) -> bool:
    """Whether a value fits; one that the model does not take, where smaller ones do, does not."""
    if not least:
        return tried(value)
    with contextlib.suppress(ZeroError):
        return tried(value)
    return False
