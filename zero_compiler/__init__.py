"""ZeRO and ZeRO-Infinity as an ahead-of-time compiler for PyTorch."""

from zero_compiler import _tree

_tree.install()

from .config import Config
from .construct.construct import init, module
from .optim.optimizer import optimizer
from .params import save_pretrained as _save_pretrained
from .params.contexts import gathered, no_sync
from .params.load import load_safetensors
from .params.save import save_safetensors
from .params.shard import shard
from .tools.inspect import inspect

_save_pretrained.install()

__all__ = [
    "Config",
    "gathered",
    "init",
    "inspect",
    "load_safetensors",
    "module",
    "no_sync",
    "optimizer",
    "save_safetensors",
    "shard",
]
