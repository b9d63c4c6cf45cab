"""Reads captured output through the agents: merged lines, or the exact bytes of one process.

Bounded memory: a stream holds one chunk of one process and the unfinished lines of those it follows, however
large the logs are. Nothing is read ahead of the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sky_monarch.errors import ChannelClosedError, ChannelTimeoutError

__all__ = ["Chunk", "Line", "LogReader", "Process", "Source"]

CHUNK_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024 * 1024
"""Longer lines are passed on in pieces: nobody may make the controller hold them."""
_ANSWER_S = 10.0
_MIN_DELAY_S, _MAX_DELAY_S = 0.05, 0.25
_DELAY_PER_PROCESS_S = 0.002
_LATE_OUTPUT_S = 2.0
_KEEP_ALIVE_S = 5.0
_FAR = 2**62


@dataclass(frozen=True, slots=True)
class Process:
    """Whose output: a slot, or a host's ``setup`` where ``replica`` is None."""

    host: str
    replica: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes at an offset; ``eof`` where none can follow."""

    offset: int
    data: bytes
    eof: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line end."""

    process: Process
    generation: int
    text: str

    def document(self) -> dict[str, Any]:
        """As the API shows it."""
        replica: int | str = "setup" if self.process.replica is None else self.process.replica
        return {
            "replica": replica,
            "rank": self.process.rank,
            "generation": self.generation,
            "line": self.text,
        }


class Source(Protocol):
    """What the reader needs of the controller."""

    def send(self, host: str, command: Mapping[str, Any]) -> bool:
        """Tell a host's agent something; False where it is not connected."""
        ...

    def generations(self, process: Process) -> tuple[int, ...]:
        """Generations of a process that began, in order."""
        ...

    def ended(self) -> bool:
        """Whether the run is over."""
        ...

    def host_of(self, process: Process) -> str:
        """Where a process is by now: a group may go on elsewhere."""
        ...

    def awaited(self, host: str) -> bool:
        """Whether a host is provisioned and its agent is not there: another one may come."""
        ...


@dataclass(slots=True)
class _Cursor:
    """Where a stream is in the output of one process."""

    process: Process
    only: int | None
    generation: int = 0  # 0: none entered yet
    offset: int = 0
    rest: bytearray = field(default_factory=bytearray)
    silent_since_s: float | None = None

    def generations(self, source: Source) -> tuple[int, ...]:
        known = source.generations(self.process)
        return known if self.only is None else tuple(number for number in known if number == self.only)

    def enter(self, source: Source) -> bool:
        """Go to the first generation, where there is one yet."""
        if not self.generation:
            known = self.generations(source)
            if not known:
                return False
            self.generation = known[0]
        return True

    def leave(self, source: Source) -> bool:
        """Go to the next generation; False where there is none yet."""
        newer = [number for number in self.generations(source) if number > self.generation]
        if newer:
            self.generation, self.offset, self.silent_since_s = newer[0], 0, None
        return bool(newer)

    def lines(self, data: bytes) -> list[Line]:
        """The lines that ``data`` completes."""
        self.rest += data
        *whole, rest = bytes(self.rest).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            whole, rest = [*whole, rest], b""
        self.rest = bytearray(rest)
        return [self._line(text) for text in whole]

    def flush(self) -> list[Line]:
        """The line that has no end."""
        rest, self.rest = bytes(self.rest), bytearray()
        return [self._line(rest)] if rest else []

    def _line(self, data: bytes) -> Line:
        return Line(self.process, self.generation, data.decode(errors="replace"))


class LogReader:
    """Asks agents for output and hands it on.

    Args:
        source: The controller.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._waiting: dict[int, tuple[str, asyncio.Future[Chunk]]] = {}
        self._request = 0
        self._streams = 0

    @property
    def streams(self) -> int:
        """Streams under way."""
        return self._streams

    @contextmanager
    def _counted(self) -> Any:
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    # --- questions and answers ----------------------------------------------------------------------------

    async def read(self, process: Process, generation: int, offset: int, max_bytes: int) -> Chunk:
        """Ask for up to ``max_bytes`` from ``offset`` on.

        Raises:
            ChannelClosedError: The host's agent is not connected.
            ChannelTimeoutError: It does not answer.
        """
        self._request += 1
        request = self._request
        answer: asyncio.Future[Chunk] = asyncio.get_running_loop().create_future()
        host = self._source.host_of(process)
        self._waiting[request] = (host, answer)
        slot = None if process.replica is None else {"replica": process.replica, "rank": process.rank}
        try:
            asked = self._source.send(
                host,
                {
                    "type": "read_log",
                    "request": request,
                    "slot": slot,
                    "generation": generation,
                    "offset": offset,
                    "max_bytes": max_bytes,
                },
            )
            if not asked:
                raise ChannelClosedError(f"the agent of host {host} is not connected")
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError as error:
            raise ChannelTimeoutError(f"the agent of host {host} does not answer") from error
        finally:
            del self._waiting[request]

    def answered(self, host: str, report: Mapping[str, Any]) -> None:
        """Take an answer; one that nobody waits for is dropped."""
        asked, answer = self._waiting.get(report["request"], (None, None))
        if asked == host and answer is not None and not answer.done():
            answer.set_result(Chunk(report["offset"], report["data"], report["eof"]))

    def disconnected(self, host: str) -> None:
        """Fail the questions that this host cannot answer any more."""
        for asked, answer in list(self._waiting.values()):
            if asked == host and not answer.done():
                answer.set_exception(ChannelClosedError(f"the agent of host {host} is gone"))

    # --- streams ------------------------------------------------------------------------------------------

    async def raw(self, process: Process, generation: int | None) -> AsyncIterator[bytes]:
        """The exact bytes written so far, oldest first."""
        with self._counted():
            for number in _Cursor(process, generation).generations(self._source):
                offset = 0
                while True:
                    chunk = await self.read(process, number, offset, CHUNK_BYTES)
                    if chunk.data:
                        offset = chunk.offset + len(chunk.data)
                        yield chunk.data
                    if chunk.eof or not chunk.data:
                        break

    async def lines(
        self, processes: list[Process], *, generation: int | None, tail: int | None, follow: bool
    ) -> AsyncIterator[list[Line]]:
        """Lines, process by process; with ``follow`` as they come, until the run has ended.

        A stream that follows yields an empty list, a sign of life, every few seconds in which nothing came.

        Args:
            processes: Whose.
            generation: Only this one; None: all.
            tail: Begin with the last so many lines of each process; None: with the first.
            follow: Go on with what comes.
        """
        with self._counted():
            cursors = [_Cursor(process, generation) for process in processes]
            for cursor in cursors:
                if tail is not None and not self._source.awaited(self._source.host_of(cursor.process)):
                    await self._seek_tail(cursor, tail)
                async for lines in self._advance(cursor, follow=follow):
                    yield lines
            delay_s = _MIN_DELAY_S
            loop = asyncio.get_running_loop()
            spoke_s = loop.time()
            while follow:
                # Read before the loop looks at the cursors: what came before the end must not be missed.
                over = self._source.ended()
                moved = False
                for cursor in cursors:
                    async for lines in self._advance(cursor, follow=not over):
                        moved = True
                        yield lines
                if over:
                    break
                now_s = loop.time()
                if moved:
                    spoke_s = now_s
                elif now_s - spoke_s >= _KEEP_ALIVE_S:
                    spoke_s = now_s
                    yield []
                floor_s = len(cursors) * _DELAY_PER_PROCESS_S
                delay_s = _MIN_DELAY_S if moved else min(_MAX_DELAY_S, delay_s * 2)
                await asyncio.sleep(max(delay_s, floor_s))
            for cursor in cursors:
                if rest := cursor.flush():
                    yield rest

    async def _advance(self, cursor: _Cursor, *, follow: bool) -> AsyncIterator[list[Line]]:
        """Hand on what one process has written by now."""
        host = self._source.host_of(cursor.process)
        if self._source.awaited(host) or not cursor.enter(self._source):
            return
        while True:
            try:
                chunk = await self.read(cursor.process, cursor.generation, cursor.offset, CHUNK_BYTES)
            except ChannelClosedError:
                if self._source.awaited(host):
                    return  # a lost host takes its output along, and nobody else's
                raise
            if chunk.data:
                cursor.silent_since_s = None
                cursor.offset = chunk.offset + len(chunk.data)
                if lines := cursor.lines(chunk.data):
                    yield lines
                if not chunk.eof:
                    continue
            elif follow and not chunk.eof and not self._given_up_on(cursor):
                return
            if not any(number > cursor.generation for number in cursor.generations(self._source)):
                return
            if rest := cursor.flush():
                yield rest
            cursor.leave(self._source)

    def _given_up_on(self, cursor: _Cursor) -> bool:
        """Whether a generation that has a successor was silent for so long that nothing more comes of it."""
        if not any(number > cursor.generation for number in cursor.generations(self._source)):
            return False
        now_s = asyncio.get_running_loop().time()
        if cursor.silent_since_s is None:
            cursor.silent_since_s = now_s
        return now_s - cursor.silent_since_s > _LATE_OUTPUT_S

    async def _seek_tail(self, cursor: _Cursor, lines: int) -> None:
        """Put the cursor before the last ``lines`` lines, reading backwards."""
        for generation in reversed(cursor.generations(self._source)):
            end = await self._end(cursor.process, generation)
            cursor.generation, cursor.offset = generation, end
            if lines == 0:
                return
            position, at_end = end, True
            while position > 0:
                size = min(CHUNK_BYTES, position)
                chunk = await self.read(cursor.process, generation, position - size, size)
                data = chunk.data[: max(0, position - chunk.offset)]
                if not data or chunk.offset > position - size:
                    # The older part was rotated away: what is left counts as it is.
                    position = chunk.offset if data else position
                    lines, found = _count_back(data, lines, at_end=at_end)
                    cursor.offset = position if found is None else chunk.offset + found
                    if found is not None:
                        return
                    break
                lines, found = _count_back(data, lines, at_end=at_end)
                if found is not None:
                    cursor.offset = chunk.offset + found
                    return
                position, at_end = chunk.offset, False
                cursor.offset = position
            if end > 0:
                lines -= 1  # the first line of a generation has no newline before it
            if lines <= 0:
                return

    async def _end(self, process: Process, generation: int) -> int:
        """Size of the output: the agent answers a question past the end with the end."""
        chunk = await self.read(process, generation, _FAR, 1)
        return chunk.offset + len(chunk.data)


def _count_back(data: bytes, lines: int, *, at_end: bool) -> tuple[int, int | None]:
    """Look for the newline before the last ``lines`` lines of ``data``.

    Returns:
        How many lines are still missing, and where the wanted lines begin (None: not in here).
    """
    stop = len(data) - 1 if at_end and data.endswith(b"\n") else len(data)
    while lines > 0:
        stop = data.rfind(b"\n", 0, stop)
        if stop < 0:
            return lines, None
        lines -= 1
    return 0, stop + 1
