"""What the policy knows; with it, under one name, what it learns (events) and wants (actions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sky_monarch.controller.actions import (
    Action,
    CancelTimer,
    Release,
    SetTimer,
    Setup,
    Shutdown,
    StartGroup,
    StopGroup,
)
from sky_monarch.controller.events import (
    AgentConnected,
    AgentDisconnected,
    ControllerStarted,
    DownRequested,
    Event,
    FirstCommit,
    GenerationEnded,
    GenerationStarted,
    GroupDone,
    GroupGivenUp,
    GroupStopped,
    JournalLost,
    RankExited,
    RankSpawned,
    RanksUp,
    RestartScheduled,
    SetupFinished,
    SetupStarted,
    Snapshot,
    TimerFired,
)
from sky_monarch.controller.groups import Group, Groups
from sky_monarch.controller.phases import (
    GroupPhase,
    RunPhase,
    SetupPhase,
)

__all__ = [
    "Action",
    "AgentConnected",
    "AgentDisconnected",
    "CancelTimer",
    "ControllerStarted",
    "DownRequested",
    "Event",
    "FirstCommit",
    "GenerationEnded",
    "GenerationStarted",
    "Group",
    "GroupDone",
    "GroupGivenUp",
    "GroupPhase",
    "GroupStopped",
    "Groups",
    "Host",
    "JournalLost",
    "Limits",
    "RankExited",
    "RankSpawned",
    "RanksUp",
    "Release",
    "RestartScheduled",
    "RunPhase",
    "SetTimer",
    "Setup",
    "SetupFinished",
    "SetupPhase",
    "SetupStarted",
    "Shutdown",
    "Snapshot",
    "StartGroup",
    "State",
    "StopGroup",
    "TimerFired",
    "initial_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the policy may spend. Times in seconds.

    Attributes:
        replicas: Replica groups in the run.
        min_replicas: Fewer able groups than this end the run.
        ranks_per_replica: Ranks in each group.
        max_restarts: Restarts of one group inside ``window_s``.
        window_s: Restarts older than this are forgotten.
        grace_s: Time between TERM and KILL where nobody says otherwise.
        drain_window_s: How long groups that are done wait for the others.
        leave_s: How long released ranks may take to leave (a last evaluation, a last save).
        stop_margin_s: How much longer than its grace time a stop may take.
        agent_lost_s: Silence of a host after which its groups count as lost.
    """

    replicas: int
    min_replicas: int
    ranks_per_replica: int
    max_restarts: int
    window_s: float
    grace_s: float
    drain_window_s: float = 60.0
    leave_s: float = 600.0
    stop_margin_s: float = 15.0
    agent_lost_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host and its agent; ``incarnation`` is None until an agent connected."""

    name: str
    replicas: tuple[int, ...] = ()
    connected: bool = False
    incarnation: int | None = None
    lost: bool = False
    setup: SetupPhase = SetupPhase.DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything the policy knows.

    Attributes:
        phase: State of the run.
        reason: Why; root cause first.
        outcome: What the run will end as, once that is decided.
        exit_code: What a client that waits for the run exits with; None while it goes on.
        grace_s: Grace time of a stop under way.
        groups: By replica.
        hosts: By position in the configuration.
        places: That position by name.
        unready: Hosts that are not prepared yet.
        draining: The drain window is open.
        released: Sessions were told to leave.
        root_cause: The first thing that cost the run a group for good.
        notes: What a success owes its reader.
    """

    phase: RunPhase = RunPhase.PENDING
    reason: str | None = None
    outcome: RunPhase | None = None
    exit_code: int | None = None
    grace_s: float = 0.0
    groups: Groups
    hosts: tuple[Host, ...]
    places: Mapping[str, int] = field(repr=False)
    unready: int = 0
    draining: bool = False
    released: bool = False
    root_cause: str | None = None
    notes: tuple[str, ...] = ()

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            KeyError: There is none.
        """
        return self.hosts[self.places[name]]


def initial_state(hosts: Mapping[str, tuple[int, ...]], *, setup: bool) -> State:
    """The state of a run that nothing has happened to.

    Args:
        hosts: Replicas by host; together they are ``0..replicas`` without a gap.
        setup: Whether hosts must be prepared first.

    Raises:
        ValueError: A replica is missing or named twice.
    """
    homes = {replica: name for name, replicas in hosts.items() for replica in replicas}
    count = sum(len(replicas) for replicas in hosts.values())
    if sorted(homes) != list(range(count)):
        raise ValueError(f"hosts must name each of the replicas 0..{count} once, got {hosts}")
    first = SetupPhase.NEEDED if setup else SetupPhase.DONE
    return State(
        groups=Groups.of(Group(replica=replica, host=homes[replica]) for replica in range(count)),
        hosts=tuple(Host(name=name, replicas=tuple(mine), setup=first) for name, mine in hosts.items()),
        places={name: place for place, name in enumerate(hosts)},
        unready=len(hosts) if setup else 0,
    )
