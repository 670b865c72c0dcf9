"""What compiling drops is collected, and what compiled a frame is not kept."""

from __future__ import annotations

import gc

import pytest
from null.small import batch, two, use
from torch import fx
from torch._dynamo import bytecode_transformation

import zero_compiler as zero
from zero_compiler.compile import backend, garbage
from zero_compiler.compile.frame_state import FrameState


@pytest.fixture(autouse=True)
def nothing_set_aside():
    """Tests run with objects of the imports set aside."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if before:
        gc.freeze()


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def _alive() -> int:
    return sum(type(o) is _Cycle for o in gc.get_objects())


@pytest.mark.slow
def test_what_is_made_inside_is_collected_and_nothing_stays_set_aside():
    _Cycle()
    with garbage.older_objects_set_aside(garbage.LARGE) as collect:
        assert gc.get_freeze_count() > 0
        _Cycle()
        collect()
        assert _alive() == 0  # the older one is not looked at, or listed
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert _alive() == 0


def test_nothing_stays_set_aside_after_an_error():
    with pytest.raises(KeyError), garbage.older_objects_set_aside(garbage.LARGE):
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_the_program_has_set_aside_stays_so():
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        _Cycle()
        with garbage.older_objects_set_aside(garbage.LARGE) as collect:
            collect()
        assert gc.get_freeze_count() == before
        assert _alive() == 1
    finally:
        gc.unfreeze()


def test_a_process_that_only_plans_collects_rarely_and_as_before_afterwards():
    before = gc.get_threshold()
    with garbage.rarely_collected():
        assert gc.get_threshold() == garbage.THRESHOLDS
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), garbage.rarely_collected():
        raise KeyError
    assert gc.get_threshold() == before


@pytest.mark.slow
def test_a_small_graph_collects_nothing():
    gc.collect()
    with garbage.older_objects_set_aside(garbage.LARGE - 1) as collect:
        assert gc.get_freeze_count() == 0
        _Cycle()
        collect()
        assert _alive() == 1
    gc.collect()


@pytest.mark.slow
def test_what_compiled_a_frame_goes_with_the_compiler():
    use(zero.shard(two()), "compiled")(batch()).backward()
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) in (backend._FrameCompiler, FrameState)]


def _nodes() -> list[fx.Node]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is fx.Node and o.op != "root"]


def test_no_graph_is_kept_with_what_was_compiled_from_it():
    before = _nodes()
    step = use(zero.shard(two()), "compiled")
    step(batch()).backward()
    known = set(map(id, before))
    assert not [node for node in _nodes() if id(node) not in known]
    step(batch()).backward()


def test_dynamo_keeps_no_instructions_of_modules(monkeypatch):
    monkeypatch.setattr(garbage, "LARGE", 0)
    cached = bytecode_transformation._cached_cleaned_instructions
    use(zero.shard(two()), "compiled")(batch())
    # Of each of the modules that it has followed it had those of several functions.
    assert cached.cache_info().currsize < 3
