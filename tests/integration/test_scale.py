"""``sky-monarch scale``: more and fewer replica groups in a run that goes on, with real processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from sky_monarch import sdk
from sky_monarch.errors import ConfigError
from sky_monarch.launch.process import carrying
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.waiting import eventually


def job_of(bench: Workbench, name: str, *, replicas: int = 2, **fields) -> Path:
    return bench.job(name, run=f"{FREE_RANK} --steps 100000", replicas=replicas, **fields)


def states(status: dict) -> list[str]:
    return [group["state"] for group in status["groups"]]


def events_of(bench: Workbench, name: str, kind: str) -> list[dict]:
    return [event for event in bench.events(name) if event["event"] == kind]


def trains(bench: Workbench, name: str, *replicas: int) -> bool:
    groups = {group["replica"]: group for group in bench.status(name)["groups"]}
    return all(one in groups and groups[one]["state"] == "RUNNING" for one in replicas)


def test_groups_are_added_and_leave_in_order_and_a_new_controller_knows_how_many(
    workbench: Workbench,
) -> None:
    name = workbench.up(job_of(workbench, "grow"))
    before = workbench.wait_for_step(name, 3)
    dry = json.loads(workbench.cli("scale", name, "3", "--dry-run", "--json").stdout)
    assert (dry["previous"], dry["replicas"], dry["start"], dry["changed"]) == (2, 3, [2], False)
    assert workbench.status(name)["replicas"] == 2, "a dry run changes nothing"

    told = workbench.cli("scale", name, "3")

    assert told.returncode == 0, told.stderr
    assert "2 -> 3 replica groups" in told.stdout
    assert "replica 2" in told.stdout
    os.kill(before["controller_pid"], signal.SIGKILL)
    assert "has 3 replica groups already" in workbench.cli("scale", name, "3").stdout
    assert workbench.status(name)["controller_pid"] != before["controller_pid"]
    eventually(lambda: trains(workbench, name, 0, 1, 2), within_s=60)
    grown = workbench.status(name)
    assert (grown["replicas"], states(grown)) == (3, ["RUNNING"] * 3), "the number survives a controller"
    assert [pid_of(grown, one) for one in (0, 1)] == [pid_of(before, one) for one in (0, 1)]

    shrunk = json.loads(workbench.cli("scale", name, "1", "--json").stdout)

    assert shrunk["stop"] == [1, 2]
    eventually(lambda: states(workbench.status(name)) == ["RUNNING", "STOPPED", "STOPPED"], within_s=30)
    final = workbench.status(name)
    assert (final["state"], final["replicas"]) == ("RUNNING", 1), "nobody is missed"
    assert {group["restarts"] for group in final["groups"]} == {0}, "no restart was spent"
    assert final["recoveries"] == []
    assert [row["replicas"] for row in events_of(workbench, name, "scaled")] == [3, 1]
    again = workbench.cli("scale", name, "2")
    assert again.returncode == 0, again.stderr
    eventually(lambda: trains(workbench, name, 0, 1), within_s=60)
    assert workbench.status(name)["groups"][1]["generation"] == 2
    assert workbench.cli("down", name, "--grace", "2").returncode == 0
    assert [group["replica"] for group in workbench.status(name)["groups"]] == [0, 1, 2]


def test_what_cannot_be_is_refused_before_anything_is_done(workbench: Workbench) -> None:
    name = workbench.up(job_of(workbench, "no", min_replicas=2))
    few = workbench.cli("scale", name, "1")
    assert few.returncode == 2
    assert "min_replicas" in few.stderr
    with sdk.Run(workbench.folder_of(name)) as run:
        for replicas, why in ((0, "at least 1"), (9000, "cores")):
            with pytest.raises(ConfigError, match=why):
                run.scale(replicas)
        assert workbench.status(name)["replicas"] == 2
        workbench.down(name)
        with pytest.raises(ConfigError, match=r"has ended \(CANCELLED\)"):
            run.scale(3)


@pytest.mark.slow
def test_hosts_are_asked_for_and_taken_down_as_the_groups_come_and_go(workbench: Workbench) -> None:
    name = workbench.up(job_of(workbench, "far"), "--hosts", "2")
    before = workbench.wait_for_step(name, 3)

    grown = json.loads(workbench.cli("scale", name, "4", "--json").stdout)
    os.kill(before["controller_pid"], signal.SIGKILL)

    assert grown["launch"] == ["far-h2", "far-h3"]
    eventually(lambda: trains(workbench, name, 0, 1, 2, 3), within_s=40)
    up = workbench.status(name)
    assert [(host["host"], host["groups"], host["phase"]) for host in up["hosts"]] == [
        (f"far-h{number}", [number], "UP") for number in range(4)
    ]
    assert pid_of(up, 0) == pid_of(before, 0)
    assert workbench.folder_of(name).hosts == ("far-h0", "far-h1", "far-h2", "far-h3")

    shrunk = json.loads(workbench.cli("scale", name, "2", "--json").stdout)
    os.kill(up["controller_pid"], signal.SIGKILL)

    assert shrunk["end"] == ["far-h2", "far-h3"]

    def phases() -> list[tuple[str, bool]]:
        return [(host["phase"], host["gone"]) for host in workbench.status(name)["hosts"]]

    eventually(lambda: phases() == [("UP", False)] * 2 + [("DOWN", True)] * 2, within_s=40)
    left = workbench.status(name)
    assert (left["state"], states(left)) == ("RUNNING", ["RUNNING", "RUNNING", "STOPPED", "STOPPED"])
    assert left["recoveries"] == [], "who leaves in order is no loss"
    assert pid_of(left, 0) == pid_of(before, 0)
    again = json.loads(workbench.cli("scale", name, "3", "--json").stdout)
    assert again["launch"] == ["far-h2"]
    eventually(lambda: trains(workbench, name, 0, 1, 2), within_s=40)
    assert next(host for host in workbench.status(name)["hosts"] if host["host"] == "far-h2")["attempt"] == 2
    run_id = workbench.folder_of(name).run_id
    assert workbench.cli("down", name, "--grace", "3", timeout_s=90).returncode == 0
    assert carrying(run_id) == []
