"""What became of hosts that were up: by what the provider says unasked, and by asking it now and then."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping

import structlog

from sky_monarch.launch.placement import cluster_name
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
    not count at all, in neither direction. Of a host whose agent is silent it is asked out of turn, at once and a few
    times more: there the two of them are witnesses, and what the provider is certain of is believed.

    Args:
        provider: Whom to ask.
        limits: How often.
        up: Says which hosts are up, with their attempts.
        ended: Told which of them are not any more, and why.
    """

    def __init__(
        self, provider: Provider, limits: Limits, up: Callable[[], Mapping[str, int]], ended: Ended
    ) -> None:
        self._provider = provider
        self._limits = limits
        self._up = up
        self._ended = ended
        self._doubted: dict[tuple[str, int], float] = {}  # since when, by host and attempt
        # Attempts of hosts whose agents are, and the number of that silence.
        self._silent: dict[str, tuple[int, int]] = {}
        self._silences = itertools.count()
        # How often those were asked for in that silence, and when next.
        self._early: dict[tuple[str, int, int], tuple[int, float]] = {}
        self._asked_s = time.monotonic()

    def doubt(self, hosts: Mapping[str, int]) -> None:
        """These hosts, with their attempts, are silent; no others are. From one other thread."""
        known = self._silent
        self._silent = {
            host: known[host]
            if host in known and known[host][0] == attempt
            else (attempt, next(self._silences))
            for host, attempt in hosts.items()
        }

    def run(self, closing: threading.Event) -> None:
        """Watch until this process ends."""
        while not closing.wait(self._limits.notices_s):
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        """One look, at ``now_s`` of the monotonic clock."""
        for notice in self._provider.notices():
            self._ended(notice.host, notice.attempt, notice.reason)
        up = self._up()
        self._ask_early(up, now_s)
        self._doubted = {key: since for key, since in self._doubted.items() if up.get(key[0]) == key[1]}
        if now_s - self._asked_s >= self._limits.status_s:
            asked = sorted(up)
            self._asked_s = now_s
        else:
            due = [key[0] for key, since in self._doubted.items() if now_s - since >= self._limits.confirm_s]
            asked = sorted(due)
        if asked:
            self._take(asked, up, now_s)

    def _ask_early(self, up: Mapping[str, int], now_s: float) -> None:
        silent = {(host, *of_it) for host, of_it in self._silent.items() if up.get(host) == of_it[0]}
        self._early = {key: asked for key, asked in self._early.items() if key in silent}
        due = {
            cluster_name(*key[:2]): key
            for key in silent
            if now_s >= self._early.get(key, (0, now_s))[1]
            and self._early.get(key, (0, now_s))[0] < self._limits.early_asks
        }
        if not due:
            return
        for key in due.values():
            asked, _ = self._early.get(key, (0, now_s))
            self._early[key] = (asked + 1, now_s + self._limits.early_s * 2.0**asked)
        for cluster, why in self._provider.certain(sorted(due)).items():
            host, attempt, _ = due[cluster]
            self._ended(host, attempt, f"its agent is silent, and {why}")

    def _take(self, asked: list[str], up: Mapping[str, int], now_s: float) -> None:
        names = {host: cluster_name(host, up[host]) for host in asked}
        answers = self._provider.status(list(names.values()))
        for host, cluster in names.items():
            key = (host, up[host])
            seen = answers.get(cluster, Seen.UNKNOWN)
            if seen is Seen.UNKNOWN:
                continue
            if seen not in _LOST:
                self._doubted.pop(key, None)
                continue
            since_s = self._doubted.setdefault(key, now_s)
            if now_s - since_s >= self._limits.confirm_s:
                del self._doubted[key]
                self._ended(host, up[host], f"the provider says that {cluster} is {seen}")
            elif since_s == now_s:
                _log.info("a host may be gone: asked again", cluster=cluster, seen=str(seen))
