"""The pipeline: every pass, in order, on one screen.

The joint graph (forward and backward together, with markers) is rewritten first; the partitioner cuts it, and passes
over both sides change what is handed from one to the other; then each phase is lowered and scheduled.
"""

from .activations import Remade, held_bytes, remade
from .base import Context, ParamPlan, Pass, SplitPass, Trace, run_passes, run_split
from .bucket_transfers import BucketTransfers
from .choose_saved import ChooseSaved
from .clone_escapes import CloneEscapes
from .fsdp_units import assign_units, gathered_in_backward, order_of_use
from .keep_old_values import KeepOldValues
from .land_products import LandProducts
from .lower_markers import LowerMarkers
from .merge_markers import MergeMarkers
from .offload_activations import OffloadActivations, offloaded
from .partition_activations import PartitionActivations
from .pick_kernels import PickKernels
from .place_offloads import PlaceOffloads
from .place_transfers import InsertReleases, PlaceStarts
from .tag_recompute import TagRecompute
from .tiling.expand_tiles import ExpandTiles, finer, read_by_tiles, set_tiles, tiles_in
from .tiling.tile_loss import TileLoss
from .tiling.tile_mlp import TileMlp
from .tiling.tile_operators import TileOperators

# (pass, level of lowering that the verifier proves after it)
JOINT: list[tuple[Pass, str]] = [
    (MergeMarkers(), "merged"),
    (KeepOldValues(), "merged"),
    (TileLoss(), "merged"),
    (TileMlp(), "merged"),
    (TagRecompute(), "merged"),
    (ChooseSaved(), "merged"),
]
# Each is made where it runs, with what it needs to know of links and ranks, and only for options that ask for it.
SPLIT: list[type[SplitPass]] = [OffloadActivations, PartitionActivations]
INFERENCE: list[tuple[Pass, str]] = [
    (MergeMarkers(), "merged"),
    (TileLoss(), "merged"),
    (TileMlp(), "merged"),
]
PHASE: list[tuple[Pass, str]] = [
    (MergeMarkers(), "merged"),
    (LowerMarkers(), "captured"),
    (CloneEscapes(), "lowered"),
    (TileOperators(), "lowered"),
    (BucketTransfers(), "lowered"),
    (PlaceStarts(), "lowered"),
    (ExpandTiles(), "lowered"),
    (LandProducts(), "lowered"),
    (PickKernels(), "lowered"),
    (PlaceOffloads(), "lowered"),
    (InsertReleases(), "scheduled"),
]

__all__ = [
    "INFERENCE",
    "JOINT",
    "PHASE",
    "SPLIT",
    "BucketTransfers",
    "ChooseSaved",
    "CloneEscapes",
    "Context",
    "ExpandTiles",
    "InsertReleases",
    "KeepOldValues",
    "LandProducts",
    "LowerMarkers",
    "MergeMarkers",
    "ParamPlan",
    "OffloadActivations",
    "PartitionActivations",
    "Pass",
    "PickKernels",
    "PlaceOffloads",
    "PlaceStarts",
    "Remade",
    "SplitPass",
    "TagRecompute",
    "TileLoss",
    "TileMlp",
    "TileOperators",
    "Trace",
    "assign_units",
    "finer",
    "gathered_in_backward",
    "held_bytes",
    "offloaded",
    "order_of_use",
    "read_by_tiles",
    "remade",
    "run_passes",
    "run_split",
    "set_tiles",
    "tiles_in",
]
