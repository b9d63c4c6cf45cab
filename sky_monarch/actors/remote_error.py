"""Exceptions on their way between processes, with tracebacks that read like local ones."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from dataclasses import dataclass
from types import CodeType, TracebackType

from sky_monarch.actors import serial

__all__ = ["RemoteError", "RemoteExceptionError"]

_HERE = os.path.dirname(__file__)  # noqa: PTH120  (pathlib costs its import)
#: Frames kept of a traceback, from both ends.
_MOST_FRAMES = 64
#: Exceptions kept of a chain of causes.
_MOST_CAUSES = 8


class RemoteExceptionError(Exception):
    """Stands for an exception that could not be pickled; says what it said."""


@dataclass(slots=True)
class RemoteError:
    """What an endpoint raised, as it travels.

    Attributes:
        kind: Name of the exception's class.
        words: What it says.
        frames: ``(file, line, function, text of the line)`` from the outermost inwards, ours left out.
        body: The exception pickled; None where that was not possible.
        pid: Of the process where it was raised.
        host: Its host's name.
        cause: What it was raised from, or else while what was handled; None where nothing of the kind is shown.
        is_cause: Whether it was raised from that.
    """

    kind: str
    words: str
    frames: list[tuple[str, int, str, str]]
    body: bytes | None
    pid: int
    host: str
    cause: RemoteError | None = None
    is_cause: bool = False

    @classmethod
    def of(cls, error: BaseException, most: int = _MOST_CAUSES) -> RemoteError:
        """What is to travel of ``error``, and of ``most`` exceptions before it."""
        found = traceback.extract_tb(error.__traceback__)
        frames = [
            (frame.filename, frame.lineno or 1, frame.name, frame.line or "")
            for frame in found
            if not frame.filename.startswith(_HERE)
        ]
        if len(frames) > _MOST_FRAMES:
            frames = frames[: _MOST_FRAMES // 2] + frames[-_MOST_FRAMES // 2 :]
        try:
            body, buffers = serial.dumps(error)
            body = body if buffers is None else b""
            pickle.loads(body)  # noqa: S301  (an exception that takes other arguments than it keeps fails only here)
        except BaseException:  # noqa: BLE001  (whatever its own pickling raises: the caller waits for an answer)
            body = b""
        try:
            words = str(error)
        except BaseException:  # noqa: BLE001  (its own __str__)
            words = "(it cannot say what it is)"
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        cause = None if before is None or not most else cls.of(before, most - 1)
        is_cause = error.__cause__ is not None
        kind, host = type(error).__name__, socket.gethostname()
        return cls(kind, words, frames, body or None, os.getpid(), host, cause, is_cause)

    @property
    def where(self) -> str:
        """File and line of the innermost frame of the program."""
        return f"{self.frames[-1][0]}:{self.frames[-1][1]}" if self.frames else "unknown place"

    def exception(self) -> BaseException:
        """The exception, with a traceback of where it was raised."""
        error: object = None
        if self.body is not None:
            try:
                error = serial.loads(self.body)
            except Exception:  # noqa: BLE001  (its class is not importable here, or whatever its unpickling does)
                error = None
        if not isinstance(error, BaseException):
            error = RemoteExceptionError(f"{self.kind}: {self.words}")
        error.__traceback__ = _traceback(self.frames)
        if self.cause is not None:
            error.__context__ = self.cause.exception()
            error.__cause__ = error.__context__ if self.is_cause else None
            error.__suppress_context__ = self.is_cause
        return error


def _traceback(frames: list[tuple[str, int, str, str]]) -> TracebackType | None:
    """A traceback that shows these frames. Lines of files that are not here come from the other process."""
    import linecache

    rebuilt: TracebackType | None = None
    for file, line, name, text in reversed(frames):
        if text and not linecache.getline(file, line):
            lines = [*linecache.cache.get(file, (0, None, [], file))[2]]  # type: ignore[misc]
            lines.extend(["\n"] * (line - len(lines)))
            lines[line - 1] = text + "\n"
            linecache.cache[file] = (0, None, lines, file)
        try:
            exec(_code(file, line, name), {"__name__": "remote"})  # noqa: S102  (our own two words)
        except ZeroDivisionError as error:
            here = error.__traceback__
            assert here is not None and here.tb_next is not None  # noqa: PT018, S101
            frame = here.tb_next
            rebuilt = TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, line)
    return rebuilt


def _code(file: str, line: int, name: str) -> CodeType:
    return compile("\n" * (line - 1) + "1 / 0", file, "exec").replace(co_name=name, co_qualname=name)
