"""What the policy learns of hosts that are provisioned: plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "BudgetSpent",
    "Examined",
    "FailureKind",
    "HostLeaving",
    "HostReport",
    "HostReported",
    "JobPlaced",
    "LauncherCame",
    "LauncherGone",
    "Reached",
]


class HostReported(StrEnum):
    """What the launcher says of a host."""

    LAUNCHING = "launching"
    LAUNCHED = "launched"
    FAILED = "failed"
    ENDED = "ended"
    """The provider has ended it, or it is not there any more."""
    DOWN = "down"
    """It was taken down, as wanted."""
    DOWN_FAILED = "down_failed"


class FailureKind(StrEnum):
    """Why a launch failed: what helps differs."""

    CAPACITY = "capacity"
    """Nobody has room now: it is tried again for as long as the run goes on."""
    CREDENTIALS = "credentials"
    """The provider does not know us: trying again is in vain."""
    REFUSED = "refused"
    """It knows us, and says no (a quota, a request that it cannot serve)."""
    ERROR = "error"
    """Anything else: it is tried again a few times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The launcher says what became of one attempt at a host.

    Attributes:
        host: Which.
        attempt: Which attempt.
        state: What became of it.
        kind: Of a failure.
        reason: Why.
        left: Of a failed launch: a cluster of it may be there all the same, for it could not be taken down.
    """

    host: str
    attempt: int
    state: HostReported
    kind: FailureKind | None = None
    reason: str | None = None
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlaced:
    """The launcher is about to try a place where groups lie on hosts in another way.

    Attributes:
        choice: Number of that place in the plan.
        homes: Replica groups by host; none on a spare one.
    """

    choice: int
    homes: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeaving:
    """An agent was told that its host is about to be taken away."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """An agent has tried whether it reaches others: for each its name, and why not; empty where it does."""

    host: str
    targets: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """An agent had its host looked at; ``unfit`` is what makes it so, with what helps, and None where nothing does."""

    host: str
    unfit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherCame:
    """Somebody asks what is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherGone:
    """Nobody has asked what is wanted for so long."""

    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpent:
    """What the job may cost is spent."""

    reason: str
