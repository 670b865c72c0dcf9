"""Updates while backward runs, with all in files, under a budget of memory: it holds when measured."""

import pytest
from dist.measured import train
from dist.spawn import run_ranks

import zero_compiler as zero
from zero_compiler.runtime import _C
from zero_compiler.storage import aio

pytestmark = pytest.mark.dist
NET, ROWS = {"width": 512, "layers": 3}, 64
FILES = {f"offload_{what}": "nvme" for what in ("params", "grads", "optimizer")}


def _rank(rank, world, budgets, folder):
    _C.meter_install()
    rows = []
    for budget in budgets:
        losses = set()
        for clip, overlap in ((None, True), (0.5, False), (0.5, True)):
            held = []  # with its buffers, until all is counted

            def streamed(cls, model, lr, clip=clip, overlap=overlap, held=held):
                held.append(zero.optimizer(cls, model, lr=lr, overlap=overlap, max_grad_norm=clip))
                return held[0]

            buffers = aio.live_bytes()
            got, measured, model = train(
                rank, NET, ROWS, optimizer=streamed, memory_budget_bytes=budget, nvme_dir=folder, **FILES
            )
            measured += aio.live_bytes() - buffers  # taken once, and kept until the model is gone
            (frame,) = model._zero.sharded_model.frames
            backward = frame.programs["backward"]
            tiles = sum(r.tile is not None for r in backward.reduces)
            planned = zero.inspect(model).memory.peak
            rows.append((budget, clip, overlap, tiles, measured, planned))
            losses.add((clip, *got))
            del model, held[:]
        assert len(losses) == 2, losses  # those of clipped gradients, and the others
    return rows


def test_the_budget_holds_with_overlap_and_gradients_in_files(tmp_path):
    """A gradient on its way to its update, or to the norm of all, has no place beside the buffers of files."""
    for rows in run_ranks(_rank, 2, [100 << 20, 12 << 20], str(tmp_path)):
        for budget, clip, overlap, tiles, measured, planned in rows:
            said = (
                f"budget {budget}, max_grad_norm {clip}, overlap {overlap}: {measured} of {planned} planned"
            )
            assert planned <= budget, said
            assert measured <= planned + 2 * ROWS * NET["width"] * 4 + 8192, (
                said
            )  # the batch stands beside it
            assert bool(tiles) == (budget < 20 << 20), said
