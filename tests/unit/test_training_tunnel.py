"""A rank's word with its agent about whom it is about to dial; the agent's side is ``rust_core/tests/tunnel.rs``."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sky_monarch.training.tunnel import Tunnel

HERE = ["127.64.0.3:4000", "127.64.0.4:4001"]


class Agent:
    """Answers as told, and remembers what it was asked, a list for each connection."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked, self.error, self.taken = path, [], None, set()
        self._lines: list[socket.socket] = []
        self._answering: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            self._lines.append(line)
            questions: list[dict] = []
            self.asked.append(questions)
            answering = threading.Thread(target=self._answer, args=(line, questions), daemon=True)
            self._answering.append(answering)
            answering.start()

    def _answer(self, line: socket.socket, questions: list[dict]) -> None:
        with line, line.makefile() as texts:
            for text in texts:
                questions.append(json.loads(text))
                taken = [one for one in questions[-1]["reach"] if one in self.taken]
                error = f"{taken[0]} cannot be had on this host" if taken else self.error
                line.sendall(json.dumps({"error": error}).encode() + b"\n")

    def hang_up(self) -> None:
        for line in self._lines:
            with contextlib.suppress(OSError):  # the other side has
                line.shutdown(socket.SHUT_RDWR)
        for answering in self._answering:
            answering.join(5)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self.hang_up()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "tunnel.sock")
    yield agent
    agent.close()


def test_it_asks_once_for_each_address_and_goes_on_when_the_agent_has_answered(agent: Agent) -> None:
    tunnel = Tunnel(f"unix:{agent.path}")
    tunnel.reach("mesh", [*HERE, HERE[0]])
    tunnel.reach("store", HERE[:1])

    assert agent.asked == [[{"keep": "mesh", "reach": HERE}, {"keep": "store", "reach": HERE[:1]}]]
    tunnel.close()


def test_what_cannot_be_reached_is_an_error_of_the_rendezvous_and_not_the_last_word(agent: Agent) -> None:
    tunnel = Tunnel(f"unix:{agent.path}")
    agent.error = "127.64.0.3:4000 cannot be had on this host: Address already in use"
    with pytest.raises(ConnectionError, match="cannot be had on this host"):
        tunnel.reach("mesh", HERE)

    agent.error = None
    tunnel.reach("mesh", HERE[1:])
    refused, had = agent.asked[-1]
    assert refused == {"keep": "mesh", "reach": HERE}
    assert had == {"keep": "mesh", "reach": HERE[1:]}
    tunnel.close()


def test_a_refusal_costs_nothing_that_was_reached_before(agent: Agent) -> None:
    tunnel = Tunnel(f"unix:{agent.path}")
    tunnel.reach("store", HERE[:1])
    agent.taken = {HERE[1]}
    with pytest.raises(ConnectionError, match="cannot be had on this host"):
        tunnel.reach("mesh", HERE)

    tunnel.reach("state", HERE[:1])
    assert len(agent.asked) == 1, "the agent lets go of everything with the connection"
    tunnel.close()


def test_an_address_that_is_taken_by_now_does_not_keep_its_own_replacement_away(agent: Agent) -> None:
    tunnel = Tunnel(f"unix:{agent.path}")
    tunnel.reach("mesh", HERE[:1])
    agent.hang_up()
    agent.taken = {HERE[0]}
    with pytest.raises(ConnectionError):
        tunnel.reach("mesh", HERE[1:])  # how it learns that the agent is another one

    tunnel.reach("mesh", HERE[1:])
    assert agent.asked[-1] == [{"keep": "mesh", "reach": HERE[1:]}]
    tunnel.close()


def test_an_address_that_is_taken_by_now_does_not_keep_others_away(agent: Agent) -> None:
    tunnel = Tunnel(f"unix:{agent.path}")
    tunnel.reach("store", HERE[:1])
    tunnel.reach("mesh", HERE[1:])
    agent.hang_up()
    agent.taken = {HERE[0]}
    with pytest.raises(ConnectionError):
        tunnel.reach("state", HERE[1:])

    tunnel.reach("state", HERE[1:])
    asked = [question["keep"] for question in agent.asked[-1]]
    assert asked == ["store", "mesh", "state"]
    agent.hang_up()
    with pytest.raises(ConnectionError):
        tunnel.reach("state", HERE[1:])
    tunnel.reach("state", HERE[1:])
    assert [question["keep"] for question in agent.asked[-1]] == ["mesh", "state"], "it is asked for once"
    with pytest.raises(ConnectionError, match="cannot be had on this host"):
        tunnel.reach("store", HERE[:1])
    tunnel.close()


def test_an_agent_that_was_started_anew_is_told_of_everything_again(agent: Agent) -> None:
    tunnel = Tunnel(f"unix:{agent.path}")
    tunnel.reach("store", HERE[:1])
    agent.hang_up()
    with pytest.raises(ConnectionError):
        tunnel.reach("mesh", HERE)

    tunnel.reach("mesh", HERE)
    assert agent.asked[-1] == [{"keep": "store", "reach": HERE[:1]}, {"keep": "mesh", "reach": HERE}]
    tunnel.close()


def test_no_agent_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="No such file"):
        Tunnel(f"unix:{tmp_path / 'nobody.sock'}").reach("mesh", HERE)
