"""Spare hosts: provisioned and prepared as any other, with nothing to run until a host is lost.

No host is a spare by name: one without groups is. The groups of a lost host go to a spare that is ready, at once, and
the lost one, which is provisioned again, becomes the next spare. So it is where a host is merely awaited, at the start
too: a spare that is ready before it takes its groups, and nobody waits.
"""

from __future__ import annotations

from sky_monarch.controller.ending import Ending
from sky_monarch.controller.model import GroupsPlaced, Host, HostPhase, SetupPhase

__all__ = ["Spares"]


class Spares(Ending):
    """Places groups on hosts that have none."""

    def _ready_spare(self) -> Host | None:
        """A spare on which groups can start this moment; the first by position."""
        if self._ending or self.state.outcome is not None or self.state.groups[0].span is not None:
            return None  # or it would get a part of a group, which has its place among the others
        return next((host for host in self.state.hosts if self._is_ready(host)), None)

    @staticmethod
    def _is_ready(host: Host) -> bool:
        """Whether groups could start on it: those that it has, or, of a spare, any."""
        proved = host.setup is SetupPhase.DONE and not (host.pairs or host.leaving or host.examining)
        return host.spare and host.phase is HostPhase.UP and host.connected and proved

    def _spare_came(self, name: str) -> None:
        """A host may have become ready: it takes what waits for one that is not there."""
        spare = self.state.host(name)
        if not self._is_ready(spare) or self._ready_spare() is None:
            return
        # Attempt 0: its agent may live, and dial any moment with the groups that it has.
        waiting = (host for host in self.state.hosts if host.attempt and host.replicas and host.away)
        for host in waiting:
            if not self._all_final(host):
                self._place(host, spare, f"host {host.name} is awaited, and spare host {name} is ready")
                return

    def _place(self, host: Host, spare: Host, reason: str) -> None:
        """Groups of a host that is not there go to one that is; the former is a spare from now on."""
        replicas = host.replicas
        self._host(host.name, replicas=())
        spare = self._host(spare.name, replicas=replicas)
        for replica in replicas:
            self._group(replica, host=spare.name, away=spare.away, host_lost=spare.lost)
        self.actions.append(GroupsPlaced(host=host.name, on=spare.name, groups=replicas, reason=reason))
        self.prepared.append(spare.name)

    def _all_final(self, host: Host) -> bool:
        return all(self.state.groups[replica].phase.final for replica in host.replicas)

    def _is_needed(self, host: Host) -> bool:
        """Whether another attempt at a host is worth having: something is still to run on it, or may be."""
        if host.spare:
            return self.state.outcome is None and self.state.groups.tally.unfinished > 0
        return not self._all_final(host)

    def _adopt_place(self, name: str, replicas: frozenset[int]) -> None:
        """Where groups are was lost with the journal: it is where their agent has them."""
        host = self.state.host(name)
        if not self.state.forgotten or not replicas or replicas <= set(host.replicas):
            return
        other = self.state.host(self.state.groups[min(replicas)].host)
        if other.connected or not replicas <= set(other.replicas):
            return
        mine, theirs = host.replicas, other.replicas
        for one, now in ((other, mine), (host, theirs)):
            one = self._host(one.name, replicas=now)
            for replica in now:
                self._group(replica, host=one.name, away=one.away, host_lost=one.lost)
