"""What the processes of a run have printed: where it is, who is asked for it, and what is kept of it here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sky_monarch.controller import model
from sky_monarch.controller.agents import Agents
from sky_monarch.controller.archive import Archive
from sky_monarch.controller.archive_stream import tar_of
from sky_monarch.controller.collecting import Collector, slot_of
from sky_monarch.controller.logs import LogReader
from sky_monarch.controller.memory import Memory
from sky_monarch.controller.plans import Plans
from sky_monarch.controller.questions import Process, Questions
from sky_monarch.controller.settings import Settings
from sky_monarch.controller.turn import LAST_READ

__all__ = ["Outputs"]

_HOLD_S = 15.0
"""A host that is to go is kept for so long at the most, once its time is over, until its output is here."""
_STIRS = ("rank_exited", "generation_ended", "setup_finished", "host_leaving", "hung")


class Outputs:
    """Knows whose output is where. Lives in the controller's event loop.

    Args:
        settings: Of the controller.
        plans: Says how much is kept, and which ranks a host has.
        agents: Who is connected.
        memory: What the controller knows now.
        ended: Whether the run is over.
        append: Journals a row.

    Attributes:
        reader: Serves it.
        questions: To the agents.
    """

    def __init__(
        self,
        settings: Settings,
        plans: Plans,
        agents: Agents,
        *,
        memory: Callable[[], Memory],
        ended: Callable[[], bool],
        append: Callable[[dict[str, Any]], None],
    ) -> None:
        self._plans, self._agents, self._memory = plans, agents, memory
        self._ended, self._append = ended, append
        self.questions = Questions(agents.send, self._asked_of)
        self._collector: Collector | None = None
        if settings.provisioned:
            own = (mine for name, mine in settings.hosts.items() if name not in settings.provisioned)
            archive = Archive(
                settings.run_dir,
                limit_bytes=plans.archive_bytes,
                foreign={replica for mine in own for replica in mine},
            )
            self._collector = Collector(archive, self.questions, self, notice=self._notice)
        self.reader = LogReader(self, self.questions, self._collector)
        self._held: dict[str, float] = {}

    def close(self) -> None:
        """Ask nobody any more."""
        if self._collector is not None:
            self._collector.close()

    # --- what happens -------------------------------------------------------------------------------------

    def connected(self, host: str) -> None:
        """A host's agent is there."""
        if self._collector is not None and self._is_provisioned(host):
            self._collector.connected(host)

    def disconnected(self, host: str) -> None:
        """It is gone."""
        self.questions.disconnected(host)
        if self._collector is not None:
            self._collector.disconnected(host)

    def happened(self, host: str, event: Mapping[str, Any]) -> None:
        """An agent told an event: the last words of what ended are fetched at once."""
        if self._collector is not None and event.get("event") in _STIRS:
            self._collector.stir(host)

    def holds(self, timer: str) -> bool:
        """Whether the end of a timer is to wait a moment, since hosts go then whose output is not here yet."""
        if self._collector is None or not timer.startswith(LAST_READ):
            return False
        now_s = asyncio.get_running_loop().time()
        since_s = self._held.setdefault(timer, now_s)
        _, _, host = timer.partition(":")
        if now_s - since_s < _HOLD_S and not self._collector.has_all(since_s, host=host or None):
            return True
        del self._held[timer]
        return False

    def _notice(self, process: Process, gone: int) -> None:
        what = f"rank {process.rank} of replica group {process.replica}"
        if process.replica is None:
            what = f"`setup` on host {process.host}"
        message = (
            f"{what} has printed more than is kept, of it {gone} bytes are gone by now; `status --json` counts them "
            "(`output`), `logs.archive_mib` of the job is the limit here, `logs.segments` that of its host"
        )
        self._append({"event": "notice", "replica": process.replica, "message": message})

    # --- whose it is --------------------------------------------------------------------------------------

    @property
    def _state(self) -> model.State:
        return self._memory().state

    def _is_provisioned(self, host: str) -> bool:
        return host in self._state.places and self._state.host(host).provisioned

    def processes(self, replica: int | None, rank: int | None, *, setup: bool) -> list[Process]:
        """Whose output matches; empty where there is no such slot."""
        if setup:
            hosts = self._state.hosts if self._plans.has_setup and rank is None else ()
            return [Process(host.name, None, None) for host in hosts if host.replicas or host.provisioned]
        return [
            Process(host.name, number, local)
            for host in self._state.hosts
            for number in host.replicas
            for local in self._plans.ranks_on(host.name)
            if replica in (None, number) and rank in (None, local)
        ]

    def processes_on(self, host: str) -> list[Process]:
        """Whose output is on a host, in order."""
        setup = [Process(host, None, None)] if self._plans.has_setup else []
        ranks = self._plans.ranks_on(host)
        return setup + [
            process
            for replica in self._state.host(host).replicas
            for process in (Process(host, replica, rank) for rank in ranks)
            if self.host_of(process) == host
        ]

    def host_of(self, process: Process) -> str:
        """Where a process is by now."""
        if process.replica is None or (group := self._state.groups[process.replica]).span is not None:
            return process.host
        return group.host

    def is_archived(self, process: Process) -> bool:
        """Whether its host is another one, which may be gone tomorrow."""
        return self._is_provisioned(self.host_of(process))

    def generations(self, process: Process) -> tuple[int, ...]:
        """Generations of a process that began, in order. ``setup`` has one for each attempt at its host."""
        if process.replica is not None:
            return self._memory().book.generations(process.replica)
        if self._collector is None or not self._is_provisioned(process.host):
            return (1,)
        kept = self._collector.archive.generations(slot_of(process))
        return tuple(sorted({*kept, self._state.host(process.host).attempt}))

    def _asked_of(self, process: Process, generation: int) -> tuple[str, int] | None:
        if process.replica is not None or not self._is_provisioned(process.host):
            return self.host_of(process), generation
        return (process.host, 1) if generation == self._state.host(process.host).attempt else None

    def ended(self) -> bool:
        """Whether the run is over."""
        return self._ended()

    # --- what is kept -------------------------------------------------------------------------------------

    def facts(self) -> dict[str, int] | None:
        """How much is kept here and how much is gone; None where there are no other hosts."""
        if self._collector is None:
            return None
        archive = self._collector.archive
        return {"kept_bytes": archive.kept_bytes, "dropped_bytes": archive.dropped_bytes}

    async def tar(self, max_bytes: int) -> AsyncIterator[bytes]:
        """The newest of what is kept, as a tar file; an empty one where nothing is."""
        files = (
            [] if self._collector is None else await asyncio.to_thread(self._collector.archive.newest_first)
        )
        async for piece in tar_of(files, max_bytes):
            yield piece
