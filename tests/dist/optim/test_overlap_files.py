"""zero.optimizer(overlap=True) whose gradients go to their files first: under a budget, in tiles, or to be clipped."""

import pytest
import torch
from compare import local
from dist.streamed import MODULE
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import OptimizerError, StorageError
from zero_compiler.storage.writeback_buffers import Landing

pytestmark = pytest.mark.usefixtures("small_sub_groups")
FILES = {f"offload_{what}": "nvme" for what in ("params", "grads", "optimizer")}
WAYS = {"budget": {"memory_budget_bytes": 1 << 26}, "tiles": {"tile_bytes": 8 << 10}, "clip": {}}


class Twice(nn.Module):
    """Two frames, which read all weights."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        x = self.down(torch.tanh(self.up(x)))
        torch._dynamo.graph_break()
        return self.down(torch.tanh(self.up(x))).square().mean()


def made(way, overlap, folder):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(Twice(), nvme_dir=str(folder), bucket_bytes=0, **FILES, **WAYS[way])
    clip = 0.1 if way == "clip" else None
    optimizer = zero.optimizer(torch.optim.AdamW, model, lr=1e-2, overlap=overlap, max_grad_norm=clip)
    return model, optimizer, torch.compile(model, backend="zero", options={"compute": "aten"})


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_by_file_give_the_values_of_updates_after_backward(way, forwards, tmp_path):
    """With two forwards each gradient lands four times; the sum has the order that it has without overlap."""
    found = []
    for overlap in (False, True):
        model, optimizer, run = made(way, overlap, tmp_path)
        for i in range(3):
            torch.manual_seed(i)
            sum(run(torch.randn(8, 64)) for _ in range(forwards)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [s for p in model.parameters() for k, s in sorted(optimizer.state[p].items()) if k != "step"]
        found.append([local(t).clone() for t in (*model.parameters(), *states)])
    assert len(found[0]) == 3 * 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_gradient_that_is_not_written_in_mid_backward_ends_the_optimizer(tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 1)
    model, optimizer, run = made("budget", True, tmp_path)
    x = torch.randn(8, 64)
    run(x).backward()
    optimizer.step()
    before = [local(p).clone() for p in model.parameters()]
    drain, calls = Landing.drain, []

    def failing(landing):
        calls.append(landing)
        if (
            len(calls) == 4
        ):  # of the second gradient: that of the first one was awaited, and added to, and settled
            landing._guarded(failed)
        drain(landing)

    def failed():
        raise StorageError("the disk is gone")

    monkeypatch.setattr(Landing, "drain", failing)
    with pytest.raises(StorageError, match="the disk is gone"):
        run(x).backward()
    monkeypatch.undo()
    changed = [not torch.equal(b, local(p)) for b, p in zip(before, model.parameters(), strict=True)]
    assert any(changed)
    assert not all(changed)
    with pytest.raises(OptimizerError, match=r"half updated.*the disk is gone"):
        optimizer.step()
