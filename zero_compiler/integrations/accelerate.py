"""Accelerate: ``Accelerator(fsdp_plugin=ZeroPlugin(stage=3))`` trains sharded, with the loop as it is.

To accelerate the plugin is one of FSDP2, whose paths for saving, loading and accumulation work on parameters that are
``DTensor``s; in the place of ``fully_shard`` stand ``zero.shard`` and ``model.compile(backend="zero")``.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import nn
from torch.distributed.tensor import DTensor

from ..config import Config
from ..errors import ConfigError, IntegrationError
from . import overrides
from .prepared import come_together, configured, follow, ranks, shard_and_compile, streamed, tell

log = logging.getLogger("zero_compiler")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ZeroPlugin(FullyShardedDataParallelPlugin):
    """Trains what an ``Accelerator`` prepares with zero.

    Args:
        stage: ZeRO stage 0 to 3.
        state_dict_type: what ``save_state`` writes: "SHARDED_STATE_DICT" (torch.distributed.checkpoint, each rank its
            rows) or "FULL_STATE_DICT" (one file of the main process).
        config: a :class:`zero_compiler.Config`; ``fields`` are its fields given one by one. Mixed precision of the
            accelerator is ``param_dtype``, and need not be given again.

    Raises:
        ConfigError: unknown or contradictory fields.
    """

    def __init__(
        self,
        stage: int | None = None,
        *,
        state_dict_type: str | None = None,
        config: Config | None = None,
        **fields: object,
    ) -> None:
        if stage is not None:
            fields["stage"] = stage
        self.config = configured("ZeroPlugin", config, fields)
        self.who = "Accelerator"  # what the user trains with, for messages
        super().__init__(
            fsdp_version=2,
            reshard_after_forward=self.config.stage == 3,
            state_dict_type=state_dict_type,
            cpu_offload=False,
            auto_wrap_policy="no_wrap",
            activation_checkpointing=False,
            cpu_ram_efficient_loading=False,
        )

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute in what the accelerator's ``mixed_precision`` says.

        Raises:
            ConfigError: there is no such dtype, or the plugin was given another ``param_dtype``.
        """
        dtype = _DTYPES.get(mixed_precision, mixed_precision)
        if dtype not in _DTYPES.values():
            raise ConfigError(
                f'zero computes in mixed_precision="bf16" or "fp16", not {mixed_precision!r}; leave it out for float32'
            )
        if self.config.param_dtype is not None and self.config.param_dtype != dtype:
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} and param_dtype={self.config.param_dtype} are two dtypes for one "
                "computation; give one of them"
            )
        if self.config.param_dtype is None:
            self.config = Config.make(self.config, {"param_dtype": dtype})
        super().set_mixed_precision(dtype, buffer_autocast, override=True)

    # What an accelerator asks of it -------------------------------------------------------------------------------

    def prepare(self, accelerator: Accelerator, objects: tuple[Any, ...]) -> tuple[object, ...]:
        """What ``Accelerator.prepare`` returns. Models and optimizers may come together or apart, in any order."""
        _refuse_other_parallelism(accelerator)
        optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        for model in objects:
            if isinstance(model, nn.Module):
                self.prepare_model(accelerator, model, optimizers)
        made = []
        for obj in objects:
            if isinstance(obj, torch.optim.Optimizer):
                obj = self._prepare_optimizer(accelerator, obj)
            elif not isinstance(obj, nn.Module):
                obj = accelerator._prepare_one(obj, first_pass=True)
            made.append(obj)
        made = [obj if isinstance(obj, nn.Module) else accelerator._prepare_one(obj) for obj in made]
        for obj in made:
            # Compared by identity: comparing modules of parameters, or data loaders, by value means something else.
            if any(
                obj is o
                for o in (*accelerator._dataloaders, *accelerator._optimizers, *accelerator._schedulers)
            ):
                obj._is_accelerate_prepared = True
        return tuple(made)

    def prepare_model(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        listed: bool = True,
    ) -> nn.Module:
        """Shard a model and compile it, in place.

        Args:
            listed: it becomes one of the models that the accelerator saves.
        """
        _refuse_other_parallelism(accelerator)
        if accelerator.verify_device_map(model):
            raise IntegrationError(
                "zero shards a model over the ranks itself, and this one was spread over devices by device_map: load "
                "it without device_map"
            )
        if self.config.param_dtype is not None and accelerator.mixed_precision != "no":
            _keep_master_weights(model)
        every = [*optimizers, *(o.optimizer for o in accelerator._optimizers)]
        mesh = accelerator.torch_device_mesh
        shard_and_compile(
            model,
            self.config,
            optimizers=every,
            mesh=None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
            device=accelerator.device.type,
            compile_options=_compile_options(accelerator),
        )
        if listed and not any(model is m for m in accelerator._models):
            accelerator._models.append(model)
        model.__dict__["_is_accelerate_prepared"] = True
        log.info("%s: zero stage %d over %d ranks", type(model).__name__, self.config.stage, ranks())
        tell(self.who, self.config)
        return model

    def _prepare_optimizer(
        self, accelerator: Accelerator, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return accelerator._prepare_one(optimizer, first_pass=True)
        follow(optimizer)
        return accelerator.prepare_optimizer(streamed(optimizer, self.config), device_placement=False)


def plugin_of(accelerator: Accelerator) -> ZeroPlugin | None:
    """The plugin that an accelerator was made with, where it is zero's."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin if isinstance(plugin, ZeroPlugin) else None


def refuse_another_kind(plugin: ZeroPlugin, checkpoint: str, argument: str, give: str) -> None:
    """
    Args:
        argument: the one by which the user names ``checkpoint``.
        give: how the user chooses a kind, with "%s" in its place.

    Raises:
        IntegrationError: the checkpoint is of another kind than ``plugin`` writes, or was written without it.
    """
    files = {
        kind: os.path.join(checkpoint, FSDP_MODEL_NAME + end)
        for kind, end in (("FULL_STATE_DICT", ".bin"), ("SHARDED_STATE_DICT", "_0"))
    }
    wanted = next((kind for kind in files if kind in str(plugin.state_dict_type)), None)
    if wanted is None or not os.path.isdir(checkpoint) or os.path.exists(files[wanted]):
        return
    for kind, file in files.items():
        if os.path.exists(file):
            raise IntegrationError(
                f"{argument}={checkpoint!r} was written with the state_dict_type {kind!r}, and this run has "
                f"{wanted!r}: give {give % kind}"
            )
    raise IntegrationError(
        f"{argument}={checkpoint!r} was not written with zero ({files[wanted]!r} is not there), so that its optimizer "
        "cannot go on: begin anew from its weights"
    )


def _keep_master_weights(model: nn.Module) -> None:
    """Trainable parameters rest in float32 and are computed with in the dtype of mixed precision, as accelerate does
    with FSDP2.

    Sharding takes the values of rank 0: the others need no more than the shape, and memory that nobody writes to takes
    none.
    """
    for param in model.parameters():
        if param.requires_grad and param.is_floating_point() and not isinstance(param, DTensor):
            if param.dtype == torch.float32:
                continue
            first = not dist.is_initialized() or dist.get_rank() == 0
            made = param.data.float() if first else torch.empty_like(param.data, dtype=torch.float32)
            param.data = made


def _compile_options(accelerator: Accelerator) -> dict[str, object]:
    """What the accelerator's plugin for Dynamo says of compiling, but for its backend."""
    plugin = accelerator.state.dynamo_plugin
    if plugin is None or plugin.backend == DynamoBackend.NO:
        return {}
    return {name: value for name, value in plugin.to_kwargs().items() if name != "backend"}


def _refuse_other_parallelism(accelerator: Accelerator) -> None:
    config = accelerator.parallelism_config
    for kind in ("tp", "cp", "sp"):
        if config is not None and getattr(config, f"{kind}_enabled", False):
            raise IntegrationError(
                f"ParallelismConfig({kind}_size=...) and ZeroPlugin cannot be used together; leave out {kind}_size"
            )


# What stands in the place of accelerate's own -------------------------------------------------------------------------


def _state_init(original: Callable[..., None]) -> Callable[..., None]:
    def init(
        self: object, mixed_precision: object = None, cpu: bool = False, *args: object, **kwargs: object
    ) -> None:
        given = kwargs.get("fsdp_plugin")
        plugin = given if isinstance(given, ZeroPlugin) else None
        # Without an accelerator accelerate takes ranks for single processes unless it is told of the CPU.
        if plugin is not None and PartialState._shared_state == {} and not torch.accelerator.is_available():
            cpu = True
        original(self, mixed_precision, cpu, *args, **kwargs)
        if plugin is not None and getattr(self, "fsdp_plugin", None) is not plugin:
            _keep_plugin(self, plugin)

    return init


def _keep_plugin(state: AcceleratorState, plugin: ZeroPlugin) -> None:
    """Train sharded where accelerate knows no FSDP: on CPU ranks, and in one process."""
    if state.distributed_type == DistributedType.NO:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise IntegrationError(
                "accelerate took this rank for a single process before ZeroPlugin was there: make the Accelerator "
                "before other objects of accelerate, or pass use_cpu=True to TrainingArguments (ACCELERATE_USE_CPU=1)"
            )
        if not dist.is_initialized():
            device = torch.accelerator.current_accelerator(check_available=True)
            backend = None if device is None else dist.get_default_backend_for_device(device)
            dist.init_process_group(
                "gloo" if device is None else f"cpu:gloo,{device.type}:{backend}",
                store=dist.HashStore(),
                rank=0,
                world_size=1,
            )
    elif state.distributed_type not in (DistributedType.MULTI_CPU, DistributedType.FSDP):
        raise IntegrationError(f"ZeroPlugin cannot be used with {state.distributed_type}")
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = plugin


def _prepare(original: Callable[..., object]) -> Callable[..., object]:
    def prepare(self: Accelerator, *args: object, device_placement: object = None) -> object:
        plugin = plugin_of(self)
        if plugin is None:
            return original(self, *args, device_placement=device_placement)
        made = plugin.prepare(self, args)
        return made if len(made) > 1 else made[0]

    return prepare


def _prepare_model(original: Callable[..., object]) -> Callable[..., object]:
    def prepare_model(
        self: Accelerator,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> object:
        plugin = plugin_of(self)
        if plugin is None:
            return original(self, model, device_placement, evaluation_mode)
        return plugin.prepare_model(self, model, [])

    return prepare_model


def _clip_grad_norm(original: Callable[..., object]) -> Callable[..., object]:
    def clip_grad_norm_(
        self: Accelerator, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> object:
        if plugin_of(self) is None:
            return original(self, parameters, max_norm, norm_type)
        self.unscale_gradients()
        return self._clip_grad_norm_dtensor_aware(list(parameters), max_norm, norm_type=norm_type)

    return clip_grad_norm_


def _clip_grad_value(original: Callable[..., None]) -> Callable[..., None]:
    def clip_grad_value_(
        self: Accelerator, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        if plugin_of(self) is None:
            return original(self, parameters, clip_value)
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_(parameters, clip_value)
        return None

    return clip_grad_value_


def _with_pairs(original: Callable[..., object]) -> Callable[..., object]:
    def called(self: Accelerator, *args: object, **kwargs: object) -> object:
        plugin = plugin_of(self)
        if plugin is not None:
            given = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("input_dir")
            if given is not None:
                refuse_another_kind(plugin, str(given), "input_dir", 'ZeroPlugin(state_dict_type="%s")')
            self._models = _paired(self._models, self._optimizers)
            come_together(self._models[:1], f"Accelerator.{original.__name__}()")
        return original(self, *args, **kwargs)

    return called


def _get_state_dict(original: Callable[..., object]) -> Callable[..., object]:
    def get_state_dict(self: Accelerator, model: nn.Module, unwrap: bool = True) -> object:
        if plugin_of(self) is None:
            return original(self, model, unwrap)
        also = " (as Accelerator.save_model() and Trainer.save_model() do)"
        come_together([model], "Accelerator.get_state_dict()", also)
        return _with_ties(original(self, model, unwrap), model)

    return get_state_dict


def _with_ties(state: Any, model: nn.Module) -> object:
    """Collected weights, in which the names of one tied parameter share one tensor: what writes them to files looks at
    that, and writes it once."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(param), name)
        if other in state and name in state:
            state[name] = state[other]
    return state


def _paired(models: list[nn.Module], optimizers: list[Any]) -> list[nn.Module]:
    """The models in the order in which accelerate saves their optimizers: first the one whose parameters the first
    optimizer has, and so on, then those that none has."""
    owner = {id(p): model for model in models for p in model.parameters()}
    paired: list[nn.Module] = []
    for optimizer in optimizers:
        owners = {id(m): m for g in optimizer.param_groups for p in g["params"] if (m := owner.get(id(p)))}
        if len(owners) != 1 or id(next(iter(owners.values()))) in {id(m) for m in paired}:
            raise IntegrationError(
                "accelerate saves one optimizer for one model; this "
                f"{type(optimizer.optimizer).__name__} has parameters of {len(owners)} prepared models, or of one that "
                "another optimizer has too: save with torch.distributed.checkpoint"
            )
        paired += owners.values()
    return [*paired, *(m for m in models if all(m is not p for p in paired))]


_REPLACED = {
    "accelerate.state.AcceleratorState.__init__": _state_init,
    "accelerate.accelerator.Accelerator.prepare": _prepare,
    "accelerate.accelerator.Accelerator.prepare_model": _prepare_model,
    "accelerate.accelerator.Accelerator.clip_grad_norm_": _clip_grad_norm,
    "accelerate.accelerator.Accelerator.clip_grad_value_": _clip_grad_value,
    "accelerate.accelerator.Accelerator.get_state_dict": _get_state_dict,
    "accelerate.accelerator.Accelerator.save_state": _with_pairs,
    "accelerate.accelerator.Accelerator.load_state": _with_pairs,
}
for _name, _make in _REPLACED.items():
    overrides.replace(_name, _make)
