"""The hosts of a run: where each stands, which attempt at it counts, and what is wanted of those who provision.

An attempt is one provisioning of a host. Attempts are counted, and only the newest may speak for its host: whatever
an older one still says or runs is fenced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from sky_monarch.controller.phases import HostPhase, Reaping, RunPhase, SetupPhase

__all__ = [
    "Host",
    "Pair",
    "Wants",
    "certificate_name",
    "fence_reason",
    "is_wanted",
    "standing",
    "wants_differ",
    "words",
]

_OVER = frozenset({HostPhase.WAITING, HostPhase.GIVEN_UP, HostPhase.DOWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What is known of the way between a host and another one; None: not answered yet, empty: it is good.

    Attributes:
        other: Name of the other one.
        mine: What the host says.
        theirs: What the other one says.
    """

    other: str
    mine: str | None = None
    theirs: str | None = None

    @property
    def error(self) -> str | None:
        """Why they cannot talk, once both have been heard: who is silent may be dead, which proves nothing."""
        if self.mine is None or self.theirs is None:
            return None
        return self.mine or self.theirs or None

    @property
    def good(self) -> bool:
        """Whether both have said so."""
        return self.mine == "" and self.theirs == ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host and its agent.

    Attributes:
        name: Its name, and that of its cluster.
        replicas: Replica groups that live on it.
        connected: Its agent is connected.
        incarnation: Of its agent; None until one connected (of this attempt).
        lost: Nobody waits for it any more.
        setup: How far its preparation is.
        phase: Where it stands.
        attempt: How often it was provisioned; 0 where nobody does.
        reason: Why it is where it is; None where nothing went wrong.
        gone: The launcher has said that no cluster of this attempt is left.
        replaces: An older attempt of which a cluster may be left; it goes beside the launch of this one. 0: one that
            nobody remembers.
        leaving: Its agent has said that the host is about to be taken away.
        doubted: Its agent has fallen silent: its provider is to say, out of turn, whether there is such a host.
        useful: A group of it has committed in this attempt.
        tries: Attempts in a row in which none has.
        faults: Of those in a row that ended by an error, not for want of capacity.
        trouble: Why it could not be taken down, as the launcher has it.
        probe: Where others try whether they reach it.
        examining: It is being looked at; none of its groups starts before that is over.
        pairs: Ways to others that are not proved; none of its groups starts before they are.
        emptied: Its groups were given up, or the run was scaled below them: it is kept only until their last output is
            read.
    """

    name: str
    replicas: tuple[int, ...] = ()
    connected: bool = False
    incarnation: int | None = None
    lost: bool = False
    setup: SetupPhase = SetupPhase.DONE
    phase: HostPhase = HostPhase.HERE
    attempt: int = 0
    reason: str | None = None
    gone: bool = False
    replaces: int | None = None
    leaving: bool = False
    doubted: bool = False
    useful: bool = False
    tries: int = 0
    faults: int = 0
    trouble: str | None = None
    probe: str | None = None
    examining: bool = False
    pairs: tuple[Pair, ...] = ()
    emptied: bool = False

    @property
    def provisioned(self) -> bool:
        """Whether a launcher makes and ends it."""
        return self.phase is not HostPhase.HERE

    @property
    def spare(self) -> bool:
        """Whether it is provisioned, and has nothing to run."""
        return self.provisioned and not self.replicas

    @property
    def over(self) -> bool:
        """Whether this attempt at it is over."""
        return self.phase in _OVER

    @property
    def away(self) -> bool:
        """Whether an agent of it is awaited."""
        if self.phase in (HostPhase.HERE, HostPhase.GIVEN_UP, HostPhase.DOWN):
            return False
        return self.incarnation is None and not self.lost

    @property
    def holds_up(self) -> bool:
        """Whether other hosts wait for its preparation: those that come one by one start one by one."""
        return not self.provisioned and (self.setup is not SetupPhase.DONE or self.examining)


class Wants(Protocol):
    """What decides which hosts are wanted."""

    @property
    def phase(self) -> RunPhase:
        """State of the run."""
        ...

    @property
    def reaping(self) -> Reaping:
        """How far its end is with its hosts."""
        ...

    @property
    def hosts(self) -> tuple[Host, ...]:
        """By position."""
        ...


def is_wanted(state: Wants, host: Host) -> bool:
    """Whether a cluster of the host's newest attempt should be there."""
    if host.over or state.phase.ended or state.reaping is Reaping.NOW:
        return False
    # A run that ends cancels what is still on its way at once; who is there has ranks to end first.
    return state.phase is not RunPhase.STOPPING or host.incarnation is not None


def wants_differ(before: Wants, after: Wants) -> bool:
    """Whether the launcher has to be told something new."""
    same = before.phase is after.phase and before.reaping is after.reaping
    if same and before.hosts is after.hosts:
        return False
    if len(before.hosts) != len(after.hosts):
        return True  # the run was scaled beyond the hosts that there were
    return any(
        (old.attempt, old.replaces, old.replicas, old.doubted, is_wanted(before, old))
        != (new.attempt, new.replaces, new.replicas, new.doubted, is_wanted(after, new))
        for old, new in zip(before.hosts, after.hosts, strict=True)
        if new.provisioned and not (same and old is new)
    )


def standing(state: Wants) -> Iterator[Host]:
    """Hosts of which a cluster may be left."""
    return (host for host in state.hosts if host.provisioned and not (host.gone and host.replaces is None))


def certificate_name(host: str, attempt: int) -> str:
    """The name in the certificate of its agent (``protocol.rs`` has the same)."""
    return f"{host}-a{attempt}" if attempt else host


def fence_reason(host: Host, attempt: int, *, forgotten: bool = False) -> str | None:
    """Why an agent may not speak for its host; None where it may.

    Args:
        host: As the policy knows it.
        attempt: That the agent says it is of, and its certificate.
        forgotten: Which attempts there were was lost with the journal: a newer one than is known is news.
    """
    if not host.provisioned:
        return None
    if attempt != host.attempt and not (forgotten and attempt > host.attempt):
        return f"fenced: host {host.name} is at attempt {host.attempt}"
    if host.over:
        return f"fenced: attempt {attempt} of host {host.name} is over"
    return None


def words(host: Host) -> str:
    """What is awaited of a host, and why."""
    match host.phase:
        case HostPhase.WANTED:
            state = f"attempt {host.attempt} is asked for"
        case HostPhase.LAUNCHING:
            state = f"attempt {host.attempt} is being launched"
        case HostPhase.WAITING:
            state = f"attempt {host.attempt + 1} waits for its turn"
        case _:
            state = f"attempt {host.attempt} is up, its agent has not dialled"
    return f"host {host.name}: {host.reason}; {state}" if host.reason else f"host {host.name}: {state}"
