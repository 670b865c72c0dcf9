"""What the modules of one sharded model share: its placement, its ranks, its parameters and where they rest."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ..alignment import block_aligned
from ..config import TIER_FIELDS, Config
from ..cost import hardware
from ..cost.tier_placement import Given, Placed, tiers_of
from ..errors import CaptureError, ConfigError, ShardError, StorageError, TransferError
from ..ir import ops
from ..layout import Layout
from ..ranks.agreement import digest, raise_together
from ..ranks.call_handshake import meet, short_digest
from ..ranks.group import Group
from ..ranks.tensor_parallel import TensorPart
from ..ranks.transport import COPIED, LOCAL, Transport, choose
from ..storage import heap
from ..storage.resident_memory import Footprint
from ..storage.stores import Nvme, region_of, watch
from ..tensors.full_weight import FULL, Read
from . import blocking_transfers, grads, parameter_errors
from .files import Files, GradientFiles, PlannedWrites
from .write_detector import Copies

log = logging.getLogger("zero_compiler")
_order = itertools.count()
_keys = itertools.count()  # not the serial, which another process may have given out too
# Numbers of models, and of copies of each: counted apart for the ranks that share them, which all make the same ones,
# whatever one of them makes alone or with others.
_numbers: Counter[Any] = Counter()
# What Policy._fresh makes.
_OWN = "at_rest _refused _nvme files _gradient_files sinks calls optimizers taken looked footprint flush_queued".split()

NOTHING_CAPTURED = (
    "there is no plan of this call: torch.compile captures nothing of the model's forward before a parameter is read "
    "by code that runs eagerly (an RNN, say, or a graph break within a loop; TORCH_LOGS=graph_breaks says where)"
)


class Scope:
    """What a sharded model and the parts of it that were sharded before have in common: whether a forward is running.
    Inside one, a managed attribute is the full weight.

    ``calls``: the module that was called from outside, while its forward runs. It is a list that changes, and no
    attribute that is set: where a compiled forward registers a hook on a tensor that it has computed, Dynamo forgets
    what is set behind that (torch 2.13), and keeps how lists change.

    ``read``: weights that eager code has read in calls which run; ``copies``: what it was given as weights, where a
    forward runs without compile; ``compiled_reads``: by id, parameters whose weights compiled frames of such a forward
    have read. ``members``: their policies. ``changes`` counts what these learn of frames and
    optimizers.

    For calls past Dynamo's limit (`recompile_limit.py`). ``compile``: compiles a function once more, as the backend
    was asked to compile the model; ``again``: what it has made, by the module that is called; ``entered``: while a
    call runs, the state of the module at which its compiled code begins; ``begun``: that of the module that was
    called from outside, with the code of its forward, which may be compiled alone; ``eager``: a call runs that is not
    compiled any more; ``said``: what messages about ranks that do not meet repeat of such calls; ``eager_said``,
    ``outside_said``: whether the user was told of eager ones, and of eager code that a memory budget does not count.
    """

    def __init__(self) -> None:
        self.compile: Callable[[Any], Callable[..., Any]] | None = None
        self.again: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()
        self.entered: Any = None
        self.begun: tuple[Any, Any] = None, None
        self.eager = False
        self.said = ""
        self.eager_said = self.outside_said = False
        self.calls: list[Any] = []
        self.copies: Copies | None = None
        self.read: Read = {}
        self.compiled_reads: set[int] = set()
        self.members: weakref.WeakSet[Policy] = weakref.WeakSet()
        self.changes = 0

    def refuse_lost_hooks(self) -> None:
        """A hook that eager code has registered on a weight is given the gradient of what eager code computes with it.

        Raises:
            ShardError: a compiled frame of the same forward reads that weight as well.
        """
        if not self.compiled_reads:
            return
        for param, _, _, full in self.read.values():
            if full._backward_hooks and id(param) in self.compiled_reads:
                names = (n for policy in self.members for n in policy.places if policy.find(n) is param)
                raise ShardError(parameter_errors.hooked(next(names)))

    def told(self, text: str) -> str:
        """The description of a call, for ranks that are in another one."""
        head, *rest = text.split("\n")
        return "\n".join([f"{head} ({self.said})" if self.said else head, *rest])

    def __reduce__(self) -> tuple[type[Scope], tuple[()]]:
        return Scope, ()  # nothing of it is a copy's


@dataclass
class ParamInfo:
    """A managed parameter: its first qualified name, layout and the dtype that it is gathered in."""

    name: str
    layout: Layout
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    part: TensorPart | None = None  # the layout is that of what tensor parallelism leaves to this rank

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter as the user sees it."""
        return self.layout.shape if self.part is None else self.part.shape

    def placed(self, group: Group) -> str:
        """Placements on the mesh, as text."""
        return group.placed(self.layout.cut, None if self.part is None else self.part.placement)


Places = list[tuple[nn.Module, str]]


def shared_by(group: Group) -> tuple[int, ...]:
    """The ranks that make a model together, by their numbers in the job; () where that is this one alone."""
    return () if group.alone else group.ranks


@contextlib.contextmanager
def made_together(group: Group) -> Iterator[None]:
    """Where the model that is made inside is not made after all, maybe another rank has not even begun: the next one
    gets its number."""
    key = (shared_by(group),)
    before = _numbers[key]
    try:
        yield
    except BaseException:
        _numbers[key] = before
        raise


def _next(key: Any) -> int:
    _numbers[key] += 1
    return _numbers[key] - 1


class Policy:
    """How one sharded module is placed; shared by all its submodules. Made by :func:`shard`."""

    def __init__(self, group: Group, config: Config, scope: Scope | None = None) -> None:
        self.group = group
        self.config = config
        # First: what fails on one rank below has not kept it from counting.
        self._serial: tuple[int, ...] | None = (_next((shared_by(self.group),)),)
        self._copy_of: tuple[int, ...] = ()
        self._check_tiers()
        self.hardware = hardware.load(config.hardware)
        self.transport: Transport = LOCAL  # until the parameters are known
        self.placed = Placed({})
        self.belong(scope or Scope())
        self.params: dict[str, ParamInfo] = {}
        self.places: dict[str, Places] = {}
        # Weights of stage 3 that the memory budget keeps, by name; decided once, then fixed.
        self.kept: dict[str, bool] = {}
        self.tile_bytes: dict[str, int | None] = {}  # what a budget decided, see `tiling.py`
        # How far ahead gathers start, by phase and order of units (schedule.py); decided once, then fixed.
        self.distances: dict[str, str] = {}
        # What tensor-parallel ranks showed of their graphs, by what this one did (partition_activations).
        self.shown: dict[str, list[str]] = {}
        self.attempt = 0  # to compile the model: what ranks told each other in an earlier one counts no more
        self.sync = True
        self.writes = (
            False  # a class of the model has code that may write to weights in place (write_detector.py)
        )
        self.opened = False  # inside zero.gathered: parameters are whole
        self.only_planned = False  # a capture looks for a plan, and nothing is to run
        self.runtime: Any = None  # made by the first compile; dies with the policy
        self.frames: list[Any] = []  # compiled frames, for the report
        self.compilers: dict[str, Any] = {}
        self.made = next(_order)  # of all in this process: which of two came first
        self._of_some = not group.alone and group.everyone.world < dist.get_world_size()
        self._fresh()
        self.broken: str | None = None  # why no collective of this model can be trusted any more
        self._bind()

    def belong(self, scope: Scope) -> None:
        """Be a part of the model that ``scope`` is of, and of no other."""
        if (before := self.__dict__.get("scope")) is not None:
            before.members.discard(self)
            before.changes += 1
        self.scope = scope
        scope.members.add(self)
        scope.changes += 1

    def take(self) -> None:
        """An optimizer takes a parameter, or finds what its states need."""
        self.taken += 1
        self.scope.changes += 1

    @property
    def serial(self) -> tuple[int, ...]:
        """Which of the models of its ranks this is: equal on all of them; used to agree with the others.

        A copy, made by copying or loading, has that of its original and a number of its own, which it gets when it is
        first needed: so a rank may make copies for itself alone.
        """
        if self._serial is None:
            self._serial = (*self._copy_of, _next((shared_by(self.group), self._copy_of)))
        return self._serial

    @property
    def series(self) -> int:
        """Tells the transfers of this model from those of all others over the same process group, on all its ranks."""
        over = () if self.group.alone else tuple(dist.get_process_group_ranks(self.group.pg))
        if len(self.serial) == 1 and over == shared_by(self.group):
            return self.serial[0]
        return zlib.crc32(repr((shared_by(self.group), self.serial)).encode())

    def _fresh(self) -> None:
        """What belongs to this object alone, and to no copy of it."""
        # Flat chunks by name, with where they were found: module, attribute, all places, parameter, local tensor and
        # its address.
        self.at_rest: dict[str, tuple[Any, ...]] = {}
        # Room for a parameter, while the model is sharded.
        self._refused: ShardError | StorageError | None = None
        self._nvme: Nvme | None = None  # made when first needed
        self.files: Files | None = None
        self._gradient_files: GradientFiles | None = None
        self._planned_writes: PlannedWrites | None = None
        # Who updates a parameter while backward runs, by its name; and forwards whose backward may still read weights.
        self.sinks: weakref.WeakValueDictionary[str, grads.Sink] = weakref.WeakValueDictionary()
        self.calls: weakref.WeakSet[grads.ForwardCall] = weakref.WeakSet()
        self.flush_queued: int | None = None
        self.looked: int | None = (
            None  # the backward in which accumulation was looked at, by autograd's number
        )
        # The zero.optimizer of a parameter, by its name: it knows how many bytes the states take.
        self.optimizers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        # What the process has beside the plan; None: not measured here, as of a copy or of what is planned only.
        self.footprint: Footprint | None = None
        self.taken = 0  # how often an optimizer took a parameter, maybe from another one

    def _bind(self) -> None:
        self.key = f"m{next(_keys)}"
        self._digests: dict[tuple[str, str], bytes] = {}
        ops.bind_owner(self.key, self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        own = {*_OWN, "runtime", "key", "frames", "compilers", "_digests", "transport"}
        for name in own:
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copy_of, self._serial = self._serial or self._copy_of, None
        self.made = next(_order)
        self.runtime = None
        self.belong(self.scope)
        self._fresh()
        self.frames, self.compilers = [], {}
        self.transport = COPIED if self.group.world > 1 else LOCAL
        self._bind()

    def choose_transport(self) -> None:
        """Choose the transport, with the other ranks; the parameters are known, and not installed yet."""
        # What rests on another tier is brought into buffers: there is nothing at rest that peers could read.
        layouts = [i.layout for i in self.params.values() if not self.path("params", i.name)]
        spec = self.hardware
        unplanned = (
            None if spec.covers("shared") else f"hardware spec {spec.name!r} says nothing of its speed"
        )
        # Models of other ranks may have the same group of ranks along one dimension of a mesh.
        key = f"transport/{digest(str(shared_by(self.group))).hex()[:16]}/{self.title()}"
        self.transport = choose(self.group, self.config.transport, key, layouts, unplanned)

    def place_tensors(
        self, params: Mapping[str, torch.Tensor], settled: Mapping[str, str | None] | None = None
    ) -> None:
        """Decide on which tier everything rests; the parameters are known, and not installed yet.

        Args:
            settled: tiers where construction has put rows that stay there, by name.

        Raises:
            MemoryBudgetError: the model does not fit the budgets.
        """
        given = {
            name: Given(info.layout, params[name].requires_grad, (settled or {}).get(name))
            for name, info in self.params.items()
        }
        self.placed = tiers_of(self.config, self.apart, given, self.hardware)

    def _check_tiers(self) -> None:
        """Where compute is on the CPU, tier "host" is where everything lies already; said once.

        Raises:
            ConfigError: tiers that do not go together.
        """
        global _said_host
        if self.apart:
            _check_apart(self.config, self.group.device)
            return
        fields = [f for f in TIER_FIELDS if getattr(self.config, f) == "host"]
        if fields and not _said_host:
            _said_host = True
            log.warning(
                'compute is on the CPU, where everything is on "host": %s="host" changes nothing', fields[0]
            )

    @property
    def files_budget(self) -> int | None:
        """The memory budget of which the buffers of files are a part: not that of an accelerator, beside its host."""
        return None if self.apart else self.config.memory_budget_bytes

    @property
    def apart(self) -> bool:
        """Whether the memory of the compute device is another than the host's."""
        return self.group.device.type != "cpu"

    def path(self, kind: str, name: str) -> tuple[str, ...]:
        """Tiers from where a tensor rests to the compute device, nearest last; () where it rests there."""
        tier = self.placed.tier(kind, name)
        if tier == "none":
            return ()
        return ("nvme", "host") if tier == "nvme" and self.apart else (tier,)

    def on_host(self, name: str) -> bool:
        """Whether the rows of a parameter are a tensor in memory of the accelerator's host, or in a file there."""
        return self.apart and bool(self.path("params", name))

    def rests_on(self, name: str) -> torch.device:
        """The device of a parameter's rows."""
        return torch.device("cpu") if self.path("params", name) else self.group.device

    def computes_on(self, name: str, shard: torch.Tensor) -> torch.device:
        """The device of the full weight whose rows are ``shard``."""
        return self.group.device if self.path("params", name) and not shard.is_meta else shard.device

    def make_room(self, params: Mapping[str, torch.Tensor], there: Collection[str] = ()) -> None:
        """Files for what rests in files; the parameters are known, and not installed yet. Collective.

        Args:
            there: parameters for whose rows construction has made room in files, on all ranks alike: whether a rank
                has any rows of a parameter does not decide whether it comes in here.

        Raises:
            StorageError: on all ranks, where one has no room.
        """

        def filed(kind: str) -> dict[str, Layout]:
            tiers = self.placed.tiers  # of what is trained from the start
            return {n: info.layout for n, info in self.params.items() if tiers.get((kind, n)) == "nvme"}

        if any(isinstance(local_of(p), FakeTensor) for p in params.values()):
            largest = max((layout.bytes_local() for layout in filed("grads").values()), default=0)
            self._planned_writes = PlannedWrites(largest, self.files_budget) if largest else None
            return
        parameters = {name: lay for name, lay in filed("params").items() if name not in there}
        gradients = filed("grads")
        if not parameters and not gradients:
            return
        problem: StorageError | None = None
        try:
            self.files = Files(self.nvme(), parameters, gradients)
        except StorageError as error:
            problem = error
        raise_together(self.group, f"room/{self.title()}", "make room in nvme_dir", problem)

    def take_files(self, nvme: Nvme | None) -> None:
        """Go on with the tier in which construction has placed parameters already."""
        self._nvme = nvme or self._nvme

    @property
    def streamers(self) -> list[Any]:
        """Who moves what rests in files through buffers of its own (``buffer_bytes``), beside the Programs."""
        found = (self._gradient_files, self._planned_writes, *self.optimizers.values())
        return [s for s in found if s is not None]

    def take_gradients(self) -> None:
        """From here on gradients that rest in files go there as they land; the parameters are installed."""
        for name in self.places:
            watch(self.param(name), local_of(self.param(name)))
        if self.files is not None and self.files.gradients:
            self._gradient_files = GradientFiles(self, self.files.gradients)
            self.restore_sinks()
        heap.give_back()  # whole parameters, and what has moved to files or shared memory since
        self.footprint = Footprint.beside(self.shards_in_memory())

    def shards_in_memory(self) -> int:
        """Bytes of shards that take memory of the process."""
        nbytes = 0
        for name, info in self.params.items():
            local = local_of(self.param(name))
            tier = self.placed.tier("params", name)
            if tier == "host" or (tier == "none" and local.device.type == "cpu"):
                nbytes += info.layout.bytes_local()
        return nbytes

    def make_room_for_trained(self) -> None:
        """Files for gradients of what has none and is trained: it was frozen when the model was sharded.

        Raises:
            StorageError: no room.
        """
        have = self.files.gradients if self.files is not None else {}
        more = {
            name: info.layout
            for name, info in self.params.items()
            if name not in have
            and self.placed.tier("grads", name) == "nvme"
            and (param := self.find(name)) is not None
            and param.requires_grad
            and not isinstance(local_of(param), FakeTensor)
        }
        if not more or self.only_planned:
            return
        if self.files is None:
            self.files = Files(self.nvme(), {}, {})
        try:
            added = self.files.add_gradients(more)
        except StorageError as error:
            error.passing = True  # there may be room when it is tried again
            raise
        if self._gradient_files is None:
            self._gradient_files = GradientFiles(self, added)
        else:
            self._gradient_files.take(added)
        self.restore_sinks()

    def gradient_files(self, name: str) -> GradientFiles | None:
        """Who takes the gradient of a parameter to its file; None where it rests elsewhere."""
        return self._gradient_files if self.files is not None and name in self.files.gradients else None

    def goes_by_file(self, name: str, early: bool, tiled: bool) -> bool:
        """Whether the gradient of a parameter goes to a file, from which its update reads it.

        Args:
            early: the update takes gradients while backward runs. From memory, unless it has to wait for the rest of
                one in tiles, or a budget has no room for gradients on their way beside the buffers of files.
        """
        in_files = self.placed.tier("grads", name) == "nvme"
        return in_files and (not early or tiled or self.files_budget is not None)

    def settle_gradients(self) -> None:
        """What has landed in files is complete, and is ``.grad``."""
        if self._gradient_files is not None:
            self._gradient_files.settle()

    def landing(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for a gradient that goes to a file, or None where it may be anywhere."""
        if self._gradient_files is None:
            return None
        nbytes, landing = math.prod(shape) * dtype.itemsize, self._gradient_files.landing()
        if block_aligned(nbytes) > landing.limit:  # it goes in parts, of which some are under way at a time
            return None
        return landing.take(nbytes).view(dtype).view(*shape)

    def restore_sinks(self) -> None:
        """Gradients that rest in files and go to no optimizer go there."""
        if self.files is not None and self._gradient_files is not None:
            for name in self.files.gradients:
                self.sinks.setdefault(name, self._gradient_files)

    def settle(self, name: str, chunk: torch.Tensor) -> torch.Tensor:
        """Where the padded ``chunk`` of a parameter is to lie: in a file, on the host, or in memory that peers read.

        Where there is no room for it, peers go on to the next parameter's collective, and so does this rank: all are
        told at the end, by :meth:`check_settled`.
        """
        try:
            return self._settle(name, chunk)
        except (ShardError, StorageError) as error:
            self._refused = self._refused or error
            return chunk

    def _settle(self, name: str, chunk: torch.Tensor) -> torch.Tensor:
        layout = self.params[name].layout
        if in_file(chunk):
            return chunk
        if self.files is not None and (region := self.files.place(name)) is not None:
            if not chunk.is_meta:
                self.files.first_use(name)
                region.fill(chunk)
                chunk = region.tensor
            return chunk
        if self.path("params", name):
            return self._on_host(chunk)
        if self.transport.segment is None or not layout.cut:
            return chunk
        self.transport.segment.allocate(name, layout)
        if chunk.is_meta:
            return chunk
        return self.transport.segment.back(name).view(layout.padded_shape).copy_(chunk)

    def check_settled(self) -> None:
        """All parameters are where they are to lie. Collective.

        Raises:
            ShardError: on all ranks, where one was refused the memory.
            StorageError: the same, where that was a file.
        """
        filed = any(kind == "params" and tier == "nvme" for (kind, _), tier in self.placed.tiers.items())
        if filed or self.transport.segment is not None:
            raise_together(self.group, f"memory/{self.title()}", "place its part of the model", self._refused)

    def bring_home(self, name: str) -> bool:
        """Move the rows of a parameter that peers read in place to where they do; whether they lay elsewhere."""
        segment, layout = self.transport.segment, self.params[name].layout
        if segment is None or name not in segment.chunks:
            return False
        param = self.param(name)
        local = param._local_tensor
        if local.is_meta or not local.numel() or local.data_ptr() == segment.chunks[name].data_ptr():
            return False
        home = segment.back(name).copy_(blocking_transfers.flat_chunk(layout, local))
        param._local_tensor = home.view(layout.padded_shape)[: layout.rows(self.group.rank)]
        return True

    def place(self, name: str) -> torch.Tensor:
        """Memory on the compute device for this rank's padded chunk of a parameter that has none: zeros."""
        layout, segment = self.params[name].layout, self.transport.segment
        if self.files is not None and (region := self.files.place(name)) is not None:
            # A new file has zeros; to write them through the mapping would bring all of it to memory.
            return region.tensor if self.files.first_use(name) else region.tensor.zero_()
        if segment is not None and name in segment.chunks:
            return segment.back(name).zero_().view(layout.padded_shape)
        zeros = torch.zeros(layout.padded_shape, dtype=layout.dtype, device=self.rests_on(name))
        return self._on_host(zeros) if self.path("params", name) else zeros

    def _on_host(self, chunk: torch.Tensor) -> torch.Tensor:
        """The same in memory of the accelerator's host, pinned."""
        if self.group.device.type == "cpu" or chunk.is_meta:
            return chunk
        if isinstance(chunk, FakeTensor):
            return chunk.to("cpu")
        if chunk.is_pinned():
            return chunk
        return torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True).copy_(chunk)

    def nvme(self) -> Nvme:
        """The NVMe tier of this model on this rank.

        Raises:
            ConfigError: the model was sharded without ``nvme_dir``.
        """
        if self._nvme is None:
            if self.config.nvme_dir is None:
                raise ConfigError("the NVMe tier needs nvme_dir: give it to zero.shard")
            self._nvme = Nvme(
                self.config.nvme_dir,
                self.group.everyone.rank,
                self.config.nvme_keep,
                self.config.nvme_checksums,
            )
        return self._nvme

    @property
    def activation_tier(self) -> str:
        """Where saved tensors may wait for backward: "none", "host" or "nvme". On a CPU they are on "host" already."""
        tier = self.config.offload_activations
        return tier if self.apart or tier != "host" else "none"

    @property
    def activation_path(self) -> tuple[str, ...]:
        """Tiers from the compute device to where saved tensors may wait, nearest first; () where they may not."""
        tier = self.activation_tier
        if tier == "none":
            return ()
        return ("host", "nvme") if tier == "nvme" and self.apart else (tier,)

    def param(self, name: str) -> Any:
        """The sharded parameter called ``name`` as it stands in the module now.

        Raises:
            ShardError: it was deleted or replaced, in one of the places to which it was tied maybe, or is whole for the
                time of a ``zero.gathered``.
        """
        module, attribute = self.place_of(name)
        return module._parameters[attribute]

    def place_of(self, name: str) -> tuple[nn.Module, str]:
        """The module and the attribute where it stands.

        Raises:
            ShardError: as :meth:`param` does.
        """
        found = self._stands(name)
        if found is None:
            parameter_errors.missing(name, self.opened)
        if len(places := self.places[name]) > 1:
            param = found[0]._parameters[found[1]]
            others = (module._parameters.get(attribute) for module, attribute in places)
            if any(isinstance(other, DTensor) and other is not param for other in others):
                parameter_errors.untied(name)
        return found

    def find(self, name: str) -> Any:
        """The same as :meth:`param`, or None where no sharded parameter stands there now."""
        found = self._stands(name)
        return None if found is None else found[0]._parameters[found[1]]

    def check_not_replaced(self, plain: set[int]) -> None:
        """Raise where one of the plain parameters with these ids stands in the place of a sharded one.

        Raises:
            ShardError: naming that.
        """
        for name, places in self.places.items():
            if any(id(module._parameters.get(attribute)) in plain for module, attribute in places):
                parameter_errors.replaced(name)

    def _stands(self, name: str) -> tuple[nn.Module, str] | None:
        for module, attribute in self.places[name]:
            found = module._parameters.get(attribute)
            if isinstance(found, DTensor) and not hasattr(found, FULL):  # of zero.gathered
                return module, attribute
        return None

    # Eager meaning of the markers (ops.Owner).
    def gather_now(self, name: str, shard_: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.meet(f"eager gather of {name}")
        return blocking_transfers.gather(self.group, self.params[name].layout, shard_, dtype)

    def reduce_now(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        if not self.sync:
            raise ShardError(
                'zero.no_sync needs backend="zero" or no compile; another backend runs this graph'
            )
        info = self.params[name]
        self.meet(f"eager reduction of the gradient of {name}")
        return blocking_transfers.reduce(self.group, info.layout, grad, info.reduce_dtype)

    def meet(self, operation: str, details: str = "") -> None:
        """Before an eager collective: every rank is about to do the same ``operation`` for the same model.

        Args:
            details: what else must be the same on every rank, a line each.

        Raises:
            RankMismatchError: on every rank, naming the first difference.
            TransferError: a peer did not answer, or an earlier call broke off.
            CaptureError: only a plan was asked for, and this code runs without being captured.
        """
        if self.only_planned:
            raise CaptureError(NOTHING_CAPTURED)
        self.check_whole()
        if self.group.alone:
            return

        def text() -> str:
            return f"{operation}\n{self.title()}\n{self.describe()}\n{details}"

        doing = self._digests.get((operation, details))
        if doing is None:
            doing = self._digests[operation, details] = short_digest(text())
        meet(self.group, doing, lambda: self.scope.told(text()), operation)

    def check_whole(self) -> None:
        """Raise where an earlier call of this model broke off among its collectives."""
        if self.broken is not None:
            raise TransferError(self.broken)

    def break_off(self, reason: str) -> None:
        """A call ended among its collectives: peers may be waiting, and no later one can be matched to theirs."""
        everyone = self.group.everyone
        if everyone.world > 1 and self.broken is None:
            who = everyone.name_of(everyone.rank)
            self.broken = f"an earlier call of the model broke off on {who}: {reason}"

    def forget(self) -> None:
        """Nothing is decided: no rank could compile this model, and none holds a Program of it. All ranks do alike."""
        for decided in (self.kept, self.tile_bytes, self.distances, self.shown):
            decided.clear()
        if self.runtime is not None:
            self.runtime.kept_offsets.clear()
        self.attempt += 1

    def title(self) -> str:
        """Which of the sharded models of its ranks it is, in the order in which they were made."""
        number = ".".join(str(n) for n in self.serial)
        return f"model {number}" + (f" over {self.group.everyone.world} ranks" if self._of_some else "")

    def is_among(self, titles: Collection[str], group: Group) -> bool:
        """Whether a peer of ``group`` means this model by one of ``titles``. A copy that was never used is none."""
        known = self._serial is not None and set(self.group.ranks) <= set(group.ranks)
        return known and self.title() in titles

    def describe(self) -> str:
        """What ranks must agree on: parameters, layout, configuration; one line each."""
        config = {k: v for k, v in self.config.to_dict().items() if k != "nvme_dir"}
        if self.config.nvme_dir is not None:
            config["nvme_dir"] = "given"  # each rank may have its own
        config["hardware"] = f"{self.hardware.name}, {self.hardware.date}, {self.hardware.digest()}"
        dims = " x ".join(
            f"{role} {n}" for role, n in zip(self.group.roles, self.group.mesh.shape, strict=True)
        )
        lines = [
            f"ranks = {dims} on {self.group.device.type}",
            *(f"{k} = {v}" for k, v in sorted(config.items())),
        ]
        for info in self.params.values():
            place = info.placed(self.group)
            lines.append(f"parameter {info.name}: {list(info.shape)} {info.layout.dtype} {place}")
        return "\n".join(lines)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor, without autograd."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def in_file(tensor: torch.Tensor) -> bool:
    """Whether the rows of ``tensor`` rest in a file."""
    local = local_of(tensor)
    return not local.is_meta and region_of(local) is not None


def _check_apart(config: Config, device: torch.device) -> None:
    """What tiers may be beside each other where the device's memory is not the host's: torch has ``.grad`` where the
    parameter is, and updates run where both are.

    Raises:
        ConfigError: naming the option that does not fit.
    """
    params, grads_, states = config.offload_params, config.offload_grads, config.offload_optimizer
    if params in (None, "none"):
        if grads_ not in (None, "none"):
            raise ConfigError(
                f'offload_grads="{grads_}" needs offload_params="host" or "nvme" on {device}, since a gradient is on '
                "the device of its parameter; give that too, or leave offload_grads out"
            )
        return
    if config.stage != 3:
        raise ConfigError(
            f'offload_params="{params}" needs stage=3, not {config.stage}: the other stages keep every weight gathered'
        )
    for name, tier in (("offload_grads", grads_), ("offload_optimizer", states)):
        if tier == "none":
            raise ConfigError(
                f'{name}="none" would keep on {device} what updates need beside parameters that rest on '
                f'"{params}"; give "host" or "nvme", or leave {name} out'
            )


_said_host = False
