"""How many replica groups the lighthouse is to wait for at a start: told until it has heard."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from sky_monarch.errors import SkyMonarchError

__all__ = ["Expectation"]

_log = structlog.get_logger()
_SHORTEST_S, _LONGEST_S = 0.1, 30.0


class Expectation:
    """Tells the newest number, in a thread of its own: nobody waits for a lighthouse that is away.

    Args:
        say: Tells the lighthouse, and raises where it cannot.
    """

    def __init__(self, say: Callable[[int], None]) -> None:
        self._say = say
        self._news = threading.Condition()
        self._wanted: int | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def tell(self, replicas: int) -> None:
        """So many, from now on."""
        with self._news:
            self._wanted = replicas
            self._news.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="expectation", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Tell no more."""
        with self._news:
            self._closed = True
            self._news.notify()

    def _work(self) -> None:
        said: int | None = None
        pause_s = _SHORTEST_S
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._wanted != said)  # noqa: B023
                if self._closed or self._wanted is None:
                    return
                wanted = self._wanted
            try:
                self._say(wanted)
            except SkyMonarchError as error:
                _log.warning("the lighthouse was not told how many groups there are", error=str(error))
                with self._news:
                    self._news.wait_for(lambda: self._closed, timeout=pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
            else:
                _log.info("told the lighthouse", replicas=wanted)
                said, pause_s = wanted, _SHORTEST_S
