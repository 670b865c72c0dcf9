"""What a weight travels in: the same for compiled code, eager code and the plan, and on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ..config import Config
from ..cost.hardware import HardwareSpec
from ..cost.quantised_gathers import pays
from ..quantised_blocks import DTYPES
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
