"""What is printed about a run that has ended: its result, what each failure cost, where it went wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sky_monarch.cli._events import describe, exit_text, is_failure
from sky_monarch.cli._output import columns, number, plain, seconds

if TYPE_CHECKING:
    from sky_monarch.sdk.types import Event, RunStatus

__all__ = ["culprit", "failure_lines", "recovery_lines", "result_line"]

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
_EXCEPTION = re.compile(r"^(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure)\b.*)$")
_LIBRARY = re.compile(r"(^<)|/site-packages/|/dist-packages/|/lib/python\d")
_TAIL_LINES = 8


def culprit(tail: Iterable[str]) -> tuple[str | None, str | None]:
    """Find a Python traceback in the last lines of a process.

    Args:
        tail: The lines, oldest first.

    Returns:
        The exception's line, and ``file:line`` of the innermost frame outside of installed packages (of the
        innermost frame where all of them are inside). None for what is not there.
    """
    exception = place = library_place = None
    for text in map(plain, tail):
        if text.startswith("Traceback (most recent call last)"):
            place = library_place = None  # of chained exceptions the last one counts
        elif frame := _FRAME.match(text):
            where = f"{frame['file']}:{frame['line']}"
            if _LIBRARY.search(frame["file"]):
                library_place = where
            else:
                place = where
        elif match := _EXCEPTION.match(text):
            exception = match["text"]
    return exception, place or library_place


def _first_failures(events: Sequence[Event]) -> list[Event]:
    """The last failure of each replica, in the order in which they gave out: the root cause comes first."""
    failures = [event for event in events if event.event == "rank_exited" and is_failure(event)]
    latest = {event.fields.get("replica"): event for event in failures}
    return sorted(latest.values(), key=lambda event: event.id)


def failure_lines(status: RunStatus, events: Sequence[Event]) -> list[str]:
    """Where a run went wrong, on one screen: who, how, the user's line, last output, next command."""
    lines: list[str] = []
    if status.setup is not None and status.state == "FAILED_SETUP":
        lines.append(f"setup exited with code {status.setup.exit_code}; its last lines:")
        lines += [f"  | {plain(text)}" for text in status.setup.tail[-20:]]
        return [*lines, f"next: sky-monarch logs {status.run_id} --setup"]
    shown = _first_failures(events)
    for event in shown[:3]:
        fields = event.fields
        exception, place = culprit(fields.get("tail") or ())
        ended = exit_text(fields.get("exit"), oom=bool(fields.get("oom")))
        where = f"replica {fields.get('replica')} rank {fields.get('rank')}"
        lines.append(f"{where}, generation {fields.get('generation')}: {ended}")
        if exception:
            lines.append(f"  {exception}")
        if place:
            lines.append(f"  at {place}")
        lines += [f"  | {plain(text)}" for text in (fields.get("tail") or ())[-_TAIL_LINES:]]
    if len(shown) > 3:
        lines.append(f"… and {len(shown) - 3} more replicas")
    if not shown:
        lines += [
            f"replica {event.fields.get('replica')}: {describe(event)}"
            for event in events
            if is_failure(event)
        ][-3:]
    if shown:
        slot = f"--replica {shown[0].fields.get('replica')} --rank {shown[0].fields.get('rank')}"
        lines.append(f"next: sky-monarch logs {status.run_id} {slot} --tail 100")
    else:
        lines.append(f"next: sky-monarch events {status.run_id}")
    return lines


def recovery_lines(status: RunStatus) -> list[str]:
    """What each failure cost, as a table; empty where nothing failed."""
    if not status.recoveries:
        return []
    header = (
        "REPLICA",
        "GENERATION",
        "STEP",
        "DETECT",
        "EVICT",
        "SPAWN",
        "FIRST COMMIT",
        "LOST STEPS",
        "START",
        "CAUSE",
    )
    rows = [
        (
            str(record.replica),
            f"{number(record.generation)} -> {number(record.next_generation)}",
            number(record.step),
            seconds(record.detect_s),
            seconds(record.evict_s),
            seconds(record.spawn_s),
            seconds(record.first_commit_s),
            number(record.lost_steps),
            "-" if record.warm is None else "warm" if record.warm else "cold",
            plain(record.cause),
        )
        for record in status.recoveries
    ]
    count = max(len(rows), status.recoveries_total or 0)
    shown = f", the newest {len(rows)} of them" if count > len(rows) else ""
    return [
        f"recovery report: {count} failure{'s' if count != 1 else ''}{shown}; times from the death",
        *columns(header, rows),
    ]


def result_line(status: RunStatus) -> str:
    """How it ended, in one line."""
    goal = f"/{status.target_step}" if status.target_step is not None else ""
    step = f", step {status.step}{goal}" if status.step is not None else ""
    took = f" in {seconds(status.elapsed_s)}" if status.elapsed_s is not None else ""
    why = f": {status.reason}" if status.reason and status.state != "SUCCEEDED" else ""
    return f"{status.state} {status.run_id}{took}{step}{why}"
