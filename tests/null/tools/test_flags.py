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
from zero_compiler.tools import cli, planning


def test_every_field_is_a_flag_of_plan(tmp_path, monkeypatch):
    """All fields given as flags come back as they are; what is not given is left to zero.Config."""
    given, seen = every_field(tmp_path), {}
    report = SimpleNamespace(summary=lambda: "planned", save_json=None, save_html=None, save_trace=None)
    monkeypatch.setattr(planning, "report", lambda *args, **kwargs: seen.update(kwargs) or report)
    monkeypatch.setattr(cli, "_factory", lambda path: lambda: (torch.nn.Linear(2, 2), torch.ones(2)))
    flags = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        text = str(value).removeprefix("torch.")
        flags += [flag] if value is True else [flag, text]
    for words, expected in ((flags, zero.Config(**given)), ([], zero.Config())):
        seen.clear()
        done = CliRunner().invoke(cli.app, ["plan", "module:function", "--brief", *words])
        assert done.exit_code == 0, done.output
        assert done.output == "planned\n"
        assert (seen.pop("world"), seen.pop("device")) == (1, "cpu")
        assert zero.Config(**seen) == expected
        assert seen.keys() == (given.keys() if words else set())


def test_every_flag_of_plan_says_what_it_does():
    said = CliRunner().invoke(cli.app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    for f in dataclasses.fields(zero.Config):
        assert re.search(rf"--{f.name.replace('_', '-')}\b.*?[a-z]{{3}} ", said, flags=re.S), f.name
    command = typer.main.get_command(cli.app).commands["plan"]
    assert [p.name for p in command.params if p.param_type_name == "option" and not p.help] == []
