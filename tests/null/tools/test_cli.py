"""The command line: a plan as text, page and timeline."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from zero_compiler.tools import cli


def test_a_plan_is_written_as_text_page_and_timeline(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small_model.py").write_text(
        "import torch\ndef planned():\n    return torch.nn.Linear(64, 512), torch.ones(2, 64)\n"
    )
    paths = {kind: tmp_path / f"plan.{kind}" for kind in ("json", "html", "trace")}
    words = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    chosen = ["--world", "512", "--stage", "2", "--compute", "aten", "--hardware", "dgx-h100"]
    done = CliRunner().invoke(cli.app, ["plan", "small_model:planned", *chosen, *words])
    assert done.exit_code == 0, done.output
    assert "stage 2, rank 0 of 512" in done.output
    assert "transport between ranks: c10d (planned for ranks on any hosts)" in done.output
    assert json.loads(paths["json"].read_text())["world"] == 512
    assert "<svg" in paths["html"].read_text()
    assert json.loads(paths["trace"].read_text())["traceEvents"]
