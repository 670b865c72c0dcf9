"""The one configuration object: frozen, serialisable, with units in the names.

Placement fields belong to ``zero.shard``; compile fields may also be given as
``torch.compile(options=...)``. A field that is given twice must agree.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import inductor_options
from .errors import ConfigError
from .quantised_blocks import DTYPES as _QUANTISED

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}
TIERS = ("none", "host", "nvme")  # nearest to the device first
# Optimizers that can be reckoned with before there is one: how many fp32 values each keeps of a parameter.
OPTIMIZERS = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd-momentum": 1, "sgd": 0}
_COMPUTE = ("inductor", "aten")
_KERNELS = ("auto", "torch")
_TRANSPORTS = ("auto", "c10d", "shared")

PLACED_FIELDS = ("offload_params", "offload_grads", "offload_optimizer")  # what rests between steps
TIER_FIELDS = (*PLACED_FIELDS, "offload_activations")
BUDGET_FIELDS = ("memory_budget_bytes", "activation_budget_bytes")
REST_FIELDS = ("device_rest_bytes", "host_rest_bytes", "nvme_rest_bytes")
PLACEMENT_FIELDS = frozenset(
    {
        "stage",
        "param_dtype",
        "gather_dtype",
        "second_shard",
        "reduce_dtype",
        "reduce_between_hosts_dtype",
        "offload_params",
        "offload_grads",
        "offload_optimizer",
        "offload_activations",
        "nvme_dir",
        "nvme_keep",
        "nvme_checksums",
        *REST_FIELDS,
        "optimizer",
        "hardware",
        "transport",
    }
)


@dataclass(frozen=True)
class Config:
    """Options of a sharded model.

    Args:
        stage: ZeRO stage, 0 to 3. At 0 all is replicated; 1 and 2 partition optimizer states and gradients (one plan:
            see docs/semantics.md), 3 does not keep gathered weights either (ZeRO, Rajbhandari et al. 2020, section 5).
        param_dtype: dtype in which weights are gathered and computed with; None keeps the parameter's own.
            Floating inputs of the root module are cast to it, as FSDP2's MixedPrecisionPolicy does.
        gather_dtype: what weights travel in where that takes a step less time: "int8" or "float8_e4m3fn", in blocks
            with a scale each, from which every rank makes the same full weight in ``param_dtype``
            (docs/quantised-gathers.md). None: they travel as they are computed with.
        second_shard: "host": between forward and backward the ranks of a host keep a second shard of each weight that
            backward gathers, a part each, so that backward gathers among them alone and nothing crosses to another
            host (docs/several-hosts.md). Stage 3; on one host it changes nothing. None: backward gathers as forward
            does.
        reduce_dtype: dtype in which gradients are reduced and accumulated; None means the gradient's own
            (``param_dtype`` if given).
        reduce_between_hosts_dtype: "int8": gradients are summed in ``reduce_dtype`` within a host, and what goes on to
            other hosts does so in blocks of 8 bits a number, which are summed in float32 (docs/several-hosts.md). Needs
            ranks that share memory within each host; on one host it changes nothing. None: in ``reduce_dtype``.
        offload_params, offload_grads, offload_optimizer, offload_activations: tier at rest: "none" (the
            compute device), "host" or "nvme". None, of the first three: each tensor as the rest budgets say; with an
            accelerator, gradients and states of parameters that rest elsewhere are on the host.
        device_rest_bytes: bytes of shards, gradients and optimizer states that may rest on the compute device of one
            rank. What is not told to rest elsewhere is placed tensor by tensor so that the transfers of a step take
            least time; ``zero.inspect`` says where and why. None: all of it may.
        host_rest_bytes, nvme_rest_bytes: the same for host memory (with an accelerator) and for ``nvme_dir``. None:
            nothing on the host, and no limit in ``nvme_dir`` but its room.
        nvme_dir: directory for files of the NVMe tier.
        nvme_keep: leave those files behind, under names of their own; else nothing is left when the process ends.
        nvme_checksums: compare what is read from those files with sums of what was written; another byte is an error.
        optimizer: kind of optimizer whose states and update a plan reckons with as long as no ``zero.optimizer`` has
            been made: "adamw", "adam", "adagrad", "rmsprop", "sgd-momentum" or "sgd". It makes none.
        transport: way between ranks: "c10d" is the process group; "shared" is memory that CPU ranks of one host
            share, with the process group between several hosts; "auto" takes "shared" where it is possible on every
            rank. ``zero.inspect`` says which, and why.
        compute: "inductor" compiles segments between transfers; "aten" runs them node by node.
        mode: how hard Inductor tries, as ``torch.compile(mode=...)`` says it: "default", "max-autotune-no-cudagraphs",
            or with segments recorded into CUDA graphs "reduce-overhead" and "max-autotune" (docs/semantics.md). None:
            Inductor's own configuration as it is.
        inductor: fields of ``torch._inductor.config`` by name, for what segments are compiled with; over ``mode``.
            Held as their JSON.
        kernels: "auto" gives large float32 products on CPU to oneDNN where calibration found it faster than torch's
            BLAS, or the kind of processor is known for it; "torch" leaves every operator to the library that torch
            takes.
        hardware: description of the machine that plans are made for: a preset or a JSON file. None: what
            ``zero-compiler calibrate`` found on this one, else the preset "laptop", with products as fast as on rank
            0's kind of processor where that is known.
        memory_budget_bytes: bytes of the compute device that one rank may use; what it covers is in
            docs/semantics.md. A plan that does not fit is an error before step 1; room that is left keeps
            gathered weights from forward to backward. None: no limit, and weights are released as ``stage`` says.
        activation_budget_bytes: most bytes that backward may hold at once of what forward made, saved from forward or
            made again. What does not fit is made again, the cheapest first. None: no limit of its own; under
            ``memory_budget_bytes``, what that leaves.
        bucket_bytes: gathers and reductions smaller than this share a collective, in bytes of the full
            tensors. None: derived by the cost model from latency times bandwidth; less where ``memory_budget_bytes``
            asks for it.
        tile_bytes: logits are made in tiles of at most so many bytes, together with the loss and its gradient; and a
            weight whose gathered bytes are more is gathered, used and reduced in tiles (docs/tiling.md). None: as
            many tokens at a time as it takes for the repeated reading of the weight not to count, and weights whole
            unless ``memory_budget_bytes`` asks for tiles.
        plan_seconds: seconds after which the search for a plan within ``memory_budget_bytes`` ends: with the best that
            was found, or with the first that fits. None: it ends after as much work as on any machine.
        partition_activations: of what forward saves alike on all tensor-parallel ranks each keeps one part, and
            backward gathers it (Pa of ZeRO-R, Rajbhandari et al. 2020, section 6.1). Needs a mesh with such ranks.
        plan: JSON file of a plan whose decisions are held to (docs/editing-plans.md); given to ``zero.shard``, where
            tensors rest is among them. None: all is decided anew.

    Raises:
        ConfigError: a value is out of range or not of its type.
    """

    stage: int = 3
    param_dtype: torch.dtype | None = None
    gather_dtype: str | None = None
    second_shard: str | None = None
    reduce_dtype: torch.dtype | None = None
    reduce_between_hosts_dtype: str | None = None
    offload_params: str | None = None
    offload_grads: str | None = None
    offload_optimizer: str | None = None
    offload_activations: str = "none"
    nvme_dir: str | None = None
    nvme_keep: bool = False
    nvme_checksums: bool = False
    device_rest_bytes: int | None = None
    host_rest_bytes: int | None = None
    nvme_rest_bytes: int | None = None
    optimizer: str = "adamw"
    transport: str = "auto"
    compute: str = "inductor"
    mode: str | None = None
    inductor: Mapping[str, object] | str | None = None
    kernels: str = "auto"
    hardware: str | None = None
    memory_budget_bytes: int | None = None
    activation_budget_bytes: int | None = None
    bucket_bytes: int | None = None
    tile_bytes: int | None = None
    plan_seconds: float | None = None
    partition_activations: bool = False
    plan: str | None = None

    def __new__(cls, *args: object, **fields: object) -> Config:
        """Notes which fields the user gave. All of them at once is a copy: then those that are no default."""
        self = object.__new__(cls)
        known = [f.name for f in dataclasses.fields(cls)]
        given = {*known[: len(args)], *fields}
        if len(given) == len(known):
            given = {f.name for f in dataclasses.fields(cls) if fields.get(f.name, f) != f.default}
        self.__dict__["given"] = frozenset(given)
        return self

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer states that are reckoned with for each element of a parameter that has no optimizer."""
        return 4 * OPTIMIZERS[self.optimizer]

    @property
    def _given(self) -> frozenset[str]:
        return self.__dict__["given"]

    def __post_init__(self) -> None:
        self._check()
        self._find_directory()

    def _find_directory(self) -> None:
        if self.nvme_dir is not None:
            if not os.path.isdir(self.nvme_dir):
                raise ConfigError(f"nvme_dir must be an existing directory; {self.nvme_dir!r} is not one")
            # Files are made later too, and a process may change its directory.
            object.__setattr__(self, "nvme_dir", os.path.abspath(self.nvme_dir))

    def _check(self) -> None:
        if not isinstance(self.stage, int) or isinstance(self.stage, bool) or not 0 <= self.stage <= 3:
            raise ConfigError(f"stage must be 0, 1, 2 or 3, not {self.stage!r}")
        for name in ("param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        object.__setattr__(self, "gather_dtype", _quantised("gather_dtype", self.gather_dtype))
        for name in TIER_FIELDS:
            tier = getattr(self, name)
            if tier is None and name in PLACED_FIELDS:
                continue
            if tier not in TIERS:
                raise ConfigError(f"{name} must be one of {', '.join(TIERS)}, not {tier!r}")
            if tier == "nvme" and self.nvme_dir is None:
                raise ConfigError(f'{name}="nvme" needs nvme_dir, the directory for its files')
        if self.offload_params == "nvme" and self.stage != 3:
            raise ConfigError(
                f'offload_params="nvme" needs stage=3, not {self.stage}: the other stages keep every weight gathered'
            )
        self._check_hosts()
        for name in ("hardware", "nvme_dir", "plan"):
            given = getattr(self, name)
            if isinstance(given, os.PathLike):
                object.__setattr__(self, name, os.fspath(given))  # a plan is written as JSON
            elif given is not None and not isinstance(given, str):
                raise ConfigError(f"{name} must be a str or None, not {given!r}")
        for name in REST_FIELDS[1:]:
            if getattr(self, name) is not None and self.device_rest_bytes is None:
                raise ConfigError(
                    f"{name} bounds what moves off the device, and nothing does without device_rest_bytes: give it too"
                )
        if self.nvme_rest_bytes is not None and self.nvme_dir is None:
            raise ConfigError("nvme_rest_bytes needs nvme_dir, the directory for the files")
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, which a plan reckons with until zero.optimizer "
                f"makes one, not {self.optimizer!r}"
            )
        if self.transport not in _TRANSPORTS:
            raise ConfigError(f"transport must be one of {', '.join(_TRANSPORTS)}, not {self.transport!r}")
        if self.compute not in _COMPUTE:
            raise ConfigError(f"compute must be one of {', '.join(_COMPUTE)}, not {self.compute!r}")
        object.__setattr__(self, "inductor", inductor_options.as_held(self.inductor))
        if self.mode is not None:
            inductor_options.check_mode(self.mode)
        for name in ("mode", "inductor"):
            if getattr(self, name) is not None and self.compute != "inductor":
                raise ConfigError(
                    f'{name} is for what Inductor compiles: give compute="inductor", not {self.compute!r}'
                )
        if self.kernels not in _KERNELS:
            raise ConfigError(f"kernels must be one of {', '.join(_KERNELS)}, not {self.kernels!r}")
        for name in ("nvme_keep", "nvme_checksums", "partition_activations"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._check_amounts()

    def _check_hosts(self) -> None:
        if self.second_shard not in (None, "host"):
            raise ConfigError(f'second_shard must be "host" or None, not {self.second_shard!r}')
        if self.second_shard is not None and self.stage != 3:
            raise ConfigError(
                f'second_shard="host" needs stage=3, not {self.stage}: the other stages gather nothing in backward'
            )
        if self.reduce_between_hosts_dtype not in (None, "int8"):
            raise ConfigError(
                f'reduce_between_hosts_dtype must be "int8" or None, not {self.reduce_between_hosts_dtype!r}'
            )
        if self.reduce_between_hosts_dtype is not None and self.stage == 0:
            raise ConfigError(
                'reduce_between_hosts_dtype="int8" needs a stage of 1 to 3, not 0, whose all-reduces leave the same '
                "sum on every rank"
            )

    def _check_amounts(self) -> None:
        sizes = ("bucket_bytes", "memory_budget_bytes", "activation_budget_bytes", "tile_bytes", *REST_FIELDS)
        for name in sizes:
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
                raise ConfigError(f"{name} must be a number of bytes >= 0 or None, not {size!r}")
        seconds = self.plan_seconds
        if seconds is not None and (
            not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds >= 0
        ):
            raise ConfigError(f"plan_seconds must be a number of seconds >= 0 or None, not {seconds!r}")

    @staticmethod
    def make(base: Config | None = None, fields: Mapping[str, Any] | None = None) -> Config:
        """``base`` with ``fields`` laid over it; a field given in both must agree.

        Raises:
            ConfigError: an unknown field, or two values for one field.
        """
        fields = {} if fields is None else fields
        _check_names(fields)
        fields = dict(fields)
        if base is None:
            return Config(**fields)
        if not isinstance(base, Config):
            raise ConfigError(f"config must be a zero.Config, not {type(base).__name__}")
        merged = copy.copy(base)
        merged.__dict__.update(fields, given=base._given | frozenset(fields))
        merged._check()
        # That of base was found when it was made, and may be gone: files that are there do not need it.
        if "nvme_dir" in fields:
            merged._find_directory()
        for name in fields:
            if name in base._given and getattr(merged, name) != getattr(base, name):
                raise ConfigError(
                    f"{name} was given twice: {getattr(base, name)!r} and {getattr(merged, name)!r}; give it once"
                )
        return merged

    def with_options(self, options: Mapping[str, object] | None) -> Config:
        """The configuration of one compile: this one with ``torch.compile(options=...)`` laid over it.

        Raises:
            ConfigError: an option contradicts the shard, or is a placement and so belongs to ``zero.shard``.
        """
        if not options:
            return self
        _check_names(options)
        for name, value in options.items():
            if name in PLACEMENT_FIELDS and _as_held(name, value) != getattr(self, name):
                raise ConfigError(
                    f"torch.compile(options={{{name!r}: ...}}) asks for {value!r}, but the model was sharded with "
                    f"{name}={getattr(self, name)!r}; {name} is a placement: give it to zero.shard"
                )
        return Config.make(self, options)

    @staticmethod
    def of_parts(parts: Sequence[Config], others: Sequence[Config] = ()) -> Config:
        """The configuration of a frame that reads ``parts`` of a model, each sharded by itself: of a budget the least,
        and of every other compile field what it was given for any of them. Placements are those of the first.

        Args:
            others: of parts of the same model that the frame does not read; their budgets hold for it too.

        Raises:
            ConfigError: a field was given different values.
        """
        found: dict[str, object] = {}
        for name in COMPILE_FIELDS:
            if name in BUDGET_FIELDS:
                values = [v for c in (*parts, *others) if (v := getattr(c, name)) is not None]
                found |= {name: min(values)} if values else {}
                continue
            given = dict.fromkeys(getattr(c, name) for c in parts if name in c._given)
            if len(given) > 1:
                one, other = list(given)[:2]
                raise ConfigError(
                    f"{name} is {one!r} for one part of a model that was sharded by itself and {other!r} for another, "
                    "and they are compiled together: give both the same, or only one of them any"
                )
            found |= dict.fromkeys([name], *given) if given else {}
        merged = copy.copy(parts[0])
        merged.__dict__.update(found, given=parts[0]._given | frozenset(found))
        return merged

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values; dtypes by name."""
        out: dict[str, object] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            out[f.name] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        return out

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> Config:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigError: it is no dictionary, or a field is unknown or has a value that it cannot have.
        """
        _check_names(data, "Config.from_dict takes")
        return Config.make(None, data)


# Of the compiler; "hardware", a placement, is what it plans for.
COMPILE_FIELDS = ("hardware", *(f.name for f in dataclasses.fields(Config) if f.name not in PLACEMENT_FIELDS))


def _check_names(fields: object, taker: str = "options are") -> None:
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{taker} a dictionary of fields by name, not {reprlib.repr(fields)}")
    known = {f.name for f in dataclasses.fields(Config)}
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option {reprlib.repr(name)}{hint}")


def _as_held(name: str, value: object) -> object:
    """A value as a configuration holds it."""
    if name in ("param_dtype", "reduce_dtype"):
        return _dtype(name, value)
    if name == "gather_dtype":
        return _quantised(name, value)
    if name in ("hardware", "nvme_dir", "plan") and isinstance(value, os.PathLike):
        value = os.fspath(value)
    return os.path.abspath(value) if name == "nvme_dir" and isinstance(value, str) else value


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _DTYPES:
        value = _DTYPES[value]
    # Others that float (of 8 bits, say) have no arithmetic of their own: torch only casts them.
    if value not in _DTYPES.values():
        raise ConfigError(f"{name} must be one of {', '.join(_DTYPES)}, or the torch.dtype, not {value!r}")
    return value


def _quantised(name: str, value: object) -> str | None:
    """The name of a dtype of 8 bits, also where the dtype itself is given."""
    found = next((n for n, dtype in _QUANTISED.items() if value in (n, dtype)), None)
    if value is not None and found is None:
        raise ConfigError(
            f"{name} must be one of {', '.join(_QUANTISED)}, which weights travel in, or None, not {value!r}; "
            "param_dtype is for what they are computed with"
        )
    return found
