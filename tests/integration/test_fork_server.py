"""Standbys that are forked from one process of their host: as good as spawned ones, and never in anybody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_standby import kill_and_see_it_back, log, seen, standby_of
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.waiting import eventually

FORK_LIMIT_S = 10
"""How long the agent waits for a fork that it wants."""


def start(workbench: Workbench, name: str, preload: str = "json", **fields: Any) -> str:
    recovery = {"standby": 1, "backoff_s": 0, **fields.pop("recovery", {})}
    run = fields.pop("run", f"{FREE_RANK} --steps 4000")
    return workbench.up(
        workbench.job(name, run=run, replicas=2, preload=[preload], recovery=recovery, **fields)
    )


def fork_servers(workbench: Workbench, name: str) -> list[int]:
    """Pids of the run's fork servers. A standby forked from one has its command line, and leads a session too."""
    agent = workbench.status(name)["agent_pid"]
    used = {event["pid"] for event in seen(workbench, name, "standby_ready")}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"--serve" in command and int(folder.name) not in used and parent == agent:
            found.append(int(folder.name))
    return found


def fork_server(workbench: Workbench, name: str) -> int:
    """The only one, once the standbys that are on their way can be told from it."""

    def only() -> int | None:
        found = fork_servers(workbench, name)
        return found[0] if len(found) == 1 else None

    return eventually(only)


def stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def environment(pid: int) -> dict[str, str]:
    """What the process table shows of it."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_a_forked_standby_is_a_child_of_the_agent_and_becomes_the_rank(workbench: Workbench) -> None:
    name = start(workbench, "forked")
    first, second = standby_of(workbench, name, 0), standby_of(workbench, name, 1)
    server = fork_server(workbench, name)
    agent = str(workbench.status(name)["agent_pid"])
    for pid in (first, second):
        _, parent, _, session, *_ = stat(pid)
        assert (parent, session) == (agent, str(pid)), "the agent reaps it, and its tree can be told apart"
    marks = {environment(pid)["SKY_MONARCH_SPAWN_ID"] for pid in (first, second, server)}
    assert len(marks) == 3, "each tree has a mark of its own"

    spawned = kill_and_see_it_back(workbench, name, 1)

    assert (spawned["warm"], spawned["pid"]) == (True, second)
    assert f"starts as generation 2, pid {second}" in log(workbench, name, "g2-*.log")
    third = standby_of(workbench, name, 1)
    assert "--serve" in Path(f"/proc/{third}/cmdline").read_text(), "it is of the same making"
    assert fork_server(workbench, name) == server
    workbench.down(name)
    assert not Path(f"/proc/{server}").exists()


def test_imports_that_bear_no_fork_are_told_and_done_by_each_standby(workbench: Workbench) -> None:
    work = workbench.folder / "work"
    work.mkdir()
    (work / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    name = start(workbench, "threads", "threaded", workdir=str(work), run=f"{FREE_RANK} --steps 4000")
    standby = standby_of(workbench, name, 1)
    notices = [event["message"] for event in seen(workbench, name, "notice")]
    assert [text for text in notices if "1 more threads running" in text and "none is forked" in text], (
        notices
    )
    assert not fork_servers(workbench, name)
    spawned = kill_and_see_it_back(workbench, name, 1)
    assert (spawned["warm"], spawned["pid"]) == (True, standby)
    standby_of(workbench, name, 1)
    assert len([text for text in notices if "none is forked" in text]) == 1, "it is said once"


@pytest.mark.parametrize("made", ["fork", "exec"])
def test_a_module_that_cannot_be_imported_is_told_once_and_nobody_is_called_warm(
    workbench: Workbench, made: str
) -> None:
    work = workbench.folder / "work"
    work.mkdir()
    (work / "broken.py").write_text("raise RuntimeError('no device')\n")
    run, recovery = f"{FREE_RANK} --steps 4000", {"standby_start": made}
    name = start(workbench, "broken", "broken", workdir=str(work), run=run, recovery=recovery)
    standby = standby_of(workbench, name, 1)
    spawned = kill_and_see_it_back(workbench, name, 1)
    assert (spawned["warm"], spawned["pid"]) == (False, standby), (
        "it took over, and has saved nobody an import"
    )
    standby_of(workbench, name, 1)
    (told,) = [e["message"] for e in seen(workbench, name, "notice") if e["message"].startswith("preload: ")]
    assert "cannot import broken: RuntimeError: no device" in told
    assert "correct `preload`" in told


def test_without_the_fork_server_standbys_come_all_the_same(workbench: Workbench) -> None:
    name = start(workbench, "gone")
    standby = standby_of(workbench, name, 1)
    server = fork_server(workbench, name)
    os.kill(server, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{server}").exists())
    assert Path(f"/proc/{standby}").exists(), "who was forked from it lives on"
    spawned = kill_and_see_it_back(workbench, name, 1)
    assert (spawned["warm"], spawned["pid"]) == (True, standby)
    other = standby_of(workbench, name, 1)
    spawned = kill_and_see_it_back(workbench, name, 1)
    assert (spawned["warm"], spawned["pid"]) == (True, other)
    standby_of(workbench, name, 1)
    assert fork_server(workbench, name) != server, "there is a new one"


@pytest.mark.slow
def test_a_hung_fork_server_is_replaced_and_keeps_no_death_from_being_noticed(workbench: Workbench) -> None:
    name = start(workbench, "hung")
    standby_of(workbench, name, 1)
    server = fork_server(workbench, name)
    os.kill(server, signal.SIGSTOP)
    kill_and_see_it_back(workbench, name, 1)  # takes the standby; nobody can fork the next one
    now = workbench.status(name)
    os.kill(pid_of(now, 1), signal.SIGKILL)
    back = {"replica": 1, "generation": 3}
    eventually(lambda: seen(workbench, name, "first_commit", **back), within_s=15)
    (spawned,) = seen(workbench, name, "rank_spawned", **back)
    assert not spawned["warm"], "it started cold, and waited for nobody"
    standby_of(workbench, name, 1)
    assert server not in fork_servers(workbench, name)


def test_forked_standbys_share_no_random_numbers(workbench: Workbench) -> None:
    work = workbench.folder / "work"
    work.mkdir()
    # Under `session` the script runs in the standby itself.
    (work / "draw.py").write_text(
        "import numpy, random, runpy\n"
        "print('draws', random.random(), flush=True)\n"
        "print('draws', numpy.random.random(), flush=True)\n"
        "runpy.run_module('tests.support.free_rank', run_name='__main__', alter_sys=True)\n"
    )
    name = start(
        workbench,
        "draws",
        "numpy.random",
        workdir=str(work),
        run="python draw.py --steps 4000",
        recovery={"standby_until": "session"},
    )
    standby_of(workbench, name, 0)
    standby_of(workbench, name, 1)

    def drawn() -> list[str]:
        logs = workbench.run_folder(name).glob("logs/r*-0/standby-*.log")
        return [line for path in logs for line in path.read_text().splitlines() if line.startswith("draws")]

    # What they print comes by another way than the word that they are ready.
    eventually(lambda: len(drawn()) >= 4, what="each draws twice")
    assert len(drawn()) == len(set(drawn())) == 4, drawn()


def test_what_a_forked_rank_leaves_behind_without_exec_goes_with_it(workbench: Workbench) -> None:
    work = workbench.folder / "work"
    work.mkdir()
    (work / "daemon.py").write_text(
        "import os, runpy, signal\n"
        "if int(os.environ['SKY_MONARCH_GENERATION']) == 2 and os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    with open('daemon.tmp', 'w') as file:\n"
        "        file.write(str(os.getpid()))\n"
        "    os.rename('daemon.tmp', 'daemon.pid')\n"
        "    while True:\n"
        "        signal.pause()\n"
        "runpy.run_module('tests.support.free_rank', run_name='__main__', alter_sys=True)\n"
    )
    run = "python daemon.py --steps 4000"
    name = start(workbench, "daemon", workdir=str(work), run=run, recovery={"grace_s": 0.5})
    standby_of(workbench, name, 1)
    spawned = kill_and_see_it_back(workbench, name, 1)
    assert spawned["warm"]
    pid_file = work / "daemon.pid"
    eventually(pid_file.exists)
    daemon = int(pid_file.read_text())
    assert Path(f"/proc/{daemon}").exists()
    kill_and_see_it_back(workbench, name, 1)
    eventually(lambda: not Path(f"/proc/{daemon}").exists())


@pytest.mark.parametrize(
    ("what", "module", "is_forked"),
    [
        ("timeout", "import socket\nsocket.setdefaulttimeout(0.2)\n", True),
        ("reaps", "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n", True),
        ("mute", "import sys\nsys.stdout = None\n", True),
        ("leaves", "raise SystemExit(3)\n", True),
        # As `setproctitle` does, which puts a title where the environment was.
        (
            "retitled",
            """
import ctypes
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))
""",
            False,
        ),
    ],
)
def test_whatever_an_import_does_to_its_process_standbys_come_at_once(
    workbench: Workbench, what: str, module: str, is_forked: bool
) -> None:
    work = workbench.folder / "work"
    work.mkdir()
    (work / f"{what}.py").write_text(module)
    name = start(workbench, what, what, workdir=str(work))
    for _ in range(2):
        standby = standby_of(workbench, name, 1)
        assert (b"--serve" in Path(f"/proc/{standby}/cmdline").read_bytes()) == is_forked
        spawned = kill_and_see_it_back(workbench, name, 1)
        # One that cannot have all that it is to import is not called warm; it is there at once all the same.
        assert (spawned["warm"], spawned["pid"]) == (what != "leaves", standby)
    assert standby_of(workbench, name, 1)
    notices = [event["message"] for event in seen(workbench, name, "notice")]
    assert not [text for text in notices if "the next one in" in text], notices
    assert is_forked or [text for text in notices if "none is forked" in text], notices


def test_a_fork_server_that_hangs_in_a_request_holds_up_no_end(workbench: Workbench) -> None:
    name = start(workbench, "slow-end")
    standby_of(workbench, name, 1)
    server = fork_server(workbench, name)
    os.kill(server, signal.SIGSTOP)
    kill_and_see_it_back(workbench, name, 1)  # now a standby is asked for, and nobody answers
    started_s = time.monotonic()
    workbench.down(name)
    assert time.monotonic() - started_s < FORK_LIMIT_S - 2, "less than what a standby is waited for"
    assert not workbench.processes(name)


def test_who_is_half_born_when_its_agent_dies_does_not_wait_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as agent:
        pass
    code = f"from sky_monarch import _core; _core.settle_forked({agent.pid}, 'mark', 0, 60.0)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False
    )
    assert "did not become its parent" in done.stderr, done.stderr
