"""A real controller process, a client of its API, and a scripted agent that speaks the real channel."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from sky_monarch.actors.channel_client import ChannelClient
from sky_monarch.config import JobSpec
from sky_monarch.errors import ChannelError
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "t0ken-of-this-run"
RUN_ID = "demo-20261129-120000-beef"


class ControllerRun:
    """A run folder, and the controller process that serves it.

    Attributes:
        folder: The run folder.
        process: The controller, once started.
        env: More variables of it.
        module: What is started as it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        secrets: dict[str, str] | None = None,
        injections: list[dict[str, Any]] | None = None,
        env: dict[str, str] | None = None,
        hosts: dict[str, list[int]] | None = None,
        provisioned: Collection[str] = (),
        limits: dict[str, float] | None = None,
        collect_s: float = 0.0,
        choices: int = 1,
        **job: Any,
    ) -> None:
        self.folder = folder
        self.env = env or {}
        self.module = "sky_monarch.controller"
        folder.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None
        fields = {"name": "demo", "replicas": 3, "min_replicas": 2, "run": "python train.py", **job}
        spec = JobSpec(**fields, workdir=str(folder), secrets=secrets or {})
        sockets = {who: str(folder / f"{who}.sock") for who in ("api", "controller", "agent", "lighthouse")}
        self.address = f"unix:{sockets['controller']}"
        self.api = sockets["api"]
        files = {
            "run.json": {
                "run_id": RUN_ID,
                "name": "demo",
                "infra": "local",
                "created_ms": time.time_ns() // 1_000_000,
                "sockets": sockets,
            },
            "job.json": spec.public_dict(),
            "private.json": {"token": TOKEN, "base_env": {"PATH": "/usr/bin"}, **spec.private_values()},
            "controller.json": {
                "run_id": RUN_ID,
                "run_dir": str(folder),
                "private": str(folder / "private.json"),
                "job": str(folder / "job.json"),
                "api": sockets["api"],
                "channel": self.address,
                "lighthouse_kind": "sky-monarch",
                "lighthouse_control": f"unix:{sockets['lighthouse']}",
                "injections": injections or [],
                "hosts": [
                    {"name": name, "groups": groups, "provisioned": name in provisioned}
                    for name, groups in (hosts or {"local": list(range(spec.replicas))}).items()
                ],
                # Nobody is lost because nobody comes, or because a machine is busy, unless that is what is tested.
                "limits": {"agent_lost_s": 3600.0, **(limits or {})},
                "collect_s": collect_s,
                "choices": choices,
            },
        }
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))

    def start(self) -> float:
        """Start the controller; returns the seconds until its API answered."""
        log = (self.folder / "controller.log").open("ab")
        since = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(self.folder / "controller.json")],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
                "SKY_MONARCH_LIGHTHOUSE_ADDR": "127.0.0.1:41234",
                **self.env,
            },
            cwd=self.folder,  # python would look for the package in the current folder first
            stdout=log,
            stderr=log,
        )
        log.close()
        eventually(self._answers, within_s=60, what="the API answers", comes_always=True)
        return time.monotonic() - since

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        # httpcore leaves its socket open where connect() fails, so it is only asked once somebody listens.
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(self.api)
            return self.get("/v1/status").status_code == 200
        return False

    def kill(self) -> None:
        """SIGKILL the controller."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End the controller, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    def log(self) -> str:
        """What the controller logged."""
        return (self.folder / "controller.log").read_text()

    def client(self, *, token: str | None = TOKEN, timeout_s: float = 20.0) -> httpx.Client:
        """A client of the API."""
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=self.api),
            base_url="http://controller",
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
        )

    def get(self, path: str, **params: Any) -> httpx.Response:
        """One GET."""
        with self.client() as client:
            return client.get(path, params=params)

    def down(self, **body: Any) -> httpx.Response:
        """Order the end of the run."""
        with self.client() as client:
            return client.post("/v1/down", json=body)

    def status(self) -> dict[str, Any]:
        """The status document."""
        response = self.get("/v1/status")
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """Every event so far."""
        return [json.loads(line) for line in self.get("/v1/events", after=after).text.splitlines()]

    def state(self, wanted: str) -> dict[str, Any]:
        """Wait for a state of the run."""
        last: list[Any] = [None]

        def there() -> dict[str, Any] | None:
            last[0] = self.status()
            assert last[0]["state"] == wanted, (last[0]["state"], last[0]["reason"])
            return last[0]

        return eventually(there, what=f"the run is {wanted}")

    @property
    def final(self) -> dict[str, Any] | None:
        """``final.json``, once it is there."""
        path = self.folder / "final.json"
        return json.loads(path.read_text()) if path.exists() else None


@contextmanager
def controller(folder: Path, **options: Any) -> Iterator[ControllerRun]:
    """A started controller."""
    run = ControllerRun(folder / "run", **options)
    try:
        run.start()
        yield run
    finally:
        run.close()


class ScriptedAgent:
    """An agent without processes: it says what the test wants said, and resends what was not acked.

    Attributes:
        groups: What it supervises, by replica: snapshots of the protocol.
        commands: Everything it was told, without acks.
        farewell: Why the controller hung up, by its own words; empty where it said nothing.
    """

    def __init__(
        self, run: ControllerRun, *, host: str = "local", incarnation: int | None = None, attempt: int = 0
    ) -> None:
        self.run = run
        self.host = host
        self.attempt = attempt
        self.incarnation = incarnation or random.getrandbits(63)
        self.groups: dict[int, dict[str, Any]] = {}
        self.commands: list[dict[str, Any]] = []
        self.farewell = ""
        self.acked = 0
        self.logs: dict[tuple[int, int, int] | None, bytes] = {}
        self._log_eof = True
        self._seq = 0
        self._unacked: list[dict[str, Any]] = []
        self._channel: ChannelClient | None = None

    def connect(self) -> ScriptedAgent:
        """Dial, as an agent does after any loss, and send again what was not acked."""
        hello = {
            "role": "agent",
            "host": self.host,
            "attempt": self.attempt,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "groups": list(self.groups.values()),
        }

        def dial() -> ChannelClient | None:
            with suppress(ChannelError):
                return ChannelClient(self.run.address, TOKEN, RUN_ID, hello, 5.0)
            return None

        self._channel = eventually(dial, what="the controller accepts the agent")
        for event in self._unacked:
            self.send(event)
        return self

    def send(self, message: object) -> None:
        """Send anything."""
        assert self._channel is not None
        self._channel.send(message)

    def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def event(self, event: str, **fields: Any) -> int:
        """Report an event; returns its sequence number."""
        self._seq += 1
        stamped = {
            "type": "event",
            "seq": self._seq,
            "mono_ns": time.monotonic_ns(),
            "wall_ms": time.time_ns() // 1_000_000,
            "event": event,
            **fields,
        }
        self._unacked.append(stamped)
        if self._channel is not None:
            with suppress(ChannelError):
                self._channel.send(stamped)
        return self._seq

    def pump(self, timeout_s: float = 0.05) -> None:
        """Take what has arrived: acks are noted, log questions answered, the rest kept."""
        assert self._channel is not None
        while (command := self._channel.recv(timeout_s)) is not None:
            timeout_s = 0.0
            match command["type"]:
                case "ack":
                    self.acked = command["seq"]
                    self._unacked = [event for event in self._unacked if event["seq"] > self.acked]
                case "read_log":
                    self._answer(command)
                case "dropped":
                    self.farewell = command["reason"]
                case _:
                    self.commands.append(command)

    def serve(self, until: Callable[[], Any], *, within_s: float = 20.0) -> Any:
        """Pump until ``until`` is true."""

        def probe() -> Any:
            self.pump(0.01)
            return until()

        return eventually(probe, within_s=within_s, every_s=0.0, what="what the agent waits for")

    def told(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait for ``count`` commands of a kind, and take them."""
        self.serve(lambda: sum(command["type"] == kind for command in self.commands) >= count)
        found = [command for command in self.commands if command["type"] == kind]
        self.commands = [command for command in self.commands if command["type"] != kind]
        return found

    def all_acked(self) -> None:
        """Wait until the controller has everything."""
        self.serve(lambda: self.acked == self._seq)

    def dropped(self) -> None:
        """Wait until the controller has hung up."""

        def gone() -> bool:
            try:
                self.pump(0.1)
            except ChannelError:
                return True
            return False

        eventually(gone, what="the controller hangs up")
        self.close()

    def _answer(self, question: dict[str, Any]) -> None:
        slot = question["slot"]
        key = None if slot is None else (slot["replica"], slot["rank"], question["generation"])
        data = self.logs.get(key, b"")
        start = min(question["offset"], len(data))
        piece = data[start : start + question["max_bytes"]]
        self.send(
            {
                "type": "log_chunk",
                "request": question["request"],
                "offset": start,
                "data": piece,
                "eof": self._log_eof and start + len(piece) >= len(data),
            }
        )

    # --- what groups do -----------------------------------------------------------------------------------

    def _snapshot(self, replica: int, generation: int, state: str, pids: dict[int, int]) -> None:
        self.groups[replica] = {
            "replica": replica,
            "generation": generation,
            "state": state,
            "restarts": 0,
            "pids": pids,
        }

    def start(self, replica: int, generation: int = 1, *, ranks: int = 1, warm: bool = False) -> None:
        """A generation starts and commits its first step."""
        whose = {"replica": replica, "generation": generation}
        self.event("generation_started", **whose)
        pids = {rank: 10_000 + 100 * replica + 10 * generation + rank for rank in range(ranks)}
        for rank, pid in pids.items():
            self.event("rank_spawned", **whose, rank=rank, pid=pid, warm=warm)
        self._snapshot(replica, generation, "running", pids)

    def commit(
        self, replica: int, step: int, *, generation: int = 1, first: bool = False, **more: Any
    ) -> None:
        """A step is committed."""
        if first:
            self.event("first_commit", replica=replica, generation=generation, step=step)
        self.send(
            {
                "type": "progress",
                "slot": {"replica": replica, "rank": 0},
                "generation": generation,
                "mono_ns": time.monotonic_ns(),
                "step": step,
                "target_step": 120,
                "quorum_id": 4,
                "participants": 3,
                "metrics": {"loss": 2.5},
                **more,
            }
        )

    def die(self, replica: int, generation: int, *, signal: int = 9, step: int | None = 30) -> None:
        """A rank dies and its generation with it."""
        whose = {"replica": replica, "generation": generation}
        pid = self.groups[replica]["pids"][0]
        self.event(
            "rank_exited",
            **whose,
            rank=0,
            pid=pid,
            exit={"signal": signal},
            collateral=False,
            oom=False,
            tail=["last words"],
        )
        self.event("evicted", **whose, quorum_id=4)
        self.event(
            "generation_ended",
            **whose,
            cause="rank_exited",
            rank=0,
            exit={"signal": signal},
            early=None,
            step=step,
        )
        self._snapshot(replica, generation, "restarting", {})

    def finish(self, replica: int, generation: int = 1, step: int | None = 120) -> None:
        """The work of a group is done and its ranks have left."""
        whose = {"replica": replica, "generation": generation}
        self.event("group_done", **whose, step=step)
        for rank, pid in self.groups[replica]["pids"].items():
            exit_ = {"code": 0}
            self.event(
                "rank_exited", **whose, rank=rank, pid=pid, exit=exit_, collateral=False, oom=False, tail=[]
            )
        self._snapshot(replica, generation, "done", {})

    def stop(self, replica: int) -> None:
        """A group was stopped on request."""
        generation = self.groups[replica]["generation"]
        self.event("group_stopped", replica=replica, generation=generation)
        self._snapshot(replica, generation, "stopped", {})


def trains(agent: ScriptedAgent, replicas: int = 3) -> list[dict[str, Any]]:
    """Every group starts and commits."""
    starts = agent.told("start_group", replicas)
    for replica in range(replicas):
        agent.start(replica)
        agent.commit(replica, 1, first=True)
    agent.all_acked()
    return starts
