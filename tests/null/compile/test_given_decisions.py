"""A plan file is held to: a round trip changes nothing, an edit changes what it says, and what cannot be is refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from machines import machine
from null import blocks
from null.edited import planned, starts, without_measures, write
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, MemoryBudgetError


class Deep(nn.Module):
    """Layers of one size, and a larger head; all of them small enough to be planned in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.head = nn.Linear(32, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


class LM(nn.Module):
    """Logits that are much wider than what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(256, 16), nn.Linear(16, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.wte(tokens)).view(-1, 256), tokens.view(-1))


class Broken(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.h):
            x = torch.tanh(layer(x))
            if k == 2:
                torch._dynamo.graph_break()
        return self.head(x).square().mean()


def rows(n: int = 8, width: int = 32) -> tuple[torch.Tensor]:
    return (torch.ones(n, width),)


@pytest.fixture
def hardware(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(bytes_per_us=2_000.0, matmul_flops_per_us={"float32": 2000.0})))
    return str(path)


def deep(hardware: str, **fields: Any) -> dict[str, Any]:
    return {"hardware": hardware, "bucket_bytes": 1000} | fields


# --- a round trip ------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "distances": (Deep, rows(512), {"bucket_bytes": 1000}),
    "graph breaks": (Broken, rows(512), {"bucket_bytes": 1000}),
    "a budget, kept weights": (Deep, rows(64), {"memory_budget_bytes": 800_000}),
    "a tight budget": (Deep, rows(64), {"memory_budget_bytes": 650_000}),
    "activations": (blocks.Net, blocks.x(), {"activation_budget_bytes": 30_000}),
    "both budgets": (
        blocks.Net,
        blocks.x(),
        {"activation_budget_bytes": 40_000, "memory_budget_bytes": 400_000},
    ),
    "tiles": (Deep, rows(64), {"tile_bytes": 8192}),
    "files": (
        Deep,
        rows(64),
        {"offload_params": "nvme", "offload_optimizer": "nvme", "offload_grads": "nvme"},
    ),
    "a rest budget": (Deep, rows(64), {"device_rest_bytes": 200_000}),
    "stage 2": (Deep, rows(64), {"stage": 2}),
    "bf16": (Deep, rows(64), {"param_dtype": "bf16", "reduce_dtype": "fp32"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_changes_nothing(name, tmp_path, hardware):
    model, inputs, fields = CASES[name]
    if "files" in name or "rest" in name:
        fields = {**fields, "nvme_dir": str(tmp_path)}
    torch.manual_seed(0)
    made = model()
    first = planned(made, inputs, hardware=hardware, **fields)
    again = planned(made, inputs, hardware=hardware, plan=write(first, tmp_path / "plan.json"), **fields)
    assert json.dumps(again.to_dict()["decisions"]) == json.dumps(first.to_dict()["decisions"])
    assert without_measures(again.to_dict()) == without_measures(first.to_dict())


@pytest.mark.slow
def test_a_head_in_tiles_of_tokens_comes_back(tmp_path, hardware):
    torch.manual_seed(0)
    model, tokens = LM(), torch.zeros(4, 16, dtype=torch.long)
    for fields in ({"tile_bytes": 4096}, {"memory_budget_bytes": 135_000}):
        first = planned(model, (tokens,), hardware=hardware, **fields)
        again = planned(
            model, (tokens,), hardware=hardware, plan=write(first, tmp_path / "plan.json"), **fields
        )
        assert first.decisions.frames[0].tiles["forward"]
        assert without_measures(again.to_dict()) == without_measures(first.to_dict())


@pytest.mark.slow
def test_an_inference_comes_back(tmp_path, hardware):
    made = Deep()
    with torch.no_grad():
        first = planned(made, rows(512), **deep(hardware))
        again = planned(made, rows(512), plan=write(first, tmp_path / "plan.json"), **deep(hardware))
    assert [f.kind for f in first.decisions.frames] == ["inference"]
    assert without_measures(again.to_dict()) == without_measures(first.to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_run_writes_the_file_that_it_was_made_from(compute, tmp_path):
    """With a step that runs, in one process: the same losses, and the same file."""
    texts, losses, path = [], [], tmp_path / "plan.json"
    for options in ({}, {"plan": str(path)}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = zero.shard(Deep(), hardware="laptop", device="cpu", memory_budget_bytes=700_000)
        call = torch.compile(model, backend="zero", options={"compute": compute, **options})
        loss = call(*rows())
        loss.backward()
        losses.append(loss.item())
        told = zero.inspect(model)
        if not options:
            write(told, path)
        texts.append(without_measures(told.to_dict()))
    assert texts[0] == texts[1]
    assert losses[0] == losses[1]


# --- edits -------------------------------------------------------------------------------------------------------


def edited(tmp_path, hardware, edit, model=None, inputs=None, **fields):
    """A plan, and the one that its edited file gives."""
    torch.manual_seed(0)
    model, inputs = Deep() if model is None else model, rows() if inputs is None else inputs
    fields = deep(hardware, **fields)
    first = planned(model, inputs, **fields)
    again = planned(model, inputs, plan=write(first, tmp_path / "plan.json", edit), **fields)
    return first, again


@pytest.mark.slow
def test_an_edited_distance_moves_one_gather(tmp_path):
    path = tmp_path / "shared.json"
    path.write_text(json.dumps(machine(share=True)))  # where every distance is 1, since nothing is hidden

    def further(decisions):
        assert set(decisions["frames"][0]["distances"]["forward"].values()) == {1}
        decisions["frames"][0]["distances"]["forward"]["h.3"] = 2

    first, again = edited(tmp_path, str(path), further, bucket_bytes=10_000)
    before, after = (starts(r.frames[0].programs["forward"]) for r in (first, again))
    (moved,) = (line for line in before if line.startswith("gather") and "h.3" in line)
    assert [line for line in before if line != moved] == [line for line in after if line != moved]
    # Behind the wait of h.1, and no longer behind that of h.2.
    (of_h2,) = (line for line in before if line.startswith("wait") and "h.2" in line)
    assert after.index(moved) < after.index(of_h2)
    assert before.index(of_h2) < before.index(moved)
    assert starts(first.frames[0].programs["backward"]) == starts(again.frames[0].programs["backward"])
    assert "2 ahead for h.3" in str(again)


@pytest.mark.slow
def test_edits_of_weights(tmp_path, hardware):
    def edit(decisions):
        decisions["weights"]["h.1.weight"]["kept"] = True
        decisions["weights"]["head.weight"]["tile_bytes"] = 16384

    first, again = edited(tmp_path, hardware, edit)
    gathers = [r.frames[0].programs["backward"].gathers for r in (first, again)]
    kept = [[g.kept for g in of if "h.1.weight" in g.names] for of in gathers]
    assert kept == [[False], [True]]
    assert again.memory.kept > first.memory.kept == 0
    tiles = [sum("head.weight" in g.names for g in of) for of in gathers]
    assert tiles == [1, 4]
    weights = again.decisions.weights
    assert (weights["h.1.weight"].kept, weights["head.weight"].tile_bytes) == (True, 16384)


@pytest.mark.slow
def test_an_edit_of_where_a_tensor_rests(tmp_path, hardware):
    def move(decisions):
        decisions["weights"]["head.weight"]["rests"]["optimizer"] = "nvme"

    first, again = edited(tmp_path, hardware, move, nvme_dir=str(tmp_path), device_rest_bytes=10_000_000)
    assert first.memory.files == 0
    assert again.memory.files == 512 * 32 * 8 // 2
    assert again.decisions.weights["head.weight"].rests["optimizer"] == "nvme"


@pytest.mark.slow
def test_an_edit_that_does_not_fit_the_budget_is_refused(tmp_path, hardware):
    def keep(decisions):
        for weight in decisions["weights"].values():
            weight["kept"] = len(weight["shape"]) == 2

    with pytest.raises(MemoryBudgetError, match="memory_budget_bytes=650,000 is"):
        edited(tmp_path, hardware, keep, inputs=rows(64), memory_budget_bytes=650_000)


# --- what is refused ---------------------------------------------------------------------------------------------


def of_frame(**fields):
    return lambda decisions: decisions["frames"][0].update(fields)


def in_values(edit):
    return lambda decisions: edit(decisions["frames"][0]["values"])


def _weight(name, **fields):
    return lambda decisions: decisions["weights"][name].update(fields)


@pytest.mark.slow
def test_an_edit_has_a_weight_travel_whole(tmp_path):
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(machine(bytes_per_us=20.0)))
    fields = deep(str(slow), gather_dtype="int8")

    def packed(made):
        gathers = [g for p in made.frames[0].programs.values() for g in p.gathers]
        return sorted({name for g in gathers if g.wire for name in g.names})

    first = planned(Deep(), rows(64), **fields)
    matrices = [f"h.{i}.weight" for i in range(5)] + ["head.weight"]
    assert packed(first) == [n for n, w in first.decisions.weights.items() if w.quantised] == matrices
    same = planned(Deep(), rows(64), **fields, plan=write(first, tmp_path / "same.json"))
    assert packed(same) == matrices
    path = write(first, tmp_path / "plan.json", _weight("head.weight", quantised=False))
    again = planned(Deep(), rows(64), **fields, plan=path)
    assert packed(again) == matrices[:-1]
    assert not again.decisions.weights["head.weight"].quantised


REFUSED = {
    "a unit that is not gathered": (
        lambda d: d["frames"][0]["distances"]["forward"].update(nothing=2),
        r"distances.forward names 'nothing', which that phase does not gather; it gathers 'h.0', 'h.1'",
    ),
    "a distance beyond all units": (
        lambda d: d["frames"][0]["distances"]["forward"].update({"h.2": 1000}),
        r"distances.forward has 1,000 for 'h.2', and that phase gathers 6 units; give a whole number from 1 to 6",
    ),
    "tiles of what has none": (
        of_frame(tiles={"forward": {"tiled: x": 2}, "backward": {}}),
        r"tiles.forward names 'tiled: x', which is not done in tiles; what is: nothing",
    ),
    "kept, and in tiles": (
        _weight("h.1.weight", kept=True, tile_bytes=1024),
        r"weight 'h.1.weight' has kept=true, and is gathered in tiles, which are gathered anew for every use; write false",
    ),
    "tiles of a vector": (
        _weight("head.bias", tile_bytes=64),
        r"weight 'head.bias' has tile_bytes=64, and it is not gathered in tiles: it has one dimension, or lies whole",
    ),
    "8 bits that nothing asks for": (
        _weight("h.1.weight", quantised=True),
        r"weight 'h.1.weight' has quantised=true, and it does not travel in 8 bits: gather_dtype does not ask for that, or",
    ),
    "another bucket than the option": (
        of_frame(bucket_bytes=77),
        r"it has bucket_bytes=77 for the training of .* and the option bucket_bytes=1,000 was given as well; give it",
    ),
    "no such value": (
        in_values(lambda v: v["saved"].update(nothing="x")),
        r"there is no value 'nothing' in forward",
    ),
    "a view is saved": (
        in_values(lambda v: v["saved"].update(t="x")),
        r"value 't' cannot be saved: it is made again by what it is",
    ),
    "a value waits on no tier": (
        in_values(lambda v: v["away"].update([v["saved"].popitem()])),
        r"is to be away, and there is no tier for it: give zero.shard offload_activations=\"host\" or \"nvme\"",
    ),
    "another frame": (
        of_frame(reads="3 weights"),
        r"it was made for another forward: it has no training of _call",
    ),
    "other ranks": (
        lambda d: d["made_for"].update(world=3),
        r"it was made for 3 ranks that shard, and there are 2; make a plan for as many",
    ),
    "other replicas": (
        lambda d: d["made_for"].update(replicas=4),
        r"it was made for 4 replicas, and there are 1; make a plan for as many",
    ),
    "another stage": (
        lambda d: d["made_for"]["config"].update(stage=2),
        r"it was made with stage=2, and the model has stage=3; give the same, or make another plan",
    ),
    "a weight too many": (
        lambda d: d["weights"].update(extra=d["weights"]["head.weight"]),
        r"it was made for another model: this one has no parameter 'extra'; make a plan of this one",
    ),
    "a weight is missing": (
        lambda d: d["weights"].pop("head.weight"),
        r"it was made for another model: it has no parameter 'head.weight'; make a plan of this one",
    ),
    "another shape": (
        _weight("head.weight", shape=[512, 33]),
        r"parameter 'head.weight' is float32\[512, 33\] there and float32\[512, 32\] here; make a plan of this one",
    ),
    "a tier that it cannot rest on": (
        lambda d: d["weights"]["head.weight"]["rests"].update(params="nvme"),
        r"'head.weight' has parameters on 'nvme' there; with the options that were given it can have parameters on "
        r"'none': edit its rests, or the options of zero.shard",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_a_sentence(name, tmp_path, hardware):
    edit, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence) as caught:
        edited(tmp_path, hardware, edit)
    assert str(caught.value).startswith(f"plan {str(tmp_path / 'plan.json')!r}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_more_tiles_than_rows(tmp_path, hardware):
    torch.manual_seed(0)
    model, tokens, fields = (
        LM(),
        torch.zeros(4, 16, dtype=torch.long),
        {"hardware": hardware, "tile_bytes": 4096},
    )

    def many(decisions):
        tiles = decisions["frames"][0]["tiles"]["forward"]
        tiles.update(dict.fromkeys(tiles, 63))

    path = write(planned(model, (tokens,), **fields), tmp_path / "plan.json", many)
    with pytest.raises(ConfigError, match=r"rows: some tiles would be empty; give a number that divides"):
        planned(model, (tokens,), plan=path, **fields)


# --- other sizes, and other operators ----------------------------------------------------------------------------


@pytest.mark.slow
def test_other_sizes_hold_to_what_ranks_agree_on(tmp_path, hardware, caplog):
    def further(decisions):
        decisions["frames"][0]["distances"]["forward"]["h.3"] = 2

    torch.manual_seed(0)
    model = Deep()
    path = write(planned(model, rows(8), **deep(hardware)), tmp_path / "plan.json", further)
    with caplog.at_level(logging.WARNING, "zero_compiler"):
        again = planned(model, rows(16), plan=path, **deep(hardware))
    assert "has another graph here (inputs are f32[16,32] here)" in caplog.text
    assert again.decisions.frames[0].distances["forward"]["h.3"] == 2


@pytest.mark.slow
def test_edited_values_are_of_one_graph(tmp_path, hardware):
    def remake(decisions):
        values = decisions["frames"][0]["values"]
        values["saved"].popitem()

    model = Deep()
    path = write(planned(model, rows(8), **deep(hardware)), tmp_path / "plan.json", remake)
    with pytest.raises(
        ConfigError, match=r"were edited, and they name those of another graph: inputs are f32\[16,32\]"
    ):
        planned(model, rows(16), plan=path, **deep(hardware))


@pytest.mark.slow
def test_edited_values_are_of_one_set_of_operators(tmp_path, hardware):
    def of_other_operators(decisions):
        decisions["frames"][0]["values"]["saved"].popitem()
        decisions["frames"][0]["graph"] = "0" * 16
        decisions["made_for"] |= {"torch": "2.10.0", "compute": "inductor"}

    model = Deep()
    path = write(planned(model, rows(8), **deep(hardware)), tmp_path / "plan.json", of_other_operators)
    with pytest.raises(ConfigError) as refused:
        planned(model, rows(8), plan=path, **deep(hardware))
    assert (
        "its operators differ: the plan was made with torch 2.10.0 and compute='inductor', and this is torch "
        f"{torch.__version__} and compute='aten'"
    ) in str(refused.value)


@pytest.mark.slow
def test_a_plan_that_was_only_planned_runs_with_inductor(tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(Deep(), hardware="laptop", device="cpu")
    path = write(zero.inspect(model, example_inputs=rows()), tmp_path / "plan.json")
    call = torch.compile(model, backend="zero", options={"plan": path})
    call(*rows()).backward()
    assert zero.inspect(model).decisions.frames[0].distances


# --- one plan a model --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_of_a_model_is_compiled_with_one_plan(tmp_path):
    torch._dynamo.reset()
    model = zero.shard(Deep(), hardware="laptop", device="cpu", compute="aten")
    torch.compile(model, backend="zero")(*rows()).backward()
    path = write(zero.inspect(model), tmp_path / "plan.json")
    torch._dynamo.reset()
    call = torch.compile(model, backend="zero", options={"plan": path})
    with pytest.raises(
        ConfigError, match=r"this model was compiled with no plan before, and now with the plan with"
    ):
        call(*rows())


def test_where_tensors_rest_belongs_to_zero_shard(tmp_path):
    torch._dynamo.reset()
    model = zero.shard(Deep(), hardware="laptop", device="cpu", compute="aten")

    def move(decisions):
        decisions["weights"]["head.weight"]["rests"]["optimizer"] = "nvme"

    path = write(zero.inspect(model, example_inputs=rows()), tmp_path / "plan.json", move)
    call = torch.compile(model, backend="zero", options={"plan": path})
    with pytest.raises(
        ConfigError, match=r"optimizer of 'head.weight' rest on 'nvme' there, and on 'none' here; where"
    ):
        call(*rows())


@pytest.mark.slow
def test_stage_2_keeps_all_of_its_weights(tmp_path, hardware):
    with pytest.raises(
        ConfigError, match=r"has kept=true, and stays gathered at stage 2, whatever is written there"
    ):
        edited(tmp_path, hardware, _weight("h.1.weight", kept=True), stage=2)


@pytest.mark.slow
def test_a_plan_that_the_verifier_refuses_is_said_to_be_the_files(tmp_path, hardware, monkeypatch):
    from zero_compiler.emit import emit
    from zero_compiler.errors import VerifyError

    path = write(planned(Deep(), rows(), **deep(hardware)), tmp_path / "plan.json")

    def refuse(*args, **kwargs):
        raise VerifyError("instruction 3 (gather): no")

    monkeypatch.setattr(emit, "verify_program", refuse)
    with pytest.raises(
        ConfigError, match=r"plan .* what follows from it cannot be run: instruction 3 \(gather\): no"
    ):
        planned(Deep(), rows(), plan=path, **deep(hardware))


@pytest.mark.slow
def test_a_file_that_is_gone_holds_for_what_is_compiled_later(tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(Deep(), hardware="laptop", device="cpu", compute="aten")
    path = tmp_path / "plan.json"
    write(zero.inspect(model, example_inputs=rows()), path)
    call = torch.compile(model, backend="zero", options={"plan": str(path)}, dynamic=False)
    call(*rows()).backward()
    path.unlink()
    call(*rows(16)).backward()
    frames = zero.inspect(model).decisions.frames
    assert [f.inputs for f in frames] == [("f32[8,32]",), ("f32[16,32]",)]
    assert frames[0].distances == frames[1].distances
