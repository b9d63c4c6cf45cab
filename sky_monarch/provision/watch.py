"""What became of hosts that were up: by what the provider says unasked, and by asking it now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import structlog

from sky_monarch.provision.provider import Provider, Seen
from sky_monarch.provision.settings import Limits

__all__ = ["Watch"]

_log = structlog.get_logger()
_LOST = {Seen.GONE, Seen.STOPPED}
Ended = Callable[[str, int, str], None]


class Watch:
    """Asks for the status of hosts that are up.

    One answer that a cluster is gone proves nothing: an API server that has just started, or a cloud that answers
    half of a question, says the same. It is asked once more, a moment later; an answer that fails or is missing does
    not count at all, in neither direction.

    Args:
        provider: Whom to ask.
        limits: How often.
        up: Says which clusters are up, with their attempts.
        ended: Told which of them are not any more, and why.
    """

    def __init__(
        self, provider: Provider, limits: Limits, up: Callable[[], Mapping[str, int]], ended: Ended
    ) -> None:
        self._provider = provider
        self._limits = limits
        self._up = up
        self._ended = ended
        self._doubted: dict[tuple[str, int], float] = {}  # since when, by cluster and attempt
        self._asked_s = time.monotonic()

    def run(self, closing: threading.Event) -> None:
        """Watch until this process ends."""
        while not closing.wait(self._limits.notices_s):
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        """One look, at ``now_s`` of the monotonic clock."""
        for notice in self._provider.notices():
            self._ended(notice.cluster, notice.attempt, notice.reason)
        up = self._up()
        self._doubted = {key: since for key, since in self._doubted.items() if up.get(key[0]) == key[1]}
        if now_s - self._asked_s >= self._limits.status_s:
            asked = sorted(up)
            self._asked_s = now_s
        else:
            due = [key[0] for key, since in self._doubted.items() if now_s - since >= self._limits.confirm_s]
            asked = sorted(due)
        if asked:
            self._take(asked, up, now_s)

    def _take(self, asked: list[str], up: Mapping[str, int], now_s: float) -> None:
        answers = self._provider.status(asked)
        for cluster in asked:
            key = (cluster, up[cluster])
            seen = answers.get(cluster, Seen.UNKNOWN)
            if seen is Seen.UNKNOWN:
                continue
            if seen not in _LOST:
                self._doubted.pop(key, None)
                continue
            since_s = self._doubted.setdefault(key, now_s)
            if now_s - since_s >= self._limits.confirm_s:
                del self._doubted[key]
                self._ended(cluster, up[cluster], f"the provider says that {cluster} is {seen}")
            elif since_s == now_s:
                _log.info("a host may be gone: asked again", cluster=cluster, seen=str(seen))
