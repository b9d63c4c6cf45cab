"""A gloo process group that a dead peer cannot stall.

TorchFT's own has three ways to hang for its whole timeout when a member dies; each has its answer here.

* A death does not travel round gloo's ring: the neighbours of the dead member fail, everybody else waits
  for a neighbour that has given up. So the first failed operation shuts down this member's sockets
  (:meth:`ResilientGloo.cut`), which fails the neighbours, which cut theirs.
* A peer that hangs, or whose host vanished without a reset, fails nothing at all. So whoever learns of it
  calls :meth:`ResilientGloo.declare_dead`.
* A member that dies in the rendezvous leaves the others connecting to it. So the rendezvous runs in a
  thread of its own, which is abandoned when the death is declared, and has a short timeout that the
  finished group does not inherit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torchft.process_group import ProcessGroupGloo, create_store_client

__all__ = ["MeshSockets", "ResilientGloo"]

logger = logging.getLogger(__name__)

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


class _Rendezvous:
    """One attempt to connect to the members of a quorum, in a thread that may be left behind."""

    def __init__(self, quorum_id: int) -> None:
        self.quorum_id = quorum_id
        self.settled = threading.Event()
        self.result: tuple[dist.ProcessGroup, MeshSockets] | None = None
        self.error: BaseException | None = None


class ResilientGloo(ProcessGroupGloo):  # type: ignore[misc]  # torchft has no type information
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
        super().__init__(timeout=timeout)
        self._address = address
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._dead_up_to = -1
        self._mesh: MeshSockets | None = None
        self._rendezvous: _Rendezvous | None = None

    def declare_dead(self, quorum_id: int) -> None:
        """A member of every quorum up to ``quorum_id`` is dead: nothing of those can succeed any more.

        May be called from any thread, late and repeatedly: newer quorums are not touched.
        """
        with self._lock:
            self._dead_up_to = max(self._dead_up_to, quorum_id)
            mesh, rendezvous = self._mesh, self._rendezvous
        if mesh is not None and mesh.quorum_id <= quorum_id:
            self._cut(mesh, "a member was declared dead")
        if rendezvous is not None and rendezvous.quorum_id <= quorum_id:
            rendezvous.settled.set()

    def cut(self) -> None:
        """Fail every operation under way, here and (through the closed connections) at the peers."""
        with self._lock:
            mesh = self._mesh
        if mesh is not None:
            self._cut(mesh, "asked to")

    def _cut(self, mesh: MeshSockets, why: str) -> None:
        started = time.monotonic()
        count = mesh.cut()
        if count:
            took_ms = (time.monotonic() - started) * 1e3
            logger.info("cut %d connections of quorum %d in %.1f ms: %s", count, mesh.quorum_id, took_ms, why)

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Leave the old mesh and join that of a new quorum; called by the Manager.

        Raises:
            RuntimeError: A member was declared dead, or could not be reached in time. The Manager turns it
                into a vote against the step.
        """
        self._replica_id, self._rank, self._quorum_id = replica_id, rank, quorum_id
        self._group_rank, self._group_world_size, self._global_ranks = (
            group_rank,
            group_world_size,
            global_ranks,
        )
        attempt = _Rendezvous(-1 if quorum_id is None else quorum_id)
        with self._lock:
            self._mesh, self._rendezvous = None, attempt
            dead_up_to = self._dead_up_to
        self.abort(errored=False)
        if 0 <= attempt.quorum_id <= dead_up_to:
            raise RuntimeError(f"quorum {quorum_id} has a dead member")

        threading.Thread(
            target=self._meet,
            args=(attempt, store_addr, rank, world_size),
            name=f"rendezvous-{quorum_id}",
            daemon=True,
        ).start()
        limit_s = self._connect_timeout.total_seconds() * (GLOO_CONNECT_TRIES + 1)
        in_time = attempt.settled.wait(limit_s)
        with self._lock:
            self._rendezvous = None
            result, error = attempt.result, attempt.error
            died = 0 <= attempt.quorum_id <= self._dead_up_to
            if result is not None and not died:
                self._pg, self._mesh = result
                return
        if died:
            raise RuntimeError(f"the rendezvous of quorum {quorum_id} was abandoned: a member died in it")
        if not in_time:
            raise RuntimeError(f"the rendezvous of quorum {quorum_id} was abandoned after {limit_s:.0f} s")
        raise RuntimeError(f"the rendezvous of quorum {quorum_id} failed: {error}") from error

    def _meet(self, attempt: _Rendezvous, store_addr: str, rank: int, world_size: int) -> None:
        """Body of the rendezvous thread."""
        try:
            store = create_store_client(store_addr, timeout=self._connect_timeout)
            attempt.result = self._connect(store, rank, world_size, attempt.quorum_id)
        except BaseException as error:  # noqa: BLE001  # crosses threads: configure() raises it again
            attempt.error = error
        attempt.settled.set()

    def _connect(
        self, store: dist.Store, rank: int, world_size: int, quorum_id: int
    ) -> tuple[dist.ProcessGroup, MeshSockets]:
        gloo: Any = dist.ProcessGroupGloo
        before = _listeners()
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        device = (
            gloo.create_device(interface=interface)
            if interface
            else gloo.create_device(hostname=self._address)
        )
        own = [address for inode, address in _listeners().items() if inode not in before]
        if own:
            store.set(_LISTENER_KEY.format(rank=rank), f"{own[0][0]} {own[0][1]}")

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
            key = _LISTENER_KEY.format(rank=peer)
            if peer != rank and store.check([key]):
                host, port = store.get(key).decode().split()
                listeners.add((host, int(port)))
        return group, MeshSockets.find(quorum_id, listeners)

    def _wrap_work(self, work: dist.Work, opts: object) -> dist.Work:  # noqa: ARG002
        """Every operation, once failed, cuts the mesh that it ran on."""
        with self._lock:
            mesh = self._mesh
        if mesh is not None:

            def settled(future: torch.futures.Future[Any]) -> None:
                try:
                    future.value()
                except Exception as error:  # noqa: BLE001  # whatever it was, the mesh is unusable
                    self._cut(mesh, f"an operation failed: {str(error).splitlines()[0]}")

            work.get_future().add_done_callback(settled)
        return work
