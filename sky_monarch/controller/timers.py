"""Timers by name: one of a name at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

__all__ = ["Timers"]

_SLICE_S = 0.5
"""Of a time that counts only while this process runs: longer than this without a look, it did not."""


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

    def arm_awake(self, name: str, delay_s: float, act: Callable[[], None]) -> None:
        """The same, but time in which this process was stopped or starved does not count.

        Whoever is to be heard of within that time could not be heard then.
        """
        self.cancel(name)
        left_s = delay_s

        def look() -> None:
            nonlocal left_s
            if left_s > 0.0:
                slice_s = min(_SLICE_S, left_s)
                left_s -= slice_s
                self._handles[name] = asyncio.get_running_loop().call_later(slice_s, look)
                return
            del self._handles[name]
            act()

        look()

    def cancel(self, name: str) -> None:
        """Forget a timer; nothing happens where there is none."""
        if (handle := self._handles.pop(name, None)) is not None:
            handle.cancel()

    def close(self) -> None:
        """Forget all of them."""
        for name in list(self._handles):
            self.cancel(name)
