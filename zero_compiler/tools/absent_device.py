"""An accelerator that this machine does not have, as far as planning for it needs one: on fake tensors, which have no
values, torch runs forward and backward as on the device itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError, ConfigError

# Of which torch has all operators on fake tensors in every build, and for which the engine can stand in.
ABSENT = "cuda"
# That a plan for it is made for where no hardware was named: what was calibrated here says nothing of such a device.
PRESET = "dgx-h100"


def plannable(given: torch.device | str) -> torch.device:
    """The device that a plan is made for, as torch has it.

    Raises:
        ConfigError: torch knows no such device, or plans for it need one that is here.
    """
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"device={str(given)!r} is no kind of device of torch; give 'cpu', or 'cuda' for an NVIDIA GPU"
        ) from None
    if device.index is not None:
        raise ConfigError(
            f"device={str(device)!r} is one device of this machine, and a plan is for any of its kind; give "
            f"{device.type!r}"
        )
    if device.type in ("cpu", "meta", ABSENT):
        return device
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        raise ConfigError(
            f"a plan for device={device.type!r} needs such a device here, and there is none; without one plans are "
            f"made for 'cpu' and {ABSENT!r}"
        )
    return device


def is_absent(device: torch.device) -> bool:
    """Whether a device that can be planned for is not on this machine."""
    return device.type == ABSENT and not torch.cuda.is_available()


def hint(device: torch.device, error: BaseException) -> str:
    """What to add to an error of a forward that is planned for a device, where its absence may be the reason."""
    said = f"{type(error).__name__} {error}".lower()
    if not is_absent(device) or not any(name in said for name in (device.type, "nvidia")):
        return ""
    return (
        f"; there is no {device.type} device here: a forward that is planned for one may make tensors on it, and ask "
        "nothing of it"
    )


def stand_in(device: torch.device) -> None:
    """Let this process make fake tensors of a device, where it is not here."""
    if is_absent(device):
        from ..runtime import _C

        _C.stand_in_for_cuda()


@contextlib.contextmanager
def tracing(device: torch.device) -> Iterator[None]:
    """While a backward is traced for a device: `torch.autograd.grad` does without what only the device answers."""
    if not is_absent(device):
        yield
        return
    with _Gradients(), _generators():
        yield


def check_captured(gm: fx.GraphModule, device: torch.device) -> None:
    """Raise for what torch captures otherwise where the device is absent, and says nothing of it.

    Raises:
        CaptureError: autocast of it, which is turned off then.
    """
    if not is_absent(device):
        return
    for sub in gm.modules():
        graph = sub.graph if isinstance(sub, fx.GraphModule) else fx.Graph()
        for node in graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast):
            if node.args[0] == device.type and node.args[2]:
                raise CaptureError(
                    f"the forward enters torch.autocast({device.type!r}), which torch turns off where there is no such "
                    "device, so that other dtypes would be planned; plan where there is one, or leave autocast out and "
                    "give param_dtype, the dtype to compute in"
                )


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    """What torch lists when it begins to use devices: a generator of each. Where backward draws random numbers again,
    the partitioner clones the state of one, and draws nothing."""
    found = torch.cuda.default_generators
    torch.cuda.default_generators = (_Generator(),)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.default_generators = found


class _Generator:
    """Of a device, without its state."""

    device = torch.device(ABSENT, 0)

    def clone_state(self) -> _Generator:
        return self


class _Gradients(TorchFunctionMode):
    """Answers `torch.autograd.grad`; see `csrc/include/zero/absent_device.h`."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is torch.autograd.grad:
            return _gradients(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _gradients(
    outputs: object,
    inputs: object,
    grad_outputs: object = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Of the arguments of `torch.autograd.grad` those that AOTAutograd gives."""
    from ..runtime import _C

    if create_graph or is_grads_batched:
        raise ConfigError(
            "a forward that differentiates gradients again is planned for a device that is here; plan for 'cpu'"
        )
    outputs, inputs = _listed(outputs), _listed(inputs)
    given = [torch.ones_like(out) for out in outputs] if grad_outputs is None else _listed(grad_outputs)
    found: list[torch.Tensor | None] = []
    _in_a_backward(lambda: found.extend(_C.gradients_without_engine(outputs, inputs, given)))
    return tuple(
        torch.zeros_like(to) if grad is None and materialize_grads else grad
        for to, grad in zip(inputs, found, strict=True)
    )


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _in_a_backward(run: Callable[[], None]) -> None:
    """``run()`` within a backward of torch's engine, in this thread: hooks of AOTAutograd ask that engine to call them
    when a backward ends."""
    with _disable_current_modes():
        begin = _Within.apply(torch.zeros((), requires_grad=True), run)
        gradient = torch.zeros(())
    # As `torch.autograd.backward` calls it, which looks at the tensors first: modes would trace that.
    torch.autograd.Variable._execution_engine.run_backward(
        (begin,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return begin.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None
