"""How a run ends: its groups are stopped, then its hosts are taken down, and only then is it over.

A run whose hosts may still stand has not ended: they cost money. So its end waits for them, but not for ever.
"""

from __future__ import annotations

from sky_monarch.controller.hosts import standing
from sky_monarch.controller.model import (
    CancelTimer,
    GroupPhase,
    Host,
    HostPhase,
    Reaping,
    Release,
    RunPhase,
    SetTimer,
    Shutdown,
)
from sky_monarch.controller.turn import IDLE_TIMER, Turn, agent_timer, doubt_timer, host_timer, probe_timer

__all__ = ["Ending"]

_EXIT_CODES = {
    RunPhase.SUCCEEDED: 0,
    RunPhase.FAILED: 1,
    RunPhase.FAILED_SETUP: 5,
    RunPhase.CANCELLED: 8,
}
_REAP = "reap"
_MOST_NAMES = 8


class Ending(Turn):
    """Brings a run to its end."""

    def _begin_stop(
        self, outcome: RunPhase, reason: str, *, grace_s: float, exit_code: int | None = None
    ) -> None:
        self._change(
            phase=RunPhase.STOPPING, outcome=outcome, reason=reason, grace_s=grace_s, exit_code=exit_code
        )
        self.actions += [CancelTimer(name=name) for name in ("drain", "leave", IDLE_TIMER)]
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
        self._change(outcome=outcome, exit_code=exit_code)
        for host in self.state.hosts:
            self.actions.append(CancelTimer(name=agent_timer(host.name)))
            if host.provisioned:
                self.actions += [
                    CancelTimer(name=of(host.name)) for of in (doubt_timer, host_timer, probe_timer)
                ]
        self.actions += [CancelTimer(name=name) for name in ("drain", "leave", "stop", IDLE_TIMER)]
        if self._left():
            self._begin_reaping(reason + trouble)
        else:
            self._conclude(reason + trouble)

    def _conclude(self, reason: str) -> None:
        self._change(phase=self.state.outcome or RunPhase.FAILED, reason=reason)
        for host in self.state.hosts:
            never = not self.state.launched  # there was nobody who could have made it
            over = never or (host.gone and host.replaces is None)
            if host.provisioned and host.phase is not HostPhase.GIVEN_UP and over:
                host = self._host(host.name, phase=HostPhase.DOWN, gone=True)
            self._shutdown(host)

    # --- hosts ---------------------------------------------------------------------------------------------

    def _left(self) -> list[Host]:
        """Hosts that have to be taken down; none where nobody has ever asked what is wanted."""
        return list(standing(self.state)) if self.state.launched else []

    def _begin_reaping(self, reason: str) -> None:
        left = self._left()
        more = ["others"] if len(left) > _MOST_NAMES else []
        names = ", ".join([*(host.name for host in left[:_MOST_NAMES]), *more])
        self._change(
            phase=RunPhase.STOPPING,
            reason=f"{reason}; taking down {names}",
            verdict=reason,
            reaping=Reaping.SOON,
        )
        # Readers of the output ask the agents for what was printed last.
        linger_s = self.limits.linger_s if any(host.connected for host in left) else 0.0
        self.actions.append(SetTimer(name=_REAP, delay_s=linger_s, reason="the last output is still read"))

    def _settle_reaping(self) -> None:
        if self.state.reaping is Reaping.NOW and not self._left():
            self.actions.append(CancelTimer(name=_REAP))
            self._conclude(self.state.verdict or "")

    def _reap_timer(self) -> None:
        if self.state.reaping is Reaping.SOON:
            self._change(reaping=Reaping.NOW)
            for host in standing(self.state):
                self._shutdown(host)
            delay_s = self.limits.reap_s
            self.actions.append(SetTimer(name=_REAP, delay_s=delay_s, reason="hosts are taken down"))
        elif self.state.reaping is Reaping.NOW and self.state.phase is RunPhase.STOPPING:
            unknown = f"nobody has said within {self.limits.reap_s:g} s that it is down"
            told = "; ".join(
                f"host {host.name} may still bill: {host.trouble or unknown}" for host in self._left()
            )
            self._conclude(f"{self.state.verdict}; {told}")

    def _reaped(self, host: Host, *, whole: bool) -> None:
        """A host is gone while the run ends: nobody waits for what was on it.

        Args:
            host: Which.
            whole: Nothing of an older attempt is left either.
        """
        for replica in host.replicas:
            group = self.state.groups[replica]
            phase = group.phase if group.phase.final else GroupPhase.STOPPED
            self._empty(group, host.name, phase=phase)
        became = HostPhase.GIVEN_UP if host.phase is HostPhase.GIVEN_UP else HostPhase.DOWN
        replaces = None if whole else host.replaces
        trouble = None if replaces is None else host.trouble  # of the older attempt, which is still awaited
        changes = {"connected": False, "doubted": False, "trouble": trouble, "replaces": replaces}
        self._host(host.name, phase=became, gone=True, **changes)

    def _retire(self, host: Host) -> None:
        """Have a host no more that nothing is to run on: it was awaited, and what for is over."""
        if not all(self.state.groups[replica].phase.final for replica in host.replicas):
            return
        self.actions += [
            CancelTimer(name=of(host.name)) for of in (agent_timer, doubt_timer, host_timer, probe_timer)
        ]
        self._host(host.name, phase=HostPhase.DOWN, pairs=(), doubted=False)

    @property
    def _ending(self) -> bool:
        """Whether no host is to be had any more."""
        return self.state.phase is RunPhase.STOPPING or self.state.phase.ended

    # --- words and orders ----------------------------------------------------------------------------------

    def _never_came(self) -> list[str]:
        """What a success owes its reader of groups that went with their hosts."""
        lost = [replica for host in self.state.hosts if host.lost for replica in host.replicas]
        lost = [replica for replica in lost if not self.state.groups[replica].phase.final]
        return [f"{self._names(lost)} did not finish: {self.state.root_cause}"] if lost else []

    def _shutdown(self, host: Host) -> None:
        if host.connected:
            state = self.state.outcome if self.state.reaping is not Reaping.NO else self.state.phase
            reason = f"the run is {state}: {self.state.verdict or self.state.reason}"
            self.actions.append(Shutdown(host=host.name, grace_s=self.state.grace_s, reason=reason))

    def _release(self, reason: str) -> None:
        if self.state.released:
            return
        self._change(released=True, draining=False)
        self.actions.append(CancelTimer(name="drain"))
        self.actions += [
            Release(host=host.name, reason=reason) for host in self.state.hosts if host.connected
        ]
