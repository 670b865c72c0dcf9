"""What ``zero-compiler calibrate`` would bring to a plan that was made without it, where that can be known."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost import hardware, processors
from ..cost.cost import ONEDNN_GAIN
from ..report.frame import Frame
from ..sharded.sharded_model import ShardedModel

_OFFER = "`zero-compiler calibrate`, which takes a minute at most,"


def advice(first: ShardedModel, frames: Sequence[Frame], planned_only: bool, processor: str) -> str:
    """A sentence; "" where calibration would change nothing that is known of.

    What the machine says of oneDNN is what a calibration changes most: where it says nothing of it, large float32
    products stay with torch's BLAS.

    Args:
        first: the first of the sharded models that are planned together in ``frames``.
        planned_only: these were only planned, operator by operator, whatever ``compute`` says.
        processor: name of this machine's kind in `processors.py`; "": it is not known.
    """
    spec, us = first.hardware, sum(f.blas_us for f in frames)
    if not us or first.group.device.type != "cpu" or spec.onednn_flops_per_us:
        return ""
    config = first.config if planned_only else frames[0].config
    if config.kernels != "auto" or config.compute != "inductor":
        return ""
    step_us = sum(t.total_us for f in frames for t in f.timelines.values())
    part = f"float32 products are {min(1.0, us / step_us):.0%} of the {step_us / 1e3:,.1f} ms predicted for a step"
    kind = processors.named(processor)
    if kind is None:
        if not hardware.is_assumed(config.hardware):
            return ""
        ratios = [_ratio(known) for known in processors.PROCESSORS]
        return (
            f"calibration may help: this machine was not calibrated, and nothing is known of its kind of processor; "
            f"{part}, and where oneDNN was measured it took {min(ratios):.2f} to {max(ratios):.2f} of the time of "
            f"torch's BLAS for them; {_OFFER} finds which is faster here"
        )
    if _ratio(kind) * ONEDNN_GAIN >= 1:
        return ""
    less_us = us * (1 - _ratio(kind))
    return (
        f"calibration would help: hardware {spec.name!r} says nothing of oneDNN, which on {kind.name} takes "
        f"{_ratio(kind):.2f} of the time of torch's BLAS; {part}, of which about {less_us / 1e3:,.1f} ms would be "
        f"saved; {_OFFER} finds that"
    )


def _ratio(kind: processors.Processor) -> float:
    """Time of float32 products by oneDNN over that by torch's BLAS."""
    return kind.matmul_flops_per_us["float32"] / kind.onednn_flops_per_us["float32"]
