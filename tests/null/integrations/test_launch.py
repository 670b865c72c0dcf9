"""What ``zero-compiler run`` turns on in a script's process, with stand-ins for the libraries; tests/dist/tools/test_run.py
has the libraries themselves."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from zero_compiler.config import Config
from zero_compiler.errors import ConfigError, IntegrationError
from zero_compiler.integrations import prepared
from zero_compiler.integrations.launch import AfterImport, Launch


@pytest.fixture
def found(tmp_path, monkeypatch):
    """A library of two modules, of which the first asks whether there is the second; and what was called after imports."""
    (tmp_path / "zero_asks.py").write_text("import importlib.util\nimportlib.util.find_spec('zero_asked')\n")
    (tmp_path / "zero_asked.py").write_text("import zero_fails_once\n")
    (tmp_path / "zero_fails_once.py").write_text(
        "import builtins\nbuiltins.zero_tries += 1\nassert builtins.zero_tries > 1\n"
    )
    called: list[str] = []
    names = ["zero_asks", "zero_asked"]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("builtins.zero_tries", 0, raising=False)
    hooks = {name: lambda name=name: called.append(name) for name in names}
    monkeypatch.setattr(sys, "meta_path", [AfterImport(hooks), AfterImport({}), *sys.meta_path])
    yield called
    for name in (*names, "zero_fails_once"):
        sys.modules.pop(name, None)


def test_a_module_that_was_looked_for_is_still_prepared_when_it_is_imported(found):
    importlib.import_module("zero_asks")
    assert importlib.util.find_spec("zero_asked") is not None
    assert found == ["zero_asks"]
    with pytest.raises(AssertionError):
        importlib.import_module("zero_asked")
    assert found == ["zero_asks"]
    module = importlib.import_module("zero_asked")
    assert found == ["zero_asks", "zero_asked"]
    assert module.__loader__ is module.__spec__.loader is not None
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    importlib.reload(module)
    assert found == ["zero_asks", "zero_asked"]


@pytest.fixture
def launched(monkeypatch):
    """``zero-compiler run --stage 2 --compute aten``, as each rank knows of it."""
    monkeypatch.setattr(prepared, "flags", None)
    monkeypatch.setattr(prepared, "listeners", [])
    return Launch(Config(stage=2, compute="aten"), "script.py")


class Strategy:
    def __init__(self, stage: int | None = None) -> None:
        self.config = prepared.configured("Strategy", None, {} if stage is None else {"stage": stage})


def connected(launch: Launch, **given: Any) -> dict[str, Any]:
    """What a connector of Lightning's is given, of what the script gives it."""
    seen: dict[str, Any] = {}

    def connector(
        self: object, devices: object = "auto", num_nodes: object = 1, strategy: object = "auto"
    ) -> None:
        seen.update(devices=devices, num_nodes=num_nodes, strategy=strategy)

    launch._connector(Strategy)(connector)(object(), **given)
    return seen


@pytest.mark.parametrize(
    "asked",
    [None, "auto", "ddp", "DDP", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false"],
)
def test_zero_takes_the_place_of_these_strategies_on_the_hosts_that_torchrun_has_started(
    launched, asked, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    seen = connected(launched, devices=1, **({} if asked is None else {"strategy": asked}))
    assert (seen["devices"], seen["num_nodes"]) == (2, 3)
    assert isinstance(seen["strategy"], Strategy)
    assert (seen["strategy"].config.stage, seen["strategy"].config.compute) == (2, "aten")


def test_what_is_zeros_already_is_left_as_it_is(launched):
    for asked in ("zero", "zero_stage_2", "Zero_stage_3_offload", Strategy(stage=2)):
        assert connected(launched, strategy=asked)["strategy"] is asked


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("deepspeed", "'deepspeed'"),
        ("fsdp", "'fsdp'"),
        ("ddp_spawn", "'ddp_spawn'"),
        (SimpleNamespace(), "SimpleNamespace"),
    ],
)
def test_another_strategy_is_refused(launched, asked, named):
    with pytest.raises(IntegrationError, match=f"the script asks for strategy={named}: leave it out"):
        connected(launched, strategy=asked)


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_arguments_of_a_trainer_that_shard_are_refused_when_they_are_made(launched, name, monkeypatch):
    pytest.importorskip("accelerate", reason="needs the extra accelerate")
    made: list[object] = []

    class TrainingArguments:
        def __init__(self, **given: object) -> None:
            self.__dict__.update(given)
            self.__post_init__()

        def __post_init__(self) -> None:
            made.append(self)

    arguments = SimpleNamespace(TrainingArguments=TrainingArguments)
    monkeypatch.setitem(sys.modules, "transformers.training_args", arguments)
    monkeypatch.setattr("zero_compiler.integrations.overrides._version", lambda library: "5.23")
    launched.hooks()["transformers.training_args"]()
    TrainingArguments(fsdp="", deepspeed=None)
    assert len(made) == 1
    with pytest.raises(IntegrationError, match=f"leave out {name}"):
        TrainingArguments(**{name: "full_shard"})
    assert len(made) == 1


def plugin(**said: Any) -> Any:
    from zero_compiler.integrations.accelerate import ZeroPlugin

    return ZeroPlugin(**said)


def mixin(**said: Any) -> Any:
    from zero_compiler.integrations.transformers import ZeroMixin

    class Trainer:
        def __init__(self, optimizers: object = None) -> None:
            made = self._zero_config  # type: ignore[attr-defined]
            self.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin(config=made)))

    class Trains(ZeroMixin, Trainer):
        pass

    made = Trains(zero=Config(**said)) if said else Trains()
    return made.accelerator.state.fsdp_plugin


WAYS = [
    pytest.param(plugin, "ZeroPlugin", id="plugin"),
    pytest.param(lambda **said: plugin(config=Config(**said)), "ZeroPlugin", id="plugin-config"),
    pytest.param(mixin, "ZeroMixin", id="mixin"),
]


@pytest.mark.parametrize(("way", "who"), WAYS)
def test_flags_and_what_the_script_gives_are_laid_together(launched, way, who):
    pytest.importorskip("accelerate", reason="needs the extra accelerate")
    for said in ({}, {"stage": 2}, {"bucket_bytes": 100}):
        config = way(**said).config
        assert (config.stage, config.compute) == (2, "aten")
        assert config.bucket_bytes == said.get("bucket_bytes")
    sentence = (
        f"stage was given twice: zero-compiler run says 2, and {who} in the script says 3; give it once"
    )
    with pytest.raises(ConfigError, match=sentence):
        way(stage=3)
    prepared.flags = None
    assert way(stage=3).config.stage == 3


def test_a_field_may_need_another_that_the_flags_give(launched, tmp_path):
    prepared.flags = Config(nvme_dir=str(tmp_path))
    assert prepared.configured("ZeroPlugin", None, {"offload_params": "nvme"}).nvme_dir == str(tmp_path)
    with pytest.raises(ConfigError, match="unknown option 'stag'; did you mean 'stage'"):
        prepared.configured("ZeroPlugin", None, {"stag": 3})
    with pytest.raises(ConfigError, match=r"config must be a zero\.Config, not int"):
        prepared.configured("ZeroPlugin", 3)  # type: ignore[arg-type]
