"""The real controller process, driven through its real sockets by a scripted agent."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

from tests.support.controllers import ROOT, TOKEN, ControllerRun, ScriptedAgent, controller, trains
from tests.support.waiting import eventually


def test_a_run_goes_from_its_agent_to_success(run: ControllerRun, agent: ScriptedAgent) -> None:
    plans = trains(agent)
    assert [plan["replica"] for plan in plans] == [0, 1, 2]
    assert plans[1]["command"] == {"kind": "exec", "argv": ["python", "train.py"]}
    assert plans[1]["lighthouse"] == "http://127.0.0.1:41234"
    for step in range(2, 6):
        agent.commit(1, step)
    status = eventually(lambda: (s := run.status())["step"] == 5 and s)
    assert status["state"] == "RUNNING"
    group = status["groups"][1]
    assert (group["state"], group["generation"], group["step"], group["loss"]) == ("RUNNING", 1, 5, 2.5)
    assert group["ranks"][0]["pid"] == 10_110
    assert status["quorum"] == {"quorum_id": 4, "participants": 3}
    assert status["target_step"] == 120
    assert group["rate"] > 0
    for replica in range(3):
        agent.finish(replica)
    agent.told("shutdown")
    final = run.final
    assert final is not None, "final.json is written before the agents are told to go"
    assert (final["state"], final["exit_code"], final["step"]) == ("SUCCEEDED", 0, 120)
    assert run.status()["state"] == "SUCCEEDED", "the API outlives the run, so that clients see its end"
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(10) == 0


def test_a_killed_controller_comes_back_and_adopts_the_live_groups(
    run: ControllerRun, agent: ScriptedAgent
) -> None:
    trains(agent)
    run.kill()
    agent.close()
    # While it is away one group dies and comes back on its own.
    agent.die(2, 1)
    agent.event("restart_scheduled", replica=2, generation=2, delay_s=0.0, restarts_left=7)
    agent.start(2, 2, warm=True)
    agent.event("first_commit", replica=2, generation=2, step=33)
    assert run.start() < 20, "it waits for nobody"
    before = {group["replica"]: group["generation"] for group in run.status()["groups"]}
    assert before == {0: 1, 1: 1, 2: 1}, "rebuilt from the journal before any agent is back"
    agent.connect()
    agent.all_acked()
    status = run.state("RUNNING")
    assert [group["generation"] for group in status["groups"]] == [1, 1, 2]
    assert status["groups"][0]["ranks"][0]["pid"] == 10_010, "the same process as before"
    agent.pump(0.3)
    assert agent.commands == [], "nothing was started, stopped or restarted"
    (record,) = status["recoveries"]
    assert (record["replica"], record["generation"], record["next_generation"]) == (2, 1, 2)
    assert (record["warm"], record["lost_steps"], record["cause"]) == (
        True,
        2,
        "rank 0 was killed by SIGKILL",
    )
    seen = [event["seq"] for event in run.events() if "seq" in event]
    assert seen == sorted(set(seen)), "nothing is lost and nothing is stored twice"
    assert len(seen) == agent.acked


def test_a_warning_that_reaches_every_process_of_a_job_ends_no_controller(run: ControllerRun) -> None:
    assert run.process is not None
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # H35
        run.process.send_signal(number)

    assert run.status()["controller_pid"] == run.process.pid
    assert run.process.poll() is None, "the default of these signals is to end"


def test_a_run_that_ended_while_the_controller_was_away_is_not_run_again(
    run: ControllerRun, agent: ScriptedAgent
) -> None:
    trains(agent)
    run.kill()
    agent.close()
    for replica in range(3):
        agent.finish(replica)
    run.start()
    agent.connect()
    agent.told("shutdown")
    assert run.final["state"] == "SUCCEEDED"
    assert not [command for command in agent.commands if command["type"] == "start_group"]
    # Once more, after the end: still the same, and the agent is still told to go.
    run.kill()
    agent.close()
    run.start()
    assert run.status()["state"] == "SUCCEEDED"
    agent.connect()
    agent.told("shutdown")


# What a CLI does where no controller answers, again and again: the events as it sees them, each time from the first.
READER = """
import sys
import time
from pathlib import Path
from sky_monarch.launch.folder import RunFolder
from sky_monarch.sdk import _archive
folder, before = RunFolder(Path(sys.argv[1])), []
while True:
    events = [(event.id, event.event) for event in _archive.events(folder)]
    assert [number for number, _ in events] == list(range(1, len(events) + 1)), "none is missing"
    assert events[: len(before)] == before, "what was read stays"
    before = events
    print(len(events), flush=True)
    time.sleep(0.1)
"""


class Readers:
    """Four of them at once; now and then one is killed in the middle, and another one comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._output = (folder / "readers").open("w+")
        self._running = [self._start() for _ in range(4)]

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        command = [sys.executable, "-c", READER, str(self._folder)]
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.Popen(command, env=env, stdout=self._output, stderr=self._output, text=True)

    def kill_one(self, turn: int) -> None:
        """SIGKILL one, wherever it is, and start its successor."""
        self._running[turn % 4].kill()
        assert self._running[turn % 4].wait(10) == -signal.SIGKILL, self.said()
        self._running[turn % 4] = self._start()

    def said(self) -> str:
        """All that they printed."""
        return (self._folder / "readers").read_text()

    def seen(self) -> list[int]:
        """How many events they saw, each time so far."""
        return [int(line) for line in self.said().splitlines() if line.isdigit()]

    def close(self) -> None:
        """End them."""
        if self._output.closed:
            return
        alive = [reader.poll() for reader in self._running]
        for reader in self._running:
            reader.kill()
            reader.wait(10)
        self._output.close()
        assert alive == [None] * 4, self.said()


TURNS = 3


def test_no_acked_event_is_lost_wherever_the_controller_is_killed(tmp_path: Path) -> None:
    with controller(tmp_path) as run, closing(Readers(run.folder)) as readers:
        agent = ScriptedAgent(run).connect()
        agent.told("start_group", 3)
        for turn in range(TURNS):
            for number in range(40):
                agent.event("notice", replica=None, message=f"{turn}:{number}")
            threading.Timer(0.003 * turn, run.process.kill).start()
            agent.dropped()
            if turn % 2:
                readers.kill_one(turn)
            run.process.wait(10)
            acked = agent.acked
            stored = sqlite3.connect(f"file:{run.folder / 'journal.db'}?mode=ro", uri=True)
            seqs = [
                row[0] for row in stored.execute("SELECT seq FROM events WHERE seq IS NOT NULL ORDER BY seq")
            ]
            stored.close()
            assert seqs == list(range(1, len(seqs) + 1)), "without gaps, once each"
            assert len(seqs) >= acked, "what was acked is stored"
            agent.close()
            run.start()
            agent.connect()
            agent.all_acked()
        messages = [
            event["message"]
            for event in run.events()
            if event["event"] == "notice" and ":" in event["message"]
        ]
        assert [m for m in messages if re.fullmatch(r"\d+:\d+", m)] == [
            f"{t}:{n}" for t in range(TURNS) for n in range(40)
        ]
        agent.close()
        eventually(lambda: max(readers.seen(), default=0) > TURNS * 40, what="they see all of them")
        readers.close()
        assert "locked" not in readers.said() + run.log()


def test_down_stops_the_groups_and_is_idempotent(run: ControllerRun, agent: ScriptedAgent) -> None:
    trains(agent)
    assert run.down(grace_s=2.5, reason="enough").status_code == 202
    assert run.down(grace_s=0, reason="again").status_code == 202
    stops = agent.told("stop_group", 3)
    assert {(stop["replica"], stop["grace_s"], stop["reason"]) for stop in stops} == {
        (0, 2.5, "enough"),
        (1, 2.5, "enough"),
        (2, 2.5, "enough"),
    }
    assert run.status()["state"] == "STOPPING"
    for replica in range(3):
        agent.stop(replica)
    (shutdown,) = agent.told("shutdown")
    assert shutdown["grace_s"] == 2.5
    assert (run.final["state"], run.final["exit_code"], run.final["reason"]) == ("CANCELLED", 8, "enough")
    assert run.down().status_code == 202, "the third one too"
    assert sum(event["event"] == "down_requested" for event in run.events()) == 1


def test_down_during_setup_cancels_and_starts_no_group(tmp_path: Path) -> None:
    with controller(tmp_path, setup="sleep 60") as run:
        agent = ScriptedAgent(run).connect()
        (setup,) = agent.told("setup")
        assert setup["script"] == "sleep 60"
        agent.event("setup_started")
        run.state("SETUP")
        run.down(grace_s=1, reason="changed my mind")
        agent.told("shutdown")
        assert run.final["state"] == "CANCELLED"
        assert agent.commands == []
        agent.close()


def test_a_failed_setup_is_the_runs_end_with_its_last_lines(tmp_path: Path) -> None:
    with controller(tmp_path, setup="echo boom >&2; exit 3") as run:
        agent = ScriptedAgent(run).connect()
        agent.told("setup")
        agent.event("setup_started")
        agent.event("setup_finished", exit={"code": 3}, timed_out=False, tail=["boom"])
        agent.told("shutdown")
        final = run.final
        assert (final["state"], final["exit_code"]) == ("FAILED_SETUP", 5)
        assert (final["setup"]["exit_code"], final["setup"]["tail"]) == (3, ["boom"])
        assert agent.commands == [], "nothing else was ordered"
        agent.close()


def test_a_spent_budget_fails_the_run_with_the_root_cause(tmp_path: Path) -> None:
    with controller(tmp_path, replicas=2, min_replicas=2) as run:
        agent = ScriptedAgent(run).connect()
        trains(agent, 2)
        agent.die(1, 1, signal=11)
        cause = {"cause": "rank_exited", "rank": 0, "exit": {"signal": 11}, "early": None}
        agent.event("group_given_up", replica=1, generation=1, restarts=8, **cause)
        agent.told("stop_group")
        agent.stop(0)
        agent.told("shutdown")
        final = run.final
        assert (final["state"], final["exit_code"]) == ("FAILED", 4)
        assert final["reason"].startswith(
            "replica 1 was given up after 8 restarts: rank 0 was killed by SIGSEGV"
        )
        assert final["recoveries"][0]["given_up"] is True
        agent.close()


def test_every_order_has_its_row_and_its_reason(run: ControllerRun, agent: ScriptedAgent) -> None:
    trains(agent)
    run.down(reason="enough")
    agent.told("stop_group", 3)
    for replica in range(3):
        agent.stop(replica)
    agent.told("shutdown")
    orders = [event for event in run.events() if event["event"] == "command"]
    assert [order["command"] for order in orders] == ["start_group"] * 3 + ["stop_group"] * 3 + ["shutdown"]
    assert all(order["reason"] for order in orders)


def test_secrets_and_token_stay_out_of_everything_but_the_private_file(tmp_path: Path) -> None:
    with controller(tmp_path, secrets={"WANDB": "canary-2"}, envs={"KEY": "canary-1"}) as run:
        agent = ScriptedAgent(run).connect()
        plans = trains(agent)
        assert plans[0]["envs"]["WANDB"] == "canary-2"
        assert plans[0]["envs"]["KEY"] == "canary-1"
        for replica in range(3):
            agent.finish(replica)
        agent.told("shutdown")
        text = run.get("/v1/status").text + run.get("/v1/events").text
        cmdline = Path(f"/proc/{run.process.pid}/cmdline").read_bytes()
        agent.close()
    for name in sorted(
        path for path in run.folder.rglob("*") if path.is_file() and path.name != "private.json"
    ):
        content = name.read_bytes()
        assert b"canary" not in content, name
        assert TOKEN.encode() not in content, name
    assert "canary" not in text
    assert TOKEN not in text
    assert TOKEN.encode() not in cmdline


def test_a_second_injection_of_the_same_fault_never_happens(tmp_path: Path) -> None:
    injection = {
        "id": 1,
        "slot": {"replica": 1, "rank": 0},
        "fault": "kill",
        "trigger": {"step": 30},
    }
    with controller(tmp_path, injections=[injection]) as run:
        agent = ScriptedAgent(run).connect()
        plans = trains(agent)
        assert [plan["injections"] for plan in plans] == [[], [injection], []]
        agent.event("injected", injection=1, replica=1, rank=0, generation=1, fault="kill")
        agent.all_acked()
        agent.close()
        # A second agent of a host is refused while the first is still connected.
        eventually(lambda: '"agent_disconnected"' in run.get("/v1/events").text)
        successor = ScriptedAgent(run).connect()
        starts = successor.told("start_group", 3)
        assert [(plan["generation"], plan["injections"]) for plan in starts] == [(2, [])] * 3
        successor.close()
