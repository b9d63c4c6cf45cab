"""What the processes of a mesh print, on its way to the program's stderr: each line says where it comes from.

On request lines that differ in numbers only are shown once in a window, with how many there were.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sky_monarch.errors import ConfigError

__all__ = ["ATTACH", "RemoteLog"]

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
#: A line that says so is for the user at once: a process waits for a debugger.
ATTACH = "attach with: sky-monarch debug "
#: Different lines that a window keeps; with one more it ends early.
_MOST_KINDS = 1000


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


@dataclass(slots=True)
class _Kind:
    """Lines of one window that differ in numbers only."""

    source: str
    first: str
    count: int = 1


class RemoteLog:
    """The lines of one mesh of processes.

    Args:
        write: Where the lines go.
    """

    def __init__(self, write: Callable[[str], None] = _write) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._streams = True
        self._window_s: float | None = None
        self._kinds: dict[str, _Kind] = {}
        self._timer: threading.Timer | None = None

    def configure(self, stream_to_client: bool, window_s: float | None) -> None:
        """Say what becomes of lines from now on.

        Raises:
            ConfigError: ``window_s`` is no length of time, or there is nothing to aggregate.
        """
        if window_s is not None and not window_s > 0:
            raise ConfigError(
                f"aggregate_window_sec is {window_s!r}", hint="a number of seconds above 0, or None"
            )
        if window_s is not None and not stream_to_client:
            raise ConfigError(
                "aggregate_window_sec is for lines that are streamed",
                hint="leave it out, or stream_to_client=True",
            )
        self.flush()
        with self._lock:
            self._streams, self._window_s = stream_to_client, window_s

    def hear(self, source: str, text: str) -> None:
        """Whole lines of ``source``, as ``procs[3]``."""
        if self._streams and self._window_s is None:
            self._write("".join(f"[{source}] {line}" for line in text.splitlines(keepends=True)))
            return
        with self._lock:
            for line in text.splitlines():
                if ATTACH in line:
                    self._write(f"[{source}] {line}\n")
                elif self._streams:
                    self._count(source, line)

    def _count(self, source: str, line: str) -> None:
        kind = _NUMBER.sub("#", line)
        known = self._kinds.get(kind)
        if known is not None:
            known.count += 1
            return
        if len(self._kinds) >= _MOST_KINDS:
            self._end_window()
        self._kinds[kind] = _Kind(source, line)
        if self._timer is None:
            self._timer = threading.Timer(self._window_s or 0.0, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Show what the window has kept."""
        with self._lock:
            self._end_window()

    def _end_window(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        kinds = list(self._kinds.values())
        self._kinds.clear()
        lines = (
            f"[{one.source}] {one.first}\n"
            if one.count == 1
            else f"[{one.source}] [{one.count} similar lines] {one.first}\n"
            for one in kinds
        )
        text = "".join(lines)
        if text:
            self._write(text)
