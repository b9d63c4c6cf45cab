"""``up --head cluster``: the head is a host of its own, and who launched it may go away. All processes are real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from sky_monarch.launch.away import begin
from sky_monarch.launch.folder import Phase, RunFolder
from sky_monarch.launch.process import Process, carrying
from tests.support.files import holders
from tests.support.processes import send
from tests.support.runs import FREE_RANK, Workbench, ended_at_exit, pid_of
from tests.support.waiting import eventually

CANARY = "canary-7261"


def start(bench: Workbench, name: str, **fields) -> RunFolder:
    job = bench.job(
        name, run=f"{FREE_RANK} --steps 100000", replicas=2, head="cluster", secrets={"KEY": CANARY}, **fields
    )
    bench.up(job, "--hosts", "2")
    return bench.folder_of(name)


def kill_launcher(folder: RunFolder) -> None:
    """As a laptop that is switched off: the keeper first, which would start another one."""
    keeper = folder.agent()
    assert keeper is not None
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    send((keeper.pid, *map(int, children)), signal.SIGKILL)
    eventually(lambda: folder.agent() is None)


def leader(folder: RunFolder, life: str) -> int:
    pid: int = json.loads((folder.path / "hosts" / life / "process.json").read_text())["pid"]
    return pid


def kill_host(folder: RunFolder, life: str) -> None:
    """As a machine that is switched off: nothing of it says a word."""
    group = leader(folder, life)
    for process in carrying(folder.run_id):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == group:
                process.signal(signal.SIGKILL)


def host_of(status: dict, name: str) -> dict:
    found = next((host for host in status["hosts"] if host["host"] == name), None)
    assert found is not None, (name, status["hosts"])
    return found


def nothing_is_left(folder: RunFolder) -> None:
    assert [process.command() for process in carrying(folder.run_id)] == []
    assert not list(folder.path.rglob("private.json"))
    assert not list(folder.path.rglob("*.sock"))
    assert not folder.api.exists()
    assert not folder.api.is_symlink()


def holders_of_the_secret(folder: RunFolder) -> list[Path]:
    return holders(folder.path, CANARY.encode())


@pytest.mark.slow
def test_the_head_is_a_cluster_that_goes_last(workbench: Workbench) -> None:
    folder = start(workbench, "far")
    status = workbench.wait_for_step("far", 5)

    keeper = folder.agent()
    assert keeper is not None
    head = leader(folder, "far-head-a1")
    assert os.getsid(head) == head, "a tree of its own"

    def line() -> dict:
        found = host_of(workbench.status("far"), "far-head")
        assert (found["head"], found["groups"], found["cost_usd"]) == (True, [], 0.0), found
        return found

    eventually(line, within_s=20, what="the head costs as hosts do, and is a line of its own")
    assert status["run_dir"] == str(folder.path), "whose files a user looks for are here"
    assert {path.name for path in holders_of_the_secret(folder)} == {"private.json"}
    for path in holders_of_the_secret(folder):
        assert path.stat().st_mode & 0o777 == 0o600, path
    for process in carrying(folder.run_id):
        assert CANARY not in process.command()
    assert workbench.cli("logs", "far", "--tail", "1", "--replica", "1").stdout.strip(), "by way of the head"
    token = folder.token
    assert token is not None
    for path in folder.path.rglob("*.log"):
        assert token not in path.read_text(errors="replace"), path

    done = workbench.cli("down", "far", "--grace", "2")

    assert done.returncode == 0, done.stderr
    assert "ended (CANCELLED)" in done.stdout
    nothing_is_left(folder)
    final = workbench.status("far")
    assert {host["host"]: host["phase"] for host in final["hosts"]} == {
        "far-h0": "DOWN",
        "far-h1": "DOWN",
        "far-head": "DOWN",
    }
    assert final["step"] >= 5, "the head has told how far it came"
    events = [event["event"] for event in workbench.events("far")]
    assert events[-1] == "run_ended"
    assert "first_commit" in events
    assert "already gone (CANCELLED)" in workbench.cli("down", "far").stdout


@pytest.mark.slow
def test_without_its_launcher_a_run_trains_on_and_a_lost_host_waits_for_it(workbench: Workbench) -> None:
    folder = start(workbench, "apart")
    before = workbench.wait_for_step("apart", 5)
    kill_launcher(folder)

    workbench.wait_for_step("apart", before["step"] + 20)
    assert folder.phase() is Phase.LIVE
    kill_host(folder, "apart-h1-a1")

    def degraded() -> dict:
        now = workbench.status("apart")
        assert now["state"] == "DEGRADED", (now["state"], now["reason"])
        assert "waiting for launcher" in now["reason"], now["reason"]
        return now

    alone = eventually(degraded, within_s=90)
    assert "`sky-monarch attach apart`" in alone["reason"]
    assert pid_of(alone, 0) == pid_of(before, 0), "the other group was not touched"
    later = workbench.status("apart")
    assert host_of(later, "apart-h1")["attempt"] == host_of(alone, "apart-h1")["attempt"]

    again = workbench.cli(
        "up", str(workbench.folder / "apart.yaml"), "--hosts", "2", "--detach"
    )  # of the very same job
    assert again.returncode == 0, again.stderr
    assert folder.run_id in again.stdout

    def back() -> dict:
        now = workbench.status("apart")
        lost = host_of(now, "apart-h1")
        assert (lost["attempt"], lost["phase"]) == (2, "UP"), (lost, now["reason"])
        assert (now["groups"][1]["step"] or 0) > alone["step"], now["groups"][1]
        return now

    after = eventually(back, within_s=60)
    assert pid_of(after, 0) == pid_of(before, 0)
    assert after["state"] == "RUNNING", after["reason"]
    assert workbench.cli("down", "apart", "--grace", "2").returncode == 0
    nothing_is_left(folder)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.7, 3.0])
def test_a_launch_that_is_interrupted_leaves_nothing(workbench: Workbench, after_s: float) -> None:
    job = workbench.job("cut", run=f"{FREE_RANK} --steps 100000", replicas=2, head="cluster")
    with ended_at_exit(workbench.popen("up", str(job), "--hosts", "2", "--detach")) as up:
        eventually(lambda: workbench.folder_of("cut"), within_s=20)
        time.sleep(after_s)  # at no moment in particular
        up.send_signal(signal.SIGINT)
        up.wait(60)
    if up.returncode == 0:  # it was up by then
        assert workbench.cli("down", "cut", "--grace", "1").returncode == 0
    folder = workbench.folder_of("cut")
    assert folder.phase() is Phase.ENDED
    nothing_is_left(folder)


@pytest.mark.slow
def test_a_head_that_dies_ends_the_run_and_its_hosts_and_says_so(workbench: Workbench) -> None:
    folder = start(workbench, "beheaded")
    workbench.wait_for_step("beheaded", 5)

    kill_host(folder, "beheaded-head-a1")

    final = workbench.wait_for_end("beheaded", within_s=60)
    assert final["state"] == "FAILED"
    assert "its head, beheaded-head, is gone (its agent was killed by SIGKILL)" in final["reason"]
    assert {host["phase"] for host in final["hosts"]} == {"DOWN"}, "somebody has seen the end of each"
    eventually(lambda: carrying(folder.run_id) == [], within_s=10)
    assert "already gone (FAILED)" in workbench.cli("down", "beheaded").stdout
    nothing_is_left(folder)


@pytest.mark.slow
def test_down_ends_what_has_neither_head_nor_launcher(workbench: Workbench) -> None:
    folder = start(workbench, "orphan")
    workbench.wait_for_step("orphan", 5)
    kill_launcher(folder)
    kill_host(folder, "orphan-head-a1")

    asked = workbench.cli("status", "orphan", timeout_s=60)
    assert asked.returncode != 0
    assert "on the cluster orphan-head" in asked.stderr
    assert "`sky-monarch attach orphan`" in asked.stderr
    done = workbench.cli("down", "orphan", "--grace", "2", timeout_s=90)

    assert done.returncode == 0, done.stderr
    assert "ended (CANCELLED)" in done.stdout
    nothing_is_left(folder)
    assert {host["phase"] for host in workbench.status("orphan")["hosts"]} == {"DOWN"}


@pytest.mark.slow
def test_a_head_that_does_not_answer_is_ended_from_outside(workbench: Workbench) -> None:
    folder = start(workbench, "deaf")
    os.kill(workbench.wait_for_step("deaf", 5)["controller_pid"], signal.SIGSTOP)

    done = workbench.cli("down", "deaf", "--grace", "1", timeout_s=120)

    assert done.returncode == 0, done.stderr
    assert "its head, deaf-head, did not answer" in workbench.status("deaf")["reason"]
    nothing_is_left(folder)


@pytest.mark.slow
def test_a_run_that_ended_while_nobody_was_here_is_told_when_somebody_is(workbench: Workbench) -> None:
    job = workbench.job("done", run=f"{FREE_RANK} --steps 300", replicas=2, head="cluster")
    workbench.up(job, "--hosts", "2")
    folder = workbench.folder_of("done")
    workbench.wait_for_step("done", 1)
    kill_launcher(folder)
    workbench.wait_for_state("done", "STOPPING", "SUCCEEDED")

    watched = workbench.cli("attach", "done", "--no-logs", timeout_s=90)

    assert watched.returncode == 0, watched.stderr
    assert "had no launcher here: it has one again" in watched.stderr
    final = workbench.status("done")
    assert final["state"] == "SUCCEEDED", final["reason"]
    assert folder.phase() is Phase.ENDED
    assert folder.agent() is None
    assert {host["phase"] for host in workbench.status("done")["hosts"]} == {"DOWN"}
    assert workbench.cli("down", "done").returncode == 0
    nothing_is_left(folder)


@pytest.mark.slow
def test_a_launcher_that_is_killed_is_kept_and_there_is_only_one(workbench: Workbench) -> None:
    folder = start(workbench, "kept")
    workbench.wait_for_step("kept", 5)
    keeper = folder.agent()
    assert keeper is not None
    (child,) = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    old = Process.of(int(child))
    assert old is not None

    old.signal(signal.SIGKILL)
    kill_host(folder, "kept-h1-a1")

    eventually(lambda: host_of(workbench.status("kept"), "kept-h1")["attempt"] == 2, within_s=60)
    assert keeper.alive
    assert not begin(folder), "it runs"
    done = workbench.cli("down", "kept", "--purge", "--grace", "1")
    assert done.returncode == 0, done.stderr
    assert "hosts were not waited for" in workbench.status("kept")["reason"]
    nothing_is_left(folder)
