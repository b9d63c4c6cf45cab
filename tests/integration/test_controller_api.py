"""The routes of the real controller process: who may ask, what is refused, how events are followed."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.controllers import TOKEN, ControllerRun, ScriptedAgent, controller, trains
from tests.support.waiting import eventually

ROUTES = [
    ("GET", "/v1/status"),
    ("GET", "/v1/events"),
    ("GET", "/v1/logs"),
    ("GET", "/v1/logs/raw"),
    ("POST", "/v1/down"),
    ("GET", "/v1/hosts/wanted"),
    ("POST", "/v1/hosts/report"),
    ("GET", "/nothing-here"),
]


@pytest.fixture(scope="module")
def shared_run(module_path: Path):
    with controller(module_path) as started:
        yield started


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("token", [None, "x", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_no_route_answers_without_the_token(
    shared_run: ControllerRun, method: str, path: str, token: str | None
) -> None:
    with shared_run.client(token=token) as client:
        response = client.request(method, path)
    assert response.status_code == 401
    assert set(response.json()["error"]) == {"kind", "message", "hint"}
    assert TOKEN not in response.text
    assert shared_run.status()["state"] == "PENDING", "nothing was done"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/events?after=-1", None, 400),
        ("GET", "/v1/events?after=x", None, 400),
        ("GET", "/v1/events?follow=yes", None, 400),
        ("GET", "/v1/logs?replica=9", None, 404),
        ("GET", "/v1/logs?replica=0&rank=7", None, 404),
        ("GET", "/v1/logs?replica=setup", None, 404),
        ("GET", "/v1/logs/raw", None, 400),
        ("GET", "/v1/nothing", None, 404),
        ("POST", "/v1/down", b"{", 400),
        ("POST", "/v1/down", b"[]", 400),
        ("POST", "/v1/down", b'{"grace_s": -1}', 400),
        ("POST", "/v1/down", b'{"grace_s": NaN}', 400),
        ("POST", "/v1/down", b'{"grace_s": "10"}', 400),
        ("POST", "/v1/down", b'{"reason": 7}', 400),
        ("POST", "/v1/down", b" " * 100_000, 400),
        ("POST", "/v1/status", None, 400),
        ("GET", "/v1/hosts/wanted?after=x", None, 400),
        ("GET", "/v1/hosts/wanted?wait_s=31", None, 400),
        ("GET", "/v1/hosts/wanted?wait_s=nan", None, 400),
        ("POST", "/v1/hosts/report", b'{"host": "local", "attempt": 1, "state": "launched"}', 404),
    ],
)
def test_bad_requests_are_refused_in_json_and_do_nothing(
    shared_run: ControllerRun, method: str, path: str, body: bytes | None, status: int
) -> None:
    with shared_run.client() as client:
        response = client.request(method, path, content=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["kind"]
    assert error["message"]
    assert shared_run.status()["state"] == "PENDING"


def test_only_the_owner_can_reach_the_socket(shared_run: ControllerRun) -> None:
    assert Path(shared_run.api).stat().st_mode & 0o077 == 0


def test_a_run_without_news_is_told_from_a_controller_without_a_voice(
    run: ControllerRun, agent: ScriptedAgent
) -> None:
    trains(agent)
    last = run.events()[-1]["id"]
    params = {"follow": "1", "after": str(last)}
    with run.client() as client, client.stream("GET", "/v1/events", params=params, timeout=15) as stream:
        assert not next(line for line in stream.iter_lines() if not line.strip())


def test_events_can_be_followed_and_resumed_by_id_until_the_run_ends(
    run: ControllerRun, agent: ScriptedAgent
) -> None:
    trains(agent)
    first: list[dict[str, Any]] = []
    with run.client() as client, client.stream("GET", "/v1/events", params={"follow": "1"}) as stream:
        for line in stream.iter_lines():
            first.append(json.loads(line))
            if len(first) == 5:
                break
    last = first[-1]["id"]
    rest: list[dict[str, Any]] = []

    def follow() -> None:
        params = {"follow": "1", "after": str(last)}
        with run.client() as client, client.stream("GET", "/v1/events", params=params) as stream:
            rest.extend(json.loads(line) for line in stream.iter_lines() if line)

    thread = threading.Thread(target=follow)
    thread.start()
    eventually(lambda: rest, what="what is already there arrives")
    agent.event("notice", replica=None, message="while somebody follows")
    eventually(lambda: any(e.get("message") == "while somebody follows" for e in rest))
    for replica in range(3):
        agent.finish(replica)
    agent.told("shutdown")
    thread.join(10)
    assert not thread.is_alive(), "the stream ends with the run"
    ids = [event["id"] for event in first + rest]
    assert ids == list(range(1, len(ids) + 1)), "all events, once, in order"
    assert rest[-1]["event"] == "run_ended"


def test_a_thousand_groups_have_a_status(tmp_path: Path) -> None:
    with controller(tmp_path, replicas=1000, min_replicas=900) as run:
        agent = ScriptedAgent(run).connect()
        agent.told("start_group", 1000)
        for replica in range(1000):
            agent.start(replica)
            agent.commit(replica, 1, first=True)
        agent.all_acked()
        before = time.monotonic()
        status = run.status()
        print(f"status of 1000 groups: {time.monotonic() - before:.3f} s")
        assert len(status["groups"]) == 1000
        assert {group["state"] for group in status["groups"]} == {"RUNNING"}
        agent.close()
