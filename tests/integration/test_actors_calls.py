"""Calls between real processes: what comes back, in which order, and what goes wrong how."""

from __future__ import annotations

import asyncio
import threading
import traceback

import pytest

from sky_monarch.actor import (
    Actor,
    ActorError,
    DeadlockError,
    ProcMesh,
    SupervisionError,
    endpoint,
    shutdown,
    this_host,
    this_proc,
)
from tests.support.actors import Busy, Caller, Careful, Echo, Maker, Narcissus, Plain, Unmakeable
from tests.support.waiting import eventually

LIMIT_S = 20


@pytest.fixture(scope="module")
def procs():
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    shutdown()


@pytest.fixture(scope="module")
def echo(procs: ProcMesh):
    return procs.spawn("echo", Echo, greeting="hi")


@pytest.fixture(scope="module")
def plain(procs: ProcMesh):
    return procs.spawn("plain", Plain)


def test_a_call_reaches_every_process_and_brings_back_a_mesh_of_values(echo):
    values = echo.echo.call({"a": [1, 2]}).get(LIMIT_S)

    assert list(values.values()) == [{"a": [1, 2]}] * 2
    pids = list(echo.pid.call().get(LIMIT_S).values())
    assert len(set(pids)) == 2
    assert values.item(gpus=1) == {"a": [1, 2]}


def test_functions_and_coroutines_are_mixed_in_one_actor(echo):
    one = echo.slice(gpus=0)

    assert one.echo.call_one("f").get(LIMIT_S) == "f"
    assert one.echo_later.call_one("c", after_s=0.01).get(LIMIT_S) == "c"


def test_an_actor_knows_its_rank_in_the_mesh_that_was_called(echo):
    whole = list(echo.where.call().get(LIMIT_S).values())
    part = echo.slice(gpus=slice(1, 2)).where.call().get(LIMIT_S).get(0)
    flat = list(echo.flatten("ranks").where.call().get(LIMIT_S).values())

    assert [rank for rank, _, _ in whole] == [0, 1]
    assert whole[1] == (1, {"gpus": 1}, {"gpus": 2})
    assert part == (0, {"gpus": 0}, {"gpus": 1})
    assert flat[1] == (1, {"ranks": 1}, {"ranks": 2})


def test_messages_of_one_sender_arrive_in_order_whatever_their_kind(plain, echo):
    for mesh in (plain, echo):
        one = mesh.slice(gpus=1)
        for number in range(300):
            if number % 3:
                one.hear.broadcast(number)
            else:
                one.hear.call_one(number)
        assert one.all_heard.call_one().get(LIMIT_S)[-300:] == list(range(300))


def test_one_message_at_a_time_unless_the_endpoint_is_concurrent(procs, plain):
    busy = procs.slice(gpus=0).spawn("busy", Busy)

    alone = [busy.alone.call_one(0.01) for _ in range(4)]
    assert {future.get(LIMIT_S) for future in alone} == {1}
    together = [busy.together.call_one(4) for _ in range(4)]
    assert {future.get(2 * LIMIT_S) for future in together} == {4}
    assert [
        future.get(LIMIT_S) for future in [plain.slice(gpus=0).alone.call_one(0.01) for _ in range(3)]
    ] == [1] * 3


def test_a_concurrent_endpoint_answers_while_a_serial_one_works(procs):
    busy = procs.slice(gpus=0).spawn("busier", Busy)
    long = busy.hold.call_one()

    assert busy.status.call_one().get(LIMIT_S) == "here"
    assert not long.done()
    busy.let_go.call_one().get(LIMIT_S)
    assert long.get(LIMIT_S) == "let go"


def test_choose_asks_one_of_them_and_stream_all_as_they_answer(echo):
    pids = set(echo.pid.call().get(LIMIT_S).values())

    assert echo.pid.choose().get(LIMIT_S) in pids
    assert {future.get(LIMIT_S) for future in echo.pid.stream()} == pids


def test_an_exception_reads_as_if_it_had_been_raised_here(echo):
    with pytest.raises(
        ActorError, match=r"echo\[1\]\.boom raised ValueError: bad batch .*actors\.py:\d+"
    ) as raised:
        echo.slice(gpus=1).boom.call_one("bad batch").get(LIMIT_S)

    assert isinstance(raised.value.__cause__, ValueError)
    shown = "".join(traceback.format_exception(raised.value))
    assert "raise ValueError(words)" in shown
    assert "in boom" in shown
    assert "hosting.py" not in shown, "nothing of ours stands between"


def test_a_call_of_many_fails_with_the_first_rank_that_has_failed(procs, echo):
    one_fails = procs.spawn("one_fails", Caller)
    with pytest.raises(ActorError, match=r"echo\[[01]\]\.boom"):
        echo.boom.call().get(LIMIT_S)
    with pytest.raises(ActorError, match=r"one_fails\[1\]\.stay"):
        one_fails.stay.call(10 * LIMIT_S, fails=1).get(LIMIT_S)  # the others are not waited for


def test_an_actor_that_cannot_be_made_says_so_to_each_caller(procs, shown):
    mesh = procs.slice(gpus=0).spawn("unmakeable", Unmakeable)

    with pytest.raises(SupervisionError, match="RuntimeError: no such device"):
        mesh.initialized.get(LIMIT_S)
    with pytest.raises(SupervisionError, match="RuntimeError: no such device"):
        mesh.work.call_one().get(LIMIT_S)
    eventually(lambda: "failure of unmakeable[0]" in shown.text, what="the program was told")


def test_a_future_times_out_and_can_be_waited_for_again(procs):
    late = procs.slice(gpus=0).spawn("late", Busy)
    future = late.hold.call_one()

    with pytest.raises(TimeoutError, match=r"late\.hold gave no answer within 0\.01 s"):
        future.get(0.01)
    late.let_go.call_one().get(LIMIT_S)
    assert future.get(LIMIT_S) == "let go"
    assert future.get() == "let go"


def test_futures_are_awaited_side_by_side_and_cancelled_with_their_task(procs, echo):
    busy = procs.slice(gpus=1).spawn("cancelled", Busy)

    async def program():
        values = await asyncio.gather(*(echo.slice(gpus=0).echo.call_one(n) for n in range(20)))
        streamed = sorted(await asyncio.gather(*echo.pid.stream()))
        hanging = asyncio.ensure_future(busy.hang.call_one())
        async with asyncio.timeout(LIMIT_S):
            while not await busy.hangs.call_one():
                await asyncio.sleep(0.01)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(hanging, 0.05)
        return values, streamed, await asyncio.wait_for(busy.cancellations.call_one(), LIMIT_S)

    values, streamed, cancelled = asyncio.run(program())
    assert values == list(range(20))
    assert streamed == sorted(echo.pid.call().get(LIMIT_S).values())
    assert cancelled == 1


def test_a_cancelled_message_that_waits_is_taken_back(plain, echo, tmp_path):
    one = plain.slice(gpus=0)
    before = one.all_heard.call_one().get(LIMIT_S)
    first = one.stay_until.call_one(str(tmp_path / "go"))
    second = one.hear.call_one("cancelled")

    assert second.cancel()
    assert second.cancelled()
    with pytest.raises(Exception, match="was cancelled"):
        second.get(LIMIT_S)
    # What comes after it on the same way has been answered: it has arrived.
    echo.slice(gpus=0).pid.call_one().get(LIMIT_S)
    (tmp_path / "go").touch()
    first.get(LIMIT_S)
    assert one.all_heard.call_one().get(LIMIT_S) == before


def test_actors_call_actors(procs, echo):
    caller = procs.slice(gpus=0).spawn("caller", Caller)
    peer = echo.slice(gpus=1)

    assert caller.ask.call_one(peer, "x").get(LIMIT_S) == "x"
    assert caller.ask_awaiting.call_one(peer, "y").get(LIMIT_S) == "y"
    here = this_proc().spawn("here", Plain)
    assert caller.ask.call_one(here, "z").get(LIMIT_S) == "z", "the client's process has actors, too"


def test_an_actor_that_would_wait_for_itself_is_told(procs):
    for cls in (Narcissus, Caller):
        mesh = procs.slice(gpus=0).spawn("mirror", cls)
        method = mesh.look if cls is Narcissus else mesh.ask
        args = (mesh,) if cls is Narcissus else (mesh, 1)
        with pytest.raises(ActorError, match="would wait for itself") as raised:
            method.call_one(*args).get(LIMIT_S)
        assert isinstance(raised.value.__cause__, DeadlockError)


def test_call_one_is_for_one(echo):
    with pytest.raises(ValueError, match=r"call_one is for a mesh of one actor; echo has 2, in \{gpus: 2\}"):
        echo.echo.call_one(1)
    with pytest.raises(AttributeError, match="no endpoint 'ecko'; its endpoints: all_heard, boom, echo"):
        echo.ecko  # noqa: B018


def test_what_only_this_program_knows_goes_by_value(procs):
    factor = 3

    class Local(Actor):
        @endpoint
        def apply(self, function, value):
            return function(value)

    local = procs.slice(gpus=0).spawn("local", Local)
    assert local.apply.call_one(lambda value: value * factor, 14).get(LIMIT_S) == 42


def test_an_actor_is_made_once_and_cleans_up_after_what_waits(procs, tmp_path):
    path = tmp_path / "marks"
    mesh = procs.slice(gpus=0).spawn("careful", Careful, str(path))
    answers = [mesh.work.call_one() for _ in range(5)]

    mesh.stop().get(LIMIT_S)
    assert [future.get(LIMIT_S) for future in answers] == ["done"] * 5
    assert path.read_text().splitlines() == ["made", "cleaned up None"]
    with pytest.raises(SupervisionError, match="was stopped before it came to work"):
        mesh.work.call_one().get(LIMIT_S)


def test_many_threads_call_at_once(plain):
    one = plain.slice(gpus=1)
    wrong: list[object] = []

    def work(base: int) -> None:
        wrong.extend(n for n in range(base, base + 200) if one.echo.call_one(n).get(LIMIT_S) != n)

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert not wrong


def test_results_that_stay_with_their_actors_are_passed_on_by_reference():
    procs = this_host().spawn_procs({"gpus": 2})
    makers, users = procs.spawn("makers", Maker), procs.spawn("users", Maker)
    elsewhere = this_host().spawn_procs().spawn("elsewhere", Maker)

    made = makers.make.rref(3)
    later = makers.make_later.rref(4)

    # In the processes that have made it, it is the value itself, that of another actor too.
    assert list(users.describe.call(made).get(LIMIT_S).values()) == [("list", 0), ("list", 1)]
    assert [where for _, where in users.describe.call(later).get(LIMIT_S).values()] == [0, 1]
    assert elsewhere.describe.call_one(made).get(LIMIT_S) == ("Ref", None)
    assert elsewhere.fetch.call_one(made.slice(gpus=1)).get(LIMIT_S) == [1, 1, 1]
    assert [len(value) for value in made.get(LIMIT_S).values()] == [3, 3]

    failed = makers.make.rref(-1)
    with pytest.raises(ActorError, match="nothing can be made"):
        failed.get(LIMIT_S)
    with pytest.raises(ActorError, match="nothing can be made"):
        users.describe.call(failed).get(LIMIT_S)
    made.drop()
    with pytest.raises(ActorError, match="was dropped"):
        made.get(LIMIT_S)
