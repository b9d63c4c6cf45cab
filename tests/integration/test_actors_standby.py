"""Several ranks replaced at once, and processes that stand by to take their places."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from sky_monarch.actor import Actor, RestartPolicy, SupervisionError, endpoint, this_host
from sky_monarch.actors.proc_mesh import owner_of
from sky_monarch.errors import ConfigError
from tests.support.actors import spawn
from tests.support.processes import is_alive
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("actors_end")

LIMIT_S = 20
LONG_S = 0.5


class Slow(Actor):
    """Takes long to be made."""

    def __init__(self) -> None:
        begun = time.monotonic()
        time.sleep(LONG_S)
        self.made = begun, time.monotonic()

    @endpoint
    def made_between(self) -> tuple[float, float]:
        return self.made

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def knows(self, module: str) -> bool:
        return module in sys.modules


def standing_by(procs, count=1):
    """Pids of those that stand by, once there are so many."""
    spares = owner_of(procs._addresses, procs.name).spares
    found = lambda: [proc.pid for proc in spares.ready if proc.pid and is_alive(proc.pid)]  # noqa: E731
    return eventually(lambda: len(found()) == count and found(), what=f"{count} stand by")


def test_several_ranks_are_replaced_at_once_and_their_actors_made_side_by_side(failures):
    procs, mesh, pids = spawn(4, Slow)
    second = procs.spawn("second", Slow)
    second.pid.call().get(LIMIT_S)
    os.kill(pids[1], signal.SIGKILL)

    procs.respawn([1, 2, 3])

    again = list(mesh.pid.call().get(LIMIT_S).values())
    assert again[0] == pids[0]
    assert not set(again[1:]) & set(pids)
    assert list(second.pid.call().get(LIMIT_S).values()) == again
    made = [
        made
        for actors in (mesh, second)
        for made in list(actors.made_between.call().get(LIMIT_S).values())[1:]
    ]
    most = max(sum(begun <= at < ended for begun, ended in made) for at, _ in made)
    assert most > 3, f"more than the ranks of one mesh, and than the meshes of one rank, at a time: {made}"


def test_one_that_stands_by_takes_the_place_and_another_one_comes_after_it(failures):
    procs, mesh, pids = spawn(2, Slow, standby=1)
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
    threading.Timer(0.3, os.kill, (spare, signal.SIGKILL)).start()

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
