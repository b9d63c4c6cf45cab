"""A provisioner in this process, with a provider of the test's choice and a stand-in for the controller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sky_monarch.provision.provider import Provider
from sky_monarch.provision.provisioner import Provisioner
from sky_monarch.provision.requests import Requests
from sky_monarch.provision.settings import Limits, Settings
from tests.support.hosts_controller import RUN_ID, TOKEN, HostsController

ROOT = Path(__file__).resolve().parents[2]
#: Everything that waits in life waits for a moment.
QUICK: dict[str, Any] = {
    "hold_s": 1e-6,
    "backoff_s": 0.02,
    "backoff_max_s": 0.05,
    "status_s": 0.1,
    "confirm_s": 0.05,
    "notices_s": 0.01,
    "wait_s": 2.0,
    "down_s": 0.5,
    "down_again_s": 0.1,
}


def choice(infra: str, hosts: list[str], **more: Any) -> dict[str, Any]:
    """A choice of a plan, with a host each."""
    return {
        "infra": infra,
        "accelerator": "MI300X:8",
        "use_spot": False,
        "hosts": [{"cluster": host, "groups": [number], "nodes": 1} for number, host in enumerate(hosts)],
        "tasks": [
            {
                "cluster": host,
                "task": {
                    "name": host,
                    "num_nodes": 1,
                    "resources": {"infra": infra, "autostop": {"idle_minutes": 10, "down": True}},
                    "run": "exec true\n",
                },
            }
            for host in hosts
        ],
        "usd_per_hour": 10.0,
        **more,
    }


class Bench:
    """One run: its folder, its controller, and provisioners of it.

    Attributes:
        folder: The run folder.
        controller: The stand-in.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.controller = HostsController(folder).start()

    def settings(self, choices: list[dict[str, Any]], **more: Any) -> Settings:
        """What a provisioner is told."""
        more = dict(more)
        limits = Limits(**{**QUICK, **more.pop("limits", {})})
        return Settings(
            run_id=RUN_ID,
            run_dir=self.folder,
            provider=more.pop("provider", "skypilot"),
            api=self.controller.api,
            token=TOKEN,
            choices=tuple(choices),
            limits=limits,
            **more,
        )

    @contextmanager
    def provisioner(
        self,
        provider: Provider,
        choices: list[dict[str, Any]],
        *,
        fails: bool = False,
        requests: Requests | None = None,
        **more: Any,
    ) -> Iterator[Provisioner]:
        """A provisioner that works, until the block ends."""
        requests = requests or Requests(self.folder / "requests.json")
        running = Provisioner(self.settings(choices, **more), provider, requests)
        thread = threading.Thread(target=running.run, name="provisioner")
        thread.start()
        try:
            yield running
        finally:
            running.closing.set()
            self.controller.want_all([])  # it need not wait for the end of its question
            thread.join(10)
            running.finish()
            assert not thread.is_alive()
        assert running.failed is fails, "a thread of it failed"

    def requests(self) -> dict[str, Any]:
        """What the provisioner has written down."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "requests.json").read_text())
        except FileNotFoundError:
            return {"hosts": {}}
        return found

    def record(self, host: str) -> dict[str, Any]:
        """What it has written down of a host; empty where it has not."""
        found: dict[str, Any] = self.requests()["hosts"].get(host, {})
        return found

    def start_process(self, choices: list[dict[str, Any]], **more: Any) -> subprocess.Popen[bytes]:
        """A provisioner of its own, with the local provider."""
        files = {
            "private.json": {"token": TOKEN, "base_env": {}},
            "job.json": {"name": "demo", "workdir": str(self.folder), "placement": "same-zone"},
            "provisioner.json": {
                "run_id": RUN_ID,
                "run_dir": str(self.folder),
                "private": str(self.folder / "private.json"),
                "sockets": {"api": str(self.controller.api)},
                "provider": "local",
                "job": str(self.folder / "job.json"),
                "choices": choices,
                "ship": None,
                "limits": {**QUICK, **more.pop("limits", {})},
                **more,
            },
        }
        for name, content in files.items():
            (self.folder / name).write_text(json.dumps(content))
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        with (self.folder / "provisioner.log").open("ab") as log, (self.folder / "stdout").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "sky_monarch.provision", str(self.folder / "provisioner.json")],
                env={**os.environ, "PYTHONPATH": path, "SKY_MONARCH_SPAWN_ID": "of-the-service"},
                cwd=self.folder,
                stdout=out,
                stderr=log,
            )

    def close(self) -> None:
        """The controller ends."""
        self.controller.stop()
