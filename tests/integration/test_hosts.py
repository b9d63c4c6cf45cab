"""Hosts that never come, and one that is about to be taken away: several real agents, on this machine."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.support.hosts import several_hosts
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.steps import longest_gap_s
from tests.support.waiting import eventually

JOIN_S, LOST_S = 2.0, 5.0
LIGHTHOUSE = {
    "join_timeout_s": JOIN_S,
    "heartbeat_timeout_s": 1,
    "process_group_timeout_s": 30,
    "quorum_timeout_s": 60,
}


@pytest.mark.parametrize(("min_replicas", "state"), [(2, "SUCCEEDED"), (3, "FAILED")])
def test_a_host_that_never_comes_is_named_and_waited_for_no_longer_than_its_limits(
    workbench: Workbench, min_replicas: int, state: str
) -> None:
    job = workbench.job(
        "alone", run=f"{FREE_RANK} --steps 100", min_replicas=min_replicas, lighthouse=LIGHTHOUSE
    )
    began_s = time.monotonic()
    with several_hosts(workbench, job, count=3, missing=[2], limits={"agent_lost_s": LOST_S}) as (name, _):
        after = workbench.wait_for_end(name)
        assert after["state"] == state, after["reason"]
        commits = [event for event in workbench.events(name) if event["event"] == "first_commit"]
        reasons = [event["reason"] for event in workbench.events(name) if event["event"] == "run_state"]
        lost = f"the agent of host host2 was silent for {LOST_S:g} s"
        if state == "FAILED":
            assert commits == []
            assert after["exit_code"] == 4
            assert lost in after["reason"]
            assert "2 of 3 replica groups can go on, min_replicas is 3" in after["reason"]
        else:
            assert {commit["replica"] for commit in commits} == {0, 1}
            assert min(commit["mono_ns"] for commit in commits) / 1e9 - began_s >= JOIN_S
            assert any("replica 2" in reason and lost in reason for reason in reasons if reason), reasons
            assert "replica 2" in after["reason"]


def test_a_host_that_is_about_to_be_taken_away_loses_nothing_and_stops_nobody(workbench: Workbench) -> None:
    grace_s = 10
    job = workbench.job(
        "notice",
        run=f"{FREE_RANK} --steps 3000 --heed",
        min_replicas=2,
        recovery={"grace_s": grace_s},
        lighthouse={**LIGHTHOUSE, "heartbeat_timeout_s": 20, "join_timeout_s": 60},  # only a word of it helps
    )
    with several_hosts(workbench, job, count=3) as (name, keepers):
        before = workbench.wait_for_step(name, 20)
        keepers[1].send_signal(signal.SIGTERM)
        told_s = time.monotonic()
        assert keepers[1].wait(30) == 143
        assert time.monotonic() - told_s < grace_s - 2, "it does not wait for the end of the grace time"
        at_notice = workbench.status(name)["groups"][0]["step"]
        eventually(lambda: workbench.status(name)["groups"][0]["step"] >= at_notice + 20)
        now = workbench.status(name)
        assert now["state"] == "DEGRADED", (now["state"], now["reason"])
        for replica in (0, 2):
            assert pid_of(now, replica) == pid_of(before, replica)
            assert longest_gap_s(workbench.cli("logs", name, "--replica", str(replica)).stdout) < 3
        assert now["recoveries"] == [], "nothing has failed"
        (exited,) = (event for event in workbench.events(name) if event["event"] == "rank_exited")
        assert (exited["replica"], exited["exit"]) == (1, {"code": 0}), "it was not killed"
        log = workbench.cli("logs", name, "--replica", "0").stdout
        (left,) = re.findall(r"leaves after step (\d+)", "\n".join(exited["tail"]))
        # What it has committed, the others have: each step it took part in is one of theirs.
        assert re.search(rf"step {left} at ", log)
        evicted = [event for event in workbench.events(name) if event["event"] == "evicted"]
        assert [(event["replica"], event["orderly"]) for event in evicted] == [(1, True)]
