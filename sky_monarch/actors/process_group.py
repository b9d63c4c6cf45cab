"""torch's process group and device meshes of the ranks of a mesh. Used inside of their processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sky_monarch.actors.elastic import member
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from sky_monarch.actors.extent import Extent

__all__ = ["device_mesh", "init_process_group"]

_TIMEOUT_S = 300.0
_lock = threading.Lock()
#: The set-up that torch's default group was made in, and how often one was made in it.
_made_in: str | None = None
_times: dict[str, Iterator[int]] = {}


def init_process_group(backend: str | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
    """Meet the other ranks: torch's default process group, of the current set-up of the mesh.

    On every rank. Where the group is there already nothing happens; where it belongs to an earlier set-up, as after
    ``respawn`` and another ``setup_torch_elastic_env``, it is left and formed anew. What was made of the old one, such
    as device meshes, DTensors and wrapped models, does not outlive it.

    Args:
        backend: Of torch; by default gloo, and RCCL or NCCL beside it where there are devices.
        timeout_s: Seconds, of the meeting and of each collective.

    Raises:
        ConfigError: This process is no rank of a mesh yet, or somebody else has made a default group.
        torch.distributed.DistError: A rank did not come in time.
    """
    global _made_in
    found = member()
    import torch
    from torch import distributed as dist

    with _lock:
        key = found.membership.key
        if dist.is_initialized():
            if _made_in == key:
                return
            if _made_in is None:
                raise ConfigError(
                    "torch's default process group was made by something else than init_process_group of the actor API",
                    hint="leave it first: torch.distributed.destroy_process_group()",
                )
            _leave(dist)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(found.membership.environment(found.rank)["LOCAL_RANK"] or 0))
            backend = backend or "cpu:gloo,cuda:nccl"
        limit = timedelta(seconds=timeout_s)
        address, port = found.membership.master
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)
        # A group that is made for the second time must not find what the first has left.
        times = next(_times.setdefault(key, itertools.count()))
        dist.init_process_group(
            backend or "gloo",
            store=dist.PrefixStore(f"{key}/{times}", store),
            rank=found.rank,
            world_size=len(found.membership.hosts),
            timeout=limit,
        )
        _made_in = key


def _leave(dist: Any) -> None:
    """Leave a group some of whose ranks may be dead."""
    if "nccl" in str(dist.get_backend_config()):
        dist.distributed_c10d._abort_process_group()  # destroy would wait for the dead
    else:
        dist.destroy_process_group()


def device_mesh(device_type: str | None = None) -> Any:
    """Torch's ``DeviceMesh`` of the mesh that this process is a rank of, with its dimensions and their names.

    On every rank; meets the others first where that is not done.

    Args:
        device_type: ``cpu`` or ``cuda``; by default that of the accelerators, where there are some.

    Raises:
        ConfigError: As of :func:`init_process_group`.
    """
    found = member().membership
    return mesh_of(found.extent, found.addresses, device_type)


def mesh_of(extent: Extent, addresses: tuple[str, ...], device_type: str | None) -> Any:
    """The same in another shape, or with the processes in another order.

    Raises:
        ConfigError: These are not the processes that were set up together.
    """
    found = member().membership
    if sorted(addresses) != sorted(found.addresses):
        raise ConfigError(
            f"this mesh has {len(addresses)} processes, but this one is a rank of a world of {len(found.addresses)}"
            f"{'' if len(addresses) != len(found.addresses) else ' others'}",
            hint="setup_torch_elastic_env(mesh) of just this mesh",
        )
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    init_process_group()
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    names = tuple(extent.labels) or ("rank",)
    sizes = tuple(extent.sizes) or (1,)
    at = {address: rank for rank, address in enumerate(found.addresses)}
    ranks = [at[address] for address in addresses]
    if ranks == sorted(ranks):
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return DeviceMesh(device_type, torch.tensor(ranks).reshape(sizes), mesh_dim_names=names)
