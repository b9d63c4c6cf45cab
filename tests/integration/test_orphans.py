"""The supervisor itself dies: its ranks do not live on, and a new one takes the run up again."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from sky_monarch.launch.process import Process
from tests.support.processes import children_of, is_alive, send
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.waiting import eventually

# Leaves its session, its environment and its parent behind.
STRAY = "(env -i setsid bash -c 'echo $$ >> {file}; exec sleep 300' &)"


def spawned(workbench: Workbench, name: str) -> list[dict]:
    return [event for event in workbench.events(name) if event["event"] == "rank_spawned"]


def strays_in(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def test_a_killed_agent_is_replaced_and_no_rank_lives_twice(workbench: Workbench) -> None:
    """Also what had left the session of its rank, its environment too, ends before another life begins."""
    file = workbench.folder / "strays"
    run = f"{STRAY.format(file=file)}; exec {FREE_RANK} --steps 100 --step-s 0.05 {workbench.ease(10)}"
    name = workbench.up(workbench.job("again", run=run, replicas=2))
    before = workbench.wait_for_step(name, 5)
    strays = eventually(lambda: len(found := strays_in(file)) == 2 and found)
    old = [pid_of(before, replica) for replica in range(2)] + strays
    os.kill(before["agent_pid"], signal.SIGKILL)

    def replaced() -> list[dict]:
        again = spawned(workbench, name)
        assert len(again) < 3 or not [pid for pid in old if is_alive(pid)], "two lives of one rank"
        return again if len(again) == 4 else []

    eventually(lambda: not [pid for pid in old if is_alive(pid)], within_s=15)
    again = eventually(replaced, within_s=30)
    workbench.gate.touch()
    assert [event["generation"] for event in again] == [1, 1, 2, 2]
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert after["agent_pid"] != before["agent_pid"]
    assert [group["generation"] for group in after["groups"]] == [2, 2]
    eventually(lambda: not workbench.processes(name), within_s=10)
    assert not [pid for pid in strays_in(file) if is_alive(pid)]


def test_a_run_outlives_the_keeper_of_its_agent(workbench: Workbench) -> None:
    run = f"exec {FREE_RANK} --steps 60 {workbench.ease(10)}"
    name = workbench.up(workbench.job("bare", run=run, replicas=2))
    before = workbench.wait_for_step(name, 5)
    keeper = workbench.folder_of(name).process("agent")
    assert keeper
    assert keeper.pid != before["agent_pid"]
    keeper.signal(signal.SIGKILL)
    eventually(lambda: not keeper.alive)
    assert workbench.status(name)["state"] == "RUNNING"
    workbench.gate.touch()
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [group["generation"] for group in after["groups"]] == [1, 1]
    eventually(lambda: not workbench.processes(name), within_s=10)


@pytest.mark.slow
def test_without_a_keeper_the_run_is_lost_but_its_ranks_still_end(workbench: Workbench) -> None:
    """Also ranks that ignore TERM; what left their session is reaped by ``down``."""
    run = "(setsid sleep 300 &); trap '' TERM; sleep 300; sleep 300"
    name = workbench.up(workbench.job("orphans", run=run))
    ranks = [workbench.running_pid(name, replica) for replica in range(3)]
    workbench.kill_agent_for_good(name)
    for rank in ranks:
        eventually(lambda rank=rank: not is_alive(rank), within_s=15)
    assert workbench.status(name)["state"] == "LOST"
    assert workbench.cli("down", name).returncode == 0
    eventually(lambda: not workbench.processes(name), within_s=10)


@pytest.mark.slow
def test_an_agent_that_is_killed_again_and_again_is_given_up(workbench: Workbench) -> None:
    """Ten short lives; the job's own restarts are counted apart."""
    recovery = {"max_restarts": 100, "backoff_s": 0, "backoff_max_s": 0}
    name = workbench.up(workbench.job("doomed", run="sleep 300", replicas=1, recovery=recovery))
    folder = workbench.folder_of(name)
    keeper = folder.process("agent")
    assert keeper
    log = folder.path / "agent.log"
    deaths = 0

    def agents() -> list[int]:
        """A fork of the keeper, which is handed what a dead one leaves behind, too, until it has ended that."""
        children = [one for pid in children_of(keeper.pid) if (one := Process.of(pid))]
        return [one.pid for one in children if one.arguments() == keeper.arguments()]

    while keeper.alive:
        eventually(lambda: agents() or not keeper.alive, within_s=15)
        for pid in agents():
            send([pid], signal.SIGKILL)
            deaths += 1
            eventually(lambda pid=pid: not is_alive(pid))
        time.sleep(0.01)
    eventually(lambda: not keeper.alive, within_s=10)
    text = log.read_text()
    assert deaths == 10, text
    pauses = [float(found) for found in re.findall(r"another one starts in ([\d.]+) s", text)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert "no more are started" in text
    assert workbench.status(name)["state"] == "LOST"
    assert workbench.cli("down", name).returncode == 0
    eventually(lambda: not workbench.processes(name), within_s=10)


def test_a_keeper_that_is_told_to_end_between_two_lives_begins_no_other(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("told", run="sleep 300", replicas=1))
    status = eventually(lambda: (now := workbench.status(name)) and pid_of(now, 0) and now)
    keeper = workbench.folder_of(name).process("agent")
    assert keeper
    keeper.signal(signal.SIGSTOP)  # so that it hears of both at the same moment
    os.kill(status["agent_pid"], signal.SIGKILL)
    eventually(lambda: not is_alive(status["agent_pid"]))
    keeper.signal(signal.SIGTERM)
    keeper.signal(signal.SIGCONT)
    eventually(lambda: not keeper.alive, within_s=10, what="the keeper ends")
    assert len(spawned(workbench, name)) == 1
    eventually(lambda: not workbench.processes(name), within_s=10)
    assert workbench.cli("down", name).returncode == 0


def test_down_ends_a_run_between_two_lives_of_its_agent(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("between", run="sleep 300", replicas=1))
    status = eventually(lambda: (now := workbench.status(name)) and pid_of(now, 0) and now)
    os.kill(status["agent_pid"], signal.SIGKILL)
    done = workbench.cli("down", name, "--grace", "1")
    assert done.returncode == 0, done.stderr
    assert workbench.status(name)["state"] == "CANCELLED"
    eventually(lambda: not workbench.processes(name), within_s=10)
