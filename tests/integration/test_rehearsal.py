"""A run on several hosts, through everything that a run beyond this machine goes through but SkyPilot: ``up --hosts``."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.processes import is_alive, pids
from tests.support.runs import FREE_RANK, Workbench, generation_of, pid_of
from tests.support.steps import longest_gap_s
from tests.support.waiting import eventually

LIGHTHOUSE = {"heartbeat_timeout_s": 2, "join_timeout_s": 10, "process_group_timeout_s": 30}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _kill_host(folder: Path) -> list[int]:
    """SIGKILL every process of a host, as a machine that loses its power does."""
    found = [json.loads((folder / "process.json").read_text())["pid"]]
    parents = {pid: _parent(pid) for pid in pids()}
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def _host(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next(host for host in status["hosts"] if host["host"] == name)


def test_a_lost_host_comes_back_alone_and_everybody_else_keeps_their_processes(workbench: Workbench) -> None:
    job = workbench.job("apart", run=f"{FREE_RANK} --steps 3000", min_replicas=2, lighthouse=LIGHTHOUSE)
    name = workbench.up(job, "--hosts", "3", "--yes")
    before = workbench.wait_for_step(name, 20)
    hosts = [host["host"] for host in before["hosts"]]
    assert hosts == ["apart-h0", "apart-h1", "apart-h2"]
    assert [host["attempt"] for host in before["hosts"]] == [1, 1, 1]

    killed_s = time.monotonic()
    dead = _kill_host(workbench.run_folder(name) / "hosts" / "apart-h1-a1")
    eventually(lambda: not any(map(is_alive, dead)))

    def back() -> dict[str, Any]:
        status = workbench.status(name)
        assert generation_of(status, 1) == 2, status["groups"][1]
        assert status["groups"][1]["state"] == "RUNNING", status["groups"][1]
        return status

    after = eventually(back, within_s=60)
    took_s = time.monotonic() - killed_s
    at = after["step"]
    after = workbench.wait_for_step(name, at + 20)
    assert [_host(after, host)["attempt"] for host in hosts] == [1, 2, 1]
    for replica in (0, 2):
        assert pid_of(after, replica) == pid_of(before, replica), "the others keep their processes"
        assert generation_of(after, replica) == 1
    assert after["controller_pid"] == before["controller_pid"], "and so does the head"
    starts = [event for event in workbench.events(name) if event.get("command") == "start_group"]
    leases = [(event["generation"], event["max_restarts"]) for event in starts if event["replica"] == 1]
    assert leases == [(1, 5), (2, 5)], "a lost host costs nothing of its groups' budgets"
    gap_s = longest_gap_s(workbench.cli("logs", name, "--replica", "0").stdout)
    assert gap_s < min(3.0, took_s), "nobody waits for the host"
    states = [event for event in workbench.events(name) if event["event"] == "run_state"]
    degraded = [event["reason"] for event in states if event["state"] == "DEGRADED"]
    assert degraded, "the loss is told"
    assert "apart-h1" in degraded[0]

    assert workbench.cli("down", name, "--grace", "2").returncode == 0
    final = workbench.status(name)
    assert {host["phase"] for host in final["hosts"]} == {"DOWN"}
