"""The picture of a plan and its trace say what the timeline says, and the page needs nothing from elsewhere."""

import json
import re

import pytest
import torch
from machines import machine
from torch import nn

from zero_compiler.tools.planning import report


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleDict({"<b>&": nn.Linear(64, 64), "two": nn.Linear(64, 2048)})

    def forward(self, x):
        return self.h["two"](torch.tanh(self.h["<b>&"](x))).square().mean()


@pytest.fixture
def told(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(bytes_per_us=1000.0)))
    torch._dynamo.reset()
    return report(Named(), (torch.zeros(4, 64),), 2, hardware=str(path), bucket_bytes=0)


def test_a_trace_is_the_timeline(told, tmp_path):
    told.save_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (frame,) = told.frames
    begin = 0.0
    for phase in ("forward", "backward"):
        timeline = frame.timelines[phase]
        mine = [e for e in events if e["ph"] == "X" and e["cat"] == phase]
        assert [(e["name"], e["ts"], e["dur"]) for e in mine] == [
            (s.label, pytest.approx(begin + s.start_us), pytest.approx(s.end_us - s.start_us))
            for s in timeline.spans
        ]
        moved = [e["args"] for e in mine if "bytes" in e["args"]]
        assert sum(a["stalled_us"] for a in moved) == pytest.approx(timeline.stalled_us)
        assert sum(a["bytes"] for a in moved) == timeline.nbytes("device-device")
        begin += timeline.total_us  # backward follows forward
    live = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert live == [n for phase in ("forward", "backward") for n in frame.programs[phase].live]


def test_a_page_shows_every_bar_and_needs_nothing_else(told, tmp_path):
    told.save_html(str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    (frame,) = told.frames
    spans = [s for t in frame.timelines.values() for s in t.spans]
    bars = re.findall(r'<rect class="(\w+)"', page)
    assert bars.count("compute") == sum(s.lane == "compute" for s in spans)
    assert bars.count("gather") == sum(s.label.startswith("gather") for s in spans)
    assert bars.count("reduce") == sum(s.label.startswith("reduction") for s in spans)
    assert bars.count("stall") == sum(s.stalled_us > 0 for s in spans) > 0
    assert not re.search(r"https?:|src=|href=|url\(|@import", page)
    # Names of modules are text.
    assert "<b>" not in page
    assert "h.&lt;b&gt;&amp;.weight" in page
    for phase in ("forward", "backward"):
        assert f"frame {frame.index}, {phase}" in page


def test_a_report_without_frames_still_makes_a_page(tmp_path):
    import zero_compiler as zero

    told = zero.inspect(zero.shard(nn.Linear(4, 4)))
    told.save_html(str(tmp_path / "plan.html"))
    assert "not compiled yet" in (tmp_path / "plan.html").read_text()
    told.save_trace(str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
