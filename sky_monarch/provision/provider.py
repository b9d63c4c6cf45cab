"""What a provider is: the one place that knows how a host comes into being, and how it goes."""

from __future__ import annotations

import enum
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sky_monarch.errors import LaunchError
from sky_monarch.launch.door import Door
from sky_monarch.launch.placement import cluster_name

__all__ = [
    "HostOrder",
    "Kind",
    "Launched",
    "Notice",
    "Provider",
    "ProvisionError",
    "Seen",
    "Superseded",
    "Turn",
    "cluster_of",
    "is_head",
    "planned_price",
    "task_of",
]


class Kind(enum.StrEnum):
    """What a failed launch says about the next one."""

    CAPACITY = "capacity"
    """There is none now; there may be some later, or elsewhere."""
    CREDENTIALS = "credentials"
    """We are not who may ask: no other attempt helps until somebody mends that."""
    REFUSED = "refused"
    """This will never be launched there."""
    ERROR = "error"
    """Something failed on the way; the same again may work."""


class Seen(enum.StrEnum):
    """What a provider says of a cluster."""

    UP = "up"
    INIT = "init"
    """On its way, or not quite there any more: proves nothing."""
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    """No answer: proves nothing."""


class ProvisionError(LaunchError):
    """A provider did not do what it was asked for.

    Attributes:
        kind: What that says about the next attempt.
    """

    def __init__(self, message: str, *, kind: Kind = Kind.ERROR, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class Superseded(Exception):  # noqa: N818  (no error: the controller wants something else by now)
    """A wait was given up, because something else is wanted or this process ends. Nothing was undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """What the controller wants of one host.

    Attributes:
        host: Its name.
        attempt: Counts how often it was provisioned, from 1. Each one is fenced from those before it.
        want: ``up`` or ``down``.
        reason: Why.
        groups: Replica groups on it.
        replaces: An older attempt of which a cluster may be left; 0: one that nobody remembers.
        doubted: Its agent is silent: whether there is such a host is to be asked out of turn.
        agent: What ``SKY_MONARCH_HOST`` holds: configuration of its agent, no secrets.
        enrolment: What ``SKY_MONARCH_ENROLMENT`` holds: base64 of the secrets of this attempt. Empty where the
            controller believes that it is up.
    """

    host: str
    attempt: int
    want: str
    reason: str = ""
    groups: tuple[int, ...] = ()
    replaces: int | None = None
    doubted: bool = False
    agent: Mapping[str, Any] = field(default_factory=dict)
    enrolment: str = field(default="", repr=False)

    @property
    def cluster(self) -> str:
        """Name of the cluster of this attempt."""
        return cluster_name(self.host, self.attempt)

    @property
    def key(self) -> tuple[int, str]:
        """What makes it another order. The enrolment is issued anew in each answer."""
        return self.attempt, self.want


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a host is to try.

    Attributes:
        choice: Number of the choice in the plan.
        infra: Where exactly, where others of the job are up already; None: as the choice says.
    """

    choice: int
    infra: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A host that is there.

    Attributes:
        place: Where, for people.
        infra: Where, as SkyPilot spells it, for those that follow it; None where nothing need follow.
        usd_per_hour: What it costs; None where that is unknown.
    """

    place: str | None = None
    infra: str | None = None
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What a provider is certain of without having been asked: a host is about to go, or gone.

    Attributes:
        host: Which.
        attempt: Of which attempt; 0: of whichever there is.
        reason: What it says.
    """

    host: str
    attempt: int
    reason: str


class Provider(Protocol):
    """Launches hosts. All methods may block, each within a limit of its own, and are called from many threads.

    Nothing but :class:`ProvisionError` and :class:`Superseded` is raised.
    """

    def launch(
        self, order: HostOrder, choice: Mapping[str, Any], turn: Turn, *, stop: threading.Event
    ) -> Launched:
        """Bring up one host, or go on with what an earlier process of us began for the same attempt.

        Args:
            order: Which host and attempt.
            choice: The choice of the plan, :meth:`Choice.to_json`.
            turn: Which of them that is, and where exactly.
            stop: Set where the launch is not wanted any more; what there is of it is left as it is.

        Raises:
            ProvisionError: It did not come up.
            Superseded: ``stop`` was set.
        """
        ...

    def found(self, host: str) -> dict[str, int]:
        """Clusters of any attempt at a host, whoever made them, with the attempt. Cheap: what is noted counts.

        Raises:
            ProvisionError: It does not say.
        """
        ...

    def status(self, clusters: Sequence[str]) -> dict[str, Seen]:
        """What became of clusters, asked anew; one that the provider says nothing of is :attr:`Seen.UNKNOWN`."""
        ...

    def certain(self, clusters: Sequence[str]) -> dict[str, str]:
        """Of clusters whose agents are silent those that are gone for certain, and why; asked anew, once.

        One that there is, or that nothing is known of, is left out; so are all, where there is no answer.
        """
        ...

    def down(self, cluster: str, *, stop: threading.Event) -> None:
        """End a cluster in whatever phase it is, a launch under way too. Twice is fine; of one that is gone, too.

        Args:
            cluster: Which.
            stop: Set where this process ends; what was begun goes on without it.

        Raises:
            ProvisionError: It may still be there.
            Superseded: ``stop`` was set.
        """
        ...

    def logs(self, cluster: str, *, lines: int) -> str:
        """The last lines of what its task printed; empty where there are none, or nobody can tell."""
        ...

    def door(self, head: str, attempt: int) -> Door | None:
        """How the API of this attempt at a head is reached from here; None while nothing of it is there.

        Raises:
            ProvisionError: Nobody can say.
        """
        ...

    def notices(self) -> list[Notice]:
        """What it has learnt unasked since the last call; empty for a provider that never does."""
        ...

    def close(self) -> None:
        """This process ends; clusters stay as they are."""
        ...


def task_of(choice: Mapping[str, Any], cluster: str) -> Mapping[str, Any] | None:
    """The task of a cluster in a choice of the plan; None where it has none.

    A host that a run was scaled to is as the first one, which has the most groups.
    """
    tasks: dict[str, Mapping[str, Any]] = {one["cluster"]: one["task"] for one in choice.get("tasks") or ()}
    first = _first_of(choice, cluster)
    if cluster not in tasks and first is not None and first["cluster"] in tasks:
        return {**tasks[first["cluster"]], "name": cluster}
    return tasks.get(cluster)


def is_head(choice: Mapping[str, Any], cluster: str) -> bool:
    """Whether a cluster is the head of the run in a choice of the plan."""
    head = choice.get("head") or {}
    return bool(head.get("own")) and head.get("cluster") == cluster


def planned_price(choice: Mapping[str, Any], host: str) -> float | None:
    """What the plan says that a host or the head costs in an hour; None where it does not know."""
    own: float | None = choice.get("head_usd_per_hour")
    if is_head(choice, host):
        return own
    whole: float | None = choice.get("usd_per_hour")
    if whole is None or cluster_of(choice, host) is None:
        return None
    return (whole - (own or 0.0)) / max(1, len(choice.get("hosts") or ()))


def cluster_of(choice: Mapping[str, Any], host: str) -> Mapping[str, Any] | None:
    """The host set of this name in a choice of the plan; None where it has none."""
    for entry in choice.get("hosts") or ():
        if entry["cluster"] == host:
            found: Mapping[str, Any] = entry
            return found
    first = _first_of(choice, host)
    return None if first is None else {**first, "cluster": host, "groups": []}


def _first_of(choice: Mapping[str, Any], cluster: str) -> Mapping[str, Any] | None:
    """The first host set of a choice, where ``cluster`` is another one of the same job, ``<job>-h<k>``."""
    first: Mapping[str, Any] | None = next(iter(choice.get("hosts") or ()), None)
    stem = "" if first is None else first["cluster"].removesuffix("-h0")
    return first if re.fullmatch(rf"{re.escape(stem)}-h\d+", cluster) else None
