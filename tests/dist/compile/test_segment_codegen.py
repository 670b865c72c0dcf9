"""What a caller may hold of a forward is in the plan; and a budget is held against the code that was compiled."""

import gc

import pytest
import torch
import torch.nn.functional as F
from dist.measured import settled
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.runtime import _C

pytestmark = pytest.mark.dist
WIDTH, WIDE, VOCAB, TOKENS = 64, 2048, 1024, 128
LOGITS = TOKENS * VOCAB * 4
OUTSIDE = 2 * TOKENS * (WIDTH * 4 + 8) + 4096  # the batch, and eager code


class Net(nn.Module):
    """Backward has its peak in the first layer. Of the logits it reads only what makes the loss."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x, targets):
        logits = self.head(x + self.down(F.gelu(self.up(x))))
        return logits.sum() if self.loss == "sum" else logits.square().mean(), logits


class Broken(nn.Module):
    """Of two frames the second one reads what the first has returned and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, VOCAB), nn.Linear(VOCAB, VOCAB)

    def forward(self, x, targets):
        logits = self.first(x)
        torch._dynamo.graph_break()
        return torch.tanh(self.second(logits)).square().mean(), None


class Gated(nn.Module):
    """What takes most are pointwise operators, which are compiled to one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x, targets):
        h = self.up(x)
        h = torch.sigmoid(h) * torch.tanh(h) + torch.sin(h) * F.softplus(h)
        return self.down(h).square().mean(), None


class Head(nn.Module):
    """Its code makes less of the logits than the operators do; of the plans that these would choose it makes more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * VOCAB)

    def forward(self, x, targets):
        logits = self.head(torch.tanh(self.up(x)))
        return F.cross_entropy(logits, targets), logits


def _train(net, compute, budget=None):
    base = settled()
    torch.manual_seed(0)
    model = zero.shard(net(), stage=3, memory_budget_bytes=budget, transport="c10d")
    gc.collect()
    _C.meter_reset_peak()
    call = torch.compile(model, backend="zero", options={"compute": compute})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(3):
        loss, logits = call(torch.randn(TOKENS, WIDTH), torch.randint(VOCAB, (TOKENS,)))
        loss.backward()
        del logits  # in the step itself it was there
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _C.meter_peak() - base, zero.inspect(model).memory


def _held(rank, world):
    _C.meter_install()
    cases = {loss: lambda loss=loss: Net(loss) for loss in ("sum", "square")} | {"broken": Broken}
    rows = {}
    for name, net in cases.items():
        _, measured, memory = _train(net, "aten")
        rows[name] = measured, memory.peak
    return rows


def test_what_the_caller_holds_until_backward_ends_is_in_the_plan():
    for rows in run_ranks(_held, 2, timeout=200):
        for name, (measured, planned) in rows.items():
            assert planned - 2 * LOGITS < measured <= planned + OUTSIDE, name


def _free_plan_fits(rank, world):
    """With a budget of what it takes without one a model is compiled as without one."""
    _C.meter_install()
    for net in (Head, Gated):
        losses, _, free = _train(net, "inductor")
        again, measured, memory = _train(net, "inductor", free.peak)
        assert again == losses
        assert memory.peak <= free.peak
        assert measured <= memory.peak + OUTSIDE
        with pytest.raises(MemoryBudgetError, match="the predicted peak is"):
            _train(net, "aten", free.peak)  # by operators it does not fit
    return True


def test_the_predicted_peak_is_a_budget_that_changes_nothing():
    assert run_ranks(_free_plan_fits, 2, timeout=400) == [True, True]


def _named_fits(rank, world):
    _C.meter_install()
    losses, _, free = _train(Gated, "inductor")
    room = 1 << 16  # for all activations and the arena
    with pytest.raises(MemoryBudgetError, match="the predicted peak is") as error:
        _train(Gated, "inductor", free.parameters + free.gradients + free.optimizer + room)
    named = int(str(error.value).partition("the predicted peak is ")[2].split()[0].replace(",", ""))
    assert named < free.peak
    again, measured, memory = _train(Gated, "inductor", named)
    assert again == pytest.approx(losses, rel=1e-5)
    assert max(memory.peak, measured - OUTSIDE) <= named
    return True


def test_a_refusal_names_a_budget_that_does():
    """That of the code that was compiled for it, not of its operators one by one."""
    assert run_ranks(_named_fits, 2, timeout=400) == [True, True]
