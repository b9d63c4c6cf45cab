"""Moments of hosts' own clocks in the time of ours.

Durations are counted by clocks that nobody sets, and each machine has its own, begun when it was started. What a
report says less than nothing about is the way between two of them: the shortest way that one ever took comes closest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["HostClocks"]

_SAME_S = 1.0
_MOST = 10_000


class HostClocks:
    """What lies between our clock and those of the agents that are heard."""

    def __init__(self) -> None:
        self._behind_ns: dict[int, int] = {}

    def ours(self, incarnation: int, report: Mapping[str, Any], received_ns: int) -> Mapping[str, Any]:
        """A report of an agent with its moments in our time.

        Args:
            incarnation: Of the agent.
            report: As it came.
            received_ns: When it came.
        """
        if "mono_ns" not in report:
            return report
        behind_ns = received_ns - report["mono_ns"]
        if 0 <= behind_ns < _SAME_S * 1e9:
            behind_ns = 0  # one machine, where both have the same clock: nothing is to be corrected
        behind_ns = min(behind_ns, self._behind_ns.get(incarnation, behind_ns))
        if incarnation not in self._behind_ns and len(self._behind_ns) >= _MOST:
            self._behind_ns.clear()
        self._behind_ns[incarnation] = behind_ns
        if behind_ns == 0:
            return report
        moved = {**report, "mono_ns": report["mono_ns"] + behind_ns}
        if report.get("heal"):
            moved["heal"] = {**report["heal"], "at_ns": report["heal"]["at_ns"] + behind_ns}
        return moved
