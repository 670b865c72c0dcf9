"""Which replicated parameter of this rank is which of another rank's, at their first average (`gradient_average.py`).

Ranks run one script, and still may know a parameter by different names, have different ones in their first backward, or
have compiled other code before. What tells one parameter from another is then its values, which all ranks began with,
and the last parts of its name; of several that are equal in these, as two copies of a model are, a parameter of the
same module that is averaged already, or the order in which their gradients came.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import RankMismatchError

_PART_BYTES = 1 << 20  # of a parameter at a time
_ODD = -7046029254386353131  # as in splitmix64


@dataclass(frozen=True)
class Described:
    """A parameter, as its rank describes it to the others.

    Args:
        value: see :func:`value_of`.
        among_namesakes: its place among those of its rank that are equal in all this and were never averaged, in the
            order in which they were found, and how many they are; (0, 1) for nearly all.
        among_alike: the same where names that agree count as equal (:func:`names_agree`).
        root: stands for the module in which it has that name, on its rank.
        companion: which of the parameters that these ranks average already stands in that module; None: none does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    value: int
    among_namesakes: tuple[int, int] = (0, 1)
    among_alike: tuple[int, int] = (0, 1)
    root: int = 0
    companion: int | None = None

    def like(self, other: Described) -> bool:
        """Whether both may be one parameter, seen from two ranks."""
        return self._form == other._form and self.value == other.value and names_agree(self.name, other.name)

    @property
    def _form(self) -> tuple[tuple[int, ...], str]:
        return self.shape, self.dtype


@dataclass
class Matched:
    """One parameter and where it stands in the lists of the ranks that have it there."""

    described: Described
    at: dict[int, int] = field(default_factory=dict)


def names_agree(a: str, b: str) -> bool:
    """Whether one name is the end of the other: a rank may have found the parameter in a module around the model."""
    short, long = sorted((a, b), key=len)
    return long == short or long.endswith(f".{short}")


def match(lists: Sequence[Sequence[Described]]) -> list[Matched]:
    """The parameters of which ``lists`` has the descriptions, a list for each rank: in one order, on every rank.

    A parameter need not be in every list: ranks may have used different ones.

    Raises:
        RankMismatchError: nothing tells two parameters apart.
    """
    first = lists[0]
    if all(len(one) == len(first) and all(map(Described.like, first, one)) for one in lists):
        found = [Matched(each, {rank: i for rank in range(len(lists))}) for i, each in enumerate(first)]
    else:
        try:
            found = _match_apart(lists)
        except RankMismatchError:
            for same in zip(*lists, strict=False):  # the same parameters, it seems, and other values
                if len({d.value for d in same}) > 1 and len({(d.name, d.shape, d.dtype) for d in same}) == 1:
                    raise _different_values(same[0].name) from None
            raise
    for each in found:
        described = [lists[rank][i] for rank, i in each.at.items()]
        one_name = len({d.name for d in described}) == 1
        places = [d.among_namesakes if one_name else d.among_alike for d in described]
        # A rank that has but one has no choice.
        chosen = {(place, count) for place, count in places if count > 1}
        if len(chosen) > 1 and not (one_name and _in_one_module(described)):
            raise _ambiguous(each.described.name)
    return found


def _match_apart(lists: Sequence[Sequence[Described]]) -> list[Matched]:
    found: list[Matched] = []
    left = [list(range(len(one))) for one in lists]
    for rank, mine in enumerate(lists):
        # What has a companion is told apart by it, and is no choice of another that has none.
        for i in sorted(left[rank], key=lambda i: mine[i].companion is None):
            each = Matched(mine[i], {rank: i})
            for other in range(rank + 1, len(lists)):
                j = _find(mine[i], [(j, lists[other][j]) for j in left[other]])
                if j is not None:
                    each.at[other] = j
                    left[other].remove(j)
            found.append(each)
        left[rank] = []
    return found


def _in_one_module(described: Sequence[Described]) -> bool:
    """Whether each of them stands in one module with a parameter that is averaged already, the same one for all."""
    return len({d.companion for d in described}) == 1 and described[0].companion is not None


def _find(wanted: Described, among: Sequence[tuple[int, Described]]) -> int | None:
    """Where what is ``wanted`` stands among the parameters of another rank: by its whole name, if it is there by it.

    Of several that are alike on both ranks the order says nothing here, since the ranks have used different ones.
    """
    alike = [(j, other) for j, other in among if wanted.like(other)]
    namesakes = [(j, other) for j, other in alike if wanted.name == other.name]
    together = [j for j, other in namesakes if _in_one_module([wanted, other])]
    if len(together) == 1:
        return together[0]
    if len(namesakes) == 1 and min(wanted.among_namesakes[1], namesakes[0][1].among_namesakes[1]) == 1:
        return namesakes[0][0]
    if len(alike) > 1 or any(min(wanted.among_alike[1], other.among_alike[1]) > 1 for _, other in alike):
        raise _ambiguous(wanted.name)
    return alike[0][0] if alike else None


@dataclass(frozen=True)
class NeverAveraged:
    """A parameter of this rank that was never averaged; see :class:`Described`."""

    name: str
    param: nn.Parameter
    root: object = None


def find_like(
    wanted: Described, known: Sequence[NeverAveraged], roots: Collection[object]
) -> nn.Parameter | None:
    """This rank's parameter that another one describes, of those that are ``known`` here; None: there is none, or
    nothing says which.

    Args:
        roots: of this rank's parameters that stand in one module with the one that is wanted there.
    """
    alike = [
        k
        for k in known
        if (tuple(k.param.shape), str(k.param.dtype)) == (wanted.shape, wanted.dtype)
        and names_agree(k.name, wanted.name)
        and value_of(k.param) == wanted.value
    ]
    namesakes = [k for k in alike if k.name == wanted.name]
    together = [k for k in namesakes if k.root in roots]
    if len(together) == 1:
        return together[0].param
    if len(namesakes) == 1 and wanted.among_namesakes[1] == 1:
        return namesakes[0].param
    return alike[0].param if len(alike) == 1 else None


def _different_values(name: str) -> RankMismatchError:
    return RankMismatchError(
        f"ranks have different values of parameter {name!r}, which is not sharded: build the model under the same seed "
        "on every rank, or load the same checkpoint"
    )


def _ambiguous(name: str) -> RankMismatchError:
    return RankMismatchError(
        f"ranks have several parameters {name!r}, which are not sharded and have equal values, and nothing says which "
        "of them is which on another rank: train them in one order on all ranks, or compile one module that has all"
    )


def not_found(wanted: Matched, found: Sequence[Matched], world: int) -> RankMismatchError:
    """On every rank: one of them knows no such parameter, of all that were :func:`match`-ed."""
    name, shape = wanted.described.name, list(wanted.described.shape)
    alone = [each.described for each in found if set(each.at) - set(wanted.at)]
    if any(other.name == name and list(other.shape) == shape for other in alone):
        return _different_values(name)
    ranks = [rank for rank in range(world) if rank not in wanted.at]
    others = "".join(f"; there {o.name!r} of shape {list(o.shape)} got one" for o in alone[:1])
    return RankMismatchError(
        f"parameter {name!r} of shape {shape}, which is not sharded, got its first gradient on rank "
        f"{min(wanted.at)} of {world}, and none, or several, that began with the same values are known on rank "
        f"{', '.join(map(str, ranks))}{others}: compile one module that has it on every rank, and build that under the "
        "same seed or load the same checkpoint"
    )


def value_of(param: torch.Tensor) -> int:
    """A number of 64 bits that depends on every byte of a parameter and on its place: exact, in whichever order a
    machine adds."""
    total = torch.zeros((), dtype=torch.int64, device=param.device)
    places = total.new_zeros(0)
    data = param.detach().contiguous()
    if data.is_complex():
        data = torch.view_as_real(data)
    for part in data.reshape(-1).view(torch.uint8).split(_PART_BYTES):
        words = F.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        if words.numel() != places.numel():
            places = 2 * torch.arange(words.numel(), device=param.device) + 1
        mixed = words * places
        # Of a product no other bit depends on the highest one, the sign of a number: bring it down.
        for _ in range(2):
            mixed *= _ODD
            mixed ^= (mixed >> 32) & 0xFFFFFFFF
        total = total * 1_000_003 + mixed.sum()
    return int(total)
