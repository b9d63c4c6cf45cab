"""Wide groups, those with ranks on several hosts: all parts of a generation begin together and end together.

Each agent ends its own part of a generation that dies there at once, and starts nothing by itself: only here it is
known what the other hosts do, and what is left of the budget that all of them share. A new generation begins when
nothing of the one before is left on any host; first on the host that serves the group's store, then, as soon as that
has said where, on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from sky_monarch.controller.causes import describe_cause
from sky_monarch.controller.events import (
    FirstCommit,
    GenerationEnded,
    GenerationStarted,
    GroupDone,
    GroupGivenUp,
    GroupStopped,
    RankExited,
    RankSpawned,
    RanksUp,
    RestartScheduled,
    Snapshot,
)
from sky_monarch.controller.model import (
    CancelTimer,
    EndGeneration,
    GiveUpGroup,
    Group,
    GroupPhase,
    Host,
    Part,
    PartPhase,
    RunPhase,
    ScheduleRestart,
    SetTimer,
    Span,
    StartGroup,
    StopGroup,
)
from sky_monarch.controller.preemption import Preemption
from sky_monarch.controller.turn import count_of

__all__ = ["Wide"]

GroupEvent = (
    GenerationStarted
    | RankSpawned
    | RankExited
    | RanksUp
    | FirstCommit
    | GenerationEnded
    | RestartScheduled
    | GroupGivenUp
    | GroupDone
    | GroupStopped
)

_MOST_TRIES = 3
"""Generations in a row whose command did not run at all: as many as an agent allows a group that it has to itself."""

_FRESH = 3
"""Times as long as else may agents be silent that a new controller has not heard of yet."""

_BUSY = frozenset({PartPhase.ORDERED, PartPhase.DONE})


class Wide(Preemption):
    """Keeps the parts of wide groups together."""

    def settle(self) -> None:
        """Draw the conclusions for wide groups first: what they come to decides on the run."""
        if not self.state.phase.ended:
            for group in self._wide_ones(self.touched):
                self._settle_parts(group)
        super().settle()

    def _wide_ones(self, replicas: Iterable[int]) -> Iterator[Group]:
        groups = (self.state.groups[replica] for replica in sorted(replicas))
        return (group for group in groups if group.span is not None)

    # --- what agents say -------------------------------------------------------------------------------------

    def _part_event(self, group: Group, event: GroupEvent) -> None:
        part = self._part_of(group, getattr(event, "host", ""))
        if part is None or self.state.host(part.host).away:
            return  # a row of our own, or a host whose attempt is over
        # It never had that generation: an answer to a stop, and to none before.
        stopped_nothing = isinstance(event, GroupStopped) and event.generation == 0
        if stopped_nothing and part.phase is not PartPhase.ENDING:
            return
        if event.generation != group.generation and not stopped_nothing:
            return  # an older one has nothing to say any more
        match event:
            case GenerationStarted():
                self._part_started(group, part, event)
            case RankSpawned() if part.phase is not PartPhase.IDLE:
                live = group.live | {event.rank}
                up = group.up or len(live) >= self.limits.ranks_per_replica
                self._group(group.replica, live=live, up=up)
            case RankExited():
                self._rank_exited(group, part, event)
            case FirstCommit() | RanksUp():
                self._part_up(group)
            case GenerationEnded() if not event.stopped:
                self._fall(group, event.reason)
                if event.never_ran is not None:
                    self._with_span(self.state.groups[group.replica], never_ran=event.never_ran)
                self._empty(self.state.groups[group.replica], part.host)
            case GroupGivenUp():
                if not group.phase.final:
                    self._give_up(group, f"by host {part.host}: {event.reason}")
                self._empty(self.state.groups[group.replica], part.host)
            case GroupDone():
                self._part_done(group, part.host, event.step)
            case GroupStopped():
                self._part_stopped(group, part)

    def _part_started(self, group: Group, part: Part, event: GenerationStarted) -> None:
        span = self._span(group)
        if part != span.parts[0] or event.store is None or span.fallen is not None or span.store is not None:
            return
        group = self._with_span(group, store=event.store, began_ns=event.mono_ns)
        if self._stopping(group) or group.phase.final:
            return
        for other in span.parts[1:]:
            if other.phase is PartPhase.WAITING:
                group = self._with_part(group, other.host, PartPhase.ORDERED)
                self._order(group, other.host, "the group's store is served")

    def _rank_exited(self, group: Group, part: Part, event: RankExited) -> None:
        group = self._group(group.replica, live=group.live - {event.rank})
        if event.failure is None or part.phase is PartPhase.IDLE:
            return
        if part.phase is PartPhase.DONE:
            after = f"replica {group.replica}, after it was done: {event.failure}"
            self._group(group.replica, failed_after=group.failed_after or after)
        else:
            # Its own agent ends the rest of its part, and tells when that is done.
            self._fall(self._with_part(group, part.host, PartPhase.ENDING), event.failure)

    def _part_up(self, group: Group) -> None:
        if self._span(group).fallen is not None:
            return
        if not group.phase.final and group.phase is not GroupPhase.STOPPING:
            self._group(group.replica, phase=GroupPhase.RUNNING, up=True, reason=None)
            self._with_span(self.state.groups[group.replica], fruitless=0)
        for name in group.hosts:
            self._host(name, useful=True, tries=0, faults=0, reason=None)

    def _part_done(self, group: Group, host: str, step: int | None = None) -> None:
        part = self._part_of(group, host)
        if part is None or part.phase is not PartPhase.ORDERED:
            return  # it has ended on another host meanwhile
        group = self._with_part(group, host, PartPhase.DONE)
        steps = [one for one in (group.step, step) if one is not None]
        group = self._group(group.replica, step=max(steps, default=None))
        done = all(one.phase is PartPhase.DONE for one in self._span(group).parts)
        if done and not group.phase.final and group.phase is not GroupPhase.STOPPING:
            self._group(group.replica, phase=GroupPhase.DONE, reason=None)

    def _part_stopped(self, group: Group, part: Part) -> None:
        unasked = part.phase in _BUSY and not self._stopping(group) and not group.phase.final
        group = self._empty(group, part.host)
        if unasked:
            # Its agent was told to leave, and by whom it has said or cannot say any more.
            self._agent_leaving(
                part.host, self.state.host(part.host).reason or "its groups were stopped there"
            )

    def _reconcile_part(self, group: Group, host: str, seen: Snapshot | None, *, restarted: bool) -> None:
        """Bring what an agent has of a wide group and what it should have together."""
        self.actions.append(CancelTimer(name=part_timer(host)))
        if seen is not None and seen.generation > group.generation:
            group = self._adopt_part(group, host, seen)
        part = self._part_of(group, host)
        if part is None or part.phase is PartPhase.WAITING:
            return
        if part.phase is PartPhase.IDLE:
            if seen is not None and seen.live:
                group = self._with_part(group, host, PartPhase.ENDING)
                self._fall(self._group(group.replica, started=True), "it was not known of", free=True)
                self._end_part(group, host, seen.generation, "it was not known of")
            return
        here = seen is not None and seen.generation == group.generation
        if not here and restarted:
            self._fall(self._empty(group, host), f"the agent of host {host} restarted")
            return
        live = seen.live if seen is not None and here else frozenset()
        kept = frozenset(rank for rank in group.live if not part.ranks[0] <= rank < part.ranks[1])
        group = self._group(group.replica, live=kept | live)
        span = self._span(group)
        if self._stopping(group) or group.phase in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED):
            self._stop_part(group, host, self.state.reason or group.reason or "the group is over")
        elif part.phase is PartPhase.ENDING:
            self._end_part(group, host, group.generation, span.fallen or "it is over")
        elif part.phase is PartPhase.ORDERED and not here:
            self._order(group, host, "the first order did not arrive")

    def _adopt_part(self, group: Group, host: str, seen: Snapshot) -> Group:
        """A generation of a history that is lost. What runs of it is ended: nobody knows whether all of it is there."""
        group = self._group(group.replica, generation=seen.generation)
        if seen.state is GroupPhase.DONE:
            self._part_done(
                self._with_part(self._group(group.replica, started=True), host, PartPhase.ORDERED), host
            )
        elif seen.state is GroupPhase.GIVEN_UP:
            self._give_up(group, "before the journal was lost")
        return self.state.groups[group.replica]

    # --- silence, notices and lost hosts -----------------------------------------------------------------------

    def _await_part(self, host: Host, *, fresh: bool) -> None:
        """Without a part the others hang, and all groups with them, long before a host counts as lost.

        Args:
            host: Whose agent is not connected.
            fresh: None is: this controller has just begun, and they need their time to dial.
        """
        if any(self._is_busy(self.state.groups[replica], host.name) for replica in host.replicas):
            delay_s = self.limits.part_silent_s * (_FRESH if fresh else 1)
            reason = f"the agent of host {host.name} is not connected"
            self.actions.append(SetTimer(name=part_timer(host.name), delay_s=delay_s, reason=reason))

    def _part_silent(self, name: str) -> None:
        host = self.state.host(name)
        if host.connected or host.over or self._ending:
            return
        for replica in host.replicas:
            group = self.state.groups[replica]
            if self._is_busy(group, name):
                self._fall(group, f"host {name} was silent for {self.limits.part_silent_s:g} s")

    def _agent_leaving(self, name: str, reason: str) -> None:
        """The other parts leave in order too: all ranks of a group finish the same step."""
        super()._agent_leaving(name, reason)
        for replica in self.state.host(name).replicas:
            group = self.state.groups[replica]
            if group.span is not None and group.started and not group.phase.final:
                self._fall(group, f"host {name} is leaving: {reason}", free=True, gently=True)

    def _deprive(self, group: Group, host: Host, why: str, *, jump: bool) -> None:
        if group.span is None:
            super()._deprive(group, host, why, jump=jump)
            return
        # Its agent starts no generation by itself: the next number is enough to fence what it may still have.
        if group.started:
            self._fall(group, f"host {host.name} was lost: {why}", free=True)
        self._empty(self.state.groups[group.replica], host.name)

    def _empty(self, group: Group, host: str, **changes: Any) -> Group:
        part = self._part_of(group, host)
        if part is None:
            return super()._empty(group, host, **changes)
        if group.phase is not GroupPhase.DONE:
            group = self._with_part(group, host, PartPhase.IDLE)
        live = frozenset(rank for rank in group.live if not part.ranks[0] <= rank < part.ranks[1])
        return self._group(group.replica, live=live, **changes)

    # --- the end of a generation -------------------------------------------------------------------------------

    def _fall(self, group: Group, why: str, *, free: bool = False, gently: bool = False) -> None:
        """A generation is over: it is ended on all hosts. The first reason stands.

        Args:
            group: Whose.
            why: In words.
            free: It costs no restart.
            gently: The others finish their step.
        """
        span = self._span(group)
        if group.phase is GroupPhase.DONE:
            return
        if span.fallen is None:
            delay_s = self.limits.grace_s + self.limits.stop_margin_s
            end = SetTimer(
                name=end_timer(group.replica), delay_s=delay_s, reason="it is to end on all its hosts"
            )
            self.actions.append(end)
        group = self._with_span(group, fallen=span.fallen or why, free=span.free or free)
        if not group.phase.final and group.phase is not GroupPhase.STOPPING:
            group = self._group(group.replica, phase=GroupPhase.RESTARTING, reason=why)
        for part in span.parts:
            if part.phase is PartPhase.WAITING:
                group = self._with_part(group, part.host, PartPhase.IDLE)
            elif part.phase in _BUSY:
                group = self._with_part(group, part.host, PartPhase.ENDING)
                if gently:
                    self._stop_part(group, part.host, why)
                else:
                    self._end_part(group, part.host, group.generation, why)

    def _end_overdue(self, replica: int) -> None:
        """A host on which a generation cannot be ended is no host: the others wait for it."""
        group = self.state.groups[replica]
        if self._ending or group.phase.final or group.span is None or group.span.fallen is None:
            return
        for part in group.span.parts:
            host = self.state.host(part.host)
            if part.phase is PartPhase.ENDING and host.connected:
                why = f"its part of replica {replica} did not end: {group.span.fallen}"
                self._lose(host, why, gone=False, fault=False)

    def _settle_parts(self, group: Group) -> None:
        span = self._span(group)
        over = group.phase in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED)
        newly = not self.before.groups[group.replica].phase.final
        if over and (newly or any(part.phase in _BUSY for part in span.parts)):
            self._stop_group(group, group.reason or f"replica {group.replica} is {group.phase}")
            group, span = self.state.groups[group.replica], self._span(self.state.groups[group.replica])
        if not span.idle:
            return
        if group.started and not group.phase.final:
            self._rest(group, span)
        elif not group.started and group.phase is GroupPhase.STOPPING:
            self._group(group.replica, phase=GroupPhase.STOPPED)

    def _rest(self, group: Group, span: Span) -> None:
        """Nothing of a generation is left on any host: spend a restart on the next one, or give the group up."""
        self.actions.append(CancelTimer(name=end_timer(group.replica)))
        why = span.fallen or "it was stopped"
        if self._stopping(group):
            self._group(group.replica, phase=GroupPhase.STOPPED, live=frozenset(), started=False)
            return
        group = self._group(group.replica, live=frozenset(), started=False, reason=why)
        vain = 0 if span.free or span.never_ran is None else span.vain + 1
        group = self._with_span(group, fallen=None, free=False, store=None, never_ran=None, vain=vain)
        if span.free:
            self._group(group.replica, phase=GroupPhase.PENDING)
            return
        now_ns = max(group.restarts_ns, default=0) if self.now_ns is None else self.now_ns
        oldest = now_ns - round(self.limits.window_s * 1e9)
        spent = tuple(at for at in group.restarts_ns if at > oldest)
        if span.never_ran is not None and vain >= _MOST_TRIES:
            self._spent(group, len(spent), span.never_ran, times=vain)
            return
        if len(spent) >= self.limits.max_restarts:
            self._spent(group, len(spent), why)
            return
        lived_s = 0.0 if span.began_ns is None else (now_ns - span.began_ns) / 1e9
        fruitless = 0 if lived_s > self.limits.backoff_max_s else span.fruitless
        delay_s = 0.0
        if fruitless:
            delay_s = min(self.limits.backoff_s * 2.0 ** min(fruitless - 1, 30), self.limits.backoff_max_s)
        group = self._group(group.replica, phase=GroupPhase.RESTARTING, restarts_ns=(*spent, now_ns))
        self._with_span(group, fruitless=fruitless + 1, resting=delay_s > 0)
        self.actions.append(
            ScheduleRestart(
                replica=group.replica,
                generation=group.generation + 1,
                delay_s=delay_s,
                restarts_left=self.limits.max_restarts - len(spent) - 1,
                reason=why,
            )
        )
        if delay_s:
            self.actions.append(SetTimer(name=group_timer(group.replica), delay_s=delay_s, reason=why))

    def _spent(self, group: Group, restarts: int, why: str, *, times: int = 0) -> None:
        """Give a group up, on all its hosts.

        Args:
            group: Which.
            restarts: Those spent.
            why: In words.
            times: Generations in a row whose command did not run at all.
        """
        given = GiveUpGroup(
            replica=group.replica, generation=group.generation, restarts=restarts, reason=why, times=times
        )
        words = describe_cause(given.row())
        self._give_up(group, f"after {count_of(restarts, 'restart')}: {words}")
        self.actions.append(given)
        self._stop_group(self.state.groups[group.replica], words)

    def _pause_over(self, replica: int) -> None:
        group = self.state.groups[replica]
        if group.span is not None:
            self._with_span(group, resting=False)

    # --- the next generation -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        super()._prepare()
        hosts = map(self.state.host, (*self.arrived, *self.prepared))
        ready = {replica for host in hosts for replica in host.replicas}
        for group in self._wide_ones(self.touched | ready):
            self._start_if_ready(group, self._span(group))

    def _start_if_ready(self, group: Group, span: Span) -> None:
        waits = group.started or group.phase.final or group.phase is GroupPhase.STOPPING
        if waits or span.resting or not span.idle:
            return
        if not all(self._may_start(self.state.host(name)) for name in group.hosts):
            return
        for part in span.parts[1:]:
            group = self._with_part(group, part.host, PartPhase.WAITING)
        first = span.parts[0].host
        group = self._with_part(group, first, PartPhase.ORDERED)
        group = self._with_span(group, store=None, fallen=None, free=False, began_ns=None)
        group = self._group(
            group.replica, started=True, generation=group.generation + 1, phase=GroupPhase.STARTING
        )
        self._order(group, first, "its hosts are ready")

    def _order(self, group: Group, host: str, reason: str) -> None:
        """Tell one host to start its part of the newest generation."""
        span = self._span(group)
        if not self.state.host(host).connected:
            return  # it is told when it connects
        self.actions.append(
            StartGroup(
                host=host,
                replica=group.replica,
                generation=group.generation,
                max_restarts=max(0, self.limits.max_restarts - len(group.restarts_ns)),
                store=None if host == span.parts[0].host else span.store,
                reason=reason,
            )
        )

    # --- orders and parts --------------------------------------------------------------------------------------

    def _stop_group(self, group: Group, reason: str) -> None:
        if group.span is None:
            super()._stop_group(group, reason)
            return
        for part in group.span.parts:
            if part.phase is PartPhase.WAITING:
                group = self._with_part(group, part.host, PartPhase.IDLE)
            elif part.phase in _BUSY and group.phase is not GroupPhase.DONE:
                group = self._with_part(group, part.host, PartPhase.ENDING)
            self._stop_part(group, part.host, reason)

    def _stop_part(self, group: Group, host: str, reason: str) -> None:
        if self.state.host(host).connected:  # else it is told when it connects
            grace_s = self.state.grace_s if self.state.phase is RunPhase.STOPPING else self.limits.grace_s
            stop = StopGroup(host=host, replica=group.replica, grace_s=grace_s, reason=reason)
            self.actions.append(stop)

    def _end_part(self, group: Group, host: str, generation: int, why: str) -> None:
        if self.state.host(host).connected:
            end = EndGeneration(host=host, replica=group.replica, generation=generation, reason=why)
            self.actions.append(end)

    @staticmethod
    def _span(group: Group) -> Span:
        if group.span is None:
            raise TypeError(f"replica {group.replica} has one host")
        return group.span

    @staticmethod
    def _part_of(group: Group, host: str) -> Part | None:
        parts = () if group.span is None else group.span.parts
        return next((part for part in parts if part.host == host), None)

    def _is_busy(self, group: Group, host: str) -> bool:
        part = self._part_of(group, host)
        return part is not None and part.phase in _BUSY and group.phase is not GroupPhase.DONE

    def _with_span(self, group: Group, **changes: Any) -> Group:
        return self._group(group.replica, span=replace(self._span(group), **changes))

    def _with_part(self, group: Group, host: str, phase: PartPhase) -> Group:
        parts = tuple(
            replace(part, phase=phase) if part.host == host else part for part in self._span(group).parts
        )
        return self._with_span(group, parts=parts)


def part_timer(host: str) -> str:
    """Name of the timer for the silence of a host that has a part of a wide group."""
    return f"part:{host}"


def end_timer(replica: int) -> str:
    """Name of the timer for the end of a generation on all its hosts."""
    return f"end:{replica}"


def group_timer(replica: int) -> str:
    """Name of the timer for the pause before a wide group starts again."""
    return f"group:{replica}"
