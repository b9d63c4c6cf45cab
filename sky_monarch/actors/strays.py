"""Messages for actors that this process does not have: their senders are told, instead of waiting for ever.

A message may be ahead of the one that makes its actor, where another process sends it. The first message of a handle
says who has spawned the actor. That process is asked, and answers on the way on which it spawns: where the actor is not
there by then, it does not come. Where nobody says who that was (a handle that was used before), a message has a moment.
A process that has the place of another one has been told of all actors that are made again: there it is short.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from sky_monarch.actors import serial
from sky_monarch.actors.future import FAILED, VALUE
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.errors import SkyMonarchError, SupervisionError

if TYPE_CHECKING:
    from sky_monarch._core import ActorRequest
    from sky_monarch.actors.runtime import Runtime

__all__ = ["Strays"]

#: Between the first message for an actor and that which makes it, where nobody says who that would be.
_GRACE_S = 1.0
#: The spawner has so long to answer: whoever lives does it at once, unless its host is cut off for a while.
_ASKED_S = 10.0
#: The same where all actors of the one before have been made again.
_SETTLED_S = 0.05
_BATCH = 256
#: Spawners are asked of so many actors at a time.
_MOST_ASKED = 64
#: Of so many actors is known under which addresses they were spawned.
_MOST_SPAWNED = 4096


class Strays:
    """The actors, by number, that messages have come for and that nobody has made yet."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiting: dict[int, float] = {}
        #: Of these those whose spawner has not answered yet.
        self._asked: set[int] = set()
        self._grace_s = _GRACE_S
        self._spawned: dict[int, tuple[str, ...]] = {}

    def expect(self, place: str) -> None:
        """A message came for an actor without a mailbox: its number, and who has spawned it, where it says that."""
        number, _, spawner = place.partition("\t")
        actor_id = int(number)
        now = time.monotonic()
        if actor_id in self._waiting or actor_id in self._runtime.hosted:
            return  # made meanwhile: its first message came while that was on its way through this process
        if not spawner or len(self._asked) >= _MOST_ASKED:
            self._waiting[actor_id] = now + self._grace_s
            return
        self._waiting[actor_id] = now + _ASKED_S
        self._asked.add(actor_id)
        threading.Thread(
            target=self._ask, args=(actor_id, spawner), name="sky-monarch-stray", daemon=True
        ).start()

    def _ask(self, actor_id: int, spawner: str) -> None:
        from sky_monarch._core import ActorTargets

        here = self._runtime
        body = serial.dumps((actor_id, here.address))
        with suppress(SkyMonarchError):  # this process is ending, or the spawner takes nothing: 10 s end it
            asked = here.node.call(ActorTargets([(spawner, "")]), 0, "spawned", *body)
            if asked.wait(_ASKED_S) and any(kind < 0 for _, kind, *_ in asked.take()):
                # It has ended: what it had sent before is read within a moment.
                time.sleep(_SETTLED_S)
                here.node.send(ActorTargets([(here.address, "")]), 0, "missing", *serial.dumps(actor_id))

    def remember(self, actor_id: int, addresses: tuple[str, ...]) -> None:
        """This process spawns an actor on processes with these addresses among others."""
        self._spawned[actor_id] = addresses
        if len(self._spawned) > _MOST_SPAWNED:
            self._spawned.pop(next(iter(self._spawned)), None)

    def answer(self, request: ActorRequest, actor_id: int, asker: str) -> None:
        """Whether an actor that this process has spawned is still on its way to ``asker``: say so behind it."""
        threading.Thread(
            target=self._answer, args=(request, actor_id, asker), name="sky-monarch-stray", daemon=True
        ).start()

    def _answer(self, request: ActorRequest, actor_id: int, asker: str) -> None:
        from sky_monarch._core import ActorTargets
        from sky_monarch.actors.proc_mesh import being_replaced

        # One that has a place anew is told of its actors once it is there.
        being_replaced(asker, _ASKED_S)
        # By the address that it was spawned under: one by which the host is called now may be reached on another way.
        name = os.path.basename(asker)  # noqa: PTH119
        known = (at for at in self._spawned.get(actor_id, ()) if os.path.basename(at) == name)  # noqa: PTH119
        target = ActorTargets([(next(known, asker), "")])
        with suppress(SkyMonarchError):  # whoever asked has ended, or this process is ending
            self._runtime.node.send(target, 0, "missing", *serial.dumps(actor_id))
            request.reply(VALUE, *serial.dumps(None))

    def miss(self, actor_id: int) -> None:
        """Whoever has spawned the actor has sent this after that, or has ended: it is here, or does not come."""
        self._asked.discard(actor_id)
        if actor_id in self._waiting:
            self._waiting[actor_id] = 0.0

    def settle(self) -> None:
        """This process has the place of another one, and has been told of all actors that are made again."""
        self._grace_s = _SETTLED_S
        end = time.monotonic() + _SETTLED_S
        for actor_id in self._waiting.keys() - self._asked:
            self._waiting[actor_id] = min(end, self._waiting[actor_id])

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
            self._asked.discard(actor_id)
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
