"""Checks what the launcher says of hosts, and turns the rows of it into events of the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from sky_monarch.controller.host_events import (
    BudgetSpent,
    Examined,
    FailureKind,
    HostLeaving,
    HostReport,
    HostReported,
    LauncherCame,
    LauncherGone,
    Reached,
)
from sky_monarch.errors import ConfigError, RunNotFoundError

__all__ = ["HOST_EVENTS", "check_head_bill", "check_host_report", "check_placement"]

_Words = TypeVar("_Words", bound=StrEnum)
_MAX_REASON, _MAX_PLACE = 4000, 200
_MOST_FINDINGS = 3
_FIELDS = frozenset({"host", "attempt", "state", "kind", "reason", "left", "choice", "place", "usd_per_hour"})


def check_host_report(
    report: Mapping[str, Any], attempts: Mapping[str, int], *, choices: int
) -> dict[str, Any]:
    """Check one report before anything is done with it.

    Args:
        report: What arrived.
        attempts: The newest attempt at each host that is provisioned.
        choices: How many places the job may run in.

    Returns:
        The row for the journal, all fields in it.

    Raises:
        ConfigError: It is not what the API allows.
        RunNotFoundError: There is no such host.
    """
    unknown = sorted(report.keys() - _FIELDS)
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r:.40}")
    host = report.get("host")
    if not isinstance(host, str) or host not in attempts:
        raise RunNotFoundError(f"no host {host!r:.80} of this run is provisioned")
    state = _word(report.get("state"), HostReported, "state")
    kind = report.get("kind")
    if kind is not None or state is HostReported.FAILED:
        kind = str(_word(FailureKind.ERROR if kind is None else kind, FailureKind, "kind"))
    attempt = report.get("attempt")
    if not _whole(attempt, min(1, attempts[host]), attempts[host]):  # 0: which ones there were is forgotten
        raise ConfigError(f"attempt {attempt!r:.20} at host {host}: it is at attempt {attempts[host]}")
    choice = report.get("choice")
    if choice is not None and not _whole(choice, 0, max(0, choices - 1)):
        raise ConfigError(f"choice {choice!r:.20} is not one of the {choices} of this job")
    left = report.get("left", False)
    if not isinstance(left, bool):
        raise ConfigError(f"left is {left!r:.20}, not true or false")
    return {
        "event": "host_report",
        "host": host,
        "attempt": attempt,
        "state": str(state),
        "kind": kind,
        "reason": _text(report.get("reason"), _MAX_REASON, "reason"),
        "left": left,
        "choice": choice,
        "place": _text(report.get("place"), _MAX_PLACE, "place"),
        "usd_per_hour": _price(report.get("usd_per_hour")),
    }


def check_head_bill(bill: Mapping[str, Any]) -> dict[str, Any]:
    """Check what a launcher says of the price of the head, and make it a row of the journal.

    Raises:
        ConfigError: It is not what the API allows.
    """
    unknown = sorted(bill.keys() - {"cluster", "since_ms", "place", "usd_per_hour"})
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r:.40}")
    cluster = _text(bill.get("cluster"), _MAX_PLACE, "cluster")
    if cluster is None:
        raise ConfigError("cluster is missing")
    since_ms = bill.get("since_ms")
    if not _whole(since_ms, 0, 2**53):
        raise ConfigError(f"since_ms is {since_ms!r:.40}, not a moment of Unix time")
    return {
        "event": "head_launched",
        "cluster": cluster,
        "since_ms": since_ms,
        "place": _text(bill.get("place"), _MAX_PLACE, "place"),
        "usd_per_hour": _price(bill.get("usd_per_hour")),
    }


def check_placement(order: Mapping[str, Any], *, replicas: int, choices: int) -> dict[str, Any]:
    """Check where a launcher wants groups to be, and make it a row of the journal.

    Args:
        order: ``{choice, homes: {host: [replica, …]}}``.
        replicas: Groups of the run.
        choices: How many places the job may run in.

    Raises:
        ConfigError: It is not what the API allows.
    """
    unknown = sorted(order.keys() - {"choice", "homes"})
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r:.40}")
    choice, homes = order.get("choice"), order.get("homes")
    if not _whole(choice, 0, max(0, choices - 1)):
        raise ConfigError(f"choice {choice!r:.20} is not one of the {choices} of this job")
    if not isinstance(homes, Mapping) or not all(isinstance(mine, list) for mine in homes.values()):
        raise ConfigError("homes is no map of lists of groups")
    if not all(isinstance(name, str) and 0 < len(name) <= _MAX_PLACE for name in homes):
        raise ConfigError("homes has a host without a usable name")
    placed = [replica for mine in homes.values() for replica in mine]
    if not all(_whole(one, 0, replicas - 1) for one in placed) or sorted(placed) != list(range(replicas)):
        raise ConfigError(f"homes do not place each of the {replicas} groups once")
    return {
        "event": "job_placed",
        "choice": choice,
        "homes": {name: list(mine) for name, mine in homes.items()},
    }


def _price(price: object) -> float | None:
    if price is None:
        return None
    if not (isinstance(price, int | float) and _number(price) and 0 <= price < math.inf):
        raise ConfigError(f"usd_per_hour is {price!r:.20}, not a price")
    return float(price)


def _word(value: object, words: type[_Words], what: str) -> _Words:
    try:
        return words(str(value))
    except ValueError:
        raise ConfigError(f"{what} is {value!r:.40}, not one of {', '.join(words)}") from None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _text(value: object, most: int, what: str) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise ConfigError(f"{what} is not a text")
    return value[:most]  # a launcher's error may be long: what it begins with is kept


def _host_report(row: Mapping[str, Any]) -> HostReport:
    return HostReport(
        host=row["host"],
        attempt=row["attempt"],
        state=HostReported(row["state"]),
        kind=None if row["kind"] is None else FailureKind(row["kind"]),
        reason=row["reason"],
        left=row.get("left", False),  # rows of an older version do not have it
    )


def _reached(row: Mapping[str, Any]) -> Reached:
    def error(target: Mapping[str, Any]) -> str:
        return "" if target["ok"] else target.get("error") or f"{target['address']} cannot be reached"

    return Reached(host=row["host"], targets=tuple((one["host"], error(one)) for one in row["targets"]))


def _examined(row: Mapping[str, Any]) -> Examined:
    bad = [one for one in row["findings"] if one["severity"] == "error"]
    words = [
        f"{one['check']}: {one['message']}" + (f"; fix: {one['fix']}" if one.get("fix") else "")
        for one in bad[:_MOST_FINDINGS]
    ]
    if len(bad) > _MOST_FINDINGS:
        words.append(f"and {len(bad) - _MOST_FINDINGS} more")
    return Examined(host=row["host"], unfit=" | ".join(words)[:_MAX_REASON] or None)


HOST_EVENTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "host_report": _host_report,
    "host_leaving": lambda row: HostLeaving(host=row["host"], reason=row["reason"]),
    "reached": _reached,
    "examined": _examined,
    "launcher_came": lambda _row: LauncherCame(),
    "launcher_gone": lambda row: LauncherGone(silent_s=row["silent_s"]),
    "budget_spent": lambda row: BudgetSpent(reason=row["reason"]),
}
"""What rows of the journal are to the policy, by the name of their event."""
