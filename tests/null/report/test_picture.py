"""The page of a plan has every bar and every buffer, needs nothing from elsewhere, and answers to keys and fingers."""

from __future__ import annotations

import json
import re
from itertools import accumulate

import pytest
import torch
from browser import browser
from machines import machine
from marks import slow
from null.report.test_html_page import data_of
from torch import nn

import zero_compiler as zero
from zero_compiler.report.lifetimes import lifetimes
from zero_compiler.report.verdict import amount
from zero_compiler.tools.planning import report

NAME = "</script><b>&"  # a module's name that must stay text


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleDict({NAME: nn.Linear(64, 64), "two": nn.Linear(64, 2048)})

    def forward(self, x):
        return self.h["two"](torch.tanh(self.h[NAME](x))).square().mean()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report, and its page."""
    folder = tmp_path_factory.mktemp("page")
    spec = machine(bytes_per_us=1000.0) | {"memory_bytes": 4_000_000, "device_reserve_bytes": 1_000_000}
    (folder / "machine.json").write_text(json.dumps(spec))
    torch._dynamo.reset()
    files = {"stage": 3, "offload_optimizer": "nvme", "nvme_dir": str(folder), "compute": "aten"}
    told = report(
        Named(), (torch.zeros(4, 64),), 2, hardware=str(folder / "machine.json"), bucket_bytes=0, **files
    )
    told.save_html(str(folder / "plan.html"))
    return told, folder / "plan.html"


def items(row):
    columns = [list(accumulate(row["at"]))] + [v for k, v in row.items() if isinstance(v, list) and k != "at"]
    return list(zip(*columns, strict=True))


def test_every_bar_is_on_the_page(made):
    told, path = made
    (view,) = data_of(path.read_text())["views"]
    (frame,) = told.frames
    phases = [frame.timelines["forward"], frame.timelines["backward"], told.update.timeline]
    spans = [s for t in phases for s in t.spans]
    assert sum(len(lane["at"]) for lane in view["lanes"]) == len(spans)
    total_us = sum(t.total_us for t in phases)
    assert view["total"] * view["tick"] == pytest.approx(total_us, rel=1e-6)
    waited = sum(sum(lane["waited"]) for lane in view["lanes"]) * view["tick"]
    assert waited == pytest.approx(sum(t.stalled_us for t in phases), rel=1e-4)
    assert waited > 0
    moved = {lane["name"]: sum(lane["bytes"]) for lane in view["lanes"]}
    assert moved["transfers between ranks"] == sum(t.nbytes("device-device") for t in phases)


def test_every_buffer_is_on_the_page_and_what_is_saved_is_there_once(made):
    told, path = made
    (view,) = data_of(path.read_text())["views"]
    found = [b for p in told.frames[0].programs.values() for b in lifetimes(p)]
    blocks = [item for pool in view["pools"] for item in items(pool)]
    # What forward has saved is one block, from forward into backward; some more come from the caller.
    forward, backward = told.frames[0].programs.values()
    kept = sum(b.table == "storages" and b.end == len(forward.instrs) for b in lifetimes(forward))
    begun = sum(b.begin < 0 for b in lifetimes(backward))
    assert len(found) - min(kept, begun) <= len(blocks) < len(found)
    sizes = sorted(n for _, _, _, n, *_ in blocks)
    assert set(sizes) == {b.nbytes for b in found}
    for pool in view["pools"]:
        rows = items(pool)
        assert max(offset + n for _, _, offset, n, *_ in rows) == pool["size"]
        for k, (at, length, offset, n, *_) in enumerate(rows):
            for at2, length2, offset2, n2, *_ in rows[:k]:
                apart = at >= at2 + length2 or at2 >= at + length
                assert apart or offset >= offset2 + n2 or offset2 >= offset + n


def test_memory_is_most_where_the_report_says(made):
    told, path = made
    data = data_of(path.read_text())
    (view,) = data["views"]
    columns = [list(accumulate(c)) for c in view["memory"]["bytes"]]
    assert max(map(sum, zip(*columns, strict=True))) == told.memory.peak == data["limit"]["peak"]
    assert data["limit"] == {
        "device": 4_000_000,
        "reserve": 1_000_000,
        "budget": None,
        "peak": told.memory.peak,
    }
    assert amount(told.memory.peak) in path.read_text().split("<h2>In numbers</h2>")[1]


def test_a_layer_is_on_every_lane(made):
    _, path = made
    (view,) = data_of(path.read_text())["views"]
    layer = view["layers"].index("h.two")
    # Its update is one with that of the other layer.
    of = {lane["name"]: [x if isinstance(x, list) else [x] for x in lane["layer"]] for lane in view["lanes"]}
    found = {name for name, layers in of.items() if any(layer in x for x in layers)}
    assert found == {"compute", "transfers between ranks", "reads of files", "writes of files"}
    assert all(layer in pool["layer"] for pool in view["pools"])


def test_the_page_needs_nothing_else_and_names_are_text(made):
    page = made[1].read_text()
    assert not re.search(r"https?:|src=|href=|url\(|@import|fetch\(", page)
    assert "<b>" not in page
    assert "h.&lt;/script&gt;&lt;b&gt;&amp;" in page  # in the text
    assert "h.</script><b>&" in data_of(page)["views"][0]["layers"]


def test_a_report_without_frames_still_makes_a_page(tmp_path):
    told = zero.inspect(zero.shard(nn.Linear(4, 4)))
    told.save_html(str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    assert "not compiled yet" in page
    assert data_of(page)["views"] == []


def test_an_inference_is_a_view_of_its_own(tmp_path):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for p in model.parameters():
        p.requires_grad_(False)
    told = report(model, (torch.zeros(2, 8),), 2, compute="aten")
    told.save_html(str(tmp_path / "plan.html"))
    assert [v["title"] for v in data_of((tmp_path / "plan.html").read_text())["views"]] == ["inference"]


@pytest.fixture(scope="module")
def chromium():
    with browser() as one:
        yield one


def drawn(chromium, index):
    """How many colours a canvas has, of its points on a grid."""
    return chromium.js(
        f"""(() => {{ const c = document.querySelectorAll("#chart canvas")[{index}], seen = new Set();
        const {{ data }} = c.getContext("2d").getImageData(0, 0, c.width, c.height);
        for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 4).join());
        return seen.size; }})()"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, *slow(True)])
def test_it_is_drawn(chromium, made, dark):
    chromium.open(made[1], dark=dark)
    assert chromium.errors == []
    assert {url.split(":")[0] for url in chromium.requests} == {"file"}
    assert drawn(chromium, 1) >= 7
    ground = chromium.js("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    together = chromium.js("document.querySelector('.legend li:last-child output').textContent")
    assert together == amount(made[0].memory.peak)  # the cursor begins at the peak


def test_keys_step_zoom_and_select(chromium, made):
    chromium.open(made[1])
    chromium.js("document.getElementById('chart').focus()")
    shown = "document.getElementById('chart').dataset.shown"
    whole = chromium.js(shown)
    chromium.key("+")
    assert chromium.js(shown) != whole
    chromium.key("0")
    assert chromium.js(shown) == whole
    for _ in range(20):
        if chromium.js("document.getElementById('layer').selectedOptions[0].textContent") == "h.two":
            break
        chromium.key("ArrowDown")
    rows = chromium.js("[...document.querySelectorAll('#selected tbody tr')].map((r) => r.innerText)")
    assert any("full weight" in r and "h.two.weight" in r and "at byte" in r for r in rows)
    assert any("reads of files" in r for r in rows)
    chromium.key("p")
    said = chromium.js("document.getElementById('now').textContent")
    assert f"{amount(made[0].memory.peak)} together" in said
    chromium.key("ArrowRight")
    assert chromium.js("document.getElementById('now').textContent") != said
    chromium.key("Escape")
    assert chromium.js("document.getElementById('selected').hidden")
    assert chromium.errors == []


def test_a_click_selects_the_layer_of_a_buffer(chromium, made):
    chromium.open(made[1])
    (view,) = data_of(made[1].read_text())["views"]
    pool = view["pools"][0]
    at, length, offset, nbytes, *_, layer = max(items(pool), key=lambda item: item[1] * item[3])
    box = chromium.js(
        """(() => { const c = document.querySelector("canvas.pool"); c.scrollIntoView({ block: "center" });
        const { x, y, width, height } = c.getBoundingClientRect(); return { x, y, width, height }; })()"""
    )
    x = box["x"] + box["width"] * (at + length / 2) / view["total"]
    y = box["y"] + box["height"] * (1 - (offset + nbytes / 2) / pool["size"])
    chromium.click(x, y)
    assert chromium.js("Number(document.getElementById('layer').value)") == layer
    assert str(f"{nbytes:,}") in chromium.js("document.getElementById('tip').textContent")


def test_a_phone_shows_all_of_it_and_fingers_move_it(chromium, made):
    chromium.open(made[1], 360, 740, touch=True)
    assert chromium.js("document.documentElement.scrollWidth <= innerWidth")
    box = chromium.js(
        "(({ x, y, width }) => ({ x, y, width }))(document.querySelector('canvas.memory').getBoundingClientRect())"
    )
    shown = "document.getElementById('chart').dataset.shown"
    whole, y, middle = chromium.js(shown), box["y"] + 60, box["x"] + box["width"] / 2
    chromium.touch(
        [(middle - 20 - 10 * k, y) for k in range(8)],
        [(middle + 20 + 10 * k, y) for k in range(8)],
    )
    near = [int(n) for n in chromium.js(shown).split()]
    assert near[1] - near[0] < 0.6 * int(whole.split()[1])
    chromium.touch([(middle + 60 - 15 * k, y) for k in range(8)])
    later = [int(n) for n in chromium.js(shown).split()]
    assert later[0] > near[0]
    assert later[1] - later[0] == pytest.approx(near[1] - near[0], abs=2)
    assert chromium.errors == []
