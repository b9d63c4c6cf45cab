"""A provisioner of 200 groups, one a host, with a fake provider of which every twentieth launch finds no capacity.

Measured is the CPU of the provisioner's process: while all hosts come up, while nothing happens, and while a host is
lost every second and replaced. The controller is a stand-in in this process: what it costs is not counted. It raises
the attempt of a host that failed or ended at once, so that there is more to do than in life, where it backs off.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benches.report import emit
from tests.support.fake_provider import FakeProvider, Outcome, always_up
from tests.support.hosts_controller import RUN_ID, TOKEN, HostsController
from tests.support.provisioning import ROOT, choice

GROUPS = int(os.environ.get("SKY_MONARCH_BENCH_GROUPS", "200"))
SECONDS = float(os.environ.get("SKY_MONARCH_BENCH_SECONDS", "60"))
_FAILING = 0.05
_START_LIMIT_S = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")
_HOSTS = [f"demo-h{number}" for number in range(GROUPS)]


def _serve(folder: Path) -> None:
    """The measured process: a provisioner; names of hosts that are lost arrive on standard input."""
    from sky_monarch.provision.provider import HostOrder, Kind, ProvisionError, Turn
    from sky_monarch.provision.provisioner import Provisioner
    from sky_monarch.provision.requests import Requests
    from sky_monarch.provision.settings import Settings

    chance = random.Random(1)

    def script(order: HostOrder, turn: Turn, nth: int) -> Outcome:
        if chance.random() < _FAILING:
            return ProvisionError("no capacity", kind=Kind.CAPACITY)
        return always_up(order, turn, nth)

    provider = FakeProvider(script)
    settings = Settings(
        run_id=RUN_ID,
        run_dir=folder,
        provider="skypilot",
        api=folder / "api.sock",
        token=TOKEN,
        choices=(choice("slurm/loop", _HOSTS),),
    )
    running = Provisioner(settings, provider, Requests(folder / "requests.json"))

    def lose() -> None:
        for line in sys.stdin:
            provider.notice(line.strip(), "taken away")
        running.closing.set()

    threading.Thread(target=lose, daemon=True).start()
    running.run()
    if provider.violations:
        raise RuntimeError(f"{provider.violations[:3]}")


class _Policy:
    """What the controller does about hosts that failed or ended: the next attempt."""

    def __init__(self, controller: HostsController) -> None:
        self._controller = controller
        self._attempts = dict.fromkeys(_HOSTS, 1)
        self._lock = threading.Lock()
        self.up: set[str] = set()
        self.failures = 0
        controller.refuse = self._take
        controller.want_all(_HOSTS)

    def _take(self, report: Mapping[str, Any]) -> None:
        host, state = report["host"], report["state"]
        with self._lock:
            if report["attempt"] != self._attempts[host]:
                return
            if state == "launched":
                self.up.add(host)
            elif state in ("failed", "ended"):
                self.up.discard(host)
                self.failures += state == "failed"
                self._attempts[host] += 1
                self._controller.want(host, attempt=self._attempts[host])


def run() -> None:
    """Measure one provisioner."""
    load = f"{GROUPS} groups, a host each, 5% of launches fail"
    with tempfile.TemporaryDirectory(prefix="smb-") as name:
        folder = Path(name)
        controller = HostsController(folder).start()
        policy = _Policy(controller)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benches.provision", name],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        try:
            began_s = time.monotonic()
            while len(policy.up) < GROUPS:
                if process.poll() is not None or time.monotonic() - began_s > _START_LIMIT_S:
                    raise RuntimeError((folder / "log").read_text()[-2000:])
                time.sleep(0.02)
            emit("sky-monarch", "provision_start_of_all", time.monotonic() - began_s, "s", load=load)
            cpu_ms = 1000 * _cpu_s(process.pid) / GROUPS
            emit("sky-monarch", "provision_start_cpu_per_group", cpu_ms, "ms", load=load)
            emit("sky-monarch", "provision_start_failures", policy.failures, "count", load=load)
            for figure, lost in (("quiet", 0), ("losses", 1)):
                cpu_s, since_s = _cpu_s(process.pid), time.monotonic()
                for second in range(round(SECONDS)):
                    time.sleep(max(0.0, since_s + second + 1 - time.monotonic()))
                    if lost and process.stdin is not None:
                        process.stdin.write(f"{_HOSTS[second % GROUPS]}\n".encode())
                        process.stdin.flush()
                used_s, wall_s = _cpu_s(process.pid) - cpu_s, time.monotonic() - since_s
                per_group_ms = 1000 * used_s / wall_s * 60 / GROUPS
                emit(
                    "sky-monarch", f"provision_{figure}_cpu", 100 * used_s / wall_s, "% of a core", load=load
                )
                emit("sky-monarch", f"provision_{figure}_cpu_per_group", per_group_ms, "ms/min", load=load)
            emit("sky-monarch", "provision_rss", _memory_mib(process.pid), "MiB", load=load)
            if process.stdin is not None:
                process.stdin.close()
            controller.want_all([])
            if process.wait(30):
                raise RuntimeError((folder / "log").read_text()[-2000:])
        finally:
            process.kill()
            process.wait(10)
            controller.stop()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
