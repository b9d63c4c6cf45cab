"""Watching a peer through its ranks' logs: what every trial does, whatever is done to the peer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from benches.recovery import analysis
from benches.recovery.events import Follower, log_path
from benches.recovery.peers import Peer, Setting

T = TypeVar("T")
START_LIMIT_S = 300.0
REJOIN_LIMIT_S = 180.0
_FINAL_LIMIT_S = 60.0
_POLL_S = 0.02
_STEPS_TO_STOP = 30


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Watch:
    """Follows all ranks of one peer, and tends it meanwhile.

    Args:
        peer: Not started yet.
        setting: Its own.
    """

    def __init__(self, peer: Peer, setting: Setting) -> None:
        self._peer, self._setting = peer, setting
        self._followers = {
            (group, rank): Follower(log_path(setting.folder, group, rank))
            for group in range(setting.groups)
            for rank in range(setting.ranks)
        }

    @property
    def _logs(self) -> analysis.Logs:
        return {who: follower.events for who, follower in self._followers.items()}

    def _start(self) -> None:
        """Start the peer; returns once all groups train."""
        self._peer.start()
        self._wait_in_step(after_s=0.0, not_pids=frozenset(), within_s=START_LIMIT_S)

    def _warm_up(self) -> None:
        if not self._peer.warm_up():
            say("  goes on without being warm")

    def _poll(self) -> None:
        self._peer.tend()
        for follower in self._followers.values():
            follower.poll()

    def _idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._poll()
            time.sleep(_POLL_S)

    def _wait(
        self, probe: Callable[[], T | None], within_s: float, what: str, *, every_s: float = _POLL_S
    ) -> T:
        deadline = time.monotonic() + within_s
        while True:
            if value := probe():
                return value
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {within_s:g} s: {what}")
            time.sleep(every_s)

    def _wait_in_step(
        self, *, after_s: float, not_pids: Collection[int], beyond: int = -1, within_s: float
    ) -> None:
        def probe() -> bool:
            self._poll()
            return analysis.in_step(self._logs, after_s=after_s, not_pids=not_pids, beyond=beyond)

        self._wait(probe, within_s, "all groups commit the same steps")

    def _wait_digests(self) -> None:
        """Let all ranks log digests of the same steps."""
        self._poll()
        stop = self._setting.stop_file
        fresh = stop.with_suffix(".new")
        fresh.write_text(str(analysis.current_step(self._logs) + _STEPS_TO_STOP))
        fresh.replace(stop)

        def all_digests() -> bool:
            self._poll()
            return analysis.equality(self._logs).final_step is not None

        self._wait(all_digests, _FINAL_LIMIT_S, "all ranks log a digest of one step")
