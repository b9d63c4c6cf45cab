"""Being asked to leave, by SIGTERM: between two steps, or at once where nothing would be lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Drain"]


class Drain:
    """Whether this process was asked to leave."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._interruptible = False

    @property
    def requested(self) -> bool:
        """Whether it was."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask this process to leave: another rank of its group does."""
        self._asked.set()

    def leave_if_requested(self) -> None:
        """Leave now, if it was.

        Raises:
            SystemExit: With code 0.
        """
        if self.requested:
            raise SystemExit(0)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around a wait that the request ends at once.

        Raises:
            SystemExit: With code 0, where it was or is made.
        """
        self._interruptible = True
        try:
            self.leave_if_requested()
            yield
        finally:
            self._interruptible = False

    def listen(self, undo: contextlib.ExitStack) -> None:
        """Take SIGTERM over until ``undo``; only the main thread may, and elsewhere nothing is done."""
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, self._on_sigterm)
            undo.callback(signal.signal, signal.SIGTERM, previous)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._asked.set()
        if self._interruptible:
            raise SystemExit(0)
