"""What the policy knows (state), learns (events) and wants (actions): plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
    "Host",
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
class Group:
    """One replica group.

    Attributes:
        replica: Its number.
        host: Host that it lives on.
        phase: What it is doing.
        generation: Newest generation known; 0 before the first start.
        started: A start was ordered.
        up: All its ranks ran at once, at least one time.
        live: Ranks alive now.
        restarts_ns: When the restarts of the current window were scheduled.
        reason: Why it is where it is; None where nothing went wrong.
        step: Step it was done at; None where no session said one.
        failed_after: What went wrong after it was done.
    """

    replica: int
    host: str
    phase: GroupPhase = GroupPhase.PENDING
    generation: int = 0
    started: bool = False
    up: bool = False
    live: frozenset[int] = frozenset()
    restarts_ns: tuple[int, ...] = ()
    reason: str | None = None
    step: int | None = None
    failed_after: str | None = None

    @property
    def at_rest(self) -> bool:
        """Whether no process of it can be left."""
        return not self.live and (self.phase.final or not self.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host and its agent; ``incarnation`` is None until an agent connected."""

    name: str
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
    groups: tuple[Group, ...]
    hosts: tuple[Host, ...]
    draining: bool = False
    released: bool = False
    root_cause: str | None = None
    notes: tuple[str, ...] = ()

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            KeyError: There is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)


def initial_state(hosts: dict[str, tuple[int, ...]], *, setup: bool) -> State:
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
        groups=tuple(Group(replica=replica, host=homes[replica]) for replica in range(count)),
        hosts=tuple(Host(name=name, setup=first) for name in hosts),
    )


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStarted:
    """A controller process begins (again): no agent is connected yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One group as its agent sees it when it connects."""

    replica: int
    generation: int
    state: GroupPhase
    live: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnected:
    """An agent dialled in; ``groups`` is all that it supervises."""

    host: str
    incarnation: int
    mono_ns: int
    groups: tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDisconnected:
    """An agent's connection ended."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupStarted:
    """A host's preparation began."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFinished:
    """A host's preparation ended; ``failure`` is None where it went well."""

    host: str
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted:
    """A generation begins."""

    replica: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpawned:
    """A rank process runs."""

    replica: int
    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank process ended; ``failure`` is None for code 0 and for ranks that we ended."""

    replica: int
    rank: int
    generation: int
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksUp:
    """All ranks of a generation run, and none has a session that could tell of a commit."""

    replica: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCommit:
    """A generation committed its first step."""

    replica: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded:
    """A generation is over, for this reason."""

    replica: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartScheduled:
    """The agent spends a restart of the group's budget on ``generation``."""

    replica: int
    generation: int
    mono_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGivenUp:
    """The agent spent the budget that was leased to it."""

    replica: int
    generation: int
    restarts: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    """The group's work is done."""

    replica: int
    generation: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStopped:
    """The group was stopped on request."""

    replica: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DownRequested:
    """Somebody wants the run to end."""

    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """A timer that the policy set has run out."""

    name: str


Event = (
    ControllerStarted
    | AgentConnected
    | AgentDisconnected
    | SetupStarted
    | SetupFinished
    | GenerationStarted
    | RankSpawned
    | RankExited
    | RanksUp
    | FirstCommit
    | GenerationEnded
    | RestartScheduled
    | GroupGivenUp
    | GroupDone
    | GroupStopped
    | DownRequested
    | TimerFired
)

# --- actions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Prepare a host."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """Start a group with a lease of ``max_restarts``."""

    host: str
    replica: int
    generation: int
    max_restarts: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGroup:
    """End a group in order."""

    host: str
    replica: int
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Let sessions that are done leave."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End an agent and all that it has."""

    host: str
    grace_s: float
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


Action = Setup | StartGroup | StopGroup | Release | Shutdown | SetTimer | CancelTimer
