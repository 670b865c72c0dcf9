"""What benchmarks of one device share: the device and its peak, a step, and trainers by plain PyTorch, FSDP2 and ours.

Without an accelerator the CPU is the device. No torchrun; a process group of one rank, which FSDP2 asks for.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import modes
import torch
import torch.distributed as dist

GIB = 1 << 30


def device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def device_text() -> str:
    at = device()
    if at.type == "cpu":
        return "the CPU"
    known = torch.get_device_module(at).get_device_properties(at)
    return f"{known.name}, {known.total_memory / GIB:.0f} GiB"


def meter() -> None:
    """Count the live bytes of this device from here on: on an accelerator torch always does."""
    if device().type == "cpu":
        from zero_compiler.runtime import _C

        _C.meter_install()


class Peak:
    """Most live bytes on the device since it was made, of those that were allocated behind :func:`meter`."""

    def __init__(self) -> None:
        gc.collect()
        if device().type == "cpu":
            from zero_compiler.runtime import _C

            _C.meter_reset_peak()
        else:
            torch.accelerator.reset_peak_memory_stats()

    def bytes(self) -> int:
        if device().type == "cpu":
            from zero_compiler.runtime import _C

            return int(_C.meter_peak())
        return int(torch.accelerator.max_memory_allocated())


def wait() -> None:
    if device().type != "cpu":
        torch.accelerator.synchronize()


def forget() -> None:
    """What earlier models left: compiled code, and memory."""
    torch._dynamo.reset()
    gc.collect()
    if device().type != "cpu":
        torch.accelerator.empty_cache()


def one_step(call: Any, optimizer: Any, batch: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Seconds of a step of training, and its loss."""
    wait()
    began = time.perf_counter()
    loss = call(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    wait()
    return time.perf_counter() - began, loss.item()


def group() -> None:
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device())
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=modes.LR, fused=True)


def plain(model: Any, dtype: torch.dtype | None, mode: str | None = None) -> tuple[Any, Any]:
    """A trainer: what gives the loss of a batch, and an optimizer."""
    at, inner = device(), torch.compile(model, mode=mode)

    def call(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(at.type, dtype=dtype, enabled=dtype is not None):
            return inner(*batch)

    return call, adamw(model)


def fsdp2(
    model: Any, dtype: torch.dtype | None, checkpointed: bool = False, offloaded: bool = False
) -> tuple[Any, Any]:
    """``checkpointed``: every block; ``offloaded``: shards, gradients and states to the host."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    group()
    fields: dict[str, Any] = {
        "mesh": init_device_mesh(device().type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype if offloaded else None),
    }
    if checkpointed:
        model.blocks = torch.nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    if offloaded:
        fields["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        block.compile()
        fully_shard(block, **fields)
    fully_shard(model, **fields)
    return model, adamw(model)


def ours(model: Any, dtype: torch.dtype | None, mode: str | None = None, **fields: Any) -> tuple[Any, Any]:
    import zero_compiler as zero

    model = zero.shard(model, hardware=os.environ[common.HARDWARE], param_dtype=dtype, **fields)
    return torch.compile(model, backend="zero", mode=mode), adamw(model)


def check(losses: Sequence[Sequence[float]], what: str, low_precision: bool) -> float:
    """How far the losses of trainers lie from those of the first, relative."""
    pairs = [pair for other in losses[1:] for pair in zip(losses[0], other, strict=True)]
    apart = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    if apart > (tolerance := 2e-2 if low_precision else 1e-4):
        raise SystemExit(f"{what}: losses are {apart:.1e} apart, which is more than {tolerance:g}")
    return apart


def planned_ms(told: Any) -> float:
    """Predicted time of forward and backward, by a report."""
    return (
        sum(t.total_us for frame in told.frames for name, t in frame.timelines.items() if name != "inference")
        / 1e3
    )


def called(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a benchmark of one device; the machine's rates are known from here on."""
    parser.add_argument("--hardware", help="what `zero-compiler calibrate` wrote; default: calibrate first")
    parser.add_argument("--json")
    args = parser.parse_args()
    common.hardware(args.hardware, 1, directory=getattr(args, "directory", None))
    return args


class Results:
    """Rows of one table, saved as they come: one that fails takes no earlier one with it."""

    def __init__(
        self, title: str, key: str, file: str | None, table: Callable[[list[dict[str, Any]]], str]
    ) -> None:
        """
        Args:
            key: of the rows, in the file.
            table: the text of so many rows.
        """
        self.rows: list[dict[str, Any]] = []
        self._machine = common.machine() | {"device": device_text()}
        self._title, self._key, self._file, self._table = title, key, file, table

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        self.rows.append(row)
        if self._file:
            common.save(self._file, {"machine": self._machine, self._key: self.rows}, self.text())
        return row

    def text(self) -> str:
        head = common.heading(self._title, self._machine)
        return f"{head}Device: {self._machine['device']}.\n\n{self._table(self.rows)}"
