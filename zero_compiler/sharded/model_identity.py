"""Which of the models of its ranks a sharded model is: equal on all of them, without asking."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections import Counter
from collections.abc import Collection, Iterator

import torch.distributed as dist

from ..ranks.group import Group

_order = itertools.count()
# Numbers of models, and of copies of each: counted apart for the ranks that share them, which all make the same ones,
# whatever one of them makes alone or with others.
_numbers: Counter[tuple[object, ...]] = Counter()


def shared_by(group: Group) -> tuple[int, ...]:
    """The ranks that make a model together, by their numbers in the job; () where that is this one alone."""
    return () if group.one_rank else group.ranks


@contextlib.contextmanager
def made_together(group: Group) -> Iterator[None]:
    """Where the model that is made inside is not made after all, maybe another rank has not even begun: the next one
    gets its number."""
    key = (shared_by(group),)
    before = _numbers[key]
    try:
        yield
    except BaseException:
        _numbers[key] = before
        raise


def _next(key: tuple[object, ...]) -> int:
    _numbers[key] += 1
    return _numbers[key] - 1


class ModelIdentity:
    """The number of a sharded model among those of its ranks.

    A copy, made by copying or loading, has the number of its original and one of its own, which it gets when it is
    first needed: so a rank may make copies for itself alone.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._serial: tuple[int, ...] | None = (_next((shared_by(group),)),)
        self._copy_of: tuple[int, ...] = ()
        self.made = next(_order)  # of all in this process: which of two came first
        self._of_some = not group.one_rank and group.everyone.world < dist.get_world_size()

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._copy_of, self._serial = self._serial or self._copy_of, None
        self.made = next(_order)

    @property
    def serial(self) -> tuple[int, ...]:
        """Which of the models of its ranks this is: equal on all of them; used to agree with the others."""
        if self._serial is None:
            self._serial = (*self._copy_of, _next((shared_by(self._group), self._copy_of)))
        return self._serial

    @property
    def series(self) -> int:
        """Tells the transfers of this model from those of all others over the same process group, on all its ranks."""
        over = () if self._group.one_rank else tuple(dist.get_process_group_ranks(self._group.pg))
        if len(self.serial) == 1 and over == shared_by(self._group):
            return self.serial[0]
        return zlib.crc32(repr((shared_by(self._group), self.serial)).encode())

    def title(self) -> str:
        """Which of the sharded models of its ranks it is, in the order in which they were made."""
        number = ".".join(str(n) for n in self.serial)
        return f"model {number}" + (f" over {self._group.everyone.world} ranks" if self._of_some else "")

    def is_among(self, titles: Collection[str], group: Group) -> bool:
        """Whether a peer of ``group`` means this model by one of ``titles``. A copy that was never used is none."""
        known = self._serial is not None and set(self._group.ranks) <= set(group.ranks)
        return known and self.title() in titles
