"""``up --hosts N``: the whole way of a run with hosts, on this machine, as a user types it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from sky_monarch.launch.folder import Phase
from sky_monarch.launch.process import Process, carrying
from tests.support.processes import is_alive, parent_of, send, with_variable
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


@pytest.mark.slow
@pytest.mark.parametrize("began", [True, False], ids=["others train", "nobody trains"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["switched off", "told"])
def test_a_host_that_is_taken_away_in_its_setup_is_had_again_and_no_setup_has_failed(
    workbench: Workbench, how: signal.Signals, began: bool
) -> None:
    # The first of all setups waits to be interrupted, the others for a word of the test.
    first = "mkdir been && echo $$ > pid && mv pid been && sleep 300"
    setup = f"cd {workbench.folder}; {first}; until [ -e go ]; do sleep 0.1; done"
    job = job_of(workbench, "set", setup=setup, lighthouse={"join_timeout_s": 3})
    if began:
        workbench.gate.touch()
    name = workbench.up(job, "--hosts", "2")
    folder = workbench.folder_of(name)

    def victim_of() -> tuple[str, ...]:
        """The host whose setup sleeps, and the other one."""
        pid = int((workbench.folder / "been/pid").read_text())
        above = [Process(pid, 0).arguments()]
        while (pid := parent_of(pid)) > 1:
            above.append(Process(pid, 0).arguments())
        told = "\n".join(word for words in above for word in words)
        return tuple(sorted(("set-h0", "set-h1"), key=lambda host: f"/hosts/{host}-a1" not in told))

    eventually((workbench.folder / "been/pid").exists, within_s=60, comes_always=True)
    victim, other = victim_of()
    mine, theirs = (int(host[-1]) for host in (victim, other))

    def trains(replica: int) -> dict:
        status = workbench.status(name)
        assert (status["groups"][replica]["step"] or 0) > 3, (status["state"], status["reason"])
        return status

    before = eventually(lambda: trains(theirs), within_s=60, comes_always=True) if began else None
    leader = json.loads((folder.path / f"hosts/{victim}-a1/process.json").read_text())["pid"]
    (os.killpg if how is signal.SIGKILL else os.kill)(leader, how)
    workbench.gate.touch()

    after = eventually(lambda: trains(mine), within_s=90)
    assert after["state"] == "RUNNING", after["reason"]
    attempts = {host["host"]: host["attempt"] for host in after["hosts"]}
    assert attempts == {victim: 2, other: 1}, "it alone is had again"
    assert after["groups"][mine]["restarts"] == 0
    assert before is None or pid_of(after, theirs) == pid_of(before, theirs)
    told = {event["state"] for event in workbench.events(name) if event["event"] == "run_state"}
    assert not told & {"FAILED_SETUP", "FAILED", "STOPPING"}


@pytest.mark.slow
def test_a_warning_that_reaches_every_process_of_a_host_takes_that_host_out_in_order(
    workbench: Workbench,
) -> None:
    # As Slurm does it without `B:`: whoever has not heard of the signal ends by it.
    job = job_of(workbench, "warn", recovery={"standby": 1}, lighthouse={"join_timeout_s": 3})
    name = workbench.up(job, "--hosts", "2")
    before = workbench.wait_for_step(name, 10)
    folder = workbench.folder_of(name)
    everybody = with_variable("SKYPILOT_TASK_ID", f"sky-local-{folder.run_id}_warn-h1_1")
    assert len(everybody) > 3, everybody

    send(everybody, signal.SIGUSR1)

    def back() -> dict:
        now = workbench.status(name)
        assert host_of(now, "warn-h1")["attempt"] == 2
        assert (now["state"], now["groups"][1]["generation"] > 1) == ("RUNNING", True), now["reason"]
        assert (now["groups"][1]["step"] or 0) > before["step"] + 5
        return now

    after = eventually(back, within_s=90)
    leaving = [event for event in workbench.events(name) if event["event"] == "host_leaving"]
    assert [(event["host"], event["kind"]) for event in leaving] == [("warn-h1", "sigusr1")]
    assert pid_of(after, 0) == pid_of(before, 0)
    # A rank that knows nothing of the signal ends by it, at worst before its agent has heard: one restart, no more.
    assert after["groups"][1]["restarts"] <= 1
    assert not {pid for pid in everybody if is_alive(pid)}
