"""``from_pretrained`` on several ranks of a host: what it does not map from files is in memory once.

transformers maps weights from safetensors files in their own dtype. With another ``dtype=``, and where it joins tensors
of the files (of experts), it makes a copy in memory, on every rank. Here the first rank of a host that comes loads as
ever, and puts what it has loaded into files in memory; it and the others map these as they would have mapped the files.
Mappings are private: what a rank reads are the values that transformers loads, and what it writes is its own. Such a
file is freed when no rank has a weight of it any more, as after sharding.
"""

from __future__ import annotations

import bisect
import hashlib
import inspect
import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..errors import ConfigError
from ..ranks.host_files import Giver, first_or_files, make_file
from ..storage import heap
from ..storage.safetensors_folder import DTYPE_NAMES, TensorEntry, WeightFile, files_of

LOAD = "transformers.modeling_utils.PreTrainedModel._load_pretrained_model"
TITLE = "zero-pretrained"  # of the files in memory
_LOADED = "_is_hf_initialized"  # an attribute of what was loaded, which transformers does not initialise then
_PARTS = 64  # into which the weights of a model are divided, so that memory is freed part by part


def load_once(original: Callable[..., Any]) -> Callable[..., object]:
    """In the place of ``LOAD``, which gives a model on the meta device the values of files."""
    signature = inspect.signature(original)

    def load(*args: object, **kwargs: object) -> object:
        given = signature.bind(*args, **kwargs).arguments
        model, paths, config = given["model"], given["checkpoint_files"], given["load_config"]
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # An adapter is loaded into a model that has values, and is small.
        whole = given["state_dict"] is None and given.get("expected_keys") is None
        if ranks < 2 or not paths or not whole or not _into_memory(config) or not _copies(paths, config):
            return original(*args, **kwargs)
        try:
            met = first_or_files(_name(model, paths, config), ranks)
        except OSError:
            met = []
        if isinstance(met, Giver):
            with met, heap.apart():
                info, index = original(*args, **kwargs)
                made = _shared(model, info, config, ranks)
                kept = weakref.ref(model)
                met.give(made, ranks - 1, lambda: kept() is not None and (not made or _mapped(made)))
            return info, index
        return (_taken(model, config, met), None) if met else original(*args, **kwargs)

    return load


def _into_memory(config: Any) -> bool:
    """Whether values go to memory of the host, as they are in the files but for their dtype."""
    places = {str(place) for place in (config.device_map or {}).values()}
    return places <= {"cpu"} and config.hf_quantizer is None and config.device_mesh is None


def _copies(paths: Iterable[str], config: Any) -> bool:
    """Whether something of the files may not be mapped as it is."""
    if config.disable_mmap or any(hasattr(mapping, "operations") for mapping in config.weight_mapping or []):
        return True
    for path in paths:
        if not path.endswith(".safetensors"):
            return True
        with safe_open(path, framework="pt") as file:
            kept = DTYPE_NAMES.get(config.dtype)
            if any(file.get_slice(name).get_dtype() != kept for name in file.keys()):
                return True
    return False


def _name(model: Any, paths: Iterable[str], config: Any) -> str:
    """The same for ranks that one process has started and that load the same values."""
    said = [
        *(os.getppid(), type(model), model.config.to_json_string(use_diff=False)),
        *(config.dtype, config.dtype_plan, config.weight_mapping, config.ignore_mismatched_sizes),
        *((name, value.shape, value.dtype) for name, value in model.state_dict().items()),
        *((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in map(os.stat, paths)),
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()


# What the first rank makes --------------------------------------------------------------------------------------------


def _shared(model: nn.Module, info: object, config: Any, ranks: int) -> list[int]:
    """What the ranks of this host take in the place of the files: first what transformers says of the load, then the
    values, which this rank takes at once. None where a rank that loads for itself has no more in memory than its share,
    and where values cannot be given."""
    state = model.state_dict(keep_vars=True)
    if any(name.endswith("_extra_state") for name in state):
        return []
    values = {name: value for name, value in state.items() if getattr(value, _LOADED, False)}
    del state  # what the other ranks have, and this one maps, is freed part by part
    total = sum(value.nbytes for value in values.values())
    if not _plain(values.values()) or _own_bytes(values.values()) * ranks <= total:
        return []
    used = [
        i
        for i, mapping in enumerate(config.weight_mapping or [])
        if any(mapping is m for m in getattr(model, "_weight_conversions", []))
    ]
    made: list[int] = []
    try:
        made.append(make_file(TITLE, [pickle.dumps((info, used))]))
        for file in _files(values, total):
            made.append(make_file(TITLE, _content(file, values)))
            _take(model, made[-1])
    except (OSError, ConfigError):  # no room for a file, or a dtype that it cannot hold
        while made:
            os.close(made.pop())
    heap.give_back()
    return made


def _plain(values: Iterable[torch.Tensor]) -> bool:
    """Whether all are ordinary tensors of the host, none of them another one's."""
    found = list(values)
    kinds = {(type(v) in (torch.Tensor, nn.Parameter), v.device.type, v.layout) for v in found}
    return kinds == {(True, "cpu", torch.strided)} and len({v.data_ptr() for v in found}) == len(found)


def _own_bytes(values: Iterable[torch.Tensor]) -> int:
    """How much of them is in memory of this process, and not in a file that it maps."""
    ends, begins = [], []
    for begin, end, inode in _mappings():
        if inode:
            begins.append(begin)
            ends.append(end)

    def mapped(address: int) -> bool:
        at = bisect.bisect_right(begins, address) - 1
        return at >= 0 and address < ends[at]

    return sum(value.nbytes for value in values if not mapped(value.data_ptr()))


def _mapped(files: list[int]) -> bool:
    """Whether this process maps any of them."""
    inodes = {os.fstat(fd).st_ino for fd in files}
    return any(inode in inodes for _, _, inode in _mappings())


def _mappings() -> Iterator[tuple[int, int, int]]:
    """What this process has mapped, in the order of addresses: begin, end, and the number of a file, or 0."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, _, _, inode = line.split()[:5]
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16), int(inode)


def _files(values: dict[str, torch.Tensor], total: int) -> list[WeightFile]:
    """Weights in several files; buffers, which stay on every rank, apart from them.

    Raises:
        ConfigError: a dtype that files cannot hold.
    """
    made: list[WeightFile] = []
    for weights in (True, False):
        entries = [
            TensorEntry(name, tuple(value.shape), value.dtype)
            for name, value in values.items()
            if isinstance(value, nn.Parameter) is weights
        ]
        made += files_of(entries, total // _PARTS + 1 if weights else total) if entries else []
    return made


def _content(file: WeightFile, values: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """What is in a file; values are dropped when they have been written."""
    yield file.header()
    for entry in file.entries:
        value = values.pop(entry.name).detach().contiguous()
        yield value.view(-1).view(torch.uint8).numpy().data


# What each rank takes -------------------------------------------------------------------------------------------------


def _taken(model: nn.Module, config: Any, files: list[int]) -> object:
    """Take what the first rank has loaded; what transformers says of its load."""
    first, *rest = files
    with open(_path(first), "rb") as said:
        info, used = pickle.load(said)
    for fd in rest:
        _take(model, fd)
    for fd in files:
        os.close(fd)
    model.__dict__["_weight_conversions"] = [config.weight_mapping[i] for i in used]
    return info


def _take(model: nn.Module, fd: int) -> None:
    """Let the tensors of a file, which is mapped, be those of the model, as transformers does with those it loads."""
    with safe_open(_path(fd), framework="pt") as file:
        for name in file.keys():
            path, _, attribute = name.rpartition(".")
            module, value = model.get_submodule(path), file.get_tensor(name)
            if attribute in module._parameters:
                value = nn.Parameter(value, requires_grad=value.is_floating_point())
            setattr(value, _LOADED, True)
            setattr(module, attribute, value)


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"
