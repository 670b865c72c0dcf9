"""Every error that a user can meet, in one place.

A message names the parameter or option, what was expected, what was found and what to do.
"""

from __future__ import annotations


class ZeroError(RuntimeError):
    """Base of all errors raised by zero_compiler."""


class ConfigError(ZeroError, ValueError):
    """An option is unknown, out of range, contradicts another one or is not available."""


class ShardError(ZeroError):
    """A model or parameter cannot be sharded, or was changed in a way sharding cannot follow."""


class GradientError(ZeroError):
    """Gradients are used in a state in which their values are not what the user would expect."""


class RankMismatchError(ZeroError):
    """Ranks disagree about the model, the configuration or the call that they are in."""


class TransferError(ZeroError):
    """A collective or another transfer failed; the text holds the operation and its parameters."""


class StorageError(ZeroError):
    """A file of the NVMe tier cannot be made, read or written; the text holds file, offset and what lies there."""


class OptimizerError(ZeroError):
    """An optimizer, or the way it is called, does not fit where its states lie."""


class CaptureError(ZeroError):
    """The captured graph has a form that the compiler does not take."""


class MemoryBudgetError(ZeroError):
    """A plan does not fit the memory budget; raised before anything runs."""


class PassRefused(ZeroError):
    """A pass met a graph that it does not rewrite."""


class VerifyError(ZeroError):
    """A graph or a Program breaks one of the facts that the verifier proves: a bug in a pass."""
