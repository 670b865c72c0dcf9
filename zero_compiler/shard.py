"""Parameters at rest: ``zero.shard`` and the property that turns a shard into a weight inside a forward.

Every managed parameter becomes ``nn.Parameter(DTensor)``: ``Shard(0)``, or ``Replicate()`` where it cannot
be cut. Each module of the model gets a subclass of its own class with one property per managed parameter;
nothing else of the module changes, and nothing of torch.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from . import eager, grads, hardware
from .config import TIER_FIELDS, Config
from .errors import ConfigError, ShardError, StorageError, TransferError
from .files import Files, GradientFiles
from .group import Group, agree, make_group, meet, short_digest
from .guards import guard_optimizers
from .ir import ops
from .layout import Layout, layout_of
from .runtime.stores import Nvme, region_of
from .transport import COPIED, LOCAL, Transport, choose


class _Default(int):
    """A default that can be told from the same number given by the user."""


log = logging.getLogger("zero_compiler")
DEFAULT_STAGE = _Default(3)
_serial = itertools.count()
_keys = itertools.count()  # not the serial: copies of a model that was pickled have equal ones


class Scope:
    """Whether a forward of the model is running: inside one, a managed attribute is the full weight."""

    def __init__(self) -> None:
        self.active = False


@dataclass
class ParamInfo:
    """A managed parameter: its first qualified name, layout and the dtype that it is gathered in."""

    name: str
    layout: Layout
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype


Places = list[tuple[nn.Module, str]]


class Policy:
    """How one sharded module is placed; shared by all its submodules. Made by :func:`shard`."""

    def __init__(self, group: Group, config: Config, scope: Scope | None = None) -> None:
        _check_tiers(group, config)
        self.group = group
        self.config = config
        self.hardware = hardware.load(config.hardware)
        self.transport: Transport = LOCAL  # until the parameters are known
        self.scope = scope or Scope()
        self.params: dict[str, ParamInfo] = {}
        self.places: dict[str, Places] = {}
        # Weights of stage 3 that the memory budget keeps, by name; decided once, then fixed.
        self.kept: dict[str, bool] = {}
        # How far ahead gathers start, by phase and order of units (schedule.py); decided once, then fixed.
        self.distances: dict[str, str] = {}
        self.sync = True
        self.opened = False  # inside zero.gathered: parameters are whole
        self.runtime: Any = None  # made by the first compile; dies with the policy
        self.frames: list[Any] = []  # compiled frames, for the report
        self.compilers: dict[str, Any] = {}
        # Equal on every rank that makes its models in the same order; used to agree with other ranks. A copy has
        # that of its original and its own number, so that a rank that makes one alone disturbs no other model.
        self.serial: tuple[int, ...] = (next(_serial),)
        self.copies = 0
        self._fresh()
        self.broken: str | None = None  # why no collective of this model can be trusted any more
        self._bind()

    def _fresh(self) -> None:
        """What belongs to this object alone, and to no copy of it."""
        self._nvme: Nvme | None = None  # made when first needed
        self.files: Files | None = None
        self._gradient_files: GradientFiles | None = None
        # Who updates a parameter while backward runs, by its name; and forwards whose backward may still read weights.
        self.sinks: weakref.WeakValueDictionary[str, grads.Sink] = weakref.WeakValueDictionary()
        self.calls: weakref.WeakSet[grads.Call] = weakref.WeakSet()

    def _bind(self) -> None:
        self.key = f"m{next(_keys)}"
        self._digests: dict[str, bytes] = {}
        ops.bind_owner(self.key, self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        own = ("_nvme", "files", "_gradient_files", "sinks", "calls")  # of _fresh
        for name in ("runtime", "key", "frames", "compilers", "_digests", "transport", *own):
            state.pop(name)
        self.copies += 1
        state["serial"], state["copies"] = (*self.serial, self.copies), 0
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.runtime = None
        self._fresh()
        self.frames, self.compilers = [], {}
        self.transport = COPIED if self.group.world > 1 else LOCAL
        self._bind()

    def choose_transport(self) -> None:
        """Choose the transport, with the other ranks; the parameters are known, and not installed yet."""
        # What rests in files is read into buffers: there is nothing at rest that peers could read.
        at_home = self.config.offload_params != "nvme"
        layouts = [info.layout for info in self.params.values() if at_home]
        self.transport = choose(self.group, self.config.transport, f"transport/{self.title()}", layouts)

    def make_room(self, params: Mapping[str, torch.Tensor]) -> None:
        """Files for what rests in files; the parameters are known, and not installed yet. Collective.

        Raises:
            StorageError: on the ranks that have no room, and RankMismatchError on the others.
        """
        tiers = (self.config.offload_params, self.config.offload_grads)
        if "nvme" not in tiers or any(isinstance(local_of(p), FakeTensor) for p in params.values()):
            return  # nothing, or only planned
        cut = {name: info.layout for name, info in self.params.items() if info.layout.cut}
        parameters = {n: lay for n, lay in cut.items() if tiers[0] == "nvme" and not in_file(params[n])}
        gradients = {n: lay for n, lay in cut.items() if tiers[1] == "nvme" and params[n].requires_grad}
        problem: StorageError | None = None
        try:
            self.files = Files(self.nvme(), parameters, gradients)
        except StorageError as error:
            problem = error
        try:
            agree(self.group, f"room/{self.title()}", "room in nvme_dir", str(problem or "there is room"))
        finally:
            if problem is not None:
                raise problem

    def take_files(self, nvme: Nvme | None) -> None:
        """Go on with the tier in which construction has placed parameters already."""
        self._nvme = nvme or self._nvme

    def take_gradients(self) -> None:
        """From here on gradients that rest in files go there as they land; the parameters are installed."""
        if self.files is not None and self.files.gradients:
            self._gradient_files = GradientFiles(self, self.files.gradients)
            for name in self.files.gradients:
                self.sinks[name] = self._gradient_files

    def settle(self, name: str, chunk: torch.Tensor) -> torch.Tensor:
        """Where the padded ``chunk`` of a parameter is to lie: in a file, or in memory that peers read."""
        layout = self.params[name].layout
        if in_file(chunk):
            return chunk
        if self.files is not None and (region := self.files.place(name)) is not None:
            if not chunk.is_meta:
                region.fill(chunk)
                chunk = region.tensor
            return chunk
        if self.transport.segment is None or not layout.cut:
            return chunk
        home = self.transport.segment.allocate(name, layout)
        return chunk if chunk.is_meta else home.copy_(chunk)

    def place(self, name: str) -> torch.Tensor:
        """Memory on the compute device for this rank's padded chunk of a parameter that has none: zeros."""
        layout, segment = self.params[name].layout, self.transport.segment
        if self.files is not None and (region := self.files.place(name)) is not None:
            return region.tensor.zero_()
        if segment is not None and name in segment.chunks:
            return segment.chunks[name].zero_().view(layout.padded_shape)
        return torch.zeros(layout.padded_shape, dtype=layout.dtype, device=self.group.device)

    def nvme(self) -> Nvme:
        """The NVMe tier of this model on this rank.

        Raises:
            ConfigError: the model was sharded without ``nvme_dir``.
        """
        if self._nvme is None:
            if self.config.nvme_dir is None:
                raise ConfigError("the NVMe tier needs nvme_dir: give it to zero.shard")
            self._nvme = Nvme(self.config.nvme_dir, self.group.rank, self.config.nvme_keep)
        return self._nvme

    def param(self, name: str) -> Any:
        """The sharded parameter called ``name`` as it stands in the module now.

        Raises:
            ShardError: it was deleted or replaced, or is whole for the time of a ``zero.gathered``.
        """
        found = self.find(name)
        if found is None:
            grads.missing(name, self.opened)
        return found

    def find(self, name: str) -> Any:
        """The same, or None where no sharded parameter stands there now."""
        for module, attribute in self.places[name]:
            found = module._parameters.get(attribute)
            if isinstance(found, DTensor):
                return found
        return None

    # Eager meaning of the markers (ops.Owner).
    def gather_now(self, name: str, shard_: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.meet(f"eager gather of {name}")
        return eager.gather(self.group, self.params[name].layout, shard_, dtype)

    def reduce_now(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        if not self.sync:
            raise ShardError(
                'zero.no_sync needs backend="zero" or no compile; another backend runs this graph'
            )
        info = self.params[name]
        self.meet(f"eager reduction of the gradient of {name}")
        return eager.reduce(self.group, info.layout, grad, info.reduce_dtype)

    def meet(self, operation: str) -> None:
        """Before an eager collective: every rank is about to do the same ``operation`` for the same model.

        Raises:
            RankMismatchError: on every rank, naming the first difference.
            TransferError: a peer did not answer, or an earlier call broke off.
        """
        self.check_whole()
        if self.group.pg is None or self.group.world == 1:
            return

        def text() -> str:
            return f"{operation}\n{self.title()}\n{self.describe()}"

        doing = self._digests.get(operation)
        if doing is None:
            doing = self._digests[operation] = short_digest(text())
        meet(self.group, doing, text, operation)

    def check_whole(self) -> None:
        """Raise where an earlier call of this model broke off among its collectives."""
        if self.broken is not None:
            raise TransferError(self.broken)

    def break_off(self, reason: str) -> None:
        """A call ended among its collectives: peers may be waiting, and no later one can be matched to theirs."""
        if self.group.world > 1 and self.broken is None:
            who = self.group.name_of(self.group.rank)
            self.broken = f"an earlier call of the model broke off on {who}: {reason}"

    def title(self) -> str:
        """Which of the sharded models of this process it is, in the order in which they were made."""
        return f"model {'.'.join(str(n) for n in self.serial)}"

    def describe(self) -> str:
        """What ranks must agree on: parameters, layout, configuration; one line each."""
        config = {k: v for k, v in self.config.to_dict().items() if k != "nvme_dir"}
        config["hardware"] = f"{self.hardware.name}, {self.hardware.date}, {self.hardware.digest()}"
        lines = [f"world size = {self.group.world}", *(f"{k} = {v}" for k, v in sorted(config.items()))]
        for info in self.params.values():
            place = "Shard(0)" if info.layout.cut else "Replicate()"
            lines.append(f"parameter {info.name}: {list(info.layout.shape)} {info.layout.dtype} {place}")
        return "\n".join(lines)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor, without autograd."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def in_file(tensor: torch.Tensor) -> bool:
    """Whether the rows of ``tensor`` rest in a file."""
    local = local_of(tensor)
    return not local.is_meta and region_of(local) is not None


@dataclass
class ModuleState:
    """What a module of a sharded model knows: its policy and the qualified names of its own parameters."""

    policy: Policy
    names: dict[str, str]
    root: bool


def shard(
    model: nn.Module,
    *,
    stage: int = DEFAULT_STAGE,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    config: Config | None = None,
    **fields: Any,
) -> nn.Module:
    """Partition the parameters of ``model`` over the ranks, in place, and return it.

    Call it before the optimizer is made. Rank 0's values are the ones that are kept, as DDP does.

    Args:
        model: any ``nn.Module``; parts of it may be sharded already (nested shards keep their own placement).
        stage: ZeRO stage 0 to 3 (Rajbhandari et al. 2020, section 5).
        mesh: a one-dimensional DeviceMesh; default: the default process group, or one rank without one.
        device: where compute happens; default: the current accelerator, else CPU.
        config: a :class:`Config`; ``fields`` are its fields given one by one.

    Raises:
        ConfigError: unknown or contradictory options.
        ShardError: ``model`` is sharded already.
        RankMismatchError: ranks have different models or configurations.
    """
    if stage is not DEFAULT_STAGE:
        fields["stage"] = stage
    merged = Config.make(config, fields)
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
    return shard_over(model, make_group(mesh, device), merged)


def shard_over(model: nn.Module, group: Group, config: Config) -> nn.Module:
    """:func:`shard` over a group that exists; ``model`` is known to be a plain module."""
    policy = Policy(group, config)
    targets = collect(model, policy)
    agree(group, f"shard/{policy.title()}", "the model given to zero.shard", policy.describe())
    policy.choose_transport()
    policy.make_room({name: param for name, (param, _) in targets.items()})
    for name, (param, places) in targets.items():
        local = eager.scatter_from_first(group, policy.params[name].layout, param)
        install(policy, name, param, local, places)
    swap_classes(model, policy)
    policy.take_gradients()
    guard_optimizers()
    return model


def _check_tiers(group: Group, config: Config) -> None:
    """Where compute is on the CPU, tier "host" is where everything lies already; said once.

    Raises:
        ConfigError: the tier would mean something on this device, and is not there yet.
    """
    global _said_host
    if group.device.type != "cpu":
        for name in TIER_FIELDS:
            if name != "offload_optimizer" and (tier := getattr(config, name)) != "none":
                raise ConfigError(
                    f'{name}="{tier}" is not available in this version on {group.device}; use "none"'
                )
        return
    fields = [f for f in TIER_FIELDS if getattr(config, f) == "host"]
    if fields and not _said_host:
        _said_host = True
        log.warning(
            'compute is on the CPU, where everything is on "host": %s="host" changes nothing', fields[0]
        )


_said_host = False


def is_root(module: nn.Module) -> bool:
    state = state_of(module)
    return state is not None and state.root


def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get("_zero")


def policies_of(model: nn.Module) -> list[Policy]:
    """Policies of a plain, sharded or compiled module, outermost first, without repeats."""
    model = getattr(model, "_orig_mod", model)
    out: dict[int, Policy] = {}
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            out.setdefault(id(state.policy), state.policy)
    return list(out.values())


def collect(
    model: nn.Module, policy: Policy, ours: Callable[[torch.Tensor], bool] = lambda param: False
) -> dict[str, tuple[nn.Parameter, Places]]:
    """Parameters of ``model`` that no inner shard manages, by first name, with all places they are tied to.

    ``ours`` tells the sharded parameters that construction made already, and that wait for their policy.
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
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            if isinstance(param, DTensor) and not ours(param):
                raise ShardError(
                    f"parameter {_joined(prefix, attribute)} is a DTensor already; this version shards plain "
                    "parameters only"
                )
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
            if name is None:
                name = _joined(prefix, attribute)
                found[id(param)] = name
                targets[name] = (param, [])
                policy.params[name] = describe_param(name, param, policy)
            targets[name][1].append((module, attribute))
    return targets


def _joined(prefix: str, attribute: str) -> str:
    return f"{prefix}.{attribute}" if prefix else attribute


def describe_param(name: str, param: torch.Tensor, policy: Policy) -> ParamInfo:
    config = policy.config
    layout = layout_of(param, policy.group.world, config.stage)
    floating = param.dtype.is_floating_point
    gather_dtype = config.param_dtype if config.param_dtype is not None and floating else param.dtype
    reduce_dtype = config.reduce_dtype if config.reduce_dtype is not None and floating else gather_dtype
    return ParamInfo(name, layout, gather_dtype, reduce_dtype)


def install(
    policy: Policy, name: str, old: nn.Parameter, chunk: torch.Tensor, places: Places
) -> nn.Parameter:
    """Put the padded local ``chunk`` in place of ``old`` wherever it is tied; attributes of ``old`` are kept."""
    layout = policy.params[name].layout
    chunk = policy.settle(name, chunk)
    local = chunk[: layout.rows(policy.group.rank)] if layout.cut else chunk
    param = sharded_parameter(policy.group, layout, local, old.requires_grad)
    for key, value in old.__dict__.items():
        param.__dict__.setdefault(key, value)
    old.__dict__["_zero_stale"] = name  # an optimizer that still holds it is told so at its first step
    for module, attribute in places:
        module._parameters[attribute] = param
    policy.places[name] = places
    return param


def sharded_parameter(group: Group, layout: Layout, local: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter at rest over ``local``: this rank's rows without padding, or the whole where it is not cut."""
    dtensor = DTensor.from_local(
        local,
        group.mesh,
        [Shard(0) if layout.cut else Replicate()],
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=contiguous_stride(layout.shape),
    )
    return nn.Parameter(dtensor, requires_grad=requires_grad)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, out = 1, []
    for n in reversed(shape):
        out.append(stride)
        stride *= max(n, 1)
    return tuple(reversed(out))


def swap_classes(model: nn.Module, policy: Policy) -> None:
    """Give every module of the model its subclass; inner shards join the outer model's scope."""
    owned: dict[int, dict[str, str]] = {}
    names_by_id = {id(policy.param(name)): name for name in policy.places}
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            state.policy.scope = policy.scope
            continue
        names = {a: names_by_id[id(p)] for a, p in module._parameters.items() if p is not None}
        owned[id(module)] = names
        module.__dict__["_zero"] = ModuleState(policy, names, module is model)
        if isinstance(module, nn.RNNBase):
            module.__dict__.pop("_flat_weights", None)  # a list of the whole weights; see sharded_class
        # A property is found before nn.Module.__getattr__, so the instance keeps its parameters where they were.
        module.__class__ = sharded_class(type(module), tuple(names), isinstance(module, nn.RNNBase))


_classes: dict[tuple[type, tuple[str, ...]], type] = {}


def sharded_class(base: type, names: tuple[str, ...], recurrent: bool = False) -> type:
    """The subclass of ``base`` whose ``names`` are full weights inside a forward. Equal arguments, equal class."""
    cls = _classes.get((base, names))
    if cls is None:
        body: dict[str, Any] = {name: _weight_property(name) for name in names}
        if recurrent:
            # nn.RNNBase keeps its own list of weights; read it anew, through the properties.
            body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
        body |= {
            "__call__": _call(base),
            "_apply": _apply(base),
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce_ex,
            "_zero_base": base,
        }
        cls = type(base.__name__, (base,), body)
        _classes[(base, names)] = cls
    return cls


def _apply(base: Any) -> Callable[..., Any]:
    """What ``.to()``, ``.half()``, ``.share_memory()`` and the like call: sharded parameters that it leaves as they are
    are left out, and torch exchanges the others, as long as no graph of autograd knows them."""

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        whole = self._parameters
        self._parameters = {
            name: param
            for name, param in whole.items()
            if not isinstance(param, DTensor) or _changes(param._local_tensor, fn)
        }
        try:
            base._apply(self, fn, recurse)
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            raise ShardError(
                f"{base.__name__}: a parameter that has been trained cannot change its dtype or device; call .to() "
                "before zero.shard, or give zero.shard a device or param_dtype"
            ) from error
        finally:
            self._parameters = {name: self._parameters.get(name, param) for name, param in whole.items()}
        return self

    return apply


def _changes(local: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    with torch.no_grad():
        made = fn(local.new_empty(0))
    return (made.dtype, made.device) != (local.dtype, local.device)


def _rebuild(base: type, names: tuple[str, ...], recurrent: bool) -> nn.Module:
    cls = sharded_class(base, names, recurrent)
    made: nn.Module = object.__new__(cls)
    return made


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    cls = type(self)
    names = tuple(a for a, v in cls.__dict__.items() if isinstance(v, property) and a != "_flat_weights")
    reduced: Any = object.__reduce_ex__(self, max(protocol, 2))
    return (_rebuild, (cls._zero_base, names, "_flat_weights" in cls.__dict__), *reduced[2:])  # type: ignore[attr-defined]


def _flat_weights(self: Any) -> list[torch.Tensor]:
    return [getattr(self, name) for name in self._flat_weights_names]


def _call(base: type) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__["_zero"]
        scope = state.policy.scope
        if state.root and state.policy.config.param_dtype is not None:
            args, kwargs = _cast_inputs(args, kwargs, state.policy.config.param_dtype)
        if scope.active:
            return base.__call__(self, *args, **kwargs)
        scope.active = True
        try:
            return base.__call__(self, *args, **kwargs)
        finally:
            scope.active = False

    # Dynamo caches frames by code object and bounds their number: classes must not share one.
    __call__.__code__ = __call__.__code__.replace()
    return __call__


def _cast_inputs(args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return pytree.tree_map(cast, (args, kwargs))


def _weight_property(attribute: str) -> property:
    def get(self: nn.Module) -> Any:
        try:
            param = self._parameters[attribute]
        except KeyError:
            if attribute in self.__dict__:
                return self.__dict__[attribute]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}") from None
        state = self.__dict__["_zero"]
        policy = state.policy
        if torch.compiler.is_compiling():
            if param is None or not policy.scope.active:
                return param
            if not isinstance(param, DTensor):
                return param if policy.opened else grads.replaced(attribute, state.names)
            name, info = managed(param, attribute, state)
            return torch.ops.zero.unshard(param.to_local(), param.shape, info.gather_dtype, policy.key, name)
        return read_eager(param, attribute, state)

    def set_(self: nn.Module, value: Any) -> None:
        # nn.Module.__setattr__ has taken parameters and None already; this is a plain value after `del`.
        self.__dict__[attribute] = value

    def del_(self: nn.Module) -> None:
        # nn.Module.__delattr__ has taken parameters already.
        if self.__dict__.pop(attribute, self) is self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    # Inlined where a frame reads the weight, and never a frame of its own, which would be compiled per parameter.
    torch._dynamo.eval_frame.skip_code(get.__code__)
    return property(get, set_, del_)


@torch._dynamo.disable(reason="weights that are read between compiled frames are gathered eagerly")
def read_eager(param: Any, attribute: str, state: ModuleState) -> Any:
    """What ``module.attribute`` is outside a compiled region."""
    policy = state.policy
    # Checkpointed regions run their forward again inside a backward, by way of any function, and with gradients
    # enabled; hooks on parameters and gradients run there too, without.
    inside = policy.scope.active or (torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled())
    if param is None or not inside:
        return param
    if not isinstance(param, DTensor):
        return param if policy.opened else grads.replaced(attribute, state.names)
    policy.group.check_still_valid()
    return eager.Unshard.apply(param, policy, managed(param, attribute, state)[0])


def managed(param: Any, attribute: str, state: ModuleState) -> tuple[str, ParamInfo]:
    """Name and layout of the sharded parameter that stands at ``attribute``, if it is still what was sharded."""
    name = state.names[attribute]
    info = state.policy.params[name]
    device = state.policy.group.device
    if (
        param.dtype != info.layout.dtype
        or param.device.type != device.type
        or param.shape != info.layout.shape
    ):
        grads.moved(name, info, param, device)
    return name, info
