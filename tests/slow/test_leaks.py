"""Thirty runs, each ended in another rude way: nothing of them is left on the machine."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

import sky_monarch as sm
from tests.support.processes import send, with_variable, zombies_of
from tests.support.runs import FREE_RANK, Workbench, kill_agent_for_good, quiet_sockets
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)

RUNS, WARM_UP = 30, 3


def left_on_the_machine(own: Path) -> dict[str, set[str]]:
    """What a run could leave: shared memory and semaphores of both kinds, temporary files, descriptors of ours."""
    system_v = {
        f"{kind} {line.split()[1]}"
        for kind in ("shm", "sem", "msg")
        for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
    }
    temporary = {entry.name for entry in Path(tempfile.gettempdir()).iterdir()} - {own.name}
    gc.collect()
    descriptors = {f"{n}" for n in range(len(list(Path("/proc/self/fd").iterdir())))}
    return {
        "shared memory": {entry.name for entry in Path("/dev/shm").iterdir()},  # named semaphores, too
        "System V": system_v,
        "temporary files": {name for name in temporary if "sky-monarch" in name or name.startswith("smt-")},
        "descriptors": descriptors,
    }


def test_thirty_runs_that_are_killed_leave_nothing(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in workbench.env.items():
        monkeypatch.setenv(name, value)
    # Sockets and rendezvous stores, a session, shared memory of its own: what a rank may hold when it is killed.
    script = workbench.folder / "rank.py"
    script.write_text(
        "from multiprocessing import Semaphore\n"
        "import sys\n"
        "held = Semaphore(1)\n"
        "from tests.support.free_rank import main\n"
        "sys.exit(main())\n"
    )
    run_line = FREE_RANK.replace("-m tests.support.free_rank", str(script))
    job = workbench.job("leak", run=f"{run_line} --steps 100000", replicas=2)
    known: dict[str, set[str]] = {}
    for number in range(RUNS):
        with quiet_sockets(), sm.up(job) as run:
            pids = eventually(
                lambda run=run: (
                    (found := [rank.pid for group in run.status().groups for rank in group.ranks])
                    and len(found) == 2
                    and all(found)
                    and (run.status().step or 0) >= 1
                    and found
                ),
                within_s=60,
            )
            status = run.status()
            match number % 3:
                case 0:
                    send(pids, signal.SIGKILL)
                case 1:
                    send((status.controller_pid, status.lighthouse.pid, pids[0]), signal.SIGKILL)
                case 2:
                    kill_agent_for_good(run.folder)
            run.down(grace_s=1)
            eventually(lambda run=run: not with_variable("SKY_MONARCH_RUN_ID", run.run_id), within_s=15)
        if number == WARM_UP:
            known = left_on_the_machine(workbench.folder)
    more = {what: found - known[what] for what, found in left_on_the_machine(workbench.folder).items()}
    assert not any(more.values()), more
    assert zombies_of(os.getpid()) == []
