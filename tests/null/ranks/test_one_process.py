"""One process without a process group: what stands in its place, and plain models as stage 0."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from null.small import REFERENCE, batch, compiled, net, train
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import ConfigError, ShardError

# --- process group and mesh --------------------------------------------------------------------------------------


def test_one_process_has_a_mesh_and_no_process_group():
    model = zero.shard(net())
    train(model, compiled(model))
    mesh = model.first.weight.device_mesh
    assert mesh.size() == 1
    assert not dist.is_initialized()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.isfinite(total.full_tensor() if isinstance(total, DTensor) else total)


def run_python(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


@pytest.mark.slow
def test_the_backend_is_found_without_importing_the_package():
    done = run_python(
        "import torch\n"
        "assert 'zero' in torch._dynamo.list_backends()\n"
        "m = torch.nn.Linear(3, 2)\n"
        "c = torch.compile(m, backend='zero', options={'compute': 'aten'})\n"
        "c(torch.ones(1, 3)).sum().backward()\n"
        "assert m.weight.grad is not None\n"
        "print('works')\n"
    )
    assert done.stdout.strip() == "works", done.stderr


def test_a_process_group_made_after_sharding_is_an_error():
    # Two processes would be needed to make such a group on gloo; the fake backend has any number of ranks.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = zero.shard(net())
    model(batch())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for call in (model, compiled(model)):
            with pytest.raises(
                ShardError, match=r"a process group was made after zero\.shard.* before zero\.shard"
            ):
                call(batch())
    finally:
        dist.destroy_process_group()
    compiled(model)(batch()).sum().backward()


def test_world_size_in_the_environment_without_a_group_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ShardError, match="WORLD_SIZE is 2 but there is no process group"):
        zero.shard(net())


# --- plain models ------------------------------------------------------------------------------------------------


def test_a_plain_model_trains_as_stage_0_and_logs_once(caplog):
    model = net()
    with caplog.at_level(logging.WARNING, logger="zero_compiler"):
        call = compiled(model)
        losses = train(model, call)
        with torch.no_grad():
            call(batch())
        call(torch.randn(9, 4)).sum().backward()
    assert losses == pytest.approx(REFERENCE, rel=1e-6)
    said = [r.getMessage() for r in caplog.records if "zero.shard" in r.getMessage()]
    assert len(said) == 1
    assert "stage 0" in said[0]


def test_stage_0_in_the_options_of_a_plain_model_is_allowed():
    model = net()
    assert train(model, compiled(model, stage=0)) == pytest.approx(REFERENCE, rel=1e-6)


@pytest.mark.parametrize("options", [{"stage": 2}, {"param_dtype": "bf16"}, {"offload_params": "host"}])
def test_a_placement_on_a_plain_model_names_zero_shard(options):
    with pytest.raises(ConfigError, match=r"call zero\.shard\(model, stage=\.\.\.\) before torch\.compile"):
        compiled(net(), **options)(batch())


# --- weights that every rank holds whole ---------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return (self.up(x) * self.scale).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_that_is_whole_on_every_rank_is_cast_in_compiled_code(stage):
    """A scalar is never cut, and at stage 0 nothing is."""
    torch.manual_seed(0)
    model = zero.shard(Scaled(), stage=stage, param_dtype="bf16")
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    grads = []
    for compute in ("aten", "inductor"):
        torch.compile(model, backend="zero", options={"compute": compute})(x).backward()
        grads.append([p.grad.full_tensor().clone() for p in model.parameters()])
        model.zero_grad()
        torch._dynamo.reset()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(torch.bfloat16).eps, atol=1e-2)
