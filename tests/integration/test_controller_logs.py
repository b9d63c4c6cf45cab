"""Captured output through the controller: whole lines, exact bytes, bounded memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sky_monarch.controller.logs import Line, LogReader
from sky_monarch.controller.questions import Process, Questions
from sky_monarch.sdk._api import LogCursor
from sky_monarch.sdk._archive import Selection
from tests.support.controllers import ControllerRun, ScriptedAgent, controller
from tests.support.waiting import eventually


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ControllerRun]:
    with controller(tmp_path, replicas=2, ranks_per_replica=2, min_replicas=1, setup="make") as started:
        yield started


@pytest.fixture
def agent(run: ControllerRun) -> Iterator[ScriptedAgent]:
    connected = ScriptedAgent(run).connect()
    connected.told("setup")
    connected.event("setup_started")
    connected.event("setup_finished", exit={"code": 0}, timed_out=False, tail=[])
    connected.told("start_group", 2)
    for replica in range(2):
        connected.start(replica, ranks=2)
    connected.all_acked()
    yield connected
    connected.close()


def ask(run: ControllerRun, agent: ScriptedAgent, path: str = "/v1/logs", **params: Any) -> httpx.Response:
    """One request, while the agent answers its questions."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: run.get(path, **params))
        agent.serve(answer.done)
        return answer.result()


def lines(response: httpx.Response) -> list[tuple[Any, Any, Any, str]]:
    assert response.status_code == 200, response.text
    parsed = [json.loads(line) for line in response.text.splitlines()]
    return [(line["replica"], line["rank"], line["generation"], line["line"]) for line in parsed]


def test_lines_carry_their_process_and_none_is_torn_or_lost(run: ControllerRun, agent: ScriptedAgent) -> None:
    texts = {
        (replica, rank): b"".join(
            b"%d.%d line %d " % (replica, rank, n) + b"x" * 300 + b"\n" for n in range(2000)
        )
        for replica in range(2)
        for rank in range(2)
    }
    agent.logs = {(*slot, 1): text for slot, text in texts.items()}
    got = lines(ask(run, agent))
    assert len(got) == 8000
    for (replica, rank), text in texts.items():
        mine = [line for r, k, g, line in got if (r, k, g) == (replica, rank, 1)]
        assert "\n".join(mine).encode() + b"\n" == text
    only = lines(ask(run, agent, replica=1, rank=0))
    assert {(replica, rank) for replica, rank, _, _ in only} == {(1, 0)}
    assert len(only) == 2000


def test_odd_bytes_become_lines_and_stay_exact_when_raw(run: ControllerRun, agent: ScriptedAgent) -> None:
    data = b"bar 10%\rbar 20%\r\n\xff\xfe bad utf-8\n\n\xc3\xa9\nno end"
    agent.logs = {(0, 0, 1): data}
    got = [line for *_, line in lines(ask(run, agent, replica=0, rank=0))]
    assert got == ["bar 10%\rbar 20%\r", "�� bad utf-8", "", "é", "no end"]
    raw = ask(run, agent, "/v1/logs/raw", replica=0, rank=0, generation=1)
    assert raw.content == data
    assert ask(run, agent, "/v1/logs/raw", replica=0, rank=0).content == data


def test_an_endless_line_is_passed_on_in_pieces(run: ControllerRun, agent: ScriptedAgent) -> None:
    agent.logs = {(0, 0, 1): b"y" * 3_000_000 + b"\nend\n"}
    got = [line for *_, line in lines(ask(run, agent, replica=0, rank=0))]
    assert "".join(got[:-1]) == "y" * 3_000_000
    assert max(map(len, got)) < 1_200_000
    assert got[-1] == "end"


def test_generations_follow_each_other(run: ControllerRun, agent: ScriptedAgent) -> None:
    agent.die(0, 1)
    agent.event("restart_scheduled", replica=0, generation=2, delay_s=0.0, restarts_left=1)
    agent.start(0, 2, ranks=2)
    agent.all_acked()
    agent.logs = {(0, 0, 1): b"first\ncut", (0, 0, 2): b"second\n"}
    got = lines(ask(run, agent, replica=0, rank=0))
    assert got == [(0, 0, 1, "first"), (0, 0, 1, "cut"), (0, 0, 2, "second")]
    assert lines(ask(run, agent, replica=0, rank=0, generation=2)) == [(0, 0, 2, "second")]
    assert ask(run, agent, "/v1/logs/raw", replica=0, rank=0).content == b"first\ncutsecond\n"


def test_tail_begins_with_the_last_lines(run: ControllerRun, agent: ScriptedAgent) -> None:
    agent.die(0, 1)
    agent.start(0, 2, ranks=2)
    agent.all_acked()
    for size, ending in itertools.product([10, 400], [b"\n", b""]):
        first = [f"a{n} ".ljust(size, "x") for n in range(700)]
        second = [f"b{n} ".ljust(size, "x") for n in range(600)]
        agent.logs = {
            (0, 0, 1): "\n".join(first).encode() + ending,
            (0, 0, 2): "\n".join(second).encode() + ending,
        }
        for tail in (0, 1, 3, 599, 600, 601, 900, 5000):
            got = [line for *_, line in lines(ask(run, agent, replica=0, rank=0, tail=tail))]
            assert got == (first + second)[1300 - min(tail, 1300) :], (size, ending, tail)


def test_a_tail_costs_a_handful_of_questions_however_long_the_log_is(
    run: ControllerRun, agent: ScriptedAgent
) -> None:
    agent.logs = {(0, 0, 1): b"line\n" * 2_000_000}
    asked: list[dict[str, Any]] = []
    original = agent._answer

    def count(question: dict[str, Any]) -> None:
        asked.append(question)
        original(question)

    agent._answer = count
    got = [line for *_, line in lines(ask(run, agent, replica=0, rank=0, tail=3))]
    assert got == ["line"] * 3
    assert len(asked) <= 3, "where it ends, its last part, and what came since"


def test_a_silent_stream_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        """A run whose one process prints nothing."""

        def send(self, host: str, command: Mapping[str, Any]) -> bool:
            answer = {"request": command["request"], "offset": 0, "data": b"", "eof": False}
            questions.answered(host, answer)
            return True

        def generations(self, process: Process) -> tuple[int, ...]:
            return (1,)

        def ended(self) -> bool:
            return False

    monkeypatch.setattr("sky_monarch.controller.logs._KEEP_ALIVE_S", 0.1)
    source = Silent()
    questions = Questions(source.send, lambda process, generation: (process.host, generation))
    reader = LogReader(source, questions)

    async def first() -> list[Line]:
        stream = reader.lines([Process("local", 0, 0)], generation=None, tail=None, follow=True)
        async with asyncio.timeout(10):
            return await anext(stream)

    assert asyncio.run(first()) == []
    cursor = LogCursor(Selection(), None)
    assert cursor.accept("") is None, "clients pass over it"


def test_setup_has_its_own_output(run: ControllerRun, agent: ScriptedAgent) -> None:
    agent.logs = {None: b"making\n"}
    assert lines(ask(run, agent, replica="setup")) == [("setup", None, 1, "making")]


def test_a_follower_gets_lines_as_they_come_until_the_run_ends(
    run: ControllerRun, agent: ScriptedAgent
) -> None:
    agent._log_eof = False
    agent.logs = {(0, 0, 1): b"one\nhal"}
    got: list[str] = []

    def follow() -> None:
        params = {"follow": "1", "replica": "0", "rank": "0"}
        with run.client() as client, client.stream("GET", "/v1/logs", params=params) as stream:
            got.extend(json.loads(line)["line"] for line in stream.iter_lines())

    thread = threading.Thread(target=follow)
    thread.start()
    agent.serve(lambda: got == ["one"])
    agent.logs[0, 0, 1] += b"f\ntwo\n"
    agent.serve(lambda: got == ["one", "half", "two"])
    agent.logs[0, 0, 1] += b"last words"
    for replica in range(2):
        agent.finish(replica)
    agent.told("shutdown")
    thread.join(10)
    assert not thread.is_alive(), "the stream ends with the run"
    assert got == ["one", "half", "two", "last words"], "followers get everything before the agents go"


def test_an_agent_that_is_away_is_an_honest_error(run: ControllerRun, agent: ScriptedAgent) -> None:
    agent.close()
    eventually(lambda: run.status()["agent_pid"] is None)
    response = run.get("/v1/logs/raw", replica=0, rank=0)
    assert response.status_code == 409
    assert response.json()["error"]["kind"] == "agent_unreachable"
    (last,) = [json.loads(line) for line in run.get("/v1/logs", replica=0, rank=0).text.splitlines()]
    assert last["error"]["kind"] == "agent_unreachable"


def test_a_client_that_leaves_ends_its_stream(run: ControllerRun, agent: ScriptedAgent) -> None:
    agent._log_eof = False
    agent.logs = {(0, 0, 1): b"one\n"}

    def peek() -> None:
        params = {"follow": "1", "replica": "0", "rank": "0"}
        with run.client() as client, client.stream("GET", "/v1/logs", params=params) as stream:
            next(stream.iter_lines())

    thread = threading.Thread(target=peek)
    thread.start()
    agent.serve(lambda: not thread.is_alive())
    thread.join()
    asked: list[int] = []
    original = agent._answer

    def count(question: dict[str, Any]) -> None:
        asked.append(1)
        original(question)

    agent._answer = count

    def quiet() -> bool:
        asked.clear()
        agent.pump(0.6)
        return not asked

    eventually(quiet, what="nobody asks for output any more")


def test_large_output_streams_through_bounded_memory(run: ControllerRun, agent: ScriptedAgent) -> None:
    line = b"z" * 99 + b"\n"
    agent.logs = {(0, 0, 1): line * 500_000}
    assert run.process is not None
    rss = Path(f"/proc/{run.process.pid}/status")

    def peak_kib() -> int:
        return int(next(row for row in rss.read_text().splitlines() if row.startswith("VmHWM")).split()[1])

    before, size = peak_kib(), 0

    def read() -> None:
        nonlocal size
        params = {"replica": "0", "rank": "0"}
        with run.client() as client, client.stream("GET", "/v1/logs/raw", params=params) as stream:
            for chunk in stream.iter_bytes():
                size += len(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    agent.serve(lambda: not thread.is_alive(), within_s=60)
    assert size == 50_000_000
    assert peak_kib() - before < 24 * 1024
