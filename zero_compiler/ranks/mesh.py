"""From a DeviceMesh to the ranks of a sharded model: which dimension partitions, and which replicates."""

from __future__ import annotations

import copyreg
import dataclasses
import os
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ShardError
from .call_handshake import begin
from .failure_broadcast import fail_later
from .group import Group, group_timeout_s, link_to

SHARD, REPLICATE, TENSOR = "shard", "replicate", "tensor"


def default_device() -> torch.device:
    """The current accelerator, else CPU; with an index where the device has one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# Long: each way in which a mesh and a device do not fit has its own sentence.
def make_group(
    mesh: DeviceMesh | None, device: torch.device | str | None, tensor: DeviceMesh | None = None
) -> Group:
    """Group of ``mesh``; by default one dimension over the default process group, or one rank without one.

    Collective over the ranks of a mesh of two dimensions.

    Args:
        tensor: the mesh over which tensor parallelism has placed parameters. ``mesh`` holds it as one of its
            dimensions, or is another dimension of the same mesh.

    Raises:
        ShardError: the mesh does not say how to place parameters, or needs a process group that does not exist.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ShardError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}; make one with "
            "init_device_mesh, or leave it out to shard over all ranks"
        )
    if device is None:
        dev = default_device()
        if mesh is not None and mesh.device_type != dev.type:
            dev = torch.device(mesh.device_type)
        if mesh is None and dev.type != "cpu" and dist.is_initialized() and not _backend_serves(dev.type):
            dev = torch.device("cpu")
    else:
        try:
            dev = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ShardError(
                f'device must be one of torch, such as "cpu" or "cuda", not {device!r}; leave it out for the current '
                "accelerator"
            ) from error
        here = torch.accelerator.current_accelerator(check_available=True)
        if dev.type not in ("cpu", here.type if here is not None else "cpu"):
            raise ShardError(
                f"device={str(device)!r} cannot be computed on here, where the accelerator is "
                f"{here.type if here is not None else 'none'}; leave it out for that, or give 'cpu'"
            )
        if dev.type != "cpu" and dev.index is None:
            dev = torch.device(dev.type, torch.accelerator.current_device_index())
    if mesh is None:
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ShardError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but there is no process group; "
                    "call torch.distributed.init_process_group before zero.shard"
                )
            return Group(bare_mesh(dev.type, [0]), None, 0, 1, dev)
        mesh = _default_mesh(dev.type)
    tensor_name = tensor.mesh_dim_names[0] if tensor is not None and tensor.mesh_dim_names else None
    if tensor is not None and mesh.ndim == 1:
        mesh = _both(mesh, tensor)
    roles = roles_of(mesh, tensor_name)
    if mesh.ndim == 1:
        return _along(mesh, 0, dev)
    sharded = dataclasses.replace(_along(mesh, roles.index(SHARD), dev), roles=roles, whole=_whole(mesh, dev))
    if TENSOR in roles:
        assert mesh.mesh_dim_names is not None
        return dataclasses.replace(
            sharded, tensor=_along(mesh[mesh.mesh_dim_names[roles.index(TENSOR)]], 0, dev)
        )
    across = _along(mesh, roles.index(REPLICATE), dev)
    return dataclasses.replace(sharded, across=across if across.world > 1 else None)


def ranks_of(mesh: DeviceMesh | None) -> Group | None:
    """All ranks of ``mesh``, by default of the default process group; None where there are no others, or only a
    collective could say."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if isinstance(mesh, DeviceMesh) and mesh.size() < dist.get_world_size():
        return _along(mesh, 0, torch.device(mesh.device_type)) if mesh.ndim == 1 else None
    device = default_device().type
    device = device if _backend_serves(device) else "cpu"
    return _along(_default_mesh(device), 0, torch.device(device))


def bare_mesh(
    device: str, ranks: torch.Tensor | list[int], names: tuple[str, ...] | None = None, rank: int = 0
) -> DeviceMesh:
    """A mesh with no process group behind it.

    DTensor remembers the meshes that it has met, and its results may carry another one that is equal. So all that
    have no process group are made here.
    """
    mesh = DeviceMesh(device, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    # Dynamo reads this member of every mesh it meets in a graph; without a backend torch leaves it out.
    if not hasattr(mesh, "_dim_group_names"):
        mesh._dim_group_names = []
    return mesh


def _both(mesh: DeviceMesh, tensor: DeviceMesh) -> DeviceMesh:
    """The mesh of two dimensions of which ``mesh`` and ``tensor`` are one each; ``mesh`` where there is none."""
    root = mesh._get_root_mesh()
    names = [*(mesh.mesh_dim_names or ()), *(tensor.mesh_dim_names or ())]
    known = root.mesh_dim_names or ()
    if root != tensor._get_root_mesh() or len(set(names)) < 2 or not set(names) <= set(known):
        return mesh
    return root[tuple(name for name in known if name in names)]


def roles_of(mesh: DeviceMesh, tensor: str | None = None) -> tuple[str, ...]:
    """What each dimension of a mesh is for.

    Args:
        tensor: the dimension over which there are parameters already, whatever its name says.

    One dimension shards. Of two, a name with "shard" or "replicate" in it says so, and then the other is the other
    one. "tp" and names with "tensor" in them are for tensor parallelism, and then the other shards. Where no name says,
    the first replicates and the second shards, as with FSDP2.

    Raises:
        ShardError: the mesh has more dimensions, or two whose names do not fit together.
    """
    if mesh.ndim == 1:
        return (SHARD,)
    if mesh.ndim > 2:
        raise ShardError(
            f"mesh must have one or two dimensions, not {mesh.ndim}; pass mesh['replicate', 'shard'] with the names "
            "of the two to place parameters on"
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise ShardError(
            "a mesh of two dimensions must name them, so that it says which one shards: "
            'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
        )
    said = [TENSOR if name == tensor else _role_in(name) for name in names]
    if None not in said and SHARD not in said or said == [SHARD, SHARD]:
        raise ShardError(
            f"mesh dimensions {names[0]!r} and {names[1]!r} say {said[0]!r} and {said[1]!r}; one of two must shard, "
            'and the other replicate or be tensor-parallel, as in ("replicate", "shard") or ("dp", "tp")'
        )
    if said == [None, None]:
        return (REPLICATE, SHARD)
    # What is said of one says it of the other.
    other = {SHARD: REPLICATE, REPLICATE: SHARD, TENSOR: SHARD}
    return (said[0] or other[said[1] or ""], said[1] or other[said[0] or ""])


def _role_in(name: str) -> str | None:
    name = name.lower()
    if "tensor" in name or "tp" in name.split("_"):
        return TENSOR
    return next((role for role in (SHARD, REPLICATE) if role in name), None)


def _along(mesh: DeviceMesh, dim: int, device: torch.device) -> Group:
    """The ranks along one dimension of a mesh."""
    return Group(mesh, link_to(mesh.get_group(dim)), mesh.get_local_rank(dim), mesh.size(dim), device)


def _whole(mesh: DeviceMesh, device: torch.device) -> Group:
    """All ranks of a mesh, over one process group: the default one where it has no others."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    pg: Any = dist.group.WORLD
    if len(ranks) < dist.get_world_size():
        _await_all(mesh, device)
        pg = group_over(ranks, group_timeout_s(_along(mesh, 0, device)))
    return Group(mesh, link_to(pg), ranks.index(dist.get_rank()), len(ranks), device)


def _await_all(mesh: DeviceMesh, device: torch.device) -> None:
    """All ranks of a mesh are here, and about to make a process group, which would wait for one that is gone.

    Those along each dimension meet in turn; who has missed one there tells those along the next.

    Raises:
        TransferError: a rank is gone, or did not come within the timeout of the process group.
        RankMismatchError: a rank is in another call, or has missed one.
    """
    along = [_along(mesh, dim, device) for dim in range(mesh.ndim)]
    for dim, group in enumerate(along):
        try:
            begin(group, _MAKES)
        except BaseException as error:
            for other in along[dim + 1 :]:
                fail_later(other, error, f"begin the {_MAKES}")
            raise


_MAKES = "making of the process group of a mesh"
# Process groups over some ranks of the job that were made here, and how many there have been over the same ranks.
_groups: weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = weakref.WeakValueDictionary()
_count: Counter[tuple[int, ...]] = Counter()


def group_over(ranks: list[int], timeout_s: float) -> dist.ProcessGroup:
    """A process group over ``ranks``, which alone enter this; the one that was made before, while it lasts.

    ``dist.new_group(ranks, use_local_synchronization=True)`` would wait for ever where these ranks are in different
    numbers of other groups: torch makes the name by which they find each other out of that number. So the name is ours.
    """
    from torch.distributed import distributed_c10d as c10d

    key = tuple(ranks)
    known = _groups.get(key)
    if known is not None and known in c10d._world.pg_map:
        return known
    _count[key] += 1
    name: Any = f"zero.{'.'.join(map(str, ranks))}.{_count[key]}"
    default = c10d._get_default_group()
    backend, store = c10d._world.pg_map[default]
    made: dist.ProcessGroup
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        c10d.Backend(backend),
        store,
        name,
        timeout=timedelta(seconds=timeout_s),
        device_id=default.bound_device_id,
    )
    c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    _groups[key] = made
    return made


def _backend_serves(device_type: str) -> bool:
    config = dist.get_backend_config()
    return device_type in str(config)


def _default_mesh(device_type: str) -> DeviceMesh:
    # from_group makes no new communicator: the mesh is the default group itself.
    return DeviceMesh.from_group(dist.group.WORLD, device_type)  # type: ignore[arg-type]


def find_again(mesh: DeviceMesh, roles: tuple[str, ...], rank: int, world: int, device: str) -> Group:
    """The group of a model on a mesh of two dimensions that was pickled, in the process that loads it. Collective.

    Raises:
        ShardError: there is no process group, or the file holds the shards of another rank.
    """
    ranks = sorted(mesh.mesh.flatten().tolist())
    here = dist.get_rank() if dist.is_available() and dist.is_initialized() else None
    if here is None or here not in ranks or ranks.index(here) != rank:
        found = "there is no process group" if here is None else f"is loaded on rank {here} of the job"
        raise ShardError(
            f"this sharded model was pickled on rank {rank} of {world} of a mesh, and {found}: make the same mesh "
            "before loading, and every rank loads what it saved itself"
        )
    tensor = (
        mesh[mesh.mesh_dim_names[roles.index(TENSOR)]] if TENSOR in roles and mesh.mesh_dim_names else None
    )
    return make_group(mesh, device, tensor)


def _find_again(mesh: DeviceMesh, has_pg: bool, rank: int, world: int, device: str) -> Group:
    """The group of a pickled model, in the process that loads it.

    Raises:
        ShardError: the file holds the shards of another rank, or of a job of another size.
    """
    other_way = (
        "; to go to another number of ranks, save model.state_dict() with torch.distributed.checkpoint and load it "
        "into a model that was sharded there"
    )
    there = dist.is_available() and dist.is_initialized()
    if not has_pg:
        if there and dist.get_world_size() > 1:
            raise ShardError(
                "this sharded model was pickled in one process without a process group, and is loaded on rank "
                f"{dist.get_rank()} of {dist.get_world_size()}{other_way}"
            )
        return Group(mesh, None, rank, world, torch.device(device))
    if not there:
        raise ShardError(
            f"this sharded model was pickled on rank {rank} of {world}, and there is no process group: call "
            f"torch.distributed.init_process_group with {world} ranks before loading{other_way}"
        )
    try:
        pg = mesh.get_group()
        ranks = dist.get_process_group_ranks(pg)
        here = dist.get_group_rank(pg, dist.get_rank())
    except (RuntimeError, ValueError, KeyError):
        raise ShardError(
            f"this sharded model was pickled on rank {rank} of {world} of a mesh that this job does not have: make "
            "the same device mesh before loading"
        ) from None
    if here != rank or ranks != mesh.mesh.flatten().tolist():
        raise ShardError(
            f"this sharded model was pickled on rank {rank} of {world}, and is loaded on rank {here} of {len(ranks)}: "
            f"every rank loads what it saved itself{other_way}"
        )
    return Group(mesh, link_to(pg), rank, world, torch.device(device))


def _reduce(group: Group) -> tuple[Callable[..., Group], tuple[object, ...]]:
    """A pickled group is found again in the process that loads it: ranks and links are not part of a model's value."""
    if group.mesh.ndim > 1:
        return find_again, (
            group.mesh,
            group.roles,
            group.everyone.rank,
            group.everyone.world,
            str(group.device),
        )
    return _find_again, (group.mesh, group.link is not None, group.rank, group.world, str(group.device))


copyreg.pickle(Group, _reduce)
