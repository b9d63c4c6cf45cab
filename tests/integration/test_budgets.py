"""Restarts: slower and slower, counted over a death of the controller, forgotten after a quiet window, then no more."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.support.runs import FREE_RANK, Workbench, generation_of, pid_of
from tests.support.waiting import eventually

DELAYS_S = [0, 0.4, 0.8, 1.0]


def test_delays_double_and_are_kept_over_a_death_of_the_controller_and_the_last_one_fails_the_run(
    workbench: Workbench,
) -> None:
    recovery = {"max_restarts": len(DELAYS_S), "backoff_s": 0.4, "backoff_max_s": 1.0, "window_s": 120}
    job = workbench.job(
        "loop",
        run=f"{FREE_RANK} --steps 5000 --do '1:0:raise=broken on purpose!'",
        min_replicas=2,
        recovery=recovery,
    )
    name = workbench.up(job)
    before = eventually(
        lambda: (now := workbench.status(name)) and generation_of(now, 1) >= 2 and now, comes_always=True
    )
    os.kill(before["controller_pid"], signal.SIGKILL)
    workbench.wait_for_state(name, "DEGRADED")

    events = workbench.events(name)
    mine = [event for event in events if event.get("replica") == 1]
    delays_s = [event["delay_s"] for event in mine if event["event"] == "restart_scheduled"]
    assert delays_s == DELAYS_S
    scheduled_s = [event["mono_ns"] / 1e9 for event in mine if event["event"] == "restart_scheduled"]
    started_s = [event["mono_ns"] / 1e9 for event in mine if event["event"] == "generation_started"][1:]
    for planned_s, at_s, then_s in zip(delays_s, scheduled_s, started_s, strict=True):
        # No longer than a machine that is busy with other tests lets its agent wait.
        assert planned_s <= then_s - at_s < planned_s + 10.0, "it is also waited for"
    status = workbench.status(name)
    assert status["controller_pid"] != before["controller_pid"]
    assert status["groups"][1]["state"] == "GIVEN_UP"
    assert "replica 1" in status["reason"]

    # Progress makes the next restart immediate, but it is spent all the same: of the second group, too.
    for generation in range(1, len(DELAYS_S) + 2):
        now = eventually(
            lambda generation=generation: (
                (now := workbench.status(name))
                and generation_of(now, 2) == generation
                and now["groups"][2]["state"] == "RUNNING"
                and pid_of(now, 2)
                and now
            )
        )
        os.kill(pid_of(now, 2), signal.SIGKILL)
    after = workbench.wait_for_end(name)
    assert (after["state"], after["exit_code"]) == ("FAILED", 4)
    assert "replica 1 was given up after 4 restarts: rank 0 exited with code 1" in after["reason"], (
        "the first one that cost the run a group is its root cause"
    )
    delays_s = [
        event["delay_s"]
        for event in workbench.events(name)
        if event["event"] == "restart_scheduled" and event["replica"] == 2
    ]
    assert delays_s == [0.0] * len(DELAYS_S)


def test_a_window_without_a_failure_gives_the_budget_back(workbench: Workbench) -> None:
    window_s = 3.0
    # The third generation fails at once, and with that certainly within the window of the second's end.
    fails = 'if [ "$REPLICA_GROUP_ID $SKY_MONARCH_GENERATION" = "1 3" ]; then exit 7; fi'
    job = workbench.job(
        "quiet",
        run=f"{fails}\nexec {FREE_RANK} --steps 5000",
        replicas=2,
        recovery={"max_restarts": 1, "window_s": window_s},
    )
    name = workbench.up(job)

    def kill(generation: int) -> None:
        now = eventually(
            lambda: (
                (now := workbench.status(name))
                and generation_of(now, 1) == generation
                and now["groups"][1]["state"] == "RUNNING"
                and pid_of(now, 1)
                and now
            ),
            comes_always=generation == 1,
        )
        os.kill(pid_of(now, 1), signal.SIGKILL)

    kill(1)
    eventually(lambda: generation_of(workbench.status(name), 1) == 2, comes_always=True)
    time.sleep(window_s)  # nothing fails meanwhile: that is the condition
    eventually(lambda: workbench.status(name)["groups"][1]["restarts_left"] == 1, comes_always=True)
    kill(2)
    eventually(lambda: generation_of(workbench.status(name), 1) == 3, what="it is restarted once more")
    eventually(lambda: workbench.status(name)["groups"][1]["state"] == "GIVEN_UP")
    assert generation_of(workbench.status(name), 1) == 3


def test_what_a_killed_agent_has_spent_is_given_back_like_all_else(workbench: Workbench) -> None:
    window_s = 8.0
    job = workbench.job(
        "inherited",
        run=f"{FREE_RANK} --steps 5000",
        replicas=1,
        recovery={"max_restarts": 1, "window_s": window_s},
    )
    name = workbench.up(job)
    before = workbench.wait_for_step(name, 1)
    os.kill(before["agent_pid"], signal.SIGKILL)

    def runs(generation: int) -> dict[str, Any] | None:
        now = workbench.status(name)
        running = now["groups"][0]["state"] == "RUNNING" and pid_of(now, 0)
        return now if generation_of(now, 0) == generation and running else None

    def left() -> int:
        return workbench.status(name)["groups"][0]["restarts_left"]

    eventually(lambda: left() == 0, what="its keeper starts another agent", comes_always=True)
    now = eventually(lambda: runs(2), comes_always=True)
    # Nothing fails meanwhile: that is the condition.
    eventually(lambda: left() == 1, within_s=window_s + 20, what="it is given back", comes_always=True)
    os.kill(pid_of(now, 0), signal.SIGKILL)
    eventually(lambda: runs(3), what="what is left according to the status is also granted")


@pytest.mark.parametrize(("min_replicas", "state"), [(2, "SUCCEEDED"), (3, "FAILED")])
def test_a_group_that_never_asks_is_named_and_waited_for_no_longer_than_its_limits(
    workbench: Workbench, min_replicas: int, state: str
) -> None:
    join_s = 2.0
    limit_s = 10  # a busy machine needs some of that to start the others
    job = workbench.job(
        "late",
        run=f"{FREE_RANK} --steps 60 --do 2:0:sleep! --quorum-timeout-s 100",
        min_replicas=min_replicas,
        recovery={"startup_limit_s": limit_s, "max_restarts": 0},
        lighthouse={
            "join_timeout_s": join_s,
            "heartbeat_timeout_s": 1,
            "quorum_timeout_s": 60,
            "process_group_timeout_s": 30,
        },
    )
    name = workbench.up(job)
    after = workbench.wait_for_end(name)
    assert after["state"] == state, after["reason"]
    (record,) = after["recoveries"]
    cause = f"no first commit within {limit_s} s"
    assert (record["replica"], record["cause"], record["given_up"]) == (2, cause, True)
    assert "replica 2" in after["reason"]
    events = workbench.events(name)
    spawned_s = min(event["mono_ns"] for event in events if event["event"] == "rank_spawned") / 1e9
    commits_s = [event["mono_ns"] / 1e9 for event in events if event["event"] == "first_commit"]
    if state == "FAILED":
        assert commits_s == []
        assert after["reason"].endswith("min_replicas is 3"), after["reason"]
    else:
        assert len(commits_s) == 2
        assert min(commits_s) - spawned_s >= join_s, "so long the first quorum waits for all"
        (given_up,) = (event for event in events if event["event"] == "group_given_up")
        assert max(commits_s) < given_up["mono_ns"] / 1e9, "and no longer"
