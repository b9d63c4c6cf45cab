"""A provider without hosts: it does what its script says, and notices what no provisioner may ask of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sky_monarch.launch.door import Door
from sky_monarch.launch.placement import attempt_of
from sky_monarch.provision.provider import HostOrder, Launched, Notice, ProvisionError, Seen, Superseded, Turn

Outcome = Launched | ProvisionError
Script = Callable[[HostOrder, Turn, int], Outcome]


def always_up(order: HostOrder, turn: Turn, nth: int) -> Outcome:
    """Every launch works."""
    return Launched(place=f"place {turn.choice}", infra=f"cloud/r{turn.choice}/z1", usd_per_hour=2.0)


class FakeProvider:
    """Clusters that exist in its memory.

    Attributes:
        script: What a launch comes to: of the order, the turn and how often that host was launched before.
        clusters: What exists, by its name, with its attempt.
        sure: What it is certain of where it is asked out of turn; an answer that it has not is left out.
        early: The clusters of every question out of turn.
        most_of_a_host: Clusters of one host that ever stood at a time.
        launches: ``(host, attempt, choice, infra)`` of every launch, as it begins.
        enrolments: What each of them was given, by host.
        downs: Every ``down``.
        asked: The clusters of every status.
        answers: What status says of a cluster in place of the truth; an error is raised as a missing answer.
        undown: Errors of the next ``down`` calls.
        most_at_once: Launches that were ever under way together.
        violations: What must never be asked.
        go: Launches wait for it.
        goes: Whatever is taken down waits for it.
        doors: How the heads among its clusters are reached.
    """

    def __init__(self, script: Script = always_up) -> None:
        self.script = script
        self.clusters: dict[str, int] = {}
        self.launches: list[tuple[str, int, int, str | None]] = []
        self.enrolments: dict[str, str] = {}
        self.downs: list[str] = []
        self.asked: list[tuple[str, ...]] = []
        self.answers: dict[str, list[Seen]] = {}
        self.undown: list[ProvisionError] = []
        self.violations: list[str] = []
        self.most_at_once = 0
        self.most_of_a_host = 0
        self.sure: dict[str, str] = {}
        self.early: list[tuple[str, ...]] = []
        self.go = threading.Event()
        self.go.set()
        self.goes = threading.Event()
        self.goes.set()
        self.doors: dict[str, Door] = {}
        self._notices: list[Notice] = []
        self._under_way = 0
        self._lock = threading.Lock()

    def launch(
        self, order: HostOrder, choice: Mapping[str, Any], turn: Turn, *, stop: threading.Event
    ) -> Launched:
        with self._lock:
            nth = sum(host == order.host for host, *_ in self.launches)
            self.enrolments[order.host] = order.enrolment
            self.launches.append((order.host, order.attempt, turn.choice, turn.infra))
            standing = set(self.found(order.host)) | {order.cluster}
            self.most_of_a_host = max(self.most_of_a_host, len(standing))
            if len(standing) > 2:
                self.violations.append(f"beside {order.cluster} more than one: {standing}")
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            self.clusters[order.cluster] = order.attempt
        try:
            while not self.go.wait(0.01):
                if stop.is_set():
                    raise Superseded
            outcome = self.script(order, turn, nth)
            if isinstance(
                outcome, ProvisionError
            ):  # what there is of the cluster stays, as SkyPilot leaves it
                raise outcome
            return outcome
        finally:
            with self._lock:
                self._under_way -= 1

    def found(self, host: str) -> dict[str, int]:
        attempts = {name: attempt_of(name, host) for name in list(self.clusters)}
        return {name: attempt for name, attempt in attempts.items() if attempt is not None}

    def certain(self, clusters: Sequence[str]) -> dict[str, str]:
        self.early.append(tuple(clusters))
        return {cluster: self.sure[cluster] for cluster in clusters if cluster in self.sure}

    def status(self, clusters: Sequence[str]) -> dict[str, Seen]:
        self.asked.append(tuple(clusters))
        found = {}
        with self._lock:
            for cluster in clusters:
                scripted = self.answers.get(cluster)
                found[cluster] = (
                    scripted.pop(0) if scripted else Seen.UP if cluster in self.clusters else Seen.GONE
                )
        return found

    def down(self, cluster: str, *, stop: threading.Event) -> None:
        self.downs.append(cluster)
        while not self.goes.wait(0.01):
            if stop.is_set():
                raise Superseded
        if self.undown:
            raise self.undown.pop(0)
        self.clusters.pop(cluster, None)

    def door(self, head: str, attempt: int) -> Door | None:
        return self.doors.get(head)

    def logs(self, cluster: str, *, lines: int) -> str:
        return ""

    def notices(self) -> list[Notice]:
        with self._lock:
            found, self._notices = self._notices, []
        return found

    def notice(self, host: str, reason: str, attempt: int = 0) -> None:
        """Say unasked that a host is gone."""
        with self._lock:  # a status in between would be the first to say so
            for cluster in self.found(host):
                self.clusters.pop(cluster, None)
            self._notices.append(Notice(host=host, attempt=attempt, reason=reason))

    def close(self) -> None:
        pass
