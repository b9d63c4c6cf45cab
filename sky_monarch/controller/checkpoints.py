"""Events out of what sessions say of their checkpoints.

A session says it in the metrics of its progress, of which the agent keeps the latest only. So these are totals
and last values; what changed is an event. They are journaled, so that a controller that was restarted does
not tell them again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["CheckpointNews"]

_PREFIX = "checkpoint_"
# What names each kind: a session that says another number has news.
_NUMBER = {
    "checkpoint_damaged": "checkpoint_damaged_step",
    "checkpoint_restored": "checkpoint_restored_step",
    "checkpoint_no_room": "checkpoint_short_step",
    "checkpoint_failed": "checkpoint_failures",
    "checkpoint_saved": "checkpoint_step",
}
_Place = tuple[str, int, int]


class CheckpointNews:
    """Remembers what was told of the checkpoints of each rank.

    Args:
        to: The job's target, to be shown; None for a job without checkpoints.
    """

    def __init__(self, to: str | None) -> None:
        self._to = to
        # Of the newest generation that said something: it does not grow with restarts.
        self._known: dict[_Place, tuple[int, int]] = {}

    def take(self, report: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
        """Take the news out of a checked progress report; returns what is left, and rows for the journal."""
        metrics = report.get("metrics") or {}
        # Anybody's script may report any number.
        news = {
            name: int(metrics[name])
            for name in metrics
            if name.startswith(_PREFIX) and math.isfinite(metrics[name]) and metrics[name] >= 0
        }
        if not news or self._to is None:
            return report, []
        left = {name: value for name, value in metrics.items() if name not in news}
        whose = {**report["slot"], "generation": report["generation"]}
        rows = []
        for event, number in _NUMBER.items():
            if number not in news:
                continue
            row = {"event": event, **whose, "number": news[number], "to": self._to, **_fields(event, news)}
            if self._known.get(_place(row)) != (row["generation"], row["number"]):
                rows.append(row)
        return {**report, "metrics": left}, rows

    def apply(self, row: Mapping[str, Any]) -> None:
        """Remember a row of the journal."""
        if row["event"] in _NUMBER:
            self._known[_place(row)] = (row["generation"], row["number"])

    def summary(self) -> list[list[Any]]:
        """All that it remembers, as JSON values."""
        return [[*place, *told] for place, told in self._known.items()]

    def restore(self, summary: Iterable[Sequence[Any]]) -> None:
        """Take up what :meth:`summary` gave."""
        self._known = {(row[0], row[1], row[2]): (row[3], row[4]) for row in summary}


def _place(row: Mapping[str, Any]) -> _Place:
    return row["event"], row["replica"], row["rank"]


def _fields(event: str, news: Mapping[str, int]) -> dict[str, Any]:
    match event:
        case "checkpoint_failed":
            code = news.get("checkpoint_errno", 0)
            why = os.strerror(code) if code else None
            return {"step": news.get("checkpoint_failed_step"), "errno": code or None, "error": why}
        case "checkpoint_no_room":
            sizes = {
                "needed_bytes": news.get("checkpoint_needed_bytes"),
                "room_bytes": news.get("checkpoint_room_bytes"),
            }
            return {"step": news["checkpoint_short_step"], **sizes}
        case "checkpoint_saved":
            return {"step": news["checkpoint_step"], "bytes": news.get("checkpoint_bytes")}
        case _:
            return {"step": news[_NUMBER[event]]}
