"""What is known of each parameter of a sharded model, and where in its modules that stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ..layout import Layout
from ..ranks.group import Group
from ..ranks.tensor_parallel import TensorPart
from ..storage.stores import region_of
from ..tensors.full_weight import FULL
from . import parameter_errors

# The modules in which a parameter stands, each with the attribute that it stands at.
Places = list[tuple[nn.Module, str]]


@dataclass
class ParamInfo:
    """A managed parameter: its first qualified name, layout and the dtype that it is gathered in."""

    name: str
    layout: Layout
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    part: TensorPart | None = None  # the layout is that of what tensor parallelism leaves to this rank

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter as the user sees it."""
        return self.layout.shape if self.part is None else self.part.shape

    def placed(self, group: Group) -> str:
        """Placements on the mesh, as text."""
        return group.placed(self.layout.sharded, None if self.part is None else self.part.placement)


def standing(places: Places) -> tuple[nn.Module, str] | None:
    """The first of the places where a sharded parameter stands now."""
    for module, attribute in places:
        found = module._parameters.get(attribute)
        if isinstance(found, DTensor) and not hasattr(found, FULL):  # of zero.gathered
            return module, attribute
    return None


def find(places: Mapping[str, Places], name: str) -> nn.Parameter | None:
    """The sharded parameter called ``name`` as it stands in the module now; None where none does."""
    found = standing(places[name])
    return None if found is None else found[0]._parameters[found[1]]


def check_not_replaced(places: Mapping[str, Places], plain: set[int]) -> None:
    """Raise where one of the plain parameters with these ids stands in the place of a sharded one.

    Raises:
        ShardError: naming that.
    """
    for name, there in places.items():
        if any(id(module._parameters.get(attribute)) in plain for module, attribute in there):
            parameter_errors.replaced(name)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor, without autograd."""
    return sized_as_local(tensor).detach()


def sized_as_local(tensor: torch.Tensor) -> torch.Tensor:
    """The same to be asked for sizes: no tensor is made, which takes a while where there are only fake ones."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def in_file(tensor: torch.Tensor) -> bool:
    """Whether the rows of ``tensor`` rest in a file."""
    local = local_of(tensor)
    return not local.is_meta and region_of(local) is not None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the rows of ``tensor`` have no values, since only a plan is made."""
    return isinstance(sized_as_local(tensor), FakeTensor)
