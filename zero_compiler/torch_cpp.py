"""What torch's C++ interface has and its Python has not (csrc/torch_bindings.cc): ranges of the profiler that are begun
and ended by hand, tensors that count their writes together, and storages that are given other memory."""

from .engine_build import TORCH_CPP, check_installed

check_installed(TORCH_CPP)  # before it is loaded

from ._torch_cpp import Lane, Range, move_if_shared, name_on, profiled, share_version_counters  # noqa: E402

__all__ = ["Lane", "Range", "move_if_shared", "name_on", "profiled", "share_version_counters"]
