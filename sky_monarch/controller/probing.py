"""The pair test: before a group starts on a host that was provisioned, that host and each other one try the way.

Groups that cannot reach each other would hang in their first step, with a message that names nobody. Here both ends
are named within seconds, before anything of the job has run.
"""

from __future__ import annotations

from dataclasses import replace

from sky_monarch.controller.hosts import Host, Pair
from sky_monarch.controller.model import CancelTimer, Probe, ProbeTarget, Reached, RunPhase, SetTimer
from sky_monarch.controller.replacing import Replacing
from sky_monarch.controller.turn import probe_timer

__all__ = ["Probing"]

_UNREACHABLE = 1
_MARGIN_S = 5.0
_WHY = "hosts are to reach each other before a group starts"


class Probing(Replacing):
    """Has hosts try whether they reach each other, and draws the conclusion."""

    def _prove(self, host: Host) -> None:
        """A host has come: it has to reach all that are there, and they it."""
        if host.probe is None:
            return
        others = [one for one in self.state.hosts if one is not host and self._can_answer(one)]
        if not others or self._ending:
            return
        self._host(host.name, pairs=tuple(Pair(other=one.name) for one in others))
        self._ask(host, others)
        for one in others:
            self._ask(one, [host])
        delay_s = self.limits.probe_s + _MARGIN_S
        self.actions.append(SetTimer(name=probe_timer(host.name), delay_s=delay_s, reason=_WHY))

    @staticmethod
    def _can_answer(host: Host) -> bool:
        return host.provisioned and host.connected and host.probe is not None and not host.leaving

    def _ask(self, host: Host, targets: list[Host]) -> None:
        wanted = tuple(
            ProbeTarget(host=one.name, attempt=one.attempt, address=one.probe or "") for one in targets
        )
        deadline_s = self.limits.probe_s
        self.actions.append(Probe(host=host.name, targets=wanted, deadline_s=deadline_s, reason=_WHY))

    def _ask_again(self, host: Host) -> None:
        """The line to a host was lost, and with it perhaps a question or an answer."""
        if self._ending or host.probe is None:
            return
        if mine := [self.state.host(pair.other) for pair in host.pairs if pair.mine is None]:
            self._ask(host, mine)
        for other in self.state.hosts:
            if any(pair.other == host.name and pair.theirs is None for pair in other.pairs):
                self._ask(host, [other])

    def _reached(self, event: Reached) -> None:
        host = self.state.host(event.host)
        if self._ending or not host.connected:
            return
        for name, error in event.targets:
            if name not in self.state.places:
                continue
            self._heard(host.name, name, mine=error)
            self._heard(name, host.name, theirs=error)

    def _heard(self, name: str, other: str, **said: str) -> None:
        """Note one answer in the pairs of a host that is not proved yet."""
        host = self.state.host(name)
        if self._ending or not any(pair.other == other for pair in host.pairs):
            return
        pairs = tuple(replace(pair, **said) if pair.other == other else pair for pair in host.pairs)
        for pair in pairs:
            if pair.error is not None:
                self._apart(host, pair)
                return
        self._proved(self._host(name, pairs=tuple(pair for pair in pairs if not pair.good)))

    def _proved(self, host: Host) -> None:
        if not host.pairs:
            self.actions.append(CancelTimer(name=probe_timer(host.name)))
            self.prepared.append(host.name)

    def _apart(self, host: Host, pair: Pair) -> None:
        """Two hosts that live cannot talk: nothing can begin like that, and what has begun goes on without one."""
        # Hosts that are far apart: what is said of the way names both, and where they were looked for.
        why = f"hosts {host.name} and {pair.other} cannot talk: {pair.error}"
        if any(group.up for group in self.state.groups):
            self._lose(host, why, gone=False, fault=True)
        else:
            grace_s = self.limits.grace_s
            self._begin_stop(RunPhase.FAILED, why, grace_s=grace_s, exit_code=_UNREACHABLE)

    def _forget_pairs_with(self, name: str) -> None:
        for other in self.state.hosts:
            left = tuple(pair for pair in other.pairs if pair.other != name)
            if len(left) != len(other.pairs):
                self._proved(self._host(other.name, pairs=left))

    def _probes_over(self, name: str) -> None:
        """Who has not answered by now may be dead, which the silence of his agent is to tell: nobody waits for him."""
        if self.state.host(name).pairs and not self._ending:
            note = f"whether host {name} reaches all others was not told in time"
            self._change(notes=self.state.notes if note in self.state.notes else (*self.state.notes, note))
            self._proved(self._host(name, pairs=()))
