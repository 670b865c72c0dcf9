"""What torch's C++ interface has and its Python has not (csrc/torch_bindings.cc): ranges of the profiler that are begun
and ended by hand, tensors that count their writes together, and storages that are given other memory. As one call for
all of them: what a call of a compiled frame does for every parameter and value (csrc/frame_bindings.cc), and what a
step of an optimizer asks of every parameter (csrc/optimizer_bindings.cc). And tensors over the memory of recorded
graphs (csrc/recorded_bindings.cc)."""

from .engine_build import TORCH_CPP, check_installed

check_installed(TORCH_CPP)  # before it is loaded

from ._torch_cpp import (  # noqa: E402
    Held,
    Lane,
    Range,
    RecordedValues,
    Rows,
    SegmentCall,
    Values,
    Versions,
    addresses,
    all_contiguous,
    all_stand,
    backward_runs_all,
    count_written,
    local_rows,
    move_if_shared,
    name_on,
    profiled,
    rows_alike,
    set_gradients,
    share_version_counters,
    some_have,
    some_have_another_storage,
)

__all__ = [
    "Held",
    "Lane",
    "Range",
    "RecordedValues",
    "Rows",
    "SegmentCall",
    "Values",
    "Versions",
    "addresses",
    "all_contiguous",
    "all_stand",
    "backward_runs_all",
    "count_written",
    "local_rows",
    "move_if_shared",
    "name_on",
    "profiled",
    "rows_alike",
    "set_gradients",
    "share_version_counters",
    "some_have",
    "some_have_another_storage",
]
