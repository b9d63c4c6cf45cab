"""The session's end of its connection to the agent, over real sockets; the agent is written by hand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sky_monarch import errors
from tests.support import wire
from tests.support.waiting import eventually

pytest.importorskip("sky_monarch._core", reason="the extension is not built")

from sky_monarch.actors import AgentClient, ChannelServer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.sock"


class Listener:
    """An agent's socket, served by hand."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.bind(str(path))
        self.socket.listen()

    def accept(self, refused: str | None = None) -> tuple[wire.Peer, dict[str, Any]]:
        peer = wire.Peer(self.socket.accept()[0])
        hello = peer.recv()
        peer.send({"version": wire.PROTOCOL_VERSION, "refused": refused})
        return peer, hello

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()


def connect(path: Path, *, timeout_s: float = 20, target_step: int | None = 9) -> AgentClient:
    return AgentClient(
        f"unix:{path}",
        "token",
        "run-1",
        replica=1,
        rank=0,
        generation=3,
        target_step=target_step,
        timeout_s=timeout_s,
    )


def connected(listener: Listener, path: Path) -> tuple[AgentClient, wire.Peer, dict[str, Any]]:
    made: list[AgentClient] = []
    thread = threading.Thread(target=lambda: made.append(connect(path)))
    thread.start()
    peer, hello = listener.accept()
    thread.join(20)
    return made[0], peer, hello


def test_a_session_reports_and_hears(path: Path) -> None:
    with Listener(path) as listener:
        client, peer, hello = connected(listener, path)
        assert hello == wire.hello(
            {
                "role": "session",
                "slot": {"replica": 1, "rank": 0},
                "generation": 3,
                "pid": os.getpid(),
                "target_step": 9,
            }
        )
        with client:
            client.committed(4, quorum_id=2, participants=3, metrics={"loss": 2, "lr": 0.5})
            assert peer.recv() == {
                "type": "committed",
                "step": 4,
                "quorum_id": 2,
                "participants": 3,
                "metrics": {"loss": 2.0, "lr": 0.5},
            }
            assert client.recv(timeout_s=0) is None
            peer.send({"type": "dead", "quorum_id": 7, "invented_later": {}})
            assert client.recv(timeout_s=20) == {"type": "dead", "quorum_id": 7}
            peer.send({"type": "inject", "fault": "oom"})
            assert client.recv(timeout_s=20) == {"type": "inject", "fault": "oom"}
            client.done(9)
        assert peer.recv() == {"type": "done", "step": 9}
        assert peer.recv() is None
        peer.close()
    for call in (lambda: client.done(9), lambda: client.recv(1), lambda: client.committed(1)):
        with pytest.raises(errors.ChannelClosedError):
            call()


def test_a_session_comes_back_and_says_the_latest_again(path: Path) -> None:
    with Listener(path) as listener:
        client, peer, _ = connected(listener, path)
        client.committed(1)
        assert peer.recv()["step"] == 1
        peer.close()
    client.committed(2)
    client.committed(3)
    assert client.recv(timeout_s=0.2) is None, "an agent that is away is no error"
    with Listener(path) as listener:
        peer, hello = listener.accept()
        assert hello["peer"]["generation"] == 3
        assert peer.recv()["step"] == 3
        peer.send({"type": "release"})
        assert client.recv(timeout_s=20) == {"type": "release"}
        client.close()
        peer.close()


def test_a_session_of_an_older_generation_is_refused_for_good(path: Path) -> None:
    with Listener(path) as listener:
        client, peer, _ = connected(listener, path)
        peer.close()
        listener.accept(refused="generation 4 has taken its place")[0].close()
        with pytest.raises(errors.PeerRefusedError, match="generation 4 has taken its place"):
            client.recv(timeout_s=20)
        with pytest.raises(errors.PeerRefusedError):
            client.committed(5)
        client.close()


def test_an_agent_of_another_version_is_refused_naming_both(path: Path) -> None:
    with Listener(path) as listener:

        def answer() -> None:
            peer = wire.Peer(listener.socket.accept()[0])
            peer.recv()
            peer.send({"version": 5, "refused": None})
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(errors.PeerRefusedError, match="version 5, this side speaks 1"):
            connect(path)
        thread.join(20)


def test_an_agent_that_never_answers_costs_the_timeout_and_no_more(path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(errors.ChannelTimeoutError, match=r"c\.sock"):
        connect(path, timeout_s=0.3)
    with Listener(path), pytest.raises(errors.ChannelTimeoutError, match="no answer"):
        connect(path, timeout_s=0.3)
    assert 0.6 <= time.monotonic() - started < 10


def test_another_python_thread_runs_while_one_waits(path: Path) -> None:
    with Listener(path) as listener:
        client, peer, _ = connected(listener, path)
        heard: list[Any] = []
        thread = threading.Thread(target=lambda: heard.append(client.recv(timeout_s=30)))
        thread.start()
        for _ in range(20):
            time.sleep(0.01)
        assert thread.is_alive(), "else this one ran on only after the wait was over"
        peer.send({"type": "release"})
        thread.join(20)
        assert heard == [{"type": "release"}]
        client.close()
        peer.close()


def test_a_session_started_by_no_agent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKY_MONARCH_AGENT", raising=False)
    with pytest.raises(errors.ConfigError, match="SKY_MONARCH_AGENT is not set") as raised:
        AgentClient.from_env()
    assert "sky-monarch up" in str(raised.value.hint)


IN_A_PROCESS = """
import os, sys, time
from sky_monarch.actors import AgentClient
from sky_monarch import errors
client = AgentClient.from_env(timeout_s=20)
"""


def start(path: Path, code: str) -> subprocess.Popen[str]:
    env = {**os.environ, "SKY_MONARCH_AGENT": f"unix:{path}", "SKY_MONARCH_TOKEN": "token"}
    env |= {"SKY_MONARCH_RUN_ID": "run-1", "SKY_MONARCH_REPLICA": "1", "SKY_MONARCH_RANK": "0"}
    env |= {"SKY_MONARCH_GENERATION": "3", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", IN_A_PROCESS + code], env=env, stdout=subprocess.PIPE, text=True
    )


def test_a_process_that_ends_without_a_close_still_says_its_last_word(path: Path) -> None:
    with Listener(path) as listener, start(path, "client.committed(9); client.done(9)") as process:
        peer, _ = listener.accept()
        assert peer.recv()["step"] == 9
        assert peer.recv() == {"type": "done", "step": 9}
        assert peer.recv() is None
        assert process.wait(20) == 0
        peer.close()


def test_ctrl_c_ends_a_wait_at_once(path: Path) -> None:
    code = """
import threading
try:
    # From another thread, so that the main one is in its wait by then.
    threading.Timer(0.2, lambda: print("waiting", flush=True)).start()
    client.recv(timeout_s=60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    client.close()
"""
    with Listener(path) as listener, start(path, code) as process:
        peer, _ = listener.accept()
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - started < 20
        assert process.wait(20) == 0
        peer.close()


def test_a_forked_child_gets_an_error_not_a_hang_and_can_make_its_own(path: Path) -> None:
    code = """
pid = os.fork()
if pid == 0:
    try:
        client.committed(1)
    except errors.ChannelClosedError as error:
        assert "does not survive a fork" in str(error)
    else:
        os._exit(3)
    client.close()
    del client
    own = AgentClient.from_env(timeout_s=20)
    own.committed(2)
    own.close()
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
client.committed(5)
client.close()
sys.exit(code)
"""
    with Listener(path) as listener, start(path, code) as process:
        parent, _ = listener.accept()
        child, _ = listener.accept()
        assert child.recv()["step"] == 2
        assert child.recv() is None
        assert parent.recv()["step"] == 5
        child.close()
        parent.close()
        assert process.wait(20) == 0


def test_a_process_that_dies_is_noticed_at_once_and_leaves_the_socket_to_the_next(path: Path) -> None:
    code = f"""
from sky_monarch.actors import ChannelServer
server = ChannelServer("unix:{path}.2", "token", "run-1")
print("up", flush=True)
time.sleep(60)
"""
    with Listener(path) as listener, start(path, code) as process:
        peer, _ = listener.accept()
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        assert peer.recv() is None
        process.wait(20)
        peer.close()
    assert Path(f"{path}.2").exists(), "SIGKILL leaves the path"
    with ChannelServer(f"unix:{path}.2", "token", "run-1") as server:
        assert eventually(lambda: server.drain() == [], within_s=1)
