"""Loops of training in which values of one call are held in the next, weights move, or calls are left out: what
recorded segments have to notice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zero_compiler as zero


class Net(nn.Module):
    """Two layers that are alike, a buffer that training writes to, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("seen", torch.zeros(()))
        self.inp = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.h = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.out = nn.Linear(16, 3)

    def forward(self, x, y):
        x = _Amax.apply(self.norm(self.inp(x)), self.seen)
        x = x + torch.arange(16, device=x.device) / 16
        for layer in self.h:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.out(x), y), x, x.t()


def batches(count, rows=8):
    for k in range(count):
        g = torch.Generator().manual_seed(k)
        yield torch.randn(rows, 6, generator=g), torch.randint(0, 3, (rows,), generator=g)


def simple(step, model, opt):
    out = []
    for x, y in batches(6):
        loss, hidden, _ = step(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        out += [loss.detach(), hidden.detach()]
    return out


def two_forwards(step, model, opt):
    out = []
    for (x, y), (x2, y2) in zip(batches(6), batches(6, 8), strict=True):
        first, second = step(x, y)[0], step(x2 + 1, y2)[0]
        (first * 2).backward()
        second.backward()
        opt.step()
        opt.zero_grad()
        out += [first.detach(), second.detach()]
    return out


def backward_twice(step, model, opt):
    out = []
    for x, y in batches(6):
        loss = step(x, y)[0]
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
        opt.zero_grad()
        out.append(loss.detach())
    return out


def gradients_held(step, model, opt):
    out = []
    for k, (x, y) in enumerate(batches(8)):
        step(x, y)[0].backward()
        if k % 2:
            out += [p.grad for p in model.parameters()]
            opt.step()
            opt.zero_grad()
            if k == 5:
                del out[:]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in out]


def zeroed_in_place(step, model, opt):
    for x, y in batches(6):
        step(x, y)[0].backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    return []


def evaluated_between(step, model, opt):
    out = []
    for x, y in batches(6):
        with torch.no_grad():
            out += step(x + 1, y)
        loss = step(x, y)[0]
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.inference_mode():
            out += step(x, y)
    return out


def forward_alone(step, model, opt):
    """Some forwards have no backward, and one is broken off by an error."""
    out = []
    for k, (x, y) in enumerate(batches(8)):
        loss = step(x, y)[0]
        if k % 3 == 2:
            out.append(loss.detach())
            continue
        if k == 4:
            handle = loss.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
            continue
        loss.backward()
        opt.step()
        opt.zero_grad()
        out.append(loss.detach())
    return out


def state_exchanged(step, model, opt):
    out = []
    kept = None
    for k, (x, y) in enumerate(batches(8)):
        if k == 2:
            kept = {n: v.clone() for n, v in model.state_dict().items()}
        if k == 5:
            model.load_state_dict(kept)
        loss = step(x, y)[0]
        loss.backward()
        opt.step()
        opt.zero_grad()
        out.append(loss.detach())
    return out


class _Amax(torch.autograd.Function):
    """Its backward writes to a buffer."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.save_for_backward(seen)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (seen,) = ctx.saved_tensors
        seen.add_(grad.abs().max() + 1)
        return grad, None


def written_in_backward(step, model, opt):
    """A buffer to which backward writes is put in another place, once."""
    out = []
    for k, (x, y) in enumerate(batches(8)):
        if k == 3:
            model.seen = model.seen.clone()
        step(x, y)[0].backward()
        opt.step()
        opt.zero_grad()
        out.append(model.seen.clone())
    return out


def written_behind(step, model, opt):
    """Outputs of an evaluation that share memory are written to."""
    out = []
    for x, y in batches(6):
        with torch.no_grad():
            _, hidden, view = step(x, y)
            hidden.add_(100)
            out.append(view.clone())
        step(x, y)[0].backward()
        opt.step()
        opt.zero_grad()
    return out


LOOPS = [
    simple,
    two_forwards,
    backward_twice,
    gradients_held,
    zeroed_in_place,
    evaluated_between,
    forward_alone,
    state_exchanged,
    written_in_backward,
    written_behind,
]


def run(loop, device="cpu", mode=None, **fields):
    """What ``loop`` gives with a sharded :class:`Net`, with its parameters behind it; and the compiled model."""
    model = zero.shard(Net().to(device), device=device, **fields)
    step = torch.compile(model, backend="zero", mode=mode)

    def on_device(x, y):
        return step(x.to(device), y.to(device))

    out = loop(on_device, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return [t.clone() for t in out] + [p.full_tensor().detach() for p in model.parameters()], step
