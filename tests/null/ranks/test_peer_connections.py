"""What a rank knows of the others, by the messages that come to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zero_compiler.ranks import peer_connections, peer_waits
from zero_compiler.ranks.peer_connections import Peers


def test_the_first_rank_that_went_is_named(monkeypatch):
    """Others end because of it: the one that passed it on, here, and any that is looked for."""
    monkeypatch.setattr(peer_connections._watch, "add", lambda _: None)
    group: Any = SimpleNamespace(pg=type("Pg", (), {})(), rank=2, world=4, name_of=lambda r: f"rank {r} of 4")
    peers = Peers(group)
    assert peers.any_gone() is None
    first = "rank 3 of 4 is gone: its process has ended"
    peers._from_first({"gone": {"3": first}})
    peers._lost(0, "its process has ended")
    peers._from_first({"gone": {"3": "another reason"}})
    assert [peers.gone(r) for r in range(4)] == [first, None, None, first]
    assert peers.any_gone() == peers.any_gone(0) == first
    ended = "a reduction failed: rank 0 of 4 is gone: its process has ended before it"
    assert str(peer_waits._went_before(peers, ended)) == f"{ended}; before that {first}"
    assert peer_waits._went_before(peers, f"a reduction failed: {first}") is None
    assert peer_waits._went_before(None, ended) is None
