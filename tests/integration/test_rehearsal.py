"""``up --hosts N``: the whole way of a run with hosts, on this machine, as a user types it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from sky_monarch.launch.folder import Phase
from sky_monarch.launch.process import carrying
from tests.support.processes import is_alive, send
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.waiting import eventually


def job_of(bench: Workbench, name: str, **fields) -> Path:
    return bench.job(name, run=f"{FREE_RANK} --steps 100000", replicas=2, **fields)


def host_of(status: dict, name: str) -> dict:
    return next(host for host in status["hosts"] if host["host"] == name)


def kill_host(run_dir: Path, life: str) -> None:
    """As a machine that is switched off: nothing of it says a word."""
    leader = json.loads((run_dir / "hosts" / life / "process.json").read_text())["pid"]
    os.killpg(leader, signal.SIGKILL)


@pytest.mark.slow
def test_a_lost_host_comes_back_alone_and_down_waits_until_all_are_gone(workbench: Workbench) -> None:
    name = workbench.up(job_of(workbench, "reh"), "--hosts", "2")
    before = workbench.wait_for_step(name, 10)
    assert [(host["host"], host["groups"], host["phase"]) for host in before["hosts"]] == [
        ("reh-h0", [0], "UP"),
        ("reh-h1", [1], "UP"),
    ]
    folder = workbench.folder_of(name)

    kill_host(folder.path, "reh-h1-a1")

    def back() -> dict:
        now = workbench.status(name)
        lost = host_of(now, "reh-h1")
        assert (lost["attempt"], lost["phase"]) == (2, "UP"), (lost, now["reason"])
        assert now["groups"][1]["generation"] > 1
        assert (now["groups"][1]["step"] or 0) > before["step"], now["groups"][1]
        # Progress may be ahead of the event of the first commit, which the record waits for.
        assert [record["first_commit_s"] for record in now["recoveries"]] != [None], now["recoveries"]
        return now

    after = eventually(back, within_s=60)
    assert pid_of(after, 0) == pid_of(before, 0), "the other group was not touched"
    assert host_of(after, "reh-h0")["attempt"] == 1
    left = [now["groups"][1]["restarts_left"] for now in (before, after)]
    assert left[0] == left[1], "what a host costs is not taken from the budget of its group"
    (record,) = after["recoveries"]
    assert (record["replica"], record["generation"]) == (1, 1)
    assert record["cause"].startswith("host reh-h1 was lost: its provider ended it"), record["cause"]
    assert record["next_generation"] == after["groups"][1]["generation"]
    assert 0 < record["detect_s"] < record["spawn_s"] < record["first_commit_s"] < 60, record
    shown = workbench.cli("status", name).stdout
    assert "reh-h1  1       this machine  2        UP" in shown, shown

    done = workbench.cli("down", name, "--grace", "3")
    assert done.returncode == 0, done.stderr
    assert "ended (CANCELLED)" in done.stdout
    assert carrying(folder.run_id) == []
    final = workbench.status(name)
    assert {host["phase"] for host in final["hosts"]} == {"DOWN"}
    assert not (folder.path / "private.json").exists()
    assert not list((folder.path / "hosts").glob("*/private.json"))
    assert "already gone (CANCELLED)" in workbench.cli("down", name).stdout
    hung_up = [event for event in workbench.events(name) if event["event"] == "agent_disconnected"]
    assert {event["host"] for event in hung_up} >= {"reh-h0", "reh-h1"}
    strange = [event["reason"] for event in hung_up if "close_notify" in event["reason"]]
    assert strange == [], "neither an orderly end nor a killed host is an error of TLS"


def test_down_ends_hosts_that_are_still_on_their_way(workbench: Workbench) -> None:
    job = job_of(workbench, "early", setup="sleep 300")
    name = workbench.up(job, "--hosts", "2")
    folder = workbench.folder_of(name)

    done = workbench.cli("down", name, "--grace", "1")

    assert done.returncode == 0, done.stderr
    assert carrying(folder.run_id) == []
    assert workbench.status(name)["state"] == "CANCELLED"


@pytest.mark.slow
def test_a_run_whose_head_was_lost_is_taken_up_again_to_end_its_hosts(workbench: Workbench) -> None:
    name = workbench.up(job_of(workbench, "lost"), "--hosts", "2")
    workbench.wait_for_step(name, 5)
    folder = workbench.folder_of(name)
    keeper = folder.process("agent")
    assert keeper is not None
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()

    send((keeper.pid, *map(int, children)), signal.SIGKILL)

    eventually(lambda: not is_alive(keeper.pid), within_s=5)
    what = "agents of hosts, which are here as well, are not its head"
    eventually(lambda: folder.phase() is Phase.LOST, within_s=5, what=what)
    assert workbench.status(name)["state"] == "LOST"
    done = workbench.cli("down", name, "--grace", "3", timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert carrying(folder.run_id) == []
    final = workbench.status(name)
    assert final["state"] == "CANCELLED", final["reason"]
    assert {host["phase"] for host in final["hosts"]} == {"DOWN"}, "somebody has seen the end of each"


def test_purge_ends_what_is_here_and_asks_nobody(workbench: Workbench) -> None:
    name = workbench.up(job_of(workbench, "purged"), "--hosts", "2")
    folder = workbench.folder_of(name)

    done = workbench.cli("down", name, "--purge", "--grace", "1")

    assert done.returncode == 0, done.stderr
    assert carrying(folder.run_id) == []
    assert "hosts were not waited for" in workbench.status(name)["reason"]
    assert "bill" not in done.stderr, "this machine sends none"


def test_a_rehearsal_that_cannot_be_starts_nothing(workbench: Workbench) -> None:
    job = job_of(workbench, "no")

    done = workbench.cli("up", str(job), "--hosts", "3", "--json")

    assert done.returncode == 2
    assert "there are 2 replica groups" in json.loads(done.stdout)["error"]["message"]
    assert "nobody dials the head" in workbench.cli("up", str(job), "--head-address", "127.0.0.1").stderr
    assert not (workbench.home / "runs").exists()
    dry = json.loads(workbench.cli("up", str(job), "--hosts", "2", "--dry-run", "--json").stdout)
    assert [host["name"] for host in dry["hosts"]] == ["head", "no-h0", "no-h1"]
