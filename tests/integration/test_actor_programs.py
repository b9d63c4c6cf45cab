"""Whole programs: what their user sees of a failure, what a stopped process does to others, and what is left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from sky_monarch.actor import Actor, SupervisionError, endpoint, this_host
from tests.support.actors import Plain
from tests.support.processes import with_variable
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("actors_end")

LIMIT_S = 20
ROOT = Path(__file__).parents[2]
RUNS = 30

FAILING = """
from sky_monarch.actor import Actor, current_rank, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self, batch):
        return self.loss(batch)

    def loss(self, batch):
        if current_rank().rank == 2:
            raise ValueError(f"batch {batch} has no labels")
        return 0.5

trainers = this_host().spawn_procs({"gpus": 4}).spawn("trainer", Trainer)
trainers.step.call(7).get(60)
"""

#: Large arrays on their way in both directions, one process that stands by, and a semaphore of its own in each.
BUSY = """
import numpy as np
from multiprocessing import Semaphore
from sky_monarch.actor import Actor, endpoint, this_host

class Holder(Actor):
    def __init__(self):
        self.held = Semaphore(1)
        self.last = None

    @endpoint
    def echo(self, array):
        self.last = array
        return array

holders = this_host().spawn_procs({"gpus": 2}, standby=1).spawn("holder", Holder)
array = np.ones(1 << 21)
holders.echo.call(array).get(60)
print("busy", flush=True)
while True:
    holders.echo.call(array).get(60)
"""


def start(program: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_first_screen_of_a_failed_program_names_rank_exception_and_the_users_line(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(FAILING)
    line = FAILING[: FAILING.index("raise ValueError")].count("\n") + 1

    running = start(program)
    _, stderr = running.communicate(timeout=60)

    assert running.returncode == 1
    screen = stderr.splitlines()
    where = rf"\({re.escape(str(program))}:{line}, pid \d+ on \S+\)"
    assert re.fullmatch(
        rf"sky_monarch\.errors\.ActorError: trainer\[2\]\.step raised ValueError: batch 7 has no labels {where}",
        screen[-1],
    ), f"the last line says it all:\n{stderr}"
    assert len(screen) <= 30, f"one screen:\n{stderr}"
    assert 'raise ValueError(f"batch {batch} has no labels")' in stderr, "the line itself"
    ours = [shown for shown in screen if "sky_monarch/actors/" in shown]
    assert len(ours) <= 2, f"our own frames do not hide it: {ours}"


def test_a_stopped_process_slows_who_writes_to_it_and_nobody_else_and_loses_nothing():
    mesh = this_host().spawn_procs({"gpus": 2}).spawn("plain", Plain)
    pids = list(mesh.pid.call().get(LIMIT_S).values())
    stopped, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
    many, sent = 6000, [0]
    os.kill(pids[0], signal.SIGSTOP)

    def flood() -> None:
        for number in range(many):
            stopped.hear.broadcast((number, b"x" * 2000))
            sent[0] += 1

    sender = threading.Thread(target=flood)
    try:
        sender.start()
        eventually(lambda: sent[0], what="it has begun")
        last = -1
        while sent[0] != last:  # until it is held up
            last = sent[0]
            time.sleep(0.3)
        assert 0 < last < many, "what waits for it is bounded"
        for number in range(30):
            assert other.echo.call_one(number).get(LIMIT_S) == number
    finally:
        os.kill(pids[0], signal.SIGCONT)
    sender.join(LIMIT_S)
    assert not sender.is_alive()
    heard = stopped.all_heard.call_one().get(LIMIT_S)
    assert [number for number, _ in heard] == list(range(many))


class Parent(Actor):
    """Has a child, which has all that it has."""

    @endpoint
    def fork(self) -> int:
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        return child

    @endpoint
    def hang(self) -> None:
        time.sleep(600)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_a_death_is_told_though_a_child_of_the_dead_holds_its_sockets_open(monkeypatch):
    told = []
    monkeypatch.setattr("sky_monarch.actor.unhandled_fault_hook", told.append)
    mesh = this_host().spawn_procs().spawn("parent", Parent)
    pid = mesh.pid.call_one().get(LIMIT_S)
    child = mesh.fork.call_one().get(LIMIT_S)
    pending = mesh.hang.call_one()

    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        pending.get(LIMIT_S)

    os.kill(child, 0)  # it is there, and no end of file comes of its parent's connections
    mesh.respawn(0)
    assert mesh.pid.call_one().get(LIMIT_S) != pid
    assert len(told) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_programs_that_are_killed_leave_nothing(tmp_path):
    program = tmp_path / "busy.py"
    program.write_text(BUSY)
    chance = random.Random(58)

    def left() -> dict[str, set[str]]:
        return {
            "shared memory": {entry.name for entry in Path("/dev/shm").iterdir()},
            "System V": {
                f"{kind} {line.split()[1]}"
                for kind in ("shm", "sem", "msg")
                for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
            },
            "descriptors": {str(number) for number in range(len(list(Path("/proc/self/fd").iterdir())))},
        }

    def nothing_has_come(since: dict[str, set[str]], number: int) -> bool:
        now = left()
        grown = {kind: now[kind] - since[kind] for kind in now if now[kind] - since[kind]}
        assert not grown, f"after program {number}"
        return True

    before: dict[str, set[str]] = {}
    for number in range(RUNS):
        mark = f"{os.getpid()}-{number}"
        with tempfile.TemporaryDirectory(prefix="smt-") as folder:
            running = start(program, ACTORS_TEST_MARK=mark, TMPDIR=folder)
            try:
                assert running.stdout is not None
                assert running.stdout.readline() == "busy\n", running.stderr and running.stderr.read()
                time.sleep(chance.random() / 5)
                running.kill()
                running.communicate(timeout=LIMIT_S)
                eventually(
                    lambda mark=mark: not with_variable("ACTORS_TEST_MARK", mark),
                    what="all are gone",
                )
                eventually(
                    lambda folder=folder: not list(Path(folder).iterdir()),
                    what="its folder is empty",
                )
            finally:
                if running.poll() is None:
                    running.kill()
                    running.wait()
        if number == 2:
            before = left()  # what the first ones have made for good is no leak
        elif number > 2:
            # Other tests, which run beside this one, come and go.
            eventually(partial(nothing_has_come, before, number), within_s=60)
