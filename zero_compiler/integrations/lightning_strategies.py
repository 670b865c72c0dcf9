"""Strategies of Lightning's Trainer and Fabric that train sharded, for each package that Lightning is published as.

Lightning is published three times over: as ``lightning``, and as ``pytorch_lightning`` with ``lightning_fabric``. Each
has classes of its own, so a strategy is made for each.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..errors import ConfigError, IntegrationError
from ..params.contexts import no_sync
from ..params.modules import call_as_forward, is_root, sharded_models_of
from . import overrides, prepared

log = logging.getLogger("zero_compiler")

DIRECTORY = "ZERO_NVME_DIR"  # the variable that says where the files of zero_stage_3_nvme lie
_PRECISION = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,  # the weights are of this type themselves
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


def _with_precision(config: Config, precision: str) -> Config:
    """The configuration with what ``precision=`` of Lightning says of ``param_dtype``.

    Raises:
        ConfigError: zero knows no such precision, or the configuration has another ``param_dtype``.
    """
    if precision not in _PRECISION:
        raise ConfigError(
            f"zero trains with precision {', '.join(_PRECISION)}, not {precision!r}: choose one of these"
        )
    dtype = _PRECISION[precision]
    if dtype is None:
        return config
    if config.param_dtype not in (None, dtype):
        raise ConfigError(
            f"precision={precision!r} and param_dtype={config.param_dtype} are two dtypes for one computation; give "
            "one of them"
        )
    return config if config.param_dtype is not None else Config.make(config, {"param_dtype": dtype})


def _calls_of(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that a step of a LightningModule can call: those with a forward and parameters."""
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        if type(child).forward is not nn.Module.forward and not _is_container(child):
            yield child
        else:
            yield from _calls_of(child)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _strategies(package: str) -> tuple[type | None, type | None]:
    """The strategies of a Trainer and of Fabric for one of Lightning's packages; None for what it has not."""
    trainer = fabric = None
    if package in ("lightning", "pytorch_lightning"):
        pl = "lightning.pytorch" if package == "lightning" else package
        trainer = _trainer_strategy(importlib.import_module(f"{pl}.strategies").ModelParallelStrategy, pl)
    if package in ("lightning", "lightning_fabric"):
        name = "lightning.fabric" if package == "lightning" else package
        fabric = _fabric_strategy(importlib.import_module(f"{name}.strategies").ModelParallelStrategy, name)
    return trainer, fabric


class _StepsAsForwards:
    """A step is a forward of the sharded module: weights that it uses itself are whole, and the modules that it calls
    run compiled. It stands before Lightning's own strategy, whose steps it calls."""

    lightning_module: Any

    def training_step(self, *args: object, **kwargs: object) -> object:
        out = self._as_forward("training_step", args, kwargs)
        _say_if_nothing_compiled(self.lightning_module)
        return out

    def validation_step(self, *args: object, **kwargs: object) -> object:
        return self._as_forward("validation_step", args, kwargs)

    def test_step(self, *args: object, **kwargs: object) -> object:
        return self._as_forward("test_step", args, kwargs)

    def predict_step(self, *args: object, **kwargs: object) -> object:
        return self._as_forward("predict_step", args, kwargs)

    def _as_forward(self, step: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        lightnings_own = getattr(super(), step)
        return call_as_forward(self.lightning_module, _step(lightnings_own), *args, **kwargs)


class _SavesTogether:
    """All ranks come to what collects the weights for a checkpoint. It stands before Lightning's own strategy."""

    model: Any

    def lightning_module_state_dict(self) -> dict[str, object]:
        prepared.come_together([self.model], "Trainer.save_checkpoint()")
        lightnings_own: Any = super()
        return lightnings_own.lightning_module_state_dict()


# Long: a class of Lightning's, of which there may be two, with one method for each of its seams.
def _trainer_strategy(base: Any, pl: str) -> type:
    fitting = importlib.import_module(f"{pl}.trainer.states").TrainerFn.FITTING

    class ZeroStrategy(_StepsAsForwards, _SavesTogether, base):
        """Trains a LightningModule sharded; no ``configure_model`` is asked for.

        Args:
            stage: ZeRO stage 0 to 3.
            config: a :class:`zero_compiler.Config`; ``fields`` are its fields given one by one.
            save_distributed_checkpoint: each rank writes its rows into a folder. By default rank 0 writes one file,
                which ``load_from_checkpoint`` reads without zero.
        """

        strategy_name = "zero"
        model: nn.Module
        optimizers: list[torch.optim.Optimizer]

        def __init__(
            self,
            stage: int | None = None,
            *,
            config: Config | None = None,
            save_distributed_checkpoint: bool = False,
            process_group_backend: str | None = None,
            **fields: object,
        ) -> None:
            if stage is not None:
                fields["stage"] = stage
            self.config = prepared.configured(type(self).__name__, config, fields)
            super().__init__(
                tensor_parallel_size=1,
                save_distributed_checkpoint=save_distributed_checkpoint,
                process_group_backend=process_group_backend,
            )

        def setup_environment(self) -> None:
            self._data_parallel_size = self.num_nodes * self.num_processes
            super().setup_environment()

        def setup(self, trainer: Any) -> None:
            assert self.accelerator is not None
            self.accelerator.setup(trainer)
            model = self.precision_plugin.convert_module(self.model)
            self.model = model
            shard_module(model, self.config, self.precision_plugin.precision, self.root_device, "Trainer")
            self.barrier()
            if trainer.state.fn == fitting:
                _refuse_copies(trainer.callbacks)
                self.setup_optimizers(trainer)
            self.setup_precision_plugin()

        def setup_optimizers(self, trainer: object) -> None:
            super().setup_optimizers(trainer)
            for optimizer in self.optimizers:
                prepared.follow(optimizer)
            self.optimizers = [prepared.streamed(optimizer, self.config) for optimizer in self.optimizers]

        def model_to_device(self) -> None:
            """Sharding has done that."""

        @contextlib.contextmanager
        def block_backward_sync(self) -> Iterator[None]:
            with no_sync(self.model):
                yield

        @classmethod
        def register_strategies(cls, strategy_registry: object) -> None:
            _register(strategy_registry, cls)

    ZeroStrategy.__module__ = __name__
    return ZeroStrategy


# Long: as that of the Trainer.
def _fabric_strategy(base: Any, name: str) -> type:
    control: Any = importlib.import_module(f"{name}.strategies.strategy")._BackwardSyncControl

    class NoSync(control):
        def no_backward_sync(
            self, module: nn.Module, enabled: bool
        ) -> contextlib.AbstractContextManager[None]:
            return no_sync(module) if enabled else contextlib.nullcontext()

    class ZeroFabricStrategy(base):
        """Trains what Fabric sets up sharded. Arguments are those of :class:`ZeroStrategy`."""

        def __init__(
            self,
            stage: int | None = None,
            *,
            config: Config | None = None,
            save_distributed_checkpoint: bool = True,
            process_group_backend: str | None = None,
            **fields: object,
        ) -> None:
            if stage is not None:
                fields["stage"] = stage
            self.config = prepared.configured(type(self).__name__, config, fields)
            super().__init__(
                parallelize_fn=lambda module, mesh: module,
                tensor_parallel_size=1,
                save_distributed_checkpoint=save_distributed_checkpoint,
                process_group_backend=process_group_backend,
            )
            self._backward_sync_control = NoSync()
            self._made: list[torch.optim.Optimizer] = []

        def setup_environment(self) -> None:
            self._data_parallel_size = self.num_nodes * self.num_processes
            super().setup_environment()

        def setup_module(self, module: nn.Module) -> nn.Module:
            return self._shard(module, [])

        def setup_module_and_optimizers(
            self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: object = None
        ) -> tuple[nn.Module, list[torch.optim.Optimizer], object]:
            self._shard(module, optimizers)
            made = [self.setup_optimizer(optimizer) for optimizer in optimizers]
            return module, made, scheduler

        def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
            prepared.follow(optimizer)
            return prepared.streamed(optimizer, self.config)

        def save_checkpoint(
            self, path: object, state: dict[str, object], *args: object, **kwargs: object
        ) -> None:
            _refuse_several(state.values(), "save")
            prepared.come_together(state.values(), "Fabric.save()")
            super().save_checkpoint(path, state, *args, **kwargs)

        def load_checkpoint(
            self, path: object, state: object = None, *args: object, **kwargs: object
        ) -> object:
            loaded = state.values() if isinstance(state, dict) else [state]
            _refuse_several(loaded, "load")
            prepared.come_together(loaded, "Fabric.load()")
            return super().load_checkpoint(path, state, *args, **kwargs)

        def _shard(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> nn.Module:
            shard_module(
                module, self.config, self.precision.precision, self.root_device, "Fabric", optimizers
            )
            return module

        @classmethod
        def register_strategies(cls, strategy_registry: object) -> None:
            _register(strategy_registry, cls)

    ZeroFabricStrategy.__module__ = __name__
    return ZeroFabricStrategy


def shard_module(
    module: nn.Module,
    config: Config,
    precision: str,
    device: torch.device,
    who: str,
    optimizers: list[torch.optim.Optimizer] | None = None,
) -> None:
    """Shard a module in place, once, and let it be compiled as a whole and by the modules that its steps call."""
    if is_root(module):
        return
    made = _with_precision(config, precision)
    prepared.shard_and_compile(module, made, optimizers=optimizers or (), device=device.type)
    for part in _calls_of(module):
        part.compile(backend="zero")
    log.info("%s: zero stage %d over %d ranks", type(module).__name__, made.stage, prepared.ranks())
    prepared.tell(who, made)


def _refuse_copies(callbacks: list[object]) -> None:
    """
    Raises:
        IntegrationError: a callback has copied the whole model, and would average rows into that copy.
    """
    for callback in callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if names & {"StochasticWeightAveraging", "WeightAveraging"}:
            raise IntegrationError(
                f"{type(callback).__name__} copies the whole model before zero shards it, and averages into that copy: "
                "leave it out, and keep a torch.optim.swa_utils.AveragedModel that is made in on_fit_start, when the "
                "model is sharded"
            )


def _refuse_several(objects: Iterable[object], verb: str) -> None:
    """
    Raises:
        IntegrationError: there is more than one sharded model among the objects of a checkpoint.
    """
    sharded = [o for o in objects if isinstance(o, nn.Module) and sharded_models_of(o)]
    if len(sharded) > 1:
        raise IntegrationError(
            f"the state of Fabric.{verb}() has {len(sharded)} models that zero shards "
            f"({', '.join(type(model).__name__ for model in sharded)}), and a checkpoint of Fabric holds one: {verb} "
            "each model alone, with its optimizer, in a folder of its own"
        )


def _precision(ours: Any) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Which precision a run has. Lightning knows our strategies as its own for FSDP2, and refuses what zero takes."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def check(self: Any) -> object:
            held = self.strategy, self._strategy_flag
            if not isinstance(held[0], ours):
                return original(self)
            # What was asked for, as a Trainer and as Fabric keep it.
            asked = vars(self).get("_precision_flag") or vars(self).get("_precision_input")
            if asked is not None:
                _with_precision(self.strategy.config, asked)
            self.strategy = self._strategy_flag = None
            try:
                return original(self)
            finally:
                self.strategy, self._strategy_flag = held

        return check

    return make


def _step(method: Callable[..., object]) -> Callable[..., object]:
    return lambda module, *args, **kwargs: method(*args, **kwargs)


def _say_if_nothing_compiled(module: nn.Module) -> None:
    """Where no part of a first training step was compiled, it runs eagerly, which is slow: say so once."""
    if module.__dict__.get("_zero_compiled_said"):
        return
    module.__dict__["_zero_compiled_said"] = True
    # A validation before it may have compiled what it calls, which training may not.
    frames = [frame for sharded_model in sharded_models_of(module) for frame in sharded_model.frames]
    if not any("forward" in frame.programs for frame in frames):
        log.warning(
            "%s: training_step calls no module that zero could compile, so it trains sharded but eagerly, which is "
            "slow: compute in the forward of a module that training_step calls",
            type(module).__name__,
        )


def _register(registry: Any, strategy: type) -> None:
    def in_files(**kwargs: object) -> object:
        folder = os.environ.get(DIRECTORY)
        if not folder:
            raise ConfigError(
                f'strategy="zero_stage_3_nvme" needs the variable {DIRECTORY}, the directory for its files'
            )
        return strategy(
            stage=3,
            offload_params="nvme",
            offload_grads="nvme",
            offload_optimizer="nvme",
            nvme_dir=folder,
            **kwargs,
        )

    offload = {"offload_params": "host", "offload_grads": "host", "offload_optimizer": "host"}
    for name, make, fields in (
        ("zero", strategy, {}),  # of stage 3, unless zero-compiler run says another
        ("zero_stage_1", strategy, {"stage": 1}),
        ("zero_stage_2", strategy, {"stage": 2}),
        ("zero_stage_3_offload", strategy, {"stage": 3, **offload}),
        ("zero_stage_3_nvme", in_files, {}),
    ):
        registry.register(name, make, description=f"zero_compiler, {name}", override=True, **fields)


# The strategies of the packages that were entered, by name of the package: that of a Trainer and that of Fabric.
made: dict[str, tuple[type | None, type | None]] = {}


def register(package: str) -> None:
    """Make the strategies of one of Lightning's packages, and enter their names into its registries, once."""
    if package in made:
        return
    made[package] = trainer, fabric = _strategies(package)
    for name, module, connector in overrides.CONNECTORS:
        if name.partition(".")[0] == package:
            ours = fabric if connector == "_Connector" else trainer
            overrides.replace(f"{name}.{module}.{connector}._check_and_init_precision", _precision(ours))
    if trainer is not None:
        name = "lightning.pytorch" if package == "lightning" else package
        _register(importlib.import_module(f"{name}.strategies").StrategyRegistry, trainer)
    if fabric is not None:
        name = "lightning.fabric" if package == "lightning" else package
        _register(importlib.import_module(f"{name}.strategies").STRATEGY_REGISTRY, fabric)
