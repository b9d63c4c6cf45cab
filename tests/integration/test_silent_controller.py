"""``status`` of a run whose controller is stopped: what its files tell, within a few seconds."""

from __future__ import annotations

import json
import os
import signal
import time

from tests.support.runs import FREE_RANK, Workbench


def test_status_says_within_seconds_what_is_known_and_that_the_controller_is_stopped(
    workbench: Workbench,
) -> None:
    name = workbench.up(workbench.job("mute", run=f"{FREE_RANK} --steps 100000", replicas=2))
    before = workbench.wait_for_step(name, 3)
    pid = before["controller_pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        shown = workbench.cli("status", name)
        took_s = time.monotonic() - began
        found = json.loads(workbench.cli("status", name, "--json").stdout)
        table = workbench.cli("status").stdout
    finally:
        os.kill(pid, signal.SIGCONT)
    assert shown.returncode == 1, "a script sees that this is not the controller's word"
    assert "has not answered for" in shown.stderr
    assert took_s < 12, "the command starts in one second, and waits for five"
    assert f"its controller, pid {pid}, is stopped and does not answer" in shown.stdout
    assert f"`kill -CONT {pid}`" in shown.stdout
    assert (found["state"], found["replicas"], found["controller_pid"]) == ("RUNNING", 2, pid)
    assert [(group["replica"], group["generation"]) for group in found["groups"]] == [(0, 1), (1, 1)]
    assert "RUNNING" in table
    after = workbench.status(name)
    assert after["step"] >= before["step"], "and it answers again"
