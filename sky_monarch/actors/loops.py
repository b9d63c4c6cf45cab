"""How event loops wait for answers: one descriptor a loop, however many there are to come."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["wait_for"]


class _Hub:
    """What one loop waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        from sky_monarch._core import ActorNotifier

        self.notifier = ActorNotifier()
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.tokens = itertools.count(1)
        loop.add_reader(self.notifier.fileno(), self.wake)

    def wake(self) -> None:
        for token in self.notifier.drain():
            waiting = self.waiting.pop(token, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def wait(self, replies: Any) -> None:
        token = next(self.tokens)
        waiting = asyncio.get_running_loop().create_future()
        self.waiting[token] = waiting
        replies.notify(self.notifier, token)
        try:
            await waiting
        finally:
            self.waiting.pop(token, None)


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, _Hub] = WeakKeyDictionary()


async def wait_for(replies: Any) -> None:
    """Wait until ``replies`` is ready."""
    if hasattr(replies, "wait_async"):
        await replies.wait_async()
        return
    loop = asyncio.get_running_loop()
    hub = _hubs.get(loop)
    if hub is None:
        hub = _hubs[loop] = _Hub(loop)
    while not replies.is_ready():
        await hub.wait(replies)
