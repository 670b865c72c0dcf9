"""Every field of Config is a flag of `zero-compiler plan`, and says what it does."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import torch
import typer
from null.root.test_config import every_field
from typer.testing import CliRunner

import zero_compiler as zero
from zero_compiler.tools import cli, fitting_plan, model_source
from zero_compiler.tools.model_source import ModelSource


def test_every_field_is_a_flag_of_plan(tmp_path, monkeypatch):
    """All fields given as flags come back as they are; what is not given is left to zero.Config."""
    given, seen = every_field(tmp_path), {}
    report = SimpleNamespace(
        summary=lambda: "planned", save_json=None, save_html=None, save_trace=None, verdict=None
    )
    monkeypatch.setattr(fitting_plan, "fitting_report", lambda asked, say: seen.update(asked=asked) or report)
    source = ModelSource(torch.nn.Linear(2, 2), lambda _: torch.ones(2), None, "")
    monkeypatch.setattr(model_source, "model_source", lambda *_: source)
    flags = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        text = str(value).removeprefix("torch.")
        flags += [flag] if value is True else [flag, text]
    for words, expected in ((flags, zero.Config(**given)), ([], zero.Config())):
        seen.clear()
        done = CliRunner().invoke(cli.app, ["plan", "module:function", "--brief", *words])
        assert done.exit_code == 0, done.output
        assert done.stdout == "planned\n"
        asked = seen["asked"]
        assert (asked.world, asked.device) == (1, "cpu")
        assert zero.Config(**asked.fields) == expected
        assert asked.fields.keys() == (given.keys() if words else set())


def test_every_flag_of_plan_says_what_it_does():
    said = CliRunner().invoke(cli.app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    for f in dataclasses.fields(zero.Config):
        assert re.search(rf"--{f.name.replace('_', '-')}\b.*?[a-z]{{3}} ", said, flags=re.S), f.name
    command = typer.main.get_command(cli.app).commands["plan"]
    assert [p.name for p in command.params if p.param_type_name == "option" and not p.help] == []
