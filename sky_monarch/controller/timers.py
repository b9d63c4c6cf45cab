"""Timers by name: one of a name at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

__all__ = ["Timers"]


class Timers:
    """Lives in one event loop."""

    def __init__(self) -> None:
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._handles

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def arm(self, name: str, delay_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` after ``delay_s``, in place of what a timer of that name was to call."""
        self.cancel(name)

        def fire() -> None:
            del self._handles[name]
            act()

        self._handles[name] = asyncio.get_running_loop().call_later(delay_s, fire)

    def cancel(self, name: str) -> None:
        """Forget a timer; nothing happens where there is none."""
        if (handle := self._handles.pop(name, None)) is not None:
            handle.cancel()

    def close(self) -> None:
        """Forget all of them."""
        for name in list(self._handles):
            self.cancel(name)
