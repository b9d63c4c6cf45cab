"""What is printed about a run that has ended: its result, what each failure cost, where it went wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sky_monarch.cli._events import describe, exit_text, is_failure, memory_text, size_text
from sky_monarch.cli._output import columns, money, number, plain, seconds
from sky_monarch.tracebacks import culprit

if TYPE_CHECKING:
    from sky_monarch.sdk.types import Event, RecoveryRecord, RunStatus

__all__ = ["failure_lines", "host_lines", "recovery_lines", "rehearsal_lines", "result_line"]

_TAIL_LINES = 8
_SHOWN = 10


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
        found = culprit(map(plain, fields.get("traceback") or fields.get("tail") or ()))
        ended = exit_text(fields.get("exit"), oom=bool(fields.get("oom")))
        where = f"replica {fields.get('replica')} rank {fields.get('rank')}"
        lines.append(f"{where}, generation {fields.get('generation')}: {ended}")
        if found.exception:
            lines.append(f"  {found.exception}")
        if found.where:
            lines.append(f"  at {found.where}")
        if fields.get("memory"):
            lines.append(f"  {memory_text(fields['memory'])}")
        lines += [f"  | {plain(text)}" for text in (fields.get("tail") or ())[-_TAIL_LINES:]]
    if len(shown) > 3:
        lines.append(f"… and {len(shown) - 3} more replicas")
    if not shown:
        lines += [
            f"replica {event.fields.get('replica')}: {describe(event)}"
            for event in events
            if is_failure(event) or event.event == "hung"
        ][-4:]
    if shown:
        slot = f"--replica {shown[0].fields.get('replica')} --rank {shown[0].fields.get('rank')}"
        lines.append(f"next: sky-monarch logs {status.run_id} {slot} --tail 100")
    else:
        lines.append(f"next: sky-monarch events {status.run_id}")
    return lines


def host_lines(one: RunStatus) -> list[str]:
    """Where each host is, and what all of them have cost so far."""
    if not one.hosts:
        return []
    rows = [
        (
            host.host,
            "head" if host.head else "spare" if host.spare else ",".join(map(str, host.groups)) or "-",
            host.place or "-",
            str(host.attempt),
            host.phase if host.stops_in_s is None else f"{host.phase}, stops in {host.stops_in_s:.0f} s",
            seconds(None if host.since_ms is None else max(0.0, time.time() - host.since_ms / 1000)),
            number(host.usd_per_hour, 2),
            money(host.cost_usd),
            plain(host.reason or ""),
        )
        for host in one.hosts
    ]
    header = ("HOST", "GROUPS", "PLACE", "ATTEMPT", "PHASE", "FOR", "$/H", "COST", "REASON")
    lines = columns(header, rows)
    if one.cost_usd is not None:
        wasted = f", of which {money(one.wasted_usd)} brought no step" if one.wasted_usd else ""
        lines.append(f"cost so far {money(one.cost_usd)}{wasted}")
    if one.output is not None and one.output.dropped_bytes:
        gone, kept = (size_text(count) for count in (one.output.dropped_bytes, one.output.kept_bytes))
        lines.append(f"of what ranks printed {gone} are not kept any more, {kept} are (`logs.archive_mib`)")
    if one.stops_in_s is not None and not one.ended:
        lines.append(f"its budget ends it in {seconds(one.stops_in_s)}, if hosts and prices stay as they are")
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
        "QUORUM",
        "SPAWN",
        "HEAL",
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
            seconds(record.quorum_s),
            seconds(record.spawn_s),
            seconds(record.heal_s),
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
        *(text for record in status.recoveries[-_SHOWN:] if (text := _evidence(record))),
    ]


def _evidence(record: RecoveryRecord) -> str | None:
    """What is known of the root cause, and where the state came from; None where the table says it all."""
    parts = []
    if record.exception:
        parts.append(record.exception)
    if record.hung:
        parts.append(f"rank {record.hung.get('rank')} hung, {record.hung.get('state')}")
    if record.where:
        parts.append(f"at {record.where}")
    elif record.hung and record.hung.get("native"):
        parts.append(f"in thread {record.hung['native']}")
    if record.memory:
        parts.append(memory_text(record.memory))
    if record.collateral:
        parts.append(f"ended with it: rank {', '.join(map(str, record.collateral))}")
    if record.heal_bytes is not None:
        donor = "" if record.heal_donor is None else f" from replica {record.heal_donor}"
        parts.append(f"healed{donor}, {size_text(record.heal_bytes)} in {seconds(record.heal_took_s)}")
    if record.lost_samples is not None:
        numbers = ", ".join(map(str, record.lost_batches))
        parts.append(f"{record.lost_samples} samples lost, batch {numbers}")
    if not parts:
        return None
    return plain(f"replica {record.replica} generation {number(record.generation)}: {'; '.join(parts)}")


def rehearsal_lines(status: RunStatus) -> list[str]:
    """Faults that were to be rehearsed, and never happened: whoever asked for them has seen nothing of a recovery."""
    if not status.ended:
        return []
    reached = "" if status.step is None else f" at step {status.step}"
    why = f"the run ended{reached} before it was due; only a `Session` reports steps, `after=SECONDS` needs none"
    return [f"warning: --inject {text} never happened: {why}" for text in status.injections_left]


def result_line(status: RunStatus) -> str:
    """How it ended, in one line."""
    goal = f"/{status.target_step}" if status.target_step is not None else ""
    step = f", step {status.step}{goal}" if status.step is not None else ""
    took = f" in {seconds(status.elapsed_s)}" if status.elapsed_s is not None else ""
    why = f": {status.reason}" if status.reason and status.state != "SUCCEEDED" else ""
    return f"{status.state} {status.run_id}{took}{step}{why}"
