"""Ranks dial their agent and never the lighthouse, so that its death is not theirs."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.actors.lighthouse_control import LighthouseControl
from tests.support.processes import is_alive
from tests.support.runs import FREE_RANK, Workbench, generation_of, pid_of
from tests.support.waiting import eventually

Commit = dict[str, Any]
NO_RETRIES = {"TORCHFT_QUORUM_RETRIES": "0"}


def kill_lighthouse_that_is_asked(workbench: Workbench, name: str) -> None:
    """One of two groups waits for the other, so that the lighthouse dies with a question in its hands."""
    folder = workbench.run_folder(name)
    known = json.loads((folder / "run.json").read_text())
    token = json.loads((folder / "private.json").read_text())["token"]
    control = LighthouseControl(f"unix:{known['sockets']['lighthouse']}", token=token, run_id=known["run_id"])

    def asks() -> bool:
        return any(one["replica"] == 0 and one["asking"] for one in control.state()["replicas"])

    status = workbench.status(name)
    victim, slow = status["lighthouse"]["pid"], pid_of(status, 1)

    def killed() -> bool:
        # Stopped inside a collective it keeps the other one there, which then asks nobody: another time, then.
        os.kill(slow, signal.SIGSTOP)
        try:
            eventually(asks, within_s=1)
            os.kill(victim, signal.SIGKILL)
            eventually(lambda: not is_alive(victim), within_s=10)
        finally:
            os.kill(slow, signal.SIGCONT)
        return True

    eventually(killed, within_s=30, every_s=0.1)
    eventually(lambda: workbench.status(name)["lighthouse"]["pid"] not in {None, victim}, within_s=10)


def assert_nobody_was_lost(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert [generation_of(after, replica) for replica in (0, 1)] == [1, 1], "nobody was lost"
    for replica in (0, 1):
        assert pid_of(after, replica) == pid_of(before, replica)


def test_a_rank_without_retries_outlives_the_lighthouse_that_it_asks(workbench: Workbench) -> None:
    job = workbench.job("door", run=f"{FREE_RANK} --steps 2000", replicas=2, envs=NO_RETRIES)
    name = workbench.up(job)
    before = workbench.wait_for_step(name, 5)
    kill_lighthouse_that_is_asked(workbench, name)
    workbench.wait_for_step(name, workbench.status(name)["step"] + 10)
    assert_nobody_was_lost(before, workbench.status(name))


def commits(folder: Path, replica: int) -> list[Commit]:
    path = folder / f"r{replica}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def commit_together(folder: Path, *, beyond: int) -> None:
    """Wait until both groups have committed five steps beyond that one, in one quorum."""

    def probe() -> bool:
        latest = [(commits(folder, replica) or [{"step": 0, "participants": 0}])[-1] for replica in (0, 1)]
        return all(one["participants"] == 2 and one["step"] >= beyond + 5 for one in latest)

    eventually(probe, within_s=60, comes_always=beyond == 0)


@pytest.mark.torch
@pytest.mark.timeout(240)
def test_managers_without_retries_outlive_the_lighthouse_that_they_ask(workbench: Workbench) -> None:
    folder = workbench.folder / "commits"
    folder.mkdir()
    run = f"{sys.executable} -m tests.support.manager_rank {folder}"
    name = workbench.up(workbench.job("managers", run=run, replicas=2, envs=NO_RETRIES))
    commit_together(folder, beyond=0)
    before = workbench.status(name)
    for _ in range(3):
        kill_lighthouse_that_is_asked(workbench, name)
        commit_together(folder, beyond=commits(folder, 0)[-1]["step"])
    assert_nobody_was_lost(before, workbench.status(name))
    (folder / "stop").touch()
    gaps = [after["at"] - before["at"] for before, after in pairwise(commits(folder, 0))]
    # Alone it would wait for as long as a question may last: 30 s.
    assert max(gaps) < 20, "it goes on where the lighthouse is back"
