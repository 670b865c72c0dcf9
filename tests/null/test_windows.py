"""zero.no_sync, zero.gathered, zero.inspect and ZERO_DUMP in one process."""

from __future__ import annotations

import contextlib
import copy
import json
import os

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import GradientError, ShardError
from zero_compiler.modules import policies_of
from zero_compiler.runtime import session

ATEN = {"compute": "aten"}
# The Programs of a frame that is trained.
TRAINED = ["backward", "backward under zero.no_sync", "forward"]
WAITING = "not reduced yet: they were accumulated under zero.no_sync; run a backward outside"


class Two(nn.Module):
    """`second` is used only where `both` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)

    def forward(self, x, both=True):
        out = self.first(x)
        return (out + self.second(x) if both else out).square().mean()


def two():
    torch.manual_seed(0)
    return Two()


def batch(seed=1):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def use(model, how):
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options=ATEN) if how == "compiled" else model


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def grads(model):
    return {n: None if p.grad is None else full(p.grad).clone() for n, p in model.named_parameters()}


def same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, name=name: f"{name}: {m}")


both_ways = pytest.mark.parametrize("how", ["eager", "compiled"])
stages = pytest.mark.parametrize("stage", [1, 3])


# --- no_sync -----------------------------------------------------------------------------------------------------


@both_ways
@stages
def test_the_next_backward_reduces_what_no_sync_left(how, stage):
    plain, model = two(), zero.shard(two(), stage=stage)
    call = use(model, how)
    for i in range(3):
        plain(batch(i)).backward()
    with zero.no_sync(call):
        call(batch(0)).backward()
        call(batch(1)).backward()
    call(batch(2)).backward()
    same(grads(model), grads(plain))


@both_ways
def test_weights_that_the_synchronising_backward_does_not_use_are_reduced_too(how):
    plain, model = two(), zero.shard(two())
    call = use(model, how)
    plain(batch(0)).backward()
    plain(batch(1), False).backward()
    with zero.no_sync(call):
        call(batch(0)).backward()
    call(batch(1), False).backward()
    same(grads(model), grads(plain))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@both_ways
def test_no_sync_after_a_reduced_gradient_adds_to_it(how):
    plain, model = two(), zero.shard(two())
    call = use(model, how)
    for i in range(4):
        plain(batch(i)).backward()
    call(batch(0)).backward()
    with zero.no_sync(model):
        call(batch(1)).backward()
    call(batch(2)).backward()
    call(batch(3)).backward()
    same(grads(model), grads(plain))


def unscale(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(opt)


USES = {
    "SGD.step": lambda m: torch.optim.SGD(m.parameters(), lr=0.1).step(),
    "SGD.step, one by one": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=False).step(),
    "AdamW.step": lambda m: torch.optim.AdamW(m.parameters(), foreach=True).step(),
    "AdamW.step, fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True).step(),
    "clip_grad_norm_": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_value_": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "GradScaler.unscale_": unscale,
    "norm": lambda m: m.first.weight.grad.norm(),
    "arithmetic": lambda m: m.first.weight.grad * 2,
    "in place": lambda m: m.first.weight.grad.mul_(2),
    "full_tensor": lambda m: m.first.weight.grad.full_tensor(),
    "to_local": lambda m: m.first.weight.grad.to_local(),
    "indexing": lambda m: m.first.weight.grad[0],
    "cpu": lambda m: m.first.weight.grad.double(),
    "clone": lambda m: m.first.weight.grad.clone(),
    "numpy": lambda m: m.first.weight.grad.numpy(),
    "item": lambda m: m.first.weight.grad.sum().item(),
    "foreach": lambda m: torch._foreach_norm([p.grad for p in m.parameters()]),
}


@pytest.fixture(scope="module")
def waiting_model():
    model = zero.shard(two())
    with zero.no_sync(model):
        model(batch()).backward()
    return model


@pytest.mark.parametrize("name", USES)
def test_what_uses_waiting_gradients_is_told_so(name, waiting_model):
    before = {n: full(p).detach().clone() for n, p in waiting_model.named_parameters()}
    with pytest.raises(GradientError, match=WAITING):
        USES[name](waiting_model)
    for n, p in waiting_model.named_parameters():
        assert torch.equal(full(p), before[n])
    assert "not reduced yet" in repr(waiting_model.first.weight.grad)
    assert waiting_model.first.weight.grad.shape == waiting_model.first.weight.shape


@both_ways
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", ["model", "optimizer"])
def test_zero_grad_drops_what_waits(how, set_to_none, who):
    plain, model = two(), zero.shard(two())
    call = use(model, how)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with zero.no_sync(call):
        call(batch(0)).backward()
    (model if who == "model" else opt).zero_grad(set_to_none=set_to_none)
    call(batch(1)).backward()
    plain(batch(1)).backward()
    same(grads(model), grads(plain))
    opt.step()


@pytest.mark.parametrize("kind", ["plain", "plain compiled", "sharded", "sharded compiled"])
def test_no_sync_takes_any_module_before_its_first_call(kind):
    reference = two()
    model = two() if "plain" in kind else zero.shard(two())
    call = use(model, "compiled" if "compiled" in kind else "eager")
    with zero.no_sync(call), zero.no_sync(call):
        call(batch(0)).backward()
    call(batch(1)).backward()
    for i in range(2):
        reference(batch(i)).backward()
    same(grads(model), grads(reference))


def test_nested_no_sync_ends_with_the_outer_one():
    model = zero.shard(two())
    with zero.no_sync(model):
        with zero.no_sync(model):
            model(batch(0)).backward()
        model(batch(1)).backward()
        assert "not reduced yet" in repr(model.first.weight.grad)
    model(batch(2)).backward()
    assert isinstance(model.first.weight.grad, DTensor)


def test_no_sync_ends_with_an_exception():
    model = zero.shard(two())
    with pytest.raises(KeyError), zero.no_sync(model):
        raise KeyError
    model(batch()).backward()
    assert isinstance(model.first.weight.grad, DTensor)


def test_no_sync_of_a_part_leaves_the_rest():
    outer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero.shard(outer[0])
    zero.shard(outer)
    with zero.no_sync(outer[0]):
        outer(batch()).sum().backward()
    assert "not reduced yet" in repr(outer[0].weight.grad)
    assert isinstance(outer[1].weight.grad, DTensor)


@both_ways
def test_the_forward_may_lie_outside_of_no_sync(how):
    # "those begun under no_sync": it is the backward that counts
    plain, model = two(), zero.shard(two())
    call = use(model, how)
    loss = call(batch(0))
    with zero.no_sync(model):
        loss.backward()
        assert "not reduced yet" in repr(model.first.weight.grad)
        late = call(batch(1))
    late.backward()
    for i in range(2):
        plain(batch(i)).backward()
    same(grads(model), grads(plain))


def test_waiting_gradients_are_kept_in_reduce_dtype():
    model = zero.shard(two(), param_dtype="bf16", reduce_dtype="fp32")
    with zero.no_sync(model):
        model(batch()).backward()
    assert model.first.weight.grad.full.dtype == torch.float32
    model(batch()).backward()
    assert model.first.weight.grad.dtype == torch.float32


# --- Programs of accumulation and evaluation ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_sync_further_micro_batches_and_evaluation_compile_nothing_again(stage):
    model = zero.shard(two(), stage=stage)
    call = use(model, "compiled")

    def phases():
        frames = zero.inspect(call).to_dict()["frames"]
        return [sorted(f["programs"]) for f in frames], [
            c.compiled for c in policies_of(model)[0].compilers.values()
        ]

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def train(*micro_batches):
        for seed, sync in micro_batches:
            with contextlib.nullcontext() if sync else zero.no_sync(call):
                call(batch(seed)).backward()

    before = graphs()
    train((0, True))
    first, segments = phases()
    assert first == [TRAINED]
    train((1, True), (2, False), (3, False), (4, True))
    assert phases() == ([TRAINED], segments)
    with torch.no_grad():
        call(batch(5))
    both, segments = phases()
    assert both == [TRAINED, ["inference"]]
    model.zero_grad()
    for step in range(2):
        train((step, False), (step, True))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        with torch.no_grad():
            call(batch(6))
    assert phases() == ([TRAINED, ["inference"]], segments)
    assert graphs() - before == 2


def test_programs_under_no_sync_are_made_when_they_are_needed_and_once():
    """Of two models in one frame either may be under no_sync without the other."""
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    outer = copy.deepcopy(reference)
    inner = zero.shard(outer[0])
    zero.shard(outer)
    call = use(outer, "compiled")
    made = []
    with pytest.MonkeyPatch.context() as patch:
        derive = session.accumulating
        patch.setattr(
            session, "accumulating", lambda p, owners: made.append(len(owners)) or derive(p, owners)
        )
        for seed, model in enumerate((inner, outer, inner, outer)):
            with zero.no_sync(model):
                call(batch(seed)).sum().backward()
            assert "not reduced yet" in repr(inner.weight.grad)
            assert ("not reduced yet" in repr(outer[1].weight.grad)) == (model is outer)
            reference(batch(seed)).sum().backward()
    assert made == [1, 2]
    call(batch(9)).sum().backward()
    reference(batch(9)).sum().backward()
    same(grads(outer), grads(reference))


# --- gathered ----------------------------------------------------------------------------------------------------


def values(model):
    return {n: full(p).detach().clone() for n, p in model.named_parameters()}


def test_inside_gathered_parameters_are_whole_and_come_back_as_they_were():
    model = zero.shard(two())
    model(batch()).backward()
    before, shards, kept = values(model), dict(model.named_parameters()), grads(model)
    with zero.gathered(model):
        inside = dict(model.named_parameters())
        assert list(inside) == list(shards)
        for name, p in inside.items():
            assert type(p) is nn.Parameter
            assert not p.requires_grad
            assert torch.equal(p, before[name])
        state = model.state_dict()
        assert all(type(v) is torch.Tensor and torch.equal(v, before[k]) for k, v in state.items())
        assert torch.equal(model.first.weight, before["first.weight"])
    for name, p in model.named_parameters():
        assert p is shards[name]
    same(grads(model), kept)


def test_what_is_read_inside_stays_valid_and_what_is_written_is_dropped():
    model = zero.shard(two())
    before = values(model)
    with zero.gathered(model):
        taken = model.first.weight
        model.first.weight.zero_()
    assert torch.equal(taken, torch.zeros(3, 4))
    same(values(model), before)


@pytest.mark.parametrize("fails", [False, True])
def test_written_values_are_cut_again_also_after_an_exception(fails):
    model = zero.shard(two())
    shards = dict(model.named_parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = values(model)
    try:
        with zero.gathered(model, write=True):
            model.first.weight.fill_(2)
            model.second.bias = nn.Parameter(torch.full((3,), 7.0))
            model.second.weight.data = torch.full((3, 4), 5.0)
            if fails:
                raise KeyError("in the body")
    except KeyError:
        assert fails
    after = values(model)
    assert torch.equal(after["first.weight"], torch.full((3, 4), 2.0))
    assert torch.equal(after["second.bias"], torch.full((3,), 7.0))
    assert torch.equal(after["second.weight"], torch.full((3, 4), 5.0))
    assert torch.equal(after["first.bias"], before["first.bias"])
    for name, p in model.named_parameters():
        assert p is shards[name]
    model(batch()).backward()
    opt.step()
    assert not torch.equal(values(model)["first.weight"], after["first.weight"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_compiled_forward_sees_what_was_written_inside_and_after(stage):
    model = zero.shard(two(), stage=stage)
    call = use(model, "compiled")
    call(batch()).backward()  # stages 1 and 2 may keep gathered weights from here
    twin = two()
    with zero.gathered(model, write=True):
        with torch.no_grad():
            for p in (model.first.weight, twin.first.weight):
                p.fill_(0.25)
            torch.testing.assert_close(call(batch()), twin(batch()))
    torch.testing.assert_close(call(batch()), twin(batch()))
    model.zero_grad()
    call(batch()).backward()
    twin(batch()).backward()
    same(grads(model), grads(twin))


@both_ways
def test_a_forward_with_gradients_enabled_inside_gathered(how):
    model, twin = zero.shard(two()), two()
    call = use(model, how)
    x = batch().requires_grad_()
    with zero.gathered(model):
        call(x).backward()
    got, x.grad = x.grad, None
    twin(x).backward()
    torch.testing.assert_close(got, x.grad)
    assert model.first.weight.grad is None


def test_load_state_dict_inside_gathered():
    model, other = zero.shard(two()), two()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    with zero.gathered(model, write=True):
        model.load_state_dict(other.state_dict())
    same(values(model), values(other))


def test_a_second_gathered_inside_the_first_is_an_error():
    model = zero.shard(two())
    shards = dict(model.named_parameters())
    with zero.gathered(model):
        with pytest.raises(ShardError, match="this model is gathered already; leave the first one before"):
            with zero.gathered(model):
                pass
        assert type(model.first.weight) is nn.Parameter
    assert all(p is shards[n] for n, p in model.named_parameters())
    with zero.gathered(model):
        pass


def test_a_shape_that_changed_inside_is_an_error_and_nothing_is_written():
    model = zero.shard(two())
    before = values(model)
    window = zero.gathered(model, write=True)
    window.__enter__()
    model.first.weight.zero_()
    model.first.bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(ShardError, match=r"parameter 'first.bias' has shape \(9,\) at exit, expected \(3,\)"):
        window.__exit__(None, None, None)
    same(values(model), before)
    model(batch()).backward()


def test_tied_weights_stay_tied_inside():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    zero.shard(model)
    with zero.gathered(model, write=True):
        assert model[0].weight is model[1].weight
        model[1].weight.fill_(3)
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight.full_tensor(), torch.full((5, 4), 3.0))


def test_gathered_with_a_part_that_was_deleted():
    model = zero.shard(two())
    del model.first.bias
    model.second.bias = None
    with zero.gathered(model, write=True):
        model.first.weight.fill_(1)
    assert not hasattr(model.first, "bias")
    assert model.second.bias is None
    model.second(batch()).sum().backward()
    with zero.no_sync(model):
        model.second(batch()).sum().backward()
    model.second(batch()).sum().backward()
    assert [r["name"] for r in zero.inspect(model).to_dict()["parameters"]]


def test_the_backward_of_an_earlier_forward_inside_gathered_is_an_error():
    model = zero.shard(two())
    loss = use(model, "compiled")(batch())
    with (
        zero.gathered(model),
        pytest.raises(ShardError, match="whole inside zero.gathered: run the backward"),
    ):
        loss.backward()


def test_writing_between_forward_and_backward_is_an_error():
    for how in ("eager", "compiled"):
        model = zero.shard(two())
        loss = use(model, how)(batch())
        with zero.gathered(model, write=True):
            model.first.weight.zero_()
        with pytest.raises(
            ShardError, match=r"'first\.\w+' was modified in place between forward and backward"
        ):
            loss.backward()


def test_gathered_and_no_sync_of_a_plain_model_do_nothing():
    model = two()
    with zero.gathered(model, write=True):
        model.first.weight.data.fill_(1)
    assert torch.equal(model.first.weight, torch.ones(3, 4))


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
    from zero_compiler.program import Program

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


@both_ways
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_no_sync_refuses_hooks_that_would_see_no_gradient(how, kind):
    model = zero.shard(two())
    call = use(model, how)
    handle = getattr(model.second.weight, kind)(lambda seen: None)
    call(batch()).backward()
    with zero.no_sync(model):
        with pytest.raises(GradientError, match=r"parameter 'second\.weight' has a hook .* remove the hook"):
            call(batch()).backward()
        handle.remove()
        model.zero_grad()
        call(batch()).backward()
    call(batch()).backward()
    plain = two()
    for _ in range(2):
        plain(batch()).backward()
    same(grads(model), grads(plain))
