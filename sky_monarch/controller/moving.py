"""Groups on the hosts of another place: a job moves as a whole, and only while it has been nowhere yet.

Places sell hosts of different sizes, so that one takes two groups on each of them and the next one four. The launcher
says which place it tries before it launches anything there. Once a host has been up, groups stay with their hosts.
"""

from __future__ import annotations

from sky_monarch.controller.model import CancelTimer, GroupPhase, Host, HostPhase, JobPlaced, RunPhase, State
from sky_monarch.controller.turn import agent_timer, count_of, doubt_timer, host_timer, probe_timer
from sky_monarch.controller.wide import Wide

__all__ = ["Moving", "why_not_placed"]


def why_not_placed(state: State) -> str | None:
    """Why groups cannot be placed otherwise by now; None where they can."""
    if state.settled:
        return "a host of this run has been up, and groups stay with their hosts"
    if state.groups[0].span is not None:
        return "its groups have several hosts each"
    if len(state.groups) != state.replicas or any(group.dropped for group in state.groups):
        return "the run was scaled"
    if state.phase is RunPhase.STOPPING or state.phase.ended or state.outcome is not None:
        return "the run is ending"
    given_up = [host.name for host in state.hosts if host.phase is HostPhase.GIVEN_UP]
    if given_up or any(group.phase.final or group.phase is GroupPhase.STOPPING for group in state.groups):
        return f"host {given_up[0]} was given up" if given_up else "a group of it is over"
    return None


class Moving(Wide):
    """Places groups for another place."""

    def _placed(self, event: JobPlaced) -> None:
        if why_not_placed(self.state) is not None:
            return  # a host came up while this was on its way
        homes = dict(event.homes)
        why = f"candidate {event.choice + 1} has {count_of(len(homes), 'host')}"
        for host in self.state.hosts:
            if host.provisioned and host.name not in homes and host.phase is not HostPhase.DOWN:
                self._leave_out(host, why)
        for name, replicas in homes.items():
            host = self._take_in(name, replicas)
            for replica in replicas:
                self._group(replica, host=name, away=host.away, host_lost=host.lost)
        self._change(placement=event.choice)

    def _leave_out(self, host: Host, why: str) -> None:
        """A host that the place does not need; nothing of it has ever been there."""
        timers = (agent_timer, doubt_timer, host_timer, probe_timer)
        self.actions += [CancelTimer(name=of(host.name)) for of in timers]
        self._host(host.name, replicas=(), phase=HostPhase.DOWN, reason=why)

    def _take_in(self, name: str, replicas: tuple[int, ...]) -> Host:
        if name not in self.state.places:
            return self._home(name, replicas)
        host = self._host(name, replicas=replicas)
        if host.phase is HostPhase.DOWN:  # left out before
            self._ask_for(self._host(name, reason=None))
        return self.state.host(name)
