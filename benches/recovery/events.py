"""The ranks' own logs: one JSON line an event, with the time on CLOCK_MONOTONIC, which a host's processes share.

Each has the processor time that its process has spent, too.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class RankLog:
    """What one rank process writes; all its incarnations append to one file.

    Args:
        path: From :func:`log_path`.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, event: str, **fields: object) -> None:
        """Append one event."""
        now = {"t": time.monotonic(), "cpu": time.process_time()}
        line = {"event": event, "pid": os.getpid(), **now, **fields}
        self._file.write(json.dumps(line) + "\n")

    def step(self, before: int, after: int, **fields: object) -> None:
        """Append the outcome of one step; more than 1 is gained where the state of a donor came first."""
        self.write("step", step=after, ok=after > before, gained=after - before, **fields)


def log_path(folder: Path, group: int, rank: int) -> Path:
    """Where that rank writes."""
    return folder / f"g{group}r{rank}.jsonl"


def exit_file(folder: Path, group: int) -> Path:
    """Once it exists, the first rank of that group removes it and fails, as a script does by itself."""
    return folder / f"g{group}.exit"


def fail_if_told(folder: Path, group: int, log: RankLog) -> None:
    """Called by that rank between two steps.

    Raises:
        RuntimeError: It was told to.
    """
    told = exit_file(folder, group)
    if told.exists():
        told.unlink(missing_ok=True)
        log.write("exit")
        raise RuntimeError("the bench wants this script to fail")


@dataclass
class Follower:
    """Reads one rank's log while it grows.

    Attributes:
        events: All complete lines so far.
    """

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def poll(self) -> list[dict[str, Any]]:
        """Read what is new, and return that."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        # A line that a kill tore is no event; the next incarnation's first line follows on it.
        fresh = [event for line in whole.splitlines() if (event := _parse(line)) is not None]
        self.events += fresh
        return fresh


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
