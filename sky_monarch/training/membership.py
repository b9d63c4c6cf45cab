"""How a rank joins: its group, the lighthouse, and TorchFT's Manager between them."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sky_monarch.errors import ConfigError
from sky_monarch.standby import is_held, wait_for_promotion
from sky_monarch.training.environment import LOCAL_ADDRESS, RankEnvironment
from sky_monarch.training.healing import StripedTransport
from sky_monarch.training.interfaces import check_interfaces
from sky_monarch.training.manager import SessionManager, quiet_torchft
from sky_monarch.training.process_group import ResilientGloo
from sky_monarch.training.resilient import Resilient
from sky_monarch.training.timeouts import Timeouts
from sky_monarch.training.transport import PrivateHTTPTransport
from sky_monarch.training.tunnel import Tunnel
from sky_monarch.training.warmup import warm_up

__all__ = ["inner_mesh", "join_group", "make_manager", "make_process_group"]


def make_process_group(env: RankEnvironment, timeouts: Timeouts, device: torch.device) -> Resilient:
    """The group that spans the replica groups, for gradients on ``device``: RCCL on accelerators, else gloo.

    Through a tunnel it is gloo, which copies what is on an accelerator to memory of the host: RCCL finds its ways by
    the network interfaces of hosts, and through a tunnel there are none.

    Raises:
        ConfigError: The environment names a network interface that is not there.
    """
    check_interfaces()
    timeout = timedelta(seconds=timeouts.collective_s)
    connect_timeout = timedelta(seconds=timeouts.rendezvous_s)
    if device.type == "cuda" and env.tunnel is None:  # what torch calls AMD's devices too
        from sky_monarch.training.rccl import ResilientRccl

        return ResilientRccl(timeout=timeout, connect_timeout=connect_timeout)
    group = ResilientGloo(address=env.address, timeout=timeout, connect_timeout=connect_timeout)
    group.tunnel = Tunnel(env.tunnel) if env.tunnel else None
    return group


def join_group(
    env: RankEnvironment, timeouts: Timeouts
) -> tuple[dist.ProcessGroup | None, tuple[str, int, object]]:
    """Join the ranks of this replica group.

    Returns:
        The process group of the group's ranks, None where this rank is alone; and the group's store as
        ``(host, port, what keeps it alive)``.

    Raises:
        ConfigError: The process has joined another group than that of its ranks.
    """
    if env.store is None:
        # Of a group of one: nobody else needs it to outlive the rank, and so no helper has to start.
        store = dist.TCPStore(env.address, 0, is_master=True, wait_for_workers=False)
        return None, (env.address, store.port, store)
    _meet_group(env, timeouts, "gloo")
    return dist.group.WORLD, (*env.store, None)


def inner_mesh(device_type: str | None = None, *, timeouts: Timeouts | None = None) -> DeviceMesh:
    """The ranks of this replica group, for ``fully_shard(model, mesh=inner_mesh())``, before the session.

    A standby that runs the script ahead (``recovery.standby_until: session``) waits here until it is needed,
    for until then it has nobody to meet: what stands above this line has then been done in advance.

    Args:
        device_type: As ``init_device_mesh`` names it; None for an accelerator where there is one.
        timeouts: Those of the session, where it gets some.

    Returns:
        A mesh of one dimension, ``"shard"``.

    Raises:
        ConfigError: The environment cannot be used, or the process has joined another group than that of its
            ranks.
    """
    if is_held():
        quiet_torchft()
        warm_up(RankEnvironment.read().address)
    wait_for_promotion()
    env = RankEnvironment.read()
    env.check_identity()
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
    _meet_group(env, Timeouts.derive(timeouts), backend)
    return init_device_mesh(device_type, (env.world_size,), mesh_dim_names=("shard",))


def _meet_group(env: RankEnvironment, timeouts: Timeouts, backend: str) -> None:
    """Make the ranks of this group torch's default process group, unless the recipe has done it."""
    if dist.is_initialized():
        if dist.get_world_size() != env.world_size:
            raise ConfigError(
                f"torch's default process group has {dist.get_world_size()} ranks, but this replica group "
                f"{env.world_size}",
                hint="init_process_group() without arguments meets the ranks of the group, and nobody else",
            )
        return
    limit = timedelta(seconds=timeouts.collective_s)
    if env.store is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    else:
        dist.init_process_group(
            backend, init_method="env://", rank=env.rank, world_size=env.world_size, timeout=limit
        )


def make_manager(
    env: RankEnvironment,
    timeouts: Timeouts,
    group: Resilient,
    store: tuple[str, int, object],
    undo: contextlib.ExitStack,
    device: torch.device,
) -> SessionManager:
    """Connect to the lighthouse; a process that runs alone gets one of its own.

    Args:
        env: This rank's place.
        timeouts: Validated.
        group: Spans the replica groups.
        store: From :func:`join_group`.
        undo: Gets what must be shut down at the end.
        device: Of the parameters.

    Raises:
        ConfigError: The lighthouse or the group's store cannot be reached.
    """
    lighthouse = env.lighthouse
    if lighthouse is None:
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind=f"{LOCAL_ADDRESS}:0", min_replicas=1, join_timeout_ms=100)
        undo.callback(server.shutdown)
        lighthouse = (
            f"http://{LOCAL_ADDRESS}:{server.address().rpartition(':')[2]}"  # it advertises the host's name
        )
    token = env.agent.token if env.agent is not None else _shared_secret(lighthouse)
    if group.tunnel is not None:
        undo.callback(group.tunnel.close)
    transport = _make_transport(env, timeouts, group, token, device)
    undo.callback(transport.shutdown, wait=False)
    try:
        manager = SessionManager(
            pg=group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=env.min_replicas,
            timeout=timedelta(seconds=timeouts.transfer_s),
            quorum_timeout=timedelta(seconds=timeouts.quorum_s),
            connect_timeout=timedelta(seconds=timeouts.dial_s),
            rank=env.rank,
            world_size=env.world_size,
            store_addr=store[0],
            store_port=store[1],
            lighthouse_addr=lighthouse,
            replica_id=env.replica_id,
            hostname=env.address,
            checkpoint_transport=transport,
            init_sync=False,
            quorum_retries=timeouts.quorum_retries,
        )
        manager.dial_through(group.tunnel)
    except (RuntimeError, TimeoutError) as error:
        raise ConfigError(f"cannot reach the lighthouse or the group's store: {error}") from error
    undo.callback(manager.shutdown)
    return manager


def _make_transport(
    env: RankEnvironment, timeouts: Timeouts, group: Resilient, token: str, device: torch.device
) -> Any:
    """How groups that heal get their state."""
    if env.healing == "striped":
        transport = StripedTransport(
            replica=env.replica,
            token=token,
            address=env.address,
            neighbours=group,
            tunnel=group.tunnel,
            device=device,
        )
        group.before_meeting = transport.meet
        return transport
    return PrivateHTTPTransport(
        replica=env.replica,
        token=token,
        address=env.address,
        timeout=timedelta(seconds=timeouts.transfer_s),
        tunnel=group.tunnel,
    )


def _shared_secret(lighthouse: str) -> str:
    """What all groups of a run know where no agent tells them a token.

    Our lighthouse's URL holds one (``r<replica>.g<generation>.<secret>@``, of which the rest differs from group
    to group); TorchFT's has none, and its address at least tells two runs apart.
    """
    who, _, place = urlsplit(lighthouse).netloc.rpartition("@")
    return who.split(".", 2)[-1] or place
