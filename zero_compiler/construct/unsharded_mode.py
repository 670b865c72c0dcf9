"""Partitioned tensors that act as whole ones while a model is under construction.

A *partitioned* tensor is a DTensor of which this rank holds some rows. :class:`Openings` is a torch function mode: it
sees every torch function called under it, and where an argument is a partitioned one it lets the function work on
the full value, so that writes and reads mean what they mean on the full tensor. In between the full value is
*closed*: this rank's rows go back into the shard, the rest is freed. At most one stays open from one call to
the next, and those that a live view may still write to.

Two things must be the same on every rank: the random numbers drawn (the full tensor is written everywhere, so
they are) and the gathers issued. So what decides about a gather is the sequence of calls alone, and never
when a view happened to be collected.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..errors import ShardError
from ..layout import Layout, layout_of
from ..params.parameter_memory import KEY
from ..params.shard import SUCCESSOR, sharded_parameter
from ..ranks.group import Group
from ..sharded import blocking_transfers
from ..storage.stores import region_of


class PartitionedTensor:
    """This rank's rows of a tensor and, while it is open, its full value.

    Args:
        local: the rows, without padding (a prefix of a padded storage); the whole tensor where it is not partitioned.
        device: where the full value lives: that of the tensor in plain construction, whose generator is used.
        stride: strides of the full value.
        what: name for messages.
        filed: there is room for the rows in a file, on every rank, whether it has any or not.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        local: torch.Tensor,
        device: torch.device,
        stride: tuple[int, ...],
        what: str,
        filed: bool = False,
    ) -> None:
        self.group, self.layout, self.local = group, layout, local
        self.device, self.stride, self.what, self.filed = device, stride, what, filed
        self.full: torch.Tensor | None = None
        self.leaf: nn.Parameter | None = None  # full value as an autograd leaf

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()  # a tensor that is saved meanwhile is read back as a plain DTensor

    @property
    def whole(self) -> bool:
        """The rows at rest are the full value: nothing is ever gathered, freed or copied."""
        return (
            (self.group.world == 1 or not self.layout.sharded)
            and self.local.device == self.device
            and self.local.stride() == self.stride
        )

    @property
    def has_values(self) -> bool:
        """Not where a model is made without storage: on meta, or under a FakeTensorMode."""
        return not self.local.is_meta and not isinstance(self.local, FakeTensor)

    def value(self, requires_grad: bool) -> torch.Tensor:
        full = self.local if self.full is None else self.full
        if not requires_grad:
            return full
        if self.leaf is None:
            self.leaf = nn.Parameter(full)
        return self.leaf

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(
            self.layout.shape, self.stride, dtype=self.layout.dtype, device=self.device
        )

    @torch.no_grad()
    def flush(self) -> None:
        """Copy this rank's rows of the full value into the shard."""
        if self.full is None:
            return
        rows = self.full
        if self.layout.sharded:
            start = self.layout.start(self.group.rank)
            rows = rows[start : start + self.layout.rows(self.group.rank)]
        region = region_of(self.local) if self.has_values else None
        if region is not None:
            region.fill(rows)  # not through the page cache, which would fill up with what was built so far
        else:
            self.local.copy_(rows)

    def in_use(self) -> bool:
        """Whether a tensor beside our own shares the storage of the full value."""
        assert self.full is not None
        return storage_uses(self.full) > (1 if self.leaf is None else 2)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is (a part of) the value as it stands in memory now."""
        value = self.local if self.full is None else self.full
        return tensor.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()

    def drop(self) -> None:
        self.full = self.leaf = None

    def parameter(self, requires_grad: bool) -> nn.Parameter:
        """A new parameter over these rows, tracked as this one."""
        param = sharded_parameter(self.group, self.layout, self.local, requires_grad)
        param.__dict__[KEY] = self
        return param


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors share the storage of ``tensor``, itself included."""
    storage = tensor.untyped_storage()  # a reference of its own
    return torch._C._storage_Use_Count(storage._cdata) - 1


def partitioned_of(tensor: torch.Tensor) -> PartitionedTensor | None:
    return tensor.__dict__.get(KEY)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Tensors in nested arguments of a torch function."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _replace(value: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return by(value)
    if type(value) in (list, tuple):
        return type(value)(_replace(item, by) for item in value)
    if type(value) is dict:
        return {key: _replace(item, by) for key, item in value.items()}
    return value


class Openings(TorchFunctionMode):
    """The mode. Works on the rank's own thread; makes no change to torch.

    Args:
        before: called before every torch function that may allocate or write.
        meet: called before a gather with a line that says which; ranks agree there.
        groups: the groups whose sharded tensors count as partitioned, although they were sharded before.
    """

    def __init__(
        self,
        before: Callable[[], None],
        meet: Callable[[Group, str], None],
        groups: Callable[[], Iterable[Group]],
    ) -> None:
        super().__init__()
        self._before, self._meet, self._groups = before, meet, groups
        self._current: list[PartitionedTensor] = []  # what the last call worked on
        self._held: list[PartitionedTensor] = []  # whose full value exists
        self._adopted: list[torch.Tensor] = []

    @torch._dynamo.disable(reason="a model is being built")
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._before()
            if _WITHOUT_VALUE.get(func) is _repoint and SUCCESSOR in args[0].__dict__:
                args = (args[0].__dict__[SUCCESSOR], *args[1:])
            found = [entry for t in tensors_in((args, kwargs)) if (entry := self._lookup(t)) is not None]
            if found and args and func in _WITHOUT_VALUE and self._lookup(args[0]) is not None:
                return _WITHOUT_VALUE[func](self, func, args, kwargs)
            self._close_unused(found)
            if not found:
                opened: list[PartitionedTensor] = []
            else:
                target = args[0] if args else kwargs.get("tensor")
                blind = (
                    len(found) == 1
                    and func in _OVERWRITES
                    and isinstance(target, torch.Tensor)
                    and self._lookup(target) is found[0]
                )
                opened = [entry for entry in found if self._open(entry, blind)]
        if not found:
            return func(*args, **kwargs)
        substitutes: dict[int, torch.Tensor] = {}

        def substitute(t: torch.Tensor) -> torch.Tensor:
            entry = self._lookup(t)
            if entry is None or not isinstance(t, DTensor):
                return t
            value = entry.value(t.requires_grad)
            substitutes[id(value)] = t
            return value

        with torch._C.DisableTorchFunction():
            new_args, new_kwargs = _replace((tuple(args), dict(kwargs)), substitute)
        try:
            out = func(*new_args, **new_kwargs)
        except BaseException:
            if blind:  # never gathered: what stands there is not the tensor's value
                for entry in opened:
                    entry.drop()
                    self._held.remove(entry)
                    self._current.remove(entry)
            raise
        return substitutes.get(id(out), out) if isinstance(out, torch.Tensor) else out

    def hold(self, entry: PartitionedTensor, full: torch.Tensor) -> None:
        """Take ``full`` as the present value of ``entry``; it is closed as soon as nothing else uses it."""
        entry.full = full
        self._held.append(entry)

    def close_unused(self) -> None:
        """Close what no live view can write to."""
        self._close_unused([])

    def close(self) -> None:
        """Put every value at rest; views that are still alive are views of nothing from here on."""
        for entry in self._held:
            entry.flush()
            entry.drop()
        self._held.clear()
        self._current.clear()
        for tensor in self._adopted:
            tensor.__dict__.pop(KEY, None)
        self._adopted.clear()

    def _lookup(self, tensor: torch.Tensor) -> PartitionedTensor | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        entry = partitioned_of(tensor)
        if entry is None and isinstance(tensor, DTensor):
            entry = self._adopt(tensor)
        return entry

    def _adopt(self, tensor: DTensor) -> PartitionedTensor | None:
        for group in self._groups():
            entry = tensor.placements == group.placements(sharded=True)
            if tensor.device_mesh == group.mesh and (
                entry or tensor.placements == group.placements(sharded=False)
            ):
                local = tensor._local_tensor
                layout = layout_of(tensor, group.world, 3 if entry else 0)
                found = PartitionedTensor(
                    group, layout, local, local.device, tuple(tensor.stride()), "a parameter sharded before"
                )
                tensor.__dict__[KEY] = found
                self._adopted.append(tensor)
                return found
        return None

    def _open(self, entry: PartitionedTensor, blind: bool) -> bool:
        """Make the full value of ``entry``; whether it was made by this call."""
        if any(entry is c for c in self._current):
            return False
        self._current.append(entry)
        if entry.whole and entry.full is None:
            return False
        made = entry.full is None
        gathered = None
        if not blind:
            entry.flush()
            if entry.has_values:
                if entry.layout.sharded and entry.group.link is not None and entry.group.world > 1:
                    self._meet(entry.group, f"read of {entry.what}")
                gathered = _gather(entry)
        if made:
            full: torch.Tensor
            if gathered is None:
                full = entry.empty()
            elif gathered.device == entry.device and gathered.stride() == entry.stride:
                full = gathered.data  # no view of a base that would count as a user of the storage
            else:
                full = entry.empty().copy_(gathered)
            self.hold(entry, full)
        return made

    def _close_unused(self, keep: list[PartitionedTensor]) -> None:
        self._current = [c for c in self._current if any(c is k for k in keep)]
        held, self._held = self._held, []
        for entry in held:
            if any(entry is k for k in keep) or entry.in_use():
                self._held.append(entry)
            else:
                entry.flush()
                entry.drop()


def _gather(entry: PartitionedTensor) -> torch.Tensor:
    """The full value from the shards of all ranks."""
    group, layout = entry.group, entry.layout
    if not layout.sharded or group.link is None or group.world == 1 or group.device.type != "cpu":
        return blocking_transfers.gather(group, layout, entry.local, layout.dtype)
    # Gloo's all-gather allocates the output a second time; a broadcast a rank works in place. A full value that
    # a view kept is received into: it holds the same bits, since every rank ran the same writes.
    kept = entry.full is not None and entry.full.is_contiguous() and entry.full.device == group.device
    full = entry.full if kept else torch.empty(layout.shape, dtype=layout.dtype, device=group.device)
    assert full is not None
    for rank in range(group.world):
        _broadcast_rows(entry, full, rank)
    # Gloo's threads let go of a tensor a little after its wait returned; until then it would look used.
    deadline = time.monotonic() + 1.0
    while not kept and storage_uses(full) > 1 and time.monotonic() < deadline:
        time.sleep(1e-4)
    return full


def _broadcast_rows(entry: PartitionedTensor, full: torch.Tensor, rank: int) -> None:
    group, start = entry.group, entry.layout.start(rank)
    rows = full[start : start + entry.layout.rows(rank)]
    if rank == group.rank:
        rows.copy_(entry.local)
    if rows.numel():
        first = dist.get_global_rank(group.pg, rank)
        blocking_transfers.sent(group, dist.broadcast(rows, first, group=group.pg, async_op=True))


# --- functions that need no full value ---------------------------------------------------------------------------


def _alias(mode: Openings, func: Any, args: Any, kwargs: dict[str, object]) -> object:
    tensor = args[0]
    if not isinstance(tensor, DTensor):
        return func(*args, **kwargs)
    out = tensor.detach()
    out.__dict__[KEY] = partitioned_of(tensor)
    return out


def _convert(mode: Openings, func: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> object:
    """``to``, ``half`` and the like: another partitioned tensor, so that nn.Module.to works part by part."""
    tensor, *rest = args
    if not isinstance(tensor, DTensor):
        return func(*args, **kwargs)
    entry = partitioned_of(tensor)
    assert entry is not None
    kwargs = dict(kwargs)
    stride = entry.stride
    memory_format = kwargs.pop("memory_format", None)
    if memory_format not in (None, torch.preserve_format):
        meta = torch.empty_strided(entry.layout.shape, entry.stride, device="meta")
        stride = meta.to(memory_format=memory_format).stride()
    probe = func(torch.empty(0, dtype=entry.layout.dtype, device=entry.device), *rest, **kwargs)
    if (
        (probe.dtype, probe.device, stride) == (entry.layout.dtype, entry.device, entry.stride)
    ) and not kwargs.get("copy"):
        return tensor
    entry.flush()
    layout = dataclasses.replace(entry.layout, dtype=probe.dtype)
    chunk = blocking_transfers.flat_chunk(entry.layout, entry.local)
    local = rows_of(layout, chunk.to(probe.dtype, copy=True), entry.group.rank)
    return _like(
        tensor, PartitionedTensor(entry.group, layout, local, probe.device, tuple(stride), entry.what)
    )


def _empty_like(mode: Openings, func: Callable[..., object], args: Any, kwargs: Any) -> object:
    """``torch.empty_like``, by which nn.Module.to_empty gives storage to meta parameters."""
    tensor = args[0]
    if not isinstance(tensor, DTensor):
        return func(*args, **kwargs)
    entry = partitioned_of(tensor)
    assert entry is not None
    dtype = kwargs.get("dtype") or entry.layout.dtype
    device = torch.device(kwargs.get("device") or entry.device)
    at_rest = device if device.type == "meta" else entry.group.device
    layout = dataclasses.replace(entry.layout, dtype=dtype)
    chunk = torch.zeros(layout.chunk_numel, dtype=dtype, device=at_rest)
    return _like(
        tensor,
        PartitionedTensor(
            entry.group, layout, rows_of(layout, chunk, entry.group.rank), device, entry.stride, entry.what
        ),
    )


def _deepcopy(mode: Openings, func: Callable[..., object], args: Any, kwargs: dict[str, object]) -> object:
    tensor, memo = args
    if not isinstance(tensor, DTensor):
        return func(*args, **kwargs)
    if id(tensor) in memo:
        return memo[id(tensor)]
    entry = partitioned_of(tensor)
    assert entry is not None
    entry.flush()
    local = rows_of(
        entry.layout, blocking_transfers.flat_chunk(entry.layout, entry.local).clone(), entry.group.rank
    )
    out = _like(
        tensor, PartitionedTensor(entry.group, entry.layout, local, entry.device, entry.stride, entry.what)
    )
    memo[id(tensor)] = out
    for key, value in tensor.__dict__.items():
        if key != KEY:
            out.__dict__[key] = copy.deepcopy(value, memo)
    return out


def _repoint(mode: Openings, func: Callable[..., object], args: Any, kwargs: dict[str, object]) -> Any:
    """``.data = value``: the values are copied, since a shard cannot share another's storage."""
    tensor, value = args
    if not isinstance(tensor, DTensor):
        return func(*args, **kwargs)
    entry = partitioned_of(tensor)
    assert entry is not None
    if tuple(value.shape) == entry.layout.shape and value.dtype != entry.layout.dtype:
        # ``module.half()`` and the like, of a module that was whole when they began.
        torch.utils.swap_tensors(tensor, _convert(mode, torch.Tensor.to, (tensor, value.dtype), {}))
        entry = partitioned_of(tensor)
        assert entry is not None
    if tuple(value.shape) != entry.layout.shape or value.dtype != entry.layout.dtype:
        raise ShardError(
            f"{entry.what}: .data = a tensor of shape {list(value.shape)} and {value.dtype}, but the parameter is "
            f"partitioned already with {list(entry.layout.shape)} and {entry.layout.dtype}; assign a new nn.Parameter "
            "to the module instead"
        )
    with torch.no_grad():
        mode.__torch_function__(torch.Tensor.copy_, (), (_alias(mode, None, (tensor,), {}), value), {})


def rows_of(layout: Layout, chunk: torch.Tensor, rank: int) -> torch.Tensor:
    """This rank's rows of its padded chunk."""
    chunk = chunk.view(layout.padded_shape)
    return chunk[: layout.rows(rank)] if layout.sharded else chunk


def _like(tensor: torch.Tensor, entry: PartitionedTensor) -> torch.Tensor:
    """A tensor over ``entry``; a parameter where ``tensor`` is one."""
    requires_grad = tensor.requires_grad and entry.layout.dtype.is_floating_point
    out = entry.parameter(requires_grad)
    if not isinstance(tensor, nn.Parameter):
        del out._is_param
    return out


_WITHOUT_VALUE: dict[object, Callable[..., object]] = {
    torch.Tensor.detach: _alias,
    torch.Tensor.data.__get__: _alias,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _repoint,  # type: ignore[attr-defined]
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.empty_like: _empty_like,
} | {
    getattr(torch.Tensor, name): _convert
    for name in ("to", "float", "double", "half", "bfloat16", "cpu", "cuda")
}

# What overwrites its first argument without reading it: no gather.
_OVERWRITES = frozenset(
    [
        getattr(torch.Tensor, name)
        for name in (
            "normal_ uniform_ fill_ zero_ copy_ random_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_"
        ).split()
    ]
    + [
        getattr(nn.init, name)
        for name in (
            "normal_ uniform_ trunc_normal_ constant_ ones_ zeros_ eye_ dirac_ xavier_uniform_ xavier_normal_ "
            "kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_"
        ).split()
    ]
)

# What asks about a tensor or marks it, and neither reads nor writes its values.
_VALUES = frozenset(["data", "T", "H", "mT", "mH", "real", "imag"])
_ABOUT = frozenset(
    [
        getter.__get__
        for base in (torch.Tensor, torch._C.TensorBase)
        for name, getter in vars(base).items()
        if name not in _VALUES and hasattr(getter, "__set__") and hasattr(getter, "__get__")
    ]
    + [
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.Tensor.grad.__set__,  # type: ignore[union-attr]
        torch._has_compatible_shallow_copy_type,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
    + [
        getattr(torch.Tensor, name)
        for name in (
            "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex "
            "is_signed is_inference storage_offset get_device __len__ requires_grad_ retain_grad register_hook "
            "register_post_accumulate_grad_hook __reduce_ex__ is_shared _is_view"
        ).split()
        if hasattr(torch.Tensor, name)
    ]
)
