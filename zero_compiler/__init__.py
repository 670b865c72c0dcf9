"""ZeRO and ZeRO-Infinity as an ahead-of-time compiler for PyTorch."""

from zero_compiler import _tree

_tree.install()

from .config import Config
from .construct import init, module
from .inspect import inspect
from .load import load_safetensors
from .optimizer import optimizer
from .shard import shard
from .windows import gathered, no_sync

__all__ = [
    "Config",
    "gathered",
    "init",
    "inspect",
    "load_safetensors",
    "module",
    "no_sync",
    "optimizer",
    "shard",
]
