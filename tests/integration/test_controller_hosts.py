"""The real controller of a run whose hosts are provisioned: a launcher and agents of a test, and SIGKILL in between."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.controllers import RUN_ID, TOKEN, ControllerRun, ScriptedAgent
from tests.support.files import holders
from tests.support.waiting import eventually

LIMITS = {"agent_lost_s": 300.0, "host_backoff_s": 0.2, "linger_s": 0.2, "reap_s": 20.0}
PRICE = {"place": "RunPod/CA-MTL-1", "usd_per_hour": 16.0, "choice": 0}


class Launched:
    """A run of a head and two hosts, its agents, and a launcher that says what a test wants said."""

    def __init__(self, folder: Path, **options: Any) -> None:
        hosts = {"head": [], "h0": [0], "h1": [1]}
        self.run = ControllerRun(
            folder / "run",
            hosts=hosts,
            provisioned=("h0", "h1"),
            limits={**LIMITS, **options.pop("limits", {})},
            replicas=2,
            **{"min_replicas": 1, **options},
        )
        self.run.start()
        self.agents = [ScriptedAgent(self.run, host="head").connect()]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.run.close()

    def wanted(self, after: int = -1, wait_s: float = 0.0) -> dict[str, Any]:
        response = self.run.get("/v1/hosts/wanted", after=after, wait_s=wait_s)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def wants(self) -> dict[str, tuple[int, str]]:
        return {host["host"]: (host["attempt"], host["want"]) for host in self.wanted()["hosts"]}

    def report(self, host: str, attempt: int, state: str, **more: Any) -> None:
        body = {"host": host, "attempt": attempt, "state": state, **more}
        with self.run.client() as client:
            response = client.post("/v1/hosts/report", json=body)
        assert response.status_code == 202, response.text

    def comes(self, host: str, attempt: int, replica: int, generation: int = 1) -> ScriptedAgent:
        """A host is launched; its agent dials and trains."""
        self.report(host, attempt, "launching", **PRICE)
        self.report(host, attempt, "launched", **PRICE)
        agent = ScriptedAgent(self.run, host=host, attempt=attempt).connect()
        self.agents.append(agent)
        (start,) = agent.told("start_group")
        assert start["generation"] == generation
        agent.start(replica, generation)
        agent.commit(replica, 1, generation=generation, first=True)
        agent.all_acked()
        return agent

    def known(self) -> dict[str, Any]:
        """What a controller knows that has been killed in between, or not."""
        status = self.run.status()
        return {
            "wants": self.wants(),
            "hosts": [(host["phase"], host["attempt"], host["since_ms"]) for host in status["hosts"]],
            "run": (status["state"], status["reason"]),
            "groups": [(group["state"], group["generation"]) for group in status["groups"]],
        }

    def killed(self) -> None:
        """The controller is killed, another one comes, and all agents dial again."""
        before = self.known()
        self.run.kill()
        for agent in self.agents:
            agent.dropped()
        self.run.start()
        for agent in self.agents:
            agent.connect()
        eventually(lambda: self.known() == before, what=f"it goes on with {before}")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path)
    yield launched
    launched.close()


def test_a_controller_that_is_killed_after_any_word_on_hosts_goes_on_as_if_it_had_not(
    world: Launched,
) -> None:
    assert world.wants() == {"h0": (1, "up"), "h1": (1, "up")}
    world.report("h0", 1, "launching")
    world.killed()
    world.comes("h0", 1, 0)
    world.report("h1", 1, "launching")
    world.report("h1", 1, "failed", kind="capacity", reason="no MI300X anywhere")
    eventually(lambda: world.wants()["h1"] == (2, "up"), what="the next attempt after a pause")
    world.killed()
    second = world.comes("h1", 2, 1)
    assert world.run.state("RUNNING")["reason"] is None
    world.report("h1", 2, "ended", reason="preempted")
    assert world.wants()["h1"] == (3, "up")
    assert "preempted" in world.run.state("DEGRADED")["reason"]
    second.dropped()
    world.agents.remove(second)
    world.killed()
    stale = ScriptedAgent(world.run, host="h1", attempt=2).connect()
    stale.dropped()

    def notices() -> list[str]:
        return [event["message"] for event in world.run.events() if event["event"] == "notice"]

    eventually(lambda: notices()[-1:] == ["a stranger was dropped: fenced: host h1 is at attempt 3"])
    world.comes("h1", 3, 1, generation=2)
    world.run.state("RUNNING")
    world.run.down(grace_s=1, reason="enough")
    world.run.state("STOPPING")
    for agent in world.agents[1:]:
        for replica in agent.groups:
            agent.told("stop_group")
            agent.stop(replica)
        agent.all_acked()
    eventually(lambda: world.wants() == {"h0": (1, "down"), "h1": (3, "down")})
    world.killed()
    world.report("h1", 3, "down")
    assert world.run.final is None, "it costs money still"
    world.report("h0", 1, "down")
    final = eventually(lambda: world.run.final)
    assert (final["state"], final["exit_code"], final["reason"]) == ("CANCELLED", 8, "enough")
    assert [host["phase"] for host in final["hosts"]] == ["DOWN", "DOWN"]
    assert final["cost_usd"] > final["wasted_usd"] > 0
    world.agents[0].told("shutdown")


def test_a_launcher_that_waits_hears_of_a_change_at_once_and_no_secret_is_kept(world: Launched) -> None:
    first = world.wanted()
    secret = json.loads(base64.b64decode(first["hosts"][0]["enrolment"]))
    assert secret == {"token": TOKEN, "identities": {}}
    assert first["hosts"][0]["agent"]["run_id"] == RUN_ID
    world.comes("h0", 1, 0)
    version = world.wanted()["version"]
    heard: list[tuple[float, dict[str, Any]]] = []

    def wait() -> None:
        answer = world.wanted(version, 15.0)
        heard.append((time.monotonic(), answer))

    waiting = threading.Thread(target=wait)
    waiting.start()
    since = time.monotonic()
    world.report("h0", 1, "ended")
    waiting.join(20)
    (at, answer) = heard[0]
    assert at - since < 12, "not when its question is over"
    assert [(host["host"], host["attempt"]) for host in answer["hosts"]] == [("h0", 2), ("h1", 1)]
    listed = world.run.get("/v1/hosts").json()
    assert [host["host"] for host in listed["hosts"]] == ["h0", "h1"]
    assert listed["cost_usd"] == world.run.status()["hosts"][0]["cost_usd"]
    assert {path.name for path in holders(world.run.folder, TOKEN.encode())} == {"private.json"}


def test_output_of_the_others_is_followed_while_a_host_is_away(world: Launched) -> None:
    first, second = world.comes("h0", 1, 0), world.comes("h1", 1, 1)
    first.logs[0, 0, 1] = b"of the first\n"
    second.close()
    eventually(lambda: '"agent_disconnected"' in world.run.get("/v1/events").text)
    lines: list[dict[str, Any]] = []

    def read() -> None:
        lines.extend(json.loads(line) for line in world.run.get("/v1/logs").text.splitlines())

    reading = threading.Thread(target=read)
    reading.start()
    first.serve(lambda: not reading.is_alive())
    assert [line.get("line", line) for line in lines] == ["of the first"]


def test_a_head_elsewhere_keeps_the_end_of_its_run_until_that_was_collected(tmp_path: Path) -> None:
    one = Launched(tmp_path, collect_s=60.0)
    try:
        head = one.agents[0]
        with one.run.client() as client:
            client.post("/v1/down", json={"grace_s": 0})

            def over() -> bool:
                for host in one.wanted()["hosts"]:
                    if host["want"] == "down":
                        one.report(host["host"], host["attempt"], "down")
                return bool(one.wanted()["ended"])

            eventually(over, within_s=20)
            head.pump(0.5)
            assert not [told for told in head.commands if told["type"] == "shutdown"], (
                "the end is still here alone"
            )
            assert one.run.status()["state"] == "CANCELLED"
            assert client.post("/v1/collected").status_code == 202
        (order,) = head.told("shutdown")
        assert "CANCELLED" in order["reason"]
    finally:
        one.close()


def test_a_head_elsewhere_is_a_line_of_its_own_in_the_cost_and_in_the_budget(tmp_path: Path) -> None:
    one = Launched(tmp_path / "away", collect_s=60.0, budget={"max_usd": 100.0})
    bill = {"cluster": "demo-head", "place": "oci", "usd_per_hour": 40.0}
    since_ms = time.time_ns() // 1_000_000 - 2 * 3_600_000
    try:
        with one.run.client() as client:
            assert client.post("/v1/head", json={**bill, "since_ms": -1}).status_code == 400
            for _ in range(2):
                assert client.post("/v1/head", json={**bill, "since_ms": since_ms}).status_code == 202
        assert sum(event["event"] == "head_launched" for event in one.run.events()) == 1, "said once"
        one.comes("h0", 1, 0)
        one.killed()
        status = one.run.status()
        line = next(host for host in status["hosts"] if host["head"])
        assert (line["host"], line["groups"], line["phase"], line["usd_per_hour"]) == (
            "demo-head",
            [],
            "UP",
            40.0,
        )
        assert 80.0 <= line["cost_usd"] < 81.0
        assert 80.0 <= status["cost_usd"] < 82.0
        assert [host["head"] for host in status["hosts"] if host["host"] != "demo-head"] == [False, False]
        assert one.wants().keys() == {"h0", "h1"}, "nobody asks the launcher for it"
    finally:
        one.close()
    here = Launched(tmp_path / "here")
    try:
        with here.run.client() as client:
            refused = client.post("/v1/head", json={**bill, "since_ms": since_ms})
        assert refused.status_code == 400
        assert "the machine that launched it" in refused.text
    finally:
        here.close()


@pytest.mark.slow
def test_without_a_launcher_the_status_says_how_to_start_one(tmp_path: Path) -> None:
    one = Launched(tmp_path, collect_s=60.0)
    try:
        one.wanted()
        assert "sky-monarch attach" not in (one.run.status()["reason"] or "")

        def missing() -> str:
            reason = one.run.status()["reason"] or ""
            assert "waiting for launcher" in reason
            return reason

        reason = eventually(missing, within_s=30)
        assert "`sky-monarch attach demo` starts one, on the machine that launched the run" in reason
        one.wanted()
        assert "sky-monarch attach" not in (one.run.status()["reason"] or "")
    finally:
        one.close()


def test_a_host_that_waits_for_one_that_cannot_be_had_is_let_go_at_the_limit(tmp_path: Path) -> None:
    one = Launched(tmp_path, min_replicas=2, recovery={"idle_limit_s": 15.0})
    try:
        assert one.wants() == {"h0": (1, "up"), "h1": (1, "up")}
        one.report("h1", 1, "launching")
        one.report("h1", 1, "failed", kind="capacity", reason="no MI300X anywhere")
        one.report("h0", 1, "launching", **PRICE)
        one.report("h0", 1, "launched", **PRICE)
        agent = ScriptedAgent(one.run, host="h0", attempt=1).connect()
        one.agents.append(agent)
        agent.told("start_group")
        agent.start(0, 1)
        agent.groups[0]["state"] = "starting"  # it waits for its quorum
        agent.all_acked()
        eventually(
            lambda: one.wants() == {"h0": (1, "up"), "h1": (2, "up")}, what="the good one stays meanwhile"
        )
        one.killed()

        eventually(lambda: one.run.status()["state"] == "STOPPING", within_s=60, what="the limit is over")
        agent.told("stop_group")
        agent.stop(0)
        agent.all_acked()
        eventually(lambda: {want for _, want in one.wants().values()} == {"down"}, what="it costs no more")
        for host, (attempt, _) in one.wants().items():
            one.report(host, attempt, "down")
        final = eventually(lambda: one.run.final)
        assert (final["state"], final["exit_code"]) == ("FAILED", 3)
        assert "no MI300X anywhere" in final["reason"]
        assert "1 of 2 replica groups have a host, min_replicas is 2" in final["reason"]
    finally:
        one.close()
