"""zero.no_sync in one process: gradients that wait, what is told of them, and the Programs that it needs."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from null.small import batch, both_ways, full, grads, same, two, use, values
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.compile import call_decisions
from zero_compiler.errors import GradientError, ShardError
from zero_compiler.params.modules import sharded_models_of

# The Programs of a frame that is trained.
TRAINED = ["backward", "backward under zero.no_sync", "forward"]
WAITING = "not reduced yet: they were accumulated under zero.no_sync; run a backward outside"

stages = pytest.mark.parametrize("stage", [1, 3])


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


# --- Programs of accumulation and evaluation ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_sync_further_micro_batches_and_evaluation_compile_nothing_again(stage):
    model = zero.shard(two(), stage=stage)
    call = use(model, "compiled")

    def phases():
        frames = zero.inspect(call).to_dict()["frames"]
        return [sorted(f["programs"]) for f in frames], [
            c.compiled for c in sharded_models_of(model)[0].compilers.values()
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
        derive = call_decisions.accumulating
        patch.setattr(
            call_decisions, "accumulating", lambda p, owners: made.append(len(owners)) or derive(p, owners)
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


@both_ways
def test_a_step_whose_closure_runs_the_reducing_backward(how):
    plain, model = two(), zero.shard(two())
    call = use(model, how)
    opt, plain_opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for i in range(2):
        plain(batch(i)).backward()
    plain_opt.step()
    with zero.no_sync(model):
        call(batch(0)).backward()
    opt.step(lambda: call(batch(1)).backward())
    same(values(model), values(plain))
    with zero.no_sync(model):
        with pytest.raises(GradientError, match="not reduced yet"):
            opt.step(lambda: call(batch(1)).backward())


# --- FSDP2's name for it ----------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("copied", [None, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_set_requires_gradient_sync_waits_and_reduces(how, copied):
    plain, model = two(), zero.shard(two())
    model = model if copied is None else copied(model)
    call = use(model, how)
    for i in range(3):
        plain(batch(i)).backward()
    call.set_requires_gradient_sync(False)
    call(batch(0)).backward()
    call(batch(1)).backward()
    with pytest.raises(GradientError, match="not reduced yet"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    call.set_requires_gradient_sync(True)
    call(batch(2)).backward()
    same(grads(model), grads(plain))


def test_set_requires_gradient_sync_is_that_of_the_whole_model():
    model = zero.shard(two())
    part = next(model.children())
    with pytest.raises(ShardError, match="call it on the module that was given to zero.shard"):
        part.set_requires_gradient_sync(False)


def test_set_requires_gradient_sync_without_recurse_leaves_parts_alone():
    model = two()
    part = zero.shard(next(model.children()))
    zero.shard(model)
    model.set_requires_gradient_sync(False, recurse=False)
    assert [p.sync for p in sharded_models_of(model)] == [False, True]
    assert sharded_models_of(part)[0].sync
    model.set_requires_gradient_sync(False)
    assert not any(p.sync for p in sharded_models_of(model))
