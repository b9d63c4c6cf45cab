"""The controller's end of the agents' connections, over real sockets; the other one is written by hand, or rude."""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sky_monarch import errors
from tests.support import wire

pytest.importorskip("sky_monarch._core", reason="the extension is not built")

from sky_monarch.actors import AgentClient, ChannelServer
from sky_monarch.actors.channel_server import ChannelEvent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.sock"


@pytest.fixture
def server(path: Path) -> Iterator[ChannelServer]:
    with ChannelServer(f"unix:{path}", "token", "run-1") as server:
        yield server


class Inbox:
    """What a server has drained so far, waited for as an event loop would."""

    def __init__(self, server: ChannelServer) -> None:
        self.server, self.events = server, list[ChannelEvent]()

    def next(self) -> ChannelEvent:
        deadline = time.monotonic() + 20
        while not self.events:
            left = deadline - time.monotonic()
            assert left > 0, "nothing arrived"
            assert select.select([self.server.fileno()], [], [], left)[0], "nothing arrived"
            self.events = self.server.drain()
        return self.events.pop(0)


def welcomed(path: Path, **about: Any) -> wire.Peer:
    peer = wire.Peer.dial(path)
    peer.send(wire.hello(wire.agent(**about)))
    assert peer.recv() == {"version": 1, "refused": None}
    return peer


def test_an_agent_is_heard_and_answered(server: ChannelServer, path: Path) -> None:
    inbox = Inbox(server)
    assert server.address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    groups = [{"replica": 1, "generation": 3, "state": "running", "restarts": 1, "pids": {0: 42}}]
    with welcomed(path, groups=groups) as peer:
        opened = inbox.next()
        assert (opened.kind, opened.data) == (
            "opened",
            {**wire.agent(groups=groups), "examining": False, "certificate": None},
        )
        assert "token" not in opened.data

        # Fields of a newer agent are ignored; bytes stay bytes.
        stamped = {
            "type": "event",
            "seq": 1,
            "mono_ns": 2,
            "wall_ms": 3,
            "event": "rank_exited",
            "replica": 1,
        }
        stamped |= {
            "rank": 0,
            "generation": 3,
            "pid": 42,
            "exit": {"signal": 9},
            "collateral": False,
            "oom": False,
        }
        stamped |= {"tail": ["the last line"]}
        peer.send({**stamped, "invented_later": [1, 2]})
        message = inbox.next()
        # What an older agent does not say is filled in.
        expected = {**stamped, "traceback": [], "memory": None}
        assert (message.connection, message.kind, message.data) == (opened.connection, "message", expected)
        peer.send({"type": "log_chunk", "request": 5, "offset": 0, "data": b"\xff\n", "eof": True})
        assert inbox.next().data["data"] == b"\xff\n"
        peer.send(
            {
                "type": "progress",
                "slot": {"replica": 1, "rank": 0},
                "generation": 3,
                "mono_ns": 1,
                "step": 4,
                "metrics": {"loss": 2.5},
            }
        )
        progress = inbox.next().data
        assert (progress["step"], progress["metrics"], progress["quorum_id"]) == (4, {"loss": 2.5}, None)

        server.send(opened.connection, {"type": "ack", "seq": 1})
        assert peer.recv() == {"type": "ack", "seq": 1}
        server.send(opened.connection, {"type": "stop_group", "replica": 1, "grace_s": 2, "reason": "ü"})
        assert peer.recv() == {"type": "stop_group", "replica": 1, "grace_s": 2.0, "reason": "ü"}
    closed = inbox.next()
    assert (closed.connection, closed.kind) == (opened.connection, "closed")
    assert "the peer closed" in closed.data
    with pytest.raises(errors.ChannelClosedError, match="gone"):
        server.send(opened.connection, {"type": "release"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2, this side speaks 1"),
        ({"version": 0}, "version 0, this side speaks 1"),
        ({"token": "guess"}, "the token is not this run's"),
        ({"token": ""}, "the token is not this run's"),
        ({"run_id": "run-2"}, 'this is run "run-1", not "run-2"'),
    ],
)
def test_a_stranger_is_refused_in_words(
    server: ChannelServer, path: Path, changes: dict[str, Any], words: str
) -> None:
    with wire.Peer.dial(path) as peer:
        peer.send(wire.hello(wire.agent(), **changes))
        answer = peer.recv()
        assert words in answer["refused"]
        assert peer.recv() is None, "and hung up on"
    assert server.drain() == []


@pytest.mark.parametrize(
    "rude",
    [
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 64 << 20) + b"\x01",
        struct.pack("<IB", 40, 7),
        struct.pack("<I", 0),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        wire.frame([1, 2, 3]),
        wire.frame({"version": 1}),
        os.urandom(200),
    ],
)
def test_bytes_that_are_no_hello_end_their_own_connection_only(
    server: ChannelServer, path: Path, rude: bytes
) -> None:
    with wire.Peer.dial(path) as bad, welcomed(path) as good:
        opened = Inbox(server).next()
        bad.socket.sendall(rude)
        bad.socket.shutdown(socket.SHUT_WR)
        while bad.socket.recv(4096):
            pass
        server.send(opened.connection, {"type": "release"})
        assert good.recv() == {"type": "release"}


def test_a_frame_over_the_bound_ends_the_connection_and_says_so(server: ChannelServer, path: Path) -> None:
    inbox = Inbox(server)
    with welcomed(path) as peer:
        inbox.next()
        peer.socket.sendall(struct.pack("<I", 17 << 20))
        closed = inbox.next()
        assert closed.kind == "closed"
        assert f"{17 << 20} bytes; {16 << 20} are allowed" in closed.data


def test_a_silent_dialler_is_hung_up_on_and_holds_nobody_up(server: ChannelServer, path: Path) -> None:
    silent = [wire.Peer.dial(path) for _ in range(8)]  # one after the other they would cost 5 s each
    started = time.monotonic()
    with welcomed(path):
        assert Inbox(server).next().kind == "opened"
        assert time.monotonic() - started < 15
    for peer in silent:
        assert peer.recv() is None
        peer.close()
    assert time.monotonic() - started < 30


def test_a_controller_that_does_not_drain_slows_the_agent_and_loses_nothing(
    server: ChannelServer, path: Path
) -> None:
    inbox, count = Inbox(server), 6000
    chunk = {"type": "log_chunk", "offset": 0, "data": b"x" * 10_000, "eof": False}
    with welcomed(path) as peer:
        sent = 0

        def send_all() -> None:
            nonlocal sent
            for request in range(count):
                peer.send({**chunk, "request": request})
                sent = request + 1

        thread = threading.Thread(target=send_all)
        thread.start()
        at_rest = -1
        while at_rest != sent or sent == 0:
            at_rest = sent
            time.sleep(0.3)
        assert at_rest < count, "60 MB went into a queue that nobody reads"
        assert inbox.next().kind == "opened"
        for request in range(count):
            assert inbox.next().data["request"] == request
        thread.join(20)
        assert sent == count


def test_an_agent_that_does_not_read_fills_its_own_queue_only(server: ChannelServer, path: Path) -> None:
    inbox = Inbox(server)
    with welcomed(path) as deaf:
        first = inbox.next().connection
        good = welcomed(path)
        second = inbox.next().connection
        fat = {"type": "stop_group", "replica": 0, "grace_s": 1, "reason": "x" * 100_000}

        def fill(connection: int) -> int:
            full, queued = "", 0
            while not full and queued < 100_000:
                try:
                    server.send(connection, fat)
                    queued += 1
                except errors.FrameTooLargeError as error:
                    full = str(error)
            assert "does not keep up" in full
            return queued

        assert fill(first) > 10
        server.send(second, {"type": "release"})
        assert good.recv() == {"type": "release"}
        assert deaf.recv()["type"] == "stop_group"
        good.close()


def test_a_command_that_is_none_is_refused_and_harms_nothing(server: ChannelServer, path: Path) -> None:
    with welcomed(path) as peer:
        connection = Inbox(server).next().connection
        for wrong in [
            {},
            {"type": "explode"},
            {"type": "ack"},
            {"type": "ack", "seq": -1},
            {"type": "ack", "seq": "1"},
        ]:
            with pytest.raises(errors.ConfigError, match="no command"):
                server.send(connection, wrong)
        server.send(connection, {"type": "ack", "seq": 2**63})
        assert peer.recv() == {"type": "ack", "seq": 2**63}


def test_a_session_that_dials_the_controller_is_told_where_to_go(server: ChannelServer, path: Path) -> None:
    with pytest.raises(errors.PeerRefusedError, match="sessions dial their agent"):
        AgentClient(
            f"unix:{path}", "token", "run-1", replica=1, rank=0, generation=3, target_step=9, timeout_s=20
        )


def test_an_address_in_use_is_refused_and_a_dead_one_is_taken_over(path: Path, server: ChannelServer) -> None:
    with pytest.raises(errors.SystemCallError, match="in use"):
        ChannelServer(f"unix:{path}", "token", "run-1")
    server.close()
    server.close()
    assert not path.exists()
    with pytest.raises(errors.ChannelClosedError):
        server.drain()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with ChannelServer(f"unix:{path}", "token", "run-1"), welcomed(path):
        pass


@pytest.mark.parametrize(
    ("address", "token"),
    [("unix:relative", "t"), ("tcp:0.0.0.0:1", "t"), ("unix:/nowhere/x", "t"), ("", "t"), (None, "")],
)
def test_an_address_or_token_that_cannot_be_used_is_refused(
    path: Path, address: str | None, token: str
) -> None:
    with pytest.raises(errors.ConfigError):
        ChannelServer(f"unix:{path}" if address is None else address, token, "run-1")
    assert not path.exists()
