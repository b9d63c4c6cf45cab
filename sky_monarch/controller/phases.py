"""The states of a run, of its groups and of the preparation of its hosts."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["GroupPhase", "RunPhase", "SetupPhase"]


class RunPhase(StrEnum):
    """State of a run, as clients see it."""

    PENDING = "PENDING"
    SETUP = "SETUP"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DEGRADED = "DEGRADED"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """Whether nothing can follow any more."""
        return self in _ENDED


_ENDED = frozenset({RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.FAILED_SETUP, RunPhase.CANCELLED})


class GroupPhase(StrEnum):
    """State of a replica group, as clients see it."""

    PENDING = "PENDING"
    SETUP = "SETUP"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    STOPPING = "STOPPING"
    DONE = "DONE"
    GIVEN_UP = "GIVEN_UP"
    STOPPED = "STOPPED"

    @property
    def final(self) -> bool:
        """Whether the group is never started again."""
        return self in _FINAL


_FINAL = frozenset({GroupPhase.DONE, GroupPhase.GIVEN_UP, GroupPhase.STOPPED})


class SetupPhase(StrEnum):
    """How far a host's preparation is."""

    NEEDED = "needed"
    SENT = "sent"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
