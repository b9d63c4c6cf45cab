"""Messages for actors that this process does not have: their senders are told, instead of waiting for ever.

A message may be ahead of the one that makes its actor, where another process sends it: so it has a moment. A process
that has the place of another one has been told of all actors that are made again: there the moment is short.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sky_monarch.actors import serial
from sky_monarch.actors.future import FAILED
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.errors import SupervisionError

if TYPE_CHECKING:
    from sky_monarch.actors.runtime import Runtime

__all__ = ["Strays"]

#: Between the first message for an actor and that which makes it.
_GRACE_S = 1.0
#: The same where all actors of the one before have been made again.
_SETTLED_S = 0.05
_BATCH = 256


class Strays:
    """The actors, by number, that messages have come for and that nobody has made yet."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiting: dict[int, float] = {}
        self._grace_s = _GRACE_S

    def expect(self, actor_id: int) -> None:
        """A message came for an actor without a mailbox."""
        self._waiting.setdefault(actor_id, time.monotonic() + self._grace_s)

    def settle(self) -> None:
        """This process has the place of another one, and has been told of all actors that are made again."""
        self._grace_s = _SETTLED_S
        end = time.monotonic() + _SETTLED_S
        self._waiting = {actor_id: min(end, until) for actor_id, until in self._waiting.items()}

    def wait_s(self) -> float | None:
        """How long nothing has to be done about them; None where there are none."""
        if not self._waiting:
            return None
        return max(0.0, min(self._waiting.values()) - time.monotonic())

    def refuse(self) -> None:
        """Answer for those whose moment is over."""
        now = time.monotonic()
        for actor_id in [one for one, end in self._waiting.items() if end <= now]:
            del self._waiting[actor_id]
            if actor_id not in self._runtime.hosted:
                self._refuse(actor_id)

    def _refuse(self, actor_id: int) -> None:
        mailbox = self._runtime.node.mailbox(actor_id)
        words = "there is no such actor in this process: it was respawned, or the actor was spawned elsewhere"
        answer = serial.dumps(RemoteError.of(SupervisionError(words)))
        while messages := mailbox.recv(0.0, _BATCH, False):
            for request in messages:
                if not isinstance(request, tuple):
                    request.reply(FAILED, *answer)
        mailbox.close()
