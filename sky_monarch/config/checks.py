"""Fields that must agree with each other.

The checks read plain values, so that the loader can run them on a file of which other fields are wrong, and
skip each check whose own fields are not usable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sky_monarch.config.command import rank_command
from sky_monarch.config.problem import Severity
from sky_monarch.config.sync import EVERY_STEP

__all__ = ["LADDER", "Finding", "disagreements"]

LADDER = (
    "heartbeat_timeout_s < process_group_timeout_s < quorum_timeout_s, "
    "and heartbeat_timeout_s < join_timeout_s <= quorum_timeout_s"
)
"""Order in which the timeouts of ``lighthouse`` must stand."""

_RUNGS: tuple[tuple[str, str, bool, str], ...] = (
    # (lower, higher, may be equal, why)
    (
        "heartbeat_timeout_s",
        "process_group_timeout_s",
        False,
        "a dead member would still count as alive when the survivors ask for the next quorum",
    ),
    (
        "process_group_timeout_s",
        "quorum_timeout_s",
        False,
        "groups that wait in the quorum would give up before the others' collective has failed",
    ),
    (
        "heartbeat_timeout_s",
        "join_timeout_s",
        False,
        "a quorum would form before a dead member is known to be dead",
    ),
    (
        "join_timeout_s",
        "quorum_timeout_s",
        True,
        "groups would give up while the lighthouse still waits for one to join",
    ),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A disagreement: what to say about which field."""

    path: tuple[str | int, ...]
    message: str
    fix: str | None = None
    suggestion: str | None = None
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.message}{f'; {self.fix}' if self.fix else ''}"


#: Commands that start processes of their own, one a device.
_LAUNCHERS = re.compile(r"torchrun|torch\.distributed\.|accelerate|deepspeed|mpirun|srun|nproc")


def disagreements(job: Mapping[str, Any]) -> list[Finding]:
    """What is wrong between fields, warnings included.

    Args:
        job: All fields with their defaults filled in; those that are unusable may be missing.
    """
    return [
        *_counts(job),
        *_backoff(job),
        *_notice(job),
        *_timeouts(job),
        *_alternatives(job),
        *_distance(job),
        *_devices(job),
        *_preload(job),
        *_hot_standby(job),
    ]


def _number(table: Mapping[str, Any], key: str) -> float | None:
    value = table.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _table(job: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = job.get(key)
    return value if isinstance(value, Mapping) else {}


def _counts(job: Mapping[str, Any]) -> list[Finding]:
    low, high = _number(job, "min_replicas"), _number(job, "replicas")
    if low is None or high is None or low <= high or high < 1:
        return []
    message = f"min_replicas ({low:g}) must not be larger than replicas ({high:g})"
    return [Finding(("min_replicas",), message, f"lower min_replicas to {high:g}, or raise replicas")]


def _backoff(job: Mapping[str, Any]) -> list[Finding]:
    recovery = _table(job, "recovery")
    first, longest = _number(recovery, "backoff_s"), _number(recovery, "backoff_max_s")
    if first is None or longest is None or first <= longest or longest < 0:
        return []
    message = f"backoff_max_s ({longest:g}) must not be smaller than backoff_s ({first:g})"
    return [Finding(("recovery", "backoff_max_s"), message)]


def _notice(job: Mapping[str, Any]) -> list[Finding]:
    if _table(job, "recovery").get("on_notice") != "checkpoint" or job.get("checkpoint") is not None:
        return []
    fix = "say where to: checkpoint: {to: s3://bucket/folder, every_steps: 100}"
    return [Finding(("recovery", "on_notice"), "checkpoint: the job has no `checkpoint` to save to", fix)]


def _timeouts(job: Mapping[str, Any]) -> list[Finding]:
    lighthouse = _table(job, "lighthouse")
    found = []
    for lower, higher, equal, why in _RUNGS:
        low, high = _number(lighthouse, lower), _number(lighthouse, higher)
        if low is None or high is None or low <= 0 or high <= 0 or low < high or (equal and low == high):
            continue
        relation = "must not be longer than" if equal else "must be shorter than"
        message = f"{lower} ({low:g}) {relation} {higher} ({high:g}): {why}"
        found.append(Finding(("lighthouse", lower), message, f"the order is {LADDER}"))
    return found


def _alternatives(job: Mapping[str, Any]) -> list[Finding]:
    resources = _table(job, "resources")
    if resources.get("any_of") is None or resources.get("ordered") is None:
        return []
    return [Finding(("resources", "ordered"), "any_of and ordered exclude each other", "keep one of the two")]


def _distance(job: Mapping[str, Any]) -> list[Finding]:
    if job.get("placement") != "any" or job.get("sync", EVERY_STEP) != EVERY_STEP:
        return []
    message = "any: groups that exchange gradients at each step must share a network"
    fix = "write placement: same-zone, or sync: diloco(20), with which a session averages only every 20 steps"
    return [Finding(("placement",), message, fix)]


def _devices(job: Mapping[str, Any]) -> list[Finding]:
    """Notices about accelerators; reads the canonical spelling only."""
    accelerators, ranks = _table(job, "resources").get("accelerators"), _number(job, "ranks_per_replica")
    path = ("resources", "accelerators")
    found = []
    if isinstance(accelerators, Mapping) and len(accelerators) > 1:
        listed = " or ".join(f"{count} x {name}" for name, count in accelerators.items())
        found.append(Finding(path, f"means any of: {listed}, for each replica group", severity="warning"))
    if isinstance(accelerators, str) and ranks is not None:
        name, _, count = accelerators.partition(":")
        if count.isdigit() and int(count) % max(int(ranks), 1):
            message = f"{count} x {name} cannot be shared evenly by ranks_per_replica ({ranks:g})"
            found.append(Finding(path, message, f"set ranks_per_replica: {count}", severity="warning"))
        elif count.isdigit() and int(count) > ranks and not _LAUNCHERS.search(str(job.get("run"))):
            each, processes = int(count) // int(ranks), f"{ranks:g} process{'' if ranks == 1 else 'es'}"
            message = (
                f"{count} x {name} for {processes} of a group (ranks_per_replica: {ranks:g}): each sees {each} "
                "devices, and has to use all of them by itself"
            )
            fix = f"for one process a device: ranks_per_replica: {count}"
            found.append(Finding(path, message, fix, severity="warning"))
    return found


def _is_python(run: str) -> bool:
    command = rank_command(run)
    program = command["argv"][0].rpartition("/")[2] if command["kind"] == "exec" else ""
    return program.startswith("python")


def _preload(job: Mapping[str, Any]) -> list[Finding]:
    run, preload = job.get("run"), job.get("preload")
    if not preload or not isinstance(run, str):
        return []
    if _table(job, "recovery").get("standby") == 0:
        return [Finding(("preload",), "does nothing while recovery.standby is 0", severity="warning")]
    if not _is_python(run):
        message = "does nothing: only a `run` that is one python command can be taken over by a warm standby"
        return [Finding(("preload",), message, severity="warning")]
    return []


def _hot_standby(job: Mapping[str, Any]) -> list[Finding]:
    run, recovery = job.get("run"), _table(job, "recovery")
    path = ("recovery", "standby_until")
    if recovery.get("standby_until") != "session" or not isinstance(run, str):
        return []
    if recovery.get("standby") == 0:
        return [Finding(path, "does nothing while recovery.standby is 0", severity="warning")]
    if not _is_python(run):
        message = "does nothing: only a `run` that is one python command can be taken over by a standby"
        return [Finding(path, message, severity="warning")]
    if _table(job, "resources").get("accelerators") is not None:
        message = "session: each standby holds a second copy of the model on its rank's device"
        return [Finding(path, message, "leave it at imports where that does not fit", severity="warning")]
    return []
