"""Hosts that are provisioned: asked for, lost, and asked for again; one attempt at a time, others are fenced.

The policy wants, a launcher does and says what became of it. A lost host costs its groups a generation and nothing
of their budgets: they go to a spare that is ready, or wait. A next attempt is asked for at once where the one before
was of use; where it was not, after a pause that doubles. What only an error ended is tried a few times, what is
refused never again.
"""

from __future__ import annotations

from typing import Any

from sky_monarch.controller.hosts import fence_reason
from sky_monarch.controller.model import (
    AgentConnected,
    CancelTimer,
    Examined,
    FailureKind,
    Fence,
    Group,
    GroupPhase,
    Host,
    HostLost,
    HostPhase,
    HostReport,
    HostReported,
    RunPhase,
    SetTimer,
    SetupPhase,
)
from sky_monarch.controller.turn import agent_timer, count_of, doubt_timer, host_timer, probe_timer
from sky_monarch.controller.verdict import Verdict
from sky_monarch.errors import CredentialsError, NoCapacityError

__all__ = ["MOST_FAULTS", "Replacing"]

MOST_FAULTS = 5
"""Attempts in a row that end by an error: after so many a host is given up."""

_NO_CAPACITY, _NO_CREDENTIALS = NoCapacityError.exit_code, CredentialsError.exit_code
_ATTEMPTS_AFTER_LOSS = 1000
"""First attempt where it is not known which there were: more than there can have been."""
_ASKED = frozenset({HostPhase.WANTED, HostPhase.LAUNCHING})


class Replacing(Verdict):
    """Takes what is said of hosts, and sees to it that each is had, once."""

    # --- the launcher says ---------------------------------------------------------------------------------

    def _host_reported(self, event: HostReport) -> None:
        host = self.state.host(event.host)
        if not host.provisioned:
            return
        over = event.state in (HostReported.ENDED, HostReported.DOWN)
        if event.attempt != host.attempt:
            if over and event.attempt == host.replaces:
                self._host(host.name, replaces=None, trouble=None)
            elif event.state is HostReported.DOWN_FAILED and event.attempt == host.replaces:
                self._host(host.name, trouble=event.reason or "the launcher could not take it down")
            return  # an older one changes nothing any more
        if over:
            self._host_ended(host, event)
            return
        match event.state:
            case HostReported.LAUNCHING if host.phase is HostPhase.WANTED:
                self._host(host.name, phase=HostPhase.LAUNCHING)
            case HostReported.LAUNCHED if host.phase in _ASKED:
                self._change(settled=True)
                self._host(host.name, phase=HostPhase.UP)
                self._await_agent(host.name)
            case HostReported.FAILED if host.away and not host.over:
                self._launch_failed(host, event)
            case HostReported.DOWN_FAILED:
                trouble = event.reason or "the launcher could not take it down"
                self._host(host.name, trouble=trouble, gone=False)

    def _host_ended(self, host: Host, event: HostReport) -> None:
        if self._ending:
            self._reaped(host, whole=event.state is HostReported.DOWN)
            return
        if host.over:
            self._host(host.name, gone=True, trouble=None)
        elif host.phase is not HostPhase.WANTED:  # else it is a word on the attempt before, wrongly numbered
            told = "its provider ended it" if event.state is HostReported.ENDED else "it was taken down"
            self._lose(host, f"{told}: {event.reason}" if event.reason else told, gone=True, fault=False)

    def _launch_failed(self, host: Host, event: HostReport) -> None:
        kind = event.kind or FailureKind.ERROR
        why = event.reason or f"its launch failed ({kind})"
        # What helps against the failure is one thing, and whether something of it was left standing another.
        host = self._host(host.name, trouble=why if event.left else host.trouble)
        if kind is FailureKind.ERROR:
            self._lose(host, why, gone=False, fault=True)  # of which a cluster may be left
            return
        host = self._host(host.name, gone=not event.left)
        if kind is FailureKind.CAPACITY:
            self._lose(host, why, gone=host.gone, fault=False, pause=True)
            return
        self._vacate(host, why, jump=event.left)
        code = _NO_CREDENTIALS if kind is FailureKind.CREDENTIALS else _NO_CAPACITY
        self._give_up_host(self.state.host(host.name), why, exit_code=code)

    # --- a host is lost --------------------------------------------------------------------------------------

    def _lose(self, host: Host, why: str, *, gone: bool, fault: bool, pause: bool = False) -> None:
        """An attempt is over.

        Args:
            host: Whose.
            why: In words.
            gone: Nothing of it is left for certain. Where something may be, its groups may even still run.
            fault: An error ended it, before it was of any use.
            pause: The next attempt waits in any case.
        """
        if host.over:
            return
        self._vacate(host, why, jump=not gone and not host.leaving)
        if self._ending:
            self._host(host.name, lost=True, gone=gone)
            for replica in host.replicas:
                group = self.state.groups[replica]
                self._group(replica, phase=group.phase if group.phase.final else GroupPhase.STOPPED)
            return
        if self._is_needed(host) and host.replicas and (spare := self._ready_spare()) is not None:
            self._place(host, spare, f"host {host.name}: {why}")
        host = self.state.host(host.name)
        tries = 0 if host.useful else host.tries + 1
        faults = 0 if host.useful else host.faults + fault
        host = self._host(host.name, tries=tries, faults=faults, gone=gone, useful=False)
        if not self._is_needed(host):
            self._host(host.name, phase=HostPhase.DOWN)
        elif faults >= MOST_FAULTS:
            self._give_up_host(host, f"after {count_of(faults, 'attempt')}: {why}", exit_code=_NO_CAPACITY)
        elif tries > 1 or (tries and pause):
            doubled = tries - 1 if pause else tries - 2
            delay_s = min(
                self.limits.host_backoff_s * 2.0 ** min(doubled, 30), self.limits.host_backoff_max_s
            )
            self._host(host.name, phase=HostPhase.WAITING)
            self.actions.append(SetTimer(name=host_timer(host.name), delay_s=delay_s, reason=why))
        else:
            self._ask_for(host)

    def _vacate(self, host: Host, why: str, *, jump: bool) -> None:
        """Nobody of this attempt is heard any more; its groups wait for the next one.

        Args:
            host: Whose.
            why: In words.
            jump: Its agent may live, cut off from here, and count generations on until its lease ends: the next
                ones are beyond all that it can reach, so that the lighthouse fences its own.
        """
        if host.connected:
            reason = f"fenced: attempt {host.attempt} of host {host.name} is over: {why}"
            self.actions.append(Fence(host=host.name, attempt=host.attempt, reason=reason))
        timers = (agent_timer, doubt_timer, host_timer, probe_timer)
        self.actions += [CancelTimer(name=of(host.name)) for of in timers]
        # Who left in order has lost nothing, and has said so.
        trained = map(self.state.groups.__getitem__, host.replicas)
        lost = tuple(
            (g.replica, g.generation)
            for g in trained
            if g.started and not (g.phase.final or g.dropped) and (g.live or not host.leaving)
        )
        if lost and not self._ending:
            self.actions.append(HostLost(host=host.name, attempt=host.attempt, groups=lost, reason=why))
        for replica in host.replicas:
            group = self.state.groups[replica]
            if group.phase.final or group.dropped:
                final = group.phase if group.phase.final else GroupPhase.STOPPED
                self._empty(group, host.name, phase=final)
            else:
                self._deprive(group, host, why, jump=jump)
        setup = SetupPhase.NEEDED if self.state.prepares else SetupPhase.DONE
        self._host(
            host.name,
            connected=False,
            incarnation=None,
            setup=setup,
            leaving=False,
            doubted=False,
            probe=None,
            examining=False,
            pairs=(),
            reason=why,
        )
        self._forget_pairs_with(host.name)

    def _deprive(self, group: Group, host: Host, why: str, *, jump: bool) -> None:
        """A group that is not over has lost its host."""
        beyond = 2 * self.limits.max_restarts if jump and group.started else 0
        generation = group.generation + beyond
        changes = {"phase": GroupPhase.PENDING, "started": False, "generation": generation, "reason": why}
        self._empty(group, host.name, **changes)

    def _forget_pairs_with(self, name: str) -> None:
        """Nobody waits for what is over to be reached."""

    def _ask_for(self, host: Host) -> None:
        """Want the next attempt. The only place where attempts are counted."""
        attempt = host.attempt + 1
        if self.state.forgotten:
            attempt = max(attempt, _ATTEMPTS_AFTER_LOSS)
        replaces = host.replaces if host.gone else host.attempt
        self._host(
            host.name, phase=HostPhase.WANTED, attempt=attempt, replaces=replaces, gone=False, trouble=None
        )

    def _give_up_host(self, host: Host, why: str, *, exit_code: int) -> None:
        if host.replicas and not self._all_final(host) and (spare := self._ready_spare()) is not None:
            self._place(host, spare, f"host {host.name}: {why}")
            host = self.state.host(host.name)
        cause = f"{'spare ' if host.spare else ''}host {host.name} was given up: {why}"
        if host.spare:
            self._change(notes=(*self.state.notes, cause))
            self._host(host.name, phase=HostPhase.GIVEN_UP, reason=why)
            return
        unprovided = exit_code if self.state.unprovided is None else self.state.unprovided
        self._change(root_cause=self.state.root_cause or cause, unprovided=unprovided)
        for replica in host.replicas:
            group = self.state.groups[replica]
            if not group.phase.final:
                self._give_up(group, f"with its host: {why}")
        self._host(host.name, phase=HostPhase.GIVEN_UP, reason=why)

    def _host_due(self, name: str) -> None:
        """The pause before the next attempt is over."""
        host = self.state.host(name)
        if host.phase is HostPhase.WAITING and not self._ending:
            self._ask_for(host)

    # --- its agent -------------------------------------------------------------------------------------------

    def _await_agent(self, name: str, *, ours: bool = False) -> None:
        """Give the agent of a host that is up its time to dial."""
        host = self.state.host(name)
        if host.connected or self._ending:
            return
        delay_s = self.limits.agent_lost_s if self._has_dialled(host) else self.limits.agent_joins_s
        reason = f"the agent of host {name} is not connected"
        self.actions.append(SetTimer(name=agent_timer(name), delay_s=delay_s, reason=reason))
        if self._has_dialled(host):
            doubt_s = self.limits.agent_doubted_s * (2 if ours else 1)
            self.actions.append(SetTimer(name=doubt_timer(name), delay_s=doubt_s, reason=reason))

    def _line_lost(self, name: str) -> None:
        """The line of an agent ended without a farewell: whoever provides its host may know why."""
        host = self.state.host(name)
        if host.phase is HostPhase.UP and not (host.leaving or host.connected or self._ending):
            self._host(name, doubted=True)

    def _doubt_due(self, host: Host) -> None:
        """It has not dialled again for a while; where a spare is ready, nobody waits to see whether it does."""
        if host.connected or host.phase is not HostPhase.UP or self._ending:
            return
        host = self._host(host.name, doubted=True)
        if host.replicas and self._is_needed(host) and self._ready_spare() is not None:
            why = f"its agent was silent for {self.limits.agent_doubted_s:g} s, and a spare is ready"
            self._lose(host, why, gone=False, fault=False)

    def _agent_silent(self, host: Host) -> None:
        if host.connected or host.phase is not HostPhase.UP:
            return
        known = self._has_dialled(host)
        limit_s = self.limits.agent_lost_s if known else self.limits.agent_joins_s
        self._lose(host, f"its agent was silent for {limit_s:g} s", gone=False, fault=not known)

    def _has_dialled(self, host: Host) -> bool:
        """Whether its agent is known to run; of an attempt that was forgotten nothing else is likely."""
        return host.incarnation is not None or host.attempt == 0

    def _admits(self, event: AgentConnected) -> bool:
        """Whether an agent may speak for its host; then the host is up, whatever the launcher has said."""
        host = self.state.host(event.host)
        if not host.provisioned:
            return True
        fence = fence_reason(host, event.attempt, forgotten=self.state.forgotten)
        if fence is not None:
            self.actions.append(Fence(host=host.name, attempt=event.attempt, reason=fence))
            return False
        self._change(settled=True)
        changes: dict[str, Any] = {"phase": HostPhase.UP, "attempt": event.attempt, "doubted": False}
        if event.attempt != host.attempt and host.connected:
            reason = f"fenced: host {host.name} is at attempt {event.attempt}"
            self.actions.append(Fence(host=host.name, attempt=host.attempt, reason=reason))
        self._host(host.name, **changes, gone=False)
        return True

    def _agent_leaving(self, name: str, reason: str) -> None:
        """Its groups stop in order by themselves; the next attempt waits until it has left."""
        host = self.state.host(name)
        if host.provisioned and not host.over:
            self._host(name, leaving=True, reason=reason)

    def _agent_left(self, host: Host) -> None:
        """The agent of a host that was leaving has hung up."""
        why = host.reason or "it was taken away"
        self._lose(host, why, gone=False, fault=False)

    def _examined(self, event: Examined) -> None:
        """A host was looked at: one that is unfit is lost before anything runs on it, and had anew."""
        host = self.state.host(event.host)
        held = host.examining
        host = self._host(host.name, examining=False)
        if event.unfit is None:
            if host.provisioned:
                self.prepared.append(host.name)
        elif host.provisioned:
            if not (host.over or host.leaving):
                self._lose(host, f"unfit, {event.unfit}", gone=False, fault=True)
        elif held and not self.state.phase.ended and self.state.outcome is None:
            # Nobody has another one in its place.
            reason = (
                f"host {host.name} is unfit, {event.unfit} (`doctor: off` in the job starts all the same)"
            )
            self._begin_stop(RunPhase.FAILED_SETUP, reason, grace_s=0.0)
        else:
            note = f"host {host.name} is unfit, {event.unfit}"
            self._change(notes=(*self.state.notes, note))

    def _setup_failed_on(self, host: Host, failure: str, *, killed: bool) -> bool:
        """Whether a preparation that failed is the host's own affair, and not the end of the run."""
        began = any(group.up for group in self.state.groups)
        if not host.provisioned or not (began or killed or host.leaving):
            return False
        if not host.leaving:  # else it goes in a moment, and was killed for that
            self._lose(host, f"setup failed: {failure}", gone=False, fault=not killed)
        return True

    def _attempts_forgotten(self) -> None:
        """Nobody knows which attempts there were: whoever dials with the newest is it."""
        self._change(forgotten=True, launched=True)
        for host in self.state.hosts:
            if host.provisioned and host.phase is not HostPhase.DOWN:
                self._host(host.name, phase=HostPhase.UP, attempt=0)
                self._await_agent(host.name)
