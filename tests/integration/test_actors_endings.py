"""Nothing outlives the program, however that ends, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sky_monarch.actor import shutdown, this_host
from sky_monarch.actors import proc_mesh
from sky_monarch.actors.runtime import runtime
from tests.support.actors import Plain, spawn
from tests.support.processes import is_alive, with_variable
from tests.support.waiting import eventually

LIMIT_S = 20
ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, time
from sky_monarch.actor import this_host
from tests.support.actors import Owner
owner = this_host().spawn_procs({"gpus": 2}).slice(gpus=0).spawn("owner", Owner)
print(*owner.start.call_one(2).get(60), flush=True)
owner.told.call_one().get()
how = sys.argv[1]
if how == "busy":
    from tests.support.actors import Plain
    plain = this_host().spawn_procs().spawn("plain", Plain)
    plain.pid.call_one().get(60)
    print("busy", flush=True)
    plain.alone.call_one(600).get()
sys.stdin.readline()
if how == "raise":
    raise RuntimeError("a defect of the program")
"""


def start(how: str, mark: str, folder: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ACTORS_TEST_MARK": mark, "TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        env=env,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def folder():
    """Where the program puts its sockets. Short: a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="smt-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    "how", ["kill", "interrupt", *(pytest.param(how, marks=pytest.mark.slow) for how in ("raise", "end"))]
)
def test_nothing_outlives_the_program(how, folder):
    mark = f"{os.getpid()}-{how}"
    program = start("busy" if how in ("kill", "interrupt") else how, mark, folder)
    try:
        assert program.stdout is not None
        kids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(kids) == 2, program.stderr.read() if program.stderr else ""
        assert list(folder.glob("sky-monarch-*/client")), "its sockets are there"
        if how in ("kill", "interrupt"):
            assert program.stdout.readline() == "busy\n"
        if how == "kill":
            program.kill()
        elif how == "interrupt":
            time.sleep(0.3)  # into the wait: nothing outside shows that
            os.kill(program.pid, signal.SIGINT)
        # The actor that it waits for works for ten minutes.
        _, stderr = program.communicate("\n", timeout=LIMIT_S)
        eventually(lambda: not with_variable("ACTORS_TEST_MARK", mark), what="all are gone")
        eventually(lambda: not list(folder.iterdir()), what="the folder of sockets is gone")
        assert not any(map(is_alive, kids))
        wanted = {"kill": -signal.SIGKILL, "interrupt": -signal.SIGINT, "raise": 1, "end": 0}
        assert program.returncode == wanted[how], stderr
    finally:
        if program.poll() is None:
            program.kill()
            program.wait()


@pytest.mark.slow
def test_respawns_and_large_messages_leave_no_file_and_no_thread_behind():
    import numpy as np

    def here() -> tuple[int, ...]:
        return tuple(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))

    procs = this_host().spawn_procs({"gpus": 2})
    mesh = procs.spawn("plain", Plain)
    array = np.ones(1 << 17, dtype=np.float32)
    try:
        mesh.total.call(array).get(LIMIT_S)
        mesh.respawn(1)
        there = mesh.resources.call().get(LIMIT_S).get(0)
        before = here()
        for _ in range(3):
            for _ in range(30):
                assert set(mesh.total.call(array).get(LIMIT_S).values()) == {float(1 << 17)}
            mesh.respawn(1)
            mesh.pid.call().get(LIMIT_S)

        def as_before(found, known):
            assert all(one <= other for one, other in zip(found, known, strict=True)), (found, known)
            return True

        # One that has just ended, or a connection of it, may still be there for a moment.
        eventually(lambda: as_before(mesh.resources.call().get(LIMIT_S).get(0), there))
        eventually(lambda: as_before(here(), before))
    finally:
        shutdown()


def test_a_process_that_does_not_answer_is_killed_when_it_is_stopped():
    procs = this_host().spawn_procs({"gpus": 2})
    pids = procs.spawn("plain", Plain).pid.call().get(LIMIT_S).values()
    stuck = list(pids)[1]
    os.kill(stuck, signal.SIGSTOP)
    procs.stop(timeout=0.5).get(LIMIT_S)
    assert not is_alive(stuck)

    procs = this_host().spawn_procs()
    (stuck,) = procs.spawn("plain", Plain).pid.call().get(LIMIT_S).values()
    os.kill(stuck, signal.SIGSTOP)
    procs.stop(timeout=0.5)  # and nobody waits for it
    eventually(lambda: not is_alive(stuck))


def test_meshes_that_were_stopped_leave_nothing_in_the_program():
    def files() -> int:
        return len(list(Path(runtime().folder).iterdir()))

    try:
        spawn(1)
        before = files()
        for _ in range(5):
            procs, _, _ = spawn(2)
            procs.stop().get(LIMIT_S)
        assert files() == before
        assert not proc_mesh.find_owner(procs._addresses).records
    finally:
        shutdown()
