"""From ``up`` to ``down``, and what happens when somebody interferes."""

from __future__ import annotations

import json
import os
import re
import signal
import threading

import pytest

from tests.support.processes import zombies_of
from tests.support.runs import FREE_RANK, Workbench, ended_at_exit, pid_of
from tests.support.waiting import PATIENCE, eventually

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
        stdout, stderr = up.communicate(timeout=20)
        assert up.returncode == 8, stdout + stderr
        assert "CANCELLED early-" in stdout
        assert ": down" in stdout, "it says by whom"
    eventually(lambda: not workbench.processes("early"), within_s=10)
    again = workbench.cli("down", "early")
    assert again.returncode == 0
    assert "already gone" in again.stdout
    assert not [event for event in workbench.events("early") if event["event"] == "rank_spawned"]


@pytest.mark.parametrize("moment_s", [0.0, 0.03, 0.08, 0.15])
def test_ctrl_c_while_the_command_itself_still_starts_leaves_nothing(
    workbench: Workbench, moment_s: float
) -> None:
    job = workbench.job("early", run=SLEEPER)
    with ended_at_exit(workbench.popen("up", str(job))) as up:
        timer = threading.Timer(moment_s, up.send_signal, (signal.SIGINT,))
        timer.start()
        out, err = up.communicate(timeout=30)
    # Before Python has a handler the signal itself ends it, which a shell shows as 130 too; while Python
    # starts up, its own words and code end it, before a line of ours.
    is_pythons_own = "KeyboardInterrupt" in err and "sky_monarch/" not in err
    assert up.returncode in {130, -signal.SIGINT} or is_pythons_own, (up.returncode, out, err)
    left = list((workbench.home / "runs").glob("early-*")) if workbench.home.exists() else []
    if left:
        listed = json.loads(workbench.cli("status", "--all", "--json").stdout)
        assert [run["name"] for run in listed] == ["early"]
        assert workbench.cli("down", "early").returncode == 0
        eventually(lambda: not workbench.processes("early"), within_s=10)


@pytest.mark.parametrize("victim", ["controller_pid", pytest.param("lighthouse", marks=pytest.mark.slow)])
def test_the_head_agent_brings_its_services_back(workbench: Workbench, victim: str) -> None:
    name = workbench.up(workbench.job("services", run=f"{FREE_RANK} --steps 150"))
    before = workbench.wait_for_step(name, 20)
    pid = before["lighthouse"]["pid"] if victim == "lighthouse" else before[victim]
    os.kill(pid, signal.SIGKILL)
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert workbench.pids_spawned(name) == {replica: [pid_of(before, replica)] for replica in range(3)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fifty_restarts_end_with_term_before_kill_and_leave_no_zombie(workbench: Workbench) -> None:
    script = workbench.folder / "stubborn.sh"
    script.write_text(
        """
        (trap 'echo $BASHPID >> termed; exit' TERM; touch hears.$$; while :; do sleep 0.1; done) &
        (trap '' TERM; echo $BASHPID >> deaf; touch deaf.$$; exec sleep 300) &
        until [ -e hears.$$ ] && [ -e deaf.$$ ]; do sleep 0.05; done
        exit 1
        """
    )
    recovery = {"max_restarts": 25, "backoff_s": 0, "backoff_max_s": 0, "grace_s": 1.5}
    job = workbench.job("fifty", run=f"bash {script}", replicas=2, recovery=recovery)
    name = workbench.up(job)
    agent = workbench.status(name)["agent_pid"]
    seen = workbench.processes(name)

    def restarted(times: int) -> bool:
        return all(group["restarts"] >= times for group in workbench.status(name)["groups"])

    eventually(lambda: restarted(20), within_s=150, every_s=0.2)
    # One that has just died is a zombie for the moment until it is reaped: none may stay one.
    eventually(lambda: not zombies_of(agent))
    after = workbench.wait_for_end(name)
    assert [group["restarts"] for group in after["groups"]] == [25, 25], after["reason"]
    eventually(lambda: not workbench.processes(name), within_s=10)
    assert seen

    told = re.findall(r"ends a process pid=(\d+) signal=\"(TERM|KILL)\"", log_of(workbench, name))
    by_pid: dict[str, list[str]] = {}
    for pid, number in told:
        by_pid.setdefault(pid, []).append(number)
    wrong = {pid: numbers for pid, numbers in by_pid.items() if numbers[0] != "TERM"}
    assert not wrong, "TERM comes first"
    deaf = (workbench.folder / "deaf").read_text().split()
    termed = (workbench.folder / "termed").read_text().split()
    assert len(deaf) >= 50
    assert len(termed) >= 50
    assert all(by_pid[pid][:2] == ["TERM", "KILL"] for pid in deaf), "who does not hear gets KILL"


def log_of(workbench: Workbench, name: str) -> str:
    """The agent's own log, without colours."""
    text = (workbench.run_folder(name) / "agent.log").read_text()
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_rehearsed_faults_happen_once_and_are_recovered(workbench: Workbench) -> None:
    job = workbench.job(
        "rehearsal", run=f"{FREE_RANK} --steps 220", recovery={"progress_limit_s": 4, "startup_limit_s": 30}
    )
    faults = [
        "kill:replica=0,rank=0,step=20",
        "exit:replica=1,rank=0,step=35",
        "hang:replica=2,rank=0,step=50",
    ]
    done = workbench.cli(
        "up", str(job), *[part for fault in faults for part in ("--inject", fault)], timeout_s=90 * PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    injected = [event for event in workbench.events("rehearsal") if event["event"] == "injected"]
    assert sorted((event["fault"], event["replica"]) for event in injected) == [
        ("exit", 1),
        ("hang", 2),
        ("kill", 0),
    ]
    assert [group["generation"] for group in workbench.status("rehearsal")["groups"]] == [2, 2, 2]
