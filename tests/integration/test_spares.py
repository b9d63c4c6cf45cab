"""``recovery.spare``: a lost host's groups go on, on a host that was kept for them. Real agents, on this machine."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from sky_monarch.launch.process import carrying
from tests.support.processes import send, with_variable
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.waiting import eventually

#: From the kill of a whole host to the first commit on the spare. Alone it takes 1 to 2 s; a host that is silent is
#: given up after this long.
BACK_S = 30.0


def job_of(bench: Workbench, name: str, **fields: Any) -> Path:
    return bench.job(name, run=f"{FREE_RANK} --steps 100000", replicas=2, **fields)


def hosts_of(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {host["host"]: host for host in status["hosts"]}


def switch_off(folder: Path, life: str, task: str) -> float:
    """SIGKILL everything of a host at once: no agent, keeper or rank says a word. Monotonic seconds of that."""
    leader = json.loads((folder / "hosts" / life / "process.json").read_text())["pid"]
    tree = {leader, *with_variable("SKYPILOT_TASK_ID", task)}
    send(tree, signal.SIGSTOP)  # or what is killed last hangs up in good order
    killed_s = time.monotonic()
    send(tree, signal.SIGKILL)
    return killed_s


def test_the_groups_of_a_host_that_is_switched_off_go_on_on_the_spare_and_the_next_one_is_had(
    workbench: Workbench,
) -> None:
    job = job_of(workbench, "spare", setup="true")
    name = workbench.up(job, "--hosts", "2", "--spare", "1")

    def ready() -> dict[str, Any]:
        now = workbench.status(name)
        assert all(host["phase"] == "UP" for host in now["hosts"]), now["hosts"]
        assert all((group["step"] or 0) > 10 for group in now["groups"]), now["groups"]
        done = [event["host"] for event in workbench.events(name) if event["event"] == "setup_finished"]
        assert len(done) == 3, "the spare is prepared as any other"
        return now

    before = eventually(ready, within_s=90)
    (spare,) = (host for host, one in hosts_of(before).items() if one["spare"])
    (lost,) = (host for host, one in hosts_of(before).items() if one["groups"] == [1])
    folder = workbench.folder_of(name)
    killed_s = switch_off(folder.path, f"{lost}-a1", f"sky-local-{folder.run_id}_{lost}_1")

    def back() -> dict[str, Any]:
        now = workbench.status(name)
        assert hosts_of(now)[spare]["groups"] == [1], now["hosts"]
        again = hosts_of(now)[lost]
        assert (again["spare"], again["attempt"], again["phase"]) == (True, 2, "UP"), again
        return now

    after = eventually(back, within_s=60)
    first = eventually(
        lambda: [
            event
            for event in workbench.events(name)
            if event["event"] == "first_commit"
            and event["replica"] == 1
            and event["generation"] > before["groups"][1]["generation"]
        ],
        within_s=60,
        what="the group commits on the spare",
    )[0]
    took_s = first["mono_ns"] / 1e9 - killed_s
    print(f"from the loss of a host to the first commit on the spare: {took_s:.2f} s")
    assert 0 < took_s < BACK_S
    assert pid_of(after, 0) == pid_of(before, 0), "the other group was not touched"
    left = [now["groups"][1]["restarts_left"] for now in (before, after)]
    assert left[0] == left[1], "what a host costs is not taken from the budget of its group"
    # A spare that came before the others has taken the groups of one of them, which is as good.
    moved = [event for event in workbench.events(name) if event["event"] == "groups_placed"][-1]
    assert (moved["host"], moved["on"], moved["groups"]) == (lost, spare, [1])
    assert f"{lost}  spare" in workbench.cli("status", name).stdout

    done = workbench.cli("down", name, "--grace", "3")
    assert done.returncode == 0, done.stderr
    assert carrying(folder.run_id) == []
    assert {host["phase"] for host in workbench.status(name)["hosts"]} == {"DOWN"}


def test_a_plan_with_a_spare_says_so_and_a_run_of_this_machine_alone_has_none(workbench: Workbench) -> None:
    job = job_of(workbench, "plain", recovery={"spare": 1})

    alone = workbench.cli("up", str(job), "--json")

    assert alone.returncode == 2
    assert "no hosts that could be lost" in json.loads(alone.stdout)["error"]["message"]
    dry = workbench.cli("up", str(job), "--hosts", "2", "--dry-run").stdout
    assert "plain-h2: spare" in dry, dry
    assert not (workbench.home / "runs").exists()
