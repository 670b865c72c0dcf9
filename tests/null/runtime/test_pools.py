"""Memory that a model and its parts share: threads, evaluations and calls that break off do not spoil it."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.compile import loader
from zero_compiler.errors import ShardError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.runtime import pools as turns
from zero_compiler.runtime.pools import Pools, in_turn

HALF = {"param_dtype": torch.bfloat16}  # so that one rank casts weights into the arena


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


def compiled(model):
    return torch.compile(model, backend="zero", options={"compute": "aten"})


def two_parts(width=256):
    torch.manual_seed(0)
    parts = [zero.shard(nn.Linear(width, width), **HALF) for _ in range(2)]
    return zero.shard(nn.Sequential(*parts), **HALF)


@pytest.mark.slow
def test_two_threads_take_turns():
    root = two_parts()
    calls, x = [compiled(part) for part in root], torch.randn(4, 256)
    with torch.no_grad():
        want = [call(x) for call in calls]
    assert sharded_models_of(root[0])[0].runtime.pools is sharded_models_of(root[1])[0].runtime.pools
    wrong = []

    def go(k):
        with torch.no_grad():
            wrong.extend(k for _ in range(300) if not torch.equal(calls[k](x), want[k]))

    threads = [threading.Thread(target=go, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.library.custom_op("user::pauses", mutates_args=())
def pauses(x: torch.Tensor) -> torch.Tensor:
    if _pause:
        began, goes_on = _pause
        began.set()
        assert goes_on.wait(60)
    return x.clone()


@pauses.register_fake
def _(x):
    return torch.empty_like(x)


_pause: list = []


class Pausing(nn.Module):
    """A root whose call runs its first part, and pauses before the end."""

    def __init__(self, sizes):
        super().__init__()
        torch.manual_seed(0)
        parts = [zero.shard(nn.Linear(size, size), **HALF) for size in sizes]
        self.parts = zero.shard(nn.ModuleList(parts), **HALF)

    def forward(self, x):
        return pauses(self.parts[0](x))


class Pauses:
    """A call in another thread that pauses amid its first part; the second is larger and not compiled."""

    def __init__(self):
        self.model = Pausing((256, 512))
        self.call, self.x, self.got = compiled(self.model), torch.randn(4, 256), []
        with torch.no_grad():
            self.want = self.call(self.x)
        self.thread = threading.Thread(target=self._go)

    @property
    def part(self):
        return self.model.parts[1]

    @property
    def pools(self):
        return sharded_models_of(self.model.parts[0])[0].runtime.pools

    def _go(self):
        with torch.no_grad():
            self.got.append(self.call(self.x))

    def begin(self):
        _pause[:] = threading.Event(), threading.Event()
        self.thread.start()
        assert _pause[0].wait(60)

    def end(self):
        _pause[1].set()
        self.thread.join()
        _pause.clear()
        assert torch.equal(self.got[0], self.want)


@pytest.fixture
def pauses_amid():
    made = Pauses()
    yield made
    if _pause:
        made.end()


@pytest.fixture
def waits(monkeypatch):
    """Set when a thread begins to wait for its turn."""
    begins, wait = threading.Event(), turns._wait

    def waiting(one):
        if one.turn.locked():
            begins.set()
        wait(one)

    monkeypatch.setattr(turns, "_wait", waiting)
    return begins


@pytest.mark.slow
@pytest.mark.parametrize("before", ["its pools are joined", "it is loaded"])
def test_a_part_is_compiled_while_another_runs(before, pauses_amid, waits, monkeypatch):
    """Its larger Program makes room in memory that both use, but not under the one that runs."""
    given, out, joined = torch.randn(4, 512), [], loader.joined
    with torch.no_grad():
        want = pauses_amid.part(given)

    def late(runtimes):
        found = joined(runtimes)
        pauses_amid.begin()
        return found

    def go():
        with torch.no_grad():
            out.append(compiled(pauses_amid.part)(given))

    if before == "it is loaded":
        monkeypatch.setattr(loader, "joined", late)
    else:
        pauses_amid.begin()
    thread = threading.Thread(target=go)
    thread.start()
    assert waits.wait(60)
    arena = pauses_amid.pools.arena
    time.sleep(0.2)
    assert not out
    assert pauses_amid.pools.arena is arena
    pauses_amid.end()
    thread.join()
    assert pauses_amid.pools.arena is not arena
    torch.testing.assert_close(out[0], want)


@pytest.mark.slow
def test_a_wait_that_takes_too_long_is_an_error_that_passes(pauses_amid, monkeypatch):
    call, given = compiled(pauses_amid.part), torch.randn(4, 512)
    pauses_amid.begin()
    with torch.no_grad():
        want = pauses_amid.part(given)
        with monkeypatch.context() as limit:
            limit.setattr(turns, "_LONGEST_S", 0.2)
            with pytest.raises(ShardError, match="waited 0 s for another one, of another thread"):
                call(given)
        pauses_amid.end()
        torch.testing.assert_close(call(given), want)


class _User:
    """Something with pools, for turns alone."""

    def __init__(self):
        self.pools = Pools(torch.device("cpu"))


def test_pools_that_are_exchanged_during_a_wait_are_waited_for(waits):
    user, other = _User(), Pools(torch.device("cpu"))
    begins, seen = threading.Event(), []

    def exchange():
        begins.set()
        assert waits.wait(60)
        user.pools = other

    second = threading.Thread(
        target=lambda: in_turn([user], lambda: seen.append((other.turn.locked(), other.thread)))
    )
    first = threading.Thread(target=lambda: in_turn([user], exchange))
    first.start()
    assert begins.wait(60)
    second.start()
    first.join()
    second.join()
    assert seen == [(True, second.ident)]
    assert not other.turn.locked()


def test_turns_are_taken_in_the_order_of_those_who_wait():
    """One that calls again at once does not keep another one waiting."""
    user, ends, turns_of = _User(), threading.Event(), {"often": 0, "once": 0}

    def often():
        while not ends.is_set():
            in_turn([user], lambda: time.sleep(0.005))
            turns_of["often"] += 1

    thread = threading.Thread(target=often)
    thread.start()
    try:
        for _ in range(10):
            before = turns_of["often"]
            in_turn([user], lambda: None)
            turns_of["once"] = max(turns_of["once"], turns_of["often"] - before)
    finally:
        ends.set()
        thread.join()
    assert turns_of["once"] <= 3


def test_one_that_waits_no_more_is_in_nobodys_way(monkeypatch):
    user = _User()
    user.pools.waiting[object()] = time.monotonic()  # as Ctrl-C may leave it
    monkeypatch.setattr(turns, "_SEEN_S", 0.1)
    assert in_turn([user], lambda: "its turn") == "its turn"


@pytest.mark.slow
def test_a_wait_ends_by_the_time_of_one_call_and_not_of_several(monkeypatch):
    user, begins = _User(), threading.Event()
    monkeypatch.setattr(turns, "_LONGEST_S", 0.6)

    def one():
        begins.set()
        time.sleep(0.4)

    threads = [threading.Thread(target=in_turn, args=([user], one)) for _ in range(3)]
    for thread in threads:
        thread.start()
        assert begins.wait(60)
    assert in_turn([user], lambda: "behind three") == "behind three"
    for thread in threads:
        thread.join()


def test_ctrl_c_ends_a_turn():
    user = _User()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_turn([user], interrupted)
    assert in_turn([user], lambda: "free") == "free"


@torch.library.custom_op("user::calls_a_part", mutates_args=())
def calls_a_part(x: torch.Tensor) -> torch.Tensor:
    return _inside[0](x).clone() if _inside else x.clone()


@calls_a_part.register_fake
def _(x):
    return torch.empty_like(x)


_inside: list = []


@pytest.mark.slow
def test_a_call_within_a_call_is_an_error_and_leaves_both_usable():
    root = two_parts()
    inner, x = compiled(root[0]), torch.randn(4, 256)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.root = root

        def forward(self, x):
            return calls_a_part(self.root[1](x))

    outer = compiled(Outer())
    with torch.no_grad():
        want = [inner(x), outer(x)]
        _inside.append(inner)
        with pytest.raises(ShardError, match="began while another one runs that waits for it"):
            outer(x)
        _inside.clear()
        assert torch.equal(inner(x), want[0])


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [torch.inference_mode, torch.no_grad])
def test_training_writes_to_memory_that_an_evaluation_made(evaluation, tmp_path):
    torch.manual_seed(0)
    files = {"offload_params": "nvme", "offload_activations": "nvme", "nvme_dir": str(tmp_path)}
    model = zero.shard(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), **files)
    call, x = compiled(model), torch.randn(64, 64)
    with evaluation():
        want = call(x).clone()
    out = call(x)
    out.square().mean().backward()
    assert torch.equal(out, want)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
def test_an_arena_that_was_placed_halfway_is_placed_again(monkeypatch):
    root = two_parts()
    calls, x = [compiled(part) for part in root], torch.randn(4, 256)
    with torch.no_grad():
        want = [call(x) for call in calls]
        pools = sharded_models_of(root[0])[0].runtime.pools
        grown, arenas = Pools.grow, []

        def interrupted(self, program):
            if not arenas:
                arenas.append(self.arena)
                program = type(
                    "Larger",
                    (),
                    {"transient_bytes": 4 * self.arena.nbytes, "host_bytes": 0, "device_bytes": 0},
                )
                users = self.users()
                monkeypatch.setattr(self, "users", lambda: _Breaks(users))
                try:
                    grown(self, program)
                finally:
                    monkeypatch.undo()
            return grown(self, program)

        monkeypatch.setattr(Pools, "grow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls[0](x)
        assert pools.arena is arenas[0]  # and not one that only some of them have
        assert all(torch.equal(call(x), w) for call, w in zip(calls, want, strict=True))


class _Breaks(list):
    """Ctrl-C behind the first."""

    def __iter__(self):
        yield from self[:1]
        raise KeyboardInterrupt


def test_a_model_may_go_while_another_one_makes_room(monkeypatch):
    """A collection may come at any line, and ends the first between the look at who shares the memory and the change."""
    models = [zero.shard(nn.Linear(8, 8), device="cpu") for _ in range(2)]
    for model in models:
        compiled(model)(torch.ones(2, 8)).sum().backward()
    gone, stays = (model._zero.sharded_model.runtime for model in models)
    gone.close()
    monkeypatch.setattr(type(stays.pools), "users", lambda self: [gone, stays])
    program = models[1]._zero.sharded_model.frames[0].programs["forward"]
    stays.pools.grow(dataclasses.replace(program, transient_bytes=stays.pools.arena.nbytes + 4096))
    gone.engine.trim(0)
    with pytest.raises(ShardError, match="the sharded model of this call no longer exists"):
        gone.engine.gather_start(0, [])
