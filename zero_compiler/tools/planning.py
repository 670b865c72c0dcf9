"""Plans without ranks: the Programs of a model at any world size, from one process, with nothing allocated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ..call_stack import in_one_piece
from ..compile import garbage
from ..compile.backend import compile_frame
from ..compile.loader import PlanLoader
from ..config import PLACEMENT_FIELDS, Config
from ..errors import CaptureError, ConfigError, ShardError, ZeroError
from ..params.modules import sharded_models_of
from ..params.shard import shard_over
from ..plan.budget import memory_of
from ..ranks.group import Group
from ..ranks.mesh import REPLICATE, SHARD, bare_mesh
from ..report.frame import Frame
from ..report.memory import Memory
from ..report.report import Report
from ..report.step import MicroBatches
from ..sharded.sharded_model import ShardedModel
from . import absent_device
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
        device: the kind of device that computes, "cpu" or "cuda", which decides which operators are captured. It need
            not be here (`absent_device.py`).
        fields: fields of :class:`~zero_compiler.Config`, placement and compile fields alike.

    Raises:
        ConfigError: an unknown or contradictory field, or a ``device`` that no plan can be made for here.
        ShardError: ``model`` is sharded already.
        CaptureError: its forward fails with these inputs, or Dynamo cannot follow it.
        MemoryBudgetError: it does not fit a budget.
    """
    group = _group_on(device, world, rank)
    return _planned(model, example_inputs, group, dynamic, fields)[0]


def report(
    model: nn.Module,
    example_inputs: object,
    world: int = 1,
    device: torch.device | str = "cpu",
    *,
    replicas: int = 1,
    micro_batches: int = 1,
    say: Say = _say_nothing,
    **fields: object,
) -> Report:
    """The plan of ``model`` on ``world`` ranks as :func:`zero_compiler.inspect` would show it; see :func:`plan`.

    It is that of a whole step: with the update of the optimizer that ``fields`` name, by default AdamW.

    Args:
        replicas: of the model, each on ``world / replicas`` ranks, as on a mesh whose first dimension replicates.
        micro_batches: calls of a step, whose gradients are added up. Whole gradients wait for one reduction where the
            machine has room for them; else each call reduces its own.
        say: called with a line when a part of the work begins.

    Raises:
        ConfigError: also where ``replicas`` does not divide ``world``.
    """
    group = _group_on(device, _ranks_of_each(world, replicas), 0, replicas)
    frames, sharded_models = _planned(model, example_inputs, group, False, fields, say)
    rows, tokens = given_of(example_inputs)
    given = MicroBatches(micro_batches, rows, tokens)
    made = report_of(sharded_models, frames, planned_only=True, given=given)
    room = sharded_models[0].hardware.plannable_bytes if sharded_models else None
    each = replace(given, waits=False)
    if room is not None and made.memory.peak_of(given) > max(room, made.memory.peak_of(each)):
        made = report_of(sharded_models, frames, planned_only=True, given=each)
    return made


def _group_on(device: torch.device | str, world: int, rank: int = 0, copies: int = 1) -> Group:
    """Made before a fake mode begins: a mesh is made of real numbers."""
    device = absent_device.plannable(device)
    absent_device.stand_in(device)
    return planned_group(world, device, rank, copies)


def _ranks_of_each(world: int, replicas: int) -> int:
    if replicas < 1 or world % replicas:
        raise ConfigError(f"replicas must be a number that divides world={world:,}, not {replicas:,}")
    return world // replicas


def given_of(example_inputs: object) -> tuple[int, int]:
    """Rows of the inputs of a call, and tokens where its first tensor has whole numbers for each of a row; 0 of what
    they do not tell."""
    first = next(
        (t for t in pytree.tree_leaves(example_inputs) if isinstance(t, torch.Tensor) and t.dim()), None
    )
    if first is None:
        return 0, 0
    counts = first.dim() == 2 and not (first.is_floating_point() or first.is_complex())
    return first.shape[0], first.numel() if counts else 0


def rest(
    model: nn.Module,
    world: int = 1,
    device: torch.device | str = "cpu",
    *,
    replicas: int = 1,
    **fields: object,
) -> Memory:
    """What rests between steps, as :func:`report` would count it, without a capture: in a moment for any model.

    Raises: as :func:`plan`.
    """
    group, mode = _group_on(device, _ranks_of_each(world, replicas), 0, replicas), FakeTensorMode()
    model = _fake_model(model, mode, group.device)
    with mode:
        shard_over(model, group, Config.make(None, fields))
    return memory_of(sharded_models_of(model), [], 0)


@in_one_piece
def _planned(
    model: nn.Module,
    example_inputs: object,
    group: Group,
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
    device = group.device
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
        absent_device.check_captured(gm, device)
        with absent_device.tracing(device):
            frame = compile_frame(gm, inputs, options, loader)[2]
        frames.append(frame)
        due.append(frame.opened())  # what follows is planned as if it ran
        return gm.forward  # on fake tensors, to reach what stands behind a graph break

    with mode, garbage.rarely_collected():
        shard_over(model, group, config)
        say(f"capturing the forward of {sum(p.numel() for p in model.parameters()):,} parameters")
        try:
            torch.compile(model, backend=backend, dynamic=dynamic)(*args, **kwargs)
        except ZeroError:
            raise
        except Exception as error:  # whatever the user's forward raises, or Dynamo where it cannot follow
            ours = _as_ours(error, type(model).__name__, device)
            if ours is None:
                raise
            raise ours from (None if ours is getattr(error, "inner_exception", None) else error)
    return frames, sharded_models_of(model)


def _as_ours(error: Exception, name: str, device: torch.device) -> ZeroError | None:
    """What to raise where the capture of a forward fails; None: the error itself, which no user can do anything about.

    Args:
        name: class of the model.
    """
    if not isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        said = f"{last_line(error)}{absent_device.hint(device, error)}"
        return CaptureError(f"the forward of {name} cannot be captured with these inputs: {said}")
    inner = error.inner_exception
    if isinstance(inner, ZeroError):
        return inner
    if not absent_device.is_absent(device):
        return None
    return CaptureError(
        f"{name} cannot be planned for {device.type!r} where there is none: {last_line(inner)}"
    )


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
