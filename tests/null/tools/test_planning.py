"""Plans without ranks: what they cannot be made of."""

from __future__ import annotations

from typer.testing import CliRunner

from zero_compiler.tools import cli


def test_what_a_plan_cannot_be_made_of_is_said_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "given.py").write_text("import torch\ndef alone():\n    return torch.nn.Linear(2, 2)\n")
    monkeypatch.chdir(tmp_path)
    for words, want in (
        (["given:alone"], "given:alone must return a module and its inputs, (model, example_inputs)"),
        (["given:alone", "--html", "no/plan.html"], "there is no folder 'no' to write to"),
    ):
        done = CliRunner().invoke(cli.app, ["plan", *words], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert want in " ".join(done.output.split())
