"""``state_dict()`` of a sharded model, which says once what a file that it is pickled into holds: rows of one rank."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

log = logging.getLogger("zero_compiler")


class ShardedStateDict(OrderedDict[str, Any]):
    """What ``nn.Module.state_dict`` returns, of values that are shards.

    It is pickled as the plain ``OrderedDict`` of the same values, so that a file does not ask for this project. One
    file a rank is a legitimate checkpoint; one file of rank 0 is none, and who wrote it would not know before reading.
    """

    said = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        shard = next((value for value in self.values() if _is_part(value)), None)
        if shard is not None and not ShardedStateDict.said:
            ShardedStateDict.said = True
            mesh = shard.device_mesh
            log.warning(
                "the state_dict of a sharded model is pickled (torch.save does so): the file holds the rows of rank %s "
                "alone, and only that rank of %d can load it; give each rank a file of its own, save with "
                "torch.distributed.checkpoint, or save full weights within `with zero.gathered(model):`",
                ", ".join(
                    map(str, mesh.get_coordinate() or ())
                ),  # known also where the process group has ended
                mesh.size(),
            )
        plain: OrderedDict[str, Any] = OrderedDict(self)
        plain.__dict__.update(self.__dict__)
        return plain.__reduce_ex__(protocol)

    def __copy__(self) -> ShardedStateDict:
        made = type(self)(self)
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedStateDict:
        made = memo[id(self)] = type(self)()
        for name, value in self.items():
            made[name] = copy.deepcopy(value, memo)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def _is_part(value: object) -> bool:
    return (
        isinstance(value, DTensor)
        and value.device_mesh.size() > 1
        and not all(placement.is_replicate() for placement in value.placements)
    )


def state_dict_of(base: type[nn.Module]) -> Callable[..., object]:
    """``state_dict`` of a sharded module whose class was ``base``; what a module of the model adds to the dictionary of
    its parent is left as it is."""

    def state_dict(self: nn.Module, *args: object, **kwargs: Any) -> object:
        found = base.state_dict(self, *args, **kwargs)
        given = bool(args) or kwargs.get("destination") is not None
        if given or type(found) is not OrderedDict or not any(map(_is_part, found.values())):
            return found
        made = ShardedStateDict(found)
        made.__dict__.update(found.__dict__)  # _metadata: versions of modules
        return made

    return state_dict


# What walks over trees of tensors takes it as the dictionary that it is.
pytree.register_pytree_node(
    ShardedStateDict,
    lambda found: (list(found.values()), list(found.keys())),
    lambda values, names: ShardedStateDict(zip(names, values, strict=True)),
    serialized_type_name="zero_compiler.params.sharded_state.ShardedStateDict",
    flatten_with_keys_fn=lambda found: (
        [(pytree.MappingKey(name), value) for name, value in found.items()],
        list(found.keys()),
    ),
)
