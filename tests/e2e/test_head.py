"""``head: cluster`` on a real Slurm: lighthouse and controller are a job of their own, reached by SkyPilot's SSH."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from sky_monarch.launch.folder import Phase
from tests.e2e.client import Client
from tests.e2e.site import Site
from tests.support.processes import pids, send
from tests.support.runs import ended_at_exit
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

GROUPS = 2
#: What the head needs it has from the package index: on a busy machine that takes minutes.
UP_S = 900


def test_a_run_whose_head_is_a_job_trains_on_without_its_launcher_and_ends_with_nothing_left(
    site: Site, client: Client
) -> None:
    job = client.free_job("far", replicas=GROUPS, min_replicas=1, head="cluster")
    try:
        name = client.up(job, timeout_s=UP_S)
    except subprocess.TimeoutExpired:
        said = site.sky.call("logs", cluster="far-head").value["text"]
        kept = (client.run_folder("far") / "provisioner.log").read_text()
        raise AssertionError(f"the head does not come: {kept[-3000:]}\n{said[-3000:]}") from None
    before = client.wait_for_all(name, step=10, within_s=900, replicas=GROUPS)
    jobs, folder = client.host_jobs(name), client.folder_of(name)
    (head,) = site.slurm.jobs(named=f"{name}-head")
    assert head.state == "RUNNING"
    shown = client.cli("status", name)
    assert f"{name}-head" in shown.stdout, shown.stdout + shown.stderr
    assert "step " in client.cli("logs", name, "--tail", "3", "--replica", "1").stdout, "by way of the head"

    launcher = folder.agent()
    assert launcher is not None
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    send((launcher.pid, *map(int, children)), signal.SIGKILL)
    eventually(lambda: folder.agent() is None, within_s=10, what="its launcher is gone")
    alone = client.wait_for_all(name, step=(before["step"] or 0) + 20, within_s=60, replicas=GROUPS)
    assert folder.phase() is Phase.LIVE
    assert alone["groups"][0]["ranks"] == before["groups"][0]["ranks"]

    with ended_at_exit(client.stream(client.folder / "attached", "attach", name, "--no-logs")):
        eventually(lambda: folder.agent() is not None, within_s=60, what="another launcher")
        eventually(
            lambda: client.status(name)["state"] == "RUNNING",
            within_s=60,
            every_s=0.5,
            what="it is connected",
        )
    assert client.host_jobs(name) == jobs, "nothing was launched anew"

    client.end(name)

    assert not site.slurm.jobs(named=f"{name}-head"), "the head goes last"
    final = client.status(name)
    assert {host["host"]: host["phase"] for host in final["hosts"]} == dict.fromkeys(
        (*jobs, f"{name}-head"), "DOWN"
    )
    assert not [pid for pid in pids() if b"ssh\0-N" in _line(pid)], "no forwarding is left"


def _line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
