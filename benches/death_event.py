"""SIGKILL of a rank until the controller has the event, beside a bare pidfd watcher in the same run.

Each round kills one rank of a real run and one child of a bare watcher. The controller stamps each event with
`received_ns` of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benches.report import busy, emit, emit_distribution
from tests.support.runs import FREE_RANK, Workbench
from tests.support.waiting import eventually

DEATHS = int(os.environ.get("SKY_MONARCH_BENCH_DEATHS", "500"))
GROUPS = 4


def bare_watch_s() -> float:
    """Seconds from SIGKILL of a child to its pidfd being readable."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    descriptor = os.pidfd_open(child.pid)
    try:
        time.sleep(0.02)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        killed = time.monotonic_ns()
        os.kill(child.pid, signal.SIGKILL)
        poll.poll(10_000)
        return (time.monotonic_ns() - killed) / 1e9
    finally:
        os.close(descriptor)
        child.wait()


def measure(deaths: int, load: str) -> None:
    """Kill ``deaths`` ranks and print both distributions and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Workbench(Path(folder))
        job = bench.job(
            "deaths",
            run=f"{FREE_RANK} --steps 100000000 --step-s 0.02",
            replicas=GROUPS,
            recovery={"max_restarts": 10 * deaths, "backoff_s": 0, "backoff_max_s": 0},
        )
        name = bench.up(job)
        try:
            import sky_monarch as sm

            os.environ["SKY_MONARCH_STATE_DIR"] = str(bench.home)
            killed: dict[int, int] = {}
            bare: list[float] = []
            with sm.attach(name) as run:
                for number in range(deaths):
                    replica = number % GROUPS

                    def committing(replica: int = replica) -> int:
                        group = run.status().groups[replica]
                        pid = group.ranks[0].pid
                        return pid if group.state == "RUNNING" and pid and pid not in killed else 0

                    pid = eventually(committing, within_s=60)
                    killed[pid] = time.monotonic_ns()
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    bare.append(bare_watch_s())
                seen = {}

                def all_seen() -> bool:
                    for event in run.events():
                        if event.kind == "rank_exited" and event.data["pid"] in killed:
                            seen[event.data["pid"]] = event.data["received_ns"]
                    return len(seen) == len(killed)

                eventually(all_seen, within_s=30)
            ours = [(seen[pid] - at) / 1e9 for pid, at in killed.items()]
        finally:
            bench.close()
    mine = emit_distribution("sky-monarch", "death_to_event", [v * 1000 for v in ours], "ms", load=load)
    peer = emit_distribution(
        "bare pidfd watcher", "death_to_event", [v * 1000 for v in bare], "ms", load=load
    )
    for key in ("p50", "p99", "max"):
        emit("sky-monarch", f"death_to_event_{key}_ratio", mine[key] / peer[key], "ratio", load=load)


def run() -> None:
    """Measure quiet, then with every core busy."""
    measure(DEATHS, "quiet")
    with busy():
        measure(DEATHS, "both cores busy")
