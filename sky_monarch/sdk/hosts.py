"""Hosts that were provisioned for a run: where each stands, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from sky_monarch.sdk._record import Record

__all__ = ["HostStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus(Record):
    """One host.

    Attributes:
        host: Its name; with SkyPilot that of its cluster.
        groups: Replica groups that live on it.
        spare: It is kept for the groups of a host that is lost, and has none.
        head: Lighthouse and controller run there; it has no groups either.
        attempt: How often it was provisioned.
        phase: WANTED, LAUNCHING, UP, WAITING (for its next attempt), GIVEN_UP or DOWN.
        reason: Why; None where nothing went wrong.
        gone: Whoever provisions has said that nothing of it is left: it does not bill.
        since_ms: When it came to that, as Unix time in milliseconds.
        stops_in_s: Seconds until it is taken away, where it was told so; it leaves before that.
        place: Where it is, as its provider calls it.
        choice: Which of the places that the job may run in, counted from 0.
        usd_per_hour: What it costs; None where nobody has told.
        cost_usd: What it has cost so far, all attempts together.
        wasted_usd: Of that, what was paid before an attempt's first commit, and for attempts without one.
    """

    host: str
    groups: tuple[int, ...] = ()
    spare: bool = False
    head: bool = False
    attempt: int = 0
    phase: str = ""
    reason: str | None = None
    gone: bool = False
    since_ms: int | None = None
    stops_in_s: float | None = None
    place: str | None = None
    choice: int | None = None
    usd_per_hour: float | None = None
    cost_usd: float | None = None
    wasted_usd: float | None = None
