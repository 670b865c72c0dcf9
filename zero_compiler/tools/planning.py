"""Plans without ranks: the Programs of a model at any world size, from one process, with nothing allocated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ..compile.backend import compile_frame
from ..compile.loader import PlanLoader
from ..config import PLACEMENT_FIELDS, Config
from ..errors import CaptureError, ConfigError, ShardError, ZeroError
from ..params.modules import sharded_models_of
from ..params.shard import shard_over
from ..plan.budget import memory_of
from ..ranks.group import Group
from ..ranks.mesh import REPLICATE, SHARD, bare_mesh
from ..report.report import Frame, Memory, Report
from ..sharded.sharded_model import ShardedModel
from .error_lines import last_line
from .inspect import report_of

Say = Callable[[str], None]


def _say_nothing(line: str) -> None:
    """For those who wait without being told what for."""


def planned_group(world: int, device: torch.device | str = "cpu", rank: int = 0, copies: int = 1) -> Group:
    """A group of ``world`` ranks that only plans: no process group behind it, nothing can be sent.

    With ``copies`` the mesh has a dimension before it that replicates, of so many.
    """
    device = torch.device(device)
    mesh_device = "cpu" if device.type == "meta" else device.type
    ranks = torch.arange(copies * world).view(*([copies] if copies > 1 else []), world)
    mesh = bare_mesh(mesh_device, ranks, rank=rank)
    if copies == 1:
        return Group(mesh, None, rank, world, device)
    across = Group(mesh, None, rank // world, copies, device)
    return Group(mesh, None, rank % world, world, device, (REPLICATE, SHARD), across)


def plan(
    model: nn.Module,
    example_inputs: object,
    world: int = 1,
    *,
    rank: int = 0,
    device: torch.device | str = "cpu",
    dynamic: bool = False,
    **fields: object,
) -> list[Frame]:
    """The plan of every frame of ``model`` on ``world`` ranks, as ``zero.shard(model, **fields)`` would give it.

    ``model`` stays as it is; its parameters may be on the meta device. The forward runs on fake tensors, through
    graph breaks too, as long as it asks for no value.

    Args:
        model: a plain module.
        example_inputs: a tuple of positional arguments or a dict of keyword arguments; tensors may be on meta.
        world: number of ranks.
        rank: the rank to plan for; every rank has the same plan.
        device: the compute device, which decides which operators are captured.
        fields: fields of :class:`~zero_compiler.Config`, placement and compile fields alike.

    Raises:
        ConfigError: an unknown or contradictory field, or a ``device`` that this build of torch does not know.
        ShardError: ``model`` is sharded already.
        CaptureError: its forward fails with these inputs, or Dynamo cannot follow it.
        MemoryBudgetError: it does not fit a budget.
    """
    return _planned(model, example_inputs, world, rank, device, dynamic, fields)[0]


def report(
    model: nn.Module,
    example_inputs: object,
    world: int = 1,
    device: torch.device | str = "cpu",
    *,
    say: Say = _say_nothing,
    **fields: object,
) -> Report:
    """The plan of ``model`` on ``world`` ranks as :func:`zero_compiler.inspect` would show it; see :func:`plan`.

    Args:
        say: called with a line when a part of the work begins.
    """
    frames, sharded_models = _planned(model, example_inputs, world, 0, device, False, fields, say)
    return report_of(sharded_models, frames, planned_only=True)


def rest(model: nn.Module, world: int = 1, device: torch.device | str = "cpu", **fields: object) -> Memory:
    """What rests between steps, as :func:`report` would count it, without a capture: in a moment for any model.

    Raises: as :func:`plan`.
    """
    mode, device = FakeTensorMode(), _known(device)
    model = _fake_model(model, mode, device)
    group = planned_group(world, device)
    with mode:
        shard_over(model, group, Config.make(None, fields))
    return memory_of(sharded_models_of(model), [], 0)


def _planned(
    model: nn.Module,
    example_inputs: object,
    world: int,
    rank: int,
    device: torch.device | str,
    dynamic: bool,
    fields: dict[str, object],
    say: Say = _say_nothing,
) -> tuple[list[Frame], list[ShardedModel]]:
    if sharded_models_of(model):
        raise ShardError("planning takes a plain model, not one that is sharded already")
    config = Config.make(None, fields)
    options = {
        k: v for k, v in fields.items() if k not in PLACEMENT_FIELDS
    }  # for frames that read no parameter
    mode = FakeTensorMode(shape_env=ShapeEnv())
    device = _known(device)
    model = _fake_model(model, mode, device)
    args, kwargs = (), {}
    if isinstance(example_inputs, dict):
        kwargs = example_inputs
    else:
        args = tuple(example_inputs) if isinstance(example_inputs, (list, tuple)) else (example_inputs,)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _fake(mode, t, device), (args, kwargs))
    frames: list[Frame] = []
    due: list[object] = []
    loader = PlanLoader()

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        say(f"frame {len(frames)}: {len(gm.graph.nodes):,} operators captured; planning forward and backward")
        frame = compile_frame(gm, inputs, options, loader)[2]
        frames.append(frame)
        due.append(frame.opened())  # what follows is planned as if it ran
        return gm.forward  # on fake tensors, to reach what stands behind a graph break

    group = planned_group(world, device, rank)  # a mesh is made of real numbers, outside of the mode
    with mode:
        shard_over(model, group, config)
        say(f"capturing the forward of {sum(p.numel() for p in model.parameters()):,} parameters")
        try:
            torch.compile(model, backend=backend, dynamic=dynamic)(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, ZeroError):
                raise error.inner_exception from None
            raise
        except ZeroError:
            raise
        except Exception as error:  # whatever the user's forward raises, or Dynamo where it cannot follow
            raise CaptureError(
                f"the forward of {type(model).__name__} cannot be captured with these inputs: {last_line(error)}"
            ) from error
    return frames, sharded_models_of(model)


def _known(given: torch.device | str) -> torch.device:
    """Raise for a device that torch was built without: autograd ends the process there, on fake tensors too."""
    device = torch.device(given)
    built = torch.accelerator.current_accelerator()  # of the build, whether or not there is one here
    if device.type not in ("cpu", "meta", built.type if built is not None else "cpu"):
        raise ConfigError(
            f"planning for device {device.type!r} needs a torch that is built for it, which this one is not; plan "
            "for device='cpu', or install such a torch"
        )
    return device


def _fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy of ``model`` on fake tensors; parameters that are tied stay tied."""
    with FakeCopyMode(mode):
        model = copy.deepcopy(model)
    seen: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in seen:
                    new = nn.Parameter(_fake(mode, param.detach(), device), requires_grad=param.requires_grad)
                    for key, value in param.__dict__.items():
                        new.__dict__.setdefault(key, value)  # marks of the user's; a fake tensor has its own
                    seen[id(param)] = seen[id(new)] = (new, param)  # both stay alive, and so do their ids
                module._parameters[name] = seen[id(param)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _fake(mode, buffer, device)
    return model


def _fake(mode: FakeTensorMode, t: torch.Tensor, device: torch.device) -> torch.Tensor:
    with mode:
        out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return out.requires_grad_(t.requires_grad)
