"""What a controller remembers of its run: all that the events of the journal have led to.

The same rows give the same memory, live or replayed; a summary of it stands for the rows up to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from sky_monarch.controller import model
from sky_monarch.controller.checkpoints import CheckpointNews
from sky_monarch.controller.losses import LostSamples
from sky_monarch.controller.money import MoneyBook
from sky_monarch.controller.notices import Notices
from sky_monarch.controller.policy import step
from sky_monarch.controller.reports import policy_event
from sky_monarch.controller.spans import places_of
from sky_monarch.controller.status import StatusBook

__all__ = ["Memory"]


class Memory:
    """The policy's state, what people see of the run, and which timers are set.

    Args:
        limits: Of the run.
        hosts: Replicas by host.
        has_setup: The job has a setup command.
        checkpoint_target: Where its checkpoints go; None for a job without them.
        provisioned: Hosts that a launcher makes.
    """

    def __init__(
        self,
        limits: model.Limits,
        hosts: Mapping[str, tuple[int, ...]],
        *,
        has_setup: bool,
        checkpoint_target: str | None,
        provisioned: Collection[str] = (),
    ) -> None:
        self._limits = limits
        ranks = limits.ranks_per_replica
        self.state = model.initial_state(dict(hosts), setup=has_setup, provisioned=provisioned, ranks=ranks)
        places = places_of(hosts, ranks=ranks)
        self.book = StatusBook(limits.replicas, ranks, has_setup=has_setup, places=places)
        self.checkpoints = CheckpointNews(checkpoint_target)
        self.losses = LostSamples(limits.replicas)
        self.money = MoneyBook()
        self.notices = Notices()
        self.since_ms: dict[str, int] = {}
        """When each host that is provisioned came to where it stands, Unix time in milliseconds."""
        self.timers: dict[str, float] = {}
        """Seconds by name of those that are set: they get a full window where nobody was here to serve them."""

    def apply(self, row: Mapping[str, Any]) -> tuple[model.Action, ...]:
        """Take one row of the journal; returns what the policy wants."""
        self.book.apply(row)
        self.checkpoints.apply(row)
        self.losses.apply(row)
        self.money.apply(row)
        self.notices.apply(row)
        event = policy_event(row)
        if event is None:
            return ()
        if isinstance(event, model.TimerFired):
            self.timers.pop(event.name, None)
        before = self.state
        self.state, actions = step(before, event, self._limits)
        if self.state.provisions and self.state.hosts is not before.hosts:
            for new in self.state.hosts[len(before.hosts) :]:
                self.since_ms[new.name] = row["wall_ms"]
            for old, new in zip(before.hosts, self.state.hosts, strict=False):  # scaled, it has more of them
                if old is not new and (old.phase, old.attempt) != (new.phase, new.attempt):
                    self.since_ms[new.name] = row["wall_ms"]
        for action in actions:
            if isinstance(action, model.SetTimer):
                self.timers[action.name] = action.delay_s
            elif isinstance(action, model.CancelTimer):
                self.timers.pop(action.name, None)
        return actions

    def take(self, report: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
        """Take the news out of a checked progress report; returns what is left, and rows for the journal."""
        report, saved = self.checkpoints.take(report)
        report, lost = self.losses.take(report)
        return report, saved + lost

    def summary(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "state": _plain(self.state),
            "book": self.book.summary(),
            "checkpoints": self.checkpoints.summary(),
            "losses": self.losses.summary(),
            "money": self.money.summary(),
            "notices": self.notices.summary(),
            "since_ms": self.since_ms,
            "timers": self.timers,
        }

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Take up what :meth:`summary` gave, in place of all rows up to it.

        Raises:
            ValueError: It is none (KeyError and TypeError likewise).
        """
        self.state = _state(summary["state"])
        self.book.restore(summary["book"])
        self.checkpoints.restore(summary["checkpoints"])
        self.losses.restore(summary.get("losses", []))  # older ones know of none
        self.money.restore(summary.get("money", {}))
        self.notices.restore(summary.get("notices", {}))
        self.since_ms = dict(summary.get("since_ms", {}))
        self.timers = dict(summary["timers"])


def _plain(value: Any) -> Any:
    if isinstance(value, model.Groups):
        return [_plain(one) for one in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that this version knows: another one may have added some."""
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _state(plain: Mapping[str, Any]) -> model.State:
    groups = [_group(one) for one in plain["groups"]]
    hosts = [_host(one) for one in plain["hosts"]]
    outcome = plain["outcome"]
    known = {
        **_known(model.State, plain),
        "phase": model.RunPhase(plain["phase"]),
        "outcome": None if outcome is None else model.RunPhase(outcome),
        "replicas": plain.get("replicas", len(groups)),  # older ones know of no scaling
        "groups": model.Groups.of(groups),
        "hosts": tuple(hosts),
        "places": {host.name: place for place, host in enumerate(hosts)},
        "unready": sum(host.holds_up for host in hosts),
        "notes": tuple(plain["notes"]),
        "reaping": model.Reaping(plain.get("reaping", model.Reaping.NO)),
    }
    return model.State(**known)


def _span(plain: Mapping[str, Any] | None) -> model.Span | None:
    if plain is None:
        return None
    parts = tuple(
        model.Part(host=one["host"], ranks=tuple(one["ranks"]), phase=model.PartPhase(one["phase"]))
        for one in plain["parts"]
    )
    return model.Span(**{**_known(model.Span, plain), "parts": parts})


def _group(plain: Mapping[str, Any]) -> model.Group:
    known = {
        **_known(model.Group, plain),
        "phase": model.GroupPhase(plain["phase"]),
        "live": frozenset(plain["live"]),
        "restarts_ns": tuple(plain["restarts_ns"]),
        "span": _span(plain.get("span")),  # older ones know of none
    }
    return model.Group(**known)


def _host(plain: Mapping[str, Any]) -> model.Host:
    known = {
        **_known(model.Host, plain),
        "setup": model.SetupPhase(plain["setup"]),
        "replicas": tuple(plain["replicas"]),
        "phase": model.HostPhase(plain.get("phase", model.HostPhase.HERE)),  # older ones know of none
        "pairs": tuple(model.Pair(**_known(model.Pair, pair)) for pair in plain.get("pairs", ())),
    }
    return model.Host(**known)
