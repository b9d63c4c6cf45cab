"""Ports: nobody's is taken, nobody's is needed, and what a rank leaves behind holds none."""

from __future__ import annotations

import json
import random
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.runs import FREE_RANK, Workbench
from tests.support.waiting import eventually

# What a torch-elastic script does with its address, without torch: rank 0 has nothing to bind, all connect.
CONNECT = """
import os, socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print("port", address[1], "lighthouse", os.environ["TORCHFT_LIGHTHOUSE"].rpartition(":")[2], flush=True)
"""


@pytest.fixture
def foreign() -> Iterator[socket.socket]:
    """A listener of somebody else."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        yield listener


def port_of_nobody() -> int:
    """A port that nobody gets who does not name it: the system gives out others, to listeners and to who dials."""
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.randrange(min(10_000, given_out - 1_000), given_out)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port below {given_out} is free")


def test_a_taken_port_that_the_shell_names_is_neither_used_nor_asked(
    workbench: Workbench, foreign: socket.socket
) -> None:
    taken = foreign.getsockname()[1]
    workbench.env |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(taken),
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{taken}",
        "RANK": "5",
        "WORLD_SIZE": "9",
    }
    script = workbench.folder / "connect.py"
    script.write_text(CONNECT)
    run = f"{sys.executable} {script}; {FREE_RANK} --steps 10"
    name = workbench.up(workbench.job("shell", run=run, replicas=2, ranks_per_replica=2))
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED", after["reason"]
    lines = [line.split() for line in workbench.cli("logs", name).stdout.splitlines() if " port " in line]
    assert len(lines) == 4
    ports = {line[0].removeprefix("[").split("/")[0]: line[2] for line in lines}
    assert len(set(ports.values())) == 2, "each group has its own, its ranks share it"
    assert str(taken) not in {*ports.values(), lines[0][4]}
    with pytest.raises(BlockingIOError):
        foreign.accept()


def test_a_job_that_names_a_port_itself_is_refused_with_the_reason(workbench: Workbench) -> None:
    job = workbench.job("named", run="true", envs={"MASTER_PORT": "29500"})
    done = workbench.cli("up", str(job))
    assert done.returncode == 2
    assert "MASTER_PORT" in done.stderr
    assert not workbench.home.exists()


@pytest.mark.slow
def test_two_runs_at_once_share_no_port_and_both_finish(workbench: Workbench) -> None:
    script = workbench.folder / "connect.py"
    script.write_text(CONNECT)
    run = f"{sys.executable} {script}; {FREE_RANK} --steps 20"
    jobs = [workbench.job(name, run=run, replicas=2, ranks_per_replica=2) for name in ("a", "b")]
    names = [job.stem for job in jobs]
    workbench.names += names
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda job: workbench.cli("up", str(job), "-d"), jobs):
            assert done.returncode == 0, done.stderr
    for name in names:
        after = workbench.wait_for_end(name)
        assert after["state"] == "SUCCEEDED", after["reason"]
    used = []
    for name in names:
        lines = [line.split() for line in workbench.cli("logs", name).stdout.splitlines() if " port " in line]
        assert len(lines) == 4
        used.append({line[2] for line in lines} | {line[4] for line in lines})
    assert len(used[0]) == len(used[1]) == 3, "two groups and a lighthouse"
    # A port may be given out again once its run has ended: the runs overlapped if both say so.
    spans = [
        (events[0]["wall_ms"], events[-1]["wall_ms"]) for events in (workbench.events(name) for name in names)
    ]
    if max(start for start, _ in spans) < min(end for _, end in spans):
        assert not used[0] & used[1]


def test_grandchildren_go_with_their_rank_and_free_their_port(workbench: Workbench) -> None:
    port = port_of_nobody()
    script = workbench.folder / "forks.py"
    # Without SO_REUSEADDR: it binds only if nothing at all holds the port any more.
    script.write_text(
        f"""
import os, signal, socket, time
listener = socket.socket()
listener.bind(("127.0.0.1", {port}))
listener.listen()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
print("bound", flush=True)
if os.environ["SKY_MONARCH_GENERATION"] == "1":
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
"""
    )
    job = workbench.job("forks", run=f"{sys.executable} {script}", replicas=1, recovery={"grace_s": 1})
    name = workbench.up(job)
    after = workbench.wait_for_end(name)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [group["generation"] for group in after["groups"]] == [2]
    assert workbench.logs(name).count("bound") == 2
    eventually(lambda: not workbench.processes(name), within_s=10)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_the_api_listens_on_no_port_and_the_lighthouse_on_loopback_only(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("loopback", run="sleep 300", replicas=1))
    pids = workbench.processes(name)
    inodes = {inode for pid in pids for inode in _sockets_of(pid)}
    listening = [line for line in _tcp_listeners() if line[1] in inodes]
    assert listening, "the lighthouse listens"
    assert {address.partition(":")[0] for address, _ in listening} == {"0100007F"}, listening
    assert json.loads((workbench.run_folder(name) / "run.json").read_text())["sockets"]["api"]


def _sockets_of(pid: int) -> set[str]:
    """Of one that has ended meanwhile, the look at this machine say, there are none."""
    found = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(str(entry.readlink()))
    return {target[8:-1] for target in found if target.startswith("socket:[")}


def _tcp_listeners() -> list[tuple[str, str]]:
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return [(row[1], row[9]) for row in rows if row[3] == "0A"]
