"""Which ranks are on which host, as calibration takes it."""

from __future__ import annotations

import pytest

from zero_compiler.errors import ConfigError
from zero_compiler.tools.calibration.measure_hosts import JobRanks, _by_host, started_together


def test_ranks_find_their_host_and_their_place():
    hosts = _by_host({0: 5, 1: 5, 2: 3, 3: 3})
    assert hosts == ((0, 1), (2, 3))
    assert [(JobRanks(rank, hosts).host, JobRanks(rank, hosts).place) for rank in range(4)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_hosts_that_are_not_alike_are_refused():
    for host_of, listed in (([0, 0, 0, 1], "0, 1, 2; 3"), ([0, 1, 0, 1], "0, 2; 1, 3")):
        with pytest.raises(
            ConfigError, match=f"calibration of 2 hosts needs as many .* they have ranks {listed}$"
        ):
            _by_host(dict(enumerate(host_of)))
    with pytest.raises(ConfigError, match="a rank cannot tell on which host it runs"):
        _by_host(None)


def test_a_launcher_has_started_this_process_where_it_names_more_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not started_together()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert not started_together()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert started_together()
