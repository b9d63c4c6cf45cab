"""Hosts that are processes of this machine, and the provisioner as the process that it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sky_monarch.launch.process import Process
from sky_monarch.provision.local import LocalProvider
from sky_monarch.provision.provider import HostOrder, Turn
from tests.support.hosts_controller import RUN_ID
from tests.support.processes import environ_of, is_alive, send, with_variable
from tests.support.provisioning import Bench
from tests.support.waiting import eventually

#: A host that has children: one of them in a session of its own, and nobody's child any more.
TREE = """
trap 'echo told >> told; exit 0' TERM
setsid sh -c 'setsid sleep 1000 & echo $! > far; exit' &
wait $!
sleep 1000 & echo $! > near
echo "$SKY_MONARCH_HOST" > told_of_itself
echo ready
wait
"""


def mark(host: str, attempt: int) -> str:
    return f"sky-local-{RUN_ID}_{host}_{attempt}"


def local(*hosts: str, run: str = TREE, workdir: Path | None = None) -> list[dict]:
    tasks = []
    for host in hosts:
        task = {"name": host, "run": run, **({"workdir": str(workdir / host)} if workdir else {})}
        tasks.append({"cluster": host, "task": task})
    sets = [{"cluster": host, "nodes": 1, "groups": [number]} for number, host in enumerate(hosts)]
    return [{"infra": "local", "hosts": sets, "tasks": tasks}]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    processes: list[subprocess.Popen[bytes]] = []
    start = bench.start_process

    def started(*arguments, **options):
        processes.append(start(*arguments, **options))
        return processes[-1]

    bench.start_process = started  # type: ignore[method-assign]
    yield bench
    for process in processes:
        process.kill()
        process.wait(10)
    left = with_variable("SKY_MONARCH_RUN_ID", RUN_ID)
    send(left, signal.SIGKILL)
    bench.close()
    assert not left, "hosts were left behind"


@pytest.fixture
def places(tmp_path: Path) -> Path:
    for host in ("demo-h0", "demo-h1"):
        (tmp_path / host).mkdir()
    return tmp_path


def leader(bench: Bench, host: str, attempt: int = 1) -> int:
    """The pid of a host, once it is ready."""
    folder = bench.folder / "hosts" / f"{host}-a{attempt}"

    def is_ready() -> bool:
        log = folder / "host.log"
        return log.exists() and "ready" in log.read_text() and (folder / "process.json").exists()

    eventually(is_ready, what=f"{host} runs", comes_always=True)
    return int(json.loads((folder / "process.json").read_text())["pid"])


def holding(text: str, folder: Path) -> list[Path]:
    """Files that hold ``text``; one that is renamed meanwhile is looked at under its new name."""
    found = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and text in path.read_text(errors="replace"):
                found.append(path)
    return found


def tell_down(bench: Bench, *hosts: str, attempt: int = 1) -> None:
    bench.controller.want_all(list(hosts), "down", attempt=attempt)
    for host in hosts:
        bench.controller.reported(host, "down", attempt=attempt)


def test_a_host_has_its_secrets_in_its_environment_alone_and_a_session_of_its_own(
    bench: Bench, places: Path
) -> None:
    bench.start_process(local("demo-h0", workdir=places))
    bench.controller.want("demo-h0", agent={"controller": "tls:10.0.0.1:7443"})
    bench.controller.reported("demo-h0", "launched")
    pid = leader(bench, "demo-h0")
    secret = bench.controller._hosts["demo-h0"]["enrolment"]

    env = environ_of(pid)
    assert env["SKY_MONARCH_ENROLMENT"] == secret
    assert json.loads(env["SKY_MONARCH_HOST"])["controller"] == "tls:10.0.0.1:7443"
    assert env["SKYPILOT_TASK_ID"] == mark("demo-h0", 1)
    assert "SKY_MONARCH_SPAWN_ID" not in env, "the head's agent would end it with the provisioner"
    assert os.getsid(pid) == pid
    assert not [
        line for line in with_variable("SKYPILOT_TASK_ID", mark("demo-h0", 1)).values() if secret in line
    ]
    assert not holding(secret, bench.folder)
    assert (bench.folder / "hosts/demo-h0-a1").stat().st_mode & 0o777 == 0o700
    tell_down(bench, "demo-h0")


def test_down_ends_the_whole_tree_and_nothing_of_another_host(bench: Bench, places: Path) -> None:
    bench.start_process(local("demo-h0", "demo-h1", workdir=places))
    bench.controller.want_all(["demo-h0", "demo-h1"])
    pids = [leader(bench, host) for host in ("demo-h0", "demo-h1")]
    far, near = (int((places / "demo-h0" / name).read_text()) for name in ("far", "near"))
    for host in ("demo-h0", "demo-h1"):
        bench.controller.reported(host, "launched")
    assert is_alive(far)
    assert os.getsid(far) != pids[0], "it has left the session, and its parent is gone"

    tell_down(bench, "demo-h0")
    assert not any(is_alive(pid) for pid in (pids[0], far, near))
    assert (places / "demo-h0" / "told").read_text() == "told\n", "TERM comes first"
    assert is_alive(pids[1])
    assert bench.controller.states("demo-h1") == ["launching", "launched"]
    tell_down(bench, "demo-h1")
    assert bench.controller.states("demo-h0") == ["launching", "launched", "down"], (
        "that it has ended is no news"
    )


def test_a_host_that_is_killed_in_its_setup_counts_as_lost_and_comes_back_alone(
    bench: Bench, places: Path
) -> None:
    bench.start_process(local("demo-h0", "demo-h1", workdir=places))
    bench.controller.want_all(["demo-h0", "demo-h1"])
    first, other = leader(bench, "demo-h0"), leader(bench, "demo-h1")
    bench.controller.reported("demo-h0", "launched")  # before that its end would be no news of a host
    os.kill(first, signal.SIGKILL)

    report = bench.controller.reported("demo-h0", "ended")
    assert report["kind"] is None, "no failed launch, and no failed setup"
    assert "its agent was killed by SIGKILL: ready" in report["reason"]
    bench.controller.want("demo-h0", attempt=2)
    bench.controller.reported("demo-h0", "launched", attempt=2)
    second = leader(bench, "demo-h0", 2)
    gone = mark("demo-h0", 1)  # beside the second
    eventually(lambda: with_variable("SKYPILOT_TASK_ID", gone) == {}, what="nothing of the first is left")
    assert is_alive(second)
    assert leader(bench, "demo-h1") == other
    assert is_alive(other)
    tell_down(bench, "demo-h0", attempt=2)
    tell_down(bench, "demo-h1")


def test_hosts_outlive_the_provisioner_and_the_next_one_goes_on_with_them(bench: Bench, places: Path) -> None:
    choices = local("demo-h0", "demo-h1", workdir=places)
    first = bench.start_process(choices)
    bench.controller.want_all(["demo-h0", "demo-h1"])
    pids = [leader(bench, host) for host in ("demo-h0", "demo-h1")]
    for host in ("demo-h0", "demo-h1"):
        bench.controller.reported(host, "launched")
    first.kill()
    first.wait(10)
    os.kill(pids[1], signal.SIGKILL)  # while nobody looks
    bench.controller.reports = []

    bench.start_process(choices)
    bench.controller.reported("demo-h0", "launched")
    ended = bench.controller.reported("demo-h1", "ended")
    assert ended["reason"] == "its agent ended while no provisioner looked", "it need not ask twice"
    assert leader(bench, "demo-h0") == pids[0]
    assert list(with_variable("SKYPILOT_TASK_ID", mark("demo-h0", 1)).keys()).count(pids[0]) == 1
    os.kill(pids[0], signal.SIGKILL)  # no child of the one that watches it
    bench.controller.reported("demo-h0", "ended")
    tell_down(bench, "demo-h0", "demo-h1")


def test_a_host_whose_starter_was_killed_before_it_wrote_that_down_is_not_there_twice(tmp_path: Path) -> None:
    order = HostOrder(host="demo-h0", attempt=1, want="up", agent={"run_id": RUN_ID}, enrolment="c2VjcmV0")
    choice = local("demo-h0", run="sleep 1000; true")[0]
    stop = threading.Event()
    provider = LocalProvider(RUN_ID, tmp_path)
    provider.launch(order, choice, Turn(choice=0), stop=stop)
    (before,) = (int(json.loads(path.read_text())["pid"]) for path in tmp_path.rglob("process.json"))
    (tmp_path / "hosts/demo-h0-a1/process.json").unlink()

    following = LocalProvider(RUN_ID, tmp_path)
    following.launch(order, choice, Turn(choice=0), stop=stop)
    assert not is_alive(before)
    (after,) = (int(json.loads(path.read_text())["pid"]) for path in tmp_path.rglob("process.json"))
    assert Process.of(after) is not None
    following.launch(order, choice, Turn(choice=0), stop=stop)
    assert is_alive(after), "said again, it finds the one that runs"
    for one in (provider, following):
        one.down("demo-h0", stop=stop)
        one.notices()
        one.close()
    assert with_variable("SKY_MONARCH_RUN_ID", RUN_ID) == {}


def test_notices_and_prints_end_nothing_sigterm_ends_it_at_once_and_hosts_stay(
    bench: Bench, places: Path
) -> None:
    process = bench.start_process(local("demo-h0", workdir=places), limits={"wait_s": 30})
    bench.controller.want("demo-h0")
    pid = leader(bench, "demo-h0")
    bench.controller.reported("demo-h0", "launched")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(process.pid, number)
    bench.controller.want("demo-h1", "down")
    bench.controller.reported("demo-h1", "down")

    began_s = time.monotonic()
    process.terminate()
    assert process.wait(30) == 0
    assert time.monotonic() - began_s < 15, "in the middle of its question to the controller, which takes 30"
    assert is_alive(pid)
    assert (bench.folder / "stdout").read_bytes() == b""
    for line in (bench.folder / "provisioner.log").read_text().splitlines():
        assert json.loads(line)["level"], "one JSON object a line"
    bench.start_process(local("demo-h0", workdir=places))
    tell_down(bench, "demo-h0")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"provider": "gcp"}, "provider is 'gcp'"),
        ({"choices": []}, "choices"),
        ({"limits": {"launches": 0}}, "limits.launches"),
        ({"autodown_minutes": "5"}, "autodown_minutes"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(bench: Bench, broken: dict, says: str) -> None:
    more = {key: value for key, value in broken.items() if key != "choices"}
    process = bench.start_process(broken.get("choices", local("demo-h0")), **more)

    assert process.wait(60) == 2
    assert says in (bench.folder / "provisioner.log").read_text()
