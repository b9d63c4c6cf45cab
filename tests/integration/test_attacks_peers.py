"""Strangers at every door of a run: they learn nothing, end nothing, and stop nobody."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.runs import FREE_RANK, Workbench, pid_of

IDLE_CONNECTIONS = 200


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def junk(made: Path) -> Iterator[bytes]:
    """What a port scanner, a browser, a confused client, a liar about lengths and a thief send."""
    noise = random.Random(1).randbytes(4000)
    yield b"\0" * 100
    yield noise
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\xff\xff\xff\xff" + b"a" * 100
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise
    yield b"{" * 10_000
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        payload = pickle.dumps(Payload(made), protocol=protocol)
        yield payload
        for width in (4, 8):
            for order in ("big", "little"):
                yield len(payload).to_bytes(width, order) + payload
        yield b"POST /v1/down HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload


def http_status(
    connection: socket.socket, method: str, path: str, body: bytes | None = None, token: str | None = None
) -> int:
    """Status that one request over ``connection`` is answered with."""
    client = http.client.HTTPConnection("run", timeout=10)
    client.sock = connection
    client.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
    return client.getresponse().status


def test_strangers_at_every_door_harm_nothing(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("doors", run=f"{FREE_RANK} --steps 5000", replicas=2))
    before = workbench.wait_for_step(name, 1)
    folder = workbench.run_folder(name)
    token = json.loads((folder / "private.json").read_text())["token"]
    sockets = json.loads((folder / "run.json").read_text())["sockets"]
    host, port = before["lighthouse"]["address"].rsplit(":", 1)

    def unix(path: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(10)
        made.connect(path)
        return made

    def tcp() -> socket.socket:
        return socket.create_connection((host, int(port)), timeout=10)

    with ExitStack() as held:
        for data in junk(workbench.folder / "made"):
            for connection in (*map(unix, sockets.values()), tcp()):
                held.enter_context(connection)
                connection.sendall(data)
        for _ in range(IDLE_CONNECTIONS):
            held.enter_context(tcp())
        for given in (None, "", "x", token[:-1]):
            for method, path in (
                ("GET", "/v1/status"),
                ("GET", "/v1/logs"),
                ("POST", "/v1/down"),
                ("GET", "/"),
            ):
                with unix(sockets["api"]) as connection:
                    assert http_status(connection, method, path, token=given) == 401, (method, path)
            for method, path in (("POST", "/replica/0/kill"), ("GET", "/"), ("GET", "/status.json")):
                with tcp() as connection:
                    assert http_status(connection, method, path, token=given) == 401, (method, path)
        for body in (b"x", b"[]", b"[" * 60_000, b'{"grace_s": NaN}', b'{"reason": 5}'):
            with unix(sockets["api"]) as connection:
                assert http_status(connection, "POST", "/v1/down", body, token) == 400, body[:20]
        reached = workbench.status(name)["step"]
        after = workbench.wait_for_step(name, reached + 5)
    assert after["state"] == "RUNNING"
    assert not (workbench.folder / "made").exists(), "nobody has unpickled anything"
    for what in ("controller_pid", "agent_pid", "lighthouse"):
        assert after[what] == before[what]
    assert [pid_of(after, replica) for replica in range(2)] == [pid_of(before, r) for r in range(2)]
    for log in ("agent.log", "controller.log", "lighthouse.log"):
        assert token not in (folder / log).read_text(), "no secret in a log"
