"""The processes that stand by for one mesh, in the process that owns it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sky_monarch.actors.spawner import Proc
from sky_monarch.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sky_monarch.actors.spawner import Spawner

__all__ = ["Spares"]

#: Of those that ended before they were needed, so many are replaced.
_MOST_LOST = 5
#: Whoever has taken a place is to answer before another one is started.
_LATER_S = 0.2


class Spares:
    """Keeps ``count`` processes ready, from the first mesh of actors on: before it there is nothing to import."""

    def __init__(self, spawner: Spawner, name: str, count: int, described: Sequence[str] = ()) -> None:
        self.spawner = spawner
        self.name = name
        self.count = count
        # Never held while the zygote is spoken to: it may wait for the thread that hears of ends, which takes this.
        self.lock = threading.Lock()
        self.ready: list[Proc] = []
        self.starting = 0
        self.described: list[str] = list(described)
        self.lost = 0
        self.closed = count == 0

    def expect(self, described: list[str]) -> None:
        """Actors that are described (:func:`standby.describe`) may have to be made.

        Raises:
            LaunchError: The zygote is gone.
        """
        if self.closed:
            return
        with self.lock:
            self.described += described
            ready = list(self.ready)
        self.spawner.warm(ready, described)
        self.fill()

    def fill(self) -> None:
        """Have as many started as are missing, once there is something to import."""
        with self.lock:
            if not self.described:
                return
            self.ready = [proc for proc in self.ready if not proc.ended.is_set()]
            missing = 0 if self.closed else self.count - len(self.ready) - self.starting
            if missing <= 0:
                return
            self.starting += missing
            described = list(self.described)
        fresh = [Proc(f"{self.name}[standby]", "", self._ended) for _ in range(missing)]
        try:
            self.spawner.start_spares(fresh, described)
        except LaunchError:
            # Whoever needs one hears of that: then it is not to be had by a fork either.
            self.closed = True
            return
        with self.lock:
            self.starting -= missing
            late = self.described[len(described) :]
            unwanted = fresh if self.closed else []
            self.ready += [] if self.closed else fresh
        self.spawner.warm(fresh, late)
        self.spawner.kill(unwanted)

    def fill_later(self) -> None:
        """The same in a moment, on a thread of its own."""
        if self.closed:
            return
        later = threading.Timer(_LATER_S, self.fill)
        later.name, later.daemon = "sky-monarch-standby", True
        later.start()

    def take(self, most: int) -> list[Proc]:
        """Up to ``most`` of them, the oldest first: they have no place in the mesh yet."""
        with self.lock:
            taken, self.ready = self.ready[:most], self.ready[most:]
            return taken

    def close(self) -> None:
        """End them."""
        with self.lock:
            self.closed = True
            ending, self.ready = self.ready, []
        self.spawner.kill(ending)

    def _ended(self, proc: Proc) -> None:
        with self.lock:
            if proc not in self.ready:
                return
            self.ready.remove(proc)
            self.lost += 1
            if self.closed or self.lost > _MOST_LOST:
                return
        # Not here: this thread hears of ends, and waits for nobody.
        self.fill_later()
