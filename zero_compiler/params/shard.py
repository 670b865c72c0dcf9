"""Parameters at rest: ``zero.shard``.

Every managed parameter becomes ``nn.Parameter(DTensor)``: ``Shard(0)``, or ``Replicate()`` where it cannot
be sharded. What its module then does with it is in `modules.py`.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ..config import Config
from ..errors import ShardError
from ..layout import Layout, layout_of
from ..ranks.agreement import agree
from ..ranks.call_handshake import begin
from ..ranks.failure_broadcast import together
from ..ranks.group import Group
from ..ranks.mesh import make_group, ranks_of
from ..ranks.tensor_parallel import TensorPart, part_of, tensor_mesh_of
from ..replicated.parameters import ATTRIBUTE as REPLICATED
from ..sharded import blocking_transfers, grads, parameter_errors
from ..sharded.managed_parameters import ParamInfo, Places, local_of
from ..sharded.sharded_model import ShardedModel, agree_on_processor
from ..storage import heap
from ..tensors.foreach import MANAGED
from ..tensors.whole_parameters import describe_whole, stays_whole
from .memory_ties import check_memory
from .modules import is_root, state_of, swap_classes
from .optimizer_guards import STALE, guard_optimizers, held_elsewhere, mark_stale


class _Default(int):
    """A default that can be told from the same number given by the user."""


DEFAULT_STAGE = _Default(3)
# Attribute of a whole parameter that was sharded while somebody kept it: the sharded one. They share their values.
SUCCESSOR = "_zero_successor"
# Of a parameter that zero.shard has replaced, its name then and the one in its place.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def shard(
    model: nn.Module,
    *,
    stage: int = DEFAULT_STAGE,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    config: Config | None = None,
    **fields: object,
) -> nn.Module:
    """Partition the parameters of ``model`` over the ranks, in place, and return it.

    Call it before the optimizer is made. Rank 0's values are the ones that are kept, as DDP does.

    Args:
        model: any ``nn.Module``; parts of it may be sharded already (nested shards keep their own placement).
        stage: ZeRO stage 0 to 3 (Rajbhandari et al. 2020, section 5).
        mesh: a DeviceMesh; default: the default process group, or one rank without one. On one of two dimensions
            parameters are sharded over the one that shards and equal along the one that replicates (hybrid sharding):
            names with "shard" or "replicate" in them say which is which, else the first replicates. One called "tp"
            is that of ``parallelize_module``, which comes first; the other then shards what it leaves to a rank.
        device: where compute happens; default: the current accelerator, else CPU.
        config: a :class:`Config`; ``fields`` are its fields given one by one.

    Raises:
        ConfigError: unknown or contradictory options.
        ShardError: ``model`` is no plain module (compiled, under DDP, TorchScript), is sharded already, or has a
            parameter that cannot be sharded (lazy, sparse, complex and trainable, on another mesh) or tied, or that
            shares memory with another tensor.
        MemoryBudgetError: what is to rest passes the rest budgets.
        StorageError: ``nvme_dir`` takes no files, or has no room.
        RankMismatchError: ranks have different models or configurations.
    """
    if stage is not DEFAULT_STAGE:
        fields["stage"] = stage
    with together(lambda: ranks_of(mesh), "zero.shard"):
        return shard_over(model, *_checked(model, mesh, device, Config.make(config, fields)))


def _checked(
    model: nn.Module, mesh: DeviceMesh | None, device: torch.device | str | None, config: Config
) -> tuple[Group, Config]:
    """The group of a plain module that can be sharded."""
    if not isinstance(model, nn.Module):
        raise ShardError(f"zero.shard takes an nn.Module, not {type(model).__name__}")
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ShardError("zero.shard takes the plain model: shard first, then torch.compile")
    if is_root(model):
        raise ShardError(
            f"{type(model).__name__} is sharded already; zero.shard may be called once on a module"
        )
    if state_of(model) is not None:
        raise ShardError(
            f"this {type(model).__name__} belongs to a model that is sharded already; shard inner modules first"
        )
    return make_group(mesh, device, tensor_mesh_of(model)), config


def shard_over(model: nn.Module, group: Group, config: Config) -> nn.Module:
    """:func:`shard` over a group that exists; ``model`` is known to be a plain module."""
    begin(group, "zero.shard")
    sharded_model = ShardedModel(group, config)
    targets = collect(model, sharded_model)
    params = {name: param for name, (param, _) in targets.items()}
    said = "\n".join([sharded_model.protocol.describe(), *given(params), *describe_whole(model)])
    agree(group, f"shard/{sharded_model.identity.title()}", "the model given to zero.shard", said)
    agree_on_processor(sharded_model)
    sharded_model.tiers.place(sharded_model.params, params, sharded_model.hardware)
    sharded_model.hardware = sharded_model.storage.choose_transport(sharded_model.hardware)
    sharded_model.storage.make_room(params)
    params.clear()
    with (
        heap.apart()
    ):  # what a rank receives of one parameter after the other is dropped when it lies where it rests
        for name in list(targets):
            param, places = targets.pop(name)  # and so is the whole one
            info, local = sharded_model.params[name], local_of(param)
            if group.tensor is not None and info.part is None:
                local = blocking_transfers.from_first(group.tensor, local.to(group.device))
            local = blocking_transfers.scatter_from_first(
                group, info.layout, local, sharded_model.tiers.on_host(name)
            )
            install(sharded_model, name, param, local, places)
    sharded_model.storage.check_placed()
    swap_classes(model, sharded_model)
    sharded_model.installed()
    guard_optimizers()
    return model


def collect(
    model: nn.Module, sharded_model: ShardedModel, ours: Callable[[torch.Tensor], bool] = lambda param: False
) -> dict[str, tuple[nn.Parameter, Places]]:
    """Parameters of ``model`` that no inner shard manages, by first name, with all places they are tied to.

    ``ours`` tells the sharded parameters that construction made already, and that wait for their sharded model.
    """
    found: dict[int, str] = {}
    targets: dict[str, tuple[nn.Parameter, Places]] = {}
    for prefix, module in model.named_modules(remove_duplicate=True):
        if state_of(module) is not None:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            raise ShardError(
                f"{prefix or 'the model'} is a TorchScript module; zero.shard takes eager modules"
            )
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ShardError(
                f"{prefix or 'the model'} is a {type(module).__name__}, which averages gradients by itself; give "
                "zero.shard the module inside it, and train with that"
            )
        _check_table(prefix, module)
        for attribute, param in module._parameters.items():
            if param is None or stays_whole(param):
                continue
            if nn.parameter.is_lazy(param):
                raise ShardError(
                    f"parameter {_joined(prefix, attribute)} is lazy; run one forward before zero.shard"
                )
            if param.is_complex() and param.requires_grad:
                raise ShardError(
                    f"parameter {_joined(prefix, attribute)} is trainable and {param.dtype}, which collectives do not "
                    "sum; keep it as torch.view_as_real(...), or freeze it"
                )
            name = found.get(id(param))
            if name is None and not ours(param) and grads.hooked(param):
                raise ShardError(
                    f"parameter {_joined(prefix, attribute)} has a hook for its gradient, which belongs to the tensor "
                    "that zero.shard replaces; register hooks after zero.shard"
                )
            if name is None and (known := _replaced_already(param)) is not None:
                raise ShardError(
                    f"parameter {_joined(prefix, attribute)} is {known!r} of a module that is "
                    "sharded already, and has another parameter in its place now: the two would be trained apart; "
                    "give zero.shard one module that holds both, and leave out that of its parts"
                )
            if name is None:
                name = _joined(prefix, attribute)
                found[id(param)] = name
                targets[name] = (param, [])
                part = None if ours(param) else part_of(name, param, sharded_model.group)
                sharded_model.params[name] = describe_param(name, param, sharded_model, part)
            targets[name][1].append((module, attribute))
    check_memory(model)
    _check_held(model, {id(param): name for name, (param, _) in targets.items() if not ours(param)})
    return targets


def given(params: Mapping[str, torch.Tensor]) -> list[str]:
    """What else decides which collectives a model is made with, and where what belongs to it rests: a line each."""
    lines = []
    for name, param in params.items():
        local = local_of(param)
        if local.is_meta or isinstance(local, FakeTensor):
            lines.append(f"parameter {name} has no values (it is on the meta device, or a fake)")
        if not param.requires_grad:
            lines.append(f"parameter {name} is frozen")
    return lines


# Attributes of modules in which torch keeps parameters, and finds them again.
_KNOWN = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "_zero"})


def _check_held(model: nn.Module, names: dict[int, str]) -> None:
    """No module keeps a parameter that is replaced, but as its parameter."""

    def held(value: object, depth: int = 3) -> str | None:
        if isinstance(value, torch.Tensor):
            return names.get(id(value))
        kept = _kept_by(value) if depth else ()
        return next((n for v in kept if (n := held(v, depth - 1)) is not None), None)

    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _KNOWN and (name := held(value)) is not None:
                raise held_elsewhere(
                    name, "zero.shard", f"{_joined(prefix, attribute)}, a {type(value).__name__}"
                )


def _kept_by(value: object) -> Iterable[object]:
    """What a container, a function or another object than a module keeps."""
    if isinstance(value, dict):
        return list(dict.values(value))  # a subclass may compute its own, or raise
    if isinstance(value, (list, tuple, set)):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        filled = (cell for cell in cells if cell != types.CellType())  # others are of what is assigned later
        return (
            *(cell.cell_contents for cell in filled),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        )
    if isinstance(value, (nn.Module, type, types.ModuleType)):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _replaced_already(param: torch.Tensor) -> str | None:
    """What a parameter was called in whose place an earlier zero.shard has put another one that is still there."""
    name, by = _replaced.get(param) or (None, lambda: None)
    if by() is not None:
        gc.collect()  # a model that is gone may lie in memory until then
    return None if by() is None else name


def _check_table(prefix: str, module: nn.Module) -> None:
    """What an embedding may be told that its rows on several ranks cannot do."""
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    if module.sparse:
        raise ShardError(
            f"{prefix or 'the model'}: {type(module).__name__}(sparse=True) has sparse gradients, which are not "
            "reduced over ranks; make it with sparse=False"
        )
    if module.max_norm is not None:
        raise ShardError(
            f"{prefix or 'the model'}: {type(module).__name__}(max_norm={module.max_norm}) writes to its weight in "
            "forward, where a gathered weight is a copy; make it with max_norm=None and limit the norms in "
            "zero.gathered(model, write=True), or to model.parameters() after the step"
        )


def _joined(prefix: str, attribute: str) -> str:
    return f"{prefix}.{attribute}" if prefix else attribute


def describe_param(
    name: str, param: torch.Tensor, sharded_model: ShardedModel, part: TensorPart | None
) -> ParamInfo:
    config = sharded_model.config
    layout = layout_of(
        local_of(param) if part is not None else param, sharded_model.group.world, config.stage
    )
    floating = param.dtype.is_floating_point
    gather_dtype = config.param_dtype if config.param_dtype is not None and floating else param.dtype
    reduce_dtype = config.reduce_dtype if config.reduce_dtype is not None and floating else gather_dtype
    return ParamInfo(name, layout, gather_dtype, reduce_dtype, part)


def install(
    sharded_model: ShardedModel, name: str, old: nn.Parameter, chunk: torch.Tensor, places: Places
) -> nn.Parameter:
    """Put the padded local ``chunk`` in place of ``old`` wherever it is tied; attributes of ``old`` are kept."""
    info = sharded_model.params[name]
    layout = info.layout
    chunk = sharded_model.storage.place_chunk(name, chunk)
    local = chunk[: layout.rows(sharded_model.group.rank)] if layout.sharded else chunk
    param = sharded_parameter(sharded_model.group, layout, local, old.requires_grad, info.part)
    inherit(param, old)
    mark_stale(old, name, "zero.shard")
    _replaced[old] = name, weakref.ref(param)
    for module, attribute in places:
        module._parameters[attribute] = param
    sharded_model.places[name] = places
    return param


def inherit(new: torch.Tensor, old: torch.Tensor) -> None:
    """Give a parameter the attributes of the one whose place it takes; not what says that one was replaced itself, nor
    the plain model that it was averaged with, which holds whole parameters."""
    for key, value in old.__dict__.items():
        if key not in (SUCCESSOR, STALE, REPLICATED, grads.HOOKS):
            new.__dict__.setdefault(key, value)


def sharded_parameter(
    group: Group, layout: Layout, local: torch.Tensor, requires_grad: bool, part: TensorPart | None = None
) -> nn.Parameter:
    """A parameter at rest over ``local``: this rank's rows without padding, or the whole where it is not sharded.

    Args:
        part: where the layout is that of a part of the parameter only.
    """
    shape = layout.shape if part is None else part.shape
    away = local.device.type != group.mesh.device_type and not local.is_meta
    dtensor = DTensor.from_local(
        local.detach().to("meta") if away else local,
        group.mesh,
        group.placements(layout.sharded, None if part is None else part.placement),
        run_check=False,
        shape=torch.Size(shape),
        stride=contiguous_stride(shape),
    )
    if away:  # on the host of an accelerator, from where torch would copy them
        dtensor = DTensor.__new__(DTensor, local, dtensor._spec, requires_grad=False)
    param = nn.Parameter(dtensor, requires_grad=requires_grad)
    param.__dict__[MANAGED] = True
    parameter_errors.remember_storage(param)
    return param


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, out = 1, []
    for n in reversed(shape):
        out.append(stride)
        stride *= max(n, 1)
    return tuple(reversed(out))
