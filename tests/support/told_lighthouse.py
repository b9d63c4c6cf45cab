"""Our lighthouse without an agent: a test says who is dead, and sees who asks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from sky_monarch.actors.lighthouse_control import LighthouseControl
from tests.support.runs import ROOT
from tests.support.waiting import eventually

TOKEN = "s3cret-token"


class ToldLighthouse:
    """A lighthouse process for ``replicas`` groups, which nobody leaves by silence."""

    def __init__(self, folder: Path, replicas: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        (folder / "private.json").write_text(json.dumps({"token": TOKEN}))
        config = {
            "run_id": "run",
            "kind": "sky-monarch",
            "private": str(folder / "private.json"),
            "control": f"unix:{folder / 'lighthouse.sock'}",
            "state": str(folder / "lighthouse.state"),
            "expect": replicas,
            "min_replicas": 1,
            "heartbeat_timeout_s": 60,
            "join_timeout_s": 60,
        }
        (folder / "lighthouse.json").write_text(json.dumps(config))
        with (folder / "lighthouse.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sky_monarch.lighthouse", str(folder / "lighthouse.json")],
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
                    "SKY_MONARCH_LISTEN_FD": str(self._listener.fileno()),
                },
                pass_fds=[self._listener.fileno()],
                stderr=log,
            )
        control = folder / "lighthouse.sock"
        eventually(control.exists, within_s=60, what="the lighthouse serves")
        self._control = LighthouseControl(f"unix:{control}", token=TOKEN, run_id="run")

    def url(self, replica: int, generation: int) -> str:
        return f"http://r{replica}.g{generation}.{TOKEN}@{self.address}"

    def evict(self, replica: int, generation: int) -> None:
        assert self._control.evict(replica, generation, timeout_s=30) is not None, "it was in a quorum"

    def asks(self, replica: int, generation: int) -> bool:
        """Whether that generation waits for a quorum right now."""
        wanted = (replica, generation, True)
        return any(
            (one.get("replica"), one.get("generation"), one["asking"]) == wanted
            for one in self._control.state(timeout_s=30)["replicas"]
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait(20)
        self._listener.close()
