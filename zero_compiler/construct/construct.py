"""Partitioned construction, the public part: ``zero.module`` and ``zero.init``.

Inside a scope every parameter is partitioned when the ``__init__`` of its owner returns, so that no rank ever holds the
whole model: the peak is the shards plus the largest parameter, or the parameters of the one owner whose
``__init__`` makes several. Values are those of plain construction, bit for bit: every rank runs the same
constructor on the same seed, and nothing is broadcast. `unsharded_mode.py` says how a write to such a parameter acts on
its full value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..config import Config
from ..errors import ShardError
from ..params.shard import DEFAULT_STAGE
from ..ranks.failure_broadcast import together
from ..ranks.mesh import ranks_of
from .lazy_construction import Building, Options, current

C = TypeVar("C", bound=type)


def init(
    *,
    stage: int = DEFAULT_STAGE,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    config: Config | None = None,
    **fields: object,
) -> AbstractContextManager[None]:
    """A context in which modules are partitioned as they are made.

    When it ends, each module made in it that is not part of another such module is a sharded model of its own, as
    after :func:`zero.shard`, with names relative to it. ``with zero.init(): model = GPT(cfg)`` gives one. Use
    models (forward, optimizer) after the context.

    Inside, initialisers and any other write or read of a partitioned parameter mean what they mean on the full
    tensor, also for models that were sharded before: so ``with zero.init(): model.to_empty(device="cpu");
    model.apply(init_weights)`` gives values to a model that was made on the meta device.

    Every rank must run the same code in it on the same seed. Modules from before the context that become part of
    one made inside are partitioned with rank 0's values.

    Args: as :func:`zero.shard`. Inside another construction scope, a context without arguments joins it; one with
    other options makes nested shards with a placement of their own.

    Raises:
        ConfigError: unknown or contradictory options.
        RankMismatchError: ranks build different models.
    """
    with together(lambda: ranks_of(mesh), "zero.init"):
        return Building(_options(stage, mesh, device, config, fields))


@overload
def module(cls: C, /) -> C: ...


@overload
def module(
    *,
    stage: int = DEFAULT_STAGE,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    config: Config | None = None,
    **fields: object,
) -> Callable[[C], C]: ...


def module(
    cls: object = None,
    /,
    *,
    stage: int = DEFAULT_STAGE,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    config: Config | None = None,
    **fields: object,
) -> object:
    """Class decorator: instances are partitioned as they are made, and sharded when the outermost ``__init__``
    returns; subclasses too, their own parameters included.

    Bare (``@zero.module``) or with the arguments of :func:`zero.shard`. The class stays the same object with a
    wrapped ``__init__``. Made inside another construction scope, an instance of a bare class (or of one with equal
    options) is part of what is built around it; one with other options is a nested shard with its own placement.

    Raises:
        ConfigError: unknown or contradictory options.
        ShardError: what is decorated is no subclass of nn.Module.
    """
    options = _options(stage, mesh, device, config, fields)

    def decorate(cls: object) -> object:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ShardError(
                f"zero.module decorates subclasses of nn.Module, not {cls!r}; for an instance use zero.shard"
            )
        _wrap_init(cls, options)
        _wrap_subclasses(cls, options)
        return cls

    return decorate if cls is None else decorate(cls)


def _options(
    stage: int,
    mesh: DeviceMesh | None,
    device: torch.device | str | None,
    config: Config | None,
    fields: dict[str, object],
) -> Options:
    if stage is not DEFAULT_STAGE:
        fields["stage"] = stage
    given = bool(fields) or mesh is not None or device is not None or config is not None
    return Options(Config.make(config, fields), mesh, device, given)


def _wrap_init(cls: Any, options: Options) -> None:
    original = cls.__init__
    if "__init__" in cls.__dict__:
        call = original
    else:
        # What comes next is decided by the class of the instance, as it would be without this __init__.
        def call(self: object, *args: object, **kwargs: object) -> None:
            super(cls, self).__init__(*args, **kwargs)

    @functools.wraps(original)
    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        construction = current()
        if construction is not None and any(m is self for m in construction.making):
            call(self, *args, **kwargs)  # reached by super().__init__() from a subclass
            return
        with Building(options, self):
            call(self, *args, **kwargs)

    cls.__init__ = __init__


def _wrap_subclasses(cls: Any, options: Options) -> None:
    """A subclass's ``__init__`` goes on after that of ``cls`` has returned: it is the outermost."""
    own = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(sub: object, **kwargs: object) -> None:
        if own is None:
            super(cls, sub).__init_subclass__(**kwargs)
        else:
            own.__get__(None, sub)(**kwargs)
        if "__init__" in sub.__dict__:
            _wrap_init(sub, options)

    cls.__init_subclass__ = classmethod(__init_subclass__)
