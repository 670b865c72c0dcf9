"""Plans for an accelerator that is not here: a backward without torch's engine, what is refused, and whole models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from marks import slow
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_compiler.errors import CaptureError, ConfigError
from zero_compiler.tools import absent_device, planning

ROOT = Path(__file__).parents[3]
needs_absence = pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Everything(nn.Module):
    """Sums of gradients, broadcasts, writes in place to views, a hook, a function and a region that is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.token.weight
        self.unused = nn.Linear(16, 16)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)

    def forward(self, x, y):
        h = self.token(x)
        h = h + self.scale * checkpoint(self.attend, h, use_reentrant=False)
        h.register_hook(lambda grad: grad * 0.5)
        h = h + Doubled.apply(h) + h.mean((0, 1))
        changed = h.clone()
        changed[:, 0].mul_(2)
        return F.cross_entropy(self.head(changed).flatten(0, 1), y.flatten()) + self.scale.sum()


def tokens(shape=(2, 8)):
    return torch.empty(shape, dtype=torch.long), torch.empty(shape, dtype=torch.long)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*slow(0), 3])
def test_a_backward_without_the_engine_of_torch_is_the_same(monkeypatch, stage):
    def planned():
        torch._dynamo.reset()
        frames = planning.plan(Everything(), tokens(), 4, stage=stage, compute="aten", hardware="laptop")
        programs = [(phase, program) for f in frames for phase, program in f.programs.items()]
        # Regions of checkpoint have numbers that go on from model to model, and symbols have names by chance.
        texts = ["\n".join([phase, program.text(), *program.segments]) for phase, program in programs]
        return [re.sub(r"ac_graph_id: \d+|\bs\d+\b", "", text) for text in texts]

    with_engine = planned()
    called = []
    found = absent_device._gradients
    monkeypatch.setattr(absent_device, "is_absent", lambda device: True)
    monkeypatch.setattr(absent_device, "stand_in", lambda device: None)
    monkeypatch.setattr(absent_device, "_gradients", lambda *a, **k: called.append(1) or found(*a, **k))
    assert planned() == with_engine
    assert called
    assert [text.split("\n")[0] for text in with_engine] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("device", "want"),
    [
        ("gpu", "device='gpu' is no kind of device of torch; give 'cpu', or 'cuda' for an NVIDIA GPU"),
        ("", "device='' is no kind of device of torch"),
        ("cuda:1", "device='cuda:1' is one device of this machine, and a plan is for any of its kind; give 'cuda'"),
        ("xpu", "a plan for device='xpu' needs such a device here, and there is none"),
        ("hpu", "a plan for device='hpu' needs such a device here, and there is none"),
    ],
)  # fmt: skip
def test_other_devices_are_refused_by_a_sentence(device, want):
    with pytest.raises(ConfigError) as error:
        planning.report(nn.Linear(4, 4), (torch.ones(2, 4),), device=device)
    assert str(error.value).startswith(want)
    with pytest.raises(ConfigError):
        planning.rest(nn.Linear(4, 4), device=device)


class Autocast(nn.Linear):
    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.enabled):
            return super().forward(x).sum()


@needs_absence
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
def test_autocast_that_torch_would_turn_off_is_refused(enabled):
    model, device = Autocast(4, 4), torch.device("cuda")
    model.enabled = enabled
    torch._dynamo.reset()
    gm = captured(model, torch.ones(2, 4))
    if enabled:
        with pytest.raises(
            CaptureError, match=r"^the forward enters torch\.autocast\('cuda'\), which torch turns"
        ):
            absent_device.check_captured(gm, device)
    else:
        absent_device.check_captured(gm, device)


def captured(model: nn.Module, *args: torch.Tensor) -> torch.fx.GraphModule:
    """What Dynamo makes of a forward."""
    found: list[torch.fx.GraphModule] = []

    def backend(gm, inputs):
        found.append(gm)
        return gm.forward

    torch.compile(model, backend=backend)(*args)
    return found[0]


MODELS = """
import torch
from torch import nn
import torch.nn.functional as F


class Convolutions(nn.Sequential):
    def __init__(self):
        layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)]
        super().__init__(*layers, nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def convolutions():
    return Convolutions(), (torch.empty(2, 3, 16, 16),)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.gate = nn.Embedding(64, 32), nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x, y):
        h = self.token(x)
        weights = self.gate(h).softmax(-1)
        best, which = weights.topk(2, -1)
        weights = torch.zeros_like(weights).scatter(-1, which, best)
        h = h + sum(weights[..., k : k + 1] * expert(h) for k, expert in enumerate(self.experts))
        h = h + torch.arange(32, device="cuda") if h.is_cuda else h[:, :1]
        return F.cross_entropy((h @ self.token.weight.t()).flatten(0, 1), y.flatten())


def experts():
    return Experts(), (torch.empty(2, 8, dtype=torch.long), torch.empty(2, 8, dtype=torch.long))


class Attention(nn.Module):
    def __init__(self, width, mask, dropout):
        super().__init__()
        self.qkv, self.width, self.mask, self.dropout = nn.Linear(2 * width, 6 * width), width, mask, dropout

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, self.width).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if self.mask else None
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=not self.mask).sum()


def again(dropout=0.1):
    model, inputs = attention(dropout=dropout)
    return Again(model), inputs


class Again(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def attention(width=16, mask=False, dropout=0.0, dtype="bfloat16"):
    dtype = getattr(torch, dtype)
    return Attention(width, mask, dropout).to(dtype), (torch.empty(2, 64, 2 * width, dtype=dtype),)


def on_a_device():
    return Convolutions(), (torch.empty(2, 3, 16, 16, device="cuda"),)


class Asks(nn.Linear):
    def forward(self, x):
        torch.cuda.set_device(0)
        return super().forward(x)


def asks():
    return Asks(4, 4), (torch.empty(2, 4),)
"""

# Plans in a process of its own, which has a stand-in for the device from then on; each prints what it found.
SCRIPT = """
import contextlib, io, json, os, sys, torch
from zero_compiler.tools import cli
for words in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    sys.argv = ["zero-compiler", "plan", *words, "--json", "plan.json"]
    said, status = io.StringIO(), 0
    cli.console.file = said
    if os.path.exists("plan.json"):
        os.remove("plan.json")
    try:
        cli.main()
    except SystemExit as ended:
        status = ended.code or 0
    plan = json.load(open("plan.json")) if os.path.exists("plan.json") else None
    print(json.dumps([status, " ".join(said.getvalue().split()), plan]), flush=True)
"""


def plans(folder: Path, *asked: list[str]) -> list[tuple[int, str, dict]]:
    """Exit status, output and JSON of each plan for a device that is not here."""
    (folder / "made.py").write_text(MODELS)
    words = [[*each, "--device", "cuda", "--compute", "aten"] for each in asked]
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(asked), done.stdout + done.stderr
    return lines


def operators(plan: dict) -> str:
    return json.dumps(plan["frames"])


@needs_absence
@pytest.mark.slow
def test_models_are_planned_for_a_device_that_is_not_here(tmp_path):
    llama = "LlamaConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, vocab_size=99)"
    tiers = [
        "--offload-params",
        "host",
        "--offload-grads",
        "host",
        "--offload-optimizer",
        "nvme",
        "--nvme-dir",
        ".",
    ]
    found = plans(
        tmp_path,
        ["made:convolutions", "--world", "2"],
        ["made:experts", "--world", "8", "--stage", "2", "--brief"],
        ["made:experts", "--world", "8", *tiers, "--offload-activations", "host"],
        [llama, "--batch", "2", "--sequence", "32", "--stage", "0"],
        [llama, "--batch", "2", "--sequence", "32", "--stage", "1", "--world", "4", "--hardware", "dgx-a100"],
        [llama, "--batch", "2", "--sequence", "32", "--memory-budget-bytes", "1000"],
    )  # fmt: skip
    assert [status for status, _, _ in found] == [0, 0, 0, 0, 0, 3]
    assert found[0][1].startswith(
        "fits dgx-h100 (taken because no hardware was named and there is no cuda device here): "
    )
    assert found[0][2]["verdict"]["assumed"] is True
    assert found[4][1].startswith("fits dgx-a100: ")
    assert {tier["tier"] for tier in found[2][2]["verdict"]["tiers"]} == {"device", "host", "nvme"}
    assert "memory_budget_bytes=1,000 is more than" in found[5][1]


@needs_absence
@pytest.mark.slow
def test_attention_is_that_of_the_device(tmp_path):
    kinds = {
        "flash_attention": ["width=16", "width=12", "dropout=0.1", "dtype='float16'"],
        "efficient_attention": ["dtype='float32'", "mask=True"],
        "bmm": ["width=12, mask=True", "dtype='float64'"],
    }
    asked = [(kind, f"made:attention({given})") for kind, each in kinds.items() for given in each]
    asked.append(("graphsafe_run_with_rng_state", "made:again"))  # random numbers that are drawn again
    for (kind, model), (status, said, plan) in zip(
        asked, plans(tmp_path, *([m] for _, m in asked)), strict=True
    ):
        assert status == 0, said
        assert kind in operators(plan), model
        assert kind == "bmm" or "bmm" not in operators(plan), model


@needs_absence
@pytest.mark.slow
def test_what_asks_for_the_device_is_refused_by_a_sentence(tmp_path):
    factory, forward = plans(tmp_path, ["made:on_a_device"], ["made:asks"])
    assert (factory[0], forward[0]) == (2, 2)
    assert factory[1].startswith("error: made:on_a_device: ")
    assert factory[1].endswith("; make it without a device: --device says for which one it is planned")
    assert "the forward of Asks cannot be captured with these inputs" in forward[1]
    assert forward[1].endswith("may make tensors on it, and ask nothing of it")
