"""zero.inspect and ZERO_DUMP in one process."""

from __future__ import annotations

import json
import os

import pytest
import torch
from null.small import batch, same, two, use, values
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import CaptureError, ShardError

# The Programs of a frame that is trained.
TRAINED = ["backward", "backward under zero.no_sync", "forward"]

# --- inspect -----------------------------------------------------------------------------------------------------


def test_inspect_of_a_plain_model_is_an_error():
    for model in (two(), torch.compile(two(), backend="zero")):
        with pytest.raises(
            ShardError, match=r"nothing in this model is sharded; call zero\.shard\(model\) first"
        ):
            zero.inspect(model)


def test_inspect_before_the_first_call_says_what_it_needs():
    model = zero.shard(two())
    for form in (model, use(model, "compiled")):
        text = str(zero.inspect(form))
        assert "not compiled yet: call the model, or pass example_inputs=" in text
        assert zero.inspect(form).to_dict()["frames"] == []
        assert zero.inspect(form).memory.parameters == 2 * (12 + 3) * 4


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [(batch(),), {"x": batch(), "both": True}], ids=["tuple", "dict"])
def test_inspect_with_example_inputs_plans_and_runs_nothing(inputs):
    model = zero.shard(two())
    call = use(model, "compiled")
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append(1))
    before = values(model)
    report = zero.inspect(call, example_inputs=inputs)
    assert [sorted(f["programs"]) for f in report.to_dict()["frames"]] == [TRAINED]
    assert "planned from example inputs: nothing was run" in str(report)
    same(values(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert zero.inspect(call).to_dict()["frames"] == []  # planning leaves nothing behind
    call(batch()).backward()
    (ran,) = zero.inspect(call).to_dict()["frames"]
    (planned,) = report.to_dict()["frames"]
    for phase in TRAINED:
        assert ran["programs"][phase]["instrs"] == planned["programs"][phase]["instrs"]
        assert ran["programs"][phase]["live"] == planned["programs"][phase]["live"]


def test_inspect_runs_nothing_where_nothing_can_be_captured():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4)

        def forward(self, x):
            for _ in range(2):
                torch._dynamo.graph_break()
                x = torch.cat([self.lstm(x)[0][..., :2], x[..., :1]], -1)
            return x

    model = zero.shard(Recurrent())
    seen = []
    model.lstm.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(CaptureError, match="captures nothing of the model's forward before"):
        zero.inspect(model, (torch.ones(2, 1, 3),))
    assert not seen
    model(torch.ones(2, 1, 3))  # it works eagerly, as before


def test_inspect_plans_where_the_shard_names_how_to_compute():
    model = zero.shard(two(), compute="inductor")
    (frame,) = zero.inspect(use(model, "compiled"), example_inputs=(batch(),)).to_dict()["frames"]
    assert sorted(frame["programs"]) == TRAINED


def test_inspect_after_calls_lists_every_frame_and_goes_through_json(tmp_path):
    model = zero.shard(two(), stage=2)
    call = use(model, "compiled")
    call(batch()).backward()
    with torch.no_grad():
        call(batch())
    report = zero.inspect(call)
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(zero.inspect(model).to_dict()))
    assert [sorted(f["programs"]) for f in data["frames"]] == [TRAINED, ["inference"]]
    assert [sorted(f["timelines"]) for f in data["frames"]] == [TRAINED, ["inference"]]
    report.save_json(str(tmp_path / "plan.json"))
    with open(tmp_path / "plan.json") as f:
        again = json.load(f)
    assert again == json.loads(json.dumps(data))
    from zero_compiler.ir.program import Program

    for frame in again["frames"]:
        for phase, program in frame["programs"].items():
            loaded = Program.from_dict(program)
            assert loaded.title == phase
            assert json.loads(loaded.to_json()) == program
    assert zero.Config.from_dict(again["frames"][0]["config"]).stage == 2
    assert "stage 2, rank 0 of 1, 4 parameters" in str(report)


# --- ZERO_DUMP ---------------------------------------------------------------------------------------------------


def test_zero_dump_writes_a_file_a_pass_and_only_when_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZERO_DUMP", raising=False)
    model = zero.shard(two())
    use(model, "compiled")(batch()).backward()
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv("ZERO_DUMP", str(tmp_path / "dump"))
    use(zero.shard(two()), "compiled")(batch()).backward()
    (frame,) = (tmp_path / "dump").iterdir()
    names = {p.name for p in frame.iterdir()}
    assert {"joint", "forward", "backward"} <= names
    for phase in ("forward", "backward"):
        files = sorted(p.name for p in (frame / phase).iterdir())
        assert "program.txt" in files
        numbered = [f for f in files if f[0].isdigit()]
        assert [int(f[:2]) for f in numbered] == list(
            range(int(numbered[0][:2]), int(numbered[0][:2]) + len(numbered))
        )
        assert "first.weight" in (frame / phase / "program.txt").read_text()
        assert "live" in (frame / phase / numbered[-1]).read_text()
    kept = (frame / "backward" / "program_no_sync.txt").read_text()
    assert "keep            first.weight float32[3, 4], first.bias float32[3]" in kept
    assert "reduce" not in kept
