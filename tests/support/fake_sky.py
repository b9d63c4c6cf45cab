"""What is used of SkyPilot's SDK, without SkyPilot: a server with requests that live on their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sky_monarch.launch.skypilot import Cluster, SkyPilotError


@dataclass
class Request:
    name: str
    cluster: str
    done: bool = False
    result: Any = None
    error: SkyPilotError | None = None
    created_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)


def error(message: str, *classes: str, causes: Sequence[SkyPilotError] = ()) -> SkyPilotError:
    """As it comes from the SDK."""
    return SkyPilotError(message, classes=(*classes, "Exception"), causes=tuple(causes))


AWAY = error("Could not connect to SkyPilot API server", "ApiServerConnectionError", "RuntimeError")


class FakeSky:
    """A server.

    Attributes:
        requests: All it knows, by id.
        tasks: The task of each launch.
        up: Clusters, with the number of jobs that were ever submitted to each.
        taken: Clusters that their cloud has taken away, which is noticed by whoever asks it.
        standing: Clusters that stand, and that it has forgotten.
        hold: Launches stay under way while it is set.
        away: It does not answer.
        outcome: What launches end with: an error, or None.
        calls: Names of what was asked, in order.
        unanswered: What was asked while it was away.
        reached: How clusters are reached by SSH.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.tasks: list[Mapping[str, Any]] = []
        self.up: dict[str, int] = {}
        self.taken: set[str] = set()
        self.standing: dict[str, int] = {}
        self.hold = threading.Event()
        self.away = threading.Event()
        self.outcome: SkyPilotError | None = None
        self.calls: list[str] = []
        self.unanswered = 0
        self.reached: tuple[str, ...] = ()
        self._lock = threading.Lock()

    def _answer(self) -> None:
        if self.away.is_set():
            self.unanswered += 1
            raise AWAY

    def _ask(self, name: str, cluster: str, result: Any = None) -> str:
        self._answer()
        with self._lock:
            request_id = f"request-{len(self.requests)}"
            self.requests[request_id] = Request(name, cluster, result=result)
            self.calls.append(name)
        return request_id

    def _known(self, request_id: str) -> Request:
        self._answer()
        request = self.requests.get(request_id)  # looked up once: a test may take all of them away
        if request is None:
            raise error(f"no request {request_id}", "RequestNotFound")
        return request

    def finish(self, request: Request) -> None:
        """A request ends, if it may."""
        if request.done:
            return
        if request.name == "launch":
            if self.hold.is_set():
                return
            request.error = self.outcome
            if request.error is None:
                self.up[request.cluster] = self.up.get(request.cluster, 0) + 1
        elif request.name == "down" and self.up.pop(request.cluster, None) is None:
            request.error = error("no such cluster", "ClusterDoesNotExist", "ValueError")
        request.done = True

    def launch(self, task: Mapping[str, Any], cluster: str) -> str:
        self.tasks.append(task)
        return self._ask("launch", cluster)

    def find_launch(self, cluster: str, since_ms: int) -> str | None:
        self._answer()
        for request_id, request in reversed(list(self.requests.items())):  # others ask meanwhile
            if (request.name, request.cluster) == ("launch", cluster) and request.created_ms >= since_ms:
                return request_id
        return None

    def knew(self, cluster: str) -> bool:
        return self.find_launch(cluster, 0) is not None

    def set_up_anew(self) -> None:
        """It forgets all that it knew; clusters stand as they did."""
        self.standing |= self.up
        self.requests = {}  # first: one that remembers a cluster, and does not have it, says that it is gone
        self.up = {}

    def is_done(self, request_id: str) -> bool:
        request = self._known(request_id)
        self.finish(request)
        return request.done

    def launched(self, request_id: str) -> Cluster:
        request = self._known(request_id)
        if request.error is not None:
            raise request.error
        return Cluster(
            name=request.cluster,
            status="UP",
            place="Slurm/loop/gpu",
            infra="slurm/loop/gpu",
            usd_per_hour=None,
        )

    def result(self, request_id: str) -> Any:
        request = self._known(request_id)
        if request.error is not None:
            raise request.error
        return request.result

    def cancel(self, request_id: str) -> None:
        request = self._known(request_id)
        self.calls.append("cancel")
        if not request.done:
            request.done, request.error = True, error("cancelled", "RequestCancelled")

    def down(self, cluster: str) -> str:
        return self._ask("down", cluster)

    def status(self, clusters: Sequence[str], *, refresh: bool) -> str:
        self._answer()
        if refresh:
            for name in self.taken & set(clusters or self.up):
                self.up.pop(name, None)
        found = [
            Cluster(name=name, status="UP", place=None, infra=None, usd_per_hour=None)
            for name in clusters or list(self.up)
            if name in self.up
        ]
        return self._ask("status", ",".join(clusters), found)

    def clusters(self, request_id: str) -> list[Cluster]:
        found: list[Cluster] = self._known(request_id).result
        return found

    def ssh(self, cluster: str) -> tuple[str, ...]:
        self._answer()
        return (*self.reached, cluster)

    def tail_logs(self, cluster: str, *, lines: int) -> str:
        return f"the end of {cluster}"
