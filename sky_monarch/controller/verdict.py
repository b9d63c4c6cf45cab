"""What the state of a run as a whole asks for: to start, to go on degraded, to drain, to end."""

from __future__ import annotations

from sky_monarch.controller.model import (
    CancelTimer,
    GroupPhase,
    Host,
    Release,
    RunPhase,
    SetTimer,
    Setup,
    SetupPhase,
    Shutdown,
)
from sky_monarch.controller.turn import Turn, agent_timer, count_of

__all__ = ["Verdict"]

_EXIT_CODES = {
    RunPhase.SUCCEEDED: 0,
    RunPhase.FAILED: 1,
    RunPhase.FAILED_SETUP: 5,
    RunPhase.CANCELLED: 8,
}
_TOO_FEW_GROUPS = 4


class Verdict(Turn):
    """Draws the conclusions that hold whatever the event was."""

    def settle(self) -> None:
        """Draw the conclusions that hold whatever the event was."""
        if self.state.phase.ended:
            return
        if self.state.phase is not RunPhase.STOPPING:
            self._settle_active()
        if self.state.phase is RunPhase.STOPPING and not self.state.groups.tally.restless:
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
            self._phase_while_active()

    def _prepare(self) -> None:
        """Set hosts up, then start groups: none before all hosts are ready."""
        for name in self.arrived:
            if self.state.host(name).setup is SetupPhase.NEEDED:
                self._host(name, setup=SetupPhase.SENT)
                self.actions.append(Setup(host=name, reason="the job has a setup command"))
        if self.state.unready:
            return
        # What was not to be started before is to be now only where a host came, or the last one became ready.
        ready = self.state.hosts if self.before.unready else map(self.state.host, self.arrived)
        for host in ready:
            for replica in host.replicas if host.connected else ():
                group = self.state.groups[replica]
                if not group.started and not group.phase.final:
                    self._start_group(group, generation=group.generation + 1, reason="its host is ready")

    def _fail(self, able: int) -> None:
        cause = self.state.root_cause or self._first_stopped()
        left = f"{able} of {count_of(self.limits.replicas, 'replica group')} can go on"
        reason = f"{cause}; {left}, min_replicas is {self.limits.min_replicas}"
        self._begin_stop(RunPhase.FAILED, reason, grace_s=self.limits.grace_s, exit_code=_TOO_FEW_GROUPS)

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
        if tally.able < self.limits.replicas and tally.started:
            known = self.state.phase is RunPhase.DEGRADED and groups.unable is self.before.groups.unable
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

    def _become(self, phase: RunPhase) -> None:
        if self.state.phase is not phase or self.state.reason is not None:
            self._change(phase=phase, reason=None)

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
            done = self.state.groups.tally.done
            given_up = [g.reason or "" for g in self.state.groups if g.phase is GroupPhase.GIVEN_UP]
            if done - len(broken) < self.limits.min_replicas and broken:
                outcome, reason = RunPhase.FAILED, str(broken[0])
            else:
                notes = "; ".join((*given_up, *self._never_came(), *self.state.notes, *map(str, broken)))
                reason = (
                    f"every replica group is done; note: {notes}" if notes else "every replica group is done"
                )
        exit_code = _EXIT_CODES[outcome] if exit_code is None else exit_code
        self._change(phase=outcome, outcome=outcome, reason=reason + trouble, exit_code=exit_code)
        names = ("drain", "leave", "stop", *(agent_timer(host.name) for host in self.state.hosts))
        self.actions += [CancelTimer(name=name) for name in names]
        for host in self.state.hosts:
            self._shutdown(host)

    def _never_came(self) -> list[str]:
        """What a success owes its reader of groups that went with their hosts."""
        lost = [replica for host in self.state.hosts if host.lost for replica in host.replicas]
        lost = [replica for replica in lost if not self.state.groups[replica].phase.final]
        return [f"{self._names(lost)} did not finish: {self.state.root_cause}"] if lost else []

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
