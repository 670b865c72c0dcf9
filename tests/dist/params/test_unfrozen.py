"""What is frozen when the model is sharded, and trained later, rests where the options say from then on."""

from __future__ import annotations

import pytest
import torch
from compare import local
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import StorageError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.sharded.files import Files
from zero_compiler.storage.stores import region_of

O = torch.optim
TIERS = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(64, 128), nn.Linear(128, 64)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def in_file(t: torch.Tensor) -> bool:
    return region_of(local(t)) is not None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_and_states_go_to_files(compiled, overlap, tmp_path):
    """Of the head first, then of all, by a new optimizer or by a group that is added."""
    seen = []
    for fields in ({}, TIERS | {"nvme_dir": str(tmp_path)}):
        for added in (False, True):
            torch._dynamo.reset()
            model = zero.shard(Net(), device="cpu", **fields)
            run = torch.compile(model, backend="zero", options={"compute": "aten"}) if compiled else model

            def optimizer(params, fields=fields):
                return zero.optimizer(O.AdamW, params, overlap=overlap) if fields else O.AdamW(params)

            def step(opt, run=run):
                loss = run(torch.ones(2, 64)).square().sum()
                loss.backward()
                opt.step()
                opt.zero_grad()
                return loss.item()

            opt = optimizer(model.head.parameters())
            losses = [step(opt), step(opt)]
            model.body.requires_grad_(True)
            if added:
                opt.add_param_group({"params": list(model.body.parameters())})
            else:
                del opt
                opt = optimizer(model.parameters())
            losses += [step(opt), step(opt)]
            if fields:
                assert in_file(opt.state[model.body.weight]["exp_avg"])
                assert in_file(opt.state[model.body.bias]["exp_avg_sq"])
                del opt
                run(torch.ones(2, 64)).square().sum().backward()
                assert in_file(model.body.weight.grad)
                assert in_file(model.head.weight.grad)
            seen.append((losses, [local(p).clone() for p in model.parameters()]))
    for added in (0, 1):
        (want, params), (got, ours) = seen[added], seen[2 + added]
        assert got == want
        assert all(map(torch.equal, ours, params))


def test_what_is_frozen_takes_no_room(tmp_path):
    model = zero.shard(Net(), device="cpu", nvme_dir=str(tmp_path), **TIERS)
    zero.optimizer(O.AdamW, model)
    (sharded_model,) = sharded_models_of(model)
    assert set(sharded_model.storage.files.gradients) == {"head.weight", "head.bias"}
    opt = zero.optimizer(O.AdamW, model.body.parameters())
    assert opt.buffer_bytes > 0
    assert not opt._stores


def test_what_is_frozen_after_it_was_sharded_keeps_its_place(tmp_path):
    """A warm-up of the head: states of the body have room from the start."""
    net = Net()
    net.body.requires_grad_(True)
    model = zero.shard(net, device="cpu", nvme_dir=str(tmp_path), offload_optimizer="nvme")
    model.body.requires_grad_(False)
    opt = zero.optimizer(O.AdamW, model)
    for trained in (False, True):
        model.body.requires_grad_(trained)
        model(torch.ones(2, 64)).sum().backward()
        opt.step()
        opt.zero_grad()
    assert in_file(opt.state[model.body.weight]["exp_avg"])


def test_what_the_planner_places_rests_where_its_parameter_does(tmp_path):
    nbytes = sum(p.numel() * 4 for p in Net().parameters())
    model = zero.shard(Net(), device="cpu", nvme_dir=str(tmp_path), device_rest_bytes=nbytes // 4)
    model.body.requires_grad_(True)
    opt = zero.optimizer(O.AdamW, model)
    model(torch.ones(2, 64)).sum().backward()
    assert in_file(model.body.weight)
    assert in_file(model.body.weight.grad)
    opt.step()
    assert in_file(opt.state[model.body.weight]["exp_avg"])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_disk_without_room_for_more_may_have_it_later(compiled, tmp_path, monkeypatch):
    model = zero.shard(Net(), device="cpu", nvme_dir=str(tmp_path), **TIERS)
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    run(torch.ones(2, 64)).sum().backward()
    model.body.requires_grad_(True)
    (sharded_model,) = sharded_models_of(model)

    def full(*_):
        raise StorageError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Files, "add_gradients", full)
        with pytest.raises(StorageError, match="no room"):
            run(torch.ones(2, 64)) if compiled else zero.optimizer(O.AdamW, model)
    assert "body.weight" not in sharded_model.storage.files.gradients
    model.zero_grad()
    run(torch.ones(2, 64)).sum().backward()
    assert in_file(model.body.weight.grad)
