"""Plans that are written, edited as JSON, and planned again from the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zero_compiler.report.report import Report
from zero_compiler.tools.planning import report


def planned(model: Any, inputs: Any, world: int = 2, **fields: Any) -> Report:
    """The plan of a model for ranks that share no memory."""
    torch._dynamo.reset()
    return report(model, inputs, world, **fields)


def write(made: Report, path: Path, edit: Callable[[dict[str, Any]], object] = lambda decisions: None) -> str:
    """Write a plan with its decisions edited; the path of its file."""
    made.save_json(str(path))
    data = json.loads(path.read_text())
    edit(data["decisions"])
    path.write_text(json.dumps(data))
    return str(path)


def without_measures(data: dict[str, Any]) -> str:
    """All of a plan as text, but for what was measured while it was made (`passes`, resident memory) and for the
    numbers that this process has given to frames and models."""
    data = json.loads(json.dumps(data))
    for name in ("resident_bytes", "resident_parts"):
        data["memory"].pop(name)
    for frame in data["frames"]:
        frame.pop("passes")
        frame.pop("index")
        for program in frame["programs"].values():  # comments name lines of this file
            program["segments"] = [re.sub(r"#.*", "", text) for text in program["segments"]]
    text = json.dumps(data, indent=1, sort_keys=True)
    owners = dict.fromkeys(re.findall(r'"owner": "([^"]*)"', text))
    for at, owner in enumerate(owners):
        text = text.replace(f'"owner": "{owner}"', f'"owner": "owner {at}"')
    return text


def starts(program: Any) -> list[str]:
    """The instructions of a Program that start, wait for and use gathers, in order."""
    return program.text(live=False).splitlines()
