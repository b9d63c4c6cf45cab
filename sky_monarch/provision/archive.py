"""What is kept here of a run whose head is a cluster: its events, what its ranks printed, and how it ended."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import structlog

from sky_monarch.errors import ChannelError
from sky_monarch.launch.folder import write_json
from sky_monarch.launch.output import room_for_output, take_output
from sky_monarch.provision.client import ControllerClient

__all__ = ["Ended", "keep_events", "keep_output", "last_event", "write_final"]

_log = structlog.get_logger()
_BATCH = 1000
_BUSY_S = 5.0
_KEEP_EVENTS = 50_000
_SPARE_EVENTS = 5_000


class Ended:
    """How a run ended, where its head did not say so.

    Args:
        state: ``CANCELLED`` or ``FAILED``.
        reason: Why.
        exit_code: Of the CLI.
    """

    def __init__(self, state: str, reason: str, exit_code: int) -> None:
        self.state, self.reason, self.exit_code = state, reason, exit_code


def keep_events(controller: ControllerClient, run_dir: Path) -> bool:
    """Store what is new of the events of a run in its folder, where whoever reads an ended run looks for them.

    The newest :data:`_KEEP_EVENTS` stay, as in the journal itself.

    Returns:
        Whether all of them are there.
    """
    path = run_dir / "journal.db"
    try:
        if not path.exists():
            _begin(path)
        with closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as journal:
            last = _last(journal)
            for batch in _batches(controller.events(after=last)):
                if not batch:
                    continue
                journal.execute("BEGIN IMMEDIATE")
                journal.executemany("INSERT OR REPLACE INTO events VALUES (?, ?)", batch)
                _drop_oldest(journal)
                journal.execute("COMMIT")
    except (ChannelError, sqlite3.Error, OSError, ValueError, LookupError) as error:
        _log.warning("the events of the run were not kept", error=str(error))
        return False
    return True


def keep_output(
    controller: ControllerClient,
    run_dir: Path,
    status: Mapping[str, Any],
    *,
    limit_s: float,
    stop: threading.Event,
) -> dict[str, Any]:
    """Bring here what ranks printed, as much as there is room and time for, the newest first. Never the end of the end.

    Args:
        controller: Of the run.
        run_dir: Its folder here.
        status: The last one that it told.
        limit_s: Longest time.
        stop: Set where this process ends.

    Returns:
        The status; what it says of the output is true of this folder.
    """
    output = status.get("output")
    if not isinstance(output, Mapping) or not output.get("kept_bytes"):
        return dict(status)
    kept, logs = int(output["kept_bytes"]), run_dir / "logs"
    room = room_for_output(run_dir, kept)
    try:
        stream = controller.output(max_bytes=room, limit_s=limit_s, stop=stop)
        take_output(stream, logs, max_bytes=room)
    except (ChannelError, OSError, ValueError) as error:
        _log.warning("not all of the output was brought here", error=str(error))
    here = sum(path.stat().st_size for path in logs.glob("*/g*.log"))
    left = max(0, kept - here)
    if left:
        _log.warning("output of the run goes with its head", bytes=left, room=room)
    dropped = int(output.get("dropped_bytes") or 0) + left
    return {**status, "output": {"kept_bytes": here, "dropped_bytes": dropped}}


def _begin(path: Path) -> None:
    """Make an empty one; readers see it with its table, or not at all."""
    draft = path.with_name(".journal.db.new")
    draft.unlink(missing_ok=True)
    with closing(sqlite3.connect(draft)) as journal:
        journal.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, event TEXT NOT NULL)")
        journal.commit()
    draft.chmod(0o600)
    draft.replace(path)


def last_event(run_dir: Path) -> int:
    """Id of the last event that is kept here; 0 where none is."""
    path = run_dir / "journal.db"
    if not path.exists():
        return 0
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_S)) as journal:
            return _last(journal)
    except sqlite3.Error as error:
        _log.warning("the events of the run cannot be read", error=str(error))
        return 0


def _last(journal: sqlite3.Connection) -> int:
    return int(journal.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()[0])


def _drop_oldest(journal: sqlite3.Connection) -> None:
    """Drop the oldest ones in favour of a row that says so, once there are many more than are to stay."""
    (count,) = journal.execute("SELECT count(*) FROM events").fetchone()
    if count <= _KEEP_EVENTS + _SPARE_EVENTS:
        return
    query = "SELECT id FROM events ORDER BY id DESC LIMIT 1 OFFSET ?"
    (through,) = journal.execute(query, (_KEEP_EVENTS,)).fetchone()
    note = {"wall_ms": time.time_ns() // 1_000_000, "event": "events_dropped", "through": through}
    journal.execute("DELETE FROM events WHERE id <= ?", (through,))
    journal.execute("INSERT INTO events VALUES (?, ?)", (through, json.dumps(note, separators=(",", ":"))))


def _batches(lines: Iterable[str]) -> Iterable[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    for line in lines:
        event = json.loads(line)
        batch.append((int(event.pop("id")), json.dumps(event, separators=(",", ":"))))
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def write_final(
    run_dir: Path,
    status: Mapping[str, Any],
    hosts: Mapping[str, str | None],
    ended: Ended | None = None,
    *,
    bill: Mapping[str, Any] | None = None,
) -> None:
    """Write ``final.json``: from then on the run has ended, for whoever looks here.

    Args:
        run_dir: Its folder.
        status: The last one that its head told; empty where it told none.
        hosts: Each cluster of it, the head too, and why it may still be there; None: it is not.
        ended: How it ended, where the head did not say.
        bill: Of the head, which has just gone: it cost until now, and the status is older.
    """
    told = {str(host["host"]): dict(host) for host in status.get("hosts") or ()}
    listed = []
    for name, left in hosts.items():
        host = told.get(name) or {"host": name, "groups": []}
        host |= {"gone": left is None, **({"phase": "DOWN"} if left is None else {"reason": left})}
        listed.append(host)
    values = {**status, "hosts": listed, "run_dir": str(run_dir), "controller_pid": None, "agent_pid": None}
    if bill is not None:
        _add_head(values, bill)
    left_over = "; ".join(
        f"{name} may still bill: {left}" for name, left in hosts.items() if left is not None
    )
    if ended is not None:
        run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        now_ms = time.time_ns() // 1_000_000
        created_ms = int(run["created_ms"])
        reason = "; ".join(filter(None, (ended.reason, left_over)))
        values |= {
            "run_id": run["run_id"],
            "name": run["name"],
            "infra": run["infra"],
            "state": ended.state,
            "reason": reason,
            "exit_code": ended.exit_code,
            "created_ms": created_ms,
            "ended_ms": now_ms,
            "elapsed_s": max(0.0, (now_ms - created_ms) / 1000),
            "groups": list(status.get("groups") or ()),
            "recoveries": list(status.get("recoveries") or ()),
        }
    elif left_over:
        values["reason"] = "; ".join(filter(None, (str(status.get("reason") or ""), left_over)))
    write_json(run_dir / "final.json", values)


def _add_head(values: dict[str, Any], bill: Mapping[str, Any]) -> None:
    """Bring the cost of the head up to date, and with it the sum."""
    price = bill["usd_per_hour"]
    line = next((host for host in values["hosts"] if host["host"] == bill["cluster"]), None)
    if price is None or line is None:
        return
    hours = max(0.0, time.time() - bill["since_ms"] / 1e3) / 3600
    usd, before = round(price * hours, 4), line.get("cost_usd") or 0.0
    wasted = line.get("wasted_usd")
    line |= {
        "head": True,
        "usd_per_hour": price,
        "cost_usd": usd,
        "wasted_usd": usd if wasted is None else wasted,
    }
    values["cost_usd"] = round((values.get("cost_usd") or 0.0) + max(0.0, usd - before), 4)
