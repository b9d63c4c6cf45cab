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


def test_a_closed_channel_says_so():
    port, receiver = Channel[int].open()
    port.send(1)
    receiver.close()
    with pytest.raises(SupervisionError, match="the channel is closed"):
        receiver.recv().get(LIMIT_S)


def test_an_accumulator_combines_answers_as_they_come(counters):
    assert Accumulator(counters.rank, 10, lambda total, rank: total + rank).accumulate() == 13
