"""Weights that stay gathered, when a frame that is compiled later makes their memory larger."""

import gc

import pytest
import torch
from compare import Twin
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.runtime import _C

pytestmark = pytest.mark.dist


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x, second):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.heads[1 if second else 0](x).square().mean()


def branches(rank, world, stage):
    """Backward gathers weights without their biases: other gathers than those of forward."""

    def sharded(model):
        model = zero.shard(model, stage=stage, transport="c10d")
        return torch.compile(model, backend="zero", options={"compute": "aten"})

    twin = Twin(Branches(), sharded, lambda ps: torch.optim.SGD(ps, lr=2.0), where=f"rank {rank}")
    for step, second in enumerate([False, True, False, True, True]):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        twin.backward(lambda m, x=x, second=second: m(x, second))
        twin.check_gradients()
        twin.step()
    (sharded_model,) = sharded_models_of(twin.model)
    phases = sharded_model.frames[0].programs
    names = [[g.names for g in phases[p].gathers] for p in ("forward", "backward")]
    return twin.errors, names[0] != names[1]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_branch_that_is_compiled_later_leaves_no_stale_weights_to_others(stage):
    assert run_ranks(branches, 2, stage) == [([], True)] * 2


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.last = nn.Linear(256, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        return self.last(x).square().mean()


def resumed(rank, world):
    """Most bytes of each step beside the plan's, with optimizer states there from the start, as of a checkpoint."""
    _C.meter_install()
    gc.collect()
    start = _C.meter_current()
    model = zero.shard(Broken(), stage=2, transport="c10d")
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    opt.zero_grad()
    gc.collect()
    x, most = torch.ones(4, 256), []
    for _ in range(3):
        _C.meter_reset_peak()
        call(x).backward()
        opt.step()
        opt.zero_grad()
        most.append(_C.meter_peak() - start)
    memory = zero.inspect(model).memory
    return most, memory.peak, memory.kept


def test_weights_are_kept_once_when_a_frame_is_compiled_between_others():
    for most, peak, kept in run_ranks(resumed, 2):
        assert kept > 6 * 256 * 256 * 4
        assert max(most) <= peak + 16_384  # the batch and eager code stand beside the plan
