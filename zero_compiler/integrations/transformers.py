"""transformers: ``class T(ZeroMixin, Trainer)`` trains sharded; also over the trainers of TRL and Seq2SeqTrainer.

A Trainer trains by an accelerator, which the mixin gives a :class:`ZeroPlugin`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from ..config import Config
from ..errors import IntegrationError
from . import overrides, pretrained
from .accelerate import ZeroPlugin, plugin_of, refuse_another_kind
from .prepared import configured


class ZeroMixin:
    """In front of ``transformers.Trainer``, or a class that derives from it, trains its model with zero.

    ``T(..., zero=zero.Config(stage=3))``; without ``zero`` the default configuration. ``bf16=True`` of the arguments is
    ``param_dtype``. Checkpoints hold whole weights (one file of the main process), or with
    ``FSDP_STATE_DICT_TYPE=SHARDED_STATE_DICT`` in the environment the rows of each rank.

    Raises:
        ConfigError: ``zero`` is no Config, or contradicts the arguments.
        IntegrationError: the arguments ask for another way of sharding.
    """

    def __init__(self, *args: object, zero: Config | None = None, **kwargs: object) -> None:
        init_trainer(super().__init__, self, configured("ZeroMixin", zero), args, kwargs)

    def _build_accelerator_args(self, **kwargs: object) -> dict[str, object]:
        above: Any = super()
        return accelerator_args(above._build_accelerator_args, self, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        above: Any = super()
        save_model(above.save_model, self, output_dir, _internal_call)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        above: Any = super()
        load_checkpoint(above._load_from_checkpoint, self, resume_from_checkpoint, model)


def init_trainer(
    original: Callable[..., None],
    trainer: Any,
    config: Config,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    """A trainer's ``__init__``. ``optimizers`` are given to it afterwards: it refuses them beside FSDP, since it does
    not know that the plugin lets an optimizer follow its parameters."""
    trainer._zero_config = config
    if any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__):
        overrides.replace("trl.models.utils.prepare_fsdp", prepare_reference)
    given = inspect.signature(original).bind(*args, **kwargs)
    optimizers = given.arguments.pop("optimizers", None) or (None, None)
    original(*given.args, **given.kwargs)
    plugin = plugin_of(trainer.accelerator)
    if plugin is None:
        raise IntegrationError(
            f"{type(trainer).__name__} made its Accelerator without zero: derive from ZeroMixin first, as in class "
            "T(ZeroMixin, Trainer), and let create_accelerator_and_postprocess be that of transformers"
        )
    if optimizers[0] is not None:
        trainer.optimizer = optimizers[0]
    if optimizers[1] is not None:
        trainer.lr_scheduler = optimizers[1]


def prepare_reference(original: Callable[..., object]) -> Callable[..., object]:
    """TRL's ``prepare_fsdp`` of a reference model, which is not trained."""

    def prepare_fsdp(model: nn.Module, accelerator: Any) -> object:
        plugin = plugin_of(accelerator)
        if plugin is None:
            return original(model, accelerator)
        # It is none of the accelerator's models: those are saved, and say whether the trained one is prepared.
        return plugin.prepare_model(accelerator, model, [], listed=False).eval()

    return prepare_fsdp


def refuse_sharding(args: object) -> None:
    """
    Raises:
        IntegrationError: TrainingArguments that ask for FSDP or DeepSpeed.
    """
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise IntegrationError(
                f"TrainingArguments({name}=...) and zero shard the same model: leave out {name}"
            )


def accelerator_args(
    original: Callable[..., dict[str, object]], trainer: Any, **kwargs: object
) -> dict[str, object]:
    """What a trainer makes its Accelerator of.

    Raises:
        IntegrationError: the arguments ask for FSDP or DeepSpeed, or for weights of another dtype in evaluations.
    """
    args = trainer.args
    refuse_sharding(args)
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise IntegrationError(
                f"TrainingArguments({name}=True) casts the model itself for an evaluation, and zero's sharded weights "
                f"keep the dtype that the optimizer has: leave out {name}; {name[:4]}=True computes in it, in "
                "evaluations too"
            )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise IntegrationError("ACCELERATE_USE_DEEPSPEED=true and zero shard the same model: unset it")
    made = original(**kwargs)
    tuning = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    kind = tuning.get("state_dict_type") or os.environ.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    made["fsdp_plugin"] = plugin = ZeroPlugin(config=trainer._zero_config, state_dict_type=kind)
    plugin.who = type(trainer).__name__
    return made


def save_model(
    original: Callable[..., None], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """``Trainer.save_model``: where checkpoints are sharded it writes nothing for ``from_pretrained`` to read, so a
    user's own call collects the weights first."""
    plugin = plugin_of(trainer.accelerator)
    if plugin is None or _internal_call or "FULL_STATE_DICT" in str(plugin.state_dict_type):
        original(output_dir, _internal_call)
        return
    trainer._save(output_dir or trainer.args.output_dir, trainer.accelerator.get_state_dict(trainer.model))
    if trainer.args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def load_checkpoint(
    original: Callable[..., None], trainer: Any, checkpoint: str, model: object = None
) -> None:
    """What a trainer resumes from.

    Raises:
        IntegrationError: ``checkpoint`` is of another kind than this trainer writes, or was written without zero.
    """
    plugin = plugin_of(trainer.accelerator)
    if plugin is not None:
        give = 'TrainingArguments(fsdp_config={"state_dict_type": "%s"})'
        refuse_another_kind(plugin, checkpoint, "resume_from_checkpoint", give)
    original(checkpoint, model)


overrides.replace(pretrained.LOAD, pretrained.load_once)

__all__ = ["ZeroMixin"]
