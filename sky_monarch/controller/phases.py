"""The states of a run, of its groups, and of its hosts and their preparation."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["GroupPhase", "HostPhase", "PartPhase", "Reaping", "RunPhase", "SetupPhase"]


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


class PartPhase(StrEnum):
    """State of one host's part of a wide group, in the group's newest generation."""

    IDLE = "idle"
    """Nothing of the group is there."""
    WAITING = "waiting"
    """It is to start as soon as the group's store is known."""
    ORDERED = "ordered"
    ENDING = "ending"
    """Its end is asked for, or certain, and not told yet."""
    DONE = "done"
    """All its ranks are; they may wait to be released."""


class SetupPhase(StrEnum):
    """How far a host's preparation is."""

    NEEDED = "needed"
    SENT = "sent"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class HostPhase(StrEnum):
    """Where a host stands. All but the first are provisioned: a launcher makes them, and is to end them."""

    HERE = "HERE"
    """Simply there: nobody provisions it."""
    WANTED = "WANTED"
    """Asked for; nobody has said that he is at it."""
    LAUNCHING = "LAUNCHING"
    UP = "UP"
    """It was launched, or its agent has dialled."""
    WAITING = "WAITING"
    """This attempt is over, and the next one waits for its back-off."""
    GIVEN_UP = "GIVEN_UP"
    DOWN = "DOWN"
    """It is not needed any more."""


class Reaping(StrEnum):
    """How far the end of a run is with its hosts."""

    NO = "no"
    SOON = "soon"
    """What was printed last is still read from them."""
    NOW = "now"
    """They are to be taken down."""
