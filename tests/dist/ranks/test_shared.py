"""The shared-memory transport on CPU ranks of one host: equal to c10d, right in any timing, and nothing allocated twice."""

from __future__ import annotations

import copy
import gc
import random
import time

import pytest
import torch
from dist.measured import Net
from dist.sharing import batch, loss_of, make, rows, same, train
from dist.spawn import run_ranks
from models import Uneven
from torch import nn

import zero_compiler as zero
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.runtime import _C

pytestmark = [pytest.mark.dist, pytest.mark.alone]


def equals_c10d(rank, world):
    bf16 = {"param_dtype": torch.bfloat16}
    mixed = bf16 | {"reduce_dtype": torch.float32}
    # Stages 1 and 2 are one plan. In bf16 the sum of three has an order of its own in each transport.
    plans = [
        (0, {}),
        (1, {}),
        (3, {}),
        *([(2, bf16), (3, bf16), (0, mixed), (3, mixed)] if world == 2 else []),
    ]
    for stage, fields in plans:
        ours, theirs = (train(kind, rank, stage=stage, **fields) for kind in ("shared", "c10d"))
        same_or_close(ours, theirs, exact=world == 2)


def same_or_close(ours, theirs, exact):
    if exact:
        same(ours, theirs)
    else:
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_equals_c10d(world):
    run_ranks(equals_c10d, world, timeout=240.0)


def timings(rank, world, late):
    want = train("c10d", rank)
    for where in ("evaluated", "before the step", "after the step"):

        def around(here, where=where):
            if here == where and rank == late:
                time.sleep(0.1)

        same(train("shared", rank, around=around), want)


@pytest.mark.parametrize("late", [0, 1])
def test_either_rank_late(late):
    run_ranks(timings, 2, late, timeout=240.0)


class Slow(nn.Module):
    """Compute in the middle that takes longer on one rank."""

    def __init__(self, repeats):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.repeats = repeats

    def forward(self, x):
        x = self.a(x)
        for _ in range(self.repeats):
            x = torch.tanh(x)
        return self.b(x)


def writes_after_evaluation(rank, world):
    # The fast rank writes its rows in place as soon as its own call returned. What the slow one computes must not
    # show it.
    torch.manual_seed(0)
    model = zero.shard(Slow(400 if rank == 1 else 1), stage=3, transport="shared")
    compiled = torch.compile(model, backend="zero", options={"compute": "aten"})
    x = torch.ones(256, 64)
    for step in range(20):
        with zero.gathered(model):
            a, b = (m.weight.clone() for m in (model.a, model.b))
            bias_a, bias_b = model.a.bias.clone(), model.b.bias.clone()
        with torch.no_grad():
            got = compiled(x)
            for p in model.parameters():
                p.data.add_(1.0 + step) if rank == 0 else p.data.mul_(0.5)
            want = nn.functional.linear(x, a, bias_a)
            for _ in range(model.repeats):
                want = torch.tanh(want)
            want = nn.functional.linear(want, b, bias_b)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return sharded_models_of(model)[0].storage.transport.name


def test_in_place_write_after_evaluation_while_the_peer_is_slow():
    assert run_ranks(writes_after_evaluation, 2, timeout=120.0) == ["shared"] * 2


@torch.library.custom_op("user::late", mutates_args=())
def late(x: torch.Tensor) -> torch.Tensor:
    """A copy, made as late as this rank has drawn."""
    time.sleep(random.choice((0.0, 0.0, 0.001, 0.004)))
    return x.clone()


late.register_fake(torch.empty_like)


late.register_autograd(lambda ctx, grad: late(grad))


class Late(nn.Module):
    """Between any two weights, forward and backward, this rank or its peer is behind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = late(torch.tanh(layer(late(x))))
        return x


def either_is_slow(rank, world):
    for stage, fields in ((3, {}), (2, {}), (3, {"param_dtype": torch.bfloat16})):
        results = []
        for kind in ("c10d", "shared"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            random.seed(rank)
            model = zero.shard(Late(), stage=stage, transport=kind, **fields)
            compiled = torch.compile(model, backend="zero", options={"compute": "aten"})
            opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for step in range(20):
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + rank))
                loss = compiled(x).float().square().mean()
                loss.backward()
                opt.step()  # in place, where a peer that is behind may still read
                opt.zero_grad()
                losses.append(loss.item())
            results.append((losses, rows(model)))
        same(*results)
    return True


def test_training_while_either_rank_is_slow_in_forward_and_backward():
    assert run_ranks(either_is_slow, 2, timeout=120.0) == [True] * 2


def kept_weights(rank, world):
    for kind in ("shared", "c10d"):
        for fields in ({}, {"param_dtype": torch.bfloat16}):
            model, compiled = make(kind, stage=2, **fields)
            ids = batch(0, 0)
            with torch.no_grad():
                first = compiled(ids)
                model.up.weight._local_tensor.mul_(2.0 if rank == 1 else 1.0)  # one rank alone
                second = compiled(ids)
                with zero.gathered(model):
                    full = [p.detach().clone() for p in model.parameters()]
            assert not torch.equal(first, second)
            plain = Uneven()
            with torch.no_grad():
                for p, value in zip(plain.parameters(), full, strict=True):
                    p.copy_(value)
                if fields:
                    plain = plain.to(torch.bfloat16)
                torch.testing.assert_close(
                    second, plain(ids), rtol=2e-2 if fields else 1e-5, atol=2e-2 if fields else 1e-6
                )


def test_kept_weights_after_in_place_writes():
    run_ranks(kept_weights, 2, timeout=120.0)


def replaced_storage(rank, world):
    # What torch puts into a DTensor's place by `.data =` never reaches it, and a step says so (test_refusals.py).
    for how in ("assign", "local", "in place"):
        results = []
        for kind in ("c10d", "shared"):
            model, compiled = make(kind)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            loss_of(compiled, batch(rank, 0)).backward()
            opt.step()
            opt.zero_grad()
            before = rows(model)
            if how == "assign":
                state = {k: v.clone() * 1.5 for k, v in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
                model.head.weight = model.embed.weight  # assigning unties them, as in plain PyTorch
                opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for p in model.parameters():
                if how == "local":
                    p._local_tensor = p._local_tensor.detach() * 1.5
                elif how == "in place":
                    p.data.mul_(1.5)
            assert all(torch.equal(now, 1.5 * then) for now, then in zip(rows(model), before, strict=True))
            losses = []
            for step in range(2):
                loss = loss_of(compiled, batch(rank, 1 + step))
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.item())
            if kind == "shared":  # and lies nowhere else any more
                chunks = sharded_models_of(model)[0].storage.transport.segment.chunks
                assert model.up.weight._local_tensor.data_ptr() == chunks["up.weight"].data_ptr()
            results.append((losses, rows(model)))
        same(*results)


def test_replaced_storage_is_published_again():
    run_ranks(replaced_storage, 2, timeout=120.0)


def other_places(rank, world):
    """Rows that lie where those of another parameter belong stay theirs, whoever holds them."""

    def exchange(model, other):
        model[0].weight, model[2].weight = model[2].weight, model[0].weight

    def rotate(model, other):
        state = model.state_dict()
        took = {f"{k}.weight": state[f"{(k + 2) % 6}.weight"] for k in (0, 2, 4)}
        model.load_state_dict({**state, **took}, assign=True)

    def between_models(model, other):
        model[0].weight, other[0].weight = other[0].weight, model[0].weight

    x = torch.ones(3, 4)
    for stage, change, early in ((3, exchange, False), (1, rotate, True), (3, between_models, True)):
        torch._dynamo.reset()
        plain, ours = [], []
        for seed in (0, 1):
            torch.manual_seed(seed)
            layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
            plain.append(nn.Sequential(*layers))
            ours.append(zero.shard(copy.deepcopy(plain[-1]), stage=stage, transport="shared"))
        compiled = [torch.compile(m, backend="zero", options={"compute": "aten"}) for m in ours]
        with torch.no_grad():
            _ = [c(x) for c in compiled if early]
            saved = ours[0].state_dict()
            want = {k: v.clone() for k, v in plain[0].state_dict().items()}
            change(*plain)
            change(*ours)
            for c, p in zip(compiled, plain, strict=True):
                torch.testing.assert_close(c(x), p(x), rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(ours, plain, strict=True):
            assert all(
                torch.equal(a.full_tensor(), b)
                for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
            )
        # What was taken of the model before has the values of then.
        assert all(torch.equal(v.full_tensor(), want[k]) for k, v in saved.items())


def test_parameters_that_exchange_places_keep_their_rows():
    run_ranks(other_places, 2, timeout=120.0)


def given_storage(rank, world):
    """A model that was made on meta: its shards move to where peers read them, and lie nowhere else."""
    _C.meter_install()
    x, seen = torch.full((2, 64), rank + 1.0), []

    def made():
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))

    for kind, early in (("c10d", False), ("shared", False), ("shared", True)):
        gc.collect()
        start = _C.meter_current()
        if early:
            with torch.device("meta"), zero.init(stage=3, transport=kind):
                model = made()
        else:
            with torch.device("meta"):
                model = made()
            zero.shard(model, stage=3, transport=kind)
        model.to_empty(device="cpu")
        for k, p in enumerate(model.parameters()):
            p.data.fill_(0.01 * (k + 1))
        with torch.no_grad():
            seen += [torch.compile(model, backend="zero", options={"compute": "aten"})(x)]
        torch._dynamo.reset()
        del p
        memory = zero.inspect(model).memory
        gc.collect()
        held = _C.meter_current() - start
        # Once, and not twice. Rows of padding that nobody gave, scalars and the result are less than 1 KiB.
        assert abs(held - memory.parameters - memory.arena) < 1024 < memory.parameters / 2, (held, memory)
        if kind == "shared":
            chunks = sharded_models_of(model)[0].storage.transport.segment.chunks
            rows = {n: p._local_tensor for n, p in model.named_parameters()}
            assert all(r.data_ptr() == chunks[n].data_ptr() for n, r in rows.items() if r.numel())
            assert (rank == 0) == all(r.numel() for r in rows.values())
            del chunks, rows
        del model
    assert all(torch.equal(seen[0], other) for other in seen[1:])
    return True


def test_storage_that_a_meta_model_is_given_moves_to_shared_memory():
    assert run_ranks(given_storage, 2, timeout=60.0) == [True] * 2


def several_models(rank, world):
    pairs = {}
    for kind in ("shared", "c10d"):
        made = [make(kind, seed=seed) for seed in (1, 2)]
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m, _ in made]
        losses = []
        for step in range(2):
            total = sum(loss_of(c, batch(rank, step)) for _, c in made)
            total.backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
            losses.append(total.item())
        pairs[kind] = (losses, [r for m, _ in made for r in rows(m)])
    same(pairs["shared"], pairs["c10d"])
    # Nested shards, each with a segment of its own.
    results = []
    for kind in ("shared", "c10d"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), zero.shard(nn.Linear(6, 6), stage=2, transport=kind))
        model = zero.shard(model, transport=kind)
        compiled = torch.compile(model, backend="zero", options={"compute": "aten"})
        out = compiled(torch.ones(2, 6) * (rank + 1)).square().mean()
        out.backward()
        results.append(([out.item()], [p.grad._local_tensor.clone() for p in model.parameters()]))
    same(*results)


def test_several_models_in_one_process():
    run_ranks(several_models, 2, timeout=120.0)


def counters(rank, world):
    model, compiled = make("shared")
    for step in range(3):
        loss_of(compiled, batch(rank, step)).backward()
    engine = sharded_models_of(model)[0].runtime.engine
    now = engine.counters()
    assert now["arena_bytes"] == 0  # nothing but what ranks share
    assert now["shared_bytes"] > 0
    assert now["gathers"] == 0  # read in place
    assert now["allocations"] > now["arena_allocations"] > 0
    return True


def test_counters():
    assert run_ranks(counters, 2, timeout=60.0) == [True] * 2


def allocates(rank, world):
    for kind in ("c10d", "shared"):
        for stage in (0, 2, 3):  # 1 and 2 are one plan
            for dtype in (None, torch.bfloat16):
                allocates_once(kind, rank, stage, dtype)
    return True


def allocates_once(kind, rank, stage, dtype):
    what = (kind, stage, dtype)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(Net(width=32, layers=2), stage=stage, transport=kind, param_dtype=dtype)
    compiled = torch.compile(model, backend="zero", options={"compute": "aten"})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        compiled(torch.randn(2, 32)).backward()
        opt.step()
        opt.zero_grad()
        return sharded_models_of(model)[0].runtime.engine.counters()

    first = step()
    for _ in range(3):
        now = step()
    kinds = ("arena_allocations", "arena_bytes", "shared_bytes", "scratch_bytes")
    assert [now[k] - first[k] for k in kinds] == [0] * len(kinds), what
    # What is left are gradients, one for each parameter and step: recycled, or given back to activations and made again.
    given = [now[k] - first[k] for k in ("allocations", "recycled")]
    assert sum(given) == 3 * len(list(model.parameters())), what
    # A step that makes an arena is seen.
    runtime = sharded_models_of(model)[0].runtime
    arena = runtime.own if kind == "shared" else runtime.transient
    runtime.engine.grow_arena(arena, 1 << 24)
    assert step()["arena_allocations"] == first["arena_allocations"] + 1, what


def test_nothing_is_allocated_after_the_first_step():
    assert run_ranks(allocates, 2, timeout=200.0) == [True] * 2
