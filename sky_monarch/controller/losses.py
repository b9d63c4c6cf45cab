"""Events out of what sessions say of samples that were lost.

Every session says the same after each commit: the batches that were dealt out lately and that no step used, in
the metrics of its progress (``training/contributions.py``). What was not told yet is an event. They are
journaled, so that a controller that was restarted does not tell them again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sky_monarch.controller.placing import groups_added

__all__ = ["LostSamples"]

_NAME = re.compile(r"lost_batch_(\d{1,18})_step_(\d{1,18})_replica_(\d{1,9})")
# Told ones that are remembered: sessions repeat only the newest few.
_REMEMBERED = 1000
_Key = tuple[int, int, int]


class LostSamples:
    """Remembers which lost batches were told.

    Args:
        replicas: Replica groups that the run begins with.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._told: dict[_Key, None] = {}

    def take(self, report: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
        """Take them out of a checked progress report; returns what is left, and rows for the journal.

        A row is of one replica group and step; ``generation`` is not known, for the others tell it.
        """
        metrics = report.get("metrics") or {}
        found = {name: match for name in metrics if (match := _NAME.fullmatch(name)) is not None}
        if not found:
            return report, []
        lost: dict[tuple[int, int], dict[int, int]] = {}
        for name, match in found.items():
            batch, step, replica = map(int, match.groups())
            samples = metrics[name]
            # Anybody's script may report any number.
            if not math.isfinite(samples) or samples < 0 or replica >= self._replicas:
                continue
            if (step, replica, batch) not in self._told:
                lost.setdefault((step, replica), {})[batch] = int(samples)
        rows = [
            {
                "event": "samples_lost",
                "replica": replica,
                "step": step,
                "batches": sorted(batches),
                "samples": sum(batches.values()),
            }
            for (step, replica), batches in sorted(lost.items())
        ]
        return {**report, "metrics": {name: metrics[name] for name in metrics if name not in found}}, rows

    def apply(self, row: Mapping[str, Any]) -> None:
        """Remember a row of the journal."""
        self._replicas += sum(map(len, groups_added(row).values()))
        if row["event"] == "samples_lost":
            for batch in row["batches"]:
                self._told[row["step"], row["replica"], batch] = None
            while len(self._told) > _REMEMBERED:
                del self._told[next(iter(self._told))]

    def summary(self) -> list[list[int]]:
        """All that it remembers, as JSON values."""
        return [list(key) for key in self._told]

    def restore(self, summary: Iterable[Sequence[int]]) -> None:
        """Take up what :meth:`summary` gave."""
        self._told = dict.fromkeys((step, replica, batch) for step, replica, batch in summary)
