"""The command line: a plan as text, page and timeline, and its exit status."""

from __future__ import annotations

import json

import pytest
import torch
from machines import machine
from null.edited import without_measures
from null.report.test_html_page import data_of
from typer.testing import CliRunner

from zero_compiler.tools import cli

SMALL = "import torch\ndef planned():\n    return torch.nn.Linear(64, 512), torch.ones(2, 64)\n"


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small_model.py").write_text(SMALL)
    torch._dynamo.reset()


def status(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """Exit status and output of ``zero-compiler plan`` with these words."""
    monkeypatch.setattr("sys.argv", ["zero-compiler", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), " ".join(capsys.readouterr().out.split())


def test_a_plan_is_written_as_text_page_and_timeline(tmp_path, small_model):
    paths = {kind: tmp_path / f"plan.{kind}" for kind in ("json", "html", "trace")}
    words = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    chosen = ["--world", "512", "--stage", "2", "--compute", "aten", "--hardware", "dgx-h100"]
    done = CliRunner().invoke(cli.app, ["plan", "small_model:planned", *chosen, *words])
    assert done.exit_code == 0, done.output
    first, second, *_ = done.stdout.split("\n")
    assert first.startswith("fits dgx-h100: ")
    assert second == "model: Linear, 33,280 parameters in float32"
    assert "stage 2, rank 0 of 512" in done.output
    assert "transport between ranks: c10d (planned for ranks on 64 hosts, 8 on each)" in done.output
    assert "hosts: 64 for 512 ranks; every parameter is partitioned over 64 of them" in done.output
    # Progress is no part of the plan.
    assert "capturing the forward of 33,280 parameters" in done.stderr
    assert "capturing" not in done.stdout
    written = json.loads(paths["json"].read_text())
    assert (written["world"], written["verdict"]["fits"]) == (512, True)
    assert written["verdict"]["line"] == first
    page = paths["html"].read_text()
    assert "memory" in data_of(page)["views"][0]
    assert "fits dgx-h100: " in page
    assert json.loads(paths["trace"].read_text())["traceEvents"]


@pytest.mark.slow
def test_the_status_says_whether_a_plan_fits(tmp_path, monkeypatch, capsys, small_model):
    (tmp_path / "tiny.json").write_text(json.dumps(machine(memory_bytes=400_000, device_reserve_bytes=0)))
    few = ["small_model:planned", "--brief", "--compute", "aten"]
    code, said = status(monkeypatch, capsys, *few, "--hardware", "dgx-h100")
    assert code == 0
    code, said = status(monkeypatch, capsys, *few, "--hardware", str(tmp_path / "tiny.json"))
    assert code == 3
    assert said.startswith("does not fit test: ")
    assert "the least change that fits: --offload-optimizer nvme --nvme-dir DIR (" in said
    code, said = status(monkeypatch, capsys, *few, "--memory-budget-bytes", "1000")
    assert code == 3
    assert "memory_budget_bytes=1,000 is more than" in said


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["small_model:linear"], "has no function 'linear'"),
        (["small_model:planned", "--html", "no/plan.html"], "there is no folder 'no' to write to"),
        (
            ["small_model:planned", "--batch", "4"],
            "returns its own inputs, which --batch and --sequence do not change",
        ),
        (
            ["small_model:planned", "--hardware", "dgx-h10"],
            "hardware 'dgx-h10' is neither a file nor a preset",
        ),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence_and_another_status(
    monkeypatch, capsys, small_model, words, want
):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["zero-compiler", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert want in " ".join((shown.out + shown.err).split())


@pytest.mark.slow
def test_a_plan_is_edited_and_planned_again(tmp_path, small_model):
    """The same words with --plan write the same file; an edit changes what follows."""
    first, again, edited = (tmp_path / f"{name}.json" for name in ("first", "again", "edited"))
    words = ["plan", "small_model:planned", "--brief", "--world", "2", "--hardware", "dgx-h100"]

    def planned(*more):
        torch._dynamo.reset()
        done = CliRunner().invoke(cli.app, [*words, *map(str, more)])
        assert done.exit_code == 0, done.output

    planned("--json", first)
    planned("--json", again, "--plan", first)
    a, b = (json.loads(path.read_text()) for path in (first, again))
    assert without_measures(a) == without_measures(b)
    assert a["decisions"]["made_for"]["memory_budget_bytes"] is not None
    a["decisions"]["weights"]["weight"]["tile_bytes"] = 1 << 16
    edited.write_text(json.dumps(a))
    planned("--json", again, "--plan", edited)
    after = json.loads(again.read_text())
    assert after["memory"]["arena_bytes"] < a["memory"]["arena_bytes"]
    assert len(after["frames"][0]["programs"]["forward"]["gathers"]) > 2


def test_a_plan_of_another_model_is_one_sentence(tmp_path, monkeypatch, capsys, small_model):
    path = tmp_path / "plan.json"
    assert status(monkeypatch, capsys, "small_model:planned", "--brief", "--json", str(path))[0] == 0
    code, said = status(monkeypatch, capsys, "small_model:planned", "--world", "2", "--plan", str(path))
    assert code == 2
    assert "it was made for 1 ranks that shard, and there are 2; make a plan for as many" in said
