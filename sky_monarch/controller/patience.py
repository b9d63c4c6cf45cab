"""How long hosts may stand and cost for nothing: fewer groups than ``min_replicas`` have one, and none can train.

Want of capacity is waited for as long as the run lasts where that costs nothing. It is not while hosts that are there
wait for one that never comes: those are let go at a limit, and the run with them.
"""

from __future__ import annotations

from itertools import islice

from sky_monarch.controller.hosts import words
from sky_monarch.controller.model import CancelTimer, HostPhase, RunPhase, SetTimer
from sky_monarch.controller.spares import Spares
from sky_monarch.controller.turn import IDLE_TIMER
from sky_monarch.errors import NoCapacityError, SupervisionError

__all__ = ["Patience"]

_MOST_WORDS = 3


class Patience(Spares):
    """Counts the time in which hosts are there that no group can use."""

    def _stand_idle(self) -> bool:
        """Whether hosts are there and cannot be of use, for too few of their like are."""
        tally = self.state.groups.tally
        if not self.state.provisions or tally.able - tally.away >= self.limits.min_replicas:
            return False
        return any(host.provisioned and host.phase is HostPhase.UP for host in self.state.hosts)

    def _settle_patience(self) -> None:
        """Set the timer when it begins that hosts are idle, and take it back when enough have come."""
        limit_s = self.limits.idle_limit_s
        if limit_s is None or self._ending or self.state.outcome is not None:
            return
        idle = self._stand_idle()
        if idle is self.state.idle:
            return
        self._change(idle=idle)
        reason = "hosts are there, and fewer groups than min_replicas have one"
        self.actions.append(
            SetTimer(name=IDLE_TIMER, delay_s=limit_s, reason=reason)
            if idle
            else CancelTimer(name=IDLE_TIMER)
        )

    def _idle_words(self) -> str:
        """How many groups have a host, and what becomes of the run where that stays so."""
        return (
            f"{self._have_hosts()}; hosts that are there are kept for {self.limits.idle_limit_s:g} s of that"
        )

    def _have_hosts(self) -> str:
        tally = self.state.groups.tally
        have, count = tally.able - tally.away, self.state.replicas
        return f"{have} of {count} replica groups have a host, min_replicas is {self.limits.min_replicas}"

    def _patience_over(self) -> None:
        if self._ending or self.state.outcome is not None or not self.state.idle:
            return
        tally = self.state.groups.tally
        away = (host for host in self.state.hosts if host.away and host.replicas)
        missed = [words(host) for host in islice(away, _MOST_WORDS)]
        long = f"for {self.limits.idle_limit_s:g} s (recovery.idle_limit_s) {self._have_hosts()}"
        never = not (tally.running or tally.done)
        self._begin_stop(
            RunPhase.FAILED,
            "; ".join([*missed, long]),
            grace_s=self.limits.grace_s,
            exit_code=(NoCapacityError if never else SupervisionError).exit_code,
        )
