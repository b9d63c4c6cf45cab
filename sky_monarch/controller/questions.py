"""Questions to agents for what their processes have printed, and the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sky_monarch.errors import ChannelClosedError, ChannelTimeoutError

__all__ = ["CHUNK_BYTES", "Chunk", "Process", "Questions"]

CHUNK_BYTES = 64 * 1024
_ANSWER_S = 10.0


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


class Questions:
    """Asks agents for output, one answer a question.

    Args:
        send: Tells a host's agent something; False where it is not connected.
        asked_of: Whose agent is to be asked for a generation, and by which number it knows that; None where the
            agent that knew it is gone.
    """

    def __init__(
        self,
        send: Callable[[str, Mapping[str, Any]], bool],
        asked_of: Callable[[Process, int], tuple[str, int] | None],
    ) -> None:
        self._send, self._asked_of = send, asked_of
        self._waiting: dict[int, tuple[str, asyncio.Future[Chunk]]] = {}
        self._request = 0

    async def ask(self, process: Process, generation: int, offset: int, max_bytes: int) -> Chunk:
        """Ask for up to ``max_bytes`` from ``offset`` on; nothing follows where the agent that knew it is gone.

        Raises:
            ChannelClosedError: The host's agent is not connected.
            ChannelTimeoutError: It does not answer.
        """
        if (known := self._asked_of(process, generation)) is None:
            return Chunk(0, b"", eof=True)
        host, generation = known
        self._request += 1
        request = self._request
        answer: asyncio.Future[Chunk] = asyncio.get_running_loop().create_future()
        self._waiting[request] = (host, answer)
        slot = None if process.replica is None else {"replica": process.replica, "rank": process.rank}
        question = {
            "type": "read_log",
            "request": request,
            "slot": slot,
            "generation": generation,
            "offset": offset,
            "max_bytes": max_bytes,
        }
        try:
            if not self._send(host, question):
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
