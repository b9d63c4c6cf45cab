"""Hosts that are taken away with all that has the state: it is saved first, though the job does not ask for that."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT, Workbench
from tests.support.waiting import eventually

START_S = 90


def job_of(bench: Workbench, name: str) -> Path:
    return bench.job(
        name,
        run=shlex.join([sys.executable, f"{ROOT}/examples/train.py", "--steps", "100000"]),
        replicas=2,
        checkpoint={
            "to": str(bench.folder / "saved"),
            "every_steps": 1_000_000,
        },  # none is due before the notice
    )


def notice(bench: Workbench, name: str, life: str) -> None:
    leader = json.loads((bench.run_folder(name) / "hosts" / life / "process.json").read_text())["pid"]
    os.kill(leader, signal.SIGUSR1)


def of_kind(bench: Workbench, name: str, kind: str) -> list[dict]:
    return [event for event in bench.events(name) if event["event"] == kind]


@pytest.mark.slow
def test_the_last_host_that_is_taken_away_saves_what_nobody_else_has(workbench: Workbench) -> None:
    name = workbench.up(job_of(workbench, "last"), "--hosts", "2")
    workbench.wait_for_step(name, 10, within_s=START_S)

    notice(workbench, name, "last-h0-a1")
    eventually(lambda: of_kind(workbench, name, "host_leaving"), within_s=30)
    notice(workbench, name, "last-h1-a1")

    (restored, *_) = eventually(lambda: of_kind(workbench, name, "checkpoint_restored"), within_s=START_S)
    saved = [event["step"] for event in of_kind(workbench, name, "checkpoint_saved")]
    ended = [event["step"] for event in of_kind(workbench, name, "generation_ended")]
    assert saved == [max(ended[:2])], "one of them saved, and nothing that was committed is lost"
    assert restored["step"] == saved[0]
    workbench.wait_for_step(name, saved[0] + 1, within_s=START_S)
    told = [event for event in of_kind(workbench, name, "command") if event["command"] == "who_saves"]
    assert [(event["host"], event["replica"]) for event in told] == [("last-h0", None), ("last-h1", 1)]


@pytest.mark.slow
def test_all_groups_of_the_only_host_leave_and_their_state_is_saved(workbench: Workbench) -> None:
    job = job_of(workbench, "alone")
    name = workbench.up(job)
    workbench.wait_for_step(name, 10, within_s=START_S)
    keeper = json.loads((workbench.run_folder(name) / "agent.pid").read_text())["pid"]
    os.kill(keeper, signal.SIGUSR1)
    workbench.wait_for_state(name, "FAILED", "LOST", within_s=START_S)  # it was the only host

    saved = [event["step"] for event in of_kind(workbench, name, "checkpoint_saved")]
    ended = [event["step"] for event in of_kind(workbench, name, "generation_ended")]
    assert saved == [max(ended)], "nothing that was committed is lost"


@pytest.mark.slow
def test_a_host_that_leaves_others_behind_saves_nothing(workbench: Workbench) -> None:
    name = workbench.up(job_of(workbench, "one"), "--hosts", "2")
    workbench.wait_for_step(name, 10, within_s=START_S)
    notice(workbench, name, "one-h0-a1")
    back = eventually(
        lambda: [host for host in workbench.status(name)["hosts"] if host["attempt"] == 2], within_s=START_S
    )
    assert back[0]["host"] == "one-h0"
    workbench.wait_for_state(name, "RUNNING", within_s=START_S)
    assert of_kind(workbench, name, "checkpoint_saved") == []
