"""MLPs as nobody writes them twice, in tiles as if a budget had asked for it: the numbers of plain PyTorch, always."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import SimulatedModel
from null.graphs import Build, aten
from torch import nn

from zero_compiler.compile.frame_state import FrameState
from zero_compiler.ir import ops
from zero_compiler.passes.tiling.expand_tiles import tiles_of
from zero_compiler.passes.tiling.mlp import chains
from zero_compiler.passes.tiling.tile_mlp import TileMlp
from zero_compiler.tools.planning import plan

WIDTH, TOKENS = 16, 96


class Net(nn.Module):
    def __init__(self, of, first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of = of
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("offset", torch.ones(4 * WIDTH))

    def forward(self, x):
        return self.of(self, self.first(x))


def x(rank: int = 0, tokens: int = TOKENS) -> tuple[torch.Tensor]:
    return (torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(rank)),)


def notes(model: SimulatedModel, what: str) -> set[str]:
    return {n for f in model.frames for p in f.programs.values() for n in p.notes if what in n}


@pytest.fixture
def forced(monkeypatch):
    """MLPs in tiles of 16 tokens."""
    options = FrameState.options
    monkeypatch.setattr(
        FrameState,
        "options",
        lambda self, phase: replace(options(self, phase), tile_mlp=True, mlp_bytes=1),
    )


def checked(of, train: bool, tokens: int = TOKENS) -> SimulatedModel:
    model = SimulatedModel(Net(of), 2, stage=3)
    model.check([x(0, tokens), x(1, tokens)], (lambda out: out.square().mean()) if train else None)
    return model


# Tiled ----------------------------------------------------------------------------------------------------------


def gelu(m, x):
    return m.down(F.gelu(m.up(x)))


def a_number_a_token(m, x):
    """Made of nothing, and another one for each token."""
    return m.down(F.gelu(m.up(x)) * torch.arange(TOKENS, dtype=x.dtype)[:, None])


def filled(m, x):
    """As large as the intermediate, and the same number everywhere: made tile by tile."""
    h = m.up(x)
    return m.down(torch.where(h > 0, h, torch.full((TOKENS, 4 * WIDTH), 0.5)))


def onto_the_residual(m, x):
    return torch.addmm(x, F.gelu(m.up(x)), m.down.weight.t())


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("of", [a_number_a_token, filled, onto_the_residual], ids=lambda f: f.__name__)
def test_what_is_not_the_same_for_all_tokens_is_cut_with_them(forced, of, train):
    model = checked(of, train)
    assert notes(model, "tiled: intermediate of")
    assert not notes(model, "left whole")


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 97])
def test_any_number_of_tokens(forced, tokens, train):
    def total(m, x):
        return gelu(m, x).sum() / max(1, tokens) + m.gate.weight.mean()  # a mean over none is no number

    model = checked(total, train, tokens)
    assert notes(model, "tiled: intermediate of up.weight")


def test_of_no_rows_there_is_one_tile():
    assert [tiles_of(n, 16) for n in (0, 1, 16, 17)] == [1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [0, None])
def test_which_weights_backward_gathers_does_not_depend_on_the_number_of_tokens(forced, bucket_bytes):
    """A tile reads the first product's weight, which nothing else of backward does where the input needs no gradient."""
    seen = set()
    for tokens in (0, 1, 2, TOKENS):
        torch._dynamo.reset()
        fields = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        (frame,) = plan(Net(lambda m, x: gelu(m, x).sum(), first=False), x(0, tokens), 2, **fields)
        seen.add("\n".join(p.collectives() for p in frame.programs.values()))
    assert len(seen) == 1


# Left whole -----------------------------------------------------------------------------------------------------


def sliced(m, x):
    return m.down(F.gelu(m.up(x)[16:]))


def half(m, x):
    """As many tokens go as come."""
    return m.down(F.gelu(m.up(x)[TOKENS // 2 :]))


def one_gate_for_all(m, x):
    return m.down(F.gelu(m.up(x)) * m.gate(x[:1]))


def one_token_for_all(m, x):
    return m.down(F.gelu(m.up(x[:1]) + m.gate(x)))


def zeros_of_all_tokens(m, x):
    h = m.up(x)
    return m.down(torch.where(h > 0, h, torch.zeros(TOKENS, 4 * WIDTH)))


def gradient_less_its_sum(m, x):
    return m.down(F.gelu(_LessItsSum.apply(m.up(x))))


class _LessItsSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.sum(0)


LEFT = {
    sliced: "has other tokens than",
    half: "has other tokens than",
    one_gate_for_all: "has other tokens than",
    one_token_for_all: "has other tokens than",
    zeros_of_all_tokens: "as large as it, is made elsewhere",
    gradient_less_its_sum: "aten.sub.Tensor reads a sum over all tokens",
}


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("of", LEFT, ids=lambda f: f.__name__)
def test_what_has_other_tokens_is_left_whole(forced, of, train):
    model = checked(of, train)
    if train or of is not gradient_less_its_sum:
        assert not notes(model, "tiled: intermediate of")
        assert all(LEFT[of] in n for n in notes(model, "left whole"))
        assert notes(model, "left whole")


# Where it stands ------------------------------------------------------------------------------------------------


def offset_is_written_later(m, x):
    y = m.down(F.gelu(m.up(x) + m.offset))
    m.offset.add_(1)
    return y


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
def test_a_buffer_that_is_written_to_later_is_read_before(forced, train):
    model = checked(offset_is_written_later, train)
    assert notes(model, "tiled: intermediate of up.weight")


def test_an_input_that_is_written_to_later_is_read_before(forced):
    def read_and_zeroed(m, x):
        y = gelu(m, x)
        x.zero_()
        return y

    net = Net(read_and_zeroed, first=False)
    model = SimulatedModel(net, 2, stage=3)
    want = [net(*x(rank)).detach() for rank in range(2)]
    torch.testing.assert_close(model.step([x(0), x(1)]), want)
    assert notes(model, "tiled: intermediate of up.weight")


# What is looked at, and what it takes ---------------------------------------------------------------------------


def leaky(layers: int) -> Build:
    """MLPs whose intermediates something else reads too, which goes on to the end of the model."""
    b = Build(**{f"h__{i}__{n}": s for i in range(layers) for n, s in (("u", (8, 4)), ("d", (4, 8)))})
    v, side = b.input("x", 64, 4), b.input("side", 64, 8)
    for i in range(layers):
        a = b.op(aten.gelu.default, b.op(aten.mm.default, v, b.op(aten.t.default, b.weight(f"h.{i}.u"))))
        v = b.op(aten.mm.default, a, b.op(aten.t.default, b.weight(f"h.{i}.d")))
        side = b.op(aten.add.Tensor, side, b.op(aten.cumsum.default, a, 0))
    b.done(v, side)
    return b


def seconds(layers: int) -> float:
    b = leaky(layers)
    context = b.context("joint")
    start = time.process_time()
    TileMlp(True, mlp_bytes=1).run(b.graph, context)
    spent = time.process_time() - start
    assert len(chains(b.graph, ())) == layers
    assert not b.graph.find_nodes(op="call_function", target=ops.tiled)
    return spent


@pytest.mark.slow
def test_the_walk_ends_where_it_is_known_to_fail():
    few, many = seconds(100), seconds(800)
    assert many / few < 3 * 8, (few, many)
