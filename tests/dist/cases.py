"""Cases of a test file that share their processes: each is a function of a rank, and says what is wrong there.

    cases = Cases(__name__)

    @cases.add
    def something_holds(rank):
        return [] if ... else ["what is wrong"]

    @pytest.mark.parametrize("name", cases.names)
    def test_it(name):
        cases.check(name)

One that combines anew what others combine is added by ``@cases.add_thorough``: only ``make test-all`` runs it.

Processes, and what a first case has imported and compiled in them, serve all cases of a spawn.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from marks import thorough

from .spawn import run_ranks

Case = Callable[[int], list[str]]


class Cases:
    """Of the file ``module``, which holds this under the name `cases`: what the ranks look it up by.

    Args:
        world: on how many ranks.
        spawns: in how many spawns, one after the other, so that one stays within its time.
        group_timeout: of the process group, in seconds.
    """

    def __init__(self, module: str, world: int = 2, spawns: int = 1, group_timeout: float = 100.0) -> None:
        # The ranks find what they run by these, as they would find a function.
        self.__module__, self.__qualname__ = module, "cases"
        self._world, self._spawns, self._group_timeout = world, spawns, group_timeout
        self._cases: dict[str, Case] = {}
        self._thorough: set[str] = set()
        self._found: dict[tuple[str, ...], list[dict[str, list[str]]]] = {}

    @property
    def names(self) -> list[Any]:
        """What a test is parametrized with."""
        return [name for n in self._cases for name in (thorough(n) if n in self._thorough else [n])]

    def add(self, case: Case) -> Case:
        self._cases[case.__name__] = case
        return case

    def add_thorough(self, case: Case) -> Case:
        self._thorough.add(case.__name__)
        return self.add(case)

    def __call__(self, rank: int, world: int, names: list[str]) -> dict[str, list[str]]:
        """On a rank: of each case at most eight sentences, none where it passes, or a traceback."""
        return {name: self._said(name, rank) for name in names}

    def _said(self, name: str, rank: int) -> list[str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            return self._cases[name](rank)[:8]
        except Exception:
            return [traceback.format_exc()]

    def check(self, name: str) -> None:
        alike = [n for n in self._cases if (n in self._thorough) == (name in self._thorough)]
        together = tuple(alike[alike.index(name) % self._spawns :: self._spawns])
        if together not in self._found:
            run: Any = self
            self._found[together] = run_ranks(
                run, self._world, list(together), timeout=550.0, group_timeout=self._group_timeout
            )
        for rank, found in enumerate(self._found[together]):
            assert not found[name], f"rank {rank}:\n" + "\n".join(found[name])


def refused(call: Callable[[], object], kind: type[BaseException], *words: str) -> list[str]:
    """What is wrong where ``call`` does not raise a ``kind`` whose message has all ``words``."""
    try:
        call()
    except kind as error:
        return [f"{error} without {w!r}" for w in words if w not in str(error)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return [f"no error with {words}"]
