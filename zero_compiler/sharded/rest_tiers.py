"""On which tier each part of a sharded model rests, and the way from there to the compute device."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from ..config import TIER_FIELDS, Config
from ..cost.hardware import HardwareSpec
from ..cost.tier_placement import Given, Placed, tiers_of
from ..errors import ConfigError
from ..ir.decisions import dtype_name
from ..ir.plan_file import load
from ..ranks.group import Group
from .managed_parameters import ParamInfo

log = logging.getLogger("zero_compiler")
_said_host = False


class RestTiers:
    """Where the parameters, gradients and optimizer states of one sharded model rest.

    Raises:
        ConfigError: tiers that do not go together.
    """

    def __init__(self, group: Group, config: Config) -> None:
        self._group = group
        self._config = config
        self.placed = Placed({})  # until the parameters are known
        self._check()

    def _check(self) -> None:
        """Where compute is on the CPU, tier "host" is where everything lies already; said once."""
        global _said_host
        if self.apart:
            _check_apart(self._config, self._group.device)
            return
        fields = [f for f in TIER_FIELDS if getattr(self._config, f) == "host"]
        if fields and not _said_host:
            _said_host = True
            log.warning(
                'compute is on the CPU, where everything is on "host": %s="host" changes nothing', fields[0]
            )

    def place(
        self,
        infos: Mapping[str, ParamInfo],
        params: Mapping[str, torch.Tensor],
        spec: HardwareSpec,
        fixed: Mapping[str, str | None] | None = None,
    ) -> None:
        """Decide on which tier everything rests; the parameters are known, and not installed yet.

        Args:
            fixed: tiers where construction has put rows that stay there, by name.

        Raises:
            MemoryBudgetError: the model does not fit the budgets.
        """
        given = {
            name: Given(info.layout, params[name].requires_grad, (fixed or {}).get(name))
            for name, info in infos.items()
        }
        self.placed = self._placed(given, infos, spec)

    def _placed(
        self, given: Mapping[str, Given], infos: Mapping[str, ParamInfo], spec: HardwareSpec
    ) -> Placed:
        if self._config.plan is None:
            return tiers_of(self._config, self.apart, given, spec)
        plan = load(self._config.plan)
        plan.check_weights(
            {name: (info.shape, dtype_name(info.layout.dtype)) for name, info in infos.items()}
        )
        wanted = {(kind, name): tier for name in infos for kind, tier in plan.weight(name).rests.items()}
        try:
            return tiers_of(self._config, self.apart, given, spec, wanted)
        except ConfigError as error:
            raise plan.refuse(str(error)) from None

    @property
    def apart(self) -> bool:
        """Whether the memory of the compute device is another than the host's."""
        return self._group.device.type != "cpu"

    @property
    def files_budget(self) -> int | None:
        """The memory budget of which the buffers of files are a part: not that of an accelerator, beside its host."""
        return None if self.apart else self._config.memory_budget_bytes

    def tier(self, kind: str, name: str) -> str:
        """Where the tensor of a ``kind`` ("params", "grads" or "optimizer") of a parameter rests."""
        return self.placed.tier(kind, name)

    def path(self, kind: str, name: str) -> tuple[str, ...]:
        """Tiers from where a tensor rests to the compute device, nearest last; () where it rests there."""
        tier = self.placed.tier(kind, name)
        if tier == "none":
            return ()
        return ("nvme", "host") if tier == "nvme" and self.apart else (tier,)

    def on_host(self, name: str) -> bool:
        """Whether the rows of a parameter are a tensor in memory of the accelerator's host, or in a file there."""
        return self.apart and bool(self.path("params", name))

    def rests_on(self, name: str) -> torch.device:
        """The device of a parameter's rows."""
        return torch.device("cpu") if self.path("params", name) else self._group.device

    def computes_on(self, name: str, shard: torch.Tensor) -> torch.device:
        """The device of the full weight whose rows are ``shard``."""
        return self._group.device if self.path("params", name) and not shard.is_meta else shard.device

    def goes_by_file(self, name: str, early: bool, tiled: bool) -> bool:
        """Whether the gradient of a parameter goes to a file, from which its update reads it.

        Args:
            early: the update takes gradients while backward runs. From memory, unless it has to wait for the rest of
                one in tiles, or a budget has no room for gradients on their way beside the buffers of files.
        """
        in_files = self.placed.tier("grads", name) == "nvme"
        return in_files and (not early or tiled or self.files_budget is not None)

    @property
    def activation_tier(self) -> str:
        """Where saved tensors may wait for backward: "none", "host" or "nvme". On a CPU they are on "host" already."""
        tier = self._config.offload_activations
        return tier if self.apart or tier != "host" else "none"

    @property
    def activation_path(self) -> tuple[str, ...]:
        """Tiers from the compute device to where saved tensors may wait, nearest first; () where they may not."""
        tier = self.activation_tier
        if tier == "none":
            return ()
        return ("host", "nvme") if tier == "nvme" and self.apart else (tier,)


def _check_apart(config: Config, device: torch.device) -> None:
    """What tiers may be beside each other where the device's memory is not the host's: torch has ``.grad`` where the
    parameter is, and updates run where both are.

    Raises:
        ConfigError: naming the option that does not fit.
    """
    params, grads, states = config.offload_params, config.offload_grads, config.offload_optimizer
    if params in (None, "none"):
        if grads not in (None, "none"):
            raise ConfigError(
                f'offload_grads="{grads}" needs offload_params="host" or "nvme" on {device}, since a gradient is on '
                "the device of its parameter; give that too, or leave offload_grads out"
            )
        return
    if config.stage != 3:
        raise ConfigError(
            f'offload_params="{params}" needs stage=3, not {config.stage}: the other stages keep every weight gathered'
        )
    for name, tier in (("offload_grads", grads), ("offload_optimizer", states)):
        if tier == "none":
            raise ConfigError(
                f'{name}="none" would keep on {device} what updates need beside parameters that rest on '
                f'"{params}"; give "host" or "nvme", or leave {name} out'
            )
