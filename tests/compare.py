"""Comparison of a sharded model with plain PyTorch, tensor by tensor.

The reference is plain PyTorch on each rank's own part of the batch, its gradients averaged over the ranks by hand.
Differences are collected as sentences and not raised: ranks must stay in step, and one run shows all of them.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

TOL = 1e-5
# Some gradients are zero in exact arithmetic (the bias of a key: softmax does not see it), so that what stands in
# them is rounding of terms as large as other gradients: that much of the whole gradient's norm is allowed.
ZERO = 1e-7


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def whole(t: Any) -> torch.Tensor:
    """The whole of a tensor, copied; collective for DTensors."""
    if isinstance(t, DTensor):
        t = t.full_tensor() if world() > 1 else t._local_tensor
    return t.detach().clone()


def part(plain: torch.Tensor, like: Any) -> torch.Tensor:
    """The rows of ``plain`` that stand on this rank where ``like`` is cut: comparing them needs no collective."""
    plain = plain.detach()
    if isinstance(like, DTensor):
        mesh = like.device_mesh
        cuts = list(zip(like.placements, mesh.shape, mesh.get_coordinate(), strict=True))
        # What tensor parallelism has cut first is cut again, although it stands behind.
        for placement, ranks, here in sorted(cuts, key=lambda c: isinstance(c[0], _StridedShard)):
            if not placement.is_replicate():
                rows = -(-plain.shape[placement.dim] // ranks)
                plain = (
                    plain.split(max(rows, 1), placement.dim)[here]
                    if here * rows < plain.shape[placement.dim]
                    else plain.narrow(placement.dim, 0, 0)
                )
    return plain


def holders(t: Any) -> int:
    """How many ranks hold the part of a tensor that this rank holds."""
    if not isinstance(t, DTensor):
        return 1
    pairs = zip(t.placements, t.device_mesh.shape, strict=True)
    return math.prod(ranks for placement, ranks in pairs if placement.is_replicate())


def local(t: Any) -> torch.Tensor:
    return t._local_tensor.detach() if isinstance(t, DTensor) else t.detach()


def average_gradients(model: nn.Module) -> None:
    """The mean over ranks of plain gradients; one that only some ranks have counts as zero on the others.

    Summed in the order of ranks, as the engine promises for what is cut. A sum of more than two rounds otherwise in
    another order, and that is no longer small where it is rounded to bf16, or behind a ReLU that one bit turns on.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if world() == 1 or not params:
        return
    used = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    todo = [p for p, flag in zip(params, used.tolist(), strict=True) if flag]
    for dtype in sorted({p.dtype for p in todo}, key=str):
        group = [p for p in todo if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in group])
        each = [torch.empty_like(flat) for _ in range(world())]
        dist.all_gather(each, flat)
        mean = functools.reduce(torch.add, each) / world()
        for p, grad in zip(group, mean.split([p.numel() for p in group]), strict=True):
            p.grad = grad.view(p.shape).clone()


class Twin:
    """A plain model and its sharded copy, stepped side by side.

    Args:
        build: makes the model; called under one seed on every rank, for either copy.
        shard: what makes the sharded model of a plain one (and compiles it).
        optimizer: makes an optimizer of a model's parameters.
        reference: what becomes of the plain copy (another compiler, say); gradients are averaged in any case.
        where: begins every sentence.
    """

    def __init__(
        self,
        model: nn.Module,
        shard: Callable[[nn.Module], nn.Module],
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        reference: Callable[[nn.Module], nn.Module] = lambda m: m,
        where: str = "",
    ) -> None:
        self.plain = copy.deepcopy(model)
        self.plain_call = reference(self.plain)
        self.call = shard(model)
        self.model = getattr(self.call, "_orig_mod", self.call)
        optimizer = optimizer or (lambda ps: torch.optim.SGD(ps, lr=0.1))
        self.plain_opt = optimizer(self.plain.parameters())
        self.opt = optimizer(self.model.parameters())
        self.errors: list[str] = []
        self.noise: dict[str, bool] = {}  # whether every gradient of a parameter so far was within ZERO
        self.where = where

    def say(self, what: str) -> None:
        self.errors.append(f"{self.where}: {what}")

    def close(self, what: str, ours: Any, theirs: Any, tol: float = TOL, floor: float = 0.0) -> None:
        """Relative to the norm of the reference, plus ``floor``; of DTensors, the rows on this rank."""
        a, b = local(ours).double(), part(theirs, ours).double()
        if a.shape != b.shape:
            self.say(f"{what}: shape {tuple(a.shape)}, expected {tuple(b.shape)}")
            return
        error, size = float((a - b).norm()), float(theirs.detach().double().norm())
        if not error <= tol * size + floor:  # NaN is an error too
            self.say(f"{what}: off by {error:.2e} of {size:.2e} ({error / max(size, 1e-30):.1e} relative)")

    def same(self, what: str, ours: Any, theirs: Any) -> None:
        """Bit for bit."""
        a, b = local(ours), part(theirs, ours)
        if a.dtype != b.dtype or not torch.equal(a, b):
            self.say(f"{what}: differs by {float((a.double() - b.double()).abs().max()):.2e}")

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        ours, theirs = dict(self.model.named_parameters()), dict(self.plain.named_parameters())
        if list(ours) != list(theirs):
            self.say(f"parameter names {list(ours)}, expected {list(theirs)}")
        for name, param in theirs.items():
            if name in ours:
                yield name, ours[name], param

    def check_gradients(self, exact: bool = False) -> None:
        pairs = list(self.pairs())
        size = float(sum(p.grad.double().norm() ** 2 for _, _, p in pairs if p.grad is not None)) ** 0.5
        for name, p, q in pairs:
            if (p.grad is None) != (q.grad is None):
                self.say(
                    f"gradient of {name} is {'missing' if p.grad is None else 'there'}, unlike plain PyTorch's"
                )
                continue
            if p.grad is None:
                continue
            if (
                not isinstance(p.grad, DTensor)
                or p.grad.placements != p.placements
                or p.grad.dtype != p.dtype
            ):
                self.say(f"gradient of {name} is {type(p.grad).__name__} {getattr(p.grad, 'placements', '')}")
            self.noise[name] = self.noise.get(name, True) and float(q.grad.double().norm()) <= ZERO * size
            if exact:
                self.same(f"gradient of {name}", p.grad, q.grad)
            else:
                self.close(f"gradient of {name}", p.grad, q.grad, floor=ZERO * size)
        self.check_norms([(p, q) for _, p, q in pairs if p.grad is not None and q.grad is not None])

    def check_norms(self, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Norms of all gradients: by hand, and what torch's own clipping returns (at infinity, so nothing is clipped).

        Of each dtype by itself: torch rounds norms to it. Ours are rounded on each rank, squared, summed and rooted
        with a rounding each, plain ones once: less than two units of that dtype, which is nothing but for bf16.
        """
        dtypes = sorted({q.dtype for q in self.plain.parameters()}, key=str)
        of = {dtype: [pair for pair in pairs if pair[1].dtype == dtype] for dtype in dtypes}
        squares = torch.tensor(
            [
                sum(float(local(p.grad).double().norm()) ** 2 / holders(p.grad) for p, _ in of[dtype])
                for dtype in dtypes
            ],
            dtype=torch.float64,
        )
        if world() > 1 and dtypes:
            dist.all_reduce(squares)
        for dtype, norm in zip(dtypes, squares.sqrt(), strict=True):
            if not of[dtype]:
                continue
            theirs = torch.stack([q.grad.double().norm() for _, q in of[dtype]]).norm()
            self.close(f"norm of {dtype} gradients", norm, theirs)
            ours, theirs = (
                nn.utils.clip_grad_norm_([pair[i] for pair in of[dtype]], math.inf) for i in (0, 1)
            )
            tol = max(TOL, 2 * torch.finfo(dtype).eps)
            self.close(f"norm that clipping {dtype} gradients returns", whole(ours), theirs, tol)

    def check_parameters(self, exact: bool = False) -> None:
        size = float(sum(q.detach().double().norm() ** 2 for _, _, q in self.pairs())) ** 0.5
        for name, p, q in self.pairs():
            if exact:
                self.same(f"parameter {name}", p, q)
            elif p.is_floating_point():
                # One that rounding alone has moved (see ZERO) is compared with the others, and not with itself.
                self.close(f"parameter {name}", p, q, floor=ZERO * size if self.noise.get(name) else 0.0)
            else:
                self.same(f"parameter {name}", p, q)

    def check_buffers(self, exact: bool = False) -> None:
        """Buffers are local: each rank's are those of its own plain copy."""
        theirs = dict(self.plain.named_buffers())
        for name, b in self.model.named_buffers():
            if exact or not b.is_floating_point():
                self.same(f"buffer {name}", b, theirs[name])
            else:
                self.close(f"buffer {name}", b, theirs[name])

    def backward(
        self, loss: Callable[[nn.Module], torch.Tensor], exact: bool = False, average: bool = True
    ) -> None:
        """Forward and backward of both under one seed, and the reference's mean."""
        state = torch.get_rng_state()
        theirs = loss(self.plain_call)
        theirs.backward()
        torch.set_rng_state(state)
        ours = loss(self.call)
        ours.backward()
        if average:
            average_gradients(self.plain)
        if exact:
            self.same("loss", ours, theirs)
        else:
            self.close("loss", ours, theirs)

    def step(self) -> None:
        for opt in (self.opt, self.plain_opt):
            opt.step()
            opt.zero_grad()

    def train(self, loss: Callable[[nn.Module, int], torch.Tensor], steps: int, exact: bool = False) -> None:
        """``steps`` steps with every check."""
        where = self.where
        for i in range(steps):
            self.where = f"{where} step {i}"
            self.backward(lambda m, i=i: loss(m, i), exact=exact)
            self.check_gradients(exact=exact)
            self.step()
        self.where = f"{where} after {steps} steps"
        self.check_parameters(exact=exact)
        self.check_buffers(exact=exact)
        self.where = where
