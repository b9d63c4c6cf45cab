"""Unmodified TorchFT managers train against our lighthouse and against TorchFT's own: one test for both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from sky_monarch.actors.lighthouse_control import LighthouseControl
from tests.support.processes import is_alive
from tests.support.runs import ROOT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

TOKEN = "s3cret-token"
Kind = Literal["sky-monarch", "torchft"]


class Bench:
    """A lighthouse process and the trainers that use it."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder, self.kind = folder, kind
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCHFT_QUORUM_RETRIES": "3",
        }
        self.farm = self._spawn("tests.support.manager_farm", str(self.logs), stdin=subprocess.PIPE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
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
        config = {"run_id": "run", "kind": self.kind, "min_replicas": 2, "listen": self.address}
        config |= ours if self.kind == "sky-monarch" else theirs
        (self.folder / "lighthouse.json").write_text(json.dumps(config))
        self.env["SKY_MONARCH_LIGHTHOUSE_ADDR"] = self.address
        return self._spawn("sky_monarch.lighthouse", str(self.folder / "lighthouse.json"))

    def _spawn(self, module: str, argument: str, **kwargs: Any) -> subprocess.Popen[str]:
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, argument],
                env=self.env,
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

    def start(self, replica: int, generation: int, *, name: str = "", quorum_timeout_s: int = 30) -> int:
        """Fork a trainer; its pid."""
        identity = f"r{replica}.g{generation}.{TOKEN}@" if self.kind == "sky-monarch" else ""
        order = {
            "replica": replica,
            "name": name or f"r{replica}.g{generation}",
            "lighthouse": f"http://{identity}{self.address}",
            "quorum_timeout_s": quorum_timeout_s,
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


@pytest.fixture(params=["sky-monarch", "torchft"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def our_bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, "sky-monarch")
    try:
        yield made
    finally:
        made.close()


def _assert_all_agree(bench: Bench, names: list[str]) -> int:
    """Every step was committed with the same weights by everyone who committed it."""
    by_step: dict[int, list[float]] = {}
    compared = 0
    for name in names:
        for commit in bench.commits(name):
            known = by_step.setdefault(commit["step"], commit["weights"])
            assert known == commit["weights"], f"{name} disagrees at step {commit['step']}"
            compared += known is not commit["weights"]
    return compared


def test_survivors_train_on_and_the_replacement_heals(bench: Bench) -> None:
    pids = [bench.start(replica, 1) for replica in range(3)]
    for replica in range(3):
        bench.wait_for(f"r{replica}.g1", 5, participants=3)

    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: not is_alive(pids[1]), within_s=10)
    if bench.kind == "sky-monarch":
        assert bench.control().evict(1, 1) is not None, "it was in a quorum"
    died_at = bench.commits("r1.g1")[-1]["step"]
    for survivor in ("r0.g1", "r2.g1"):
        bench.wait_for(survivor, died_at + 10, participants=2)

    bench.start(1, 2)
    for name in ("r0.g1", "r1.g2", "r2.g1"):
        bench.wait_for(name, died_at + 20, participants=3)
    assert bench.commits("r1.g2")[0]["step"] > died_at + 10, "it healed instead of starting from 0"
    assert all(is_alive(pids[replica]) for replica in (0, 2)), "nobody else was hurt"
    assert _assert_all_agree(bench, ["r0.g1", "r1.g1", "r1.g2", "r2.g1"]) > 20

    if bench.kind == "sky-monarch":
        state = bench.control().state()
        assert state["fences"]["1"] == 2
        reasons = [record["reason"] for record in state["history"]]
        assert reasons[0] == "all 3 expected replicas asked"
        assert any("evicted: rep_1:" in reason for reason in reasons), reasons
        assert sorted(one["replica"] for one in state["replicas"] if one["in_quorum"]) == [0, 1, 2]
        assert state["counters"]["silent_drops"] == 0


def test_a_second_copy_of_a_live_group_never_votes(our_bench: Bench) -> None:
    bench = our_bench
    for replica in range(3):
        bench.start(replica, 1)
    for replica in range(3):
        bench.wait_for(f"r{replica}.g1", 5, participants=3)
    copy = bench.start(1, 1, name="copy", quorum_timeout_s=2)
    eventually(lambda: bench.control().state()["counters"]["refusals"].get("second_copy", 0), within_s=20)
    step = bench.commits("r0.g1")[-1]["step"]
    eventually(lambda: not is_alive(copy), within_s=40, what="the copy gives up")
    bench.wait_for("r0.g1", step + 20, participants=3)
    assert bench.commits("copy") == []
    assert {one["participants"] for one in bench.commits("r0.g1")} == {3}
    assert _assert_all_agree(bench, ["r0.g1", "r1.g1", "r2.g1"]) > 20


def test_a_restart_of_the_lighthouse_loses_nobody(our_bench: Bench) -> None:
    bench = our_bench
    pids = [bench.start(replica, 1, quorum_timeout_s=5) for replica in range(3)]
    for replica in range(3):
        bench.wait_for(f"r{replica}.g1", 5, participants=3)
    before = bench.control().state()["quorum_id"]
    bench.lighthouse.kill()
    bench.lighthouse.communicate(timeout=20)
    bench.lighthouse = bench.start_lighthouse()
    step = max(one["step"] for one in bench.commits("r0.g1"))
    for replica in range(3):
        bench.wait_for(f"r{replica}.g1", step + 10, participants=3)
    assert all(is_alive(pid) for pid in pids)
    assert bench.control().state()["quorum_id"] > before
    assert _assert_all_agree(bench, ["r0.g1", "r1.g1", "r2.g1"]) > 20
