"""Decides for a run: ``(state, event) -> (state, actions)``. No I/O, no clock: its properties can be tested.

Decisions are level-triggered: whatever an agent that connects needs to be told follows from the state alone.
So a controller that died between its journal and its act loses nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from sky_monarch.controller.model import (
    Action,
    AgentConnected,
    AgentDisconnected,
    CancelTimer,
    ControllerStarted,
    DownRequested,
    Event,
    FirstCommit,
    GenerationEnded,
    GenerationStarted,
    Group,
    GroupDone,
    GroupGivenUp,
    GroupPhase,
    GroupStopped,
    Host,
    Limits,
    RankExited,
    RankSpawned,
    RanksUp,
    Release,
    RestartScheduled,
    RunPhase,
    SetTimer,
    Setup,
    SetupFinished,
    SetupPhase,
    SetupStarted,
    Shutdown,
    Snapshot,
    StartGroup,
    State,
    StopGroup,
    TimerFired,
)

__all__ = ["Decision", "step"]

_EXIT_CODES = {
    RunPhase.SUCCEEDED: 0,
    RunPhase.FAILED: 1,
    RunPhase.FAILED_SETUP: 5,
    RunPhase.CANCELLED: 8,
}
_RESTARTS_EXHAUSTED = 4


class Decision(NamedTuple):
    """What follows from an event."""

    state: State
    actions: tuple[Action, ...]


def step(state: State, event: Event, limits: Limits) -> Decision:
    """Decide what follows from ``event``."""
    turn = _Turn(state, limits)
    turn.take(event)
    turn.settle()
    actions = turn.actions
    if turn.state.phase is RunPhase.STOPPING or turn.state.phase.ended:
        # One event may start a group and then end the run (a returning agent, the last group given up).
        actions = [action for action in actions if not isinstance(action, StartGroup)]
    return Decision(turn.state, tuple(actions))


class _Turn:
    """One decision under construction."""

    def __init__(self, state: State, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self.actions: list[Action] = []
        self._lost: frozenset[str] = frozenset()  # while settling: hosts whose groups count as lost

    # --- taking events ------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        match event:
            case ControllerStarted():
                for host in self.state.hosts:
                    self._disconnected(host.name)
            case AgentConnected():
                self._connected(event)
            case AgentDisconnected():
                self._disconnected(event.host)
            case SetupStarted() | SetupFinished():
                self._setup_event(event)
            case DownRequested():
                self._down(event)
            case TimerFired():
                self._timer(event.name)
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
        if isinstance(event, GroupStopped) and event.generation == 0 and not group.live:
            event = replace(event, generation=group.generation)  # its agent never had it
        if event.generation < group.generation:
            return  # fenced: an older generation has nothing to say any more
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
            case GenerationEnded():
                changes = {"live": frozenset(), "reason": event.reason}
            case RestartScheduled():
                oldest = event.mono_ns - round(self.limits.window_s * 1e9)
                spent = (*(at for at in group.restarts_ns if at > oldest), event.mono_ns)
                changes = {"phase": GroupPhase.RESTARTING, "restarts_ns": spent}
            case GroupGivenUp():
                if not group.phase.final:
                    self._give_up(group, f"after {_count(event.restarts, 'restart')}: {event.reason}")
                changes = {"live": frozenset()}
            case GroupDone():
                changes = {"phase": GroupPhase.DONE, "step": event.step, "reason": None}
            case GroupStopped():
                changes = {"live": frozenset(), "phase": GroupPhase.STOPPED}
        phase = changes.get("phase")
        if group.phase.final or (group.phase is GroupPhase.STOPPING and phase and not phase.final):
            # What is given up, done or told to stop stays so; _give_up has set its own already.
            changes.pop("phase", None)
        self._group(group.replica, **changes)
        self._stop_if_unwanted(self.state.groups[group.replica], event)

    def _stop_if_unwanted(self, group: Group, event: Event) -> None:
        """A generation that starts after its group was given up or stopped is ended again."""
        if isinstance(event, GenerationStarted) and group.phase in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED):
            self._stop_group(group, f"replica {group.replica} is {group.phase}: it may not run again")

    def _give_up(self, group: Group, why: str) -> None:
        cause = f"replica {group.replica} was given up {why}"
        self._group(group.replica, phase=GroupPhase.GIVEN_UP, reason=cause)
        self._change(root_cause=self.state.root_cause or cause)

    def _setup_event(self, event: SetupStarted | SetupFinished) -> None:
        host = self.state.host(event.host)
        if host.setup in (SetupPhase.DONE, SetupPhase.FAILED):
            return
        if isinstance(event, SetupStarted):
            self._host(event.host, setup=SetupPhase.RUNNING)
        elif event.failure is None:
            self._host(event.host, setup=SetupPhase.DONE)
        else:
            self._host(event.host, setup=SetupPhase.FAILED)
            if not self.state.phase.ended and self.state.outcome is None:
                where = f" on host {event.host}" if len(self.state.hosts) > 1 else ""
                self._begin_stop(RunPhase.FAILED_SETUP, f"setup failed{where}: {event.failure}", grace_s=0.0)

    def _connected(self, event: AgentConnected) -> None:
        before = self.state.host(event.host)
        restarted = before.incarnation not in (None, event.incarnation)
        changes: dict[str, Any] = {"connected": True, "lost": False, "incarnation": event.incarnation}
        if before.setup is SetupPhase.SENT or (restarted and before.setup is SetupPhase.RUNNING):
            changes["setup"] = SetupPhase.NEEDED  # the order was lost, or it died with its agent
        host = self._host(event.host, **changes)
        self.actions.append(CancelTimer(name=_agent_timer(event.host)))
        if self.state.phase.ended:
            self._shutdown(host)
            return
        seen = {snapshot.replica: snapshot for snapshot in event.groups}
        for group in self.state.groups:
            if group.host == event.host and group.started:
                self._reconcile(group, seen.get(group.replica), restarted=restarted, mono_ns=event.mono_ns)
        if self.state.released:
            self.actions.append(Release(host=event.host, reason="the drain window is over"))

    def _reconcile(self, group: Group, seen: Snapshot | None, *, restarted: bool, mono_ns: int) -> None:
        """Bring what an agent has and what it should have together."""
        if seen is not None:
            newer = seen.generation > group.generation
            if seen.generation < group.generation:
                self._stop_group(group, f"generation {seen.generation} is older than {group.generation}")
                return
            phase = seen.state if newer and not group.phase.final else group.phase
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
        spent = tuple(at for at in group.restarts_ns if at > oldest)
        why = f"the agent of host {group.host} restarted"
        if len(spent) >= self.limits.max_restarts:
            self._give_up(group, f"after {_count(len(spent), 'restart')}: {why}")
            self._group(group.replica, live=frozenset())
            return
        group = self._group(group.replica, restarts_ns=(*spent, mono_ns), live=frozenset(), reason=why)
        self._start_group(group, generation=group.generation + 1, reason=why)

    def _disconnected(self, name: str) -> None:
        host = self._host(name, connected=False)
        if not self.state.phase.ended and not host.lost:
            delay_s = self.limits.agent_lost_s
            reason = f"the agent of host {name} is not connected"
            self.actions.append(SetTimer(name=_agent_timer(name), delay_s=delay_s, reason=reason))

    def _down(self, event: DownRequested) -> None:
        if self.state.phase.ended or self.state.phase is RunPhase.STOPPING:
            return  # the first reason stands
        if self.state.outcome is not None:
            # All work is done and the ranks are leaving: they are hurried, the outcome stays.
            self._change(notes=(*self.state.notes, f"ended while its ranks were leaving: {event.reason}"))
            self._begin_stop(self.state.outcome, self.state.reason or event.reason, grace_s=event.grace_s)
            return
        self._begin_stop(RunPhase.CANCELLED, event.reason, grace_s=event.grace_s)

    def _timer(self, name: str) -> None:
        if self.state.phase.ended:
            return
        if name == "drain" and self.state.draining:
            self._drain_over()
        elif name == "leave" and self.state.outcome is not None and self.state.phase is not RunPhase.STOPPING:
            late = self._names(group for group in self.state.groups if not group.at_rest)
            note = f"{late} did not leave within {self.limits.leave_s:g} s of the end and was stopped"
            self._change(notes=(*self.state.notes, note))
            self._begin_stop(self.state.outcome, note, grace_s=self.limits.grace_s)
        elif name == "stop" and self.state.phase is RunPhase.STOPPING:
            late = self._names(group for group in self.state.groups if not group.at_rest)
            self._finish(f"; {late} did not report its end in time")
        elif name.startswith("agent:"):
            host = self.state.host(name.removeprefix("agent:"))
            if not host.connected:
                self._host(host.name, lost=True)
                cause = f"the agent of host {host.name} was silent for {self.limits.agent_lost_s:g} s"
                self._change(root_cause=self.state.root_cause or cause)

    def _drain_over(self) -> None:
        """Close the drain window: whoever trains with sessions has nothing to add to a reached target."""
        done = [group for group in self.state.groups if group.phase is GroupPhase.DONE]
        self._change(draining=False)
        if len(done) < self.limits.min_replicas:
            return  # those that are done are the donors of the others: they stay
        self._release("the drain window is over")
        if any(group.step is None for group in done):
            return  # scripts without a session end one by one, in their own time
        for group in self.state.groups:
            if group.started and not group.phase.final:
                why = f"the others finished {self.limits.drain_window_s:g} s ago"
                note = f"replica {group.replica} was stopped: {why}"
                self._change(notes=(*self.state.notes, note))
                self._group(group.replica, phase=GroupPhase.STOPPING, reason=why)
                self._stop_group(group, why)
        self.actions.append(
            SetTimer(name="leave", delay_s=self.limits.leave_s, reason="stragglers are stopped")
        )

    # --- what the state as a whole asks for ---------------------------------------------------------------

    def settle(self) -> None:
        """Draw the conclusions that hold whatever the event was."""
        if self.state.phase.ended:
            return
        self._lost = frozenset(host.name for host in self.state.hosts if host.lost)
        if self.state.phase is not RunPhase.STOPPING:
            self._settle_active()
        if self.state.phase is RunPhase.STOPPING and all(
            group.at_rest or not self._counts(group) for group in self.state.groups
        ):
            self._finish()

    def _settle_active(self) -> None:
        self._prepare()
        able = [group for group in self.state.groups if self._able(group)]
        if len(able) < self.limits.min_replicas:
            self._fail(len(able))
        elif all(group.phase.final for group in self.state.groups if self._counts(group)):
            self._all_done()
        else:
            self._open_drain()
            self._phase_while_active(able)

    def _prepare(self) -> None:
        """Set hosts up, then start groups: none before all hosts are ready."""
        for host in self.state.hosts:
            if host.connected and host.setup is SetupPhase.NEEDED:
                self._host(host.name, setup=SetupPhase.SENT)
                self.actions.append(Setup(host=host.name, reason="the job has a setup command"))
        if any(host.setup is not SetupPhase.DONE for host in self.state.hosts):
            return
        for group in self.state.groups:
            if not group.started and self.state.host(group.host).connected:
                self._start_group(group, generation=1, reason="its host is ready")

    def _fail(self, able: int) -> None:
        cause = self.state.root_cause or self._first_stopped()
        left = f"{able} of {_count(self.limits.replicas, 'replica group')} can go on"
        reason = f"{cause}; {left}, min_replicas is {self.limits.min_replicas}"
        given_up = any(group.phase is GroupPhase.GIVEN_UP for group in self.state.groups)
        self._begin_stop(
            RunPhase.FAILED,
            reason,
            grace_s=self.limits.grace_s,
            exit_code=_RESTARTS_EXHAUSTED if given_up else None,
        )

    def _first_stopped(self) -> str:
        for group in self.state.groups:
            if group.phase is GroupPhase.STOPPED:
                return f"replica {group.replica}: {group.reason or 'it was stopped'}"
        return "too few replica groups"

    def _all_done(self) -> None:
        """All that can be done is done: let the ranks leave, then end the run."""
        if self.state.outcome is None:
            self._change(outcome=RunPhase.SUCCEEDED)
            leaving = "every replica group is done, the ranks are leaving"
            self._change(reason=self.state.reason or leaving)
            if any(group.live for group in self.state.groups):
                self._release("every replica group is done")
                leave = SetTimer(name="leave", delay_s=self.limits.leave_s, reason="the ranks leave")
                self.actions.append(leave)
        if all(group.at_rest for group in self.state.groups if self._counts(group)):
            self._finish()

    def _open_drain(self) -> None:
        done = any(group.phase is GroupPhase.DONE for group in self.state.groups)
        if done and not self.state.draining and not self.state.released:
            self._change(draining=True)
            delay_s = self.limits.drain_window_s
            self.actions.append(SetTimer(name="drain", delay_s=delay_s, reason="the first group is done"))

    def _phase_while_active(self, able: list[Group]) -> None:
        started = any(group.started for group in self.state.groups)
        if len(able) < self.limits.replicas and started:
            lost = self._names(group for group in self.state.groups if not self._able(group))
            cause = self.state.root_cause or self._first_stopped()
            self._change(phase=RunPhase.DEGRADED, reason=f"{cause}; going on without {lost}")
        elif any(group.phase is GroupPhase.RUNNING for group in able) or all(group.up for group in able):
            self._change(phase=RunPhase.RUNNING, reason=None)
        elif started:
            self._change(phase=RunPhase.STARTING, reason=None)
        elif any(host.setup in (SetupPhase.SENT, SetupPhase.RUNNING) for host in self.state.hosts):
            self._change(phase=RunPhase.SETUP, reason=None)

    # --- ending -------------------------------------------------------------------------------------------

    def _begin_stop(
        self, outcome: RunPhase, reason: str, *, grace_s: float, exit_code: int | None = None
    ) -> None:
        self._change(
            phase=RunPhase.STOPPING, outcome=outcome, reason=reason, grace_s=grace_s, exit_code=exit_code
        )
        self.actions += [CancelTimer(name="drain"), CancelTimer(name="leave")]
        for group in self.state.groups:
            if not group.at_rest:
                phase = group.phase if group.phase.final else GroupPhase.STOPPING
                self._stop_group(self._group(group.replica, phase=phase), reason)
        delay_s = grace_s + self.limits.stop_margin_s
        self.actions.append(SetTimer(name="stop", delay_s=delay_s, reason="groups must stop in time"))

    def _finish(self, trouble: str = "") -> None:
        outcome = self.state.outcome or RunPhase.FAILED
        reason = self.state.reason or str(outcome)
        exit_code = self.state.exit_code
        if outcome is RunPhase.SUCCEEDED:
            broken = [group.failed_after for group in self.state.groups if group.failed_after]
            done = sum(group.phase is GroupPhase.DONE for group in self.state.groups)
            given_up = [g.reason or "" for g in self.state.groups if g.phase is GroupPhase.GIVEN_UP]
            if done - len(broken) < self.limits.min_replicas and broken:
                outcome, reason = RunPhase.FAILED, str(broken[0])
            else:
                notes = "; ".join((*given_up, *self.state.notes, *map(str, broken)))
                reason = (
                    f"every replica group is done; note: {notes}" if notes else "every replica group is done"
                )
        exit_code = _EXIT_CODES[outcome] if exit_code is None else exit_code
        self._change(phase=outcome, outcome=outcome, reason=reason + trouble, exit_code=exit_code)
        names = ("drain", "leave", "stop", *(_agent_timer(host.name) for host in self.state.hosts))
        self.actions += [CancelTimer(name=name) for name in names]
        for host in self.state.hosts:
            self._shutdown(host)

    def _shutdown(self, host: Host) -> None:
        if host.connected:
            reason = f"the run is {self.state.phase}: {self.state.reason}"
            self.actions.append(Shutdown(host=host.name, grace_s=self.state.grace_s, reason=reason))

    def _release(self, reason: str) -> None:
        if self.state.released:
            return
        self._change(released=True, draining=False)
        self.actions.append(CancelTimer(name="drain"))
        self.actions += [
            Release(host=host.name, reason=reason) for host in self.state.hosts if host.connected
        ]

    # --- small words --------------------------------------------------------------------------------------

    def _able(self, group: Group) -> bool:
        """Whether the group finished, or still can."""
        if group.phase is GroupPhase.DONE:
            return True
        dead = group.phase in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED)
        return not dead and group.host not in self._lost

    def _counts(self, group: Group) -> bool:
        """Whether the end of the run waits for it: nobody waits for a lost host's."""
        return group.host not in self._lost

    def _stopping(self, group: Group) -> bool:
        return self.state.phase is RunPhase.STOPPING or group.phase is GroupPhase.STOPPING

    def _start_group(self, group: Group, *, generation: int, reason: str) -> None:
        self._group(group.replica, started=True, generation=generation, phase=GroupPhase.STARTING)
        left = max(0, self.limits.max_restarts - len(group.restarts_ns))
        self.actions.append(
            StartGroup(
                host=group.host,
                replica=group.replica,
                generation=generation,
                max_restarts=left,
                reason=reason,
            )
        )

    def _stop_group(self, group: Group, reason: str) -> None:
        if not self.state.host(group.host).connected:
            return  # it is told when it connects
        grace_s = self.state.grace_s if self.state.phase is RunPhase.STOPPING else self.limits.grace_s
        stop = StopGroup(host=group.host, replica=group.replica, grace_s=grace_s, reason=reason)
        self.actions.append(stop)

    def _group(self, replica: int, **changes: Any) -> Group:
        group = replace(self.state.groups[replica], **changes)
        groups = (*self.state.groups[:replica], group, *self.state.groups[replica + 1 :])
        self._change(groups=groups)
        return group

    def _host(self, name: str, **changes: Any) -> Host:
        host = replace(self.state.host(name), **changes)
        self._change(hosts=tuple(host if known.name == name else known for known in self.state.hosts))
        return host

    def _change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    @staticmethod
    def _names(groups: Any) -> str:
        return ", ".join(f"replica {group.replica}" for group in groups) or "nobody"


def _agent_timer(host: str) -> str:
    return f"agent:{host}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
