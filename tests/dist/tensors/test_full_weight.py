"""Within a forward a weight is a parameter: of weights that ranks hold rows of, and of tensor-parallel ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from compare import Twin
from dist.cases import Cases
from null.forms import FORMS, Weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zero_compiler as zero

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SGD = functools.partial(torch.optim.SGD, lr=0.1)
cases = Cases(__name__)


def _trained(where: str, rank: int, name: str, compiled: bool, tied: bool, **fields: Any) -> list[str]:
    torch._dynamo.reset()

    def made(model: nn.Module) -> nn.Module:
        model = zero.shard(model, device="cpu", compute="aten", **fields)
        return torch.compile(model, backend="zero") if compiled else model

    twin = Twin(Weights(FORMS[name], tied), made, SGD, where=f"{where}, {name}")
    for step in range(2):
        x = torch.linspace(-1, 1, 12).view(3, 4) + rank + step
        twin.backward(lambda m, x=x: m(x).square().mean())
        twin.check_gradients()
        twin.step()
    return twin.errors


@cases.add
def every_form_in_eager_code(rank: int) -> list[str]:
    names = [n for n in FORMS if n != "another_name"]  # which the plain model has kept
    return [e for n in names for tied in (False, True) for e in _trained("eager", rank, n, False, tied)]


@cases.add
def forms_that_are_compiled(rank: int) -> list[str]:
    names = ["all_of_a_list", "a_united_dict", "copied_behind_a_graph_break", "read_under_no_grad"]
    return [e for n in names for e in _trained("compiled", rank, n, True, True)]


@cases.add
def forms_with_a_part_of_the_ranks_weights_kept(rank: int) -> list[str]:
    names = ["a_copied_dict", "across_a_graph_break"]
    return [e for n in names for e in _trained("compiled at stage 2", rank, n, True, False, stage=2)]


@cases.add
def tensor_parallel(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    errors = []
    for compiled in (False, True):
        torch._dynamo.reset()
        found: list[str] = []

        def forward(m: Any, x: torch.Tensor, found: Any = found) -> torch.Tensor:
            if not isinstance(m.a.weight, nn.Parameter):
                found.append("a weight is no parameter")
            if m.a.weight is not m.a.weight:
                found.append("a weight is another one when it is read again")
            if not isinstance(nn.ParameterList([m.a.weight])[:][0], nn.Parameter):
                found.append("one in a list is no parameter")
            return m.a(x) @ m.own

        def made(model: nn.Module, compiled: bool = compiled) -> nn.Module:
            parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(output_layouts=Replicate())})
            model = zero.shard(model, mesh=mesh, compute="aten")
            return torch.compile(model, backend="zero") if compiled else model

        twin = Twin(Weights(forward), made, SGD, where=f"tensor-parallel, compiled={compiled}")
        twin.backward(lambda m: m(torch.ones(3, 4)).square().mean())
        twin.check_gradients()
        errors += [*twin.errors, *found]
    return errors


@pytest.mark.parametrize("name", cases.names)
def test_beside_plain_pytorch(name: str) -> None:
    cases.check(name)
