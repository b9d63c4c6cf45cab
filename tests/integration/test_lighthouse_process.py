"""The lighthouse as a process: what its parent and its readers see of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.actors.lighthouse_client import LighthouseClient
from sky_monarch.config.spec import Lighthouse
from sky_monarch.launch.plan import plan_local
from tests.support.ports import reserved_port
from tests.support.runs import ROOT
from tests.support.waiting import eventually

TOKEN = "s3cret-token"


class Process:
    """One lighthouse, started as the agent starts it."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        (folder / "private.json").write_text(
            json.dumps({"token": TOKEN, "base_env": {}, "envs": {}, "secrets": {}})
        )
        self.config = {
            "run_id": "run",
            "run_dir": str(folder),
            "private": str(folder / "private.json"),
            "sockets": {"lighthouse": str(folder / "lighthouse.sock")},
            "replicas": 1,
            "min_replicas": 1,
            "kind": "sky-monarch",
            "join_timeout_s": 30.0,
            "heartbeat_timeout_s": 5.0,
            "quorum_timeout_s": 60.0,
            "process_group_timeout_s": 30.0,
            **config,
        }
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        number = self.listener.fileno()
        return self._start(f"SKY_MONARCH_LISTEN_FD={number}", number)

    def start_torchft(self, address: str) -> subprocess.Popen[bytes]:
        """TorchFT's binds by itself: it gets the address of a port that the agent found free."""
        return self._start(f"SKY_MONARCH_LIGHTHOUSE_ADDR={address}")

    def _start(self, variable: str, *inherited: int) -> subprocess.Popen[bytes]:
        (self.folder / "lighthouse.json").write_text(json.dumps(self.config))
        with (self.folder / "lighthouse.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sky_monarch.lighthouse", str(self.folder / "lighthouse.json")],
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
                    **{key: os.environ[key] for key in ("SKY_MONARCH_MUTANT",) if key in os.environ},
                    **dict([variable.split("=", 1)]),
                },
                cwd=self.folder,  # `-m` looks here before PYTHONPATH
                pass_fds=inherited,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.started.append(process)
        return process

    def log(self) -> str:
        return (self.folder / "lighthouse.log").read_text()

    def client(self, generation: int = 1, replica: int = 0) -> LighthouseClient:
        return LighthouseClient(f"http://r{replica}.g{generation}.{TOKEN}@127.0.0.1:{self.port}", 20.0)

    def get(self, path: str, token: str = TOKEN) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()

    def close(self) -> None:
        self.listener.close()
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=20)


@pytest.fixture
def lighthouse(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    yield made
    made.close()


def test_it_serves_the_inherited_port_prints_nothing_and_ends_with_0_at_sigterm(lighthouse: Process) -> None:
    process = lighthouse.start()
    quorum = lighthouse.client().quorum("rep_0:x", 3, timeout_s=20)
    assert [member["step"] for member in quorum["participants"]] == [3]
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # what Slurm tells every process of a job
        process.send_signal(number)
    lighthouse.client().heartbeat("rep_0:x", timeout_s=20)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0, lighthouse.log()
    assert out == b""
    assert "lighthouse is up" in lighthouse.log()
    assert TOKEN not in lighthouse.log()


def test_a_killed_one_is_replaced_on_the_same_port_and_goes_on(lighthouse: Process) -> None:
    first = lighthouse.start()
    client = lighthouse.client(generation=4)
    before = client.quorum("rep_0:x", 1, timeout_s=20)
    first.kill()
    first.wait(timeout=20)
    lighthouse.start()

    def again() -> dict[str, Any]:
        return dict(lighthouse.client(generation=4).quorum("rep_0:x", 2, timeout_s=30))

    after = eventually(again, within_s=20)
    assert after["quorum_id"] > before["quorum_id"]
    status = json.loads(lighthouse.get("/status.json"))["lighthouse"]
    assert status["fences"] == {"0": 4}
    assert status["history"][-1]["reason"] == "same members; the lighthouse was restarted"


def test_readers_without_the_token_get_401(lighthouse: Process) -> None:
    lighthouse.start()
    lighthouse.client().heartbeat("rep_0:x", 20)
    for path in ("/status.json", "/metrics"):
        assert lighthouse.get(path)
        with pytest.raises(urllib.error.HTTPError) as refused:
            lighthouse.get(path, token="wrong")
        assert refused.value.code == 401
        refused.value.close()


def test_it_takes_what_the_launcher_writes(tmp_path: Path) -> None:
    planned = plan_local(
        {"name": "job", "replicas": 3, "min_replicas": 2, **_defaults_of_lighthouse()},
        private={},
        run_id="run",
        state=tmp_path,
        temporary=tmp_path,
        python=sys.executable,
        version="0",
        token=TOKEN,
        base_env={},
        injections=[],
        host="localhost",
    ).files["lighthouse.json"]
    made = Process(tmp_path, **{**planned, **_here(tmp_path)})
    try:
        process = made.start()
        made.client().heartbeat("rep_0:x", 20)
        options = json.loads(made.get("/status.json"))["lighthouse"]["options"]
        assert options == {
            "min_replicas": 2,
            "expect": 3,
            "join_timeout_s": 30.0,
            "heartbeat_timeout_s": 2.0,
        }
        process.terminate()
        assert process.wait(timeout=20) == 0
    finally:
        made.close()


def _defaults_of_lighthouse() -> dict[str, Any]:
    return {"lighthouse": Lighthouse().model_dump()}


def _here(folder: Path) -> dict[str, Any]:
    """The plan's paths, where this test has made its files."""
    return {
        "run_dir": str(folder),
        "private": str(folder / "private.json"),
        "sockets": {"lighthouse": str(folder / "lighthouse.sock")},
    }


def test_it_takes_the_niceness_that_it_is_given(tmp_path: Path) -> None:
    made = Process(tmp_path, nice=7)
    try:
        process = made.start()
        made.client().heartbeat("rep_0:x", 20)
        found = set()
        for entry in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # a thread that had nothing to do, and has ended since
                found.add(os.getpriority(os.PRIO_PROCESS, int(entry.name)))
        assert found == {7}
    finally:
        made.close()


def test_it_starts_in_a_fraction_of_a_second(lighthouse: Process) -> None:
    process = lighthouse.start()
    lighthouse.client().heartbeat("rep_0:x", 20)
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    # a Python start costs about 0.05 s; an import of torch, which must not happen, 2 s and more
    assert cpu_s < 1.5, "of its own: others may keep this machine busy"
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"min_replicas": 0}, "min_replicas"),
        ({"replicas": 1, "min_replicas": 2}, "expect"),
        ({"joni_timeout_s": 1}, "joni_timeout_s"),
        ({"private": "/nonexistent/private.json"}, "/nonexistent/private.json"),
        ({"kind": "other"}, "kind"),
        ({"nice": 99}, "nice"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named_and_exits_with_2(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    made = Process(tmp_path, **change)
    try:
        process = made.start()
        out, _ = process.communicate(timeout=20)
        assert (process.returncode, out) == (2, b""), made.log()
        assert "error: " in made.log()
        assert named in made.log()
        assert "Traceback" not in made.log()
        assert not (tmp_path / "lighthouse.sock").exists()
    finally:
        made.close()


def test_torchfts_own_is_an_option_bound_to_loopback_only(tmp_path: Path) -> None:
    made = Process(tmp_path, kind="torchft", private=None)
    try:
        with reserved_port() as port:
            refused = made.start_torchft(f"0.0.0.0:{port}")
            assert refused.wait(timeout=20) == 2
            assert "not loopback" in made.log()
            process = made.start_torchft(f"127.0.0.1:{port}")
            client = LighthouseClient(f"http://127.0.0.1:{port}", 20.0)
            quorum = client.quorum("rep_0:x", 3, timeout_s=20)
            assert [member["replica_id"] for member in quorum["participants"]] == ["rep_0:x"]
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=20)
            assert (process.returncode, out) == (0, b""), made.log()
    finally:
        made.close()
