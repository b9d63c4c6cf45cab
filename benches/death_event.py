"""SIGKILL of a rank until the controller has the event, beside a bare pidfd watcher of the very same deaths.

Each round kills one rank of a real run. A bare watcher (this process: `poll` on a pidfd and nothing else)
waits for that same death, so the two figures differ only in what sky-monarch adds: to reap, to tell, to read
the channel. The controller stamps each event with `received_ns` of CLOCK_MONOTONIC, which all processes of a
host share.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from benches.report import busy, emit, emit_distribution
from tests.support.runs import FREE_RANK, Workbench

if TYPE_CHECKING:
    from sky_monarch.sdk import Run

DEATHS = int(os.environ.get("SKY_MONARCH_BENCH_DEATHS", "500"))
GROUPS = 4
_SETTLE_S = 0.05
_PATIENCE_S = 120.0


def bare_watch_s(pid: int) -> tuple[int, float]:
    """Kill a process. Returns when, in ns, and the seconds until its pidfd was readable."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        killed_ns = time.monotonic_ns()
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not poll.poll(10_000):
            raise RuntimeError(f"process {pid} survived SIGKILL")
        return killed_ns, (time.monotonic_ns() - killed_ns) / 1e9
    finally:
        os.close(descriptor)


class Watch:
    """Reads a run's events on a thread of its own.

    Attributes:
        training: Pids of ranks whose generation has committed, each once.
        received_ns: When the controller had the exit of a rank, by pid.
    """

    def __init__(self, run: Run) -> None:
        self.training: queue.Queue[int] = queue.Queue()
        self.received_ns: dict[int, int] = {}
        self._pids: dict[tuple[int, int], int] = {}
        threading.Thread(target=self._read, args=(run,), daemon=True).start()

    def _read(self, run: Run) -> None:
        for event in run.events(follow=True):
            fields = event.fields
            whose = (fields.get("replica", -1), fields.get("generation", -1))
            if event.event == "rank_spawned":
                self._pids[whose] = fields["pid"]
            elif event.event == "first_commit":
                self.training.put(self._pids[whose])
            elif event.event == "rank_exited":
                self.received_ns[fields["pid"]] = fields["received_ns"]


def measure(deaths: int, load: str) -> None:
    """Kill ``deaths`` ranks and print both distributions and their ratio."""
    killed_ns: dict[int, int] = {}
    bare_s: list[float] = []
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
            with sm.attach(name) as run:
                watch = Watch(run)
                alive = deque[int]()
                for _ in range(deaths):
                    # Not before all of them train: the start of a replacement is no part of the next death.
                    while len(alive) < GROUPS:
                        alive.append(watch.training.get(timeout=_PATIENCE_S))
                    time.sleep(_SETTLE_S)
                    pid = alive.popleft()
                    killed_ns[pid], seconds = bare_watch_s(pid)
                    bare_s.append(seconds)
                deadline = time.monotonic() + _PATIENCE_S
                while missing := killed_ns.keys() - watch.received_ns.keys():
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the controller never heard of the end of {sorted(missing)}")
                    time.sleep(0.05)
                ours_s = [(watch.received_ns[pid] - at) / 1e9 for pid, at in killed_ns.items()]
        finally:
            bench.close()
    mine = emit_distribution("sky-monarch", "death_to_event", [v * 1000 for v in ours_s], "ms", load=load)
    peer = emit_distribution(
        "bare pidfd watcher", "death_to_event", [v * 1000 for v in bare_s], "ms", load=load
    )
    for key in ("p50", "p99", "max"):
        emit("sky-monarch", f"death_to_event_{key}_ratio", mine[key] / peer[key], "ratio", load=load)


def run() -> None:
    """Measure quiet, then with every core busy."""
    measure(DEATHS, "quiet")
    with busy():
        measure(DEATHS, "both cores busy")
