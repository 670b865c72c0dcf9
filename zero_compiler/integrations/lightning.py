"""Lightning: ``Trainer(strategy="zero")``, ``Fabric(strategy="zero")``, their variants, and ``ZeroStrategy(**fields)``.

Lightning reads its registry of strategies before any entry point, so the names are known after this import, or in a
script that ``zero-compiler run`` has started.
"""

from __future__ import annotations

import importlib.util

from ..errors import IntegrationError
from . import lightning_strategies
from .lightning_strategies import DIRECTORY

for _package in ("lightning", "pytorch_lightning", "lightning_fabric"):
    if importlib.util.find_spec(_package) is not None:
        lightning_strategies.register(_package)

_made = lightning_strategies.made
if not _made:
    raise IntegrationError(
        "zero_compiler.integrations.lightning needs lightning, pytorch_lightning or lightning_fabric: install one"
    )
ZeroStrategy = (_made.get("lightning") or _made.get("pytorch_lightning") or (None, None))[0]
ZeroFabricStrategy = (_made.get("lightning") or _made.get("lightning_fabric") or (None, None))[1]

__all__ = ["DIRECTORY", "ZeroFabricStrategy", "ZeroStrategy"]
