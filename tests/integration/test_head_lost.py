"""A head that is a cluster is lost: another one follows it, with hosts of its own. All processes are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.launch.folder import RunFolder
from sky_monarch.launch.process import carrying
from sky_monarch.sdk import _archive
from tests.integration.test_head_cluster import host_of, kill_host, nothing_is_left, start
from tests.support.processes import is_alive
from tests.support.runs import Workbench, pid_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def begin(bench: Workbench, name: str) -> tuple[RunFolder, dict[str, Any]]:
    """A run with somewhere to go on from; what its torch-free ranks would save there is not the matter here."""
    folder = start(bench, name, checkpoint={"to": str(bench.folder / "saved"), "every_steps": 1000})
    before = bench.wait_for_step(name, 5)
    eventually(
        lambda: any(event["event"] == "first_commit" for event in kept(folder)),
        within_s=20,
        what="what happens is kept here, too",
        comes_always=True,
    )
    return folder, before


def kept(folder: RunFolder) -> list[dict[str, Any]]:
    return [event.to_json() for event in _archive.events(folder)]


def told(path: Path) -> list[dict[str, Any]]:
    """The whole lines of what somebody who watches has been told."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def is_had_again(bench: Workbench, name: str, before: dict[str, Any]) -> dict[str, Any]:
    """Wait until the next head has the run, on hosts of its own, and every group commits."""

    def again() -> dict[str, Any]:
        now = bench.status(name)
        assert now["state"] == "RUNNING", (now["state"], now["reason"])
        for host in (f"{name}-h0", f"{name}-h1"):
            found = host_of(now, host)
            assert (found["attempt"], found["phase"]) == (2, "UP"), found
        for group, was in zip(now["groups"], before["groups"], strict=True):
            assert group["generation"] > was["generation"], group
            assert (group["step"] or 0) >= 5, group
        return now

    return eventually(again, within_s=90, every_s=0.1, what="the next head has the run")


def test_a_lost_head_is_had_again_with_hosts_of_its_own_and_who_watches_goes_on(workbench: Workbench) -> None:
    folder, before = begin(workbench, "again")
    pids = [pid_of(before, replica) for replica in (0, 1)]
    seen = workbench.folder / "seen.ndjson"
    argv = [sys.executable, "-m", "sky_monarch", "events", "again", "--follow", "--json"]
    with seen.open("wb") as output, subprocess.Popen(argv, env=workbench.env, stdout=output) as watching:
        try:
            kill_host(folder, "again-head-a1")
            after = is_had_again(workbench, "again", before)
            assert watching.poll() is None, "who watches waits for the next head"
            eventually(
                lambda: [one["event"] for one in told(seen)].count("first_commit") == 4,
                within_s=20,
                what="and hears of it",
            )
        finally:
            watching.kill()
    assert [one["event"] for one in told(seen)].count("head_replaced") == 1

    assert not any(map(is_alive, pids)), "nobody of the run before is left"
    living = {process.command() for process in carrying(folder.run_id)}
    assert not [command for command in living if "again-head-a1" in command or "-h0-a1" in command]
    events = workbench.events("again")
    (replaced,) = (event for event in events if event["event"] == "head_replaced")
    assert "again-head, is gone (its agent was killed by SIGKILL)" in replaced["reason"]
    assert replaced["hosts"] == {"again-h0": 1, "again-h1": 1}
    numbers = [event["id"] for event in events]
    assert numbers == sorted(set(numbers)), "no id is given twice"
    old = [event["event"] for event in events if event["id"] < replaced["id"]]
    assert old.count("first_commit") == 2, "what the lost journal told is kept here"
    assert after["elapsed_s"] > before["elapsed_s"]

    done = workbench.cli("down", "again", "--grace", "2")
    assert done.returncode == 0, done.stderr
    nothing_is_left(folder)
    final = workbench.status("again")
    assert final["state"] == "CANCELLED"
    assert {host["host"]: host["phase"] for host in final["hosts"]} == {
        "again-h0": "DOWN",
        "again-h1": "DOWN",
        "again-head": "DOWN",
    }


def test_a_launcher_that_is_killed_while_it_clears_up_after_a_lost_head_goes_on_with_that(
    workbench: Workbench,
) -> None:
    folder, before = begin(workbench, "twice")
    keeper = folder.agent()
    assert keeper is not None
    (child,) = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()

    kill_host(folder, "twice-head-a1")
    eventually((folder.path / "succession.json").exists, within_s=30, every_s=0.001)
    os.kill(int(child), signal.SIGKILL)

    is_had_again(workbench, "twice", before)
    requests = json.loads((folder.path / "requests.json").read_text())
    assert requests["hosts"]["twice-head"]["attempt"] == 2
    assert requests["older"] == []
    assert workbench.cli("down", "twice", "--grace", "2").returncode == 0
    nothing_is_left(folder)


def test_down_while_a_lost_head_is_followed_ends_the_run(workbench: Workbench) -> None:
    folder, _ = begin(workbench, "over")

    kill_host(folder, "over-head-a1")
    eventually((folder.path / "succession.json").exists, within_s=30, every_s=0.001)
    done = workbench.cli("down", "over", "--grace", "1", timeout_s=120)

    assert done.returncode == 0, done.stderr
    assert workbench.status("over")["state"] == "CANCELLED"
    nothing_is_left(folder)
