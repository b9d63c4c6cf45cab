"""Reads captured output through the agents: merged lines, or the exact bytes of one process.

Bounded memory: a stream holds one chunk of one process and the unfinished lines of those it follows, however
large the logs are. Nothing is read ahead of the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sky_monarch.controller.questions import CHUNK_BYTES, Chunk, Process, Questions
from sky_monarch.errors import ChannelError
from sky_monarch.launch.output import missing_text

__all__ = ["KeptOutput", "Line", "LogReader", "Source"]

MAX_LINE_BYTES = 1024 * 1024
"""Longer lines are passed on in pieces: nobody may make the controller hold them."""
_MIN_DELAY_S, _MAX_DELAY_S = 0.05, 0.25
_DELAY_PER_PROCESS_S = 0.002
_LATE_OUTPUT_S = 2.0
_KEEP_ALIVE_S = 5.0
_FAR = 2**62


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line end; with ``missing_bytes`` it stands for as many that are not kept any more."""

    process: Process
    generation: int
    text: str
    missing_bytes: int = 0

    def document(self) -> dict[str, Any]:
        """As the API shows it."""
        replica: int | str = "setup" if self.process.replica is None else self.process.replica
        found = {
            "replica": replica,
            "rank": self.process.rank,
            "generation": self.generation,
            "line": self.text,
        }
        return {**found, "missing_bytes": self.missing_bytes} if self.missing_bytes else found


class KeptOutput(Protocol):
    """What the reader needs of the archive."""

    async def read(self, process: Process, generation: int, offset: int, max_bytes: int) -> Chunk | None:
        """What is kept from ``offset`` on; None of a process of which nothing is kept here."""
        ...


class Source(Protocol):
    """What the reader needs of the controller."""

    def generations(self, process: Process) -> tuple[int, ...]:
        """Generations of a process that began, in order."""
        ...

    def ended(self) -> bool:
        """Whether the run is over."""
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

    def skip(self, to: int) -> list[Line]:
        """Go on behind a gap: what there was is not kept any more, and that is said."""
        missing, self.offset = to - self.offset, to
        return [*self.flush(), Line(self.process, self.generation, missing_text(missing), missing)]

    def _line(self, data: bytes) -> Line:
        return Line(self.process, self.generation, data.decode(errors="replace"))


class LogReader:
    """Asks agents for output and hands it on.

    Args:
        source: The controller.
        questions: To the agents.
        kept: What is kept here of other hosts; None where there are none.
    """

    def __init__(self, source: Source, questions: Questions, kept: KeptOutput | None = None) -> None:
        self._source, self._questions, self._kept = source, questions, kept
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

    async def read(self, process: Process, generation: int, offset: int, max_bytes: int) -> Chunk:
        """Up to ``max_bytes`` from ``offset`` on: from what is kept here, else from the host.

        Raises:
            ChannelClosedError: The host's agent is not connected, and nothing of it is kept here.
            ChannelTimeoutError: It does not answer.
        """
        kept = None
        if self._kept is not None:
            kept = await self._kept.read(process, generation, offset, max_bytes)
        if kept is not None and kept.offset == offset and len(kept.data) == max_bytes:
            return kept
        try:
            found = await self._questions.ask(process, generation, offset, max_bytes)
        except ChannelError:
            if kept is None:
                raise
            return kept
        if kept is None or (found.data and (not kept.data or found.offset <= kept.offset)):
            return found
        if kept.data:
            return kept
        return Chunk(max(found.offset, kept.offset), b"", found.eof)

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
                if tail is not None:
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
        if not cursor.enter(self._source):
            return
        while True:
            chunk = await self.read(cursor.process, cursor.generation, cursor.offset, CHUNK_BYTES)
            if chunk.data:
                cursor.silent_since_s = None
                if chunk.offset > cursor.offset:
                    yield cursor.skip(chunk.offset)
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
