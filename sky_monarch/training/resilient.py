"""A process group that a dead peer cannot stall, whatever carries its bytes.

TorchFT's own have three ways to hang for their whole timeout when a member dies; each has its answer here.

* A death does not reach every member: the neighbours of the dead one fail, everybody else waits for a
  neighbour that has given up. So the first failed operation cuts this member loose (:meth:`Resilient.cut`),
  which fails the neighbours, which cut themselves loose.
* A peer that hangs, or whose host vanished without a reset, fails nothing at all. So whoever learns of it
  calls :meth:`Resilient.declare_dead`.
* A member that dies in the rendezvous leaves the others connecting to it. So the rendezvous runs in a
  thread of its own, which is abandoned when the death is declared, and has a short timeout that the
  finished group does not inherit.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torchft.process_group import ProcessGroupWrapper, create_store_client

from sky_monarch.training.tunnel import Tunnel

__all__ = ["Mesh", "Resilient"]

logger = logging.getLogger(__name__)

# Under the quorum's own prefix of the rendezvous store: what each member gives to those that heal.
_DONOR_KEY = "sky_monarch/donor/{rank}"


class Mesh(Protocol):
    """What connects the members of one quorum.

    Attributes:
        quorum_id: The quorum that it was made for.
    """

    quorum_id: int

    def cut(self) -> int:
        """Fail whatever is under way on it, once; returns how much was open. From any thread, repeatedly."""


class _Rendezvous:
    """One attempt to connect to the members of a quorum, in a thread that may be left behind."""

    def __init__(self, quorum_id: int) -> None:
        self.quorum_id = quorum_id
        self.word: str | None = None  # what the others are told
        self.store: dist.Store | None = None
        self.settled = threading.Event()  # by itself, or from outside
        self.settled_by_itself = self.abandoned = False
        self.result: tuple[dist.ProcessGroup, Mesh] | None = None
        self.error: BaseException | None = None


class Resilient(ProcessGroupWrapper):  # type: ignore[misc]  # torchft has no type information
    """The part of a resilient group that does not depend on the transport.

    Args:
        timeout: For one collective.
        connect_timeout: For one try of the rendezvous store.
        rendezvous_limit: After it a rendezvous is abandoned.

    Attributes:
        before_meeting: Called with the id of each quorum before its members meet; what it returns they can read.
        tunnel: The way to members on other hosts, where these do not reach each other by themselves.
    """

    def __init__(
        self, *, timeout: timedelta, connect_timeout: timedelta, rendezvous_limit: timedelta
    ) -> None:
        super().__init__(timeout=timeout)
        self._connect_timeout = connect_timeout
        self._rendezvous_limit_s = rendezvous_limit.total_seconds()
        self._lock = threading.Lock()
        self._dead_up_to = -1
        self._mesh: Mesh | None = None
        self._rendezvous: _Rendezvous | None = None
        self._abandoned = 0
        self._global_ranks: list[int] | None = None
        self._group_world_size: int | None = None
        self._met: tuple[dist.Store, int] | None = None
        self.before_meeting: Callable[[int], str | None] | None = None
        self.tunnel: Tunnel | None = None

    @abstractmethod
    def _connect(
        self, store: dist.Store, rank: int, world_size: int, quorum_id: int
    ) -> tuple[dist.ProcessGroup, Mesh]:
        """Meet the members of a quorum; in a thread that may have been abandoned meanwhile."""

    def _leave(self, mesh: Mesh | None) -> None:  # noqa: ARG002
        """Let go of the old mesh, None before the first."""
        self.abort(errored=False)

    @property
    def members(self) -> list[int]:
        """Replica groups of the newest quorum, ascending, those that heal included."""
        size = self._group_world_size or 1
        return sorted(place // size for place in self._global_ranks or [])

    def donors(self) -> list[str]:
        """What the members of the newest quorum told each other when they met.

        Raises:
            RuntimeError: Its store is gone.
        """
        if self._met is None:
            return []
        store, world_size = self._met
        keys = [_DONOR_KEY.format(rank=rank) for rank in range(world_size)]
        return [store.get(key).decode() for key in keys if store.check([key])]

    @property
    def abandoned(self) -> int:
        """Rendezvous that were abandoned and still hang."""
        with self._lock:
            return self._abandoned

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

    def _cut(self, mesh: Mesh, why: str) -> None:
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
        self._met = None
        if self.before_meeting is not None:
            attempt.word = self.before_meeting(attempt.quorum_id)
        with self._lock:
            left, self._mesh, self._rendezvous = self._mesh, None, attempt
            dead_up_to = self._dead_up_to
        self._leave(left)
        if 0 <= attempt.quorum_id <= dead_up_to:
            raise RuntimeError(f"quorum {quorum_id} has a dead member")

        threading.Thread(
            target=self._meet,
            args=(attempt, store_addr, rank, world_size),
            name=f"rendezvous-{quorum_id}",
            daemon=True,
        ).start()
        limit_s = self._rendezvous_limit_s
        in_time = attempt.settled.wait(limit_s)
        with self._lock:
            self._rendezvous = None
            result, error = attempt.result, attempt.error
            died = 0 <= attempt.quorum_id <= self._dead_up_to
            if result is not None and not died:
                self._pg, self._mesh = result
                self._met = None if attempt.store is None else (attempt.store, world_size)
                return
            attempt.abandoned = True
            self._abandoned += not attempt.settled_by_itself
        if result is not None:
            result[1].cut()
        if died:
            raise RuntimeError(f"the rendezvous of quorum {quorum_id} was abandoned: a member died in it")
        if not in_time:
            raise RuntimeError(f"the rendezvous of quorum {quorum_id} was abandoned after {limit_s:.0f} s")
        raise RuntimeError(f"the rendezvous of quorum {quorum_id} failed: {error}") from error

    def _meet(self, attempt: _Rendezvous, store_addr: str, rank: int, world_size: int) -> None:
        """Body of the rendezvous thread."""
        try:
            if self.tunnel is not None:
                self.tunnel.reach("store", [store_addr.partition("/")[0]])
            store = create_store_client(store_addr, timeout=self._connect_timeout)
            if attempt.word is not None:
                # Before it connects: who has met it can read it.
                store.set(_DONOR_KEY.format(rank=rank), attempt.word)
            attempt.store = store
            attempt.result = self._connect(store, rank, world_size, attempt.quorum_id)
        except BaseException as error:  # noqa: BLE001  # crosses threads: configure() raises it again
            attempt.error = error
        with self._lock:
            attempt.settled_by_itself = True
            late = attempt.abandoned
            self._abandoned -= late
        if late and attempt.result is not None:
            attempt.result[1].cut()  # nobody is there to use it
        attempt.settled.set()

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
