"""Models as the command line names them: functions with arguments, configurations of transformers, and what is neither."""

from __future__ import annotations

import pytest
import torch

from zero_compiler.errors import ConfigError
from zero_compiler.tools.model_source import model_source

CODE = """
import torch
from torch import nn

def make(layers=2, width=8, *, bias=True):
    return nn.Sequential(*(nn.Linear(width, width, bias) for _ in range(layers))), torch.ones(2, width)

def alone():
    return make()[0]

def text():
    return "a model"

def fails(what="nothing"):
    return helper(what)

def helper(what):
    raise ValueError(f"{what}\\n  is wrong")

def leaves():
    raise SystemExit("gone")

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)

    def forward(self, input_ids):
        return self.token(input_ids).mean()

number = 3
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path, monkeypatch):
    (tmp_path / "made_by_user.py").write_text(CODE)
    (tmp_path / "needs_more.py").write_text("import torch\nimport a_library_that_is_not_there\n")
    (tmp_path / "no_python.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "made_by_user", raising=False)
    return tmp_path


def test_a_function_is_called_with_its_arguments_on_the_meta_device():
    source = model_source("made_by_user:make(3, width=16, bias=False)")
    assert [tuple(p.shape) for p in source.model.parameters()] == [(16, 16)] * 3
    assert all(p.is_meta for p in source.model.parameters())
    assert source.inputs(None).shape == (2, 16)
    assert source.batch is None
    assert source.about == "Sequential, 768 parameters in float32"


def test_a_model_of_tokens_without_inputs_is_given_some():
    source = model_source("made_by_user:Words()", 3, 5)
    (ids,) = source.inputs(source.batch).values()
    assert (ids.shape, ids.dtype, ids.device.type) == ((3, 5), torch.long, "meta")
    assert source.about.endswith("3 x 5 tokens a rank, without a loss: its forward takes no labels")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("made_by_user:fails('all')", "made_by_user.py:18: ValueError: all is wrong"),
        ("made_by_user:leaves", "made_by_user.py:21: SystemExit: gone"),
        (
            "needs_more:make",
            "needs_more.py:2: ModuleNotFoundError: No module named 'a_library_that_is_not_there'",
        ),
        ("no_python:make", "no_python.py:1: SyntaxError: "),
        ("made_by_usr:make", "there is no module 'made_by_usr'; did you mean 'made_by_user'?"),
        ("made_by_user:mke", "module 'made_by_user' has no function 'mke'; did you mean 'make'?"),
        ("made_by_user:number", "made_by_user:number is no function but int"),
        ("made_by_user:make(layer=2)", "has no argument 'layer'; did you mean 'layers'?"),
        ("made_by_user:alone(xyz=2)", "has no argument 'xyz'; it takes none"),
        ("made_by_user:make(1, 2, 3)", "too many positional arguments"),
        ("made_by_user:make(layers=2, layers=3)", "layers is given twice"),
        ("made_by_user:make(layers=n)", "layers=n is no literal"),
        ("made_by_user:make(**{})", "is no literal"),
        ("made_by_user:make(*[1])", "is no literal"),
        ("made_by_user:make(layers=2", "cannot be read: it must be like made_by_user:make(layers=4)"),
        ("made_by_user:make(2)(3)", "cannot be read"),
        ("made_by_user:make(" + "[" * 500, "cannot be read"),
        ("made_by_user:", "is not module:function"),
        (":make", "is not module:function"),
        ("made_by_user.py:make", "give the module's name, made_by_user:make"),
        ("made_by_user.py", "name the module and a function of it, made_by_user:FUNCTION"),
        ("made_by_user", "is none of these: module:function, "),
        ("", "is none of these: module:function, "),
        (
            "made_by_user:text",
            "must return a module and its inputs, (model, example_inputs), and returned str",
        ),
        ("made_by_user:alone", "returned a model without inputs; or give --batch and --sequence"),
    ],
)
def test_what_names_no_model_is_one_sentence(text, said):
    with pytest.raises(ConfigError) as refused:
        model_source(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_sizes_of_inputs_that_are_not_ours_are_refused():
    with pytest.raises(ConfigError, match=r"returns its own inputs.*made_by_user:make\(batch=8\)"):
        model_source("made_by_user:make", batch=4)
    with pytest.raises(
        ConfigError, match="Sequential reads input, and --batch and --sequence make input_ids"
    ):
        model_source("made_by_user:alone", batch=4)
    with pytest.raises(ConfigError, match="--sequence must be at least 1, not 0"):
        model_source("made_by_user:Words", sequence=0)


def test_a_folder_without_a_configuration_is_said_to_have_none(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json' cannot be read: No such file or directory"):
        model_source(str(tmp_path))
