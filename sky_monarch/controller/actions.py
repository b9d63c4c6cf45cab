"""What the policy wants: plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "Action",
    "CancelTimer",
    "EndGeneration",
    "Fence",
    "GiveUpGroup",
    "GroupsPlaced",
    "HostLost",
    "Probe",
    "ProbeTarget",
    "Release",
    "ScheduleRestart",
    "SetTimer",
    "Setup",
    "Shutdown",
    "StartGroup",
    "StopGroup",
    "WhoSaves",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Prepare a host."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """Start a group with a lease of ``max_restarts``.

    ``spent_s`` says how long ago the others were spent: they are allowed again once they have left the window.
    """

    host: str
    replica: int
    generation: int
    max_restarts: int
    spent_s: tuple[float, ...] = ()
    store: str | None = None
    """Where another host of the group serves its store."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGroup:
    """End a group in order."""

    host: str
    replica: int
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGeneration:
    """End a host's part of a generation that is over on another host of its group, at once."""

    host: str
    replica: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRestart:
    """Write down that a restart of a wide group's budget is spent on ``generation``."""

    replica: int
    generation: int
    delay_s: float
    restarts_left: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpGroup:
    """Write down that a wide group's budget is spent, or that its command cannot be started.

    Attributes:
        replica: The group.
        generation: Its last one.
        restarts: Those spent.
        reason: Why the last generation ended.
        times: Generations in a row whose command did not run at all; 0: the budget is spent.
    """

    replica: int
    generation: int
    restarts: int
    reason: str
    times: int = 0

    def row(self) -> dict[str, Any]:
        """For the journal; an agent writes the same of a group that it has to itself."""
        whose = {"replica": self.replica, "generation": self.generation, "restarts": self.restarts}
        if self.times:
            return {**whose, "cause": "cannot_start", "error": self.reason, "times": self.times}
        return {**whose, "cause": "budget", "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Let sessions that are done leave."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoSaves:
    """Tell a host that is leaving which of its groups saves what nobody else has; None where others stay."""

    host: str
    replica: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End an agent and all that it has."""

    host: str
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Hang up on an agent for good: it ends its ranks and itself. ``attempt`` is the one that it is of."""

    host: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost:
    """Write down what a lost host took along: replica groups, and the generation that each of them had."""

    host: str
    attempt: int
    groups: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsPlaced:
    """Write down that the groups of ``host`` are on host ``on`` from now on."""

    host: str
    on: str
    groups: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """A host to be reached, as its agent said where."""

    host: str
    attempt: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Let a host try whether it reaches others."""

    host: str
    targets: tuple[ProbeTarget, ...]
    deadline_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Send :class:`TimerFired` after ``delay_s``; replaces a timer of the same name."""

    name: str
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer:
    """Forget a timer; nothing happens where it is not set."""

    name: str


Action = (
    Setup
    | StartGroup
    | StopGroup
    | EndGeneration
    | Release
    | WhoSaves
    | Shutdown
    | Fence
    | Probe
    | HostLost
    | GroupsPlaced
    | ScheduleRestart
    | GiveUpGroup
    | SetTimer
    | CancelTimer
)
