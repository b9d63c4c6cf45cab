"""Several ranks replaced at once, and processes that stand by to take their places."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from sky_monarch.actor import Actor, RestartPolicy, SupervisionError, endpoint, this_host
from sky_monarch.actors.proc_mesh import owner_of
from sky_monarch.errors import ConfigError
from tests.support.actors import spawn
from tests.support.processes import is_alive, send
from tests.support.threaded_actor import Threaded
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("actors_end")

LIMIT_S = 20


class Known(Actor):
    """Of a module that is not imported otherwise."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def knows(self, module: str) -> bool:
        return module in sys.modules


class Gathers(Known):
    """Is not made before a number of others are being made, too, where a file says how many."""

    def __init__(self, folder: str) -> None:
        wanted, self.met = Path(folder) / "wanted", 0
        if not wanted.exists():
            return
        number, end = int(wanted.read_text()), time.monotonic() + LIMIT_S / 2
        (Path(folder) / uuid.uuid4().hex).touch()  # nobody leaves before so many have come
        while self.met < number and time.monotonic() < end:
            self.met = len(list(Path(folder).iterdir())) - 1
            time.sleep(0.005)

    @endpoint
    def most_met(self) -> int:
        return self.met


def standing_by(procs, count=1):
    """Pids of those that stand by, once there are so many."""
    spares = owner_of(procs._addresses, procs.name).spares
    found = lambda: [proc.pid for proc in spares.ready if proc.pid and is_alive(proc.pid)]  # noqa: E731
    return eventually(lambda: len(found()) == count and found(), what=f"{count} stand by")


def test_several_ranks_are_replaced_at_once_and_their_actors_made_side_by_side(failures, tmp_path):
    procs = this_host().spawn_procs({"gpus": 4}, name="trainers")
    mesh, second = (procs.spawn(name, Gathers, str(tmp_path)) for name in ("trainer", "second"))
    pids = list(mesh.pid.call().get(LIMIT_S).values())
    second.pid.call().get(LIMIT_S)
    # More than the ranks of one mesh, and than the meshes of one rank.
    wanted = 4
    (tmp_path / "wanted").write_text(str(wanted))
    os.kill(pids[1], signal.SIGKILL)

    procs.respawn([1, 2, 3])

    again = list(mesh.pid.call().get(LIMIT_S).values())
    assert again[0] == pids[0]
    assert not set(again[1:]) & set(pids)
    assert list(second.pid.call().get(LIMIT_S).values()) == again
    met = [
        most for actors in (mesh, second) for most in list(actors.most_met.call().get(LIMIT_S).values())[1:]
    ]
    assert min(met) >= wanted, f"so many at a time: {met}"


def test_one_that_stands_by_takes_the_place_and_another_one_comes_after_it(failures):
    procs, mesh, pids = spawn(2, Known, standby=1)
    (spare,) = standing_by(procs)
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: failures)

    mesh.respawn(1)

    assert list(mesh.pid.call().get(LIMIT_S).values()) == [pids[0], spare], "it was there before"
    assert mesh.slice(gpus=1).knows.call_one(__name__).get(LIMIT_S)
    assert standing_by(procs) != [spare]
    assert len(failures) == 1, "a replacement is no failure"


def test_one_that_stood_by_and_is_dying_is_not_waited_for(failures):
    procs, mesh, pids = spawn(2, standby=1)
    (spare,) = standing_by(procs)
    # Stopped it takes what it is told, and will never hear it.
    os.kill(spare, signal.SIGSTOP)
    threading.Timer(0.3, send, ((spare,), signal.SIGKILL)).start()

    mesh.respawn(0)

    again = mesh.pid.call().get(LIMIT_S).get(0)
    assert again not in (pids[0], spare)
    (next_spare,) = standing_by(procs)
    assert next_spare not in (spare, again)
    assert not failures, "its death cost nothing but time"


def test_one_that_stood_by_and_died_is_replaced(failures):
    procs, _, _ = spawn(1, standby=1)
    (spare,) = standing_by(procs)

    os.kill(spare, signal.SIGKILL)

    eventually(lambda: not is_alive(spare))
    assert standing_by(procs) != [spare]
    assert not failures


def test_a_policy_takes_those_that_stand_by(failures):
    procs, mesh, pids = spawn(2, restart=RestartPolicy("one_for_one"), standby=1)
    (spare,) = standing_by(procs)

    os.kill(pids[1], signal.SIGKILL)

    def answers():
        try:
            return mesh.slice(gpus=1).pid.call_one().get(LIMIT_S) == spare
        except SupervisionError:  # it comes between the death and the replacement
            return False

    eventually(answers)
    assert not failures


def test_nothing_stands_by_for_a_mesh_that_was_stopped(failures):
    procs, _, _ = spawn(1, standby=2)
    spares = standing_by(procs, 2)

    procs.stop().get(LIMIT_S)

    eventually(lambda: not any(map(is_alive, spares)))
    assert not failures


@pytest.mark.parametrize("standby", [-1, 65, "1"])
def test_a_number_that_cannot_stand_by_is_refused(standby):
    with pytest.raises(ConfigError, match="standby is"):
        this_host().spawn_procs(standby=standby)


def test_those_that_stand_by_come_one_after_the_other_and_none_that_comes_too_late_is_left_over(failures):
    procs, mesh, pids = spawn(4, standby=4)

    # At once: most of them are not there yet, and others are forked for the places.
    procs.respawn(range(4))

    assert not set(mesh.pid.call().get(LIMIT_S).values()) & set(pids)
    standing_by(procs, 4)
    zygote = procs_of_zygote(procs)
    eventually(lambda: len(zygote()) == 8, what="four in their places, four that stand by")
    assert not failures


def procs_of_zygote(procs):
    """What finds the children of the process that all are forked from."""
    zygote = owner_of(procs._addresses, procs.name).spares.spawner.zygote.pid
    return lambda: Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()


def policies(pid):
    """How each thread of a process takes its turns: policy of the scheduler, and niceness."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that has ended since
            thread = int(task.name)
            found.add((os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)))
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to raise priorities")
def test_one_that_stands_by_computes_while_nobody_else_does_and_as_the_others_in_its_place(failures):
    procs, mesh, _ = spawn(1, Threaded, standby=1)
    usual = (os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))
    (spare,) = standing_by(procs)
    waits = {(os.SCHED_IDLE, usual[1]), (os.SCHED_OTHER, usual[1] + 5)}
    eventually(lambda: policies(spare) <= waits, what="it is not in anybody's way")
    eventually(
        lambda: len(list(Path(f"/proc/{spare}/task").iterdir())) > 1, what="its import has started a thread"
    )
    # On a machine that is never idle it would never be ready.
    eventually(lambda: policies(spare) == {(os.SCHED_OTHER, usual[1] + 5)}, what="it takes turns in time")

    procs.respawn(0)

    assert mesh.pid.call_one().get(LIMIT_S) == spare
    eventually(lambda: policies(spare) == {usual}, what="it takes turns as the others do")
