"""Channels between real processes."""

from __future__ import annotations

import asyncio

import pytest

from sky_monarch.actor import Accumulator, ActorError, Channel, SupervisionError, shutdown, this_host
from tests.support.actors import Counter

LIMIT_S = 20


@pytest.fixture(scope="module")
def counters():
    yield this_host().spawn_procs({"gpus": 3}).spawn("counters", Counter)
    shutdown()


def test_a_port_sends_from_another_process_in_order(counters):
    port, receiver = Channel[int].open()
    counters.slice(gpus=0).count_to.broadcast(port, 200)

    assert [receiver.recv().get(LIMIT_S) for _ in range(200)] == list(range(200))
    with pytest.raises(ActorError, match="StopIteration: that is all"):
        receiver.recv().get(LIMIT_S)
    with pytest.raises(TimeoutError):
        receiver.recv().get(0.01)


def test_a_receiver_is_awaited_also_by_several_at_once(counters):
    port, receiver = Channel[int].open()

    async def program():
        waiting = asyncio.gather(*(receiver.recv() for _ in range(20)))
        await asyncio.sleep(0.01)
        counters.slice(gpus=1).count_to.broadcast(port, 20)
        return await asyncio.wait_for(waiting, LIMIT_S)

    assert sorted(asyncio.run(program())) == list(range(20))


def test_who_waits_longest_has_the_next_value():
    port, receiver = Channel[int].open()

    async def program():
        waiting = [asyncio.ensure_future(_next(receiver)) for _ in range(20)]
        await asyncio.sleep(0.01)
        for number in range(20):
            port.send(number)
        return await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)

    assert asyncio.run(program()) == list(range(20))


async def _next(receiver):
    return await receiver.recv()


def test_senders_to_a_receiver_that_was_dropped_or_closed_go_on(counters):
    one = counters.slice(gpus=0)
    for ending in (lambda receiver: None, lambda receiver: receiver.close()):
        port, receiver = Channel[int].open()
        ending(receiver)
        del receiver

        # More than a mailbox takes: they would wait for room.
        assert one.flood.call_one(port, 5000).get(LIMIT_S) == 5000


def test_a_program_may_open_any_number_of_channels_one_after_the_other():
    for _ in range(70_000):
        port, receiver = Channel[int].open()
        receiver.close()
    port, receiver = Channel[int].open()
    port.send(3)
    assert receiver.recv().get(LIMIT_S) == 3


def test_a_receiver_cannot_be_sent_and_says_what_can(counters):
    _, receiver = Channel[int].open()

    with pytest.raises(TypeError, match="send the Port"):
        counters.flood.call(receiver, 1)


def test_a_closed_channel_says_so():
    port, receiver = Channel[int].open()
    port.send(1)
    receiver.close()
    with pytest.raises(SupervisionError, match="the channel is closed"):
        receiver.recv().get(LIMIT_S)


def test_an_accumulator_combines_answers_as_they_come(counters):
    assert Accumulator(counters.rank, 10, lambda total, rank: total + rank).accumulate() == 13
