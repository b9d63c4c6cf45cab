"""The store helper as the agent uses it: a real process, a real store, clients that came too early."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
LIMIT_S = 60

pytestmark = [pytest.mark.timeout(180)]


class Helper:
    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(LIMIT_S)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sky_monarch.training.store"],
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.dup2(theirs.fileno(), 3),
            pass_fds=[3],
        )
        theirs.close()

    def tell(self, message: str, *sockets: socket.socket) -> str:
        socket.send_fds(self.control, [message.encode()], [one.fileno() for one in sockets])
        return self.control.recv(4096).decode()

    def leave(self) -> tuple[int, str]:
        self.control.close()
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors


@pytest.fixture
def helper() -> Iterator[Helper]:
    helper = Helper()
    yield helper
    helper.control.close()
    helper.process.kill()
    helper.process.communicate()


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


@pytest.mark.torch
@pytest.mark.slow
def test_a_client_that_connects_before_the_helper_exists_is_served() -> None:
    from torch.distributed import TCPStore

    listener = listening()
    port = listener.getsockname()[1]
    answers: list[bytes] = []

    def client() -> None:
        store = TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
        )
        store.set("key", "value")
        answers.append(store.get("key"))

    early = threading.Thread(target=client)
    early.start()
    helper = Helper()
    try:
        assert helper.tell("open 7\n", listener) == "ready 7\n"
        listener.close()  # the agent's copy
        early.join(LIMIT_S)
        assert answers == [b"value"]

        # One store a generation: a second one knows nothing of the first, and its end leaves the first be.
        other = listening()
        assert helper.tell("open 8\n", other) == "ready 8\n"
        second = TCPStore("127.0.0.1", other.getsockname()[1], is_master=False, wait_for_workers=False)
        assert not second.check(["key"])
        other.close()
        del second
        assert helper.tell("close 8\n") == "ready 8\n"
        again = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        assert again.get("key") == b"value"
        del again
        assert helper.leave() == (0, "")
    finally:
        helper.control.close()
        helper.process.kill()
        helper.process.communicate()


def test_messages_that_cannot_be_carried_out_are_answered_and_leak_nothing(helper: Helper) -> None:
    with listening() as one, listening() as two, socket.socket() as silent:
        assert helper.tell("open 1\n").startswith("error 1 expected one socket, got 0")
        assert helper.tell("open 1\n", one, two).startswith("error 1 expected one socket, got 2")
        assert helper.tell("open 1\n", silent).startswith("error 1 the socket is no listening TCP socket")
        assert helper.tell("close 1\n") == "error 1 no store of this id is open\n"
        assert helper.tell("open\n", one).startswith("error - 'open' needs one id")
        assert helper.tell("dance 1\n", one).startswith("error 1 unknown verb 'dance'")
    fds = list(Path(f"/proc/{helper.process.pid}/fd").iterdir())
    assert len(fds) <= 5, "0, 1, 2, the control socket, and what os.listdir itself opened"
    assert "libtorch" not in Path(f"/proc/{helper.process.pid}/maps").read_text(), "nothing was served yet"
    assert helper.leave() == (0, "")


def test_without_its_socket_the_helper_says_what_it_is(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sky_monarch.training.store"],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        done.stderr.splitlines()[0],
        "hint: this helper is started by the agent",
    ]
