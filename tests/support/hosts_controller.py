"""A stand-in for the controller's routes of hosts, over a real unix socket: it says what a test wants said.

It also has what the launcher of a head that is a cluster asks for: status, events, the order to end, the word that all
was collected.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.waiting import eventually

TOKEN = "t0ken-of-this-run"
#: Of this process: tests look for what is left of their run on the whole machine, where others have theirs.
RUN_ID = f"demo-20261130-080000-{os.getpid() % 0x10000:04x}"


class HostsController:
    """What is wanted of hosts, and what was reported of them.

    Attributes:
        api: Path of its socket.
        reports: Everything that was accepted, in order.
        refuse: Answers a report with this status, where it says so.
        asked_after: Versions that were asked for.
        status: Of the run.
        events: Of the run.
        ended: Whether it says that the run is over.
        orders: To end it.
        bills: Of its head.
        collected: Set where somebody has said so.
    """

    def __init__(self, folder: Path) -> None:
        self.api = folder / "api.sock"
        self.reports: list[dict[str, Any]] = []
        self.refuse: Callable[[dict[str, Any]], int | None] = lambda report: None
        self.asked_after: list[int] = []
        self.status: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.ended = False
        self.orders: list[dict[str, Any]] = []
        self.bills: list[dict[str, Any]] = []
        self.collected = threading.Event()
        self._version = 0
        self._hosts: dict[str, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._server: socketserver.BaseServer | None = None
        self._open: set[Any] = set()

    def start(self) -> HostsController:
        """Serve, in place of what served before."""
        self.api.unlink(missing_ok=True)
        double = self

        class Handler(_Handler):
            controller = double

        self._server = _Server(str(self.api), Handler)
        self._server.controller = self
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Die: nobody listens any more, and open connections are closed."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self.api.unlink(missing_ok=True)
            with self._news:
                for connection in list(self._open):
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                self._news.notify_all()

    def taken(self) -> None:
        """Wait until whoever asks has acted on all that is wanted: it asks for what is newer."""

        def asks_for_more() -> bool:
            with self._news:
                return bool(self.asked_after) and self.asked_after[-1] == self._version

        eventually(asks_for_more, what="all that is wanted is taken")

    def forget_versions(self) -> None:
        """A controller that was started again counts from the beginning."""
        with self._news:
            self._version = 0

    def want(self, host: str, want: str = "up", **more: Any) -> None:
        """Want something of a host from now on."""
        self.want_all([host], want, **more)

    def want_all(
        self,
        hosts: list[str],
        want: str = "up",
        *,
        attempt: int = 1,
        reason: str = "",
        agent: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Want the same of several hosts, in one version."""
        with self._news:
            for host in hosts:
                secret = base64.b64encode(f'{{"token": "s3cret-of-{host}-a{attempt}"}}'.encode()).decode()
                self._hosts[host] = {
                    "host": host,
                    "attempt": attempt,
                    "want": want,
                    "reason": reason,
                    "groups": [0],
                    "replaces": None,
                    "agent": {"run_id": RUN_ID, "host": host, "attempt": attempt, **(agent or {})},
                    "enrolment": secret,
                    **more,
                }
            self._version += 1
            self._news.notify_all()

    def forget_hosts(self) -> None:
        """Want nothing of anybody."""
        with self._news:
            self._hosts.clear()
            self._version += 1
            self._news.notify_all()

    def states(self, host: str, attempt: int | None = None) -> list[str]:
        """States that were reported of a host."""
        return [
            report["state"]
            for report in list(self.reports)
            if report["host"] == host and attempt in (None, report["attempt"])
        ]

    def reported(self, host: str, state: str, *, attempt: int = 1, within_s: float = 20.0) -> dict[str, Any]:
        """Wait for a report."""

        def there() -> dict[str, Any] | None:
            return next(
                (
                    report
                    for report in list(self.reports)
                    if (report["host"], report["state"], report["attempt"]) == (host, state, attempt)
                ),
                None,
            )

        try:
            return eventually(there, within_s=within_s, what=f"{host} attempt {attempt} is {state}") or {}
        except AssertionError as error:
            raise AssertionError(f"{error}; reports: {self.reports}") from None

    def end(self) -> None:
        """Say that the run is over."""
        with self._news:
            self.ended = True
            self._version += 1
            self._news.notify_all()

    def answer_wanted(self, after: int, wait_s: float) -> dict[str, Any]:
        """What is wanted, once it is newer than ``after``."""
        deadline = time.monotonic() + wait_s
        with self._news:
            self.asked_after.append(after)
            while self._version <= after and self._server is not None:
                if not self._news.wait(max(0.0, deadline - time.monotonic())):
                    break
            return {
                "version": self._version,
                "controller": "tls:127.0.0.1:1",
                "hosts": [dict(host) for host in self._hosts.values()],
                "ended": self.ended,
            }

    def take_report(self, report: dict[str, Any]) -> int:
        """Accept a report, unless it is to be refused."""
        if (status := self.refuse(report)) is not None:
            return status
        self.reports.append(report)
        return 202


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    controller: HostsController


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    controller: HostsController

    def setup(self) -> None:
        super().setup()
        with self.controller._news:
            self.controller._open.add(self.request)
            if self.controller._server is not self.server:  # it died after it had taken this connection
                with contextlib.suppress(OSError):
                    self.request.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        self.controller._open.discard(self.request)
        super().finish()

    def handle(self) -> None:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # who asked is gone, or this controller is
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def address_string(self) -> str:
        return "unix"

    def _answer(self, code: int, value: Any) -> None:
        self._send(code, json.dumps(value).encode())

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._answer(401, {"error": {"kind": "unauthorized", "message": "no token", "hint": None}})
        return False

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if not self._allowed():
            return
        if url.path == "/v1/hosts/wanted":
            self._answer(
                200, self.controller.answer_wanted(int(query["after"]), min(30.0, float(query["wait_s"])))
            )
        elif url.path == "/v1/status":
            self._answer(200, self.controller.status)
        elif url.path == "/v1/events":
            self._send(200, b"".join(json.dumps(event).encode() + b"\n" for event in self.controller.events))
        else:
            self._answer(404, {"error": {"kind": "not_found", "message": "no such route", "hint": None}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self._allowed():
            return
        if self.path == "/v1/collected":
            self.controller.collected.set()
            self._answer(202, {})
        elif self.path == "/v1/head":
            self.controller.bills.append(json.loads(body))
            self._answer(202, {})
        elif self.path == "/v1/down":
            self.controller.orders.append(json.loads(body))
            self._answer(202, {})
        else:
            self._answer(self.controller.take_report(json.loads(body)), {})
