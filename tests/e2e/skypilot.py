"""SkyPilot beside the cluster: a home of its own with its settings, and a real API server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.layout import USER
from tests.e2e.machine import Machine
from tests.e2e.slurm import CLUSTER, Slurm, free_port
from tests.support.runs import ROOT
from tests.support.waiting import eventually

#: Without these, every task that names an accelerator asks the internet for them. What has no checksum beside it
#: counts as written by hand, and is never fetched anew.
_CATALOGS = {
    "common/accelerators.csv": "AcceleratorName,Clouds\nMI300X,\"['RunPod']\"\n",
    "common/metadata.csv": "GPU,MemoryGB,Manufacturer\nMI300X,192,AMD\n",
    "slurm/pricing.csv": (
        "Region,Zone,PricePerVCPU,PricePerMemoryGB,AcceleratorName,PricePerAccelerator\n,,0.0,0.0,,0.0\n"
    ),
}
_SSH = """
Host {cluster}
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {key}
    IdentitiesOnly yes
"""
# The connections of ssh and the semaphores of workers would stay behind in these two.
_SERVER = """
mount --bind {temporary} /tmp
mount -t tmpfs -o mode=1777 api-server /dev/shm
{python} -u -m sky.server.server --host 127.0.0.1 --port {port} &
wait
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call of SkyPilot's SDK came to.

    Attributes:
        value: What it returned.
        began_s: When it began, in seconds of the machine's uptime; SkyPilot was imported by then.
        wall_s: How long it took.
    """

    value: Any
    began_s: float
    wall_s: float


class SkyPilot:
    """An API server for one cluster, from ``start`` to ``close``.

    Args:
        slurm: The cluster.

    Attributes:
        port: Where the API server listens.
        home: Home of its user.
    """

    def __init__(self, slurm: Slurm) -> None:
        self.port = _server_port()
        self.home = slurm.root / "client"
        self._slurm = slurm
        self._server: Machine | None = None

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to be a client of it, beside what it has."""
        return {
            "HOME": str(self.home),
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.port),
            "SKYPILOT_API_SERVER_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        }

    @property
    def log(self) -> Path:
        """The API server's log."""
        return self.home / "server.log"

    def start(self) -> None:
        """Write the settings and start the API server; returns when it answers."""
        self._write_settings()
        temporary = self.home / "tmp"
        temporary.mkdir(mode=0o1777)
        script = _SERVER.format(temporary=temporary, python=sys.executable, port=self.port)
        # A server does not ask another one: it is the one that the address names.
        env = {key: value for key, value in {**os.environ, **self.env}.items() if key not in _ENDPOINT}
        self._server = Machine("api-server", script, log=self.log, env=env)
        eventually(self._answers, within_s=120, every_s=0.2, what="the API server answers")

    def close(self) -> None:
        """End the API server; once more is no mistake."""
        if self._server is not None:
            self._server.kill()

    def call(self, what: str, *, timeout_s: float = 300, **arguments: Any) -> Answer:
        """Call SkyPilot's SDK in a process of its own: see :mod:`tests.e2e.sky_call`."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.e2e.sky_call", what],
            input=json.dumps(arguments),
            env={**os.environ, **self.env, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
        if done.returncode or not lines:
            raise AssertionError(f"sky {what}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return Answer(**json.loads(lines[-1].removeprefix("SAID ")))

    def launch(self, cluster: str, task: Mapping[str, Any], *, timeout_s: float = 300) -> Answer:
        """A bare ``sky launch``: returns when the task's job was submitted."""
        return self.call("launch", cluster=cluster, task=task, timeout_s=timeout_s)

    def task(self, run: str, *, nodes: int = 1, node: str | None = None) -> dict[str, Any]:
        """A task of one SIMULATED GPU a node, in the partition of what may be pre-empted."""
        resources: dict[str, Any] = {
            "infra": f"slurm/{CLUSTER}/train",
            "cpus": "2+",
            "memory": "2+",
            "accelerators": "MI300X:1",
        }
        task: dict[str, Any] = {"name": "bare", "num_nodes": nodes, "resources": resources, "run": run}
        if node is not None:
            task["config"] = {"slurm": {"sbatch_options": {"nodelist": node}}}
        return task

    def _answers(self) -> bool:
        server = self._server
        assert server is not None
        if not server.runs:
            raise RuntimeError(f"the API server has ended:\n{server.end_of_log(40)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError) as error:
            raise AssertionError(str(error)) from error

    def _write_settings(self) -> None:
        settings = {
            "api_server": {"endpoint": f"http://127.0.0.1:{self.port}"},
            "slurm": {"provision_timeout": 20},
        }
        files = {
            ".sky/config.yaml": json.dumps(settings),
            ".slurm/config": _SSH.format(
                cluster=CLUSTER, port=self._slurm.ssh_port, user=USER, key=self._slurm.key
            ),
            **{f".sky/catalogs/v8/{name}": text for name, text in _CATALOGS.items()},
        }
        for name, text in files.items():
            place = self.home / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)


def _server_port() -> int:
    """A port for the API server. It takes a second one for its queue, which follows from that: free as well."""
    for _ in range(100):
        port = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 50000 + (11 + port - 46580) % 10000))
            return port
    raise RuntimeError("no two ports that an API server of SkyPilot takes are free")


_ENDPOINT = {"SKYPILOT_API_SERVER_ENDPOINT"}
