"""What the state of a run as a whole asks for: to start, to go on degraded, to drain, to end."""

from __future__ import annotations

from itertools import islice

from sky_monarch.controller.hosts import Host, words
from sky_monarch.controller.model import (
    GroupPhase,
    Reaping,
    RunPhase,
    SetTimer,
    Setup,
    SetupPhase,
)
from sky_monarch.controller.patience import Patience
from sky_monarch.controller.turn import count_of

__all__ = ["Verdict"]

_TOO_FEW_GROUPS = 4
_MOST_WORDS = 3


class Verdict(Patience):
    """Draws the conclusions that hold whatever the event was."""

    def settle(self) -> None:
        """Draw the conclusions that hold whatever the event was."""
        if self.state.phase.ended:
            return
        if self.state.reaping is not Reaping.NO:
            self._settle_reaping()
            return
        if self.state.phase is not RunPhase.STOPPING:
            self._settle_active()
        stopping = self.state.phase is RunPhase.STOPPING and self.state.reaping is Reaping.NO
        if stopping and not self.state.groups.tally.restless:
            self._finish()

    def _settle_active(self) -> None:
        self._prepare()
        tally = self.state.groups.tally
        if tally.able < self.limits.min_replicas:
            self._fail(tally.able)
        elif not tally.unfinished:
            self._all_done()
        else:
            self._open_drain()
            self._settle_patience()
            self._phase_while_active()

    def _prepare(self) -> None:
        """Set hosts up, then start groups: none before all hosts are ready.

        Hosts that are provisioned come one by one, and replacements later: each of them starts on its own.
        """
        for name in self.arrived:
            if self.state.host(name).setup is SetupPhase.NEEDED:
                self._host(name, setup=SetupPhase.SENT)
                self.actions.append(Setup(host=name, reason="the job has a setup command"))
        for name in tuple(dict.fromkeys((*self.arrived, *self.prepared))):
            self._spare_came(name)
        # What was not to be started before is to be now only where a host came, or the last one became ready.
        last = self.before.unready and not self.state.unready
        ready = self.state.hosts if last else map(self.state.host, (*self.arrived, *self.prepared))
        for host in ready:
            for replica in host.replicas if self._may_start(host) else ():
                group = self.state.groups[replica]
                if not group.started and not group.phase.final and group.span is None:
                    self._start_group(group, generation=group.generation + 1, reason="its host is ready")

    def _may_start(self, host: Host) -> bool:
        if host.provisioned:
            held = host.pairs or host.leaving or host.examining
            return host.connected and host.setup is SetupPhase.DONE and not held
        return host.connected and not self.state.unready

    def _fail(self, able: int) -> None:
        cause = self.state.root_cause or self._first_stopped()
        began = any(group.up for group in self.state.groups)
        none_came = self.state.unprovided if not began else None
        exit_code = _TOO_FEW_GROUPS if none_came is None else none_came
        left = f"{able} of {count_of(self.state.replicas, 'replica group')} can go on"
        reason = f"{cause}; {left}, min_replicas is {self.limits.min_replicas}"
        self._begin_stop(RunPhase.FAILED, reason, grace_s=self.limits.grace_s, exit_code=exit_code)

    def _first_stopped(self) -> str:
        for group in map(self.state.groups.__getitem__, self.state.groups.unable):
            if group.phase is GroupPhase.STOPPED:
                return f"replica {group.replica}: {group.reason or 'it was stopped'}"
        return "too few replica groups"

    def _all_done(self) -> None:
        """All that can be done is done: let the ranks leave, then end the run."""
        if self.state.outcome is None:
            self._change(outcome=RunPhase.SUCCEEDED)
            leaving = "every replica group is done, the ranks are leaving"
            self._change(reason=self.state.reason or leaving)
            if self.state.groups.tally.live:
                self._release("every replica group is done")
                leave = SetTimer(name="leave", delay_s=self.limits.leave_s, reason="the ranks leave")
                self.actions.append(leave)
        if not self.state.groups.tally.restless:
            self._finish()

    def _open_drain(self) -> None:
        if self.state.groups.tally.done and not self.state.draining and not self.state.released:
            self._change(draining=True)
            delay_s = self.limits.drain_window_s
            self.actions.append(SetTimer(name="drain", delay_s=delay_s, reason="the first group is done"))

    def _phase_while_active(self) -> None:
        groups, tally = self.state.groups, self.state.groups.tally
        if tally.away:
            self._phase_while_awaiting()
        elif groups.unable and tally.started:
            known = self.state.phase is RunPhase.DEGRADED and groups.unable is self.before.groups.unable
            known = known and not self.before.groups.tally.away
            if not known or self.state.root_cause is not self.before.root_cause:
                cause = self.state.root_cause or self._first_stopped()
                reason = f"{cause}; going on without {self._names(groups.unable)}"
                self._change(phase=RunPhase.DEGRADED, reason=reason)
        elif tally.running or not tally.never_up:
            self._become(RunPhase.RUNNING)
        elif tally.started:
            self._become(RunPhase.STARTING)
        elif any(host.setup in (SetupPhase.SENT, SetupPhase.RUNNING) for host in self.state.hosts):
            self._become(RunPhase.SETUP)

    def _phase_while_awaiting(self) -> None:
        """Say which hosts are awaited, and of what a run goes on without them."""
        now, before = self.state, self.before
        # A new reason only where something that it is made of has changed: this is asked at every event.
        if now.hosts is before.hosts and now.launcher is before.launcher and now.phase is before.phase:
            tally, former = now.groups.tally, before.groups.tally
            if (tally.running, tally.started, tally.able) == (former.running, former.started, former.able):
                return
        tally = now.groups.tally
        away = (host for host in now.hosts if host.away and host.replicas)
        parts = [words(host) for host in islice(away, _MOST_WORDS)]
        if next(away, None) is not None:
            parts.append("and others")
        if now.idle:
            parts.append(self._idle_words())
        if now.launcher is False:
            parts.append("waiting for launcher: nobody asks what is wanted")
        if tally.running or now.phase in (RunPhase.RUNNING, RunPhase.DEGRADED):
            gone = (group.replica for group in now.groups if group.missed or (group.away and group.able))
            reason = f"{'; '.join(parts)}; going on without {self._names(gone)}"
            self._become(RunPhase.DEGRADED, reason)
        elif tally.started:
            self._become(RunPhase.STARTING, "; ".join(parts))
        elif any(host.setup in (SetupPhase.SENT, SetupPhase.RUNNING) for host in now.hosts):
            self._become(RunPhase.SETUP, "; ".join(parts))
        else:
            self._become(RunPhase.PENDING, "; ".join(parts))

    def _become(self, phase: RunPhase, reason: str | None = None) -> None:
        if (self.state.phase, self.state.reason) != (phase, reason):
            self._change(phase=phase, reason=reason)

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
            if group.away and not group.phase.final:
                note = f"replica {group.replica} did not come back before the others finished"
                self._change(notes=(*self.state.notes, note))
                self._group(group.replica, phase=GroupPhase.STOPPED, reason=note)
                for home in map(self.state.host, group.hosts):
                    if home.away:
                        self._retire(home)
            elif not group.phase.final and (group.started or group.span is not None):
                why = f"the others finished {self.limits.drain_window_s:g} s ago"
                note = f"replica {group.replica} was stopped: {why}"
                self._change(notes=(*self.state.notes, note))
                self._group(group.replica, phase=GroupPhase.STOPPING, reason=why)
                self._stop_group(group, why)
        self.actions.append(
            SetTimer(name="leave", delay_s=self.limits.leave_s, reason="stragglers are stopped")
        )
