"""Headers of calls on a group that has no gloo, as an accelerator's own backend is: one all-gather carries them.

Here that all-gather runs over gloo, which the ranks are told not to see.
"""

from __future__ import annotations

import time

import pytest
import torch
from dist.spawn import run_ranks
from models import MLP
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError, TransferError
from zero_compiler.ranks import call_handshake

pytestmark = [pytest.mark.dist, pytest.mark.alone]


def make() -> tuple[nn.Module, nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(MLP(), stage=2, transport="c10d")  # kept weights: headers say which have changed
    return model, torch.compile(model, backend="zero", options={"compute": "aten"})


def losses(call: nn.Module, model: nn.Module, rank: int) -> list[float]:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = call(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        out.append(loss.item())
    return out


def hide_gloo() -> list[str]:
    """From here on this rank sees no gloo; the list grows by one entry for every all-gather of headers."""
    seen: list[str] = []
    gather = call_handshake.all_gather_flat

    def counted(out: torch.Tensor, given: torch.Tensor, **kw: object) -> object:
        seen.append(f"{given.dtype} {given.numel()}")
        return gather(out, given, **kw)

    call_handshake.has_gloo = lambda _: False
    call_handshake.all_gather_flat = counted
    return seen


def no_gloo(rank: int, world: int) -> None:
    model, call = make()
    by_messages = [losses(call, model, rank), losses(model, model, rank)]  # the latter without compile
    seen = hide_gloo()
    model, call = make()
    compiled = losses(call, model, rank)
    assert seen == [f"torch.uint8 {call_handshake.HEADER_BYTES}"] * 6  # each of three steps has two calls
    assert [compiled, losses(model, model, rank)] == by_messages
    assert len(seen) > 12  # without compile each weight has headers of its own
    begun = len(seen)
    plain = nn.Linear(3, 2)
    torch.compile(plain, backend="zero", options={"compute": "aten"})(
        torch.ones(1, 3) * rank
    ).sum().backward()
    assert plain.weight.grad.tolist() == [[(world - 1) / 2] * 3] * 2
    assert len(seen) == begun + 1
    x = torch.ones(2, 16)
    with pytest.raises(
        RankMismatchError, match=r"different calls.*'phase .*' on rank 0.*'phase .*' on rank 1"
    ):
        if rank == 0:
            with torch.no_grad():
                call(x)
        else:
            call(x)


@pytest.mark.parametrize("world", [2, 3])
def test_headers_by_an_all_gather(world: int) -> None:
    run_ranks(no_gloo, world, timeout=120.0)


def alone(rank: int, world: int) -> None:
    hide_gloo()
    _, call = make()
    if rank == 1:
        time.sleep(4.0)
        return
    with pytest.raises(TransferError, match="rank 0 of 2 got no answer from its peers"):
        call(torch.ones(2, 16))


def test_a_rank_that_never_comes() -> None:
    run_ranks(alone, 2, timeout=60.0, group_timeout=1.5)
