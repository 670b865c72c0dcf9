"""The trace of a plan says what the timeline says, under the names that a profile has."""

import json

import pytest
import torch
from machines import machine
from torch import nn

from zero_compiler.ranges import name_on
from zero_compiler.tools.planning import report


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 2048)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x))).square().mean()


@pytest.fixture
def told(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(bytes_per_us=1000.0)))
    torch._dynamo.reset()
    return report(Scored(), (torch.zeros(4, 64),), 2, hardware=str(path), bucket_bytes=0)


def test_a_trace_is_the_timeline(told, tmp_path):
    told.save_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (frame,) = told.frames
    begin = 0.0
    for phase in ("forward", "backward"):
        timeline = frame.timelines[phase]
        mine = [e for e in events if e["ph"] == "X" and e["cat"] == phase]
        program = frame.programs[phase]
        # Waits, starts and releases, each from where the host was done with what is before it; and the run as a whole.
        ends = [timeline.begin_us, *timeline.reached_us]
        steps = [
            (name_on("compute", i.name(program)), begin + ends[k], ends[k + 1] - ends[k])
            for k, i in enumerate(program.instrs)
            if i.op != "compute"
        ]
        whole = (f"zero compute: frame {frame.index}, {phase}", begin + ends[0], ends[-1] - ends[0])
        spans = [
            (name_on(s.lane, s.label), begin + s.start_us, s.end_us - s.start_us) for s in timeline.spans
        ]
        assert sorted((e["name"], e["ts"], e["dur"]) for e in mine) == [
            (name, pytest.approx(at), pytest.approx(us)) for name, at, us in sorted([*steps, whole, *spans])
        ]
        moved = [e["args"] for e in mine if "bytes" in e["args"]]
        assert sum(a["stalled_us"] for a in moved) == pytest.approx(timeline.stalled_us)
        assert sum(a["bytes"] for a in moved) == timeline.nbytes("device-device")
        begin += timeline.total_us  # backward follows forward
    # A process of its own has the backward under zero.no_sync.
    assert {(e["pid"], e["cat"]) for e in events if e["ph"] == "X"} == {
        (1, "forward"),
        (1, "backward"),
        (2, "backward under zero.no_sync"),
        (3, "update"),
    }
    live = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert live == [n for phase in ("forward", "backward") for n in frame.programs[phase].live]
