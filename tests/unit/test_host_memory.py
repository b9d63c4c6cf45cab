"""What a controller remembers of hosts: a summary stands for all rows before it, and older ones are understood."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.memory import Memory
from tests.support.host_policies import LIMITS

HOSTS: dict[str, tuple[int, ...]] = {"head": (), "h0": (0,), "h1": (1,), "h2": (2,)}
NOW = (10**12, 10**9)


def memory() -> Memory:
    provisioned = {"h0", "h1", "h2"}
    return Memory(LIMITS, HOSTS, has_setup=True, checkpoint_target=None, provisioned=provisioned)


def rows() -> list[dict[str, Any]]:
    """Hosts in every state."""
    found: list[dict[str, Any]] = []

    def add(event: str, **fields: Any) -> None:
        at = len(found) + 1
        found.append({"event": event, "mono_ns": at * 10**9, "wall_ms": at * 1000, **fields})

    def said(host: str, attempt: int, state: str, **more: Any) -> None:
        fields = {"kind": None, "reason": None, "choice": 1, "place": "there", "usd_per_hour": 8.0, **more}
        add("host_report", host=host, attempt=attempt, state=state, **fields)

    def comes(host: str, attempt: int, incarnation: int) -> None:
        said(host, attempt, "launching")
        said(host, attempt, "launched")
        probe = f"10.0.0.{incarnation}:1"
        add(
            "agent_connected",
            host=host,
            attempt=attempt,
            incarnation=incarnation,
            pid=1,
            groups=[],
            probe=probe,
        )
        add("setup_started", host=host)
        add("setup_finished", host=host, exit={"code": 0}, timed_out=False, tail=[])

    def trains(host: str, replica: int, generation: int) -> None:
        whose = {"replica": replica, "generation": generation, "host": host}
        add("generation_started", **whose)
        add("rank_spawned", **whose, rank=0, pid=5, warm=False)
        add("first_commit", **whose, step=1)

    def reach(host: str, *others: str) -> None:
        targets = [{"host": o, "address": "a:1", "ok": True, "error": None, "rtt_s": 0.1} for o in others]
        add("reached", host=host, targets=targets, **{"from": "a"})

    add("controller_started")
    add("agent_connected", host="head", incarnation=1, pid=1, groups=[])
    add("launcher_came")
    comes("h0", 1, 2)
    trains("h0", 0, 1)
    comes("h1", 1, 3)
    reach("h1", "h0")
    reach("h0", "h1")
    trains("h1", 1, 1)
    said("h2", 1, "launching", usd_per_hour=None)
    said("h2", 1, "failed", kind="capacity", reason="no room")
    add("timer_fired", timer="host:h2")
    add("host_leaving", host="h1", kind="SIGTERM", reason="taken away", grace_s=30.0)
    add("group_stopped", replica=1, generation=1, host="h1")
    add("agent_disconnected", host="h1", reason="gone")
    add("launcher_gone", silent_s=15.0)
    add("launcher_came")
    comes("h1", 2, 4)
    reach("h1", "h0")
    said("h2", 2, "failed", kind="refused", reason="quota")
    add("budget_spent", reason="the budget is spent")
    add("group_stopped", replica=0, generation=1)
    add("timer_fired", timer="stop")
    add("timer_fired", timer="reap")
    said("h0", 1, "down")
    said("h1", 2, "down_failed", reason="the API answered 500")
    add("timer_fired", timer="reap")
    return found


def known(one: Memory) -> dict[str, Any]:
    hosts = [one.money.document(host.name, *NOW) for host in one.state.hosts]
    return {"state": one.state, "timers": one.timers, "hosts": hosts, "all": one.summary()}


def test_the_history_of_these_tests_has_what_it_is_to_have() -> None:
    seen: list[model.State] = []
    one = memory()
    for row in rows():
        one.apply(row)
        seen.append(one.state)
    phases = {host.phase for state in seen for host in state.hosts}
    assert phases == set(model.HostPhase)
    assert {state.reaping for state in seen} == set(model.Reaping)
    assert any(host.pairs for state in seen for host in state.hosts)
    assert one.state.phase is model.RunPhase.FAILED
    assert one.state.exit_code == 9
    assert one.state.reason == "the budget is spent; host h1 may still bill: the API answered 500"


@pytest.mark.parametrize("at", range(len(rows()) + 1))
def test_with_a_summary_in_place_of_any_number_of_rows_the_rest_leads_to_the_same(at: int) -> None:
    whole, first = memory(), memory()
    for row in rows():
        whole.apply(row)
    for row in rows()[:at]:
        first.apply(row)
    second = memory()
    second.restore(json.loads(json.dumps(first.summary())))
    assert known(second) == known(first)
    for row in rows()[at:]:
        second.apply(row)
    assert known(second) == known(whole)


def test_a_summary_of_an_older_version_knows_nothing_of_hosts_and_is_taken_up() -> None:
    one = Memory(LIMITS, {"local": (0, 1, 2)}, has_setup=False, checkpoint_target=None)
    stamp = {"mono_ns": 5, "wall_ms": 6}
    one.apply({"event": "controller_started", **stamp})
    one.apply(
        {"event": "agent_connected", "host": "local", "incarnation": 7, "pid": 1, "groups": [], **stamp}
    )
    summary = json.loads(json.dumps(one.summary()))
    del summary["money"], summary["since_ms"]
    for name in set(summary["state"]) - {
        *("phase", "reason", "outcome", "exit_code", "grace_s", "groups", "hosts", "places"),
        *("unready", "draining", "released", "root_cause", "notes"),
    }:
        del summary["state"][name]
    for host in summary["state"]["hosts"]:
        for name in set(host) - {"name", "replicas", "connected", "incarnation", "lost", "setup"}:
            del host[name]
    for group in summary["state"]["groups"]:
        del group["away"]
    again = Memory(LIMITS, {"local": (0, 1, 2)}, has_setup=False, checkpoint_target=None)
    again.restore(summary)
    assert again.state == one.state
    actions = again.apply({"event": "agent_disconnected", "host": "local", "reason": "gone", **stamp})
    assert [type(action).__name__ for action in actions] == ["SetTimer"]


def test_a_lost_host_is_a_failure_of_each_of_its_groups_that_counts_from_when_it_fell_silent() -> None:
    one, at_s = memory(), 100

    def add(event: str, after_s: int = 0, **fields: Any) -> None:
        nonlocal at_s
        at_s += after_s
        row = {"event": event, "mono_ns": at_s * 10**9, "wall_ms": at_s * 1000, **fields}
        for action in one.apply(row):
            if isinstance(action, model.HostLost):
                groups = [one.book.lost(*lost) for lost in action.groups]
                add("host_lost", host=action.host, groups=groups, reason=action.reason)

    def trains(replica: int, generation: int, step: int, after_s: int) -> None:
        whose = {"replica": replica, "generation": generation, "host": f"h{replica}"}
        add("generation_started", **whose)
        add("rank_spawned", **whose, rank=0, pid=5, warm=False)
        add("first_commit", after_s, **whose, step=step)

    for row in rows():
        if row["event"] == "host_leaving":
            break
        one.apply(row)
    progress = {"slot": {"replica": 0, "rank": 0}, "generation": 1, "step": 40, "quorum_id": 7, "mono_ns": 5}
    one.book.progress({**progress, "metrics": {}})
    add("agent_disconnected", host="h0", reason="gone")
    add("timer_fired", 30, timer="agent:h0")
    add("quorum_changed", replica=1, generation=1, step=41, quorum_id=8, participants=1)
    add("agent_connected", 5, host="h0", attempt=2, incarnation=9, pid=1, groups=[])
    add("setup_finished", host="h0", exit={"code": 0}, timed_out=False, tail=[])
    trains(0, one.state.groups[0].generation, 70, after_s=3)
    again = memory()
    again.restore(json.loads(json.dumps(one.summary())))
    (record,) = again.book.recoveries.documents()
    assert (record["replica"], record["generation"]) == (0, 1)
    assert record["cause"] == "host h0 was lost: its agent was silent for 30 s"
    assert (record["step"], record["lost_steps"]) == (40, 29)
    assert (record["detect_s"], record["quorum_s"], record["first_commit_s"]) == (30, 30, 38)


def test_a_host_that_left_in_order_is_no_failure() -> None:
    one, actions = memory(), []
    for row in rows():
        actions += one.apply(row)
    lost = [action for action in actions if isinstance(action, model.HostLost)]
    assert lost == [], "h1 has said that it leaves"
