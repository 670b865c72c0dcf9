"""What a search shows, and in which order."""

from __future__ import annotations

import time

import pytest
from null.tools.fit.alike_layers import PARAMETERS, asked

from zero_compiler.errors import MemoryBudgetError
from zero_compiler.tools.fit.estimate import SKETCH, WHOLE, Estimate, Estimator
from zero_compiler.tools.fit.search import OutOfTime, Search, front, search, within, words
from zero_compiler.tools.fit.settings import Setting


def silent(line: str) -> None: ...


def made(us: float, nbytes: int, **how) -> Estimate:
    return Estimate(Setting(4, 3, **how), us, us, {"device": nbytes}, SKETCH)


def test_the_front_has_nothing_that_another_is_ahead_of_in_both():
    fast, small, worse = made(1.0, 100), made(3.0, 10), made(3.5, 50)
    assert front([worse, small, fast]) == [fast, small]
    # Of what is about as fast the simpler one.
    assert front([made(1.001, 100, replicas=2), made(1.0, 100)])[0].setting.replicas == 1


def test_a_search_ends_when_its_time_is_over():
    begin = time.monotonic()
    with pytest.raises(OutOfTime), within(0.05):
        time.sleep(30)
    assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_the_best_was_planned_whole_and_fits(tmp_path):
    room = int(2.6 * PARAMETERS)
    ask = asked(tmp_path, world=4, memory_bytes=room)
    found = Search(ask, room)
    search(ask, None, False, found, silent)
    assert found.best is not None
    assert found.best.how == WHOLE
    assert found.best.nbytes["device"] <= room
    assert found.best in found.front
    # At stage 0 parameters, gradients and states alone are four times the parameters.
    assert all(e.setting.stage for e in found.pool)


@pytest.mark.slow
def test_where_nothing_fits_as_it_is_the_compiler_is_given_a_budget(tmp_path, monkeypatch):
    room = int(1.9 * PARAMETERS)

    def whole(self, setting, say):
        if setting.memory_budget_bytes is None:
            raise MemoryBudgetError("not without tiles")
        return Estimate(setting, 1.0, 1.0, {"device": room}, WHOLE)

    monkeypatch.setattr(Estimator, "whole", whole)
    monkeypatch.setattr(Estimator, "extrapolation", lambda self, setting: whole(self, setting, silent))
    ask = asked(tmp_path, world=4, memory_bytes=room)
    found = Search(ask, room)
    search(ask, None, False, found, silent)
    assert found.best.setting.memory_budget_bytes == room
    assert found.pool == [found.best]
    assert "within a budget of" in words(found.best.setting)


@pytest.mark.slow
def test_what_fits_nowhere_is_told_with_the_nearest(tmp_path):
    ask = asked(tmp_path, world=1, memory_bytes=PARAMETERS)
    found = Search(ask, PARAMETERS)
    search(ask, None, False, found, silent)
    assert not found.pool
    assert found.nearest.nbytes["device"] > PARAMETERS


def test_words():
    setting = Setting(8, 3, 2, {"optimizer": "nvme"}, "remade", 4, 2)
    assert words(setting) == (
        "stage 3, 2 replicas, batch 4, 2 micro-batches, states on nvme, activations made again"
    )
