"""A real lighthouse and a farm of unmodified TorchFT managers, which tests start, stop and look into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from sky_monarch.actors.lighthouse_control import LighthouseControl
from tests.support.ports import reserved
from tests.support.runs import ROOT
from tests.support.waiting import eventually

TOKEN = "s3cret-token"
Kind = Literal["sky-monarch", "torchft"]


class Bench:
    """A lighthouse process and the trainers that use it; ``config`` goes over what it is told by default."""

    def __init__(self, folder: Path, kind: Kind, **config: Any) -> None:
        self.folder, self.kind, self.config = folder, kind, config
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.env = {
            "PATH": os.environ["PATH"],
            # a core with a defect comes first where a test is run with one
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
            **{name: value for name, value in os.environ.items() if name == "SKY_MONARCH_MUTANT"},
            "OMP_NUM_THREADS": "1",
            "TORCHFT_QUORUM_RETRIES": "3",
        }
        self.farm = self._spawn("tests.support.manager_farm", str(self.logs), stdin=subprocess.PIPE)
        self._port = reserved()
        self.address = f"127.0.0.1:{self._port.getsockname()[1]}"
        self.lighthouse = self.start_lighthouse()
        assert self._farm_says() == "ready"

    def start_lighthouse(self) -> subprocess.Popen[str]:
        """Start it, or start it again at the same address."""
        (self.folder / "private.json").write_text(json.dumps({"token": TOKEN}))
        ours = {
            "private": str(self.folder / "private.json"),
            "control": f"unix:{self.folder / 'lighthouse.sock'}",
            "state": str(self.folder / "lighthouse.state"),
            "expect": 3,
            # nobody is dropped for silence in this test: an evict that does nothing shows as a stall
            "heartbeat_timeout_s": 60,
        }
        theirs = {"heartbeat_timeout_s": 1.0, "join_timeout_s": 1.0}
        config: dict[str, Any] = {
            "run_id": "run",
            "kind": self.kind,
            "min_replicas": 2,
            "listen": self.address,
        }
        config |= ours if self.kind == "sky-monarch" else theirs
        config |= self.config
        (self.folder / "lighthouse.json").write_text(json.dumps(config))
        self.env["SKY_MONARCH_LIGHTHOUSE_ADDR"] = self.address
        return self._spawn("sky_monarch.lighthouse", str(self.folder / "lighthouse.json"))

    def _spawn(self, module: str, argument: str, **kwargs: Any) -> subprocess.Popen[str]:
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, argument],
                env=self.env,
                cwd=self.folder,  # `-m` looks here before PYTHONPATH
                text=True,
                stdout=subprocess.PIPE,
                stderr=log,
                **kwargs,
            )

    def _farm_says(self) -> str:
        assert self.farm.stdout is not None
        line = self.farm.stdout.readline().strip()
        assert line, (self.folder / "tests.support.manager_farm.log").read_text()
        return line

    def start(
        self,
        replica: int,
        generation: int,
        *,
        name: str = "",
        quorum_timeout_s: int = 30,
        process_group_timeout_s: int = 3,
        die_in_rendezvous: Path | None = None,
    ) -> int:
        """Fork a trainer; its pid. It kills itself at its next rendezvous where that file exists."""
        identity = f"r{replica}.g{generation}.{TOKEN}@" if self.kind == "sky-monarch" else ""
        order = {
            "replica": replica,
            "name": name or f"r{replica}.g{generation}",
            "lighthouse": f"http://{identity}{self.address}",
            "quorum_timeout_s": quorum_timeout_s,
            "process_group_timeout_s": process_group_timeout_s,
            "die_in_rendezvous": str(die_in_rendezvous or ""),
        }
        assert self.farm.stdin is not None
        self.farm.stdin.write(json.dumps(order) + "\n")
        self.farm.stdin.flush()
        return int(self._farm_says())

    def commits(self, name: str) -> list[dict[str, Any]]:
        """What the trainer of that log has committed so far."""
        path = self.logs / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, name: str, step: int, participants: int) -> dict[str, Any]:
        """Wait for the first commit at or after ``step`` with that many participants."""

        def probe() -> dict[str, Any] | None:
            wanted = (one for one in self.commits(name) if one["step"] >= step)
            return next((one for one in wanted if one["participants"] == participants), None)

        found = eventually(probe, within_s=60, what=f"{name} commits step {step} with {participants}")
        assert found
        return found

    def control(self) -> LighthouseControl:
        return LighthouseControl(f"unix:{self.folder / 'lighthouse.sock'}", token=TOKEN, run_id="run")

    def close(self) -> None:
        (self.logs / "stop").touch()
        for process in (self.farm, self.lighthouse):
            process.kill()
            process.communicate(timeout=20)
        self._port.close()
