"""What compiling drops: graphs are full of cycles, so their memory comes back only when Python's collector runs.

A full collection looks at every object of the process, hundreds of thousands in libraries alone. So Python puts one off
until as many objects are new as a quarter of those: by then more may be dropped graphs than live ones, and what the
process has taken for them it keeps.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from ..torch_versions import forget_instructions

THRESHOLDS = 20_000, 10, 5  # of a process that only plans: all of it after a million new objects
LARGE = 200  # nodes of a frame's graph: what compiling a smaller one drops is less than a collection costs


@contextlib.contextmanager
def older_objects_set_aside(nodes: int) -> Iterator[Callable[[], None]]:
    """Inside, collections look only at what is made inside: each takes less time, and Python makes them earlier.

    Args:
        nodes: of the graph that is compiled.

    Yields:
        collect: to be called after graphs were dropped, before others are made. It does nothing for a small graph, and
            nothing where the program has set objects aside itself (``gc.freeze()``): these stay so, and the others may
            be many.
    """
    if nodes < LARGE or gc.get_freeze_count():
        yield _nothing
        return
    _forget_sources()
    gc.freeze()
    try:
        yield _collect
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Inside, Python collects after so many new objects as a process may have that only plans: it gives back nothing
    that a training would need, and collections take a sixth of its time otherwise."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _collect() -> None:
    gc.collect()


def _nothing() -> None:
    pass


def _forget_sources() -> None:
    """What Dynamo has read to follow a frame, and reads again where it is asked for: takes 15 MiB of 16 layers.

    Instructions of functions, of which no two modules of a sharded model have the same; and lines of files, for the
    traces that it keeps of each operator.
    """
    forget_instructions()
    known: Any  # a tuple, whose form says where the lines came from
    for name, known in list(linecache.cache.items()):
        if len(known) > 1 and known[1] is not None:  # a file with a time of its last change
            linecache.cache.pop(name, None)


def empty(gm: fx.GraphModule) -> None:
    """A module is kept by what was compiled from it, and its graph is read no more: the graph goes."""
    gm.graph = fx.Graph()
    gm.meta.clear()
