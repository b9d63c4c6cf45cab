"""Decides for a run: ``(state, event) -> (state, actions)``. No I/O, no clock: its properties can be tested.

Decisions are level-triggered: whatever an agent that connects needs to be told follows from the state alone.
So a controller that died between its journal and its act loses nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from sky_monarch.controller.hosts import wants_differ
from sky_monarch.controller.model import (
    Action,
    AgentConnected,
    AgentDisconnected,
    BudgetSpent,
    CancelTimer,
    ControllerStarted,
    DownRequested,
    Event,
    Examined,
    FirstCommit,
    GenerationEnded,
    GenerationStarted,
    Group,
    GroupDone,
    GroupGivenUp,
    GroupPhase,
    GroupStopped,
    HeadReplaced,
    HostLeaving,
    HostPhase,
    HostReport,
    JobPlaced,
    JournalLost,
    LauncherCame,
    LauncherGone,
    Limits,
    RankExited,
    RankSpawned,
    RanksUp,
    Reached,
    Reaping,
    Release,
    RestartScheduled,
    RunPhase,
    Scaled,
    SetTimer,
    SetupFinished,
    SetupPhase,
    SetupStarted,
    Snapshot,
    StartGroup,
    State,
    TimerFired,
)
from sky_monarch.controller.moving import Moving
from sky_monarch.controller.turn import IDLE_TIMER, agent_timer, count_of, doubt_timer
from sky_monarch.errors import BudgetSpentError

__all__ = ["Decision", "step"]

_AGE = {GroupPhase.RESTARTING: 1, GroupPhase.STARTING: 2, GroupPhase.RUNNING: 3}


class Decision(NamedTuple):
    """What follows from an event."""

    state: State
    actions: tuple[Action, ...]


def step(state: State, event: Event, limits: Limits) -> Decision:
    """Decide what follows from ``event``."""
    turn = _Turn(state, limits, now_ns=getattr(event, "mono_ns", None))
    turn.take(event)
    turn.settle_scale()
    turn.settle()
    actions = turn.actions
    if turn.state.phase is RunPhase.STOPPING or turn.state.phase.ended:
        # One event may start a group and then end the run (a returning agent, the last group given up).
        actions = [action for action in actions if not isinstance(action, StartGroup)]
    after = turn.state
    if after.provisions and wants_differ(state, after):
        after = replace(after, wanted=after.wanted + 1)
    return Decision(after, tuple(actions))


class _Turn(Moving):
    """Takes the event."""

    def take(self, event: Event) -> None:
        match event:
            case ControllerStarted():
                for host in self.state.hosts:
                    self._disconnected(host.name, ours=True)
            case JournalLost():
                self._forgotten(event)
            case HeadReplaced():
                self._go_on_from(event)
            case AgentConnected():
                self._connected(event)
            case AgentDisconnected():
                self._disconnected(event.host)
                self._line_lost(event.host)
                if (host := self.state.host(event.host)).leaving:
                    self._agent_left(host)
            case SetupStarted() | SetupFinished():
                self._setup_event(event)
            case DownRequested():
                self._down(event)
            case TimerFired():
                self._timer(event.name)
            case HostReport():
                self._host_reported(event)
            case HostLeaving():
                self._say_who_saves(event)
                self._agent_leaving(event.host, event.reason)
            case Reached():
                self._reached(event)
            case Examined():
                self._examined(event)
            case LauncherCame():
                self._change(launcher=True, launched=True)
            case LauncherGone():
                self._change(launcher=False)
            case BudgetSpent():
                self._budget_spent(event)
            case Scaled():
                self._scaled(event)
            case JobPlaced():
                self._placed(event)
            case _:
                self._group_event(event)

    def _group_event(
        self,
        event: GenerationStarted
        | RankSpawned
        | RankExited
        | RanksUp
        | FirstCommit
        | GenerationEnded
        | RestartScheduled
        | GroupGivenUp
        | GroupDone
        | GroupStopped,
    ) -> None:
        group = self.state.groups[event.replica]
        if group.span is not None:
            self._part_event(group, event)
            return
        if isinstance(event, GroupStopped) and event.generation == 0 and not group.live:
            event = replace(event, generation=group.generation)  # its agent never had it
        if event.generation < group.generation or group.away:
            return  # fenced: an older generation, or host, has nothing to say any more
        before = group
        live = group.live if event.generation == group.generation else frozenset()
        group = self._group(group.replica, generation=event.generation, live=live)
        changes: dict[str, Any] = {}
        match event:
            case GenerationStarted():
                changes = {"phase": GroupPhase.STARTING}
            case RankSpawned():
                live = live | {event.rank}
                changes = {"live": live, "up": group.up or len(live) >= self.limits.ranks_per_replica}
            case RankExited():
                changes = {"live": live - {event.rank}}
                if event.failure is not None and group.phase is GroupPhase.DONE:
                    after = f"replica {group.replica}, after it was done: {event.failure}"
                    changes["failed_after"] = group.failed_after or after
            case FirstCommit() | RanksUp():
                changes = {"phase": GroupPhase.RUNNING, "up": True, "reason": None}
                if self.state.host(group.host).provisioned:
                    self._host(group.host, useful=True, tries=0, faults=0, reason=None)
            case GenerationEnded():
                changes = {"live": frozenset(), "reason": event.reason}
            case RestartScheduled():
                oldest = event.mono_ns - round(self.limits.window_s * 1e9)
                others = (at for at in group.restarts_ns if at > oldest and at != event.mono_ns)
                spent = (*others, event.mono_ns)  # heard twice, it was one
                changes = {"phase": GroupPhase.RESTARTING, "restarts_ns": spent}
            case GroupGivenUp():
                if not group.phase.final:
                    self._give_up(group, f"after {count_of(event.restarts, 'restart')}: {event.reason}")
                changes = {"live": frozenset()}
            case GroupDone():
                changes = {"phase": GroupPhase.DONE, "step": event.step, "reason": None}
            case GroupStopped():
                changes = {"live": frozenset(), "phase": GroupPhase.STOPPED}
                asked = group.phase is GroupPhase.STOPPING or self.state.phase is RunPhase.STOPPING
                if not asked and not group.phase.final and self.state.host(group.host).provisioned:
                    # Its agent was told to leave: the group goes on where its host does.
                    del changes["phase"]
                    self._group(group.replica, phase=GroupPhase.RESTARTING)
                    self._agent_leaving(group.host, group.reason or "it was stopped")
                elif not asked and not group.phase.final:
                    note = f"replica {group.replica}: {group.reason or 'it was stopped'}"
                    self._change(notes=(*self.state.notes, note))
        phase = changes.get("phase")
        same = event.generation == before.generation
        if same and phase is not None and _AGE.get(phase, 9) < _AGE.get(group.phase, 0):
            changes.pop("phase")  # told out of order: a generation does not grow younger
        if group.phase.final or (group.phase is GroupPhase.STOPPING and phase and not phase.final):
            # What is given up, done or told to stop stays so; _give_up has set its own already.
            changes.pop("phase", None)
        self._group(group.replica, **changes)
        self._stop_if_unwanted(self.state.groups[group.replica], event)

    def _stop_if_unwanted(self, group: Group, event: Event) -> None:
        """A generation that starts after its group was given up or stopped is ended again."""
        if isinstance(event, GenerationStarted) and group.phase in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED):
            self._stop_group(group, f"replica {group.replica} is {group.phase}: it may not run again")

    def _setup_event(self, event: SetupStarted | SetupFinished) -> None:
        host = self.state.host(event.host)
        if host.setup in (SetupPhase.DONE, SetupPhase.FAILED) or host.away:
            return
        if isinstance(event, SetupStarted):
            self._host(event.host, setup=SetupPhase.RUNNING)
        elif event.failure is None:
            self._host(event.host, setup=SetupPhase.DONE)
            if host.provisioned:
                self.prepared.append(event.host)
        else:
            host = self._host(event.host, setup=SetupPhase.FAILED)
            if self._setup_failed_on(host, event.failure, killed=event.killed):
                return
            if not self.state.phase.ended and self.state.outcome is None:
                where = f" on host {event.host}" if len(self.state.hosts) > 1 else ""
                self._begin_stop(RunPhase.FAILED_SETUP, f"setup failed{where}: {event.failure}", grace_s=0.0)

    def _connected(self, event: AgentConnected) -> None:
        before = self.state.host(event.host)
        if not self._admits(event):
            return
        restarted = before.incarnation not in (None, event.incarnation)
        changes: dict[str, Any] = {"connected": True, "lost": False, "incarnation": event.incarnation}
        changes |= {"probe": event.probe, "examining": event.examining}
        if before.setup is SetupPhase.SENT or (restarted and before.setup is SetupPhase.RUNNING):
            changes["setup"] = SetupPhase.NEEDED  # the order was lost, or it died with its agent
        if before.setup is SetupPhase.NEEDED and event.groups:
            changes["setup"] = SetupPhase.DONE  # in a history that is lost
        host = self._host(event.host, **changes)
        self.arrived.append(event.host)
        self.actions += [CancelTimer(name=of(event.host)) for of in (agent_timer, doubt_timer)]
        self._adopt_place(event.host, frozenset(snapshot.replica for snapshot in event.groups))
        host = self.state.host(event.host)
        if self.state.phase.ended or self.state.reaping is Reaping.NOW:
            self._shutdown(host)
            return
        for replica, generation in event.begun:
            self._generations_begun(self.state.groups[replica], generation, event.mono_ns)
        seen = {snapshot.replica: snapshot for snapshot in event.groups}
        for replica in host.replicas:
            group, snapshot = self.state.groups[replica], seen.get(replica)
            if group.span is not None:
                self._reconcile_part(group, event.host, snapshot, restarted=restarted)
            elif group.started:
                self._reconcile(group, snapshot, restarted=restarted, mono_ns=event.mono_ns)
            elif snapshot is not None:
                self._adopt(group, snapshot, event.mono_ns)
        if self.state.released:
            self.actions.append(Release(host=event.host, reason="the drain window is over"))
        if host.provisioned:
            (self._prove if before.incarnation is None else self._ask_again)(host)

    def _generations_begun(self, group: Group, generation: int, mono_ns: int) -> None:
        """No number is given twice: the lighthouse lets none in again, and each one that was begun was a restart."""
        untold = generation - group.generation
        if untold > 0:
            known = group.restarts_ns[: self.limits.max_restarts]
            # The first generation is none.
            restarts = untold if group.started else 0
            more = (mono_ns,) * min(restarts, self.limits.max_restarts - len(known))
            self._group(group.replica, generation=generation, restarts_ns=(*known, *more))

    def _forgotten(self, event: JournalLost) -> None:
        """Begin with next to nothing: the agents tell the rest when they connect."""
        note = f"the journal was lost: {event.reason}; what the agents know was taken from them"
        self._change(notes=(*self.state.notes, note))
        if event.placed is not None:
            self._placed(event.placed)
        if event.scaled is not None:
            self._scaled(event.scaled)
        for replica, generation in event.generations:
            self._group(replica, generation=generation)  # the next one is another one
        if self.state.provisions and event.outcome is None:
            self._attempts_forgotten()
        if event.outcome is not None:
            reason, exit_code = event.ended
            self._change(phase=event.outcome, outcome=event.outcome, reason=reason, exit_code=exit_code)

    def _go_on_from(self, event: HeadReplaced) -> None:
        """Begin as a new run does, beyond all attempts and generations that there were."""
        note = f"{event.reason}; it went on under another one from its checkpoint"
        self._change(notes=(*self.state.notes, note))
        if event.scaled is not None:
            self._scaled(event.scaled)
        for replica, generation in event.generations:
            if replica < len(self.state.groups):
                self._group(replica, generation=generation)  # the next one is another one
        for name, attempt in event.attempts:
            if name in self.state.places and self.state.host(name).phase is HostPhase.WANTED:
                self._host(name, attempt=attempt + 1)

    def _adopt(self, group: Group, seen: Snapshot, mono_ns: int) -> None:
        """Take a group that was started in a history that is lost as its agent has it."""
        reason = None
        if seen.state is GroupPhase.GIVEN_UP:
            self._give_up(group, "before the journal was lost")
            reason = self.state.groups[group.replica].reason
        self._group(
            group.replica,
            started=True,
            generation=seen.generation,
            phase=seen.state,
            live=seen.live,
            up=len(seen.live) >= self.limits.ranks_per_replica,
            restarts_ns=(mono_ns,) * seen.restarts,  # as if now: rather too few are left than too many
            reason=reason,
        )

    def _reconcile(self, group: Group, seen: Snapshot | None, *, restarted: bool, mono_ns: int) -> None:
        """Bring what an agent has and what it should have together."""
        if seen is not None:
            if seen.generation < group.generation:
                self._stop_group(group, f"generation {seen.generation} is older than {group.generation}")
                return
            bound = group.phase.final or group.phase is GroupPhase.STOPPING
            phase = group.phase if bound else seen.state
            if phase.final and not group.phase.final:
                phase = group.phase  # its own event says so with a reason, and comes next
            group = self._group(group.replica, generation=seen.generation, live=seen.live, phase=phase)
            unwanted = group.phase in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED) or self._stopping(group)
            if unwanted and not (seen.state.final and not seen.live):
                self._stop_group(
                    group, self.state.reason or group.reason or f"replica {group.replica} is over"
                )
            return
        if group.phase.final or self._stopping(group):
            final = group.phase if group.phase.final else GroupPhase.STOPPED
            self._group(group.replica, live=frozenset(), phase=final)
        elif not restarted:
            self._start_group(
                group, generation=max(1, group.generation), reason="the first order did not arrive"
            )
        else:
            self._start_again(group, mono_ns)

    def _start_again(self, group: Group, mono_ns: int) -> None:
        """Start a group whose processes ended with their agent: it costs a restart like any other."""
        oldest = mono_ns - round(self.limits.window_s * 1e9)
        # One that is yet to come was before the machine was started anew, and its clock with it.
        spent = tuple(min(at, mono_ns) for at in group.restarts_ns if at > oldest)
        why = f"the agent of host {group.host} restarted"
        if len(spent) >= self.limits.max_restarts:
            self._give_up(group, f"after {count_of(len(spent), 'restart')}: {why}")
            self._group(group.replica, live=frozenset())
            return
        group = self._group(group.replica, restarts_ns=(*spent, mono_ns), live=frozenset(), reason=why)
        self._start_group(group, generation=group.generation + 1, reason=why)

    def _disconnected(self, name: str, *, ours: bool = False) -> None:
        """The line to an agent is lost; where the end was ``ours``, its dialling may have to run into a limit first."""
        host = self._host(name, connected=False)
        if host.provisioned:
            if host.phase is HostPhase.UP and not host.lost:
                self._await_agent(name, ours=ours)
                self._await_part(host, fresh=ours)
        elif not self.state.phase.ended and not host.lost:
            delay_s = self.limits.agent_lost_s
            reason = f"the agent of host {name} is not connected"
            self.actions.append(SetTimer(name=agent_timer(name), delay_s=delay_s, reason=reason))

    def _down(self, event: DownRequested) -> None:
        if self.state.phase.ended or self.state.phase is RunPhase.STOPPING:
            return  # the first reason stands
        if self.state.outcome is not None:
            # All work is done and the ranks are leaving: they are hurried, the outcome stays.
            self._change(notes=(*self.state.notes, f"ended while its ranks were leaving: {event.reason}"))
            self._begin_stop(self.state.outcome, self.state.reason or event.reason, grace_s=event.grace_s)
            return
        self._begin_stop(RunPhase.CANCELLED, event.reason, grace_s=event.grace_s)

    def _budget_spent(self, event: BudgetSpent) -> None:
        if self.state.outcome is None and not self._ending:
            grace_s = self.limits.grace_s
            self._begin_stop(
                RunPhase.FAILED, event.reason, grace_s=grace_s, exit_code=BudgetSpentError.exit_code
            )

    def _timer(self, name: str) -> None:
        if self.state.phase.ended:
            return
        if name == "drain" and self.state.draining:
            self._drain_over()
        elif name == "leave" and self.state.outcome is not None and self.state.phase is not RunPhase.STOPPING:
            late = self._names(group.replica for group in self.state.groups if not group.at_rest)
            note = f"{late} did not leave within {self.limits.leave_s:g} s of the end and was stopped"
            self._change(notes=(*self.state.notes, note))
            self._begin_stop(self.state.outcome, note, grace_s=self.limits.grace_s)
        elif name == IDLE_TIMER:
            self._patience_over()
        elif name == "reap":
            self._reap_timer()
        elif self.state.reaping is not Reaping.NO:
            return
        elif name == "stop" and self.state.phase is RunPhase.STOPPING:
            late = self._names(group.replica for group in self.state.groups if not group.at_rest)
            self._finish(f"; {late} did not report its end in time")
        elif name.startswith("agent:"):
            host = self.state.host(name.removeprefix("agent:"))
            if host.provisioned:
                self._agent_silent(host)
            elif not host.connected:
                self._host(host.name, lost=True)
                cause = f"the agent of host {host.name} was silent for {self.limits.agent_lost_s:g} s"
                self._change(root_cause=self.state.root_cause or cause)
        elif name.startswith("doubt:"):
            self._doubt_due(self.state.host(name.removeprefix("doubt:")))
        elif name.startswith("part:"):
            self._part_silent(name.removeprefix("part:"))
        elif name.startswith("end:"):
            self._end_overdue(int(name.removeprefix("end:")))
        elif name.startswith("group:"):
            self._pause_over(int(name.removeprefix("group:")))
        elif name.startswith("host:"):
            self._host_due(name.removeprefix("host:"))
        elif name.startswith("probe:"):
            self._probes_over(name.removeprefix("probe:"))
        elif name.startswith("empty:"):
            self._dismiss_emptied(name.removeprefix("empty:"))
