"""What the search for a plan chooses: a value, so that what was tried can be compared, taken up and dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..cost.prefetch import PrefetchChoice
from ..ir.facts import ParamRef
from ..passes.base import NamedValues


@dataclass(frozen=True)
class PlanChoice:
    """One plan of a frame: how its joint graph is cut into phases, and how these are lowered.

    Args:
        bucket_bytes: of full tensors; smaller transfers share a collective.
        recompute: backward may run costly operators again; then it gathers more weights.
        tile_mlp, mlp_bytes, tile_heads, away: as :class:`~zero_compiler.passes.base.Context` has them.
        order: of the first use of weights, as the joint graph has it.
        units: what is gathered together, which follows from order and buckets.
        backward_params, reduced: weights that backward gathers, and those whose gradients it reduces; None: not known.
        second: weights of which forward leaves second shards, since backward gathers them; None: not known.
        tile_bytes, kept: what is tried of weights whose tiles and whose stay all ranks have yet to agree on.
        prefetch: how far ahead gathers start, by phase.
        named: what forward hands to backward, where a plan file has been edited to say so.
    """

    bucket_bytes: int
    recompute: bool = False
    tile_mlp: bool = False
    mlp_bytes: int | None = None
    tile_heads: bool = False
    away: frozenset[str] | None = None
    order: tuple[ParamRef, ...] = ()
    units: Mapping[ParamRef, str] = field(default_factory=dict)
    backward_params: frozenset[ParamRef] | None = None
    reduced: frozenset[ParamRef] | None = None
    second: frozenset[ParamRef] | None = None
    tile_bytes: Mapping[ParamRef, int | None] = field(default_factory=dict)
    kept: Mapping[ParamRef, bool] = field(default_factory=dict)
    prefetch: Mapping[str, PrefetchChoice] = field(default_factory=dict)
    named: NamedValues | None = None
