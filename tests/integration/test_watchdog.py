"""Who commits nothing any more: found among those that wait for it, asked, ended once; who says why is left alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from sky_monarch.actors.lighthouse_control import LighthouseControl
from tests.support.runs import FREE_RANK, Workbench, generation_of, pid_of
from tests.support.steps import longest_gap_s
from tests.support.waiting import eventually

LIMIT_S = 4.0  # what is held up for a moment, by whatever else runs here, is no hang
STEP = 20
# Longer than any wait here: who does nothing is found by the watchdog, not by the lighthouse.
SILENCE = {"heartbeat_timeout_s": 25}


def run_with_hangs(workbench: Workbench, replicas: int, hang: list[int]) -> tuple[str, dict[str, Any]]:
    """A run of which some groups sleep for ever at one step, asking nobody; its name, and its first processes."""
    deeds = " ".join(f"--do {replica}:{STEP}:sleep" for replica in hang)
    job = workbench.job(
        "hung",
        run=f"{FREE_RANK} --steps 80 {deeds} {workbench.ease(STEP + 10)}",
        replicas=replicas,
        recovery={"progress_limit_s": LIMIT_S, "startup_limit_s": 60},
        lighthouse=SILENCE,
    )
    name = workbench.up(job)
    return name, workbench.wait_for_step(name, 1)


def live_at_the_lighthouse(workbench: Workbench, name: str) -> set[tuple[int, int]]:
    """Replica and generation of everyone that the lighthouse takes for alive."""
    folder = workbench.run_folder(name)
    run, private = (json.loads((folder / file).read_text()) for file in ("run.json", "private.json"))
    control = LighthouseControl(
        f"unix:{run['sockets']['lighthouse']}", token=private["token"], run_id=run["run_id"]
    )
    return {(one["replica"], one["generation"]) for one in control.state()["replicas"]}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("replicas", "hang"),
    [
        (2, [1]),
        pytest.param(3, [1], marks=SLOW),
        pytest.param(3, [0, 2], marks=SLOW),
        pytest.param(3, [0, 1, 2], marks=SLOW),
    ],
    ids=["1of2", "1of3", "2of3", "all"],
)
def test_those_that_hang_are_ended_at_once_and_once_and_nobody_else(
    workbench: Workbench, replicas: int, hang: list[int]
) -> None:
    name, before = run_with_hangs(workbench, replicas, hang)
    eventually(
        lambda: all(generation_of(workbench.status(name), replica) == 2 for replica in hang), within_s=40
    )
    if len(hang) == replicas:  # nothing is left of those that were there
        again = {(replica, 2) for replica in range(replicas)}
        eventually(lambda: live_at_the_lighthouse(workbench, name) == again, what="no ghosts")
    for replica in hang:
        workbench.wait_for_first_commit(name, replica, 2)
    workbench.gate.touch()
    after = workbench.wait_for_end(name, within_s=100)
    assert after["state"] == "SUCCEEDED", after["reason"]
    wanted = [2 if replica in hang else 1 for replica in range(replicas)]
    assert [generation_of(after, replica) for replica in range(replicas)] == wanted, (
        "who waits is no culprit",
        after["recoveries"],
    )
    survivors = sorted(set(range(replicas)) - set(hang))
    spawned = workbench.pids_spawned(name)
    assert all(spawned[replica] == [pid_of(before, replica)] for replica in survivors)

    events = workbench.events(name)
    ended_s = [
        e["mono_ns"] / 1e9 for e in events if e["event"] == "generation_ended" and e["cause"] != "stopped"
    ]
    assert len(ended_s) == len(hang)
    assert max(ended_s) - min(ended_s) < 0.75 * LIMIT_S, "at once"
    for record in after["recoveries"]:
        assert record["cause"] == f"no commit within {LIMIT_S:g} s"
        assert record["step"] == STEP
        assert record["where"].endswith(" in act"), "each was asked where it hangs"
    said = [
        event["message"] for event in events if event["event"] == "notice" and "roll-call" in event["message"]
    ]
    if len(hang) > 1:
        (message,) = said
        assert f"{hang} hang" in message
    for replica in survivors:
        gap_s = longest_gap_s(workbench.logs(name, replica=replica))
        assert gap_s < LIMIT_S + SILENCE["heartbeat_timeout_s"] / 2, (
            "the limit, and a moment for the next quorum"
        )


def test_who_pauses_is_left_alone_until_its_pause_is_over(workbench: Workbench) -> None:
    """One group evaluates for twice the limit and says so; later it says so for a second, and never comes back."""
    job = workbench.job(
        "paused",
        run=f"{FREE_RANK} --steps 80 --do 1:10:pause=60/{2 * LIMIT_S} --do 1:30:pause=1/3600 "
        + workbench.ease(40),
        recovery={"progress_limit_s": LIMIT_S, "startup_limit_s": 60},
        lighthouse=SILENCE,
    )
    name = workbench.up(job)
    workbench.wait_for_first_commit(name, 1, 2)
    workbench.gate.touch()
    after = workbench.wait_for_end(name, within_s=100)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [record["step"] for record in after["recoveries"]] == [30], "a pause is no hang, until it is over"
    assert [generation_of(after, replica) for replica in range(3)] == [1, 2, 1]
    (hung,) = [event for event in workbench.events(name) if event["event"] == "hung"]
    assert (hung["replica"], hung["generation"]) == (1, 1)


def test_a_pause_inside_of_another_takes_nothing_from_it(workbench: Workbench) -> None:
    job = workbench.job(
        "nested",
        run=f"{sys.executable} -m tests.support.pausing_rank {2 * LIMIT_S}",
        replicas=1,
        recovery={"progress_limit_s": LIMIT_S, "startup_limit_s": 60},
    )
    name = workbench.up(job)
    after = workbench.wait_for_end(name, within_s=100)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert generation_of(after, 0) == 1, "the outer pause was not over"


def test_where_all_wait_for_each_other_for_ever_all_are_ended_once(workbench: Workbench) -> None:
    """Nobody can tell them apart: each says that it waits, for longer than any wait may take."""
    limit_s = 4.0
    job = workbench.job(
        "deadlock",
        run=f"{sys.executable} -m tests.support.stuck_waiter",
        replicas=2,
        recovery={"progress_limit_s": limit_s, "startup_limit_s": 60},
    )
    name = workbench.up(job)
    after = workbench.wait_for_end(name, within_s=100)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [generation_of(after, replica) for replica in range(2)] == [2, 2]
    events = workbench.events(name)
    ended_s = [event["mono_ns"] / 1e9 for event in events if event["event"] == "generation_ended"][:2]
    assert abs(ended_s[1] - ended_s[0]) < 0.75 * limit_s, "at once"
    said = [
        event["message"] for event in events if event["event"] == "notice" and "roll-call" in event["message"]
    ]
    assert len(said) == 1
    assert "[0, 1] wait for others; [0, 1] are restarted" in said[0]
