"""Resilient over gloo: what is cut are the TCP connections of the mesh."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torchft.process_group import ProcessGroupGloo

from sky_monarch.training.resilient import Mesh, Resilient

__all__ = ["MeshSockets", "ResilientGloo"]

Address = tuple[str, int]

# gloo tries each connection this often before it gives up (gloo/transport/tcp/pair.cc, measured: 5 x its
# timeout).
GLOO_CONNECT_TRIES = 5
# Under the quorum's own prefix of the rendezvous store: where each member listens.
_LISTENER_KEY = "sky_monarch/listener/{rank}"


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[tuple[socket.socket, int] | None]:
    """A duplicate of ``fd`` as a socket, with its inode; None where ``fd`` is no TCP socket.

    The duplicate pins what ``fd`` meant at this moment, whatever its owner does with the number meanwhile.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(copy)
        sock = socket.socket(fileno=copy) if stat.S_ISSOCK(status.st_mode) else None
    except OSError:
        sock = None
    if sock is None:
        os.close(copy)
        yield None
        return
    with sock:
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        yield (sock, status.st_ino) if is_tcp else None


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _open_fds() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208


def _listeners() -> dict[int, Address]:
    """Addresses of all listening TCP sockets of this process, by inode."""
    found: dict[int, Address] = {}
    for fd in _open_fds():
        with _borrowed(fd) as borrowed:
            if borrowed is not None and _is_listening(borrowed[0]):
                found[borrowed[1]] = borrowed[0].getsockname()[:2]
    return found


@dataclass
class MeshSockets:
    """The TCP connections of one gloo mesh.

    Attributes:
        quorum_id: The quorum that the mesh was made for.
        fds: File descriptors, each with the inode that it had: a number that was closed and given to
            something else is left alone.
    """

    quorum_id: int
    fds: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def find(cls, quorum_id: int, listeners: set[Address]) -> MeshSockets:
        """Every open connection with one end in ``listeners``, the addresses where the members' gloo listens.

        gloo's listening socket itself is never taken: shutting it down makes gloo's accept loop abort the
        process.
        """
        mesh = cls(quorum_id)
        for fd in _open_fds():
            with _borrowed(fd) as borrowed:
                if borrowed is None or _is_listening(borrowed[0]):
                    continue
                sock, inode = borrowed
                with contextlib.suppress(OSError):
                    if {sock.getsockname()[:2], sock.getpeername()[:2]} & listeners:
                        mesh.fds[fd] = inode
        return mesh

    def cut(self) -> int:
        """Shut every connection down, once; returns how many were open.

        Waiting operations of this process fail at once, and those of its neighbours when the FIN arrives.
        """
        with self._lock:
            fds, self.fds = self.fds, {}
        count = 0
        for fd, inode in fds.items():
            with _borrowed(fd) as borrowed:
                if borrowed is not None and borrowed[1] == inode:
                    with contextlib.suppress(OSError):
                        borrowed[0].shutdown(socket.SHUT_RDWR)
                        count += 1
        return count


def _published(store: dist.Store, rank: int) -> Address:
    """Where a member listens; waits until it has said so."""
    host, port = store.get(_LISTENER_KEY.format(rank=rank)).decode().split()
    return host, int(port)


class ResilientGloo(Resilient, ProcessGroupGloo):  # type: ignore[misc]  # torchft has no type information
    """TorchFT's gloo group, cut loose at once when a member dies.

    Args:
        address: Where gloo listens: a numeric address of this host. The host's name is never looked up.
        timeout: For one collective.
        connect_timeout: For one try of one connection of the rendezvous.
    """

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=4),
    ) -> None:
        super().__init__(
            timeout=timeout,
            connect_timeout=connect_timeout,
            rendezvous_limit=connect_timeout * (GLOO_CONNECT_TRIES + 1),
        )
        self._address = address

    def _leave(self, mesh: Mesh | None) -> None:
        if mesh is not None:
            mesh.cut()
        # gloo's destructor waits 10 ms for its loop (measured). Nobody has to wait for that but Python's exit.
        left, self._pg = [self._pg], None
        if left[0] is not None:
            threading.Thread(target=left.clear, name="gloo-destructor").start()

    def _connect(
        self, store: dist.Store, rank: int, world_size: int, quorum_id: int
    ) -> tuple[dist.ProcessGroup, MeshSockets]:
        gloo: Any = dist.ProcessGroupGloo
        before = _listeners()
        # Through a tunnel members are known by addresses that no interface has.
        interface = None if self.tunnel else os.environ.get("GLOO_SOCKET_IFNAME")
        device = (
            gloo.create_device(interface=interface)
            if interface
            else gloo.create_device(hostname=self._address)
        )
        own = [address for inode, address in _listeners().items() if inode not in before]
        if own:
            store.set(_LISTENER_KEY.format(rank=rank), f"{own[0][0]} {own[0][1]}")
        if self.tunnel is not None:
            # Waits for each, as gloo would a moment later: whoever dials has to have asked before.
            others = [peer for peer in range(world_size) if peer != rank]
            self.tunnel.reach("mesh", [":".join(map(str, _published(store, peer))) for peer in others])

        options = gloo._Options()
        options._devices = [device]
        options._timeout = self._connect_timeout
        options.global_ranks_in_group = self._global_ranks or []
        backend = gloo(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        backend._set_default_timeout(self._timeout)

        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        if torch.cuda.is_available():
            group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, backend)

        # Every member has published its listener before it connected, so nothing here waits. A member that
        # is no ResilientGloo publishes none; our connections *to* it then stay out of the cut, which loses
        # time, not safety.
        listeners = set(own)
        for peer in range(world_size):
            if peer != rank and store.check([_LISTENER_KEY.format(rank=peer)]):
                listeners.add(_published(store, peer))
        return group, MeshSockets.find(quorum_id, listeners)
