"""A decision under construction: the state so far, what is wanted, and the words for both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from sky_monarch.controller.model import (
    Action,
    Group,
    GroupPhase,
    Host,
    Limits,
    RunPhase,
    StartGroup,
    State,
    StopGroup,
)

__all__ = [
    "IDLE_TIMER",
    "LAST_READ",
    "SILENCES",
    "Turn",
    "agent_timer",
    "count_of",
    "doubt_timer",
    "empty_timer",
    "host_timer",
    "probe_timer",
]

SILENCES = ("agent:", "doubt:")
"""What timers begin with for somebody who is not heard of: they count only while we could hear."""
LAST_READ = ("reap", "empty:")
"""What timers begin with after which hosts go, and with them what they know of the output."""

IDLE_TIMER = "idle"
"""Name of the timer for hosts that are there and can be of no use."""

_MOST_NAMES = 8


class Turn:
    """The state as it is becoming, and the actions so far.

    Args:
        state: Before the event.
        limits: Of the run.
        now_ns: When the event happened, where it says so.
    """

    def __init__(self, state: State, limits: Limits, *, now_ns: int | None = None) -> None:
        self.before = state
        self.now_ns = now_ns
        self.state = state
        self.limits = limits
        self.actions: list[Action] = []
        self.arrived: list[str] = []
        """Hosts whose agent connects with this event."""
        self.prepared: list[str] = []
        """Hosts that lack nothing any more since this event, and start without waiting for others."""
        self.touched: set[int] = set()
        """Groups of which something has changed."""

    def _stopping(self, group: Group) -> bool:
        return self.state.phase is RunPhase.STOPPING or group.phase is GroupPhase.STOPPING

    def _start_group(self, group: Group, *, generation: int, reason: str) -> None:
        self._group(group.replica, started=True, generation=generation, phase=GroupPhase.STARTING)
        left = max(0, self.limits.max_restarts - len(group.restarts_ns))
        # Where the event tells no time, as if the last one were now: rather too few are left than too many.
        now_ns = max(group.restarts_ns, default=0) if self.now_ns is None else self.now_ns
        self.actions.append(
            StartGroup(
                host=group.host,
                replica=group.replica,
                generation=generation,
                max_restarts=left,
                spent_s=tuple(max(0, now_ns - at) / 1e9 for at in group.restarts_ns),
                reason=reason,
            )
        )

    def _stop_group(self, group: Group, reason: str) -> None:
        if not self.state.host(group.host).connected:
            return  # it is told when it connects
        grace_s = self.state.grace_s if self.state.phase is RunPhase.STOPPING else self.limits.grace_s
        stop = StopGroup(host=group.host, replica=group.replica, grace_s=grace_s, reason=reason)
        self.actions.append(stop)

    def _group(self, replica: int, **changes: Any) -> Group:
        before = self.state.groups[replica]
        group = replace(before, **changes)
        if group != before:
            self.touched.add(replica)
            self._change(groups=self.state.groups.with_one(group))
        return group

    def _host(self, name: str, **changes: Any) -> Host:
        place, before = self.state.places[name], self.state.host(name)
        host = replace(before, **changes)
        if host == before:
            return before
        hosts = (*self.state.hosts[:place], host, *self.state.hosts[place + 1 :])
        self._change(hosts=hosts, unready=self.state.unready + host.holds_up - before.holds_up)
        if (host.lost, host.away) != (before.lost, before.away):
            for replica in host.replicas:
                homes = [self.state.host(home) for home in self.state.groups[replica].hosts]
                lost, away = any(home.lost for home in homes), any(home.away for home in homes)
                self._group(replica, host_lost=lost, away=away)
        return host

    def _empty(self, group: Group, host: str, **changes: Any) -> Group:  # noqa: ARG002
        """Nothing of a group is left on that host."""
        return self._group(group.replica, live=frozenset(), **changes)

    def _change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    @staticmethod
    def _names(replicas: Iterable[int]) -> str:
        first = list(islice(replicas, _MOST_NAMES + 1))
        more = [] if len(first) <= _MOST_NAMES else ["others"]
        return ", ".join([*(f"replica {replica}" for replica in first[:_MOST_NAMES]), *more]) or "nobody"

    def _give_up(self, group: Group, why: str) -> None:
        cause = f"replica {group.replica} was given up {why}"
        self._group(group.replica, phase=GroupPhase.GIVEN_UP, reason=cause)
        self._change(root_cause=self.state.root_cause or cause)


def agent_timer(host: str) -> str:
    """Name of the timer for the silence of a host."""
    return f"agent:{host}"


def doubt_timer(host: str) -> str:
    """Name of the timer for the silence after which a host is doubted."""
    return f"doubt:{host}"


def host_timer(host: str) -> str:
    """Name of the timer for the pause before the next attempt at a host."""
    return f"host:{host}"


def empty_timer(host: str) -> str:
    """Name of the timer for the last look at the output of a host that nothing runs on any more."""
    return f"empty:{host}"


def probe_timer(host: str) -> str:
    """Name of the timer for the answers that the groups of a host wait for."""
    return f"probe:{host}"


def count_of(number: int, what: str) -> str:
    """A number of things in words.

    >>> count_of(1, "restart"), count_of(2, "restart")
    ('1 restart', '2 restarts')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
