"""The head of a run as a cluster of its own: brought up, found, and taken down again."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

from sky_monarch.launch.cluster_plan import network_of
from sky_monarch.launch.door import Door
from sky_monarch.launch.head import Away
from sky_monarch.launch.placement import cluster_name
from sky_monarch.provision.classify import plain
from sky_monarch.provision.client import Backoff
from sky_monarch.provision.provider import (
    HostOrder,
    Kind,
    Launched,
    Provider,
    ProvisionError,
    Superseded,
    Turn,
    planned_price,
)
from sky_monarch.provision.requests import Phase, Record, Requests
from sky_monarch.provision.settings import Limits

__all__ = ["Head", "pinned"]

_log = structlog.get_logger()
_LOOK_S = 0.2


class Head:
    """The cluster on which lighthouse and controller run.

    Args:
        away: What it is to be.
        provider: Who launches it.
        requests: What was asked for, beside the hosts.
        choices: Of the plan; all are in one place, the first one's task is used.
        limits: Bounds.
        attempt: Which one it is of this run: hosts dial the address of theirs, so each has hosts of its own.
    """

    def __init__(
        self,
        away: Away,
        provider: Provider,
        requests: Requests,
        choices: tuple[Mapping[str, Any], ...],
        limits: Limits,
        *,
        attempt: int = 1,
    ) -> None:
        self.attempt = attempt
        self._away = away
        self._provider = provider
        self._requests = requests
        self._choice = choices[0]
        self._limits = limits

    @property
    def name(self) -> str:
        """Name of it, among those of hosts."""
        return self._away.cluster

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        return cluster_name(self.name, self.attempt)

    @property
    def record(self) -> Record | None:
        """What was asked for; None where nothing was."""
        record = self._requests.get(self.name)
        return record if record is not None and record.attempt == self.attempt else None

    def bring_up(self, stop: threading.Event, *, is_known: bool = False) -> Record:
        """Launch it, or go on with what another process of us has begun.

        Args:
            stop: Set where it is not wanted any more.
            is_known: It was up once, whether or not there is a record of it.

        Raises:
            ProvisionError: It did not come up; whatever there was of it was ended, or the text says otherwise.
            Superseded: ``stop`` was set.
        """
        record = self.record
        if record is not None and record.phase is not Phase.LAUNCHING:
            return record
        if record is None:
            there = self.cluster in self._found(stop)
            if there and (is_known or self._requests.lost):
                created_ms = int(self._away.told["head"]["created_ms"])  # no later than its launch
                record = Record(
                    host=self.name, attempt=self.attempt, phase=Phase.UP, choice=0, since_ms=created_ms
                )
                return self._keep(record)
            if is_known:
                raise ProvisionError(f"{self.cluster} is gone, and so is the record of what was asked for")
            if there:
                raise ProvisionError(
                    f"there is a cluster {self.cluster} already, which this run did not launch: "
                    "take it down, or give the job another name",
                    kind=Kind.REFUSED,
                )
            now_ms = time.time_ns() // 1_000_000
            record = Record(
                host=self.name, attempt=self.attempt, phase=Phase.LAUNCHING, choice=0, since_ms=now_ms
            )
            self._keep(record)
        try:
            launched = self._launch(stop)
        except ProvisionError as error:
            left = self.take_down(stop)
            if self.record is not None:  # what was asked for is no more: another try asks anew
                self._requests.change(self.name, request_id=None, asked_ms=None)
            more = "" if left is None else f"; what there is of {self.cluster} may still bill: {left}"
            raise ProvisionError(f"{plain(str(error))}{more}", kind=error.kind, hint=error.hint) from error
        record = self._requests.get(self.name) or record
        up = replace(
            record,
            phase=Phase.UP,
            infra=launched.infra,
            place=launched.place,
            usd_per_hour=launched.usd_per_hour,
            request_id=None,
            asked_ms=None,
        )
        _log.info("the head is up", cluster=self.cluster, place=launched.place)
        return self._keep(up)

    def _found(self, stop: threading.Event) -> dict[str, int]:
        """Clusters of this name; an error on the way is tried again, as with hosts."""
        backoff = Backoff(self._limits.backoff_s, self._limits.backoff_max_s)
        for left in reversed(range(self._limits.retries)):
            try:
                return self._provider.found(self.name)
            except ProvisionError as error:
                if error.kind is not Kind.ERROR or not left:
                    raise
                _log.warning("it is looked for again", cluster=self.cluster, error=plain(str(error)))
            if stop.wait(backoff.delay_s()):
                raise Superseded
        raise AssertionError("tried at least once")

    def _launch(self, stop: threading.Event) -> Launched:
        order = HostOrder(
            host=self.name,
            attempt=self.attempt,
            want="up",
            reason="lighthouse and controller run there",
            agent=self._away.told,
            enrolment=self._away.enrolment(),
        )
        backoff = Backoff(self._limits.backoff_s, self._limits.backoff_max_s)
        for left in reversed(range(self._limits.retries)):
            try:
                return self._provider.launch(order, self._choice, Turn(choice=0), stop=stop)
            except ProvisionError as error:
                if error.kind is not Kind.ERROR or not left:
                    raise
                _log.warning("the head is tried again", cluster=self.cluster, error=plain(str(error)))
            if stop.wait(backoff.delay_s()):
                raise Superseded
        raise AssertionError("tried at least once")

    def find(self, stop: threading.Event) -> Door:
        """How its API is reached, once it is there.

        Raises:
            ProvisionError: It did not come within ``limits.head_s``; with what it printed last.
            Superseded: ``stop`` was set.
        """
        deadline = time.monotonic() + self._limits.head_s
        why = told = "nothing of it is there"
        while time.monotonic() < deadline:
            try:
                if (door := self._provider.door(self.name, self.attempt)) is not None:
                    return door
                why = "nothing of it is there"
            except ProvisionError as error:
                why = plain(str(error))
            if why != told:  # else it is being set up
                told = why
                _log.info("the head is not found yet", cluster=self.cluster, why=why)
            gone = [
                one
                for one in self._provider.notices()
                if one.host == self.name and one.attempt in (0, self.attempt)
            ]
            if gone:
                why = gone[0].reason
                break
            if stop.wait(_LOOK_S):
                raise Superseded
        said = " ".join(self._provider.logs(self.cluster, lines=3).split())[:500]
        raise ProvisionError(
            f"the head on {self.cluster} does not begin: {why}" + (f": {said}" if said else "")
        )

    def bill(self) -> dict[str, Any] | None:
        """What the controller is told of its cost; None while it is not up."""
        record = self.record
        if record is None or record.phase is not Phase.UP or record.since_ms is None:
            return None
        price, place = record.usd_per_hour, record.place
        return {
            "cluster": self.name,
            "since_ms": record.since_ms,
            "place": place,
            "usd_per_hour": planned_price(self._choice, self.name) if price is None else price,
        }

    def gone(self, reason: str) -> None:
        """It is not there any more."""
        if (record := self.record) is not None:
            self._keep(replace(record, phase=Phase.ENDED, reason=reason))

    def take_down(self, stop: threading.Event) -> str | None:
        """Take it down; why it may still be there, None where it is not. Twice is fine."""
        deadline = time.monotonic() + self._limits.down_s
        backoff = Backoff(self._limits.backoff_s, self._limits.backoff_max_s)
        while True:
            try:
                self._provider.down(self.cluster, stop=stop)
                return None
            except ProvisionError as error:
                text = plain(str(error))
                _log.warning("the head does not go", cluster=self.cluster, error=text)
                if time.monotonic() > deadline or error.kind is Kind.CREDENTIALS:
                    return text
            except Superseded:
                return "its end was not waited for"
            if stop.wait(backoff.delay_s()):
                return text

    def _keep(self, record: Record) -> Record:
        return self._requests.put(record)


def pinned(choices: tuple[Mapping[str, Any], ...], infra: str | None) -> tuple[Mapping[str, Any], ...]:
    """The choices, with all hosts in the network of the head: that is where they reach it.

    No closer than that: where it is in that network says nothing of where there are GPUs. A choice that names a place
    inside of it stays there.
    """
    if infra is None:
        return choices
    network = network_of(infra)
    found = []
    for choice in choices:
        if str(choice.get("infra") or "").startswith(f"{network}/"):
            found.append(choice)
            continue
        tasks = [
            {
                **one,
                "task": {**one["task"], "resources": {**one["task"].get("resources", {}), "infra": network}},
            }
            for one in choice.get("tasks") or ()
        ]
        found.append({**choice, "infra": network, "tasks": tasks})
    return tuple(found)
