"""Another number of replica groups, while the run goes on.

The number that is wanted is kept; what follows from it is drawn at each event, so that a controller that died half-way
goes on. The groups with the lowest numbers stay. Those above leave the quorum in order, as at a notice that their
host is taken away, and hosts that nothing is left on are let go. While a group that stays is awaited none of the others
has to go: no good host is given up for one that is not there. Hosts are let go also where groups were given up.
"""

from __future__ import annotations

from sky_monarch.controller.model import (
    CancelTimer,
    Group,
    GroupPhase,
    Groups,
    Host,
    HostPhase,
    Scaled,
    SetTimer,
    SetupPhase,
    Shutdown,
)
from sky_monarch.controller.probing import Probing
from sky_monarch.controller.turn import agent_timer, doubt_timer, empty_timer, host_timer, probe_timer

__all__ = ["Scaling"]

_KEPT_FOR_GOOD = frozenset({HostPhase.HERE, HostPhase.DOWN, HostPhase.GIVEN_UP})


class Scaling(Probing):
    """Has as many groups as are wanted."""

    def _scaled(self, event: Scaled) -> None:
        if self._ending or self.state.outcome is not None:
            return  # it was taken while the end was on its way
        new: list[Group] = []
        for name, replicas in event.homes:
            host = self._home(name, replicas)
            new += [Group(replica=replica, host=name, away=host.away) for replica in replicas]
            self.prepared.append(name)
        new.sort(key=lambda group: group.replica)
        self._change(replicas=event.replicas, groups=Groups.of((*self.state.groups, *new)))

    def _home(self, name: str, replicas: tuple[int, ...]) -> Host:
        """The host of groups that there never were; asked for, where it was none of the run before."""
        if name in self.state.places:
            host = self.state.host(name)
            if host.emptied:
                self.actions.append(CancelTimer(name=empty_timer(name)))
            return self._host(name, replicas=(*host.replicas, *replicas), emptied=False)
        host = Host(
            name=name,
            replicas=replicas,
            setup=SetupPhase.NEEDED if self.state.prepares else SetupPhase.DONE,
            phase=HostPhase.WANTED,
            attempt=1,
        )
        places = {**self.state.places, name: len(self.state.hosts)}
        self._change(hosts=(*self.state.hosts, host), places=places, provisions=True)
        return host

    def settle_scale(self) -> None:
        """Drop, recall and let go what the number of groups that is wanted asks for."""
        state, before = self.state, self.before
        if not state.groups.tally.dropped and len(state.groups) == state.replicas:
            return
        same = state.groups is before.groups and state.hosts is before.hosts
        if (same and state.replicas == before.replicas) or self._ending or state.outcome is not None:
            return
        if state.groups.tally.done:
            return  # the end is near, and donors stay for it
        awaits = any(group.away and group.able for group in state.groups[: state.replicas])
        for group in state.groups:
            if group.replica < state.replicas:
                if group.dropped and group.at_rest:
                    self._recall(group)
            elif not self._is_dropped(group) and not (awaits and group.started):
                self._drop(group)
        for host in self.state.hosts:
            self._let_go_if_empty(host)

    @staticmethod
    def _is_dropped(group: Group) -> bool:
        return group.dropped and (group.phase.final or group.phase is GroupPhase.STOPPING)

    def _drop(self, group: Group) -> None:
        why = self._why
        if group.phase.final:
            self._group(group.replica, dropped=True)
        elif group.started:
            group = self._group(group.replica, dropped=True, phase=GroupPhase.STOPPING, reason=why)
            self._stop_group(group, why)
        else:
            self._group(group.replica, dropped=True, phase=GroupPhase.STOPPED, reason=why)

    def _recall(self, group: Group) -> None:
        """The run is to have a group again that it was scaled below."""
        if group.phase is GroupPhase.GIVEN_UP:
            self._group(group.replica, dropped=False)  # which it stays
            return
        host = self.state.host(group.host)
        if host.over:
            self._vacate(host, self._why, jump=False)
            self._ask_for(self._host(host.name, tries=0, faults=0))
        elif not (host.connected or host.away):
            return  # its agent has the group as it was: it must not be taken for what is to come
        self.actions.append(CancelTimer(name=empty_timer(host.name)))
        self._host(host.name, emptied=False)
        self._group(group.replica, dropped=False, started=False, phase=GroupPhase.PENDING, reason=None)
        self.prepared.append(host.name)

    def _is_empty(self, host: Host) -> bool:
        if host.phase in _KEPT_FOR_GOOD or not host.replicas:
            return False
        groups = map(self.state.groups.__getitem__, host.replicas)
        return all(
            (group.dropped or group.phase is GroupPhase.GIVEN_UP) and group.at_rest for group in groups
        )

    def _phase_while_active(self) -> None:
        """A run that goes on without some of its groups pays for no host that has only those."""
        for replica in sorted(self.touched) if self.state.outcome is None else ():
            group = self.state.groups[replica]
            if group.phase is GroupPhase.GIVEN_UP:
                for name in group.hosts:
                    self._let_go_if_empty(self.state.host(name))
        super()._phase_while_active()

    def _let_go_if_empty(self, host: Host) -> None:
        if host.emptied or not self._is_empty(host):
            return
        if not host.connected:
            self._dismiss(host)
            return
        # Readers of the output ask its agent for what was printed last.
        self._host(host.name, emptied=True)
        delay_s, why = self.limits.linger_s, "the last output is still read"
        self.actions.append(SetTimer(name=empty_timer(host.name), delay_s=delay_s, reason=why))

    def _dismiss_emptied(self, name: str) -> None:
        """The time is over that was left for the last output of a host."""
        host = self.state.host(name)
        if host.emptied and not self._ending and self._is_empty(host):
            self._dismiss(host)

    def _dismiss(self, host: Host) -> None:
        """Have a host no more."""
        groups = [self.state.groups[replica] for replica in host.replicas]
        given_up = not any(group.dropped for group in groups)
        why = "every group of it was given up" if given_up else self._why
        if host.connected:
            shutdown = Shutdown(host=host.name, grace_s=self.limits.grace_s, reason=why)
            self.actions.append(shutdown)
        timers = (agent_timer, doubt_timer, host_timer, probe_timer, empty_timer)
        self.actions += [CancelTimer(name=of(host.name)) for of in timers]
        self._host(host.name, phase=HostPhase.DOWN, pairs=(), emptied=False, reason=why)
        self._forget_pairs_with(host.name)

    @property
    def _why(self) -> str:
        return f"the run was scaled to {self.state.replicas}"
