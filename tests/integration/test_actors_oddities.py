"""What programs do that nobody has planned for: each call ends all the same, and the actor goes on."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import traceback

import pytest

from sky_monarch.actor import (
    ActorError,
    DeadlockError,
    ProcMesh,
    RestartPolicy,
    SupervisionError,
    shutdown,
    this_host,
)
from tests.support.actors import Busy, Echo, Mixed, Owner, Plain, Troubled, TroubledLater, spawn
from tests.support.processes import is_alive
from tests.support.waiting import eventually

LIMIT_S = 20


@pytest.fixture(scope="module")
def procs():
    yield this_host().spawn_procs({"gpus": 1}).slice(gpus=0)
    shutdown()


@pytest.mark.parametrize("how", ["reduce", "str", "other", "args"])
def test_an_exception_whose_own_code_fails_reaches_its_caller_and_the_actor_goes_on(procs: ProcMesh, how):
    troubled = procs.spawn("troubled", Troubled)

    with pytest.raises(ActorError, match="raised PeculiarError"):
        troubled.fail.call_one(how).get(LIMIT_S)
    assert troubled.work.call_one().get(LIMIT_S) == "done"


@pytest.mark.parametrize("cls", [Troubled, TroubledLater])
def test_an_answer_that_cannot_be_sent_is_an_error_of_its_call_and_the_actor_goes_on(cls):
    troubled = this_host().spawn_procs().spawn("troubled", cls)

    for method in [
        name for name in ("answer_without_files", "answer_without_files_later") if hasattr(cls, name)
    ]:
        with pytest.raises(ActorError, match="Too many open files"):
            getattr(troubled, method).call_one().get(LIMIT_S)
        assert troubled.work.call_one().get(LIMIT_S) == "done"


def test_what_an_exception_was_raised_from_is_shown_as_it_is_of_local_ones(procs):
    troubled = procs.spawn("troubled", Troubled)

    for is_cause, words in (True, "direct cause"), (False, "During handling of the above exception"):
        with pytest.raises(ActorError) as raised:
            troubled.fail_from.call_one(is_cause).get(LIMIT_S)
        shown = "".join(traceback.format_exception(raised.value))
        assert 'raise KeyError("inner")' in shown
        assert shown.index("KeyError: 'inner'") < shown.index(words) < shown.index("ValueError: outer")


def test_a_function_of_an_actor_with_coroutines_may_run_a_loop_of_its_own(procs):
    mixed = procs.spawn("mixed", Mixed)

    assert mixed.run_loop.call_one().get(LIMIT_S) == 5
    mixed.nothing.call_one().get(LIMIT_S)
    assert mixed.run_loop.call_one().get(LIMIT_S) == 5


def test_an_actor_that_would_await_itself_is_told(procs):
    mixed = procs.spawn("mixed", Mixed)

    for would_hang in (mixed.await_itself, mixed.run_awaiting):
        with pytest.raises(ActorError, match="would wait for itself") as raised:
            would_hang.call_one(mixed).get(LIMIT_S)
        assert isinstance(raised.value.__cause__, DeadlockError)
    # What runs beside the coroutine that waits is awaited.
    assert mixed.await_aside.call_one(mixed).get(LIMIT_S) == "aside"
    mixed.await_other.call_one(mixed).get(LIMIT_S)


def test_a_concurrent_function_starts_however_many_others_wait_for_it(procs):
    mixed = procs.spawn("mixed", Mixed)
    waiting = [mixed.wait_for_release.call_one() for _ in range(40)]

    mixed.release.call_one().get(LIMIT_S / 2)

    assert all(one.get(LIMIT_S) for one in waiting)


def test_an_asynchronous_clean_up_of_a_failed_actor_runs_on_its_own_loop(procs, tmp_path):
    mixed = procs.spawn("mixed", Mixed, str(tmp_path / "mark"))
    mixed.nothing.call_one().get(LIMIT_S)

    mixed.boom.broadcast()

    assert eventually(lambda: (tmp_path / "mark").exists() and (tmp_path / "mark").read_text())
    assert (tmp_path / "mark").read_text() == "ValueError('no') True"


def test_an_owner_that_wants_to_exit_has_not_handled_a_failure_and_goes_on(failures):
    owner = this_host().spawn_procs(name="owner").spawn("owner", Owner, handles=None)
    pids = owner.start.call_one(1).get(LIMIT_S)

    os.kill(pids[0], signal.SIGKILL)

    eventually(lambda: len(failures) == 1, what="it climbs")
    assert failures[0].mesh_name == "kids"
    owner.bring_back.call_one(0).get(LIMIT_S)


def test_one_future_is_awaited_by_several(procs):
    busy, plain = procs.spawn("busy", Busy), procs.spawn("plain", Plain)

    async def program():
        future = busy.together.call_one(0.1)

        async def waiting():
            return await future

        return await asyncio.wait_for(asyncio.gather(waiting(), waiting()), LIMIT_S)

    assert asyncio.run(program()) == [1, 1]
    for _ in range(50):
        future, got = plain.echo.call_one(list(range(2000))), []
        threads = [
            threading.Thread(target=lambda f=future, g=got: g.append(f.get(LIMIT_S))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert got == [list(range(2000))] * 4


def test_a_deadline_that_has_passed_or_never_comes_is_no_mistake(procs):
    plain = procs.spawn("plain", Plain)

    assert plain.echo.call_one(1).get(math.inf) == 1
    with pytest.raises(TimeoutError):
        plain.alone.call_one(0.2).get(-1.0)


def test_a_future_cannot_be_sent_and_says_what_can(procs):
    plain = procs.spawn("plain", Plain)

    with pytest.raises(TypeError, match=r"a Future \(plain.echo\) is of the process that called"):
        plain.echo.call_one(plain.echo.call_one(1))


@pytest.mark.parametrize("name", ["a|b", "a,b", "%7C%", "☃ x"])
def test_a_dimension_may_have_any_name(name):
    mesh = this_host().spawn_procs({name: 2}).spawn("echo", Echo)

    rank, point, size = mesh.slice(**{name: slice(1, 2)}).where.call_one().get(LIMIT_S)
    assert (rank, point, size) == (0, {name: 0}, {name: 1})


def test_a_part_of_a_mesh_is_stopped_and_the_rest_is_watched_as_before(failures):
    procs, mesh, pids = spawn(3, Plain)

    procs.slice(gpus=0).stop().get(LIMIT_S)
    assert not is_alive(pids[0])
    os.kill(pids[2], signal.SIGKILL)

    eventually(lambda: len(failures) == 1, what="it is told")
    assert failures[0].rank == 2
    procs.respawn(2)
    assert mesh.slice(gpus=slice(1, 3)).echo.call(1).get(LIMIT_S).size() == 2
    procs.respawn(0)
    assert mesh.echo.call(1).get(LIMIT_S).size() == 3
    procs.stop().get(LIMIT_S)
    with pytest.raises(SupervisionError, match="was stopped"):
        procs.respawn(0)


def test_a_policy_leaves_out_what_was_stopped(failures):
    procs, mesh, pids = spawn(3, Plain, restart=RestartPolicy("one_for_all"))

    procs.slice(gpus=0).stop().get(LIMIT_S)
    os.kill(pids[2], signal.SIGKILL)

    rest = mesh.slice(gpus=slice(1, 3))
    eventually(lambda: not set(procs.pids()[1:]) & {*pids, None})
    assert rest.echo.call(1).get(LIMIT_S).size() == 2
    with pytest.raises(SupervisionError):
        mesh.slice(gpus=0).echo.call_one(1).get(LIMIT_S)
    assert not failures
