"""Whatever supervises is killed, whenever: what lives is adopted, what ended stays so, what died starts again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.errors import ChannelError
from tests.support.controllers import ControllerRun, ScriptedAgent
from tests.support.processes import send
from tests.support.runs import FREE_RANK, Workbench, generation_of, pid_of
from tests.support.waiting import eventually

REPLICAS = 2
# Before and after each of three kinds of acts: a stride of seven meets all of them. 1 tries every one.
STRIDE = int(os.environ.get("SKY_MONARCH_TEST_STRIDE", "7"))


class ObedientAgent(ScriptedAgent):
    """Does what it is told as the real one does, across any number of deaths of its controller."""

    def __init__(self, run: ControllerRun) -> None:
        super().__init__(run)
        self.spawned: list[tuple[int, int]] = []
        self.unjournaled: list[dict[str, Any]] = []
        self.shut = False

    def obey(self) -> None:
        """Take one look at what there is to do."""
        self.pump(0.01)
        orders, self.commands = self.commands, []
        for order in orders:
            match order["type"]:
                case "start_group" if order["replica"] not in self.groups:
                    self.spawned.append((order["replica"], order["generation"]))
                    self.start(order["replica"], order["generation"])
                    self.event("first_commit", replica=order["replica"], generation=1, step=1)
                case "stop_group" if self.groups[order["replica"]]["state"] != "stopped":
                    self.stop(order["replica"])
                case "shutdown":
                    self.shut = True


def lives_through(run: ControllerRun, agent: ObedientAgent) -> bool:
    """A run from its first order to its end; False where its controller was killed on the way."""
    finished = False

    def on() -> bool:
        nonlocal finished
        agent.obey()
        if len(agent.spawned) == REPLICAS and not finished and agent.acked >= 3:
            finished = True
            for replica in range(REPLICAS):
                if agent.groups[replica]["state"] == "running":
                    agent.finish(replica)
        return agent.shut and agent.acked == agent._seq

    try:
        agent.connect()
        eventually(on, every_s=0, what="the run comes to its end")
    except ChannelError:
        return False
    return True


@pytest.mark.slow
def test_a_controller_that_is_killed_at_any_command_or_ack_is_followed_by_one_that_adopts(
    tmp_path: Path,
) -> None:
    """Every seventh boundary, in a run of its own (``STRIDE`` says which): I1 and I2 hold over the death."""
    nth, reached_end = 0, False
    while not reached_end:
        folder = tmp_path / str(nth)
        run = ControllerRun(folder, replicas=REPLICAS, min_replicas=1)
        run.module, run.env = "tests.support.dying_controller", {"DIES_AT": str(nth)}
        try:
            run.start()
            agent = ObedientAgent(run)
            reached_end = lives_through(run, agent)
            if not reached_end:
                agent.close()
                assert run.process.wait(10) == -signal.SIGKILL
                run.env = {}
                run.start()
                assert lives_through(run, agent), run.log()
            assert sorted(agent.spawned) == [(0, 1), (1, 1)], "I1: nothing was started twice"
            assert run.final["state"] == "SUCCEEDED"
            rows = [row for row in run.events() if row["event"] == "command"]
            ordered = {(row["replica"], row["generation"]) for row in rows if row["command"] == "start_group"}
            assert set(agent.spawned) <= ordered, "I2: no act without its row"
            agent.close()
        finally:
            run.close()
        nth += STRIDE
    assert nth > 2 * STRIDE


def test_a_controller_a_lighthouse_and_a_rank_killed_together_cost_one_group_one_restart(
    workbench: Workbench,
) -> None:
    gate = workbench.folder / "go"
    name = workbench.up(workbench.job("three", run=f"{FREE_RANK} --steps 60 --ease 10:{gate}"))
    before = workbench.wait_for_step(name, 10)
    send((before["controller_pid"], before["lighthouse"]["pid"], pid_of(before, 1)), signal.SIGKILL)
    eventually(lambda: generation_of(workbench.status(name), 1) == 2, what="the group goes on")
    gate.touch()
    after = workbench.wait_for_end(name, within_s=60)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [generation_of(after, replica) for replica in range(3)] == [1, 2, 1]
    spawned = workbench.pids_spawned(name)
    assert (spawned[0], spawned[2]) == ([pid_of(before, 0)], [pid_of(before, 2)])
    assert [record["replica"] for record in after["recoveries"]] == [1]


def lose(workbench: Workbench, name: str, status: dict[str, Any]) -> None:
    """Kill the keeper and the agent, and with the agent its ranks."""
    workbench.kill_agent_for_good(name)
    assert workbench.status(name)["state"] == "LOST"
    assert "takes it up again" in workbench.status(name)["reason"]
    ranks = [pid_of(status, replica) for replica in range(len(status["groups"]))]
    eventually(lambda: not [pid for pid in ranks if Path(f"/proc/{pid}").exists()], within_s=10)


def test_up_of_the_same_job_takes_a_lost_run_up_again_under_its_id_and_with_its_budgets(
    workbench: Workbench,
) -> None:
    gate = workbench.folder / "go"
    job = workbench.job("again", run=f"{FREE_RANK} --steps 60 --step-s 0.03 --ease 5:{gate}", replicas=2)
    name = workbench.up(job)
    before = workbench.wait_for_step(name, 5)
    os.kill(pid_of(before, 1), signal.SIGKILL)
    before = eventually(
        lambda: (now := workbench.status(name)) and generation_of(now, 1) == 2 and pid_of(now, 1) and now
    )
    lose(workbench, name, before)
    gate.touch()
    again = workbench.cli("up", str(job), "-d")
    assert again.returncode == 0, again.stderr
    assert "taken up again" in again.stderr
    after = workbench.wait_for_end(name, within_s=60)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert after["run_id"] == before["run_id"]
    assert [generation_of(after, replica) for replica in range(2)] == [2, 3]
    assert [group["restarts_left"] for group in after["groups"]] == [4, 3], "the budget was not given anew"
    reasons = [row["reason"] for row in workbench.events(name) if row.get("command") == "start_group"]
    assert sum("the agent of host local restarted" in reason for reason in reasons) == 2
    eventually(lambda: not workbench.processes(name), within_s=10)


def test_what_an_agent_began_before_anybody_heard_of_it_is_not_begun_again_by_the_next(
    workbench: Workbench,
) -> None:
    job = workbench.job("untold", run=f"{FREE_RANK} --steps 5000", replicas=2)
    name = workbench.up(job)
    before = workbench.wait_for_step(name, 3)
    slot = workbench.folder_of(name).path / "logs" / "r1-0"
    os.kill(before["controller_pid"], signal.SIGSTOP)
    os.kill(pid_of(before, 1), signal.SIGKILL)
    eventually(lambda: any("step" in log.read_text() for log in slot.glob("g2-*")), what="it is restarted")
    os.kill(before["agent_pid"], signal.SIGKILL)
    after = eventually(
        lambda: (
            (now := workbench.status(name))
            and now["agent_pid"] not in (None, before["agent_pid"])
            and all(group["state"] == "RUNNING" for group in now["groups"])
            and now
        ),
        comes_always=True,
    )
    assert [generation_of(after, replica) for replica in range(2)] == [2, 3], "its number is not given twice"
    assert [group["restarts_left"] for group in after["groups"]] == [4, 3]


@pytest.mark.slow
def test_attach_takes_a_lost_run_up_again_and_follows_it_to_its_end(workbench: Workbench) -> None:
    gate = workbench.folder / "go"
    job = workbench.job("joined", run=f"{FREE_RANK} --steps 60 --step-s 0.03 --ease 5:{gate}", replicas=2)
    name = workbench.up(job)
    before = workbench.wait_for_step(name, 5)
    lose(workbench, name, before)
    gate.touch()
    attached = workbench.cli("attach", name, "--no-logs")
    assert attached.returncode == 0, attached.stderr
    assert "taken up again" in attached.stderr
    after = workbench.status(name)
    assert (after["state"], after["run_id"]) == ("SUCCEEDED", before["run_id"])


@pytest.mark.slow
def test_a_run_whose_work_was_done_when_it_was_lost_has_succeeded_and_is_not_run_again(
    workbench: Workbench,
) -> None:
    """Its groups are done, but their ranks had not left yet: nobody could write its end."""
    marks = workbench.folder / "marks"
    run = f"echo began >> {marks}; {FREE_RANK} --steps 10 --step-s 0.02; sleep 30"
    name = workbench.up(workbench.job("over", run=run, replicas=2))
    before = eventually(
        lambda: (
            (now := workbench.status(name))
            and all(group["state"] == "DONE" for group in now["groups"])
            and now["state"] not in ("SUCCEEDED", "LOST")
            and now
        )
    )
    lose(workbench, name, before)
    attached = workbench.cli("attach", name, "--no-logs")
    assert attached.returncode == 0, attached.stderr
    after = workbench.status(name)
    assert (after["state"], after["run_id"]) == ("SUCCEEDED", before["run_id"])
    assert marks.read_text().count("began") == 2


@pytest.mark.slow
def test_up_of_another_job_of_that_name_leaves_the_lost_run_alone(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("same", run="sleep 300", replicas=1))
    before = eventually(lambda: (now := workbench.status(name)) and pid_of(now, 0) and now)
    lose(workbench, name, before)
    time.sleep(1.0)  # ids have seconds
    other = workbench.cli("up", str(workbench.job("same", run="sleep 301", replicas=1)), "-d")
    assert other.returncode == 0, other.stderr
    assert workbench.status(name)["run_id"] != before["run_id"]
    assert workbench.cli("down", name).returncode == 0
    assert workbench.cli("down", before["run_id"]).returncode == 0
