"""The memory and the files in which the chunks of a sharded model lie, and the memory that its peers read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ..config import Config
from ..cost.hardware import HardwareSpec
from ..cost.placed_hardware import mesh_rows, placed
from ..errors import ConfigError, ShardError, StorageError
from ..layout import Layout
from ..ranks.agreement import digest, raise_together
from ..ranks.group import Group
from ..ranks.host_ranks import HostRanks, connect, ranks_of_host
from ..ranks.mesh import SHARD
from ..ranks.transport import Transport, choose, rank_hosts
from ..storage.stores import Nvme
from . import blocking_transfers
from .files import Files, PlannedWrites
from .managed_parameters import ParamInfo, in_file, is_fake
from .model_identity import ModelIdentity, shared_by
from .rest_tiers import RestTiers


class ChunkStorage:
    """Where this rank's chunk of each parameter of one sharded model lies.

    ``transport``: how weights and gradients travel between ranks. ``files``: of what rests in files.
    ``planned_writes``: what stands for them where only a plan is made.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        group: Group,
        config: Config,
        tiers: RestTiers,
        params: Mapping[str, ParamInfo],
        transport: Transport,
    ) -> None:
        self._identity = identity
        self._group = group
        self._config = config
        self._tiers = tiers
        self._params = params
        self.transport = transport
        self.host_ranks: HostRanks | None = None  # that share second shards
        self.files: Files | None = None
        self.planned_writes: PlannedWrites | None = None
        self._nvme: Nvme | None = None  # made when first needed
        self._refused: ShardError | StorageError | None = None  # room for a parameter, while it is sharded

    def choose_transport(self, spec: HardwareSpec) -> HardwareSpec:
        """Choose the transport, with the other ranks; the parameters are known, and not installed yet.

        Returns:
            ``spec`` with these ranks on the hosts on which they are.
        """
        # What rests on another tier is brought into buffers: there is nothing at rest that peers could read.
        layouts = [i.layout for i in self._params.values() if not self._tiers.path("params", i.name)]
        unplanned = (
            None if spec.covers("shared") else f"hardware spec {spec.name!r} says nothing of its speed"
        )
        # Models of other ranks may have the same group of ranks along one dimension of a mesh.
        key = f"transport/{digest(str(shared_by(self._group))).hex()[:16]}/{self._identity.title()}"
        per_host = None if spec.between_hosts is None else spec.devices_per_host
        self.transport = choose(self._group, self._config.transport, key, layouts, unplanned, per_host)
        asked = self._config.second_shard or self._config.reduce_between_hosts_dtype
        runs = not self._group.one_rank
        where = rank_hosts(self._group, key) if runs and (asked or spec.between_hosts is not None) else None
        if asked and self._group.world > 1:
            self._on_hosts(where if runs else _planned_hosts(self._group, spec), key)
        if spec.between_hosts is None or (runs and where is None):
            return spec
        return placed(spec, self._group, where, once=self.transport.between > 1)

    def _on_hosts(self, where: Mapping[int, int] | None, key: str) -> None:
        """What is asked for of ranks of several hosts can be done with those that there are.

        Raises:
            ShardError: it cannot; on all ranks.
        """
        rows = mesh_rows(self._group, self._group.link is None)[SHARD]
        if self._config.second_shard is not None:
            ranks = ranks_of_host(rows, where)
            self.host_ranks = connect(self._group, key, ranks, self.transport) if ranks else None
        if self._config.reduce_between_hosts_dtype is not None and self.transport.between == 1:
            if where is None or any(len({where[rank] for rank in row}) > 1 for row in rows):
                raise ShardError(
                    'reduce_between_hosts_dtype="int8" needs CPU ranks that share memory within each host, and '
                    f"these use {self.transport.name} ({self.transport.reason}); leave it out"
                    + ('; to plan for ranks that do, give transport="shared"' if self._group.one_rank else "")
                )

    @property
    def second_ranks(self) -> int:
        """Among how many ranks of a host second shards are gathered; 0: there are none."""
        return 0 if self.host_ranks is None else self.host_ranks.ranks

    def make_room(self, params: Mapping[str, torch.Tensor], there: Collection[str] = ()) -> None:
        """Files for what rests in files; the parameters are known, and not installed yet. Collective.

        Args:
            there: parameters for whose rows construction has made room in files, on all ranks alike: whether a rank
                has any rows of a parameter does not decide whether it comes in here.

        Raises:
            StorageError: on all ranks, where one has no room.
        """

        def filed(kind: str) -> dict[str, Layout]:
            tiers = self._tiers.placed.tiers  # of what is trained from the start
            return {n: info.layout for n, info in self._params.items() if tiers.get((kind, n)) == "nvme"}

        if any(map(is_fake, params.values())):
            largest = max((layout.bytes_local() for layout in filed("grads").values()), default=0)
            self.planned_writes = PlannedWrites(largest, self._tiers.files_budget) if largest else None
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
        raise_together(self._group, f"room/{self._identity.title()}", "make room in nvme_dir", problem)

    def adopt_files(self, nvme: Nvme | None) -> None:
        """Go on with the tier in which construction has placed parameters already."""
        self._nvme = nvme or self._nvme

    def place_chunk(self, name: str, chunk: torch.Tensor) -> torch.Tensor:
        """Where the padded ``chunk`` of a parameter is to lie: in a file, on the host, or in memory that peers read.

        Where there is no room for it, peers go on to the next parameter's collective, and so does this rank: all are
        told at the end, by :meth:`check_placed`.
        """
        try:
            return self._place_chunk(name, chunk)
        except (ShardError, StorageError) as error:
            self._refused = self._refused or error
            return chunk

    def _place_chunk(self, name: str, chunk: torch.Tensor) -> torch.Tensor:
        layout, segment = self._params[name].layout, self.transport.segment
        if in_file(chunk):
            return chunk
        if self.files is not None and (region := self.files.place(name)) is not None:
            if not chunk.is_meta:
                self.files.first_use(name)
                region.fill(chunk)
                chunk = region.tensor
            return chunk
        if self._tiers.path("params", name):
            return self._on_host(chunk)
        if segment is None or not layout.sharded:
            return chunk
        segment.allocate(name, layout)
        if chunk.is_meta:
            return chunk
        return segment.back(name).view(layout.padded_shape).copy_(chunk)

    def check_placed(self) -> None:
        """All parameters are where they are to lie. Collective.

        Raises:
            ShardError: on all ranks, where one was refused the memory.
            StorageError: the same, where that was a file.
        """
        tiers = self._tiers.placed.tiers
        filed = any(kind == "params" and tier == "nvme" for (kind, _), tier in tiers.items())
        if filed or self.transport.segment is not None:
            key = f"memory/{self._identity.title()}"
            raise_together(self._group, key, "place its part of the model", self._refused)

    def bring_home(self, name: str, param: DTensor) -> None:
        """Move the rows of a parameter that peers read in place to where they do."""
        segment, layout = self.transport.segment, self._params[name].layout
        if segment is None or name not in segment.chunks:
            return
        local = param._local_tensor
        if local.is_meta or not local.numel() or local.data_ptr() == segment.chunks[name].data_ptr():
            return
        home = segment.back(name).copy_(blocking_transfers.flat_chunk(layout, local))
        param._local_tensor = home.view(layout.padded_shape)[: layout.rows(self._group.rank)]

    def place(self, name: str) -> torch.Tensor:
        """Memory on the compute device for this rank's padded chunk of a parameter that has none: zeros."""
        layout, segment = self._params[name].layout, self.transport.segment
        if self.files is not None and (region := self.files.place(name)) is not None:
            # A new file has zeros; to write them through the mapping would bring all of it to memory.
            return region.tensor if self.files.first_use(name) else region.tensor.zero_()
        if segment is not None and name in segment.chunks:
            return segment.back(name).zero_().view(layout.padded_shape)
        zeros = torch.zeros(layout.padded_shape, dtype=layout.dtype, device=self._tiers.rests_on(name))
        return self._on_host(zeros) if self._tiers.path("params", name) else zeros

    def _on_host(self, chunk: torch.Tensor) -> torch.Tensor:
        """The same in memory of the accelerator's host, pinned."""
        if self._group.device.type == "cpu" or chunk.is_meta:
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
            config = self._config
            if config.nvme_dir is None:
                raise ConfigError("the NVMe tier needs nvme_dir: give it to zero.shard")
            rank = self._group.everyone.rank
            self._nvme = Nvme(config.nvme_dir, rank, config.nvme_keep, config.nvme_checksums)
        return self._nvme


def _planned_hosts(group: Group, spec: HardwareSpec) -> dict[int, int]:
    """On which host each of the ranks is that are only planned for, one host after the other; all on one where nothing
    is known of hosts."""
    ranks = [rank for row in mesh_rows(group, True)[SHARD] for rank in row]
    return {rank: rank // (spec.devices_per_host or len(ranks)) for rank in ranks}
