"""What is replaced in a library that has no public seam for it: all of it, in one place.

Each override stands in ``OVERRIDES`` with the versions that it was tested with, what its replacement relies on, and why
it is there. A replacement does what the original does for everybody who does not use zero. Nothing of torch and of the
user's model is replaced.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

from ..errors import IntegrationError

log = logging.getLogger("zero_compiler")


@dataclass(frozen=True)
class Override:
    """A function of a library that is replaced.

    Attributes:
        library: name of the distribution whose version counts.
        tested: versions that the tests ran with.
        module, attribute: where it stands; the attribute may be one of a class ("Accelerator.prepare").
        parameters: names of its parameters that the replacement relies on.
        why: what there is no public seam for.
    """

    library: str
    tested: str
    module: str
    attribute: str
    parameters: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


# Where Lightning's packages take what a script says of strategy and devices.
CONNECTORS = (
    ("lightning.pytorch", "trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    ("lightning.fabric", "connector", "_Connector"),
    ("pytorch_lightning", "trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    ("lightning_fabric", "connector", "_Connector"),
)
OVERRIDES = tuple(
    Override(*row)
    for row in (
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.state",
            "AcceleratorState.__init__",
            ("mixed_precision", "cpu", "fsdp_plugin"),
            "it drops an FSDP plugin on CPU ranks and in a single process",
        ),
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.accelerator",
            "Accelerator.prepare",
            ("args", "device_placement"),
            "it calls fully_shard, and takes one model together with one optimizer",
        ),
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.accelerator",
            "Accelerator.prepare_model",
            ("model", "device_placement", "evaluation_mode"),
            "it refuses FSDP2",
        ),
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.accelerator",
            "Accelerator.clip_grad_norm_",
            ("parameters", "max_norm", "norm_type"),
            "it compares lists of parameters by value, which fails for two sharded models",
        ),
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.accelerator",
            "Accelerator.clip_grad_value_",
            ("parameters", "clip_value"),
            "it refuses every FSDP plugin",
        ),
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.accelerator",
            "Accelerator.get_state_dict",
            ("model", "unwrap"),
            "one rank alone waits in it for the timeout of the process group, and tied weights come out as copies",
        ),
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.accelerator",
            "Accelerator.save_state",
            ("output_dir",),
            "it pairs models and optimizers by their position",
        ),
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.accelerator",
            "Accelerator.load_state",
            ("input_dir",),
            "it pairs models and optimizers by their position",
        ),
        (
            "trl",
            ">=1.16,<1.17",
            "trl.models.utils",
            "prepare_fsdp",
            ("model", "accelerator"),
            "it calls fully_shard on a reference model",
        ),
        (
            "accelerate",
            ">=1.15,<1.16",
            "accelerate.accelerator",
            "Accelerator.__init__",
            ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"),
            "under zero-compiler run: it takes a plugin from nowhere but the script",
        ),
        (
            "transformers",
            ">=5.23,<5.24",
            "transformers.training_args",
            "TrainingArguments.__post_init__",
            (),
            "under zero-compiler run: it loads DeepSpeed, or fails without it, before there is a Trainer",
        ),
        (
            "transformers",
            ">=5.23,<5.24",
            "transformers.trainer",
            "Trainer.__init__",
            ("optimizers",),
            "under zero-compiler run: it refuses optimizers that are given, beside an FSDP plugin",
        ),
        (
            "transformers",
            ">=5.23,<5.24",
            "transformers.trainer",
            "Trainer._build_accelerator_args",
            ("kwargs",),
            "under zero-compiler run: the plugin is to hold whole checkpoints, as transformers' own",
        ),
        (
            "transformers",
            ">=5.23,<5.24",
            "transformers.trainer",
            "Trainer.save_model",
            ("output_dir", "_internal_call"),
            "under zero-compiler run: it writes nothing beside sharded checkpoints",
        ),
        (
            "transformers",
            ">=5.23,<5.24",
            "transformers.trainer",
            "Trainer._load_from_checkpoint",
            ("resume_from_checkpoint", "model"),
            "under zero-compiler run: a checkpoint of another kind ends in an error about a file or an assertion",
        ),
        (
            "transformers",
            ">=5.23,<5.24",
            "transformers.modeling_utils",
            "PreTrainedModel._load_pretrained_model",
            ("model", "state_dict", "checkpoint_files", "load_config", "expected_keys"),
            "where it makes a copy of the files, it makes one on every rank of a host",
        ),
        *(
            (
                package.partition(".")[0],
                ">=2.6,<2.7",
                f"{package}.{module}",
                f"{connector}._check_and_init_precision",
                (),
                "it takes zero's strategies for those of FSDP2, and refuses a precision that zero has",
            )
            for package, module, connector in CONNECTORS
        ),
        *(
            (
                package.partition(".")[0],
                ">=2.6,<2.7",
                f"{package}.{module}",
                f"{connector}.__init__",
                ("strategy", "devices", "num_nodes"),
                "under zero-compiler run: a strategy, devices and nodes come from nowhere but the script",
            )
            for package, module, connector in CONNECTORS
        ),
    )
)


def override_of(name: str) -> Override:
    return next(o for o in OVERRIDES if o.name == name)


def replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``make(original)`` in the place of a function in ``OVERRIDES``, once.

    Raises:
        IntegrationError: the library's version has no such function, or one with other parameters.
    """
    override = override_of(name)
    version = _version(override.library)
    found: Any = importlib.import_module(override.module)
    *path, last = override.attribute.split(".")
    try:
        for part in path:
            found = getattr(found, part)
        original = getattr(found, last)
    except AttributeError:
        raise moved(override, version, "does not have") from None
    if hasattr(original, "__zero_override__"):
        return
    parameters = inspect.signature(original).parameters
    missing = [p for p in override.parameters if p not in parameters]
    if missing:
        raise moved(override, version, f"has without the parameter {missing[0]!r}")
    if version not in SpecifierSet(override.tested):
        log.info(
            "%s %s: %s is replaced, which was tested with %s",
            override.library,
            version,
            name,
            override.tested,
        )
    made: Any = functools.wraps(original)(make(original))
    made.__zero_override__ = original
    static = isinstance(found, type) and isinstance(inspect.getattr_static(found, last), staticmethod)
    setattr(found, last, staticmethod(made) if static else made)
    if not path:
        # Modules that had imported the function by its name hold it themselves.
        package = override.module.split(".")[0]
        for other, module in list(sys.modules.items()):
            if other.split(".")[0] == package and vars(module).get(last) is original:
                setattr(module, last, made)


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # lightning_fabric comes with pytorch_lightning and lightning
        return importlib.import_module(library).__version__


def moved(override: Override, version: str, what: str) -> IntegrationError:
    return IntegrationError(
        f"zero replaces {override.name}, which {override.library} {version} {what}: install {override.library} "
        f"{override.tested}, with which this was tested"
    )
