"""Checkpoints under the real agent: what goes wrong is an event, and all groups at once come back from them."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import is_alive, send
from tests.support.runs import ROOT, Workbench, pid_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
START_S = 120


def wait_for_event(workbench: Workbench, name: str, event: str, after: int = 0) -> dict[str, Any]:
    def probe() -> dict[str, Any] | None:
        found = (line for line in workbench.events(name) if line["event"] == event and line["id"] > after)
        return next(found, None)

    return eventually(probe, within_s=START_S, every_s=0.2, what=event)


def kill_in_a_save(workbench: Workbench, name: str, folder: Path, gate: Path) -> None:
    """SIGKILL the group that saves while it does: that save is never completed, and the next one is."""
    # The first one of the quorum saves.
    pid = workbench.running_pid(name, 0)
    hold = Path(f"{gate}.hold")
    hold.touch()
    eventually(Path(f"{gate}.held-0").exists, within_s=START_S, what="it is in the middle of a save")
    (begun,) = (path.name for path in folder.glob(".tmp-step-*"))
    send((pid,), signal.SIGKILL)
    eventually(lambda: not is_alive(pid))
    hold.unlink()
    step = int(begun.removeprefix(".tmp-step-")[:12])
    assert not list(folder.glob(f"step-{step:012d}*")), "it was still being saved"
    newest = max(line["id"] for line in workbench.events(name))
    following = wait_for_event(workbench, name, "checkpoint_saved", after=newest)
    assert following["step"] > step
    assert not list(folder.glob(f"*step-{step:012d}*")), (
        "it is completed by nobody, and nothing of it is left"
    )
    eventually(
        lambda: (now := workbench.status(name)["groups"][0])["generation"] == 2 and now["state"] == "RUNNING",
        within_s=START_S,
    )


@pytest.mark.slow
def test_a_save_that_fails_is_an_event_and_all_groups_killed_at_once_go_on_from_the_last_good_one(
    workbench: Workbench,
) -> None:
    gate, folder = workbench.folder / "go", workbench.folder / "saved"
    script = f"{ROOT}/examples/train.py --steps 300".split()
    words = [sys.executable, "-m", "tests.support.staged", "--slow-saves", str(gate), *script]
    job = workbench.job(
        "durable",
        run=shlex.join(words),
        replicas=2,
        checkpoint={"to": str(folder), "every_steps": 5, "keep": 2},
    )
    name = workbench.up(job)
    saved = wait_for_event(workbench, name, "checkpoint_saved")
    assert saved["to"] == str(folder)
    assert saved["bytes"] > 1000

    kill_in_a_save(workbench, name, folder, gate)

    # From now on the kernel lets no file of theirs grow beyond this: as on a disk that is full.
    pids = [pid_of(workbench.status(name), replica) for replica in (0, 1)]
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
    failed = wait_for_event(workbench, name, "checkpoint_failed")
    assert (failed["error"], failed["to"]) == ("File too large", str(folder))
    shown = workbench.cli("events", name).stdout
    assert f"the checkpoint of step {failed['step']} was not saved to {folder}: File too large" in shown
    good = max(int(path.name[5:17]) for path in folder.glob("step-*"))
    assert good < failed["step"]
    workbench.wait_for_step(name, failed["step"] + 3)
    assert [pid_of(workbench.status(name), replica) for replica in (0, 1)] == pids, "nobody died of it"

    send(pids, signal.SIGKILL)
    restored = wait_for_event(workbench, name, "checkpoint_restored", after=failed["id"])
    assert restored["step"] == good
    wait_for_event(workbench, name, "checkpoint_saved", after=restored["id"])
    gate.touch()
    after = workbench.wait_for_end(name, within_s=START_S)
    assert after["state"] == "SUCCEEDED", after["reason"]
    digests = re.findall(r"step (\d+) digest (\w+)", workbench.logs(name))
    assert len(digests) == 2
    assert len(set(digests)) == 1
    wait_for_event(workbench, name, "run_ended")
    steps = [line["step"] for line in workbench.events(name) if line["event"] == "checkpoint_saved"]
    assert steps[-1] == 300, "the last one is told, too"
    assert Path(folder, max(path.name for path in folder.iterdir())).name.startswith("step-000000000300")


@pytest.mark.slow
def test_groups_whose_host_is_taken_away_save_the_step_that_they_have(workbench: Workbench) -> None:
    folder = workbench.folder / "saved"
    job = workbench.job(
        "evicted",
        run=shlex.join([sys.executable, f"{ROOT}/examples/train.py", "--steps", "100000"]),
        replicas=2,
        checkpoint={"to": str(folder), "every_steps": 1_000_000},  # none is due before the notice
        recovery={"on_notice": "checkpoint"},
    )
    name = workbench.up(job)
    workbench.wait_for_step(name, 10, within_s=START_S)
    keeper = json.loads((workbench.run_folder(name) / "agent.pid").read_text())["pid"]
    os.kill(keeper, signal.SIGUSR1)
    workbench.wait_for_state(name, "FAILED", "LOST", within_s=START_S)  # it was the only host

    events = workbench.events(name)
    committed = [event["step"] for event in events if event["event"] == "generation_ended"]
    assert len(committed) == 2
    assert min(committed) >= 10
    saved = [event["step"] for event in events if event["event"] == "checkpoint_saved"]
    assert saved, "it was saved before they went"
    assert max(saved) == max(committed), "nothing that was committed is lost"
    assert {int(path.name[5:17]) for path in folder.glob("step-*")} == set(saved)
    exits = [event["exit"] for event in events if event["event"] == "rank_exited"]
    assert exits == [{"code": 0}] * 2, "they have left in time"

    assert workbench.up(job) == name
    restored = wait_for_event(workbench, name, "checkpoint_restored")
    assert restored["step"] == max(committed)
    assert workbench.wait_for_step(name, restored["step"] + 1, within_s=START_S)
