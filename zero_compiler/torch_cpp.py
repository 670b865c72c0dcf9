"""What torch's C++ interface has and its Python has not (csrc/torch_bindings.cc): ranges of the profiler that are begun
and ended by hand, tensors that count their writes together, and storages that are given other memory. And what a call
of a compiled frame does for every parameter and value, as one call for all of them (csrc/frame_bindings.cc)."""

from .engine_build import TORCH_CPP, check_installed

check_installed(TORCH_CPP)  # before it is loaded

from ._torch_cpp import (  # noqa: E402
    Lane,
    Range,
    Rows,
    SegmentCall,
    Values,
    Versions,
    all_contiguous,
    all_stand,
    backward_runs_all,
    local_rows,
    move_if_shared,
    name_on,
    profiled,
    set_gradients,
    share_version_counters,
)

__all__ = [
    "Lane",
    "Range",
    "Rows",
    "SegmentCall",
    "Values",
    "Versions",
    "all_contiguous",
    "all_stand",
    "backward_runs_all",
    "local_rows",
    "move_if_shared",
    "name_on",
    "profiled",
    "set_gradients",
    "share_version_counters",
]
