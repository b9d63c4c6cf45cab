"""How long hosts still have that are about to be taken away: what their agents were told, less what has passed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Notices"]


class Notices:
    """The newest notice of each host, from the rows of the journal."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, int, float]] = {}  # when, by both clocks, and how long from then on

    def apply(self, row: Mapping[str, Any]) -> None:
        """Take one row of the journal."""
        if row["event"] == "host_leaving":
            # Our own clock: that of the host says nothing here.
            self._told[row["host"]] = (row.get("received_ns", row["mono_ns"]), row["wall_ms"], row["grace_s"])

    def left_s(self, host: str, now_ns: int, now_ms: int) -> float | None:
        """Seconds until a host is taken away, 0 at the least; None where nobody has said so.

        Args:
            host: Its name.
            now_ns: By the monotonic clock.
            now_ms: By the other one, which counts where the machine was started anew in between.
        """
        if (told := self._told.get(host)) is None:
            return None
        at_ns, at_ms, grace_s = told
        passed_s = (now_ns - at_ns) / 1e9 if now_ns >= at_ns else (now_ms - at_ms) / 1e3
        return round(max(0.0, grace_s - max(0.0, passed_s)), 1)

    def summary(self) -> dict[str, list[float]]:
        """All of them, as JSON values."""
        return {host: list(told) for host, told in self._told.items()}

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Take up what :meth:`summary` gave."""
        self._told = {host: (int(ns), int(ms), float(s)) for host, (ns, ms, s) in summary.items()}
