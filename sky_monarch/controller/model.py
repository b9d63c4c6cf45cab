"""What the policy knows; with it, under one name, what it learns (events) and wants (actions)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sky_monarch.controller.actions import (
    Action,
    CancelTimer,
    EndGeneration,
    Fence,
    GiveUpGroup,
    GroupsPlaced,
    HostLost,
    Probe,
    ProbeTarget,
    Release,
    ScheduleRestart,
    SetTimer,
    Setup,
    Shutdown,
    StartGroup,
    StopGroup,
    WhoSaves,
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
    HeadReplaced,
    JournalLost,
    RankExited,
    RankSpawned,
    RanksUp,
    RestartScheduled,
    Scaled,
    SetupFinished,
    SetupStarted,
    Snapshot,
    TimerFired,
)
from sky_monarch.controller.groups import Group, Groups, Part, Span
from sky_monarch.controller.host_events import (
    BudgetSpent,
    Examined,
    FailureKind,
    HostLeaving,
    HostReport,
    HostReported,
    JobPlaced,
    LauncherCame,
    LauncherGone,
    Reached,
)
from sky_monarch.controller.hosts import Host, Pair
from sky_monarch.controller.phases import (
    GroupPhase,
    HostPhase,
    PartPhase,
    Reaping,
    RunPhase,
    SetupPhase,
)
from sky_monarch.controller.spans import homes_of, places_of

__all__ = [
    "Action",
    "AgentConnected",
    "AgentDisconnected",
    "BudgetSpent",
    "CancelTimer",
    "ControllerStarted",
    "DownRequested",
    "EndGeneration",
    "Event",
    "Examined",
    "FailureKind",
    "Fence",
    "FirstCommit",
    "GenerationEnded",
    "GenerationStarted",
    "GiveUpGroup",
    "Group",
    "GroupDone",
    "GroupGivenUp",
    "GroupPhase",
    "GroupStopped",
    "Groups",
    "GroupsPlaced",
    "HeadReplaced",
    "Host",
    "HostLeaving",
    "HostLost",
    "HostPhase",
    "HostReport",
    "HostReported",
    "JobPlaced",
    "JournalLost",
    "LauncherCame",
    "LauncherGone",
    "Limits",
    "Pair",
    "Part",
    "PartPhase",
    "Probe",
    "ProbeTarget",
    "RankExited",
    "RankSpawned",
    "RanksUp",
    "Reached",
    "Reaping",
    "Release",
    "RestartScheduled",
    "RunPhase",
    "Scaled",
    "ScheduleRestart",
    "SetTimer",
    "Setup",
    "SetupFinished",
    "SetupPhase",
    "SetupStarted",
    "Shutdown",
    "Snapshot",
    "Span",
    "StartGroup",
    "State",
    "StopGroup",
    "TimerFired",
    "WhoSaves",
    "initial_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the policy may spend. Times in seconds.

    Attributes:
        replicas: Replica groups that the run began with.
        min_replicas: Fewer able groups than this end the run.
        ranks_per_replica: Ranks in each group.
        max_restarts: Restarts of one group inside ``window_s``.
        window_s: Restarts older than this are forgotten.
        backoff_s: First pause before a restart of a wide group that follows one without progress; it doubles.
        backoff_max_s: Longest such pause.
        part_silent_s: Silence of a host after which a wide group is ended on its other hosts.
        grace_s: Time between TERM and KILL where nobody says otherwise.
        drain_window_s: How long groups that are done wait for the others.
        leave_s: How long released ranks may take to leave (a last evaluation, a last save).
        stop_margin_s: How much longer than its grace time a stop may take.
        agent_lost_s: Silence of a host after which its groups count as lost.
        agent_doubted_s: Silence after which its provider is asked whether there is still such a host, and its groups
            go to a spare that is ready.
        agent_joins_s: Time from the launch of a host to the first word of its agent (packages are installed).
        host_backoff_s: Pause after an attempt at a host that came to nothing; it doubles.
        host_backoff_max_s: Longest pause.
        probe_s: Longest wait of a host for another one that it is to reach.
        linger_s: Time for what was printed last to be read, before hosts are taken down.
        reap_s: How long the end of a run waits until its hosts are down.
        idle_limit_s: How long hosts are kept that are there while fewer groups than ``min_replicas`` have one; None:
            as long as the run lasts.
        last_saves: The last groups that have the state save it when their host is taken away.
    """

    replicas: int
    min_replicas: int
    ranks_per_replica: int
    max_restarts: int
    window_s: float
    grace_s: float
    drain_window_s: float = 60.0
    leave_s: float = 600.0
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    part_silent_s: float = 5.0
    stop_margin_s: float = 15.0
    agent_lost_s: float = 30.0
    agent_doubted_s: float = 5.0
    agent_joins_s: float = 600.0
    host_backoff_s: float = 30.0
    host_backoff_max_s: float = 600.0
    probe_s: float = 10.0
    linger_s: float = 2.0
    reap_s: float = 600.0
    idle_limit_s: float | None = None
    last_saves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything the policy knows.

    Attributes:
        phase: State of the run.
        reason: Why; root cause first.
        outcome: What the run will end as, once that is decided.
        exit_code: What a client that waits for the run exits with; None while it goes on.
        grace_s: Grace time of a stop under way.
        replicas: Replica groups that the run is to have: those with the lowest numbers.
        groups: By replica, those included that it was scaled below.
        hosts: By position in the configuration.
        places: That position by name.
        unready: Hosts that are not prepared yet and hold up the others.
        draining: The drain window is open.
        released: Sessions were told to leave.
        root_cause: The first thing that cost the run a group for good.
        notes: What a success owes its reader.
        prepares: Hosts have to be prepared.
        provisions: Some hosts are provisioned.
        launcher: Whether somebody asks what is wanted; None: that is too early to say.
        launched: Somebody ever did, so that there may be hosts.
        wanted: Changes with what is wanted of the launcher.
        forgotten: Which attempts there were was lost with the journal.
        placement: Number of the place in the plan for which groups were placed on hosts.
        settled: A host has been up: where groups are is no matter of the place any more.
        idle: Hosts are there, and fewer groups than ``min_replicas`` have one: that is not waited for without an end.
        unprovided: Exit code where too few hosts could be had for anything to begin; None: none was given up.
        reaping: How far the end is with the hosts.
        verdict: Reason of the end, while its hosts are taken down.
    """

    phase: RunPhase = RunPhase.PENDING
    reason: str | None = None
    outcome: RunPhase | None = None
    exit_code: int | None = None
    grace_s: float = 0.0
    replicas: int
    groups: Groups
    hosts: tuple[Host, ...]
    places: Mapping[str, int] = field(repr=False)
    unready: int = 0
    draining: bool = False
    released: bool = False
    root_cause: str | None = None
    notes: tuple[str, ...] = ()
    prepares: bool = False
    provisions: bool = False
    launcher: bool | None = None
    launched: bool = False
    wanted: int = 0
    forgotten: bool = False
    placement: int = 0
    settled: bool = False
    idle: bool = False
    unprovided: int | None = None
    reaping: Reaping = Reaping.NO
    verdict: str | None = None

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            KeyError: There is none.
        """
        return self.hosts[self.places[name]]


def initial_state(
    hosts: Mapping[str, tuple[int, ...]], *, setup: bool, provisioned: Collection[str] = (), ranks: int = 1
) -> State:
    """The state of a run that nothing has happened to.

    Args:
        hosts: Replicas by host; together they are ``0..replicas`` without a gap. One that several hosts name is a wide
            group, with a part on each of them.
        setup: Whether hosts must be prepared first.
        provisioned: Those that a launcher makes: their first attempt is wanted.
        ranks: Of each group.

    Raises:
        ValueError: A replica is missing, or wide groups and hosts do not fit.
    """
    homes = homes_of(hosts)
    places = places_of(hosts, ranks=ranks)
    if not places.keys() <= set(provisioned):
        raise ValueError(f"only hosts that are provisioned can share a group, got {sorted(places)}")
    all_ = tuple(
        Host(
            name=name,
            replicas=tuple(mine),
            # Nothing of the job runs on the head; a spare is to be ready when it is needed.
            setup=SetupPhase.NEEDED if setup and (mine or name in provisioned) else SetupPhase.DONE,
            phase=HostPhase.WANTED if name in provisioned else HostPhase.HERE,
            attempt=1 if name in provisioned else 0,
        )
        for name, mine in hosts.items()
    )

    def span_of(names: tuple[str, ...]) -> Span | None:
        held = [(name, places[name].ranks) for name in names if name in places]
        parts = tuple(Part(host=name, ranks=(ranks.start, ranks.stop)) for name, ranks in held)
        return Span(parts=parts) if parts else None

    groups = (
        Group(replica=replica, host=names[0], away=names[0] in provisioned, span=span_of(names))
        for replica, names in sorted(homes.items())
    )
    return State(
        replicas=len(homes),
        groups=Groups.of(groups),
        hosts=all_,
        places={name: place for place, name in enumerate(hosts)},
        unready=sum(host.holds_up for host in all_),
        prepares=setup,
        provisions=bool(provisioned),
    )
