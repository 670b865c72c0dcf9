"""``zero-compiler run``: torchrun, with the fields of Config as flags, for scripts that are not edited."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..config import Config
from ..errors import ConfigError, IntegrationError
from .flags import help_of_fields

CONFIG = "ZERO_RUN_CONFIG"  # the variable by which ranks are told of the configuration, as JSON
STRATEGIES_TAKEN = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")
_LAUNCHED = "zero_compiler.integrations.launch"


def run(argv: list[str]) -> int:
    """Start the ranks of a script, and return its exit status: 128 and the signal's number where one has stopped it.

    Raises:
        ConfigError: a field of the configuration.
        IntegrationError: the environment asks accelerate for another way of training, or there is no such script.
    """
    args = parser().parse_args(argv)
    config = _config_of(args)
    _refuse_environment()
    if args.no_python:
        raise IntegrationError("zero-compiler run starts Python scripts: leave out --no-python")
    if not args.module and not os.path.isfile(args.training_script):
        raise IntegrationError(
            f"there is no file {args.training_script!r}, which stands where the script is expected: behind all flags "
            "of zero-compiler run, and before the script's own"
        )
    os.environ[CONFIG] = json.dumps({n: v for n, v in config.to_dict().items() if n in config._given})
    if not torch.accelerator.is_available():
        os.environ.setdefault(
            "ACCELERATE_USE_CPU", "true"
        )  # else accelerate takes ranks for single processes
    module = ["-m"] if args.module else []
    args.training_script_args = [*module, args.training_script, *args.training_script_args]
    args.module, args.training_script = True, _LAUNCHED
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode  # it has said why
        _say(f"rank {rank} was ended by {_name(-failure.exitcode)}, and the others were stopped")
        return 1
    except SignalException as stopped:
        _say(f"stopped by {_name(stopped.sigval)}, and so were the ranks")
        return 128 + int(stopped.sigval)
    return 0


def _say(text: str) -> None:
    print(f"zero-compiler run: {text}", file=sys.stderr, flush=True)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def parser() -> argparse.ArgumentParser:
    """That of torchrun, and a flag for each field of Config."""
    made = torchrun.get_args_parser()
    made.prog = "zero-compiler run"
    made.description = (
        "Start a script that uses transformers.Trainer, a trainer of TRL, accelerate, Lightning or Fabric on several "
        "ranks, and train its model sharded. Takes the flags of torchrun and these:"
    )
    group = made.add_argument_group("zero_compiler")
    group.add_argument("--config", metavar="FILE", help="JSON file with fields of Config")
    said, types = help_of_fields(), get_type_hints(Config)
    for field in dataclasses.fields(Config):
        names = list(dict.fromkeys((f"--{field.name.replace('_', '-')}", f"--{field.name}")))
        kind: dict[str, Any] = {"help": said[field.name].replace("%", "%%"), "default": None}
        if types[field.name] is bool:
            kind["action"] = argparse.BooleanOptionalAction
        elif types[field.name] in (int, int | None):
            kind |= {"type": int, "metavar": "N"}
        group.add_argument(*names, dest=f"zero_{field.name}", **kind)
    return made


def _config_of(args: argparse.Namespace) -> Config:
    base = None
    if args.config is not None:
        try:
            base = Config.from_dict(json.loads(Path(args.config).read_text()))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"--config {args.config} is no JSON file of fields of Config: {error}"
            ) from None
    names = [f.name for f in dataclasses.fields(Config)]
    given = {n: v for n in names if (v := getattr(args, f"zero_{n}")) is not None}
    return Config.make(base, given)


def _refuse_environment() -> None:
    for name, value in os.environ.items():
        if not name.startswith("ACCELERATE_USE_") or name == "ACCELERATE_USE_CPU":
            continue
        if value.lower() in ("1", "true", "yes", "y", "on", "t"):
            raise IntegrationError(f"{name}={value} asks accelerate for another way of training: unset it")


def main(argv: list[str]) -> None:
    sys.exit(run(argv))
