"""A rank dies: only its own replica group is replaced, the others go on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from tests.support.processes import is_alive
from tests.support.runs import FREE_RANK, Workbench, generation_of, pid_of
from tests.support.steps import longest_gap_s
from tests.support.waiting import eventually

#: Silence after which the lighthouse leaves somebody out: longer than anything takes here that does not wait for that.
SILENT_S = 20.0


def test_a_killed_rank_is_replaced_and_the_others_keep_their_processes(workbench: Workbench) -> None:
    job = workbench.job(
        "kill",
        run=f"{FREE_RANK} --steps 120 {workbench.ease(50)}",
        lighthouse={"heartbeat_timeout_s": SILENT_S},
    )
    name = workbench.up(job)
    before = workbench.wait_for_step(name, 30)

    os.kill(pid_of(before, 1), signal.SIGKILL)

    workbench.wait_for_first_commit(name, 1, 2)
    workbench.gate.touch()
    after = workbench.wait_for_end(name, within_s=100)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [generation_of(after, replica) for replica in range(3)] == [1, 2, 1]
    spawned = workbench.pids_spawned(name)
    assert spawned[0] == [pid_of(before, 0)]
    assert spawned[2] == [pid_of(before, 2)]
    assert len(spawned[1]) == 2
    (recovery,) = after["recoveries"]
    assert recovery["replica"] == 1
    assert all(recovery[key] is not None for key in ("detect_s", "evict_s", "spawn_s", "first_commit_s"))
    assert 0 <= recovery["evict_s"] <= recovery["spawn_s"] < recovery["first_commit_s"]
    assert 0 <= recovery["detect_s"] < SILENT_S / 2
    healed = re.search(r"healed from step 0 to (\d+)", workbench.logs(name, replica=1))
    assert healed
    assert int(healed[1]) >= 30, "it rejoins at the step of the others"
    # The survivors go on at once: nobody waits for a heartbeat to go stale or for a joiner.
    assert longest_gap_s(workbench.logs(name, replica=0)) < SILENT_S / 2
    kinds = [event["event"] for event in workbench.events(name) if event.get("replica") == 1]
    order = ["rank_exited", "evicted", "generation_ended", "generation_started", "first_commit"]
    positions = [kinds.index(kind, kinds.index("rank_exited")) for kind in order]
    assert positions == sorted(positions), kinds


def test_survivors_commit_while_the_victim_is_away(workbench: Workbench) -> None:
    job = workbench.job(
        "away",
        run=f"{FREE_RANK} --steps 2000",
        recovery={"backoff_s": 3, "backoff_max_s": 3},
        lighthouse={"heartbeat_timeout_s": SILENT_S},  # silence frees nobody here: only the agent's word does
    )
    name = workbench.up(job)
    status = workbench.wait_for_step(name, 10)
    os.kill(pid_of(status, 1), signal.SIGKILL)
    again = eventually(
        lambda: (now := workbench.status(name)) and generation_of(now, 1) == 2 and pid_of(now, 1) and now
    )
    # The first restart is at once; the second has to wait, and meanwhile the others commit.
    os.kill(pid_of(again, 1), signal.SIGKILL)
    at_kill = workbench.status(name)["groups"][0]["step"]
    eventually(lambda: workbench.status(name)["groups"][0]["step"] >= at_kill + 5, within_s=15)
    now = workbench.status(name)
    assert now["quorum"]["participants"] in {2, 3}


def test_every_rank_of_the_group_is_replaced_when_one_dies(workbench: Workbench) -> None:
    name = workbench.up(
        workbench.job(
            "pairs", run=f"{FREE_RANK} --steps 100 {workbench.ease(30)}", replicas=2, ranks_per_replica=2
        )
    )
    before = workbench.wait_for_step(name, 10)
    os.kill(pid_of(before, 0, rank=1), signal.SIGKILL)

    def replaced() -> bool:
        now = workbench.status(name)
        return generation_of(now, 0) == 2 and all(rank["pid"] for rank in now["groups"][0]["ranks"])

    eventually(replaced)
    assert not is_alive(pid_of(before, 0, rank=0))
    after = workbench.status(name)
    assert [rank["pid"] for rank in after["groups"][1]["ranks"]] == [
        rank["pid"] for rank in before["groups"][1]["ranks"]
    ]
    workbench.wait_for_first_commit(name, 0, 2)
    workbench.gate.touch()
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED"
    (record,) = after["recoveries"]
    assert (record["rank"], record["collateral"]) == (1, [0]), "who died, and who was ended for it"
    assert record["cause"] == "rank 1 was killed by SIGKILL"
    exits = [
        (event["rank"], event["collateral"])
        for event in workbench.events(name)
        if event["event"] == "rank_exited" and (event["replica"], event["generation"]) == (0, 1)
    ]
    assert exits == [(1, False), (0, True)], "the root cause first"


def test_a_hung_rank_is_found_and_replaced(workbench: Workbench) -> None:
    job = workbench.job(
        "hung",
        run=f"{FREE_RANK} --steps 60 --do 1:20:stop {workbench.ease(25)}",
        recovery={"progress_limit_s": 4, "startup_limit_s": 60},
        lighthouse={"heartbeat_timeout_s": SILENT_S},  # the others wait, and are not to be blamed for that
    )
    name = workbench.up(job)
    workbench.wait_for_first_commit(name, 1, 2)
    workbench.gate.touch()
    after = workbench.wait_for_end(name, within_s=100)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [generation_of(after, replica) for replica in range(3)] == [1, 2, 1], (
        "who waits is no culprit",
        after["recoveries"],
    )
    (recovery,) = after["recoveries"]
    assert recovery["cause"] == "no commit within 4 s"
    assert recovery["hung"]["state"].startswith("T"), "nobody waits for stacks of a process that is stopped"


def test_a_rank_that_hangs_while_it_says_that_it_waits_is_not_excused_for_ever(workbench: Workbench) -> None:
    job = workbench.job(
        "stuck",
        run=f"{sys.executable} -m tests.support.stuck_waiter",
        replicas=1,
        recovery={"progress_limit_s": 4, "startup_limit_s": 60},
    )
    after = workbench.wait_for_end(workbench.up(job), within_s=100)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert generation_of(after, 0) == 2
    assert [recovery["cause"] for recovery in after["recoveries"]] == ["no commit within 4 s"]


@pytest.mark.parametrize("who", ["agent", pytest.param("controller", marks=pytest.mark.slow)])
def test_a_supervisor_that_was_paused_blames_nobody_when_it_comes_back(
    workbench: Workbench, who: str
) -> None:
    """Longer than any silence that evicts, and than the limit for a step: nobody was heard, but all trained."""
    job = workbench.job(
        "paused",
        run=f"{FREE_RANK} --steps 130 {workbench.ease(40)}",
        recovery={"progress_limit_s": 4, "startup_limit_s": 60},
    )
    name = workbench.up(job)
    before = workbench.wait_for_step(name, 20)
    pid = before[f"{who}_pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(6)
    finally:
        os.kill(pid, signal.SIGCONT)
    workbench.gate.touch()
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [generation_of(after, replica) for replica in range(3)] == [1, 1, 1], (
        "nobody was restarted",
        after["recoveries"],
    )
    assert after[f"{who}_pid"] == pid


@pytest.mark.slow
def test_a_lighthouse_that_stays_stopped_is_replaced_by_its_spare(workbench: Workbench) -> None:
    """A stopped one is silent, not dead: nothing that a death tells comes, and all would wait for it."""
    name = workbench.up(workbench.job("stopped", run=f"{FREE_RANK} --steps 2000"))
    before = workbench.wait_for_step(name, 20)
    old = before["lighthouse"]["pid"]
    os.kill(old, signal.SIGSTOP)
    stuck = eventually(
        lambda: (now := workbench.status(name))["lighthouse"]["pid"] != old and now, within_s=30
    )
    workbench.wait_for_step(name, max(group["step"] for group in stuck["groups"]) + 20)
    after = workbench.status(name)
    assert [generation_of(after, replica) for replica in range(3)] == [1, 1, 1], after["recoveries"]
    assert not is_alive(old)


def test_a_crash_loop_stops_at_its_budget_and_names_the_cause(workbench: Workbench) -> None:
    job = workbench.job(
        "loop",
        run=f"{FREE_RANK} --steps 60 --do '1:0:raise=broken on purpose!'",
        min_replicas=3,
        recovery={"max_restarts": 2},
    )
    name = workbench.up(job)
    after = workbench.wait_for_end(name, within_s=100)
    assert after["state"] == "FAILED"
    assert after["exit_code"] != 0
    starts = [event for event in workbench.events(name) if event["event"] == "generation_started"]
    assert len([event for event in starts if event["replica"] == 1]) == 3, "one start and two restarts"
    assert "1" in after["reason"]
    assert "ValueError: broken on purpose" in workbench.logs(name, replica=1)


def test_the_run_goes_on_degraded_while_min_replicas_hold(workbench: Workbench) -> None:
    job = workbench.job(
        "less",
        run=f"{FREE_RANK} --steps 60 --do 1:0:raise!",
        min_replicas=2,
        recovery={"max_restarts": 1},
    )
    name = workbench.up(job)
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert after["groups"][1]["state"] == "GIVEN_UP"
    assert "DEGRADED" in [event.get("state") for event in workbench.events(name)]


@pytest.fixture
def backing_off(workbench: Workbench) -> str:
    """A run of which replica 1 waits to be restarted, for longer than any test."""
    job = workbench.job(
        "off",
        run=f"{FREE_RANK} --steps 2000 --do 1:0:raise!",
        recovery={"backoff_s": 300, "backoff_max_s": 300},
    )
    name = workbench.up(job)

    def waits() -> bool:
        events = [event for event in workbench.events(name) if event["event"] == "restart_scheduled"]
        return bool(events) and events[-1]["delay_s"] == 300

    eventually(waits)
    return name


def test_down_does_not_wait_for_a_restart_that_is_still_to_come(
    workbench: Workbench, backing_off: str
) -> None:
    started = time.monotonic()
    assert workbench.cli("down", backing_off, "--grace", "10").returncode == 0
    # One that does wait is ended from outside, 20 s after the grace time.
    assert time.monotonic() - started < 25
    assert workbench.status(backing_off)["reason"] == "down"
    assert not workbench.processes(backing_off)


def test_a_new_controller_does_not_stop_a_group_that_waits_for_its_restart(
    workbench: Workbench, backing_off: str
) -> None:
    before = workbench.status(backing_off)
    os.kill(before["controller_pid"], signal.SIGKILL)

    def since_the_agent_is_back() -> list[dict]:
        """What follows from its connection is in the journal with it, or not at all."""
        events = workbench.events(backing_off)
        kinds = [event["event"] for event in events]
        if kinds.count("controller_started") < 2:
            return []
        again = len(kinds) - kinds[::-1].index("controller_started")
        return events[kinds.index("agent_connected", again) :] if "agent_connected" in kinds[again:] else []

    ordered = [event for event in eventually(since_the_agent_is_back) if event["event"] == "command"]
    assert not ordered, "nothing is ordered"
    after = workbench.status(backing_off)
    assert after["state"] == "RUNNING"
    assert (after["groups"][1]["state"], generation_of(after, 1)) == ("RESTARTING", 3)
    assert [pid_of(after, replica) for replica in (0, 2)] == [pid_of(before, replica) for replica in (0, 2)]
