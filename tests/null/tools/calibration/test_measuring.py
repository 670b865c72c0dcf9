"""What measurements share: a time that runs which waited do not move."""

from __future__ import annotations

import statistics

from zero_compiler.tools.calibration import measuring


def test_runs_that_waited_for_a_core_move_no_time():
    times = [30.0, 31.0, *[2000.0 + i for i in range(4)], 32.0, 33.0]
    assert statistics.median(times) > 1000
    assert 30 < measuring.lower_quartile(times) < 33
