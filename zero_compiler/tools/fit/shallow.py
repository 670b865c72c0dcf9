"""A model with fewer of the layers that are alike: plans of it, at two depths, tell what each layer adds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

_FEWEST = 3  # layers of which some are left out


@dataclass(frozen=True)
class Stack:
    """Layers of a model that are alike.

    Args:
        path: of the ``nn.ModuleList`` or ``nn.Sequential`` that has them.
        count: of its layers.
        kind: equal for stacks whose layers have the same classes, shapes and dtypes.
    """

    path: str
    count: int
    kind: tuple[object, ...]


def stacks_of(model: nn.Module) -> list[Stack]:
    """The outermost lists of layers with parameters that are alike."""
    found: list[Stack] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{stack.path}.") for stack in found):
            continue
        if not path or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < _FEWEST:
            continue
        kinds = {kind_of(layer) for layer in module}
        if len(kinds) == 1 and any(True for _ in module[0].parameters()):
            found.append(Stack(path, len(module), next(iter(kinds))))
    return found


def kind_of(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules with the same classes, and parameters and buffers of the same shapes and dtypes."""
    classes = tuple(type(m).__qualname__ for m in module.modules())
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return classes, tuple((name, tuple(t.shape), str(t.dtype)) for name, t in tensors)


def shallow(model: nn.Module, layers: Mapping[str, int]) -> nn.Module:
    """A copy of ``model`` whose stacks have so many layers, by path."""
    skipped = {
        id(layer): None
        for path, count in layers.items()
        for layer in list(model.get_submodule(path))[count:]  # type: ignore[call-overload]
    }
    # What is left out is not copied either.
    model = copy.deepcopy(model, dict(skipped))
    for path, count in layers.items():
        stack = model.get_submodule(path)
        for name in list(stack._modules)[count:]:
            del stack._modules[name]
    return model
