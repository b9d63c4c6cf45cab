"""The controller as the provisioner sees it: two routes of its HTTP API, over its unix socket."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from sky_monarch.errors import ChannelError, PeerRefusedError
from sky_monarch.provision.provider import HostOrder

if TYPE_CHECKING:
    import httpx

__all__ = ["Backoff", "ControllerClient", "Wanted"]

_log = structlog.get_logger()
_CONNECT_S = 5.0
_REQUEST_S = 10.0
_REASON_LENGTH = 2000


class Backoff:
    """Delays that double, each shortened by chance, so that many who failed together do not ask again together.

    Args:
        first_s: The first one.
        most_s: Longest one.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._next_s = first_s

    def reset(self) -> None:
        """It worked."""
        self._next_s = self._first_s

    def delay_s(self) -> float:
        """The next delay: between a half and all of what it would be."""
        delay_s, self._next_s = self._next_s, min(self._most_s, self._next_s * 2)
        return delay_s * random.uniform(0.5, 1.0)  # noqa: S311  (no secret)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the controller wants of all hosts.

    Attributes:
        version: Of this answer.
        orders: One for each host.
        ended: The run is over: it is only waited that somebody takes its end.
        placement: Number of the choice for which groups are placed on hosts.
    """

    version: int
    orders: tuple[HostOrder, ...]
    ended: bool = False
    placement: int = 0


class ControllerClient:
    """Asks and reports. Safe to use from any thread.

    Args:
        api: Path of the unix socket.
        token: Secret of the run.
        closing: Set where this process ends: nothing is tried again then.
        reach: Opens the way to a controller that is on another machine; raises ChannelError where it cannot.
    """

    def __init__(
        self,
        api: Path,
        token: str,
        closing: threading.Event,
        reach: Callable[[], None] | None = None,
    ) -> None:
        import httpx

        self._api = api
        self._closing = closing
        self._reach = reach
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(api), limits=httpx.Limits(max_keepalive_connections=4)),
            base_url="http://controller",
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(_REQUEST_S, connect=_CONNECT_S),
        )
        self._turn = threading.BoundedSemaphore(4)  # a controller of many hosts hears a few of them at a time

    def wanted(self, after: int, wait_s: float) -> Wanted:
        """What is wanted, once it differs from version ``after``, or after ``wait_s``.

        Raises:
            ChannelError: The controller does not answer, or not as it should.
        """
        import httpx

        timeout = httpx.Timeout(_REQUEST_S, connect=_CONNECT_S, read=wait_s + _REQUEST_S)
        params = {"after": str(after), "wait_s": str(wait_s)}
        answer = self._ask("GET", "/v1/hosts/wanted", timeout=timeout, params=params)
        try:
            values = answer.json()
            orders = tuple(_order(one) for one in values["hosts"])
            placement = int(values.get("placement") or 0)
            return Wanted(int(values["version"]), orders, bool(values.get("ended")), placement)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ChannelError(f"the controller's answer makes no sense: {error!r}") from error

    def report(self, report: Mapping[str, Any]) -> None:
        """Tell what became of a host; tried again until the controller has it, or this process ends.

        A report that it refuses is dropped: it is of an attempt, or a host, that it does not know (any more).
        """
        backoff = Backoff(0.1, 5.0)
        body = {**report, "reason": str(report.get("reason") or "")[:_REASON_LENGTH]}
        while not self._closing.is_set():
            try:
                with self._turn:
                    self._ask("POST", "/v1/hosts/report", json=body)
                return
            except PeerRefusedError as error:
                _log.warning("a report was refused", host=report.get("host"), error=str(error))
                return
            except ChannelError as error:
                _log.info("a report waits", host=report.get("host"), error=str(error))
            self._closing.wait(backoff.delay_s())

    def status(self) -> dict[str, Any]:
        """The status of the run.

        Raises:
            ChannelError: The controller does not answer, or not as it should.
        """
        answer = self._ask("GET", "/v1/status")
        try:
            found: dict[str, Any] = answer.json()
            return found
        except ValueError as error:
            raise ChannelError(f"the controller's status makes no sense: {error!r}") from error

    def events(self, *, after: int = 0) -> Iterator[str]:
        """All events so far with a larger id than ``after``, a JSON object a line.

        Raises:
            ChannelError: The controller does not answer, or went away in between.
        """
        import httpx

        self._knock()
        try:
            with self._client.stream(
                "GET", "/v1/events", params={"after": str(after), "follow": "0"}
            ) as answer:
                if not answer.is_success:
                    raise ChannelError(f"the controller answered {answer.status_code} to /v1/events")
                yield from filter(None, answer.iter_lines())
        except (OSError, httpx.HTTPError, httpx.StreamError) as error:
            raise ChannelError(f"the controller went away: {error!r}") from error

    def output(self, *, max_bytes: int, limit_s: float, stop: threading.Event) -> Iterator[bytes]:
        """What the ranks have printed, the newest first: a tar file in pieces.

        Args:
            max_bytes: What is beyond is left.
            limit_s: Longest time for all of it.
            stop: Set where it is not waited for any more.

        Raises:
            ChannelError: The controller does not answer, went away in between, or is too slow.
        """
        import httpx

        deadline = time.monotonic() + limit_s
        self._knock()
        try:
            with self._client.stream(
                "GET", "/v1/logs/archive", params={"max_bytes": str(max_bytes)}
            ) as answer:
                if not answer.is_success:
                    raise ChannelError(f"the controller answered {answer.status_code} to /v1/logs/archive")
                for piece in answer.iter_raw():
                    yield piece
                    if stop.is_set():
                        raise ChannelError("it is not waited for any more")
                    if time.monotonic() > deadline:
                        raise ChannelError(f"it did not come within {limit_s:.0f} s")
        except (OSError, httpx.HTTPError, httpx.StreamError) as error:
            raise ChannelError(f"the controller went away: {error!r}") from error

    def end(self, *, grace_s: float, reason: str) -> None:
        """Order the end of the run.

        Raises:
            ChannelError: It was not taken.
        """
        self._ask("POST", "/v1/down", json={"grace_s": grace_s, "reason": reason[:1000]})

    def place(self, choice: int, homes: Mapping[str, Sequence[int]]) -> None:
        """Have groups placed on the hosts of a choice.

        Raises:
            PeerRefusedError: It is too late for that.
            ChannelError: The controller does not answer.
        """
        body = {"choice": choice, "homes": {host: list(groups) for host, groups in homes.items()}}
        self._ask("POST", "/v1/hosts/placement", json=body)

    def head(self, bill: Mapping[str, Any]) -> None:
        """Tell since when its head bills, and how much.

        Raises:
            ChannelError: The controller does not answer, or does not take it.
        """
        self._ask("POST", "/v1/head", json=dict(bill))

    def collected(self) -> None:
        """Say that all that is to be kept of the run was taken: its head need not wait any more.

        Raises:
            ChannelError: The controller does not answer.
        """
        self._ask("POST", "/v1/collected")

    def _knock(self) -> None:
        """See that somebody listens.

        Raises:
            ChannelError: Nobody does.
        """
        try:
            if self._reach is not None:
                self._reach()
            # httpcore leaves its socket open where connect() fails: it is only asked once somebody listens.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_CONNECT_S)
                probe.connect(str(self._api))
        except OSError as error:
            raise ChannelError(f"the controller does not answer: {error!r}") from error

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        import httpx

        self._knock()
        try:
            answer = self._client.request(method, path, **options)
        except (OSError, httpx.HTTPError, httpx.StreamError) as error:
            raise ChannelError(f"the controller does not answer: {error!r}") from error
        if answer.is_success:
            return answer
        message = f"the controller answered {answer.status_code} to {path}: {answer.text[:200]}"
        # 401 may be a controller that has just been replaced under its socket; what it does not want stays unwanted.
        if 400 <= answer.status_code < 500 and answer.status_code not in (401, 408, 429):
            raise PeerRefusedError(message)
        raise ChannelError(message)

    def close(self) -> None:
        """Hang up."""
        self._client.close()


def _order(values: Mapping[str, Any]) -> HostOrder:
    want = values["want"]
    if want not in ("up", "down"):
        raise ValueError(f"a host is wanted {want!r}")
    return HostOrder(
        host=str(values["host"]),
        attempt=int(values["attempt"]),
        want=want,
        reason=str(values.get("reason") or ""),
        groups=tuple(values.get("groups") or ()),
        replaces=values.get("replaces"),
        doubted=bool(values.get("doubted")),
        agent=dict(values.get("agent") or {}),
        enrolment=str(values.get("enrolment") or ""),
    )
