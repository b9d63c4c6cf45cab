"""Hosts that are clusters of SkyPilot, by its SDK: requests to its API server, waited for by their ids.

A request lives in the server. Its id is written down before it is waited for, so that a provisioner that starts
again goes on waiting for the same launch; where it was killed between asking and writing, the server's own list of
requests says whether it had asked.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import structlog

from sky_monarch.launch import skypilot
from sky_monarch.launch.door import Door
from sky_monarch.launch.placement import attempt_of, cluster_name
from sky_monarch.launch.skypilot import Cluster, SkyPilotError
from sky_monarch.provision.classify import Failure, classify, plain
from sky_monarch.provision.host_task import address, armed
from sky_monarch.provision.provider import (
    HostOrder,
    Kind,
    Launched,
    Notice,
    ProvisionError,
    Seen,
    Superseded,
    Turn,
    planned_price,
    task_of,
)
from sky_monarch.provision.requests import Phase, Record, Requests
from sky_monarch.provision.settings import Settings

__all__ = ["Sdk", "SkyPilotProvider"]

_log = structlog.get_logger()
_POLL_S = 2.0
_DOWN_S = 300.0
_CANCEL_S = 60.0
_STATUS_S = 120.0
#: Its proxies for SSH import all of SkyPilot first.
_CONNECT_S = 60
_SSH_S = 90.0
#: An API server that does not answer for so long is away: it takes 9 s to start, and half a minute on a busy machine.
_SERVER_S = 300.0
#: The clocks of a remote API server and of this machine differ.
_SKEW_MS = 120_000
_STATUS = {"UP": Seen.UP, "INIT": Seen.INIT, "STOPPED": Seen.STOPPED}


class Sdk(Protocol):
    """What is used of :mod:`sky_monarch.launch.skypilot`; each raises :class:`SkyPilotError`."""

    def launch(self, task: Mapping[str, Any], cluster: str) -> str:
        """Ask for a launch; the id of the request."""
        ...

    def find_launch(self, cluster: str, since_ms: int) -> str | None:
        """The newest request for a launch of a cluster since then."""
        ...

    def knew(self, cluster: str) -> bool:
        """Whether the server remembers a cluster of this name, standing or not."""
        ...

    def is_done(self, request_id: str) -> bool:
        """Whether a request has ended, however."""
        ...

    def launched(self, request_id: str) -> Cluster:
        """What came of a launch that has ended."""
        ...

    def result(self, request_id: str) -> Any:
        """What came of any request that has ended."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request."""
        ...

    def down(self, cluster: str) -> str:
        """Ask for the end of a cluster; the id of the request."""
        ...

    def status(self, clusters: Sequence[str], *, refresh: bool) -> str:
        """Ask for the status of clusters; the id of the request."""
        ...

    def clusters(self, request_id: str) -> list[Cluster]:
        """The answer to :meth:`status`."""
        ...

    def tail_logs(self, cluster: str, *, lines: int) -> str:
        """The end of what a cluster's newest job printed."""
        ...

    def ssh(self, cluster: str) -> tuple[str, ...]:
        """How a cluster is reached by SSH: arguments of ``ssh``."""
        ...


class SkyPilotProvider:
    """Launches clusters by SkyPilot.

    Args:
        requests: Where ids are written down.
        settings: What the provisioner is told.
        sdk: SkyPilot's; another one in tests.
        closing: Set where this process ends.
        poll_s: Between two looks at a request.
        server_s: How long an API server may be away before that is an error.
    """

    def __init__(
        self,
        requests: Requests,
        settings: Settings,
        *,
        sdk: Sdk = skypilot,
        closing: threading.Event | None = None,
        poll_s: float = _POLL_S,
        server_s: float = _SERVER_S,
    ) -> None:
        self._requests = requests
        self._settings = settings
        self._sdk = sdk
        self._poll_s = poll_s
        self._server_s = server_s
        self._closing = closing or threading.Event()

    def launch(
        self, order: HostOrder, choice: Mapping[str, Any], turn: Turn, *, stop: threading.Event
    ) -> Launched:
        """Ask for a launch, unless that was done already, and wait for it."""
        task = task_of(choice, order.host)
        if task is None:
            raise ProvisionError("this choice has no such host", kind=Kind.REFUSED)
        began_s = time.monotonic()
        while True:
            try:
                cluster = self._launched(task, order, turn, stop)
                break
            except SkyPilotError as error:
                if error.is_forgotten:  # the server was set up anew: what it had begun would be there twice
                    self.down(order.cluster, stop=stop)
                if not error.is_away:  # else the request may be under way: it is waited for again
                    self._requests.change(order.host, request_id=None, asked_ms=None)
                if not error.is_away or time.monotonic() - began_s > self._server_s:
                    raise _translated(error) from error
                _log.info("the API server is away", error=plain(str(error)))  # no fault of this host
            if stop.wait(self._poll_s):
                raise Superseded
        planned = planned_price(choice, order.host)
        return Launched(
            place=cluster.place,
            infra=cluster.infra,
            usd_per_hour=planned if cluster.usd_per_hour is None else cluster.usd_per_hour,
        )

    def _launched(
        self, task: Mapping[str, Any], order: HostOrder, turn: Turn, stop: threading.Event
    ) -> Cluster:
        """What came of the launch that was asked for, now or before.

        Raises:
            SkyPilotError: It failed, or the server does not answer.
            ProvisionError: It takes too long.
            Superseded: ``stop`` is set.
        """
        request_id = self._asked(self._requests.get(order.host))
        if request_id is None:
            whole = armed(
                address(task, order), infra=turn.infra, autodown_minutes=self._settings.autodown_minutes
            )
            self._requests.asked_now(order.host)
            request_id = self._sdk.launch(whole, order.cluster)
        self._requests.change(order.host, request_id=request_id)
        # What is still queued then, in Slurm or for a node to come, is as good as no capacity.
        self._wait(request_id, self._settings.limits.launch_s, stop, kind=Kind.CAPACITY)
        return self._sdk.launched(request_id)

    def _asked(self, record: Record | None) -> str | None:
        """The request of a launch that another process of us asked for."""
        if record is None or record.asked_ms is None:
            return None
        if record.request_id is not None:
            return record.request_id
        return self._sdk.find_launch(record.cluster, record.asked_ms - _SKEW_MS)

    def found(self, host: str) -> dict[str, int]:
        """What SkyPilot has noted. A server that is away is waited for: whoever asks is about to launch."""
        began_s = time.monotonic()
        while True:
            try:
                noted = self._noted([], refresh=False)
                break
            except SkyPilotError as error:
                if not error.is_away or time.monotonic() - began_s > self._server_s:
                    raise _translated(error) from error
            if self._closing.wait(self._poll_s):
                raise Superseded
        attempts = {one.name: attempt_of(one.name, host) for one in noted}
        return {name: attempt for name, attempt in attempts.items() if attempt is not None}

    def certain(self, clusters: Sequence[str]) -> dict[str, str]:
        """What SkyPilot had noted, asked its cloud for, and took out of its list since there is no such thing.

        A list in which it was not before says nothing: that of a server which was set up anew is empty. Nor does
        ``INIT``: where this machine's own network is down, SkyPilot reaches a host as little as its agent reaches us.
        """
        try:
            noted = {one.name for one in self._clusters(clusters, refresh=False)}
            found = (
                {one.name: one.status for one in self._clusters(sorted(noted), refresh=True)} if noted else {}
            )
        except (ProvisionError, Superseded) as error:
            _log.info("no word on silent hosts", error=plain(str(error)))
            return {}
        gone = {name: f"SkyPilot finds nothing of {name} any more" for name in noted if name not in found}
        stopped = {name: f"{name} is stopped" for name, status in found.items() if status == "STOPPED"}
        return gone | stopped

    def status(self, clusters: Sequence[str]) -> dict[str, Seen]:
        """Asks the clouds. A cluster that is gone is not in the answer of a server that once had it."""
        try:
            found = {one.name: one.status for one in self._clusters(clusters, refresh=True)}
        except (ProvisionError, Superseded) as error:
            _log.info("no status", error=plain(str(error)))
            return {}
        seen = {name: _STATUS.get(status, Seen.UNKNOWN) for name, status in found.items()}
        return {name: seen[name] if name in seen else self._seen_of_missing(name) for name in clusters}

    def _seen_of_missing(self, cluster: str) -> Seen:
        try:
            return Seen.GONE if self._sdk.knew(cluster) else Seen.UNKNOWN
        except SkyPilotError as error:
            _log.info("no word on a cluster that is not listed", cluster=cluster, error=plain(str(error)))
            return Seen.UNKNOWN

    def _clusters(self, clusters: Sequence[str], *, refresh: bool) -> list[Cluster]:
        try:
            return self._noted(clusters, refresh=refresh)
        except SkyPilotError as error:
            raise _translated(error) from error

    def _noted(self, clusters: Sequence[str], *, refresh: bool) -> list[Cluster]:
        request_id = self._sdk.status(clusters, refresh=refresh)
        self._wait(request_id, _STATUS_S, self._closing)
        return self._sdk.clusters(request_id)

    def down(self, cluster: str, *, stop: threading.Event) -> None:
        """Cancel a launch that is under way, and end the cluster."""
        record = self._requests.of_cluster(cluster)
        try:
            if (request_id := self._asked(record)) is not None:
                self._cancel(request_id, stop)
            down = self._sdk.down(cluster)
            self._wait(down, _DOWN_S, stop)
            self._sdk.result(down)
        except SkyPilotError as error:
            if "ClusterDoesNotExist" not in error.classes:
                raise _translated(error) from error
            if record is not None and _was_launched(record):
                self._require_knew(cluster)

    def _require_knew(self, cluster: str) -> None:
        """That there is no such cluster is the word of a server that once had it.

        Raises:
            ProvisionError: It never heard of what we have launched: it was set up anew, and the cluster may stand.
        """
        try:
            known = self._sdk.knew(cluster)
        except SkyPilotError as error:
            raise _translated(error) from error
        if not known:
            raise ProvisionError(
                f"SkyPilot's API server has never heard of {cluster}, which it launched for this run: it was set up "
                "anew meanwhile, and knows nothing of what stands; look for the cluster in your cloud's console"
            )

    def _cancel(self, request_id: str, stop: threading.Event) -> None:
        """A launch that went on would bring up again what `down` has just ended."""
        try:
            if self._sdk.is_done(request_id):
                return
            self._sdk.cancel(request_id)
            self._wait(request_id, _CANCEL_S, stop)
        except SkyPilotError as error:
            if not error.is_forgotten:
                raise

    def logs(self, cluster: str, *, lines: int) -> str:
        """The end of what its job printed; it takes seconds."""
        try:
            return self._sdk.tail_logs(cluster, lines=lines)
        except SkyPilotError:
            return ""

    def door(self, head: str, attempt: int) -> Door | None:
        """By SSH. Where its API's socket is stands in its ``run.json``, which is there once it has begun."""
        cluster = cluster_name(head, attempt)
        try:
            ssh = self._sdk.ssh(cluster)
        except SkyPilotError as error:
            raise _translated(error) from error
        path = f"$HOME/.sky-monarch/runs/{self._settings.run_id}/{head}-a{attempt}/run.json"
        argv = [
            "ssh",
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={_CONNECT_S}",
            *ssh,
            f'cat "{path}"',
        ]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SSH_S, check=False, text=True
            )
            if done.returncode == 1:  # of cat: there is no such file yet
                return None
            if done.returncode:
                said = done.stderr.strip().splitlines()
                why = said[-1] if said else f"exit code {done.returncode}"
                raise ProvisionError(f"{cluster} cannot be reached by SSH: {plain(why)}")
            return Door(socket=str(json.loads(done.stdout)["sockets"]["api"]), ssh=ssh)
        except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
            text = plain(str(error)) or type(error).__name__
            raise ProvisionError(f"{cluster} cannot be reached by SSH: {text}") from error

    def notices(self) -> list[Notice]:
        """None: SkyPilot 0.14 says nothing unasked."""
        return []

    def close(self) -> None:
        """Requests go on in the server."""
        self._closing.set()

    def _wait(
        self, request_id: str, limit_s: float, stop: threading.Event, *, kind: Kind = Kind.ERROR
    ) -> None:
        """Wait for the end of a request.

        Raises:
            SkyPilotError: The server is away, or does not know it.
            ProvisionError: It takes longer than ``limit_s``.
            Superseded: ``stop`` is set.
        """
        began_s = heard_s = time.monotonic()
        while True:
            try:
                if self._sdk.is_done(request_id):
                    return
                heard_s = time.monotonic()
            except SkyPilotError as error:
                if not error.is_away or time.monotonic() - heard_s > self._server_s:
                    raise
                _log.info("the API server is away", error=plain(str(error)))
            if time.monotonic() - began_s > limit_s:
                text = f"SkyPilot's request {request_id} took longer than {limit_s:.0f} s"
                raise ProvisionError(text, kind=kind)
            if stop.wait(self._poll_s):
                raise Superseded


def _was_launched(record: Record) -> bool:
    """Whether SkyPilot has taken a launch of it: it may stand."""
    return record.request_id is not None or (record.stands and record.phase is not Phase.LAUNCHING)


def _failure(error: SkyPilotError) -> Failure:
    causes = tuple(_failure(cause) for cause in error.causes)
    return Failure(classes=error.classes, message=str(error), causes=causes)


def _translated(error: SkyPilotError) -> ProvisionError:
    """As the provisioner knows it, in one line: with what each place said, where several were tried."""
    causes = list(dict.fromkeys(plain(str(cause), longest=200) for cause in error.causes))
    text = "; ".join(causes[:5]) or plain(str(error))
    return ProvisionError(text, kind=classify(_failure(error)), hint=error.hint)
