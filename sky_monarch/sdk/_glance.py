"""What the files of a run tell, where its controller does not answer."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sky_monarch.launch.folder import RunFolder
from sky_monarch.sdk.types import RunStatus

__all__ = ["silent_status"]

_BUSY_S = 1.0
_STEPS_OF_SQL = 20_000_000
"""What all questions to the journal may take together: one where they take more is not waited for."""
_STATES = {
    "generation_started": "STARTING",
    "ranks_up": "RUNNING",
    "first_commit": "RUNNING",
    "group_given_up": "GIVEN_UP",
}


def silent_status(folder: RunFolder, why: str) -> RunStatus:
    """The status as far as files tell: the state that was noted last, and the newest generation of each group.

    Args:
        folder: Of the run.
        why: What became of the question to its controller.
    """
    job = folder.job
    controller = folder.process("controller") if folder.head is None else None
    state, groups, noted = "RUNNING", {}, ""
    damaged = (sqlite3.Error, ValueError, LookupError, TypeError, OSError)
    with contextlib.suppress(*damaged), _journal(folder.journal) as journal:
        last = _newest(journal, "run_state")
        if last is not None:
            state, noted = str(last["state"]), str(last.get("reason") or "")
        groups = _groups(journal)
    what = f"its controller does not answer ({why}), and this is what its files tell"
    if controller is not None and controller.stopped:
        what = (
            f"its controller, pid {controller.pid}, is stopped and does not answer, and this is what its files tell; "
            f"`kill -CONT {controller.pid}` lets it go on"
        )
    values = {
        "run_id": folder.run_id,
        "name": folder.name,
        "state": state,
        "reason": "; ".join(filter(None, (what, noted and f"before: {noted}"))),
        "infra": str(folder.info.get("infra", "local")),
        "created_ms": folder.created_ms,
        "replicas": job.get("replicas"),
        "min_replicas": job.get("min_replicas"),
        "ranks_per_replica": job.get("ranks_per_replica"),
        "controller_pid": None if controller is None else controller.pid,
        "run_dir": str(folder.path),
        "groups": [groups[replica] for replica in sorted(groups)],
    }
    return RunStatus.from_json(values)


@contextlib.contextmanager
def _journal(path: Path) -> Iterator[sqlite3.Connection]:
    # mode=ro still honours the write-ahead log of a controller that is stopped.
    with contextlib.closing(
        sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=_BUSY_S)
    ) as journal:
        spent = [0]

        def stop() -> int:
            spent[0] += 1
            return int(spent[0] > _STEPS_OF_SQL // 100_000)

        journal.set_progress_handler(stop, 100_000)
        yield journal


def _newest(journal: sqlite3.Connection, kind: str) -> dict[str, Any] | None:
    query = "SELECT event FROM events WHERE json_extract(event, '$.event') = ? ORDER BY id DESC LIMIT 1"
    row = journal.execute(query, (kind,)).fetchone()
    return None if row is None else json.loads(row[0])


def _groups(journal: sqlite3.Connection) -> dict[int, dict[str, Any]]:
    marks = ",".join("?" * len(_STATES))
    query = f"SELECT event FROM events WHERE json_extract(event, '$.event') IN ({marks}) ORDER BY id"  # noqa: S608
    groups: dict[int, dict[str, Any]] = {}
    for (text,) in journal.execute(query, tuple(_STATES)):
        event = json.loads(text)
        replica = int(event["replica"])
        before = groups.get(replica, {"generation": 0})
        generation = max(before["generation"], int(event.get("generation") or 0))
        groups[replica] = {"replica": replica, "generation": generation, "state": _STATES[event["event"]]}
    return groups
