"""`zero-compiler explain` writes a page that plays by itself, by keys and by touch, and says all of it as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import browser
from marks import slow
from typer.testing import CliRunner

from zero_compiler.report.verdict import amount
from zero_compiler.tools import cli, explain

DOCS = Path(__file__).resolve().parents[3] / "docs" / "one-iteration.md"

MODELS = ("two-layer MLP", "small ResNet")
TITLES = ("stage 0", "stage 1", "stage 2", "stage 3", "stage 3 and NVMe")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of one model at two of its stages."""
    told = {MODELS[0]: [explain.explained(MODELS[0], title) for title in TITLES[2:]]}
    path = tmp_path_factory.mktemp("page") / "iteration.html"
    path.write_text(explain.page(told), encoding="utf-8")
    return told, path


@pytest.fixture(scope="module")
def chromium():
    with browser() as one:
        yield one


def words(chromium):
    return chromium.js("document.getElementById('words').textContent")


def test_the_page_needs_nothing_else_and_says_every_step_as_text(page):
    told, path = page
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|href=|url\(|@import|fetch\(", text)
    items = re.findall(r"<li>(.*?)</li>", text.split("All steps as text")[1].split("<script")[0])
    assert len(items) == sum(len(run.steps) for runs in told.values() for run in runs)
    assert len(text) < 300_000


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, *slow(True)])
def test_arrow_keys_step_through_it(chromium, page, dark):
    told, path = page
    steps = told[MODELS[0]][0].steps
    chromium.open(path, dark=dark)
    seen = []
    for _ in steps:
        seen.append(words(chromium))
        chromium.key("ArrowRight")
    assert seen == [s.words.replace("`", "") for s in steps]
    chromium.key("ArrowLeft")
    assert words(chromium) == seen[-2]
    chromium.key("Home")
    assert words(chromium) == seen[0]
    assert chromium.errors == []
    assert {url.split(":")[0] for url in chromium.requests} == {"file"}


@pytest.mark.slow
def test_play_goes_to_the_end_and_stops(chromium, page):
    told, path = page
    chromium.open(path)
    chromium.js("{ const wait = setTimeout; window.setTimeout = (f) => wait(f, 5); }")
    chromium.js("document.getElementById('play').click()")
    assert chromium.js("document.getElementById('play').textContent") == "Pause"
    last = told[MODELS[0]][0].steps[-1].words
    chromium.wait_for(f"document.getElementById('words').textContent === {last.replace('`', '')!r}")
    chromium.wait_for("document.getElementById('play').textContent === 'Play'")


def test_each_rank_shows_what_it_holds(chromium, page):
    told, path = page
    run = told[MODELS[0]][1]  # stage 3
    gathers = [k for k, s in enumerate(run.steps) if s.line.startswith("gather")]
    chromium.open(path)
    chromium.js(f"location.hash = '#0/1/{gathers[0]}'")
    chromium.settle()
    ranks = chromium.js("[...document.querySelectorAll('.rank')].map((r) => r.innerText)")
    assert [r.split("\n")[0] for r in ranks] == ["Rank 0", "Rank 1"]
    assert "rows 0–127" in ranks[0]
    assert "rows 128–255" in ranks[1]
    coming = chromium.js("[...document.querySelectorAll('.slot.coming')].map((s) => s.innerText)")
    assert len(coming) == 2  # one on each rank
    assert all("full weight" in c and "arriving" in c for c in coming)
    assert "gather of layers.0.weight" in chromium.js("document.getElementById('moves').innerText")
    released = next(k for k, s in enumerate(run.steps) if s.line.startswith("release"))
    chromium.js(f"location.hash = '#0/1/{released}'")
    chromium.settle()
    assert "then gone" in chromium.js("document.querySelector('.slot.leaving').innerText")


@pytest.mark.slow
def test_another_stage_is_chosen_by_its_button(chromium, page):
    _, path = page
    chromium.open(path)
    chromium.js("document.querySelectorAll('#runs input')[2].click()")
    assert "ZeRO-Infinity" in chromium.js("document.getElementById('about').textContent")
    assert chromium.js("document.querySelectorAll('.place.file').length") == 2
    assert chromium.js("document.querySelector('#runs input:checked').value") == "2"


def test_a_phone_shows_both_ranks_beside_each_other(chromium, page):
    _, path = page
    chromium.open(path, 360, 740, touch=True, still=True)
    assert chromium.js("document.documentElement.scrollWidth <= innerWidth")
    boxes = chromium.js(
        "[...document.querySelectorAll('.rank')].map((r) => { const b = r.getBoundingClientRect(); return [b.x, b.y]; })"
    )
    assert boxes[0][1] == boxes[1][1]
    assert boxes[0][0] < boxes[1][0]
    box = chromium.js(
        "(({ x, y, width, height }) => [x + width / 2, y + height / 2])(document.getElementById('next').getBoundingClientRect())"
    )
    before = words(chromium)
    if box[1] > 740:
        chromium.js("document.getElementById('next').scrollIntoView({ block: 'center' })")
        box = chromium.js(
            "(({ x, y, width, height }) => [x + width / 2, y + height / 2])(document.getElementById('next').getBoundingClientRect())"
        )
    chromium.touch([tuple(box)])
    chromium.wait_for(f"document.getElementById('words').textContent !== {before!r}")
    # Who asks for reduced motion sees none.
    assert chromium.js("document.getAnimations().length") == 0


def test_the_page_of_docs_has_the_steps_of_this_program(page):
    told, _ = page
    run = told[MODELS[0]][1]
    assert run.title == "stage 3"
    rows = [f"| {k} | {s.words} | {amount(run.bytes_at(k))} |" for k, s in enumerate(run.steps)]
    found = [line for line in DOCS.read_text().splitlines() if re.match(r"\| \d", line)]
    assert found == rows


@pytest.mark.slow
def test_the_command_tells_both_models_at_every_stage(tmp_path):
    path = tmp_path / "page.html"
    done = CliRunner().invoke(cli.app, ["explain", "--output", str(path)])
    assert done.exit_code == 0, done.output
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"<summary>(.*?)</summary>", text) == [f"{m}, {t}" for m in MODELS for t in TITLES]
    assert len(text) < 300_000


@pytest.mark.slow
def test_a_higher_stage_holds_less():
    for model in MODELS:
        runs = [explain.explained(model, title) for title in TITLES]
        most = [max(run.bytes_at(k) for k in range(len(run.steps))) for run in runs]
        assert most[0] > most[1] == most[2] > most[3] > most[4]
        if model == MODELS[0]:
            assert {amount(n) for n in most[:2]} <= set(
                re.findall(r"[\d.]+ kB", DOCS.read_text().split("At stage 0")[1])
            )
        for run in runs:
            assert run.bytes_at(0) == run.bytes_at(len(run.steps) - 1)


def test_a_folder_that_is_not_there_is_said_before_anything_is_planned(tmp_path):
    done = CliRunner().invoke(cli.app, ["explain", "--output", str(tmp_path / "no" / "page.html")])
    assert done.exit_code == 2
    assert "there is no folder" in done.output
