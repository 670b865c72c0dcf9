"""Headers of calls: of ranks of which one is gone, and on a group that has no gloo, as an accelerator's own backend is.

There one all-gather carries them. Here that runs over gloo, which the ranks are told not to see.
"""

from __future__ import annotations

import os
import signal
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


def one_comes_late_where_another_is_gone(rank: int, world: int) -> str:
    """What each says. Rank 0 lives on behind its error, as under a script that goes on."""
    model = zero.shard(nn.Linear(4, 4), device="cpu")
    with zero.gathered(model):
        pass
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        time.sleep(2.0)
    begun = time.monotonic()
    try:
        with zero.gathered(model):
            return "no error"
    except TransferError as error:
        return (
            str(error)
            if time.monotonic() - begun < 10
            else f"after {time.monotonic() - begun:.0f} s: {error}"
        )


def test_a_rank_that_finds_another_one_gone_does_not_leave_the_rest_waiting():
    said = run_ranks(one_comes_late_where_another_is_gone, 3, timeout=60.0, group_timeout=120.0, may_die=(2,))
    assert all("rank 2 of 3 is gone: its process has ended" in text for text in said[:2]), said
