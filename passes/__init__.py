"""The pipeline: every pass, in order, on one screen.

The joint graph (forward and backward together, with markers) is rewritten first; the partitioner splits it, and passes
over both sides change what is handed from one to the other; then each phase is lowered and scheduled.
"""

from .activations import Remade, held_bytes, remade
from .base import Context, NamedValues, ParamPlan, Pass, PassOptions, SplitPass, Trace, run_passes, run_split
from .bucket_transfers import BucketTransfers
from .choose_saved import ChooseSaved, Cuts
from .clone_escapes import CloneEscapes
from .fsdp_units import assign_units, forward_reads, gathered_in_backward, order_of_use
from .keep_old_values import KeepOldValues
from .land_products import LandProducts
from .lower_markers import LowerMarkers
from .merge_markers import MergeMarkers
from .offload_activations import OffloadActivations, offloaded
from .partition_activations import PartitionActivations
from .pick_kernels import PickKernels, blas_us
from .place_offloads import PlaceOffloads
from .place_transfers import InsertReleases, PlaceStarts
from .second_shards import SecondShards, second_sharded
from .tag_recompute import TagRecompute
from .tiling.expand_tiles import ExpandTiles, coarsest, finer, read_by_tiles, set_tiles, tiles_in
from .tiling.tile_loss import TileLoss
from .tiling.tile_mlp import TileMlp
from .tiling.tile_operators import TileOperators
from .tiling.tiles import MOST_ALIKE

_DEFAULT = PassOptions()
# Over both sides of a partition: each is made where it runs, with what it needs to know of links and ranks.
SPLIT: list[type[SplitPass]] = [OffloadActivations, PartitionActivations]
# (pass, level of lowering that the verifier proves after it), in order
Pipeline = list[tuple[Pass, str]]


def inference_passes(o: PassOptions = _DEFAULT) -> Pipeline:
    """Passes over a forward without a backward, before those of a phase."""
    return [
        (MergeMarkers(), "merged"),
        (TileLoss(o.tile_bytes, o.tile_heads), "merged"),
        (TileMlp(o.tile_mlp, o.tile_bytes, o.mlp_bytes), "merged"),
    ]


def joint_passes(o: PassOptions = _DEFAULT, min_cuts: Cuts | None = None) -> Pipeline:
    """Passes over a joint graph.

    Args:
        min_cuts: minimum cuts that were found for a copy of it; grows (see `choose_saved.py`).
    """
    saved = ChooseSaved(
        o.activation_bytes,
        o.bucket_bytes,
        o.recompute,
        o.away,
        o.tiers,
        o.named,
        {} if min_cuts is None else min_cuts,
    )
    markers, *tiles = inference_passes(o)
    return [
        markers,
        (KeepOldValues(), "merged"),
        *tiles,
        (TagRecompute(o.bucket_bytes, o.recompute), "merged"),
        (saved, "merged"),
    ]


def phase_passes(o: PassOptions = _DEFAULT) -> Pipeline:
    """Passes over a forward, a backward, or an inference."""
    return [*marker_passes(), *schedule_passes(o)]


def marker_passes() -> Pipeline:
    """Those of a phase of which nothing is chosen: a search runs them once."""
    return [(MergeMarkers(), "merged"), (LowerMarkers(), "captured"), (CloneEscapes(), "lowered")]


def schedule_passes(o: PassOptions = _DEFAULT) -> Pipeline:
    """The others, which follow them."""
    return [
        (TileOperators(o.tile_bytes, o.bytes_only, o.some_tiles), "lowered"),
        (BucketTransfers(o.bucket_bytes), "lowered"),
        (PlaceStarts(o.bucket_bytes, o.distances), "lowered"),
        (ExpandTiles(o.bytes_only), "lowered"),
        (LandProducts(o.kernels), "lowered"),
        (PickKernels(o.kernels), "lowered"),
        (PlaceOffloads(o.budgeted), "lowered"),
        (InsertReleases(), "scheduled"),
        (SecondShards(), "scheduled"),
    ]


__all__ = [
    "MOST_ALIKE",
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
    "NamedValues",
    "ParamPlan",
    "OffloadActivations",
    "PassOptions",
    "PartitionActivations",
    "Pass",
    "PickKernels",
    "PlaceOffloads",
    "PlaceStarts",
    "Remade",
    "SecondShards",
    "SplitPass",
    "TagRecompute",
    "TileLoss",
    "TileMlp",
    "TileOperators",
    "Trace",
    "assign_units",
    "blas_us",
    "coarsest",
    "finer",
    "forward_reads",
    "gathered_in_backward",
    "held_bytes",
    "inference_passes",
    "joint_passes",
    "marker_passes",
    "offloaded",
    "order_of_use",
    "phase_passes",
    "read_by_tiles",
    "remade",
    "run_passes",
    "run_split",
    "schedule_passes",
    "second_sharded",
    "set_tiles",
    "tiles_in",
]
