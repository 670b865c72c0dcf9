"""What ``zero-compiler run`` starts on each rank: the user's script, in which known libraries train sharded.

A library is prepared when the script has imported it; none is imported for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..config import Config
from ..errors import ConfigError, IntegrationError
from ..tools.run import CONFIG, STRATEGIES_TAKEN
from . import overrides, prepared

KNOWN = "transformers.Trainer, a trainer of TRL, accelerate.Accelerator, Lightning's Trainer and Lightning's Fabric"
_COMPILES = "The first training step and the first evaluation compile the model."


class Launch:
    """What this rank was asked to do, and what has come of it."""

    def __init__(self, config: Config, script: str) -> None:
        self.script = script
        self.said: list[str] = []
        prepared.flags = config
        prepared.listeners.append(self.hear)

    def hear(self, who: str, config: Config) -> None:
        """A model was sharded: say so, once for each way of training."""
        ranks = prepared.ranks()
        text = f"{who}: zero stage {config.stage} over {ranks} rank{'s' if ranks > 1 else ''}"
        if text not in self.said:
            self.said.append(text)
            if os.environ.get("RANK", "0") == "0":
                lines = [text, _COMPILES] if len(self.said) == 1 else [text]
                print(*lines, sep="\n", file=sys.stderr, flush=True)

    def check(self, *_: object) -> None:
        """
        Raises:
            IntegrationError: nothing was sharded.
        """
        if not self.said:
            raise IntegrationError(
                f"{self.script} trains by itself: before its first step of an optimizer it used none of {KNOWN}, so "
                "nothing was sharded; call zero.shard in the script, and start it by torchrun"
            )

    # What is prepared when it was imported -------------------------------------------------------------------------

    def hooks(self) -> dict[str, Callable[[], None]]:
        made = {
            "accelerate": self.prepare_accelerate,
            "transformers.modeling_utils": self.prepare_models,
            "transformers.training_args": self.prepare_arguments,
            "transformers.trainer": self.prepare_trainer,
            "trl.models.utils": self.prepare_trl,
        }
        for package in ("lightning", "pytorch_lightning", "lightning_fabric"):
            made[package] = functools.partial(self.prepare_lightning, package)
        return made

    def prepare_accelerate(self) -> None:
        from . import accelerate

        def make(original: Callable[..., None]) -> Callable[..., None]:
            signature = inspect.signature(original)

            def init(self: object, *args: object, **kwargs: object) -> None:
                given = signature.bind(self, *args, **kwargs)
                _refuse_plugins(given.arguments, accelerate.ZeroPlugin)
                if given.arguments.get("fsdp_plugin") is None:
                    given.arguments["fsdp_plugin"] = accelerate.ZeroPlugin()
                original(*given.args, **given.kwargs)

            return init

        overrides.replace("accelerate.accelerator.Accelerator.__init__", make)

    def prepare_models(self) -> None:
        from . import pretrained

        overrides.replace(pretrained.LOAD, pretrained.load_once)

    def prepare_arguments(self) -> None:
        def make(original: Callable[..., None]) -> Callable[..., None]:
            def post_init(self: object) -> None:
                from . import transformers

                transformers.refuse_sharding(self)
                original(self)

            return post_init

        overrides.replace("transformers.training_args.TrainingArguments.__post_init__", make)

    def prepare_trainer(self) -> None:
        from . import transformers

        def make_init(original: Callable[..., None]) -> Callable[..., None]:
            def init(self: object, *args: object, **kwargs: object) -> None:
                bound: Any = original.__get__(self)
                if isinstance(self, transformers.ZeroMixin):
                    bound(*args, **kwargs)
                else:
                    transformers.init_trainer(bound, self, prepared.configured("Trainer"), args, kwargs)

            return init

        def make_args(original: Callable[..., object]) -> Callable[..., object]:
            def build(self: object, **kwargs: object) -> object:
                bound: Any = original.__get__(self)
                return (
                    bound(**kwargs)
                    if isinstance(self, transformers.ZeroMixin)
                    else transformers.accelerator_args(bound, self, **kwargs)
                )

            return build

        def make_save(original: Callable[..., None]) -> Callable[..., None]:
            def save(self: object, output_dir: str | None = None, _internal_call: bool = False) -> None:
                bound: Any = original.__get__(self)
                transformers.save_model(bound, self, output_dir, _internal_call)

            return save

        def make_load(original: Callable[..., None]) -> Callable[..., None]:
            def load(self: object, resume_from_checkpoint: str, model: object = None) -> None:
                bound: Any = original.__get__(self)
                transformers.load_checkpoint(bound, self, resume_from_checkpoint, model)

            return load

        overrides.replace("transformers.trainer.Trainer.__init__", make_init)
        overrides.replace("transformers.trainer.Trainer._build_accelerator_args", make_args)
        overrides.replace("transformers.trainer.Trainer.save_model", make_save)
        overrides.replace("transformers.trainer.Trainer._load_from_checkpoint", make_load)

    def prepare_trl(self) -> None:
        from . import transformers

        overrides.replace("trl.models.utils.prepare_fsdp", transformers.prepare_reference)

    def prepare_lightning(self, package: str) -> None:
        from . import lightning_strategies

        lightning_strategies.register(package)
        of_trainer, of_fabric = lightning_strategies.made[package]
        for name, module, connector in overrides.CONNECTORS:
            if name.partition(".")[0] == package:
                strategy = of_fabric if connector == "_Connector" else of_trainer
                overrides.replace(f"{name}.{module}.{connector}.__init__", self._connector(strategy))

    def _connector(self, strategy: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def make(original: Callable[..., None]) -> Callable[..., None]:
            signature = inspect.signature(original)

            def init(self: object, *args: object, **kwargs: object) -> None:
                given = signature.bind(self, *args, **kwargs).arguments
                asked = given.get("strategy", "auto")
                if isinstance(asked, str) and asked.lower() in STRATEGIES_TAKEN:
                    given["strategy"] = strategy()
                elif not isinstance(asked, strategy) and not str(asked).lower().startswith("zero"):
                    named = repr(asked) if isinstance(asked, str) else type(asked).__name__
                    raise IntegrationError(
                        f"zero-compiler run takes the place of the strategies {', '.join(STRATEGIES_TAKEN)}, and the "
                        f"script asks for strategy={named}: leave it out, or start the script by torchrun"
                    )
                local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                given["devices"] = local
                given["num_nodes"] = int(os.environ.get("WORLD_SIZE", "1")) // local
                # A strategy that was chosen stands for an accelerator of its own kind: the script's says which.
                original(**given)

            return init

        return make


def _refuse_plugins(given: dict[str, object], ours: type) -> None:
    for name in ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"):
        if given.get(name) is not None and not isinstance(given[name], ours):
            raise IntegrationError(
                f"zero-compiler run shards what the Accelerator prepares, and the script gives it a {name}: leave out "
                f"{name}, or start the script by torchrun"
            )


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls what is to be done when a module was executed, by its name: once, however often it was looked for."""

    def __init__(self, hooks: dict[str, Callable[[], None]]) -> None:
        self.hooks = dict(hooks)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Libraries look for one another without importing what they find, so that the hook stays until the module runs.
        if name not in self.hooks:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Calls(spec.loader, functools.partial(self._executed, name))
                return spec
        return None

    def _executed(self, name: str) -> None:
        hook = self.hooks.pop(name, None)
        if hook is not None:
            hook()


class _Calls(importlib.abc.Loader):
    """A loader that calls ``hook`` when its module has been executed, and is the original otherwise."""

    def __init__(self, loader: importlib.abc.Loader, hook: Callable[[], None]) -> None:
        self.loader, self.hook = loader, hook

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # Python, and libraries that reload themselves, look for the loader that made the module.
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.hook()


def main(argv: list[str]) -> None:
    """``[-m] SCRIPT ARGS...``"""
    is_module = argv[0] == "-m"
    script, *args = argv[1:] if is_module else argv
    launch = Launch(Config.from_dict(json.loads(os.environ[CONFIG])), script)
    sys.meta_path.insert(0, AfterImport(launch.hooks()))
    register_optimizer_step_pre_hook(launch.check)
    sys.argv = [script, *args]
    try:
        try:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = os.path.dirname(
                    os.path.abspath(script)
                )  # as of a script that Python itself starts
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        if not launch.said:
            raise IntegrationError(f"nothing of {script} was sharded: it trained by none of {KNOWN}")
    except (IntegrationError, ConfigError) as error:
        print(f"zero-compiler run: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    finally:
        if torch.distributed.is_initialized() and sys.exc_info()[0] is None:
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
