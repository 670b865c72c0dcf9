"""Two plans side by side: numbers that differ stand beside the decision that makes them differ."""

from __future__ import annotations

import json

import pytest
import torch
from machines import machine
from null import blocks
from null.edited import planned, write
from typer.testing import CliRunner

from zero_compiler.errors import ConfigError
from zero_compiler.tools import cli
from zero_compiler.tools.compare_plans import compare, read


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    (folder / "machine.json").write_text(json.dumps(machine()))
    fields = {"hardware": str(folder / "machine.json"), "compute": "aten", "bucket_bytes": 1000}
    torch.manual_seed(0)
    model = blocks.Net()

    def made(name, edit=lambda decisions: None, world=2, **more):
        first = planned(model, blocks.x(), world, **fields, **more)
        path = write(first, folder / f"{name}.json", edit)
        if name not in ("a", "four"):
            planned(model, blocks.x(), world, plan=path, **fields, **more).save_json(path)
        return path

    def keep(decisions):
        decisions["weights"]["h.1.up.weight"]["kept"] = True

    def further(decisions):
        decisions["frames"][0]["distances"]["forward"]["h.2"] = 2

    return {
        "a": made("a"),
        "kept": made("kept", keep),
        "further": made("further", further),
        "four": made("four", world=4, memory_budget_bytes=10_000_000),
    }


def lines_of(plans, a, b):
    return compare(read(plans[a]), read(plans[b]))


@pytest.mark.slow
def test_a_plan_and_itself_are_the_same(plans):
    lines = lines_of(plans, "a", "a")
    assert lines[-1] == "the two plans are the same"
    assert lines[0].startswith(f"A: {plans['a']}: ")


def test_one_kept_weight_is_the_reason_for_all(plans):
    lines = lines_of(plans, "a", "kept")
    assert "  what is kept: in B alone: h.1.up.weight" in lines
    assert lines[-1] == "only what is kept differ: all of the differences follow from that"
    (kept,) = (line for line in lines if line.startswith("  weights kept gathered"))
    assert kept.endswith("+4.1 kB: what is kept")
    (moved,) = (line for line in lines if line.startswith("    moved: between ranks"))
    assert "-4.1 kB: what is kept" in moved


def test_a_distance(plans):
    lines = lines_of(plans, "a", "further")
    assert "  distances: of the forward: h.2 1 and 2" in lines


def test_other_ranks_and_options(plans):
    lines = lines_of(plans, "a", "four")
    assert "  ranks: world 2 and 4" in lines
    assert "  options: memory_budget_bytes None and 10000000" in lines
    (row,) = (line for line in lines if line.startswith("  parameters at rest"))
    assert row.endswith(": ranks and options")


def test_files_of_versions_without_decisions_are_compared_by_numbers(plans, tmp_path):
    data = json.loads(open(plans["kept"]).read())
    del data["decisions"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    lines = compare(read(plans["a"]), read(str(tmp_path / "old.json")))
    assert any("has no decisions" in line for line in lines)


def test_the_verb(plans, tmp_path, monkeypatch, capsys):
    done = CliRunner().invoke(cli.app, ["compare", plans["a"], plans["kept"]])
    assert done.exit_code == 0, done.output
    assert "what is kept: in B alone: h.1.up.weight" in done.stdout
    (tmp_path / "no.json").write_text('{"a": 1}')
    monkeypatch.setattr("sys.argv", ["zero-compiler", "compare", plans["a"], str(tmp_path / "no.json")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "it is no plan" in " ".join(capsys.readouterr().out.split())


def test_garbage_is_one_sentence(plans, tmp_path):
    data = json.loads(open(plans["a"]).read())
    for name, value in (("frames", [3]), ("memory", {}), ("frames", [{"timelines": 3}])):
        (tmp_path / "bad.json").write_text(json.dumps({**data, name: value}))
        with pytest.raises(ConfigError, match=r"cannot be compared, since one has not the form of a plan"):
            compare(read(plans["a"]), read(str(tmp_path / "bad.json")))
