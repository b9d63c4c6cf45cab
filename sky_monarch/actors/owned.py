"""The processes of one mesh, in the process that owns them: their ends, and who takes their places."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.care import stacks_file
from sky_monarch.actors.context import place_of
from sky_monarch.actors.failure import MeshFailure, describe_status
from sky_monarch.actors.future import VALUE
from sky_monarch.actors.remote_log import RemoteLog
from sky_monarch.actors.spares import Spares
from sky_monarch.actors.spawner import Proc
from sky_monarch.actors.standby import describe
from sky_monarch.errors import ActorError, SkyMonarchError, SupervisionError

if TYPE_CHECKING:
    from sky_monarch.actors.far_host import FarHost, Standby
    from sky_monarch.actors.region import Region
    from sky_monarch.actors.restarts import RestartPolicy
    from sky_monarch.actors.runtime import Runtime

__all__ = ["Owned", "Record"]

#: The end of a process is known so long after its connections have ended.
_DYING_S = 0.5


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
        standby: int = 0,
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.owner = owner
        self.policy = replace(policy) if policy is not None else None  # each mesh counts for itself
        self.records: list[Record] = []
        self.changed = threading.Condition()
        self.ends: dict[int, tuple[float, MeshFailure]] = {}
        self.replacing: set[int] = set()
        #: Of those the ones that were not told yet of the actors that are made again.
        self.untaught: set[int] = set()
        self.untold: list[tuple[int, Proc]] = []
        #: Ranks that were stopped; with the last one the mesh is.
        self.gone: set[int] = set()
        self.log = RemoteLog()
        hosts = Counter(os.path.dirname(address) for address in addresses)  # noqa: PTH120
        self.each = max(hosts.values())
        self.spares = Spares(runtime.spawner, name, standby if runtime.folder in hosts else 0)
        self.standby = standby
        self.described: list[str] = []
        places = map(runtime.attached.at, addresses)
        self.procs = [self._proc(rank, *at) for rank, at in enumerate(zip(addresses, places, strict=True))]
        runtime.attached.start(self.procs, (), self._standby())

    def _proc(self, rank: int, address: str, place: FarHost | None) -> Proc:
        name = f"{self.name}[{rank}]"
        proc = Proc(name, address, lambda proc: self._ended(rank, proc), log=self.log, place=place)
        proc.on_lost = self._host_lost
        return proc

    @property
    def stopped(self) -> bool:
        """Whether all of it was stopped."""
        return len(self.gone) == len(self.procs)

    def stop(self, ranks: list[int]) -> list[Proc]:
        """The ends of these processes are no failure from now on. Returns the processes."""
        with self.changed:
            self.gone.update(ranks)
        if self.stopped:
            self.end_spares()
            self.records.clear()  # arguments of constructors may be large
        return [self.procs[rank] for rank in ranks]

    def _ended(self, rank: int, proc: Proc) -> None:
        # A child of it may have inherited its sockets: then no end of file tells of its death.
        self.runtime.node.hang_up(proc.address, "the process has ended")
        self.log.flush()
        with self.changed:
            if rank in self.replacing:
                # Who replaces it is told by the call, unless it was there already.
                self.untold.append((rank, proc))
                return
        self._tell_end(rank, proc)

    def _tell_end(self, rank: int, proc: Proc) -> None:
        if rank in self.gone:
            for path in (proc.address, stacks_file(proc.address)):
                with contextlib.suppress(OSError):
                    os.unlink(path)  # noqa: PTH108
            return
        if not proc.wanted:
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
        self._report((rank,), proc, failure)

    def _host_lost(self, procs: list[Proc], reason: str) -> None:
        """One report for all of them: it is one thing that has happened."""
        lost = (rank for rank, proc in enumerate(self.procs) if proc in procs and proc.wanted)
        ranks = tuple(rank for rank in lost if rank not in self.gone)
        if not ranks:
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
        self._report(ranks, procs[0], failure)

    def _report(self, ranks: tuple[int, ...], proc: Proc, failure: MeshFailure) -> None:
        with self.changed:
            self.ends.update(dict.fromkeys(ranks, (time.monotonic(), failure)))
            self.changed.notify_all()
        if self.policy is None:
            self.runtime.tell_owner(self.owner, failure)
            return
        # Not here: this thread has to hear of the births that a replacement waits for.
        threading.Thread(
            target=self._apply, args=(ranks, proc, failure), name="sky-monarch-restart", daemon=True
        ).start()

    def _apply(self, ranks: tuple[int, ...], proc: Proc, failure: MeshFailure) -> None:
        assert self.policy is not None  # noqa: S101  (looked at by the only caller)
        if not self.policy.allows():
            limit = f"{self.policy.intensity} ends in {self.policy.window_s:g} s were dealt with already"
            self.runtime.tell_owner(self.owner, replace(failure, reason=f"{failure.reason}; {limit}"))
            return
        try:
            wanted = {one for rank in ranks for one in self.policy.ranks(rank, len(self.procs))}
            wanted -= self.gone
            self.respawn(sorted(wanted), 60.0, ended=(ranks[0], proc))
        except SkyMonarchError as error:
            reason = f"{failure.reason}; and could not be replaced: {error}"
            self.runtime.tell_owner(self.owner, replace(failure, reason=reason))

    def failure_of(self, rank: int, since: float, deadline: float) -> MeshFailure | None:
        """How the process of ``rank`` has ended; waits for that until ``deadline``.

        Args:
            rank: Among the processes.
            since: When it was called: an end before that was another process's, unless none has its place yet.
            deadline: Like ``since``, of `time.monotonic`.
        """
        with self.changed:
            while True:
                when, failure = self.ends.get(rank, (0.0, None))
                now = time.monotonic()
                if failure is not None and (when >= since or self.procs[rank].ended.is_set()):
                    return failure
                if now >= deadline:
                    return None
                self.changed.wait(deadline - now)

    def record(self, record: Record, cls: type[Any]) -> None:
        """Remember how actors of ``cls`` are made, for those who take the place of others."""
        self.records.append(record)
        if self.standby:
            described = describe([cls])
            self.described += described
            self.spares.expect(described)
            self.runtime.attached.tell(self.procs, "warm", self._reserve, self.standby, described)

    @property
    def _reserve(self) -> str:
        """Names what stands by for this mesh, among all that its owner has."""
        return f"{self.name}#{os.path.basename(self.procs[0].address)}"  # noqa: PTH119

    def _standby(self) -> Standby | None:
        return (self._reserve, self.standby, list(self.described)) if self.standby else None

    def end_spares(self) -> None:
        """No process has to stand by any more."""
        self.spares.close()
        if self.standby:
            self.runtime.attached.tell(self.procs, "cool", self._reserve)

    def respawn(
        self,
        ranks: list[int],
        limit_s: float,
        ended: tuple[int, Proc] | None = None,
        host: str | None = None,
    ) -> None:
        """Replace the processes of ``ranks``, alive or not, and all actors that were spawned there: all at once.

        Args:
            ranks: Each once.
            limit_s: Seconds, until the actors are made.
            ended: A rank and its process: nothing is done where that was replaced meanwhile.
            host: Folder of the host that has the place of one that is lost; None for any that have room.

        Raises:
            NoCapacityError: Their host is lost, and the others have no room for all of them.
            SupervisionError: It was stopped, a process did not end or an actor was not made within ``limit_s``.
        """
        end = time.monotonic() + limit_s
        self._claim(ranks, end)
        done = False
        try:
            with self.changed:
                if self.stopped:
                    raise SupervisionError(f"{self.name} was stopped", hint="spawn a new mesh of processes")
                self.gone.difference_update(ranks)
            if ended is None or self.procs[ended[0]] is ended[1]:
                self._replace(ranks, end, host)
            done = True
        finally:
            for rank, proc in self._release(ranks):
                if done and self.procs[rank] is proc:
                    self._tell_end(rank, proc)
            self.spares.fill_later()

    def _claim(self, ranks: list[int], end: float) -> None:
        """Wait until nobody else replaces any of ``ranks``, and have others wait."""
        with self.changed:
            while not self.replacing.isdisjoint(ranks):
                left = end - time.monotonic()
                if left <= 0:
                    busy = ", ".join(map(str, sorted(self.replacing.intersection(ranks))))
                    raise SupervisionError(
                        f"{self.name}: rank {busy} is still being replaced, since another call"
                    )
                self.changed.wait(left)
            self.replacing.update(ranks)
            self.untaught.update(ranks)

    def wait_told(self, rank: int, limit_s: float) -> None:
        """Wait until a process that is being put in the place of ``rank`` was told of its actors."""
        with self.changed:
            self.changed.wait_for(lambda: rank not in self.untaught, limit_s)

    def _release(self, ranks: list[int]) -> list[tuple[int, Proc]]:
        """Let others replace ``ranks``; returns those processes that have ended there meanwhile."""
        with self.changed:
            self.replacing.difference_update(ranks)
            self.untaught.difference_update(ranks)
            self.changed.notify_all()
            untold = [each for each in self.untold if each[0] in ranks]
            self.untold = [each for each in self.untold if each[0] not in ranks]
            return untold

    def _replace(self, ranks: list[int], end: float, host: str | None) -> None:
        self.runtime.attached.find_places([self.procs[rank] for rank in ranks], self.each, host, end)
        here = [rank for rank in ranks if self.procs[rank].place is None]
        spares = self.spares.take(len(here))
        # On other hosts nobody knows from here who stood by.
        suspects = here[: len(spares)] + [rank for rank in ranks if self.standby and rank not in here]
        try:
            self._put(ranks, spares, end)
        except SupervisionError:
            # One that stood by may have been dying when its place was found: then one is forked for that, once.
            if not any(self.procs[rank].ended.wait(_DYING_S) for rank in suspects):
                raise
            self._put(ranks, [], end)

    def _put(self, ranks: list[int], spares: list[Proc], end: float) -> None:
        old = [self.procs[rank] for rank in ranks]
        self.runtime.attached.check(old)
        for proc in old:
            proc.wanted = False
        self.runtime.attached.kill(old)
        for proc in old:
            if not proc.ended.wait(max(0.0, end - time.monotonic())):
                raise SupervisionError(f"{proc.name} (pid {proc.pid}) does not end")
        fresh = [self._proc(rank, proc.address, proc.place) for rank, proc in zip(ranks, old, strict=True)]
        for rank, proc in zip(ranks, fresh, strict=True):
            self.procs[rank] = proc
        self.runtime.attached.start(fresh, spares, self._standby())
        if self.stopped:
            # Meanwhile: whoever has stopped it knew of the processes before these.
            self.runtime.attached.kill(fresh)
            raise SupervisionError(f"{self.name} was stopped")
        self._make_again(ranks, end)

    def _make_again(self, ranks: list[int], end: float) -> None:
        from sky_monarch._core import ActorTargets

        making = []
        for record in list(self.records):
            extent = record.region.extent
            targets = [
                (self.procs[rank].address, place_of(position, extent))
                for position, rank in enumerate(record.region)
                if rank in ranks
            ]
            if targets:
                replies = self.runtime.node.call(ActorTargets(targets), 0, "spawn", record.body)
                making.append((record, replies))
        fresh = ActorTargets([(self.procs[rank].address, "") for rank in ranks])
        self.runtime.node.send(fresh, 0, "settled", *serial.dumps(None))
        with self.changed:
            self.untaught.difference_update(ranks)
            self.changed.notify_all()
        # Told all of them first: constructors run side by side, and may call one another's actors.
        for record, replies in making:
            if not replies.wait(max(0.0, end - time.monotonic())):
                raise SupervisionError(f"the actors of {record.name} were not made again in time")
            for _, kind, body, buffers in replies.take():
                if kind != VALUE:
                    why = body if kind < 0 else serial.loads(body, buffers).words
                    raise SupervisionError(f"an actor of {record.name} was not made again: {why}") from (
                        None if kind < 0 else ActorError(why)
                    )
