"""A layer as libraries with quantized weights have it, and with what they do to them in a forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Packed(nn.Parameter):
    """Bytes, frozen, with what they mean as attributes: the scale of each row, and how they lie now."""

    scale: torch.Tensor | None
    turned: bool

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor | None = None, turned: bool = False) -> Packed:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.scale, self.turned = scale, turned
        return self

    def __deepcopy__(self, memo: Any) -> Packed:
        return type(self)(self.data.clone(), self.scale, self.turned)


class PackedLinear(nn.Module):
    """A frozen linear layer of bytes. Its first evaluation turns them around, as the kernels for that want them, and
    the next training forward turns them back; each forward lays them out otherwise for a while, too."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = Packed(((weight / scale).round() + 128).to(torch.uint8), scale)
        self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.scale is None:
            raise RuntimeError("the weight has lost what its bytes mean")
        if self.training == self.weight.turned:
            self.weight.data = self.weight.data.t().contiguous()
            self.weight.turned = not self.training
        before = self.weight.data
        self.weight.data = self.weight.data.t().contiguous()
        data = self.weight.data if self.weight.turned else self.weight.data.t()
        out = F.linear(x, (data.to(x.dtype) - 128) * self.weight.scale, self.bias)
        self.weight.data = before
        return out


class Adapted(nn.Module):
    """A packed layer with a low-rank part beside it that is trained (LoRA, Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = PackedLinear(linear)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [Adapted(nn.Linear(16, 16)) for _ in range(2)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Linear(16, 5))
