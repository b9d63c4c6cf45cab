"""Fewer than ``min_replicas`` for a long time: who waits for the others' hosts pays nothing for it."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from tests.integration.test_spares import switch_off
from tests.support.runs import ROOT, Workbench, generation_of, pid_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]

QUORUM_S = 4.0
#: The next host is set up for longer than three quorums may take: with those a session once gave up.
SETUP_S = 20.0
START_S = 120


def test_a_group_that_waits_for_the_host_of_another_one_spends_nothing_of_its_budget(
    workbench: Workbench,
) -> None:
    words = [sys.executable, "-m", "tests.support.staged", str(workbench.folder / "go")]
    words += [f"{ROOT}/examples/train.py", "--steps", "400"]
    job = workbench.job(
        "few",
        run=shlex.join(words),
        setup=f"if [ -e {workbench.folder}/slow ]; then sleep {SETUP_S:g}; fi",
        replicas=2,
        min_replicas=2,
        recovery={"max_restarts": 2},
        lighthouse={
            "join_timeout_s": 2,
            "heartbeat_timeout_s": 1,
            "process_group_timeout_s": 3,
            "quorum_timeout_s": QUORUM_S,
        },
    )
    name = workbench.up(job, "--hosts", "2")

    def trains() -> dict:
        status = workbench.status(name)
        assert all((group["step"] or 0) >= 3 for group in status["groups"]), status["groups"]
        return status

    before = eventually(trains, within_s=START_S, every_s=0.25, comes_always=True)
    (workbench.folder / "slow").touch()
    folder = workbench.folder_of(name)
    switch_off(folder.path, "few-h1-a1", f"sky-local-{folder.run_id}_few-h1_1")

    def back() -> dict:
        status = workbench.status(name)
        restarted = [event for event in workbench.events(name) if event["event"] == "restart_scheduled"]
        assert restarted == [], "nobody's budget is spent"
        assert generation_of(status, 1) > 1
        assert (status["groups"][1]["step"] or 0) > before["step"] + 2, json.dumps(status["groups"])
        return status

    after = eventually(back, within_s=START_S, every_s=0.5)
    assert pid_of(after, 0) == pid_of(before, 0), "it has waited, and goes on as the process that it was"
    assert after["groups"][0]["restarts"] == 0
    shown = workbench.logs(name, replica=0)
    assert shown.count("asking again") >= 3, "it was more than three quorums long"
