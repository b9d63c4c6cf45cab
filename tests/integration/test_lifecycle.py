"""From ``up`` to ``down``, and what happens when somebody interferes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading

import pytest

from tests.support.processes import is_alive, zombies_of
from tests.support.runs import FREE_RANK, Workbench, ended_at_exit, pid_of
from tests.support.waiting import eventually

SLEEPER = "sleep 300"


def test_a_script_that_knows_nothing_of_us_runs_to_its_end(workbench: Workbench) -> None:
    job = workbench.job("plain", run="echo hello from $REPLICA_GROUP_ID of $NUM_REPLICA_GROUPS", replicas=2)
    done = workbench.cli("up", str(job))
    assert done.returncode == 0, done.stderr
    assert "hello from 0 of 2" in done.stdout
    assert "hello from 1 of 2" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert workbench.status("plain")["state"] == "SUCCEEDED"


def test_down_ends_everything_and_can_be_said_twice(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("down", run=SLEEPER))
    eventually(lambda: pid_of(workbench.status(name), 2))
    assert workbench.processes(name)
    first = workbench.cli("down", name)
    assert first.returncode == 0, first.stderr
    eventually(lambda: not workbench.processes(name), within_s=10)
    second = workbench.cli("down", name)
    assert second.returncode == 0, second.stderr
    assert "already" in second.stdout + second.stderr
    assert workbench.status(name)["state"] == "CANCELLED"


def test_down_during_setup_cancels_the_up_that_waits(workbench: Workbench) -> None:
    job = workbench.job("early", run=SLEEPER, setup="sleep 300")
    with ended_at_exit(workbench.popen("up", str(job))) as up:
        eventually(lambda: workbench.status("early")["state"] == "SETUP", within_s=30)
        workbench.names.append("early")
        assert workbench.cli("down", "early").returncode == 0
        _, stderr = up.communicate(timeout=20)
        assert up.returncode == 8, stderr
    eventually(lambda: not workbench.processes("early"), within_s=10)


@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_at_any_moment_of_up_leaves_nothing(workbench: Workbench, seed: int) -> None:
    job = workbench.job("ctrlc", run=SLEEPER, setup="sleep 0.3")
    moment = random.Random(seed).uniform(0.05, 2.5)
    with ended_at_exit(workbench.popen("up", str(job))) as up:
        timer = threading.Timer(moment, up.send_signal, (signal.SIGINT,))
        timer.start()
        _, stderr = up.communicate(timeout=30)
        assert up.returncode in {130, -signal.SIGINT}, (moment, up.returncode, stderr)
    runs = list((workbench.home / "runs").glob("ctrlc-*"))
    if runs:
        listed = json.loads(workbench.cli("status", "--all", "--json").stdout)
        assert [run["name"] for run in listed] == ["ctrlc"]
        assert workbench.cli("down", "ctrlc").returncode == 0
        eventually(lambda: not workbench.processes("ctrlc"), within_s=10)


@pytest.mark.parametrize("victim", ["controller_pid", "lighthouse"])
def test_the_head_agent_brings_its_services_back(workbench: Workbench, victim: str) -> None:
    name = workbench.up(workbench.job("services", run=f"{FREE_RANK} --steps 150"))
    before = workbench.wait_for_step(name, 20)
    pid = before["lighthouse"]["pid"] if victim == "lighthouse" else before[victim]
    os.kill(pid, signal.SIGKILL)
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert workbench.pids_spawned(name) == {replica: [pid_of(before, replica)] for replica in range(3)}


def test_ranks_do_not_outlive_their_agent(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("orphans", run=SLEEPER))
    status = eventually(lambda: (now := workbench.status(name)) and pid_of(now, 2) and now)
    os.kill(status["agent_pid"], signal.SIGKILL)
    for replica in range(3):
        eventually(lambda replica=replica: not is_alive(pid_of(status, replica)), within_s=5)
    assert workbench.status(name)["state"] == "LOST"
    assert workbench.cli("down", name).returncode == 0
    eventually(lambda: not workbench.processes(name), within_s=10)


def test_restarts_leave_no_zombie(workbench: Workbench) -> None:
    job = workbench.job(
        "zombies",
        run="sleep 0.2; exit 1",
        replicas=2,
        recovery={"max_restarts": 10, "backoff_s": 0, "backoff_max_s": 0},
    )
    name = workbench.up(job)
    status = workbench.status(name)
    eventually(lambda: workbench.status(name)["groups"][0]["generation"] >= 8, within_s=30)
    eventually(lambda: not zombies_of(status["agent_pid"]), within_s=5)
    workbench.wait_for_end(name)


def test_rehearsed_faults_happen_once_and_are_recovered(workbench: Workbench) -> None:
    job = workbench.job(
        "rehearsal", run=f"{FREE_RANK} --steps 100", recovery={"progress_limit_s": 3, "startup_limit_s": 20}
    )
    faults = [
        "kill:replica=0,rank=0,step=20",
        "exit:replica=1,rank=0,step=35",
        "hang:replica=2,rank=0,step=50",
    ]
    done = workbench.cli(
        "up", str(job), *[part for fault in faults for part in ("--inject", fault)], timeout_s=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    injected = [event for event in workbench.events("rehearsal") if event["event"] == "injected"]
    assert sorted((event["fault"], event["replica"]) for event in injected) == [
        ("exit", 1),
        ("hang", 2),
        ("kill", 0),
    ]
    assert [group["generation"] for group in workbench.status("rehearsal")["groups"]] == [2, 2, 2]
