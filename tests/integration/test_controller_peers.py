"""Agents that the real controller refuses or drops: strangers, second ones, and who breaks the protocol."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sky_monarch.actors.channel_client import ChannelClient
from sky_monarch.errors import PeerRefusedError
from tests.support.controllers import RUN_ID, TOKEN, ControllerRun, ScriptedAgent, trains
from tests.support.waiting import eventually

HOSTILE: list[object] = [
    7,
    None,
    [],
    {},
    {"type": "nonsense"},
    {"type": "event"},
    {"type": "event", "seq": -1, "mono_ns": 1, "wall_ms": 1, "event": "notice", "message": "x"},
    {"type": "event", "seq": 1, "mono_ns": 1, "wall_ms": 1, "event": "first_commit"},
    {
        "type": "event",
        "seq": 1,
        "mono_ns": 1,
        "wall_ms": 1,
        "event": "first_commit",
        "replica": 99,
        "generation": 1,
        "step": 1,
    },
    {"type": "progress", "slot": {"replica": 0, "rank": 99}, "generation": 1, "mono_ns": 1, "step": 1},
    {"type": "log_chunk", "request": 1, "offset": 0, "data": "text", "eof": 3},
]


def test_a_peer_that_breaks_the_protocol_is_dropped_and_the_run_goes_on(
    run: ControllerRun, agent: ScriptedAgent
) -> None:
    trains(agent)
    for number, message in enumerate(HOSTILE):
        before = len(reasons(run))
        agent.send(message)
        agent.dropped()
        eventually(lambda before=before: len(reasons(run)) > before, what=f"somebody is told why: {message}")
        agent.connect()
        agent.commit(0, 7 + number)
        eventually(lambda step=7 + number: run.status()["groups"][0]["step"] == step)
    agent.pump(0.2)
    assert agent.commands == [], "no group was touched"
    assert run.process is not None
    assert run.process.poll() is None


def reasons(run: ControllerRun) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] in ("notice", "agent_disconnected")]


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"role": "session", "slot": {"replica": 0, "rank": 0}, "generation": 1, "target_step": None}, TOKEN),
        ({}, "wrong"),
    ],
)
def test_a_stranger_is_refused(run: ControllerRun, change: dict[str, Any], token: str) -> None:
    hello = {"role": "agent", "host": "local", "pid": 1, "incarnation": 5, "groups": [], **change}
    with pytest.raises(PeerRefusedError):
        ChannelClient(run.address, token, RUN_ID, hello, 20.0)
    assert run.status()["state"] == "PENDING"


def test_an_agent_of_an_unknown_host_is_dropped_with_a_notice(run: ControllerRun) -> None:
    stranger = ScriptedAgent(run, host="elsewhere").connect()
    stranger.dropped()
    notices = eventually(lambda: [e for e in run.events() if e["event"] == "notice"])
    assert "elsewhere" in notices[0]["message"]


def test_a_second_agent_of_one_host_is_dropped_while_the_first_lives(
    run: ControllerRun, agent: ScriptedAgent
) -> None:
    trains(agent)
    second = ScriptedAgent(run).connect()
    second.dropped()
    assert not second.commands
    assert second.farewell == f"host local has an agent already, pid {os.getpid()}"
    agent.commit(0, 9)
    eventually(lambda: run.status()["groups"][0]["step"] == 9)
