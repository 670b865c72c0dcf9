"""``from_pretrained`` on two ranks of a host, where transformers makes a copy of the files in memory: one rank reads, no
rank holds a copy of its own, and whatever a script does with the model gives what it gives without zero."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.cases import Cases
from dist.library_runs import as_rank, differences, shared_folder
from dist.measured import resident, restart_peak
from safetensors.torch import load_file
from torch import nn

import zero_compiler as zero
from zero_compiler.integrations import pretrained
from zero_compiler.storage import heap

pytest.importorskip("accelerate", reason="needs the extra transformers")
pytest.importorskip("transformers", reason="needs the extra transformers")
pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__)


@contextlib.contextmanager
def saved(make: Callable[[], Any]) -> Iterator[Path]:
    """The folder of a model that rank 0 has saved; what replaces a function of transformers is there."""
    import zero_compiler.integrations.transformers  # noqa: F401

    as_rank()
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            make().save_pretrained(folder / "saved")
        dist.barrier()
        yield folder / "saved"


def llama(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=768, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config).to(dtype)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def files_here() -> int:
    """How many files in memory this process maps or has open, once others have taken theirs."""
    end = time.monotonic() + 10.0
    while True:
        gc.collect()
        found = sum(pretrained.TITLE in line for line in Path("/proc/self/maps").read_text().splitlines())
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself is gone
                found += pretrained.TITLE in os.readlink(f"/proc/self/fd/{fd}")
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.05)


def both(value: int) -> list[int]:
    """That of the rank with less, and that of the other."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, value)
    return sorted(found)


@cases.add
def another_dtype_is_read_by_one_rank(rank: int) -> list[str]:
    from transformers import AutoModelForCausalLM

    errors = []
    for there, asked in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        with saved(lambda: llama(there)) as folder:
            AutoModelForCausalLM.from_pretrained(folder)  # mapped; what is imported on the way is there
            assert not files_here()
            heap.give_back()
            restart_peak()
            own, most = resident("RssAnon"), resident("VmHWM")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=asked)
            own, peaks = resident("RssAnon") - own, both(resident("VmHWM") - most)
            whole = sum(p.nbytes for p in model.parameters())
            if own > whole // 8:
                errors.append(f"{asked}: {own} bytes of its own, of a model of {whole}")
            if not peaks[0] < whole // 4 < whole < peaks[1]:
                errors.append(f"{asked}: {peaks} bytes more at most, of a model of {whole}")
            values = {k: v.to(asked) for k, v in load_file(folder / "model.safetensors").items()}
            errors += differences(str(asked), dict(model.state_dict()), values, 0.0)
            with torch.no_grad():  # what a rank writes is its own, up to what zero.shard says
                model.model.norm.weight.fill_(rank + 1)
                dist.barrier()
                errors += differences("written", model.model.norm.weight, torch.full((768,), rank + 1.0), 0.0)
            restart_peak()
            first = resident("VmHWM")
            zero.shard(model)
            if (most := resident("VmHWM") - first) > whole * 3 // 4 and rank > 0:
                errors.append(
                    f"{asked}: {most} bytes more at most, of a model of {whole}, half of which is its own"
                )
            errors += differences("sharded", model.model.norm.weight.full_tensor(), torch.ones(768), 0.0)
            if found := files_here():
                errors.append(f"{asked}: {found} files in memory after the model was sharded")
    return errors


def beside_plain(use: Callable[[], Any]) -> list[str]:
    """What is wrong with what ``use`` returns, beside what it returns where transformers loads alone."""
    found = []
    for local in ("1", "2"):
        os.environ["LOCAL_WORLD_SIZE"] = local
        torch.manual_seed(3 + dist.get_rank())
        found.append(use())
    return differences("loaded once", found[1], found[0], 0.0)


def as_saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes, which it does on rank 0."""
    model.save_pretrained(folder.parent / "again")
    return load_file(folder.parent / "again" / "model.safetensors") if dist.get_rank() == 0 else {}


@cases.add
def what_a_script_does_before_it_trains(rank: int) -> list[str]:
    """It reads values, makes a head of random numbers, resizes embeddings that are tied, computes, and saves."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    with saved(gpt2) as folder:

        def use() -> dict[str, Any]:
            head, said = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.bfloat16, num_labels=3, output_loading_info=True
            )
            assert {"score.weight"} == set(said["missing_keys"])
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            model.resize_token_embeddings(70)
            assert model.lm_head.weight is model.transformer.wte.weight
            assert all(p.requires_grad for p in model.parameters())
            with torch.no_grad():
                return {
                    "head": dict(head.state_dict()),
                    "model": dict(model.state_dict()),
                    "norm": nn.utils.get_total_norm(model.parameters()),
                    "logits": model(torch.arange(12)[None]).logits,
                    "saved": as_saved(model, folder),
                    "random": torch.rand(1),
                }

        return beside_plain(use)


@cases.add
def experts_that_are_joined(rank: int) -> list[str]:
    """In the dtype of the files, of which an expert's tensors become one with those of the others."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def mixtral() -> Any:
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, num_local_experts=4,
            )
        )  # fmt: skip

    with saved(mixtral) as folder:

        def use() -> dict[str, Any]:
            model = MixtralForCausalLM.from_pretrained(folder)
            mapped = pretrained.TITLE in Path("/proc/self/maps").read_text()
            assert mapped == (os.environ["LOCAL_WORLD_SIZE"] == "2")
            joined = {repr(how): 0.0 for how in model._weight_conversions}
            assert joined
            return {"model": dict(model.state_dict()), "saved": as_saved(model, folder), "joined": joined}

        return beside_plain(use)


@cases.add
def a_rank_that_loads_alone(rank: int) -> list[str]:
    """It waits for nobody, and what it has loaded is freed with its model."""
    from transformers import GPT2LMHeadModel

    with saved(gpt2) as folder:
        if rank == 0:
            model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16)
            assert pretrained.TITLE in Path("/proc/self/maps").read_text()
            del model
            if found := files_here():
                return [f"{found} files in memory of a model that is gone"]
    return []


class Small(nn.Module):
    """What ``load_once`` asks a model of transformers."""

    config = SimpleNamespace(to_json_string=lambda use_diff: "{}")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, device="meta")


def config(**fields: Any) -> Any:
    given = {
        "device_map": None, "hf_quantizer": None, "device_mesh": None, "dtype": torch.float32, "dtype_plan": {},
        "weight_mapping": None, "ignore_mismatched_sizes": False, "disable_mmap": None,
    }  # fmt: skip
    return SimpleNamespace(**(given | fields))


@cases.add
def the_first_rank_fails(rank: int) -> list[str]:
    """It raises what transformers has raised, and the next one loads in its place."""
    as_rank()

    def original(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        if rank == 0:
            dist.barrier()
            time.sleep(0.5)
            raise ValueError("a file is broken")
        for name in ("weight", "bias"):
            value = nn.Parameter(torch.full_like(getattr(model.layer, name), 5.0, device="cpu"))
            value._is_hf_initialized = True  # type: ignore[attr-defined]
            setattr(model.layer, name, value)
        return "loaded", None

    model = Small()
    if rank == 1:
        dist.barrier()
    try:
        said = pretrained.load_once(original)(model, None, [__file__], config())
    except ValueError as error:
        return [] if rank == 0 and str(error) == "a file is broken" else [f"{error}"]
    return differences("loaded", model.layer.weight, torch.full((8, 8), 5.0), 0.0) + (
        [] if said == ("loaded", None) else [f"{said}"]
    )


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        ("1", {}),
        ("2", {"state_dict": {}, "checkpoint_files": None}),
        ("2", {"expected_keys": ["adapter"]}),
        ("2", {"load_config": config(device_map={"": 0})}),
        ("2", {"load_config": config(device_map={"": torch.device("cuda:0")})}),
        ("2", {"load_config": config(device_map={"model": "cpu", "head": "disk"})}),
        ("2", {"load_config": config(hf_quantizer="some")}),
        ("2", {"load_config": config(device_mesh="some")}),
    ],
)
def test_what_is_loaded_by_transformers_alone(ranks, given, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)

    def met(*_: object) -> None:
        raise AssertionError("ranks meet")

    monkeypatch.setattr(pretrained, "first_or_files", met)

    def original(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        return "loaded"

    given = {
        "model": Small(),
        "state_dict": None,
        "checkpoint_files": ["a"],
        "load_config": config(),
        **given,
    }
    assert pretrained.load_once(original)(**given) == "loaded"


def test_a_system_without_such_sockets(monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(pretrained, "first_or_files", refuse)
    load = pretrained.load_once(lambda model, state_dict, checkpoint_files, load_config: "loaded")
    assert load(Small(), None, [__file__], config()) == "loaded"
