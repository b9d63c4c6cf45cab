"""Terminals that are closed, full, or gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.runs import Workbench, pid_of
from tests.support.waiting import eventually

CLOSED = {"stdout": ">&-", "all": "<&- >&- 2>&-"}


def shell(workbench: Workbench, command: str) -> subprocess.CompletedProcess[str]:
    """Run ``sky-monarch`` as a shell does that redirects its streams."""
    line = f"{sys.executable} -m sky_monarch {command}"
    return subprocess.run(
        ["bash", "-c", line],
        env=workbench.env,
        cwd=workbench.folder,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("which", CLOSED)
def test_closed_standard_streams_are_no_error(workbench: Workbench, which: str) -> None:
    job = workbench.job("closed", run="echo hello", replicas=1)
    done = shell(workbench, f"up {job} {CLOSED[which]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stderr
    assert workbench.status("closed")["state"] == "SUCCEEDED"


@pytest.mark.parametrize("detach", ["", "--detach"])
def test_a_hang_up_of_the_terminal_ends_no_run(workbench: Workbench, detach: str) -> None:
    job = workbench.job("hangup", run="sleep 300", replicas=1)
    workbench.names.append("hangup")
    arguments = [sys.executable, "-m", "sky_monarch", "up", str(job), *filter(None, [detach])]
    with subprocess.Popen(
        arguments,
        env=workbench.env,
        cwd=workbench.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as up:
        try:
            status = eventually(
                lambda: list((workbench.home / "runs").glob("hangup-*")) and workbench.status("hangup"),
                within_s=30,
            )
            eventually(lambda: pid_of(workbench.status("hangup"), 0), within_s=30)
            if detach:
                assert up.wait(20) == 0
            else:
                os.killpg(up.pid, signal.SIGHUP)
                assert up.wait(20) == -signal.SIGHUP
        finally:
            up.kill()  # else leaving the block would wait for it
    after = workbench.status("hangup")
    assert after["state"] == "RUNNING"
    assert after["run_id"] == status["run_id"]
    assert workbench.cli("down", "hangup").returncode == 0
