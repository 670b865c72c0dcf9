"""Partitioned construction on two and three ranks: the bits of plain construction, and never a whole model."""

import gc
import json
import os
import time
from contextlib import nullcontext
from unittest import mock

import made
import pytest
import torch
import torch.distributed as dist
from dist.spawn import RankFailed, run_ranks
from marks import thorough
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError, ShardError, StorageError
from zero_compiler.ranks.transport import Segment
from zero_compiler.runtime import _C
from zero_compiler.storage.stores import Nvme

pytestmark = pytest.mark.dist


def same_bits(rank, world):
    wrong = {}
    for name in made.BUILDERS:
        plain = made.plain(name)
        after = torch.get_rng_state()
        with zero.init():
            model = made.plain(name)
        assert torch.equal(after, torch.get_rng_state()), f"{name}: random numbers drawn differ"
        assert torch.overrides._len_torch_function_stack() == 0
        wrong[name] = made.differing(plain, model)
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_values_are_those_of_plain_construction(world):
    nothing = {name: [] for name in made.BUILDERS}
    assert run_ranks(same_bits, world, timeout=240) == [nothing] * world


# --- memory ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)


class Stack(nn.Module):
    """A model whose blocks wait in a list, are initialised twice and partly written to at the end."""

    def __init__(self, width=128, layers=6, vocab=999):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.emb.weight
        self.apply(self._reset)
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() > 1:
                    p[0].fill_(0.0)
                    p.data[:, 1].normal_()

    def _reset(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=999, n_positions=16, n_embd=128, n_layer=6, n_head=2, **ends)
    )


def built(way, transport, file):
    """A sharded model, made in one of the ways in which it never stands whole."""
    if way in ("init", "gpt2"):
        with zero.init(transport=transport):
            return gpt2() if way == "gpt2" else Stack()
    if way == "module":
        return zero.module(transport=transport)(type("Stack", (Stack,), {}))()
    with torch.device("meta"):
        model = Stack()
    zero.shard(model, transport=transport)
    if way == "load_safetensors":
        zero.load_safetensors(model, file)
    else:
        with zero.init():
            model.to_empty(device="cpu")
            model.apply(reset)
    return model


WAYS = ("init", "module", "gpt2", "to_empty", "load_safetensors")


class Held:
    """Bytes of this rank since it was entered: those of torch's allocator, and its part of the files that ranks share.

    Such a file grows where a parameter moves into it. There the ranks wait for each other, so that each has moved as
    much as the others, and the part of each is what the file takes over their number. ``peak`` takes the highest count
    of the allocator between two such moments with the size of the files at the end of it: no less than was there.
    """

    def __init__(self, world):
        self.world, self.segments = world, []
        self.peak = self.rest = 0

    def __enter__(self):
        gc.collect()
        _C.meter_install()
        self._start = _C.meter_current()
        _C.meter_reset_peak()
        self._back = Segment.back

        def back(segment, name):
            if segment not in self.segments:
                self.segments.append(segment)
            self._look()
            return self._back(segment, name)

        Segment.back = back
        return self

    def __exit__(self, kind, *_):
        Segment.back = self._back
        if kind is None:
            self._look()
            self.rest = _C.meter_current() - self._start + self._in_files()
        _C.meter_uninstall()

    def _in_files(self):
        return sum(os.fstat(s.fd).st_blocks * 512 for s in self.segments) // self.world

    def _look(self):
        dist.barrier()
        self.peak = max(self.peak, _C.meter_peak() - self._start + self._in_files())
        dist.barrier()
        _C.meter_reset_peak()


def peaks(rank, world, transport, file):
    rows = {}
    for way in WAYS:
        plain = gpt2() if way == "gpt2" else Stack()
        made_of = [p.shape for p in plain.parameters()]

        def chunk(shape):
            return -(-shape[0] // world) * shape[1:].numel() * 4

        shards = sum(chunk(s) for s in made_of)
        # One owner's parameters are whole at a time: of the tied ones, head.weight's own first value too.
        owner = max(sum(chunk(p.shape) for p in m.parameters(recurse=False)) for m in plain.modules()) * world
        head = chunk(torch.Size((999, 128)))
        whole = sum(p.numel() * 4 for p in plain.parameters())
        # Layers draw in place; normal_ on a column draws into it. What is left is small: one temporary of the size of
        # a row or a column, alignment, the masks of attention, and the pages of a file at its ends.
        small = 4 * 999 + 64 * len(made_of) + 2 * sum(b.nbytes for b in plain.buffers()) + 2 * 4096
        del plain
        Stack(8, 1, 16)  # whatever torch allocates once
        torch.manual_seed(0)
        with Held(world) as held:
            model = built(way, transport, file)
        assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
        assert model._zero.sharded_model.storage.transport.name == transport
        rows[way] = held.peak, shards + owner + head + small, held.rest, shards, shards + small, whole
        del model
    return rows


@pytest.mark.parametrize(
    ("world", "transport"), [(2, "shared"), (3, "c10d"), *thorough((2, "c10d"), (3, "shared"))]
)
def test_peak_is_the_shards_and_one_owner(world, transport, tmp_path):
    file = os.fspath(tmp_path / "model.safetensors")
    save_file({k: v for k, v in Stack().state_dict().items() if k != "head.weight"}, file)
    for rows in run_ranks(peaks, world, transport, file, timeout=120):
        for way, (peak, bound, rest, shards, rest_bound, whole) in rows.items():
            assert peak <= bound, way
            assert shards <= rest <= rest_bound, way  # so the shards are in what was measured
            assert bound < 0.85 * whole, "the bound proves something"


# --- decorators --------------------------------------------------------------------------------------------------


@zero.module
class Base(nn.Module):
    def __init__(self, n=5):
        super().__init__()
        self.lin = nn.Linear(n, n)
        self.own = nn.Parameter(torch.randn(n))


class Sub(Base):
    def __init__(self, n=5):
        super().__init__(n)
        self.extra = nn.Parameter(torch.randn(n + 1, n))
        nn.init.normal_(self.lin.weight)


@zero.module(stage=2)
class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 2))


@zero.module(stage=3)
class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.sub = Sub(4)
        self.other = Other()
        with torch.no_grad():
            self.other.w[1].mul_(3)


def decorated(rank, world):
    from zero_compiler.params.modules import sharded_models_of

    torch.manual_seed(rank * 0 + 5)
    model = Outer()
    sharded_models = sharded_models_of(model)
    torch.manual_seed(5)
    lin = nn.Linear(4, 4)
    own, extra = torch.randn(4), torch.randn(5, 4)
    nn.init.normal_(lin.weight)
    w = torch.randn(6, 2)
    w[1] *= 3
    want = {
        "sub.own": own,
        "sub.extra": extra,
        "sub.lin.weight": lin.weight.detach(),
        "sub.lin.bias": lin.bias.detach(),
        "other.w": w,
    }
    values = made.full(model)
    assert set(values) == set(want)
    assert all(torch.equal(values[n], want[n]) for n in want)
    return [(p.config.stage, sorted(p.params)) for p in sharded_models]


def test_nested_and_subclassed():
    want = [(3, ["sub.extra", "sub.lin.bias", "sub.lin.weight", "sub.own"]), (2, ["w"])]
    assert run_ranks(decorated, 2) == [want, want]


# --- what a trainer does next ------------------------------------------------------------------------------------


def trained(rank, world, name):
    losses = []
    for way in ("shard", "init"):
        if way == "shard":
            model = zero.shard(made.plain(name))
        else:
            with zero.init():
                model = made.plain(name)
        compiled = torch.compile(model, backend="zero", options={"compute": "aten"})
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.randint(0, 9, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))
            out = compiled(x)
            loss = (out if isinstance(out, torch.Tensor) else out.logits).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            losses.append((way, loss.item()))
    half = len(losses) // 2
    return [v for _, v in losses[:half]], [v for _, v in losses[half:]]


@pytest.mark.parametrize("name", ["applied", "tied"])
def test_training_equals_a_model_sharded_after_the_fact(name):
    for sharded, made_in_parts in run_ranks(trained, 2, name, timeout=240):
        assert sharded == made_in_parts
        assert sharded[-1] != sharded[0]


# --- ranks that disagree -----------------------------------------------------------------------------------------


class Uneven(nn.Module):
    def __init__(self, n, read):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, n)
        if read:
            with torch.no_grad():
                self.first.weight[0].fill_(0)


def disagree(rank, world, read, stage):
    try:
        with zero.init(stage=stage[rank]):
            model = Uneven(4 + (rank if stage[0] == stage[1] else 0), read)
    except RankMismatchError as error:
        return str(error)
    return f"no error for {model}"


@pytest.mark.parametrize(
    ("read", "stage", "words"),
    [
        (False, (3, 3), ["second.weight", "[4, 4]", "[5, 4]"]),
        (True, (3, 3), ["Linear.weight", "[4, 4]", "[5, 4]"]),
        (False, (3, 2), ["stage = 3", "stage = 2"]),
        (True, (3, 2), ["stage = 3", "stage = 2"]),
    ],
)
def test_ranks_that_build_different_models(read, stage, words):
    for message in run_ranks(disagree, 2, read, stage):
        assert "model under construction" in message
        assert all(word in message for word in words), message


def reads_alone(rank, world):
    with zero.init():
        model = nn.Linear(4, 4)
        nn.Linear(1, 1)
        if rank == 0:
            model.weight.norm()


def test_a_rank_that_reads_alone_is_told():
    with pytest.raises(RankFailed, match="ranks disagree about the model under construction") as error:
        run_ranks(reads_alone, 2, timeout=20)
    assert "read of parameter Linear.weight" in str(error.value)
    assert "end of construction of Linear" in str(error.value)


# --- meta and pretrained weights ---------------------------------------------------------------------------------


def reset(m):
    if hasattr(m, "reset_parameters"):
        m.reset_parameters()
    for p in m.parameters(recurse=False):
        if p.dim() > 1:
            with torch.no_grad():
                p[-1].fill_(0.5)


def from_meta(rank, world):
    results = []
    for way in ("plain", "zero"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(7, 5, padding_idx=1), nn.Linear(5, 4), nn.LayerNorm(4))
        torch.manual_seed(3)
        if way == "plain":
            model.to_empty(device="cpu")
            model.apply(reset)
            plain = model
        else:
            zero.shard(model)
            assert all(p.is_meta for p in model.parameters())
            with zero.init():
                model.to_empty(device="cpu")
                model.apply(reset)
            results.append(made.differing(plain, model))
            x = torch.arange(6)
            results.append(torch.equal(plain(x), model(x)))
            model.to_empty(device="cpu")  # outside a scope: still partitioned
            results.append(all(isinstance(p, DTensor) for p in model.parameters()))
    return results


def test_a_meta_model_gets_storage_and_values():
    assert run_ranks(from_meta, 2) == [[[], True, True]] * 2


def loaded(rank, world, folder, how):
    source = made.plain("gpt2")
    if how == "meta":
        with torch.device("meta"):
            model = made.plain("gpt2", 1)
        zero.shard(model)
    elif how == "init":
        with zero.init():
            model = made.plain("gpt2", 1)
    else:
        model = zero.shard(made.plain("gpt2", 1))
    out = zero.load_safetensors(model, folder)
    assert out == ([], [])
    assert model.lm_head.weight is model.transformer.wte.weight
    x = torch.arange(8).view(2, 4)
    same = torch.allclose(source(x).logits, model(x).logits, atol=1e-6)
    return made.differing(source, model), same


@pytest.mark.parametrize("how", ["meta", "init", "shard"])
def test_weights_are_loaded_shard_by_shard(tmp_path, how):
    state = {k: v.detach() for k, v in made.plain("gpt2").state_dict().items() if k != "lm_head.weight"}
    names = list(state)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for part, keys in parts.items():
        save_file({k: state[k].contiguous() for k in keys}, tmp_path / part)
    index = {"weight_map": {k: part for part, keys in parts.items() for k in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run_ranks(loaded, 3, os.fspath(tmp_path), how, timeout=120) == [([], True)] * 3


def load_peak(rank, world, file):
    with zero.init():
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    _C.meter_install()
    try:
        start = _C.meter_current()
        _C.meter_reset_peak()
        zero.load_safetensors(model, file)
        peak = _C.meter_peak() - start
    finally:
        _C.meter_uninstall()
    return peak, torch.equal(made.full(model)["1.weight"], torch.full((512, 512), 2.0))


def test_a_rank_reads_its_own_rows(tmp_path):
    file = os.fspath(tmp_path / "m.safetensors")
    save_file({f"{i}.weight": torch.full((512, 512), i + 1.0) for i in range(2)}, file)
    for peak, right in run_ranks(load_peak, 2, file):
        assert peak <= 512 * 512 * 4 // 2 + 4096
        assert right


def breaks_off(rank, world, folder):
    """Rank 1 has no room for a shard, then cannot open a file of the user's; afterwards both build again."""

    def build(missing=False):
        torch.manual_seed(0)
        with zero.init(offload_params="nvme", nvme_dir=folder):
            first = nn.Linear(64, 64)
            if missing and rank == 1:
                raise FileNotFoundError("words.txt")
            return nn.Sequential(first, nn.Linear(64, 4))

    full = mock.patch.object(Nvme, "grow", side_effect=StorageError("no room"))
    said = []
    for missing in (False, True):
        began = time.monotonic()
        with pytest.raises(Exception) as error, full if rank == 1 and not missing else nullcontext():
            build(missing)
        said.append(f"{type(error.value).__name__}: {error.value}")
        assert time.monotonic() - began < 10
    return said, build()(torch.ones(2, 64)).sum().item()


def test_a_rank_that_cannot_build_tells_the_others(tmp_path):
    (first, value), (second, other) = run_ranks(breaks_off, 2, str(tmp_path))
    assert value == other
    assert second == ["StorageError: no room", "FileNotFoundError: words.txt"]
    begin = "rank 1 of 2 could not build its part of the model"
    assert first == [
        f"StorageError: {begin}: no room",
        f"RankMismatchError: {begin}: FileNotFoundError: words.txt; its own traceback says where",
    ]


# --- a model that was sharded before -----------------------------------------------------------------------------


def used_while_another_is_built(rank, world):
    model = zero.shard(nn.Linear(4, 3, bias=False), stage=3, device="cpu")
    x, said = torch.ones(1, 4), []
    with zero.init():
        view = model.weight.data[0]
        view.fill_(2.0)
        for use in (lambda: model(x), lambda: zero.gathered(model).__enter__()):
            with pytest.raises(ShardError) as refused:
                use()
            said.append(str(refused.value))
        del view
        model.weight.data[2].fill_(1.0)
        out = model(x).detach()[0, ::2].tolist()
    return said, out


def test_a_whole_weight_that_is_held_is_not_computed_with():
    for said, out in run_ranks(used_while_another_is_built, 2):
        assert all("'weight' is used while zero.init() holds its whole value" in text for text in said)
        assert out == [8.0, 4.0]
