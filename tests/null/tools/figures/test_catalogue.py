"""``zero-compiler figures``: which figures, in which order, and what is refused."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from zero_compiler.errors import ConfigError
from zero_compiler.tools import cli
from zero_compiler.tools.figures import catalogue
from zero_compiler.tools.figures.table import Figure, FigureRow, exactly


@pytest.fixture
def two(monkeypatch):
    """Figures that plan nothing."""
    asked = []

    def figure(name):
        def made(planner):
            asked.append(name)
            return Figure(name, f"Figure {name}", "about", [FigureRow("a", exactly(1, "1", "s"), 1, "1")])

        return made

    monkeypatch.setattr(catalogue, "FIGURES", {name: figure(name) for name in ("one", "two")})
    return asked


def run(*words):
    return CliRunner().invoke(cli.app, ["figures", *map(str, words)])


def test_all_figures_are_shown_and_written(two, tmp_path):
    done = run("--markdown", tmp_path / "page.md")
    assert done.exit_code == 0, done.output
    assert two == ["one", "two"]
    assert done.output.index("Figure one") < done.output.index("Figure two")
    assert re.findall("^## (.*)", (tmp_path / "page.md").read_text(), flags=re.M) == [
        "Figure one",
        "Figure two",
    ]


def test_one_figure_alone(two):
    done = run("--only", "two")
    assert done.exit_code == 0, done.output
    assert two == ["two"]
    assert "Figure one" not in done.output


def test_a_name_that_is_none_is_said_before_anything_is_planned(two, tmp_path):
    with pytest.raises(ConfigError, match=r"--only 'three' is no figure; give one of one, two"):
        catalogue.check(["three"])
    assert isinstance(run("--only", "three").exception, ConfigError)
    assert two == []
    done = run("--markdown", tmp_path / "no" / "page.md")
    assert done.exit_code == 2
    assert two == []


def test_interrupted_it_has_shown_what_is_done_and_writes_nothing(two, tmp_path, monkeypatch):
    def stop(planner):
        raise KeyboardInterrupt

    monkeypatch.setitem(catalogue.FIGURES, "two", stop)
    done = run("--markdown", tmp_path / "page.md")
    assert done.exit_code == cli.NO_ANSWER
    assert "Figure one" in done.output
    assert "interrupted" in done.output
    assert not (tmp_path / "page.md").exists()


def test_the_help_names_every_figure():
    said = " ".join(run("--help").output.split())
    assert f"Names: {', '.join(catalogue.FIGURES)}." in said
