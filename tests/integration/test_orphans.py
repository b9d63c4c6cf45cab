"""The supervisor itself dies: its ranks do not live on, and a new one takes the run up again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from sky_monarch.launch.folder import write_json
from sky_monarch.launch.process import Process
from tests.support.processes import environ_of, is_alive
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.waiting import eventually


def test_ranks_do_not_outlive_their_agent(workbench: Workbench) -> None:
    """Also not ranks that ignore TERM; what left their session is reaped by ``down``."""
    run = "(setsid sleep 300 &); trap '' TERM; sleep 300; sleep 300"
    name = workbench.up(workbench.job("orphans", run=run))
    status = eventually(lambda: (now := workbench.status(name)) and pid_of(now, 2) and now)
    os.kill(status["agent_pid"], signal.SIGKILL)
    for replica in range(3):
        eventually(lambda replica=replica: not is_alive(pid_of(status, replica)), within_s=5)
    assert workbench.status(name)["state"] == "LOST"
    assert workbench.cli("down", name).returncode == 0
    eventually(lambda: not workbench.processes(name), within_s=10)


def test_a_new_agent_takes_the_run_up_again_and_no_rank_lives_twice(workbench: Workbench) -> None:
    run = f"(setsid sleep 300 &); exec {FREE_RANK} --steps 60"
    name = workbench.up(workbench.job("again", run=run, replicas=2))
    before = workbench.wait_for_step(name, 5)
    agent = before["agent_pid"]
    env, folder = environ_of(agent), workbench.run_folder(name)
    old = set(workbench.processes(name)) - {agent}
    os.kill(agent, signal.SIGKILL)

    command = [sys.executable, "-m", "sky_monarch.agent", str(folder / "agent.json")]
    with subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as new:
        try:
            started = Process.of(new.pid)
            assert started
            write_json(folder / "agent.pid", {"pid": started.pid, "start_ticks": started.start_ticks})

            def spawned() -> list[dict]:
                again = [event for event in workbench.events(name) if event["event"] == "rank_spawned"]
                assert not [pid for pid in old if is_alive(pid)] or len(again) == 2, "two lives of one rank"
                return again if len(again) == 4 else []

            again = eventually(spawned, within_s=30)
            assert [event["generation"] for event in again] == [1, 1, 2, 2]
            # Also what had left the session of its rank.
            assert not [pid for pid in old if is_alive(pid)]
            after = workbench.wait_for_end(name)
            assert after["state"] == "SUCCEEDED", after["reason"]
            assert [group["generation"] for group in after["groups"]] == [2, 2]
            assert new.wait(timeout=20) == 0
        finally:
            new.kill()
    eventually(lambda: not workbench.processes(name), within_s=10)
