"""Ways to train one model on the ranks of the default process group, behind one interface.

A mode is a name in ``MODES``, or ``zero2``/``zero3`` with fields of ``zero.Config`` after a colon:
``zero3:compute=aten+bucket_bytes=0``. With ``hardware=installed`` plans are made as where nobody has calibrated. Every
mode trains with AdamW(fused=True); DeepSpeed drives its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import common
import torch
import torch.distributed as dist
from models import Spec
from torch import nn

LR = 3e-4
INSTALLED = "installed"


class Skip(Exception):
    """This mode cannot run here; the text says why."""


@dataclass
class Trainer:
    """One replica of a model with its optimizer.

    ``forward`` gives the loss; ``backward`` takes it; ``update`` steps the optimizer and drops the gradients.
    """

    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], Any]
    model: Any
    optimizer: Any
    notes: dict[str, Any] = field(default_factory=dict)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.forward(tokens, targets)
        self.backward(loss)
        self.update()
        return loss.detach()


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def _plain(model: nn.Module, call: Callable[..., Any], bf16: bool) -> Trainer:
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def forward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            return call(tokens, targets)

    def update() -> None:
        opt.step()
        opt.zero_grad()

    return Trainer(forward, torch.Tensor.backward, update, model, opt)


def _local(spec: Spec, dtype: str, compiled: bool) -> Trainer:
    model = spec.build()
    return _plain(model, torch.compile(model) if compiled else model, dtype == "bf16")


def _ddp(spec: Spec, dtype: str, compiled: bool) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(spec.build(), gradient_as_bucket_view=True)
    return _plain(model, torch.compile(model) if compiled else model, dtype == "bf16")


def _fsdp2(spec: Spec, dtype: str, compiled: bool, checkpointed: bool = False) -> Trainer:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = spec.build(), _mesh()
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if checkpointed:
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _plain(model, model, False)


def _simple(spec: Spec, dtype: str) -> Trainer:
    from simple_fsdp import simple_fsdp

    bf16 = dtype == "bf16"
    model = simple_fsdp(
        spec.build(), _mesh(), torch.bfloat16 if bf16 else None, torch.float32 if bf16 else None
    )
    return _plain(model, torch.compile(model, fullgraph=True), False)


def _deepspeed(spec: Spec, dtype: str, stage: int) -> Trainer:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if importlib.util.find_spec("deepspeed") is None:
        raise Skip("the package deepspeed is not installed; it is an optional extra")
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
    except Exception as error:
        raise Skip(f"deepspeed does not import here: {error}") from error
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.init_distributed("gloo", verbose=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.batch,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": int(1e7),
            "allgather_bucket_size": int(1e7),
            "stage3_prefetch_bucket_size": int(1e7),
        },
    }
    if dtype == "bf16":
        config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    model = spec.build()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config)
    return Trainer(engine, engine.backward, engine.step, engine, engine.optimizer)


def _zero(spec: Spec, dtype: str, stage: int, options: dict[str, Any]) -> Trainer:
    import zero_compiler as zero

    if common.HARDWARE in os.environ:
        options = {"hardware": os.environ[common.HARDWARE]} | options
    if dtype == "bf16":
        options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} | options
    where: dict[str, str] = {}
    if options.get("hardware") == INSTALLED:
        options, where = options | {"hardware": None}, {"XDG_CACHE_HOME": os.devnull}
    with mock.patch.dict(os.environ, where):  # in which no calibration is found
        model = zero.shard(spec.build(), stage=stage, **options)
    return _plain(model, torch.compile(model, backend="zero"), False)


MODES: dict[str, Callable[[Spec, str], Trainer]] = {
    "local": lambda s, d: _local(s, d, False),
    "local-compiled": lambda s, d: _local(s, d, True),
    "ddp": lambda s, d: _ddp(s, d, False),
    "ddp-compiled": lambda s, d: _ddp(s, d, True),
    "fsdp2": lambda s, d: _fsdp2(s, d, False),
    "fsdp2-compiled": lambda s, d: _fsdp2(s, d, True),
    "fsdp2-blocks": lambda s, d: _fsdp2(s, d, True, True),  # every block is computed again in backward
    "simplefsdp": _simple,
    "deepspeed1": lambda s, d: _deepspeed(s, d, 1),
    "deepspeed2": lambda s, d: _deepspeed(s, d, 2),
    "deepspeed3": lambda s, d: _deepspeed(s, d, 3),
    "zero0": lambda s, d: _zero(s, d, 0, {}),
    "zero1": lambda s, d: _zero(s, d, 1, {}),
    "zero2": lambda s, d: _zero(s, d, 2, {}),
    "zero3": lambda s, d: _zero(s, d, 3, {}),
}
# What the schedule is worth shows by itself where products stay with torch's BLAS, and bytes with c10d.
DEFAULT = [m for m in MODES if m not in ("zero0", "zero1", "fsdp2-blocks")]
DEFAULT += ["zero3:kernels=torch", "zero3:transport=c10d"]


def check(name: str) -> None:
    """Raises ValueError for a name that is no mode."""
    base, _, options = name.partition(":")
    if base not in MODES or (options and not base.startswith("zero")):
        raise ValueError(f"no mode {name!r}; there are {', '.join(MODES)}, and zeroN:field=value+field=value")


def build(name: str, spec: Spec, dtype: str) -> Trainer:
    """The trainer of a mode; collective.

    Raises:
        Skip: the mode cannot run here.
    """
    check(name)
    base, _, options = name.partition(":")
    if not options:
        return MODES[base](spec, dtype)
    fields: dict[str, Any] = {}
    for pair in options.split("+"):
        key, _, value = pair.partition("=")
        fields[key] = int(value) if value.lstrip("-").isdigit() else value
    return _zero(spec, dtype, int(base.removeprefix("zero")), fields)


def communicates(name: str) -> bool:
    return not name.startswith("local")


def bytes_at_rest(name: str, numel: int, world: int) -> int:
    """Rough bytes of one rank between steps: what decides which modes fit into memory side by side."""
    base = name.partition(":")[0]
    shard = 12 * numel // world  # fp32 weight and two fp32 states; gradients are dropped
    if base.startswith("local"):
        return 12 * numel
    if base.startswith("ddp"):
        return 16 * numel  # gradients live in DDP's buckets
    if base in ("deepspeed1", "deepspeed2", "zero0", "zero1", "zero2"):
        return shard + (12 if base == "zero0" else 8) * numel
    return shard + 4 * numel  # the other four bytes: what a step needs beside them
