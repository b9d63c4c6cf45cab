"""Brings what ranks on other hosts print to the archive: asks their agents for it, a piece at a time.

The agents' own files are the buffer: a rank never waits for its output to travel, and what its agent has rotated away
before it was asked for is counted as gone. One question a host is under way at a time, and all together move no more
than a few MiB a second, so that neither the line to a host nor this process is ever taken up by output.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from sky_monarch.controller.archive import Archive
from sky_monarch.controller.questions import CHUNK_BYTES, Chunk, Process, Questions
from sky_monarch.errors import ChannelError

__all__ = ["Collector", "Origin", "slot_of"]

_log = structlog.get_logger()

_BYTES_PER_S = 8 << 20
_BURST_S = 0.05
_SOON_S, _LATER_S = 0.25, 2.0
_PER_PROCESS_S = 0.005
"""Two hundred questions a second at the most while nothing is printed, however many ranks there are."""
_CHUNKS_A_TURN = 16
"""Of one process, before the others of its host are asked for theirs."""
_OPEN = 8
"""Generations of a process that are asked for in one turn, the oldest first: one as a rule, two while one ends."""
_DISK_AGAIN_S = 5.0


class Origin(Protocol):
    """What the collector needs of the controller."""

    def processes_on(self, host: str) -> list[Process]:
        """Whose output is on a host, in order."""
        ...

    def generations(self, process: Process) -> tuple[int, ...]:
        """Generations of a process that began, in order."""
        ...

    def is_archived(self, process: Process) -> bool:
        """Whether its host is another one, which may be gone tomorrow."""
        ...


@dataclasses.dataclass(slots=True)
class _Follower:
    """Who follows one host.

    Attributes:
        stirred: Something ended there: its last words are asked for at once.
        whole_s: When the newest round began that left nothing.
        processes: How many it asks for.
    """

    task: asyncio.Task[None]
    stirred: asyncio.Event
    whole_s: float = -1.0
    processes: int = 0


@dataclasses.dataclass(slots=True)
class _Done:
    """Which generations of a process are over and here: all up to ``through``, and some above."""

    through: int
    above: set[int] = dataclasses.field(default_factory=set)

    def left(self, known: tuple[int, ...]) -> list[int]:
        return [one for one in known if one > self.through and one not in self.above]

    def add(self, generation: int, known: tuple[int, ...]) -> None:
        self.above.add(generation)
        for one in known:
            if one > self.through:
                if one not in self.above:
                    return
                self.above.discard(one)
                self.through = one


def slot_of(process: Process) -> str:
    """The folder of a process's output; of each host's ``setup`` its own."""
    if process.replica is None:
        return f"setup-{process.host}"
    return f"r{process.replica}-{process.rank}"


class Collector:
    """Keeps the archive up to date. Lives in the controller's event loop; files are a thread's.

    Args:
        archive: Where it goes.
        questions: To the agents.
        origin: The controller.
        notice: Tells of a rank whose output is dropped, once a rank.
        bytes_per_s: Of all hosts together.
    """

    def __init__(
        self,
        archive: Archive,
        questions: Questions,
        origin: Origin,
        *,
        notice: Callable[[Process, int], None],
        bytes_per_s: float = _BYTES_PER_S,
    ) -> None:
        self.archive = archive
        self._questions, self._origin, self._notice = questions, origin, notice
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._followers: dict[str, _Follower] = {}
        self._done: dict[str, _Done] = {}
        self._told: set[str] = set()
        # One thread: what it does is in order, and a disk that hangs holds nothing else.
        self._files = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive")

    # --- who reads it -------------------------------------------------------------------------------------

    async def read(self, process: Process, generation: int, offset: int, max_bytes: int) -> Chunk | None:
        """What is kept from ``offset`` on; None of a process of which nothing is kept here."""
        if not self._origin.is_archived(process):
            return None
        loop = asyncio.get_running_loop()
        read = self.archive.read
        kept = await loop.run_in_executor(self._files, read, slot_of(process), generation, offset, max_bytes)
        return Chunk(kept.offset, kept.data, eof=False)

    # --- who is followed ----------------------------------------------------------------------------------

    def connected(self, host: str) -> None:
        """A host's agent is there: what it has is brought here from now on."""
        self.disconnected(host)
        stirred = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._follow(host, stirred))
        self._followers[host] = _Follower(task, stirred)

    def disconnected(self, host: str) -> None:
        """It is gone."""
        if (follower := self._followers.pop(host, None)) is not None:
            follower.task.cancel()

    def stir(self, host: str) -> None:
        """Something ended on a host: ask at once."""
        if (follower := self._followers.get(host)) is not None:
            follower.stirred.set()

    def has_all(self, since_s: float, *, host: str | None = None) -> bool:
        """Whether all that was printed before ``since_s`` is here (by the loop's clock), where anybody has it still.

        Args:
            since_s: When.
            host: Of this one; None: of all.
        """
        late = [
            follower
            for name, follower in self._followers.items()
            if host in (None, name) and follower.whole_s < since_s
        ]
        for follower in late:
            follower.stirred.set()
        return not late

    def close(self) -> None:
        """Follow nobody any more, and write down what is gone."""
        for host in list(self._followers):
            self.disconnected(host)
        self._files.submit(self.archive.save)
        self._files.shutdown(wait=False)

    async def _follow(self, host: str, stirred: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        delay_s = _SOON_S
        while True:
            began_s, processes = loop.time(), list[Process]()
            moved, whole, pause_s = False, True, 0.0
            stirred.clear()
            try:
                processes = self._origin.processes_on(host)
                for process in processes:
                    more, rest = await self._advance(process)
                    moved, whole = moved or more, whole and not rest
            except ChannelError as error:
                _log.debug("output is asked for later", host=host, error=str(error))
                whole = False
            except OSError as error:
                _log.warning("output cannot be kept", error=str(error))
                whole, moved, pause_s = False, False, _DISK_AGAIN_S
            except Exception:  # noqa: BLE001  (a defect here must not be the end of who supervises the run)
                _log.exception("output cannot be collected", host=host)
                whole, moved, pause_s = False, False, _DISK_AGAIN_S
            if (follower := self._followers.get(host)) is not None:
                follower.processes = len(processes)
                follower.whole_s = began_s if whole else follower.whole_s
            if not whole and moved:
                continue  # it has more: the pace is kept by each piece
            delay_s = _SOON_S if moved else min(_LATER_S, delay_s * 2)
            if not moved:
                await loop.run_in_executor(self._files, self.archive.save)  # its errors pass
            if pause_s:
                await asyncio.sleep(pause_s)  # whoever stirs cannot make room on a disk
            try:
                every = sum(follower.processes for follower in self._followers.values())
                async with asyncio.timeout(max(delay_s, every * _PER_PROCESS_S)):
                    await stirred.wait()
            except TimeoutError:
                pass

    async def _advance(self, process: Process) -> tuple[bool, bool]:
        """Bring what one process has printed by now; whether that was anything, and whether there is more."""
        slot = slot_of(process)
        known = self._origin.generations(process)
        done = self._done.get(slot)
        if done is None:  # an earlier controller has brought what came before the newest that is here
            done = self._done[slot] = _Done(max(self.archive.generations(slot), default=1) - 1)
        moved, left = False, _CHUNKS_A_TURN
        wanted = done.left(known)
        for generation in wanted[:_OPEN]:
            while True:
                if not left:
                    return moved, True
                left -= 1
                offset = self.archive.end(slot, generation)
                chunk = await self._questions.ask(process, generation, offset, CHUNK_BYTES)
                if not chunk.data:
                    break
                moved = True
                await self._keep(process, generation, chunk)
                if chunk.eof:
                    break
            if chunk.eof and generation < known[-1]:
                done.add(generation, known)
        return moved, len(wanted) > _OPEN

    async def _keep(self, process: Process, generation: int, chunk: Chunk) -> None:
        loop, slot = asyncio.get_running_loop(), slot_of(process)
        append = self.archive.append
        await loop.run_in_executor(self._files, append, slot, generation, chunk.offset, chunk.data)
        gone = self.archive.dropped.get(slot, 0)
        if gone and slot not in self._told:
            self._told.add(slot)
            self._notice(process, gone)
        now_s = loop.time()
        self._free_s = max(self._free_s, now_s) + len(chunk.data) / self._bytes_per_s
        if self._free_s - now_s > _BURST_S:
            await asyncio.sleep(self._free_s - now_s)
