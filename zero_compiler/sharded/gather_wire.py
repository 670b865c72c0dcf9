"""What a weight travels in, and sums of its gradient: the same for code, the plan and every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ..config import Config
from ..cost.hardware import HardwareSpec
from ..cost.quantised_gathers import pays
from ..quantised_blocks import DTYPES, FROM
from .agreed_choices import AgreedChoices
from .chunk_storage import ChunkStorage
from .managed_parameters import ParamInfo


class Gathered(Protocol):
    """What decides it, of a sharded model."""

    config: Config
    hardware: HardwareSpec
    agreed: AgreedChoices
    storage: ChunkStorage

    @property
    def params(self) -> Mapping[str, ParamInfo]: ...


def wire_of(model: Gathered, name: str) -> torch.dtype | None:
    """The dtype of 8 bits that a weight travels in, where one is asked for and pays; None: it travels in the dtype that
    it is computed with."""
    asked = model.config.gather_dtype
    if asked is None or model.storage.transport.shared or not model.agreed.quantised.get(name, True):
        return None
    info, wire = model.params[name], DTYPES[asked]
    return wire if pays(info.layout, info.gather_dtype, wire, model.hardware) else None


def sum_wire_of(model: Gathered, name: str) -> torch.dtype | None:
    """The dtype of 8 bits in which sums of the gradients of a host go to other hosts; None: in that of the sum."""
    asked, info = model.config.reduce_between_hosts_dtype, model.params[name]
    if asked is None or model.storage.transport.between == 1 or not info.layout.sharded:
        return None
    return DTYPES[asked] if info.reduce_dtype in FROM else None
