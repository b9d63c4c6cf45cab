"""A controller of a thousand groups: its CPU and memory, with simulated agents over the real channel.

The agents say what the real ones say: each group starts, commits once a second, and some group dies every second and
comes back. Measured while they do that, and apart from it while they only commit; one client follows the events and
one asks for the status every two seconds, as an attached `up` does.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx

from benches.report import emit, emit_distribution
from tests.support.controllers import ControllerRun, ScriptedAgent

GROUPS = int(os.environ.get("SKY_MONARCH_BENCH_GROUPS", "1000"))
SECONDS = float(os.environ.get("SKY_MONARCH_BENCH_SECONDS", "30"))
_GROUPS_A_HOST = 8
_STATUS_EVERY_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Fleet:
    """Agents of all hosts, on one thread.

    Args:
        run: The controller that they dial.
        hosts: Replicas by host.
    """

    def __init__(self, run: ControllerRun, hosts: dict[str, list[int]]) -> None:
        self._agents = {name: ScriptedAgent(run, host=name).connect() for name in hosts}
        self._hosts = hosts
        self._home = {replica: name for name, mine in hosts.items() for replica in mine}
        self._generation: dict[int, int] = {}
        self.step = 1
        self.deaths = 0

    def start(self) -> None:
        """Every group starts as it is told, and commits."""
        for name, agent in self._agents.items():
            for order in agent.told("start_group", len(self._hosts[name])):
                replica = order["replica"]
                self._generation[replica] = order["generation"]
                agent.start(replica, order["generation"])
                agent.commit(replica, 1, first=True, generation=order["generation"])
        for agent in self._agents.values():
            agent.all_acked()

    def second(self, *, deaths: bool) -> None:
        """A second of training: a commit of each group, and perhaps a death."""
        began_s = time.monotonic()
        self.step += 1
        slice_s = 1.0 / len(self._agents)
        for number, (name, agent) in enumerate(self._agents.items()):
            for replica in self._hosts[name]:
                agent.commit(replica, self.step, generation=self._generation[replica])
            if deaths and number == self.deaths % len(self._agents):
                self._die(agent, self._hosts[name][0])
            agent.pump(0.0)
            time.sleep(max(0.0, began_s + slice_s * (number + 1) - time.monotonic()))
        self.deaths += deaths

    def _die(self, agent: ScriptedAgent, replica: int) -> None:
        old = self._generation[replica]
        agent.die(replica, old, step=self.step)
        agent.event("restart_scheduled", replica=replica, generation=old + 1, delay_s=0.0, restarts_left=7)
        agent.start(replica, old + 1, warm=True)
        agent.event("first_commit", replica=replica, generation=old + 1, step=self.step)
        self._generation[replica] = old + 1

    def close(self) -> None:
        """Hang up."""
        for agent in self._agents.values():
            agent.close()


class Client:
    """Follows the events and asks for the status, as an attached ``up`` does."""

    def __init__(self, run: ControllerRun) -> None:
        self._run = run
        self._over = threading.Event()
        self.status_s: list[float] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._follow, self._ask)]
        for thread in self._threads:
            thread.start()

    def _follow(self) -> None:
        params = {"follow": "1"}
        with (
            suppress(httpx.TransportError),  # the controller is killed in the end
            self._run.client() as client,
            client.stream("GET", "/v1/events", params=params) as stream,
        ):
            for _ in stream.iter_lines():
                if self._over.is_set():
                    return

    def _ask(self) -> None:
        while not self._over.wait(_STATUS_EVERY_S):
            since = time.monotonic()
            self._run.status()
            self.status_s.append(time.monotonic() - since)

    def close(self) -> None:
        """Stop; the follower ends with its next event, or with the controller."""
        self._over.set()
        self._threads[1].join(30)


def run() -> None:
    """Measure one controller."""
    names = [f"h{number}" for number in range(-(-GROUPS // _GROUPS_A_HOST))]
    hosts = {name: list(range(GROUPS))[place :: len(names)] for place, name in enumerate(names)}
    load = f"{GROUPS} groups on {len(hosts)} simulated agents, a commit a second each"
    with tempfile.TemporaryDirectory(prefix="smb-") as folder:
        controlled = ControllerRun(
            Path(folder) / "run", hosts=hosts, replicas=GROUPS, min_replicas=GROUPS // 2
        )
        try:
            controlled.start()
            process = controlled.process
            if process is None:
                raise RuntimeError("the controller did not start")
            emit("sky-monarch", "controller_rss_before", _memory_mib(process.pid, "VmRSS"), "MiB", load=load)
            fleet = Fleet(controlled, hosts)
            began_s = time.monotonic()
            fleet.start()
            emit("sky-monarch", "controller_start_of_all", time.monotonic() - began_s, "s", load=load)
            for what, deaths, watched in (
                ("alone", False, False),
                ("watched", False, True),
                ("failures", True, True),
            ):
                client = Client(controlled) if watched else None
                cpu_s, since_s = _cpu_s(process.pid), time.monotonic()
                while time.monotonic() - since_s < SECONDS:
                    fleet.second(deaths=deaths)
                used_s, wall_s = _cpu_s(process.pid) - cpu_s, time.monotonic() - since_s
                figure = f"controller_{what}_cpu"
                emit("sky-monarch", figure, 100 * used_s / wall_s, "% of a core", load=load)
                per_group_ms = 1000 * used_s / wall_s * 60 / GROUPS
                emit("sky-monarch", f"{figure}_per_group", per_group_ms, "ms/min", load=load)
                if client is not None:
                    client.close()
                    times = [1000 * value for value in client.status_s]
                    emit_distribution("sky-monarch", f"controller_{what}_status", times, "ms", load=load)
            emit("sky-monarch", "controller_failures", fleet.deaths, "count", load=load)
            emit("sky-monarch", "controller_rss", _memory_mib(process.pid, "VmRSS"), "MiB", load=load)
            emit("sky-monarch", "controller_rss_peak", _memory_mib(process.pid, "VmHWM"), "MiB", load=load)
            journal = sum(file.stat().st_size for file in controlled.folder.glob("journal.db*"))
            emit("sky-monarch", "controller_journal", journal / 2**20, "MiB", load=load)
            controlled.kill()
            emit("sky-monarch", "controller_restart", controlled.start(), "s", load=load)
            fleet.close()
        finally:
            controlled.close()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _memory_mib(pid: int, key: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) / 1024
