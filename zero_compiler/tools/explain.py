"""One iteration, explained: the Programs of two small models on two ranks, told step by step on a page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..report.html_page import rendered
from ..report.iteration import Story, drawn, story
from ..report.report import Report
from .planning import report

RANKS = 2
_NAMED = "dgx-h100"  # a preset, so that the page is the same whatever machine it is made on

_ABOUT = {
    "stage 0": "Plain data parallelism: every rank holds everything. Only gradients move, to be averaged.",
    "stage 1": "Each rank keeps its rows of the weights, the gradients and the optimizer's states. Full weights are "
    "gathered once, for forward and backward together.",
    "stage 2": "The same Program as stage 1. In the paper stage 1 holds full gradients until the end of the backward, "
    "and stage 2 only this rank's rows of them; here each gradient is averaged, and divided, as soon as it is "
    "complete, which moves as many bytes. So stage 1 does it too.",
    "stage 3": "Full weights are there only while a layer computes with them: they are gathered before it and dropped "
    "behind it, in the forward and once more in the backward.",
    "stage 3 and NVMe": "ZeRO-Infinity: weights, gradients and optimizer states rest in files. A rank reads its rows "
    "before they are gathered, and the optimizer goes through the files behind the backward.",
}


class TwoLayers(nn.Module):
    """A multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        out: torch.Tensor = second(torch.relu(first(x)))
        return out.square().mean()


class Residual(nn.Module):
    """Two convolutions around which a skip goes."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        stride = 1 if before == channels else 2
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.skip = nn.Conv2d(before, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.skip(x))


class SmallResNet(nn.Module):
    """A residual network for small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.blocks = nn.ModuleList([Residual(16, 16), Residual(16, 32), Residual(32, 64)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.stem(x))
        for block in self.blocks:
            y = block(y)
        return nn.functional.cross_entropy(self.head(y.mean((2, 3))), wanted)


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]], str]] = {
    "two-layer MLP": (
        TwoLayers,
        lambda: (torch.zeros(16, 64),),
        "Two linear layers, 64 to 256 and 256 to 64, with a ReLU between them; 16 rows of the batch on each rank.",
    ),
    "small ResNet": (
        SmallResNet,
        lambda: (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)),
        "A convolution, three residual blocks of 16, 32 and 64 channels, and a linear layer; 4 pictures of 16 x 16 on "
        "each rank.",
    ),
}


def stories(say: Callable[[str], None] = lambda line: None) -> dict[str, list[Story]]:
    """For each model, the story of one iteration at every stage, and with files.

    Args:
        say: called with a line when a part of the work begins.
    """
    told: dict[str, list[Story]] = {}
    for model in _MODELS:
        for title in _ABOUT:
            say(f"planning the {model}, {title}")
            told.setdefault(model, []).append(explained(model, title))
    return told


def explained(model: str, title: str) -> Story:
    """The story of one of them, "two-layer MLP" or "small ResNet", at "stage 0" and so on."""
    return story(planned(model, title), title, _ABOUT[title], _batch_bytes(model))


def planned(model: str, title: str) -> Report:
    """What it is told from: a plan for two ranks, nothing of which is run."""
    build, inputs, _ = _MODELS[model]
    fields: dict[str, Any] = {"stage": int(title.split()[1])}
    with tempfile.TemporaryDirectory() as folder:
        if "NVMe" in title:
            fields |= {f"offload_{what}": "nvme" for what in ("params", "grads", "optimizer")}
            fields["nvme_dir"] = folder
        torch._dynamo.reset()
        return report(build(), inputs(), RANKS, compute="aten", hardware=_NAMED, **fields)


def _batch_bytes(model: str) -> int:
    return sum(x.numel() * x.element_size() for x in _MODELS[model][1]())


def page(told: dict[str, list[Story]]) -> str:
    """The page; it needs nothing from elsewhere."""
    data = drawn(told) | {"ranks": RANKS}
    for model in data["models"]:
        model["about"] = _MODELS[model["name"]][2]
    return rendered("iteration/page.html", data, told=told)
