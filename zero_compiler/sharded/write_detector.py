"""Copies that eager code is given as the weights of a forward: what is written to one would be lost with it.

Code that has words which write is given copies of a class that does the same to the shards. What is written otherwise
is found by torch's counters of writes, and where nothing counts it (``.data``, memory that is shared with NumPy), by
the values: when the call that has read a weight ends, this rank's rows of the copy must be what the shard holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..errors import ShardError
from ..layout import Layout
from ..quantised_blocks import round_trip
from ..tensors import transforms
from ..tensors.dispatch_modes import unseen
from ..tensors.row_writes import IN_PLACE, OPERATORS_IN_PLACE, rows_of, write_rows
from . import parameter_errors

_NOTE = "_zero_copy"  # of a copy, and of what its .data is: which parameter it is one of
_AGAIN = "_zero_writes_made_again"  # attribute of a parameter: from which version to which
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@functools.cache
def may_write(cls: type) -> bool:
    """Whether the code of a class of modules, or a function that it uses, has words that write to tensors in place.

    Only for models with such classes do weights say what is written to them: by a class of tensors of their own, which
    what compiles or fakes a function does not take for a plain tensor where it is given one.
    """
    for base in cls.__mro__:
        if base is torch.nn.Module:
            return False
        if not _of_torch(base) and any(code_may_write(member) for member in vars(base).values()):
            return True
    return False


def own_code_may_write(module: torch.nn.Module) -> bool:
    """:func:`may_write` of what an instance has beside its class: hooks of its forward, functions as attributes, and
    objects as attributes of which its class calls methods."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    cls: type = type(module)
    names = _names_of_class(cls)
    return any(code_may_write(code, names) for code in (*hooks, *vars(module).values()))


def code_may_write(code: object, names: frozenset[str] = frozenset()) -> bool:
    """Whether a function, or what is made of functions, writes to tensors in place, itself or in a function that it
    knows by name, other than torch's.

    Args:
        names: which attributes of it are asked for, where it is a class or an object.
    """
    seen: set[types.FunctionType] = set()
    left = list(_functions(code, names))
    while left:
        fn = left.pop()
        if fn in seen or _of_torch(fn):
            continue
        seen.add(fn)
        names = _names(fn.__code__)
        if "data" in names or not IN_PLACE.isdisjoint(names):
            return True
        for value in _known_by(fn, names):
            left += _functions(value, names)
    return False


def _of_torch(code: object) -> bool:
    return (getattr(code, "__module__", None) or "").partition(".")[0] == "torch"


def _functions(code: object, names: frozenset[str]) -> Iterator[types.FunctionType]:
    """The functions that a member of a class, an attribute or a hook consists of; of a class or an object, those of
    ``names``."""
    if isinstance(code, types.FunctionType):
        yield code
        yield from _functions(getattr(code, "__wrapped__", None), names)
    elif isinstance(code, property):
        yield from (part for get in (code.fget, code.fset) for part in _functions(get, names))
    elif isinstance(code, (staticmethod, classmethod, types.MethodType)):
        yield from _functions(code.__func__, names)
    elif isinstance(code, (functools.partial, functools.cached_property)):
        yield from _functions(code.func, names)
    elif isinstance(code, (list, tuple, dict)):
        members = dict.values(code) if isinstance(code, dict) else code  # a subclass may raise
        flat = (member for member in members if not isinstance(member, (list, tuple, dict)))
        yield from (part for member in flat for part in _functions(member, names))
    elif not isinstance(code, torch.nn.Module):
        cls, asked = (code, names) if isinstance(code, type) else (type(code), names | {"__call__"})
        members = [
            vars(base)[n] for base in cls.__mro__ for n in asked & vars(base).keys() if not _of_torch(base)
        ]
        methods = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
        yield from (part for m in members if isinstance(m, methods) for part in _functions(m, names))


@functools.cache
def _names_of_class(cls: type) -> frozenset[str]:
    """What the code of a class of modules names."""
    members = [member for base in cls.__mro__ if not _of_torch(base) for member in vars(base).values()]
    functions = (fn for member in members for fn in _functions(member, frozenset()))
    return frozenset().union(*(_names(fn.__code__) for fn in functions))


def _names(code: types.CodeType) -> frozenset[str]:
    """Names of a function's code, and of the functions that are written inside of it."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _known_by(fn: types.FunctionType, names: frozenset[str]) -> Iterator[object]:
    """What stands for ``names`` where ``fn`` looks for them: in its module, in modules that it imports, around it, and
    in the defaults of its arguments."""
    for name in names & fn.__globals__.keys():
        value = fn.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield value
        elif value.__name__.partition(".")[0] != "torch":
            yield from (vars(value)[n] for n in names & vars(value).keys())
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # one that is empty yet
            yield cell.cell_contents
    yield from (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())


def only_written_again(param: DTensor, version: int) -> bool:
    """Whether all that was written to ``param`` since it was of ``version`` are writes of its forward, which a
    checkpoint has made again in backward."""
    begin, end = param.__dict__.get(_AGAIN, (0, -1))
    return begin <= version and end == param._version


class Copies:
    """Those of one forward. Elementwise writes to one are done to the shard too; others are found by torch's counters
    of writes, and by comparing values."""

    def __init__(self) -> None:
        self._counted: list[_CountedCopy] = []
        self._given: dict[int, _GivenCopy] = {}  # by id of the copy, which lives until it is compared
        self._changed: list[tuple[str, torch.Tensor]] = []

    def add(
        self, info: Any, param: Any, full: torch.Tensor, rank: int, heard: bool, wire: torch.dtype | None
    ) -> None:
        """The forward is given ``full`` as the weight of ``param``, on ``rank``.

        Args:
            heard: elementwise writes to it are done to the shard, see :func:`may_write`.
            wire: of 8 bits, that it has travelled in; None: it was cast alone.
        """
        if full.is_meta or isinstance(full, FakeTensor):
            return
        if info.part is None:
            self._given[id(full)] = _GivenCopy(info.name, param, param._version, info.layout, rank, wire)
        if full.is_inference():
            return
        # Where it is the parameter itself, what is written to it stays, but for another tensor in its place.
        itself = full.untyped_storage()._cdata == param._local_tensor.untyped_storage()._cdata
        exact = wire is None and param.dtype == full.dtype
        copy = _Copy(info.name, param, info.layout, rank, weakref.ref(self), itself, exact, full.grad_fn)
        with unseen():
            copy.count(full)
        if heard and info.part is None and full.__class__ in (torch.Tensor, torch.nn.Parameter):
            full.__class__ = _heard(full.__class__)
            full.__dict__[_NOTE] = copy

    @torch._dynamo.disable(reason="a call that has read weights eagerly ends")
    def compare(self, fulls: Iterable[torch.Tensor]) -> None:
        """The call that has read these copies ends, and nobody keeps them from here on."""
        for full in fulls:
            given = self._given.pop(id(full), None)
            if given is not None and (changed := given.changed(full)) is not None:
                self._changed.append((given.name, changed))

    @torch._dynamo.disable(reason="a forward that runs in parts has ended")
    def check(self) -> None:
        """At the end of the forward.

        Raises:
            ShardError: naming the first parameter that was written to otherwise. Nothing is sent: no rank need meet
                another one behind a forward.
        """
        with unseen():
            if self._changed and bool(torch.stack([changed for _, changed in self._changed]).any()):
                raise ShardError(parameter_errors.written(next(name for name, lost in self._changed if lost)))
        for counted in self._counted:
            if counted.counter._version != counted.writes:
                raise ShardError(parameter_errors.written(counted.name))


@dataclass
class _CountedCopy:
    """``counter`` counts with a copy, or with what its ``.data`` is, and keeps none of its memory; ``writes`` of those
    were there at first, or have been done to the shard too."""

    name: str
    counter: torch.Tensor
    writes: int


@dataclass
class _GivenCopy:
    """Of which parameter a copy is, and the version of that when the copy was made."""

    name: str
    param: DTensor
    version: int
    layout: Layout
    rank: int
    wire: torch.dtype | None

    def changed(self, full: torch.Tensor) -> torch.Tensor | None:
        """Whether this rank's rows of ``full`` are other than those of the shard, as a tensor: on an accelerator nobody
        waits for it here. None where the copy is the shard itself, or the shard was written to as well."""
        local, layout = self.param._local_tensor, self.layout
        if self.param._version != self.version:
            return None
        if full.untyped_storage()._cdata == local.untyped_storage()._cdata:
            return None
        with unseen(), transforms.below(), torch.no_grad():
            if full.shape != layout.shape:
                return torch.ones((), dtype=torch.bool, device=full.device)
            rows = full.detach()
            if layout.sharded:
                rows = rows[layout.start(self.rank) : layout.start(self.rank) + layout.rows(self.rank)]
            at_rest = local.detach().to(full.device)
            if self.wire is None:
                at_rest = at_rest.to(full.dtype)
            else:
                at_rest = round_trip(at_rest, self.wire, full.dtype)
            return _bits(rows).ne(_bits(at_rest)).any()


def _bits(values: torch.Tensor) -> torch.Tensor:
    """``values`` as integers, which are equal where not a number is."""
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_INTEGERS[values.element_size()])


@dataclass
class _Copy:
    """One copy: of which parameter, how that lies, whether it has the precision of that (``exact``), and the node of
    autograd that made the copy, which knows of which version of the parameter it is."""

    name: str
    param: DTensor
    layout: Layout
    rank: int
    copies: weakref.ref[Copies]
    itself: bool
    exact: bool
    made_by: Any
    counted: _CountedCopy | None = None

    def count(self, full: torch.Tensor) -> None:
        """From here on watch what is written to ``full``."""
        if self.itself:
            return
        counter = full.detach()
        counter.data = full.new_empty(0)
        self.counted = _CountedCopy(self.name, counter, counter._version)
        if (copies := self.copies()) is not None:
            copies._counted.append(self.counted)

    def of_data(self, data: torch.Tensor) -> torch.Tensor:
        """What ``.data`` gives: a tensor that counts its writes apart."""
        again = dataclasses.replace(self, counted=None)
        again.count(data)
        data.__class__ = _heard(data.__class__)
        data.__dict__[_NOTE] = again
        return data

    def write(
        self, method: str, args: object, kwargs: object, uncounted: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """``method`` was called on the copy: do the same to the shard.

        Args:
            uncounted: of what shares its counter of writes with these tensors none is counted.
        """

        def write(rows: torch.Tensor) -> None:
            ours, named = pytree.tree_map(
                lambda value: rows_of(value, self.layout, self.rank, rows.device), (args, kwargs)
            )
            getattr(rows, method)(*ours, **named)

        with self.told(), torch.autograd._unsafe_preserve_version_counter(uncounted):
            write_rows(self.param, write)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """The parameter is written to, and the copy as well: who made that knows that it is of this version."""
        before = self.param._version
        yield
        after = self.param._version
        if torch._C._current_graph_task_id() != -1:
            begin, end = self.param.__dict__.get(_AGAIN, (before, before))
            self.param.__dict__[_AGAIN] = (begin if end == before else before, after)
        elif self.made_by is not None and self.made_by.version == before:
            self.made_by.version = after

    def wrote(self) -> None:
        """What has been written until now is in the shard as well."""
        if self.counted is not None:
            self.counted.writes = self.counted.counter._version


@functools.cache
def _heard(base: type) -> type:
    """A class of tensors that say what is written to them: ``base``, which is that of a plain tensor or parameter."""
    body: dict[str, Any] = {"__torch_function__": torch._C._disabled_torch_function_impl, "__slots__": []}
    for name in (*IN_PLACE, *OPERATORS_IN_PLACE):
        body[name] = _writing(base, name)
    data: Any = torch.Tensor.data

    # Never a frame that Dynamo compiles, and none that it follows: to that, .data of such a tensor is this property.
    @torch._dynamo.disable(reason="a weight is written to between compiled frames")
    def get_data(self: torch.Tensor) -> torch.Tensor:
        # Dynamo of torch 2.14 takes torch.Tensor.data.__get__ for this property, which it would enter without an end.
        taken: torch.Tensor = torch._C._autograd._get_data_attr(self)  # type: ignore[attr-defined]
        copy = self.__dict__.get(_NOTE)
        return taken if copy is None else copy.of_data(taken)

    @torch._dynamo.disable(reason="a weight is written to between compiled frames")
    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        copy = self.__dict__.get(_NOTE)
        if copy is not None and value.shape != self.shape:
            raise ShardError(parameter_errors.written(copy.name))
        data.__set__(self, value)
        if copy is not None and copy.exact and copy.param.dtype == value.dtype:  # else see `_writing`
            copy.write("copy_", (value,), {}, (self,))
            copy.count(self)

    def detach(self: torch.Tensor) -> torch.Tensor:
        taken: torch.Tensor = base.detach(self)  # type: ignore[attr-defined]
        # nn.Parameter(w) asks for one of the same class; everybody else gets the plain tensor that torch gives.
        if sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            taken.__class__ = type(self)
            if _NOTE in self.__dict__:
                taken.__dict__[_NOTE] = self.__dict__[_NOTE]  # the two count their writes together
        return taken

    body |= {"data": property(get_data, set_data), "detach": detach}
    made: type = type(base.__name__, (base,), body)
    made.__module__, made.__qualname__ = base.__module__, base.__qualname__
    return made


def _writing(base: type, name: str) -> Callable[..., object]:
    method: Any = getattr(base, name)

    @torch._dynamo.disable(reason="a weight is written to between compiled frames")
    @functools.wraps(method)
    def call(self: torch.Tensor, *args: object, **kwargs: object) -> Callable[..., object]:
        copy = self.__dict__.get(_NOTE)
        # Of what autograd is to follow, plain PyTorch would refuse it: such a write is counted, and refused.
        # What is copied from a tensor has the precision of the copy, which may be less than the shard's.
        rounded = name == "copy_" and copy is not None and not copy.exact
        if copy is None or rounded or (self.requires_grad and torch.is_grad_enabled()):
            return method(self, *args, **kwargs)
        if copy.itself:
            with copy.told():
                return method(self, *args, **kwargs)
        copy.write(name, args, kwargs)  # first: an operand may be the copy itself
        out = method(self, *args, **kwargs)
        copy.wrote()
        return out

    return call
