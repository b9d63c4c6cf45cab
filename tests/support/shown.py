"""What a program has shown on its stderr, while its threads go on writing."""

from __future__ import annotations

import io
import threading


class Shown(io.TextIOBase):
    """Stands for ``sys.stderr`` and keeps all of it.

    pytest's own capture is for reading afterwards: a look at it reads a file and then empties it, and what a thread
    writes between the two is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            self._parts.append(text)
        return len(text)

    @property
    def text(self) -> str:
        """All of it, from the first on."""
        with self._lock:
            return "".join(self._parts)
