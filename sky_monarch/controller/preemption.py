"""A host is about to be taken away: whether its groups may simply leave, or nobody stays that has what they have."""

from __future__ import annotations

from sky_monarch.controller.model import Group, GroupPhase, HostLeaving, WhoSaves
from sky_monarch.controller.scaling import Scaling

__all__ = ["Preemption"]


class Preemption(Scaling):
    """Says who saves."""

    def _say_who_saves(self, event: HostLeaving) -> None:
        """One group of the last host saves: of all that leave at once, no other has been told that others stay."""
        if not self.limits.last_saves or self._ending or not self.state.host(event.host).connected:
            return
        holders = [group for group in self.state.groups if self._has_state(group)]
        others = [group for group in holders if group.host != event.host]
        if others:
            why = f"{self._names(group.replica for group in others)} has the state, and stays"
            self.actions.append(WhoSaves(host=event.host, replica=None, reason=why))
            return
        mine = [group.replica for group in holders]
        if mine:
            why = f"nobody stays that has the state: {event.reason}"
            self.actions.append(WhoSaves(host=event.host, replica=min(mine), reason=why))

    def _has_state(self, group: Group) -> bool:
        """Whether others could heal from it, for as long as its host stays."""
        host = self.state.host(group.host)
        return group.phase is GroupPhase.RUNNING and bool(group.live) and host.connected and not host.leaving
