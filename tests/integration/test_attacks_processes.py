"""Controllers that are stopped, services that cannot be written down, limits that are too low."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from tests.support.processes import is_alive
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.waiting import eventually


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [("controller",), ("controller", "lighthouse", "agent")])
def test_down_ends_a_run_whose_own_processes_are_stopped(
    workbench: Workbench, stopped: tuple[str, ...]
) -> None:
    name = workbench.up(workbench.job("stopped", run="sleep 300", replicas=1))
    status = eventually(lambda: (now := workbench.status(name)) and pid_of(now, 0) and now)
    pids = {
        "controller": status["controller_pid"],
        "lighthouse": status["lighthouse"]["pid"],
        "agent": status["agent_pid"],
    }
    for who in stopped:
        os.kill(pids[who], signal.SIGSTOP)
    done = workbench.cli("down", name, "--grace", "1")
    assert done.returncode == 0, done.stderr
    assert not [pid for pid in (*pids.values(), pid_of(status, 0)) if is_alive(pid)]
    after = workbench.status(name)
    assert (after["state"], after["exit_code"]) == ("CANCELLED", 8)
    assert not (workbench.run_folder(name) / "private.json").exists()


def children_of(parent: int, word: str) -> list[int]:
    """Live children of ``parent`` with ``word`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not is_alive(int(entry.name)):
            continue
        try:
            ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and word in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_service_whose_pid_cannot_be_written_down_runs_once_all_the_same(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("nopid", run="sleep 300", replicas=1))
    status = eventually(lambda: (now := workbench.status(name)) and pid_of(now, 0) and now)
    (workbench.run_folder(name) / "controller.pid.new").mkdir()  # as good as a full disk
    os.kill(status["controller_pid"], signal.SIGKILL)

    def other_controller() -> int | None:
        pid = workbench.status(name)["controller_pid"]
        return pid if pid != status["controller_pid"] else None

    now = eventually(other_controller)
    assert children_of(status["agent_pid"], "sky_monarch.controller") == [now]


def test_a_low_soft_limit_of_open_files_stops_no_group_and_is_handed_on_to_ranks(
    workbench: Workbench,
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 256, "this test needs a hard limit to go up to"
    job = workbench.job("files", run="ulimit -Sn; sleep 2", replicas=24, recovery={"max_restarts": 0})
    done = workbench.cli(
        "up", str(job), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(lines) == sorted(f"[{replica}/0] 64" for replica in range(24))


def written_pid(file: Path, *, other_than: int) -> int:
    """The pid in a service's pid file, once it is another one."""

    def read() -> int | None:
        with contextlib.suppress(FileNotFoundError):
            pid = int(json.loads(file.read_text())["pid"])
            return pid if pid != other_than else None
        return None

    return eventually(read)


@pytest.mark.slow
def test_a_lighthouse_that_is_killed_again_and_again_while_it_is_asked_ends_no_rank(
    workbench: Workbench,
) -> None:
    # Long steps of one group keep the requests of the other two under way at nearly every moment.
    run = f'{FREE_RANK} --steps 60 --step-s "$([ $REPLICA_GROUP_ID = 0 ] && echo 0.3 || echo 0.01)"'
    name = workbench.up(workbench.job("asked", run=run))
    before = workbench.wait_for_step(name, 2)
    pids = {replica: [pid_of(before, replica)] for replica in range(3)}
    known = written_pid(workbench.run_folder(name) / "lighthouse.pid", other_than=0)
    for _ in range(3):
        os.kill(known, signal.SIGKILL)
        known = written_pid(workbench.run_folder(name) / "lighthouse.pid", other_than=known)
    assert workbench.wait_for_end(name)["state"] == "SUCCEEDED"
    assert workbench.pids_spawned(name) == pids
