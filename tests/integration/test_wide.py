"""Replica groups that have two hosts each, on this machine: ``up --hosts 4`` with two groups."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.launch.process import carrying
from tests.support.processes import is_alive
from tests.support.runs import FREE_RANK, ROOT, Workbench, generation_of, pid_of
from tests.support.waiting import eventually


def wide(bench: Workbench, name: str, *, run: str = f"{FREE_RANK} --steps 100000", **fields: Any) -> str:
    """Two groups of two ranks, each rank on a host of its own: group 1 is on h2 and h3."""
    return bench.up(bench.job(name, run=run, replicas=2, ranks_per_replica=2, **fields), "--hosts", "4")


def pids(status: dict[str, Any], replica: int) -> list[int]:
    return [pid_of(status, replica, rank) for rank in (0, 1)]


def attempts(status: dict[str, Any]) -> list[int]:
    return [host["attempt"] for host in status["hosts"]]


def kill_host(run_dir: Path, life: str) -> None:
    """As a machine that is switched off: nothing of it says a word."""
    leader = json.loads((run_dir / "hosts" / life / "process.json").read_text())["pid"]
    os.killpg(leader, signal.SIGKILL)


def printed(bench: Workbench, name: str) -> str:
    """What all ranks have printed, from the folders of hosts that are gone: the controller has none of it."""
    files = sorted((bench.folder_of(name).path / "hosts").glob("*/logs/r*/g*.log"))
    return "".join(file.read_text() for file in files)


def came_back(bench: Workbench, name: str, before: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Group 1 commits again, on both of its hosts, and group 0 has gone on untouched."""

    def back() -> dict[str, Any]:
        now = bench.status(name)
        assert generation_of(now, 1) > generation_of(before, 1), now["groups"][1]
        assert now["groups"][1]["state"] == "RUNNING", (now["groups"][1], now["reason"])
        assert all(pids(now, 1)), now["groups"][1]
        assert (now["groups"][1]["step"] or 0) > before["step"], now["groups"][1]
        return now

    def all_of_it() -> dict[str, Any]:
        now = back()
        assert not set(pids(now, 1)) & set(pids(before, 1)), "the ranks on both hosts are new"
        assert not any(is_alive(pid) for pid in pids(before, 1)), "I1: one live generation"
        assert pids(now, 0) == pids(before, 0), "the other group was not touched"
        return now

    return all_of_it


def assert_no_step_lost(bench: Workbench, name: str) -> None:
    """The survivor has committed each step once, in order."""
    text = bench.cli("logs", name, "--replica", "0", "--rank", "0").stdout
    steps = [int(step) for step in re.findall(r"step (\d+) at", text)]
    assert len(steps) > 10
    assert all(after == before + 1 for before, after in pairwise(steps)), steps


@pytest.mark.slow
def test_a_killed_rank_restarts_its_group_on_both_hosts_and_the_others_train_on(workbench: Workbench) -> None:
    name = wide(workbench, "kill", recovery={"standby": 1}, preload=["json"])
    before = workbench.wait_for_step(name, 10)
    assert [(host["host"], host["groups"]) for host in before["hosts"]] == [
        ("kill-h0", [0]),
        ("kill-h1", [0]),
        ("kill-h2", [1]),
        ("kill-h3", [1]),
    ]
    ready = {("standby_ready", 1, 0), ("standby_ready", 1, 1)}
    eventually(
        lambda: ready <= {(e["event"], e.get("replica"), e.get("rank")) for e in workbench.events(name)},
        within_s=30,
    )

    # Rank 1 asks the lighthouse for nothing: that its group is over it has to be told.
    os.kill(pid_of(before, 1, 0), signal.SIGKILL)

    after = eventually(came_back(workbench, name, before), within_s=30)
    assert generation_of(after, 1) == 2
    assert attempts(after) == [1, 1, 1, 1], "its hosts are the same"
    assert [group["restarts_left"] for group in after["groups"]] == [5, 4], "one restart, for both hosts"
    (recovery,) = after["recoveries"]
    assert recovery["cause"] == "rank 0 was killed by SIGKILL"
    assert (recovery["generation"], recovery["next_generation"]) == (1, 2)
    assert recovery["evict_s"] is not None
    assert recovery["warm"] is True, "each host has kept the standby of its own rank"
    events = workbench.events(name)
    at = {
        (event["event"], event.get("host")): index
        for index, event in enumerate(events)
        if event.get("replica") == 1 and event.get("generation") in (1, 2)
    }
    started = at["generation_started", "kill-h2"], at["generation_started", "kill-h3"]
    ends = [at["generation_ended", "kill-h2"], at["generation_ended", "kill-h3"]]
    assert max(ends) < min(started), "I1: nothing of the one before was left on any host"
    assert at["evicted", "kill-h2"] < min(started), "I4"
    assert_no_step_lost(workbench, name)
    assert workbench.cli("down", name, "--grace", "1").returncode == 0
    assert carrying(workbench.folder_of(name).run_id) == []


@pytest.mark.slow
def test_a_lost_host_of_a_group_is_replaced_alone_and_its_group_starts_again_on_both(
    workbench: Workbench,
) -> None:
    name = wide(workbench, "host")
    before = workbench.wait_for_step(name, 10)

    kill_host(workbench.folder_of(name).path, "host-h3-a1")

    after = eventually(came_back(workbench, name, before), within_s=60)
    assert attempts(after) == [1, 1, 1, 2], "it was replaced alone"
    left = [[group["restarts_left"] for group in now["groups"]] for now in (before, after)]
    assert left[0] == left[1], "what a host costs is not taken from the budget of its group"
    assert_no_step_lost(workbench, name)


@pytest.mark.slow
def test_a_host_that_is_told_to_leave_takes_its_group_along_in_order(workbench: Workbench) -> None:
    name = wide(workbench, "notice", run=f"{FREE_RANK} --steps 100000 --heed")
    before = workbench.wait_for_step(name, 10)
    folder = workbench.folder_of(name).path

    keeper = json.loads((folder / "hosts/notice-h3-a1/process.json").read_text())["pid"]
    os.kill(keeper, signal.SIGTERM)

    after = eventually(came_back(workbench, name, before), within_s=60)
    assert attempts(after) == [1, 1, 1, 2]
    assert [group["restarts_left"] for group in after["groups"]] == [5, 5]
    assert after["recoveries"] == [], "nothing died"
    left = printed(workbench, name).count("leaves after step")
    assert left == 2, "the ranks on both hosts have finished their step"
    assert_no_step_lost(workbench, name)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "host"])
def test_a_controller_that_is_killed_in_the_middle_of_it_changes_nothing(
    workbench: Workbench, victim: str
) -> None:
    name = wide(workbench, "both")
    before = workbench.wait_for_step(name, 10)

    if victim == "host":
        kill_host(workbench.folder_of(name).path, "both-h3-a1")
    else:
        os.kill(pid_of(before, 1, 1), signal.SIGKILL)
    os.kill(before["controller_pid"], signal.SIGKILL)

    after = eventually(came_back(workbench, name, before), within_s=60)
    assert after["controller_pid"] != before["controller_pid"]
    assert attempts(after) == [1, 1, 1, 2 if victim == "host" else 1]
    assert_no_step_lost(workbench, name)


@pytest.mark.slow
def test_a_crash_loop_on_one_host_spends_one_budget_and_the_run_goes_on_without_the_group(
    workbench: Workbench,
) -> None:
    run = f"{FREE_RANK} --steps 100000 --do 1/1:3:exit=3!"
    name = wide(workbench, "loop", run=run, recovery={"max_restarts": 2})

    def given_up() -> dict[str, Any]:
        now = workbench.status(name)
        assert now["groups"][1]["state"] == "GIVEN_UP", now["groups"][1]
        return now

    now = eventually(given_up, within_s=60)
    assert now["state"] == "DEGRADED", now["reason"]
    assert "after 2 restarts: rank 1 exited with code 3" in now["groups"][1]["reason"]
    assert generation_of(now, 1) == 3, "I3: one budget for both hosts"
    eventually(lambda: not any(pids(workbench.status(name), 1)), within_s=10)
    assert all(pids(now, 0))


@pytest.mark.slow
def test_a_command_that_never_runs_on_one_of_two_hosts_is_given_up_after_three_tries(
    workbench: Workbench,
) -> None:
    # The second host lacks the program; the first one's rank waits for it.
    run = 'cd / && if [ "$RANK" = 1 ]; then trian --all; else sleep 100; fi'
    recovery = {"max_restarts": 8, "backoff_s": 0.1}
    job = workbench.job("vain", run=run, replicas=1, ranks_per_replica=2, recovery=recovery)
    ended = workbench.wait_for_end(workbench.up(job, "--hosts", "2"))

    assert (ended["state"], ended["exit_code"]) == ("FAILED", 4)
    line = "exit code 127: bash: line 1: trian: command not found"
    assert f"its command cannot be started, 3 times in a row: {line}" in ended["reason"]
    assert [group["restarts"] for group in ended["groups"]] == [2], "not all of its restarts"
    given = [event for event in workbench.events("vain") if event["event"] == "group_given_up"]
    assert [(event["cause"], event["error"]) for event in given] == [("cannot_start", line)]
    assert line in workbench.cli("events", "vain").stdout


@pytest.mark.slow
def test_a_group_is_done_when_its_ranks_on_all_hosts_are(workbench: Workbench) -> None:
    # Rank 1 is done long before rank 0 dies: it has to do the rest again.
    name = wide(workbench, "done", run=f"{FREE_RANK} --steps 60 --do 1/0:55:sleep=6 --do 1/0:56:kill")

    after = workbench.wait_for_end(name)

    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [generation_of(after, replica) for replica in (0, 1)] == [1, 2], "done means done on all hosts"
    exits = [rank["exit"] for group in after["groups"] for rank in group["ranks"]]
    assert all(one and one["code"] == 0 for one in exits), exits


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_torchrun_script_meets_its_ranks_on_the_other_host(workbench: Workbench) -> None:
    job = workbench.job(
        "plain",
        run=f"{sys.executable} {ROOT}/examples/plain_script.py --rounds 100",
        replicas=2,
        ranks_per_replica=2,
    )
    name = workbench.up(job, "--hosts", "4", "--inject", "kill:replica=1,rank=1,after=2")

    after = workbench.wait_for_end(name, within_s=180)

    assert after["state"] == "SUCCEEDED", after["reason"]
    for rank in (0, 1):
        spawned = workbench.pids_spawned(name, rank)
        assert (len(spawned[0]), len(spawned[1])) == (1, 2)
    assert printed(workbench, name).count("of 2: 100 rounds, all sums right") == 4


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_session_of_two_hosts_heals_and_all_end_bit_equal(workbench: Workbench) -> None:
    """TorchFT's manager is rank 0's: the rank on the other host reaches it through the group's store."""
    gate = workbench.folder / "go"
    words = [sys.executable, "-m", "tests.support.staged", str(gate)]
    run = shlex.join([*words, f"{ROOT}/examples/train.py", "--steps", "300"])
    job = workbench.job("train", run=run, replicas=2, ranks_per_replica=2)
    name = workbench.up(job, "--hosts", "4")

    def trains() -> dict[str, Any]:
        status = workbench.status(name)
        assert all((group["step"] or 0) >= 3 for group in status["groups"]), status["groups"]
        return status

    before = eventually(trains, within_s=180, every_s=0.5)
    os.kill(pid_of(before, 1, 1), signal.SIGKILL)

    def healed() -> bool:
        return any(
            (event["event"], event.get("replica"), event.get("generation")) == ("first_commit", 1, 2)
            for event in workbench.events(name)
        )

    eventually(healed, within_s=120, every_s=0.5)
    gate.touch()
    after = workbench.wait_for_end(name, within_s=120)

    assert after["state"] == "SUCCEEDED", after["reason"]
    (recovery,) = after["recoveries"]
    assert (recovery["replica"], recovery["generation"], recovery["heal_donor"]) == (1, 1, 0)
    spawned = workbench.pids_spawned(name)
    assert spawned[0] == [pid_of(before, 0)], "the other group was not touched"
    found = re.findall(r"replica (\d+) step (\d+) digest (\w+)", printed(workbench, name))
    assert {replica for replica, _, _ in found} == {"0", "1"}
    assert len({(step, digest) for _, step, digest in found}) == 1, found
