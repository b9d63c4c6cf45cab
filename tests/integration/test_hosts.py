"""Hosts that never come, and one that is about to be taken away: several real agents, on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hosts import enrol, enrolled_hosts, enrolment, several_hosts
from tests.support.processes import environ_of
from tests.support.runs import FREE_RANK, Workbench, generation_of, pid_of
from tests.support.steps import longest_gap_s
from tests.support.waiting import eventually

JOIN_S, LOST_S = 2.0, 8.0
LONGEST_GAP_S = 8
"""Of those that stay, on a busy machine: who is not told waits for the heartbeat of who left, for 20 s."""
LIGHTHOUSE = {
    "join_timeout_s": JOIN_S,
    "heartbeat_timeout_s": 1,
    "process_group_timeout_s": 30,
    "quorum_timeout_s": 60,
}


@pytest.mark.parametrize(
    ("min_replicas", "state"), [pytest.param(2, "SUCCEEDED", marks=pytest.mark.slow), (3, "FAILED")]
)
def test_a_host_that_never_comes_is_named_and_waited_for_no_longer_than_its_limits(
    workbench: Workbench, min_replicas: int, state: str
) -> None:
    job = workbench.job(
        "alone", run=f"{FREE_RANK} --steps 250", min_replicas=min_replicas, lighthouse=LIGHTHOUSE
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
    grace_s = 30
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
        assert keepers[1].wait(2 * grace_s) == 143
        assert time.monotonic() - told_s < grace_s / 2, "it does not wait for the end of the grace time"
        at_notice = workbench.status(name)["groups"][0]["step"]
        eventually(lambda: workbench.status(name)["groups"][0]["step"] >= at_notice + 20)
        now = workbench.wait_for_state(name, "DEGRADED")
        for replica in (0, 2):
            assert pid_of(now, replica) == pid_of(before, replica)
            assert longest_gap_s(workbench.logs(name, replica=replica)) < LONGEST_GAP_S
        assert now["recoveries"] == [], "nothing has failed"
        (exited,) = (event for event in workbench.events(name) if event["event"] == "rank_exited")
        assert (exited["replica"], exited["exit"]) == (1, {"code": 0}), "it was not killed"
        log = workbench.logs(name, replica=0)
        (left,) = re.findall(r"leaves after step (\d+)", "\n".join(exited["tail"]))
        # What it has committed, the others have: each step it took part in is one of theirs.
        assert re.search(rf"step {left} at ", log)
        evicted = [event for event in workbench.events(name) if event["event"] == "evicted"]
        assert [(event["replica"], event["orderly"]) for event in evicted] == [(1, True)]


def test_hosts_that_enrolled_train_over_tls_and_outlive_their_controller(workbench: Workbench) -> None:
    job = workbench.job("far", run=f"{FREE_RANK} --steps 3000", lighthouse=LIGHTHOUSE)
    with enrolled_hosts(workbench, job, count=3) as far:
        before = workbench.wait_for_step(far.name, 20)
        ports, token = far.ports, json.loads((far.run_dir / "private.json").read_text())["token"]
        assert {name: len(numbers) for name, numbers in ports.items()} == {"controller": 1, "lighthouse": 2}
        for name, folder in far.hosts.items():
            for file in ("agent.json", "private.json"):
                assert stat.S_IMODE((folder / file).stat().st_mode) == 0o600
            # The process that was started is the keeper: what it was started with is gone from it, too.
            environ = environ_of(far.keepers[name].pid)
            assert not {"SKY_MONARCH_HOST", "SKY_MONARCH_ENROLMENT"} & environ.keys()
            assert environ["SKY_MONARCH_RUN_ID"] == far.run_id
            assert token not in Path(f"/proc/{far.keepers[name].pid}/cmdline").read_text()

        os.kill(before["controller_pid"], signal.SIGKILL)
        killed_ns = time.monotonic_ns()

        def back() -> list[dict[str, object]]:
            events = [event for event in workbench.events(far.name) if event["mono_ns"] > killed_ns]
            dialled = [event for event in events if event["event"] == "agent_connected"]
            assert {event["host"] for event in dialled} == {"head", *far.hosts}
            return dialled

        again = eventually(back)
        first = [event for event in workbench.events(far.name) if event["event"] == "agent_connected"]
        incarnations = {event["host"]: event["incarnation"] for event in first[: len(far.hosts) + 1]}
        assert {event["host"]: event["incarnation"] for event in again} == incarnations, (
            "the very same agents"
        )
        assert far.ports == ports
        at = workbench.status(far.name)["step"]
        now = workbench.wait_for_step(far.name, at + 20)
        assert now["controller_pid"] != before["controller_pid"]
        assert [pid_of(now, replica) for replica in range(3)] == [
            pid_of(before, replica) for replica in range(3)
        ]
        assert now["recoveries"] == []

        # A death travels to the lighthouse over TLS, and the rank's own questions do.
        os.kill(pid_of(now, 1), signal.SIGKILL)
        eventually(lambda: generation_of(workbench.status(far.name), 1) == 2)
        after = workbench.wait_for_step(far.name, workbench.status(far.name)["step"] + 20)
        assert [generation_of(after, replica) for replica in range(3)] == [1, 2, 1]
        evicted = [event for event in workbench.events(far.name) if event["event"] == "evicted"]
        assert [(event["replica"], event["generation"]) for event in evicted] == [(1, 1)]
        assert evicted[0]["quorum_id"] is not None, "the lighthouse had it in a quorum"

        assert workbench.cli("down", far.name, "--grace", "2").returncode == 0
        for name, keeper in far.keepers.items():
            assert keeper.wait(30) == 0
            assert not (far.hosts[name] / "private.json").exists(), (
                "a host keeps no secret of a run that is over"
            )


def test_a_host_of_another_version_says_so_and_one_with_anothers_certificate_is_refused(
    workbench: Workbench,
) -> None:
    job = workbench.job("apart", run=f"{FREE_RANK} --steps 3000", replicas=1, lighthouse=LIGHTHOUSE)
    with enrolled_hosts(workbench, job, count=1) as far:
        workbench.wait_for_step(far.name, 5)
        stranger = enrol(far, "old", workbench.folder / "old", enrolment(far, "far-h1", version="0.0.1"))
        assert stranger.wait(30) == 2
        log = (far.run_dir / "old.log").read_text()
        assert "error: host far-h1 has sky-monarch" in log
        assert "the run was launched by 0.0.1\nhint: on the host: `pip install sky-monarch==0.0.1`" in log
        assert not (workbench.folder / "old").exists()

        # Of this run, with its token, but of another name than the host that it claims to be.
        claims, shown = enrolment(far, "apart-h1", limits={"flush_s": 0.5}), enrolment(far, "other")
        posing = {**claims, "SKY_MONARCH_ENROLMENT": shown["SKY_MONARCH_ENROLMENT"]}
        poser = enrol(far, "poser", workbench.folder / "poser", {**posing, "SKY_MONARCH_LOG": "debug"})
        try:
            words = "the certificate of other-a1 does not speak for host apart-h1, attempt 1"
            eventually(lambda: words in (far.run_dir / "poser.log").read_text())
        finally:
            poser.send_signal(signal.SIGTERM)
            assert poser.wait(30) == 143
        status = workbench.status(far.name)
        assert status["groups"][0]["generation"] == 1
        assert pid_of(status, 0), "nobody was disturbed"


@pytest.mark.slow
def test_a_host_that_saves_before_it_goes_holds_nobody_up(workbench: Workbench, tmp_path: Path) -> None:
    save_s = 12
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
        assert keepers[1].wait(120) == 143
        assert save_s <= time.monotonic() - told_s < 60, "it saves, and then goes: it need not for 120 s"

        agent = json.loads((workbench.run_folder(name) / "agent-2.json").read_text())
        (tmp_path / "agent.json").write_text(json.dumps(agent))
        words = ["--notice", str(tmp_path), "--grace", "30", "--reason", "the pod is evicted"]
        told = subprocess.run([sys.executable, "-m", "sky_monarch.agent", *words], check=False, timeout=30)
        assert (told.returncode, keepers[2].wait(60)) == (0, 143)

        assert longest_gap_s(workbench.logs(name, replica=0)) < LONGEST_GAP_S
        events = workbench.events(name)
        leaving = [event for event in events if event["event"] == "host_leaving"]
        assert [(event["host"], event["kind"], event["reason"]) for event in leaving] == [
            ("host1", "sigusr1", "the host is about to be taken away (SIGUSR1)"),
            ("host2", "hook", "the pod is evicted"),
        ]
        assert leaving[0]["grace_s"] == 120
        assert 20 < leaving[1]["grace_s"] <= 30
        evicted = [event for event in events if event["event"] == "evicted"]
        assert [(event["replica"], event["orderly"]) for event in evicted] == [(1, True), (2, True)], "once"
        exits = [event["exit"] for event in events if event["event"] == "rank_exited"]
        assert exits == [{"code": 0}, {"code": 0}], "nobody was killed"
        shown = workbench.cli("events", name).stdout
        assert re.search(r"host host2 is leaving, (2\d\.\d|30\.0) s are left: the pod is evicted", shown)
