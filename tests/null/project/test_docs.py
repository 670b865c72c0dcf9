"""What README.md and docs/ say is there, is there; and the code in them runs."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import zero_compiler as zero
from zero_compiler.passes import phase_passes
from zero_compiler.tools import cli
from zero_compiler.tools.run import parser as run_parser

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def table(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading of the reference."""
    section = REFERENCE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@by_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not missing


@by_page
def test_dumps_that_are_named_are_those_of_a_run(page):
    named = re.findall(r"frame0/\w+/(\d\d)-([\w-]+)\.txt", page.read_text())
    assert all(phase_passes()[int(number) - 1][0].name == name for number, name in named), named


@by_page
def test_files_that_are_named_exist(page):
    named = re.findall(
        r"\b((?:zero_compiler|passes|runtime|csrc|examples|docs|tests|benchmarks)/[\w/*]+\.\w+)",
        page.read_text(),
    )
    missing = sorted({x for x in named if not any(ROOT.glob(x)) and "/NN-" not in x})
    assert not missing


@by_page
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^)make (?:\w+=\S+ )*([a-z][\w-]*)", page.read_text(), flags=re.M))
    assert {t for t in targets if not re.search(rf"^{t}:", makefile, flags=re.M)} == set()


@by_page
def test_commands_exist(page):
    commands = typer.main.get_command(cli.app).commands
    assert {"doctor", "plan", "calibrate", "io-bench"} <= set(commands)
    lines = re.findall(r"\b(?:zero-compiler|-m zero_compiler) ([a-z][\w-]*)([^`\n]*)", page.read_text())
    assert [name for name, _ in lines if name not in commands] == []
    for name, rest in lines:
        options = {"--help"} | {o for p in commands[name].params for o in (*p.opts, *p.secondary_opts)}
        if (
            name == "run"
        ):  # its flags are those of torchrun too, and what stands behind the script is the script's
            options |= {option for action in run_parser()._actions for option in action.option_strings}
            rest = rest.partition(".py")[0]
        assert set(re.findall(r"--[a-z][\w-]*", rest)) <= options, name


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index.read_text()))
    assert linked == {p.name for p in index.parent.glob("*.md")} - {"README.md"}


def test_readme_is_one_page():
    assert len(README.split()) < 800


def test_the_program_of_the_readme_is_that_of_the_page_on_plans():
    (program,) = re.findall(r"```\n(gather .*?)```", README, flags=re.S)
    page = (ROOT / "docs" / "reading-plans.md").read_text()
    assert all(line in page for line in program.splitlines())


def test_surface_is_whole():
    listed = "\n".join(row[0] for row in table("The surface"))
    assert [name for name in zero.__all__ if f"zero.{name}" not in listed] == []
    assert [n for n in re.findall(r"zero\.(\w+)", listed) if not hasattr(zero, n)] == []


# What shard, init and module share: in this order, by keyword alone.
SHARDING = "*, stage=3, mesh=None, device=None, config=None, **fields"
SIGNATURES = {
    "gathered": "(model, write=False)",
    "init": f"({SHARDING})",
    "inspect": "(model, example_inputs=None)",
    "load_safetensors": "(model, paths, *, strict=True)",
    "module": f"(cls=None, /, {SHARDING})",
    "no_sync": "(model)",
    "optimizer": "(cls, model_or_params_or_groups, *, overlap=False, max_grad_norm=None, **kw)",
    "save_safetensors": "(model, folder, max_file_bytes=5000000000)",
    "shard": f"(model, {SHARDING})",
}


def test_signatures_are_fixed():
    found = {}
    for name in set(zero.__all__) - {"Config"}:
        signature = inspect.signature(getattr(zero, name))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        found[name] = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    assert found == SIGNATURES


def test_options_are_options():
    named = [name for row in table("Options") for name in re.findall(r"`(\w+)`", row[0])]
    fields = {f.name for f in dataclasses.fields(zero.Config)}
    assert set(named) - fields == {"mesh", "device"}
    defaults = {f.name: f.default for f in dataclasses.fields(zero.Config)}
    assert ("stage", "3") in [(row[0].strip("`"), row[1]) for row in table("Options")]
    assert defaults["stage"] == 3
    assert defaults["compute"] == "inductor"


# Results of benchmarks -----------------------------------------------------------------------------------------

RESULTS = ROOT / "benchmarks" / "results"
TABLES = sorted(str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*") if path.is_file())


def rows_of(heading: str) -> dict[str, str]:
    """The rows of a table of the page on results, by the name that each begins with."""
    section = (RESULTS / "README.md").read_text().split(f"| {heading} |")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", section, flags=re.M))


def test_results_are_tables_by_benchmark_and_host():
    pairs = [tuple(name.removesuffix(".md").split("/")) for name in TABLES if name != "README.md"]
    assert {benchmark for benchmark, _ in pairs} == set(rows_of("Benchmark"))
    assert {host for _, host in pairs} == set(rows_of("Host"))


def test_results_that_are_named_are_there():
    named = re.findall(r"`(\w+/[\w*-]+\.md)`", (ROOT / "docs" / "performance.md").read_text())
    assert named
    assert [name for name in named if not any(RESULTS.glob(name))] == []


def test_commands_of_results_exist():
    scripts = {x for row in rows_of("Benchmark").values() for x in re.findall(r"python (\S+\.py)", row)}
    assert scripts
    assert [script for script in sorted(scripts) if not (ROOT / script).is_file()] == []


@pytest.mark.slow
def test_code_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert blocks
    for i, block in enumerate(blocks):
        done = run(tmp_path / f"block{i}.py", block)
        assert "predicted peak" in done.stdout
        assert "Warning" not in done.stderr


# What the pages for users of other libraries take as given: a model, its batches, and a process group.
GIVEN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
batches = [torch.randn(4, 8) for _ in range(2)]


def blocks(model):
    return list(model)


"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coming-from-fsdp2", "coming-from-deepspeed"])
def test_code_for_users_of_other_libraries_runs(tmp_path, name):
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), flags=re.S)
    loops = [block for block in found if block.startswith("for x in batches")]
    made = [block for block in found if block not in loops]
    assert made
    for i, block in enumerate(made):
        done = run(tmp_path / f"{name}{i}.py", GIVEN + block + "".join(loops) + "\nprint('trained')\n")
        assert "trained" in done.stdout


@pytest.mark.slow
def test_code_of_profiles_runs(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "profiles.md").read_text(), flags=re.S)
    done = run(tmp_path / "profiled.py", block)
    assert re.search(r"frame \d+, forward: predicted .*, measured .* \(mean of 8\)", done.stdout)
    assert (tmp_path / "predicted.json").exists()


def run(script: Path, source: str) -> subprocess.CompletedProcess[str]:
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=script.parent,
        text=True,
        capture_output=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
