"""Standbys that run the job's script ahead: promoted, killed, and running into their own defects."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from tests.support.processes import is_alive
from tests.support.runs import FREE_RANK, Workbench, generation_of, pid_of
from tests.support.waiting import eventually

Event = dict[str, Any]


def start(workbench: Workbench, name: str, *, ahead: str = "", steps: int = 2000, **fields: Any) -> str:
    command = f"{FREE_RANK} --steps {steps}" + (f" --ahead {ahead}" if ahead else "")
    recovery = {"standby": 1, "standby_until": "session", **fields.pop("recovery", {})}
    return workbench.up(workbench.job(name, run=command, replicas=2, recovery=recovery, **fields))


def seen(workbench: Workbench, name: str, kind: str, **fields: Any) -> list[Event]:
    return [
        event
        for event in workbench.events(name)
        if event["event"] == kind and fields.items() <= event.items()
    ]


def standby_of(workbench: Workbench, name: str, replica: int) -> int:
    """Pid of a standby that is ready and was not used yet."""

    def probe() -> int:
        used = {event["pid"] for event in seen(workbench, name, "rank_spawned", replica=replica)}
        ready = [event["pid"] for event in seen(workbench, name, "standby_ready", replica=replica)]
        fresh = [pid for pid in ready if pid not in used and is_alive(pid)]
        assert fresh, (ready, used)
        return fresh[-1]

    return eventually(probe, within_s=30)


def kill_and_see_it_back(
    workbench: Workbench, name: str, replica: int, spawned: Callable[[], object] = lambda: None
) -> Event:
    """Kill rank 0 of a group; how its next generation was spawned, once that has committed.

    Args:
        workbench: Of the test.
        name: The run.
        replica: The group.
        spawned: Called between the two.
    """
    now = eventually(lambda: (now := workbench.status(name)) and pid_of(now, replica) and now)
    generation = generation_of(now, replica) + 1
    os.kill(pid_of(now, replica), signal.SIGKILL)
    back = {"replica": replica, "generation": generation}
    eventually(lambda: seen(workbench, name, "rank_spawned", **back), within_s=30)
    spawned()
    eventually(lambda: seen(workbench, name, "first_commit", **back), within_s=30)
    (event,) = seen(workbench, name, "rank_spawned", **back)
    return event


def log(workbench: Workbench, name: str, pattern: str) -> str:
    """Captured output of rank 0 of replica 1."""
    paths = sorted(workbench.run_folder(name).glob(f"logs/r1-0/{pattern}"))
    return "".join(path.read_text() for path in paths)


def test_a_standby_that_ran_ahead_becomes_the_rank_and_was_nobody_before(workbench: Workbench) -> None:
    name = start(workbench, "hot")
    workbench.wait_for_step(name, 5)
    standby = standby_of(workbench, name, 1)
    at_ready = workbench.status(name)
    eventually(lambda: workbench.status(name)["step"] >= at_ready["step"] + 20)
    assert workbench.status(name)["quorum"]["participants"] == 2, "who stands by takes part in nothing"

    spawned = kill_and_see_it_back(workbench, name, 1)

    assert (spawned["warm"], spawned["pid"]) == (True, standby)
    assert f"pid {standby} runs ahead" in log(workbench, name, "standby-*.log")
    starts = f"starts as generation 2, pid {standby}"
    eventually(lambda: starts in log(workbench, name, "g2-*.log"), what="its output is there")
    assert "runs ahead" not in log(workbench, name, "g2-*.log"), "it did not run twice"
    eventually(lambda: workbench.status(name)["quorum"]["participants"] == 2)


def test_a_standby_that_is_killed_is_replaced_by_one_that_serves(workbench: Workbench) -> None:
    name = start(workbench, "lost")
    first = standby_of(workbench, name, 1)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not is_alive(first))
    second = standby_of(workbench, name, 1)
    assert second != first
    spawned = kill_and_see_it_back(workbench, name, 1)
    assert (spawned["warm"], spawned["pid"]) == (True, second)


def test_two_deaths_in_a_row_find_it_ready_on_its_way_or_not_there(workbench: Workbench) -> None:
    name = start(workbench, "twice", recovery={"backoff_s": 0})
    standby_of(workbench, name, 1)
    pids = [kill_and_see_it_back(workbench, name, 1)["pid"] for _ in range(3)]
    assert len(set(pids)) == 3
    status = workbench.status(name)
    assert generation_of(status, 1) == 4
    assert generation_of(status, 0) == 1


def test_a_script_that_crashes_ahead_stands_by_with_its_imports_and_is_not_run_ahead_again(
    workbench: Workbench,
) -> None:
    name = start(workbench, "crash", ahead="raise=broken")
    standby = standby_of(workbench, name, 1)
    eventually(lambda: seen(workbench, name, "notice", replica=1))
    (notice,) = seen(workbench, name, "notice", replica=1)
    assert "cannot be run ahead" in notice["message"]
    spawned = kill_and_see_it_back(workbench, name, 1)
    assert (spawned["warm"], spawned["pid"]) == (True, standby)
    standby_of(workbench, name, 1)
    eventually(lambda: "ValueError: broken" in log(workbench, name, "standby-*.log"))
    assert log(workbench, name, "standby-*.log").count("runs ahead") == 1


def test_a_script_that_takes_its_process_down_ahead_is_not_run_ahead_again(workbench: Workbench) -> None:
    name = start(workbench, "abort", ahead="kill")
    eventually(lambda: seen(workbench, name, "notice", replica=1), within_s=30)
    standby = standby_of(workbench, name, 1)
    assert log(workbench, name, "standby-*.log").count("runs ahead") == 1
    spawned = kill_and_see_it_back(workbench, name, 1)
    assert (spawned["warm"], spawned["pid"]) == (True, standby)


def test_a_standby_is_promoted_on_its_way(workbench: Workbench) -> None:
    name = start(workbench, "early", ahead=f"await={workbench.gate}")
    eventually(lambda: "runs ahead" in log(workbench, name, "standby-*.log"), within_s=30)
    spawned = kill_and_see_it_back(workbench, name, 1, workbench.gate.touch)
    assert not spawned["warm"], "it was not ready"
    assert not seen(workbench, name, "standby_ready", pid=spawned["pid"])
    assert log(workbench, name, "standby-*.log").startswith(f"pid {spawned['pid']} runs ahead")


def test_every_rank_of_a_group_has_its_own(workbench: Workbench) -> None:
    name = start(workbench, "pairs", ranks_per_replica=2)
    eventually(lambda: len(seen(workbench, name, "standby_ready", replica=1)) == 2, within_s=30)
    standbys = {event["rank"]: event["pid"] for event in seen(workbench, name, "standby_ready", replica=1)}
    now = workbench.status(name)
    os.kill(pid_of(now, 1, rank=1), signal.SIGKILL)
    back = {"replica": 1, "generation": 2}
    eventually(lambda: seen(workbench, name, "first_commit", **back), within_s=30)
    spawned = {event["rank"]: event["pid"] for event in seen(workbench, name, "rank_spawned", **back)}
    assert spawned == standbys
