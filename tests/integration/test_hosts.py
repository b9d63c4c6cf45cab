"""Hosts that never come, and one that is about to be taken away: several real agents, on this machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def test_a_host_that_saves_before_it_goes_holds_nobody_up(workbench: Workbench, tmp_path: Path) -> None:
    save_s = 6
    job = workbench.job(
        "warned",
        run=f"{FREE_RANK} --steps 3000 --heed --save-s {save_s}",
        min_replicas=1,
        recovery={"grace_s": 5},  # the notice leaves more
        lighthouse={**LIGHTHOUSE, "heartbeat_timeout_s": 20, "join_timeout_s": 60},  # only a word of it helps
    )
    with several_hosts(workbench, job, count=3) as (name, keepers):
        workbench.wait_for_step(name, 10)
        told_s = time.monotonic()
        keepers[1].send_signal(signal.SIGUSR1)
        assert keepers[1].wait(30) == 143
        assert save_s <= time.monotonic() - told_s < save_s + 5, "it saves, and then goes"

        agent = json.loads((workbench.run_folder(name) / "agent-2.json").read_text())
        (tmp_path / "agent.json").write_text(json.dumps(agent))
        words = ["--notice", str(tmp_path), "--grace", "20", "--reason", "the pod is evicted"]
        told = subprocess.run([sys.executable, "-m", "sky_monarch.agent", *words], check=False, timeout=30)
        assert (told.returncode, keepers[2].wait(5)) == (0, 143)

        assert longest_gap_s(workbench.cli("logs", name, "--replica", "0").stdout) < 3
        events = workbench.events(name)
        leaving = [event for event in events if event["event"] == "host_leaving"]
        assert [(event["host"], event["kind"], event["reason"]) for event in leaving] == [
            ("host1", "sigusr1", "the host is about to be taken away (SIGUSR1)"),
            ("host2", "hook", "the pod is evicted"),
        ]
        assert leaving[0]["grace_s"] == 120
        assert 19 < leaving[1]["grace_s"] <= 20
        evicted = [event for event in events if event["event"] == "evicted"]
        assert [(event["replica"], event["orderly"]) for event in evicted] == [(1, True), (2, True)], "once"
        exits = [event["exit"] for event in events if event["event"] == "rank_exited"]
        assert exits == [{"code": 0}, {"code": 0}], "nobody was killed"
        shown = workbench.cli("events", name).stdout
        assert re.search(r"host host2 is leaving, (19\.\d|20\.0) s are left: the pod is evicted", shown)
