"""Recorded segments on two ranks: gathered weights lie where the recording read them, and gradients are reduced from
memory that a replay writes to. A CPU stands in for CUDA graphs."""

import pytest
import torch
from dist.spawn import run_ranks
from recorded_loops import LOOPS, Net, batches, run
from stand_in_recorder import StandIn

import zero_compiler as zero
from zero_compiler.runtime.recorded_segments import RECORDERS


def _loops(rank, world, stage, transport, first):
    torch.set_num_threads(1)
    RECORDERS["cpu"] = StandIn
    replays = []
    for loop in LOOPS[first::3]:  # what they show does not depend on how bytes move
        StandIn.replays = 0
        torch._dynamo.reset()
        recorded, _ = run(loop, stage=stage, mode="reduce-overhead", transport=transport)
        replays.append(StandIn.replays)
        torch._dynamo.reset()
        plain, _ = run(loop, stage=stage, transport=transport)
        for a, b in zip(recorded, plain, strict=True):
            assert torch.equal(a, b), loop.__name__
    return replays


@pytest.mark.dist
@pytest.mark.parametrize(
    # Memory that ranks share is read when a peer comes to it: on a device with graphs there is none.
    ("stage", "transport", "first"),
    [(3, "c10d", 0), (1, "c10d", 1), (2, "c10d", 2)],
    ids=str,
)
def test_same_bits_as_without(stage, transport, first):
    for replays in run_ranks(_loops, 2, stage, transport, first):
        assert all(replays)


def _accumulates(rank, world):
    """Micro-batches under ``zero.no_sync`` run beside the recordings, and the last one of a step replays them."""
    torch.set_num_threads(1)
    RECORDERS["cpu"] = StandIn

    def losses(**options):
        torch._dynamo.reset()
        model = zero.shard(Net(), stage=3, device="cpu", transport="c10d")
        step = torch.compile(model, backend="zero", **options)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        out = []
        for k, (x, y) in enumerate(batches(12)):
            if k % 3 == 2:
                loss = step(x + rank, y)[0]
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            else:
                with zero.no_sync(model):
                    loss = step(x + rank, y)[0]
                    loss.backward()
            out.append(loss.item())
        return out

    recorded = losses(mode="reduce-overhead")
    replays = StandIn.replays
    assert recorded == losses()
    return replays


@pytest.mark.dist
def test_accumulation():
    assert all(run_ranks(_accumulates, 2))
