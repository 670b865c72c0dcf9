"""Every error that a user can meet, in one place.

A message names the parameter or option, what was expected, what was found and what to do.
"""

from __future__ import annotations


class ZeroError(RuntimeError):
    """Base of all errors raised by zero_compiler.

    ``failure``: where another rank has failed, and this error only tells of it, what that rank said (`failing.py`).
    ``passing``: whether the same call may do when it is made again later.
    """

    failure: object = None
    passing: bool = False


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


class StorageError(TransferError):
    """A file could not be made, read, written or flushed.

    Attributes:
        errno: the operating system's reason, or 0 where there is none (a truncated file, wrong use).
        path: the file. ``label``: what its bytes are, for instance a parameter's name.
        offset, nbytes: the range of the failed request; None where it was not about a range.
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int = 0,
        path: str = "",
        label: str = "",
        offset: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = errno
        self.path = path
        self.label = label
        self.offset = offset
        self.nbytes = nbytes


class OptimizerError(ZeroError):
    """An optimizer, or the way it is called, does not fit where its states lie."""


class CaptureError(ZeroError):
    """The captured graph has a form that the compiler does not take."""


class MemoryBudgetError(ZeroError):
    """A plan does not fit the memory budget; raised before anything runs.

    ``least_bytes``: the smallest budget that would do, where that is known.
    ``peak_bytes``: where ``memory_budget_bytes`` was refused, the peak of the best plan that was found; None: a lower
    bound of every plan was more, and none was searched for.
    """

    least_bytes: int | None = None
    peak_bytes: int | None = None


class PassRefused(ZeroError):
    """A pass met a graph that it does not rewrite."""


class VerifyError(ZeroError):
    """A graph or a Program breaks one of the facts that the verifier proves: a bug in a pass."""


class IntegrationError(ZeroError):
    """A library cannot be trained sharded as it was asked to be, or is of a version that is not known."""
