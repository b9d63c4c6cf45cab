"""The processes of one mesh, in the process that owns them: their ends, and who takes their places."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sky_monarch.actors import serial
from sky_monarch.actors.context import place_of
from sky_monarch.actors.failure import MeshFailure, describe_status
from sky_monarch.actors.future import VALUE
from sky_monarch.actors.remote_log import RemoteLog
from sky_monarch.actors.spawner import Proc
from sky_monarch.errors import ActorError, SkyMonarchError, SupervisionError

if TYPE_CHECKING:
    from sky_monarch.actors.region import Region
    from sky_monarch.actors.restarts import RestartPolicy
    from sky_monarch.actors.runtime import Runtime

__all__ = ["Owned", "Record"]

#: An end is told of for so long to those whose calls it has cut off.
_RECENT_S = 5.0


@dataclass(frozen=True, slots=True)
class Record:
    """How the actors of one mesh were made, to make them again.

    Attributes:
        name: Of their mesh.
        actor_id: Their number.
        body: Of the message that makes them.
        region: Where, among the processes.
    """

    name: str
    actor_id: int
    body: bytes
    region: Region


class Owned:
    """Processes that this one has started together."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        addresses: tuple[str, ...],
        owner: tuple[str, int],
        policy: RestartPolicy | None,
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.owner = owner
        self.policy = replace(policy) if policy is not None else None  # each mesh counts for itself
        self.records: list[Record] = []
        self.changed = threading.Condition()
        self.ends: dict[int, tuple[float, MeshFailure]] = {}
        self.replacing = threading.Lock()
        self.stopped = False
        self.log = RemoteLog()
        self.procs = [self._proc(rank, address) for rank, address in enumerate(addresses)]
        runtime.attached.start(self.procs)

    def _proc(self, rank: int, address: str) -> Proc:
        name = f"{self.name}[{rank}]"
        proc = Proc(name, address, lambda proc: self._ended(rank, proc), log=self.log)
        proc.on_lost = self._host_lost
        return proc

    def _ended(self, rank: int, proc: Proc) -> None:
        # A child of it may have inherited its sockets: then no end of file tells of its death.
        self.runtime.node.hang_up(proc.address, "the process has ended")
        self.log.flush()
        if not proc.wanted or self.stopped:
            return
        status = proc.status if proc.status is not None else -1
        failure = MeshFailure(
            mesh_name=self.name,
            actors=tuple(record.name for record in self.records if rank in record.region),
            rank=rank,
            host=proc.host or self.runtime.host,
            pid=proc.pid or 0,
            reason=describe_status(status) if status >= 0 else "lost with the process that started it",
            last_lines=tuple(proc.lines),
        )
        self._tell((rank,), failure)

    def _host_lost(self, procs: list[Proc], reason: str) -> None:
        """One report for all of them: it is one thing that has happened."""
        ranks = tuple(rank for rank, proc in enumerate(self.procs) if proc in procs and proc.wanted)
        if self.stopped or not ranks:
            return
        failure = MeshFailure(
            mesh_name=self.name,
            actors=tuple(record.name for record in self.records if any(r in record.region for r in ranks)),
            rank=ranks[0],
            ranks=ranks,
            host=procs[0].host,
            pid=0,
            reason=reason,
        )
        self._tell(ranks, failure)

    def _tell(self, ranks: tuple[int, ...], failure: MeshFailure) -> None:
        with self.changed:
            self.ends.update(dict.fromkeys(ranks, (time.monotonic(), failure)))
            self.changed.notify_all()
        rank = ranks[0]
        if self.policy is None:
            self.runtime.tell_owner(self.owner, failure)
            return
        # Not here: this thread has to hear of the births that a replacement waits for.
        threading.Thread(
            target=self._apply, args=(rank, failure), name="sky-monarch-restart", daemon=True
        ).start()

    def _apply(self, rank: int, failure: MeshFailure) -> None:
        assert self.policy is not None  # noqa: S101  (looked at by the only caller)
        if not self.policy.allows():
            limit = f"{self.policy.intensity} ends in {self.policy.window_s:g} s were dealt with already"
            self.runtime.tell_owner(self.owner, replace(failure, reason=f"{failure.reason}; {limit}"))
            return
        try:
            self.respawn(self.policy.ranks(rank, len(self.procs)), 60.0)
        except SkyMonarchError as error:
            reason = f"{failure.reason}; and could not be replaced: {error}"
            self.runtime.tell_owner(self.owner, replace(failure, reason=reason))

    def failure_of(self, rank: int, deadline: float) -> MeshFailure | None:
        """How the process of ``rank`` has ended a moment ago; waits for that until ``deadline``."""
        with self.changed:
            while True:
                when, failure = self.ends.get(rank, (0.0, None))
                now = time.monotonic()
                if failure is not None and (self.procs[rank].ended.is_set() or now - when < _RECENT_S):
                    return failure
                if now >= deadline:
                    return None
                self.changed.wait(deadline - now)

    def respawn(self, ranks: list[int], limit_s: float) -> None:
        """Replace the processes of ``ranks``, alive or not, and all actors that were spawned there.

        Raises:
            SupervisionError: It was stopped, a process did not end or an actor was not made within ``limit_s``.
        """
        end = time.monotonic() + limit_s
        with self.replacing:
            if self.stopped:
                raise SupervisionError(f"{self.name} was stopped", hint="spawn a new mesh of processes")
            old = [self.procs[rank] for rank in ranks]
            self.runtime.attached.check(old)
            for proc in old:
                proc.wanted = False
            self.runtime.attached.kill(old)
            for proc in old:
                if not proc.ended.wait(max(0.0, end - time.monotonic())):
                    raise SupervisionError(f"{proc.name} (pid {proc.pid}) does not end")
            fresh = [self._proc(rank, self.procs[rank].address) for rank in ranks]
            for rank, proc in zip(ranks, fresh, strict=True):
                self.procs[rank] = proc
            self.runtime.attached.start(fresh)
            for record in self.records:
                self._make_again(record, ranks, end)

    def _make_again(self, record: Record, ranks: list[int], end: float) -> None:
        from sky_monarch._core import ActorTargets

        extent = record.region.extent
        targets = [
            (self.procs[rank].address, place_of(position, extent))
            for position, rank in enumerate(record.region)
            if rank in ranks
        ]
        if not targets:
            return
        replies = self.runtime.node.call(ActorTargets(targets), 0, "spawn", record.body)
        if not replies.wait(max(0.0, end - time.monotonic())):
            raise SupervisionError(f"the actors of {record.name} were not made again in time")
        for _, kind, body, buffers in replies.take():
            if kind != VALUE:
                why = body if kind < 0 else serial.loads(body, buffers).words
                raise SupervisionError(f"an actor of {record.name} was not made again: {why}") from (
                    None if kind < 0 else ActorError(why)
                )
