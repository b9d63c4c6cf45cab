"""What the policy learns: plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field

from sky_monarch.controller.host_events import (
    BudgetSpent,
    Examined,
    HostLeaving,
    HostReport,
    JobPlaced,
    LauncherCame,
    LauncherGone,
    Reached,
)
from sky_monarch.controller.phases import GroupPhase, RunPhase

__all__ = [
    "AgentConnected",
    "AgentDisconnected",
    "ControllerStarted",
    "DownRequested",
    "Event",
    "FirstCommit",
    "GenerationEnded",
    "GenerationStarted",
    "GroupDone",
    "GroupGivenUp",
    "GroupStopped",
    "HeadReplaced",
    "JournalLost",
    "RankExited",
    "RankSpawned",
    "RanksUp",
    "RestartScheduled",
    "Scaled",
    "SetupFinished",
    "SetupStarted",
    "Snapshot",
    "TimerFired",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStarted:
    """A controller process begins (again): no agent is connected yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLost:
    """Nothing is known of what happened before.

    Attributes:
        reason: Why.
        generations: The newest generation that each replica is known to have had.
        outcome: What the run ended as; None where it goes on.
        ended: The reason for that end, and its exit code.
        scaled: To how many groups it was scaled, where that is known to have happened.
        placed: For which place groups were placed on hosts, where that was not the first of the plan.
    """

    reason: str
    generations: tuple[tuple[int, int], ...] = ()
    outcome: RunPhase | None = None
    ended: tuple[str, int] = ("", 1)
    scaled: Scaled | None = None
    placed: JobPlaced | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReplaced:
    """The head of the run was lost with its lighthouse and its journal, and this is the head that follows.

    Nothing of the one before is left: no host, and nobody who could commit.

    Attributes:
        reason: What became of it.
        attempts: The newest attempt at each host that there was.
        generations: The newest generation of each group.
        scaled: To how many groups the run had been scaled; None where it had not.
    """

    reason: str
    attempts: tuple[tuple[str, int], ...]
    generations: tuple[tuple[int, int], ...]
    scaled: Scaled | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One group as its agent sees it when it connects; ``restarts`` are those inside the window."""

    replica: int
    generation: int
    state: GroupPhase
    live: frozenset[int]
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnected:
    """An agent dialled in; ``groups`` is all that it supervises.

    Attributes:
        host: Its host.
        incarnation: Of the agent.
        mono_ns: When.
        groups: All that it supervises.
        attempt: At the host; 0 where it was not provisioned.
        probe: Where other hosts can try whether they reach it; None: nowhere.
        examining: The host is being looked at: what comes of it is told, and nothing starts before.
        begun: The newest generation of groups of which the agent before it began some that nobody was told of.
    """

    host: str
    incarnation: int
    mono_ns: int
    groups: tuple[Snapshot, ...]
    begun: tuple[tuple[int, int], ...] = ()
    attempt: int = 0
    probe: str | None = None
    examining: bool = False


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
    """A host's preparation ended; ``failure`` is None where it went well.

    Attributes:
        host: The host.
        failure: What went wrong.
        killed: A signal ended it: nothing that the job can be blamed for.
    """

    host: str
    failure: str | None
    killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted:
    """A generation begins; ``store`` is where the first host of a wide group serves the group's store.

    ``host``, here and below, is who says so, and ``mono_ns`` when: only of wide groups is that asked.
    """

    replica: int
    generation: int
    store: str | None = None
    host: str = field(default="", compare=False)
    mono_ns: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpawned:
    """A rank process runs."""

    replica: int
    rank: int
    generation: int
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank process ended; ``failure`` is None for code 0 and for ranks that we ended."""

    replica: int
    rank: int
    generation: int
    failure: str | None
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksUp:
    """All ranks of a generation run, and none has a session that could tell of a commit."""

    replica: int
    generation: int
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCommit:
    """A generation committed its first step."""

    replica: int
    generation: int
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded:
    """A generation is over, for this reason; ``stopped`` says that it was asked for.

    ``never_ran``, of a wide group's part: why its command did not run at all; None where it did, or may have.
    """

    replica: int
    generation: int
    reason: str
    stopped: bool = field(default=False, compare=False)
    never_ran: str | None = field(default=None, compare=False)
    host: str = field(default="", compare=False)
    mono_ns: int | None = field(default=None, compare=False)


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
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    """The group's work is done."""

    replica: int
    generation: int
    step: int | None
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStopped:
    """The group was stopped on request."""

    replica: int
    generation: int
    host: str = field(default="", compare=False)
    mono_ns: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DownRequested:
    """Somebody wants the run to end."""

    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Somebody wants another number of replica groups.

    Attributes:
        replicas: How many: those with the lowest numbers.
        homes: Groups that there never were, by host. Hosts that there never were are to be provisioned.
        reason: Why.
    """

    replicas: int
    homes: tuple[tuple[str, tuple[int, ...]], ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """A timer that the policy set has run out."""

    name: str


Event = (
    ControllerStarted
    | JournalLost
    | HeadReplaced
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
    | Scaled
    | TimerFired
    | HostReport
    | JobPlaced
    | HostLeaving
    | Reached
    | Examined
    | LauncherCame
    | LauncherGone
    | BudgetSpent
)
