"""Bursts, kills at random and slow readers: nothing is lost, nothing overtakes, nothing is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from sky_monarch.actor import Actor, SupervisionError, endpoint, this_host
from tests.support.actors import Plain
from tests.support.processes import send
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("actors_end")]
LIMIT_S = 60
SENDERS, MESSAGES = 16, 10_000


class Sender(Actor):
    """Sends a burst to another actor."""

    @endpoint
    def burst(self, to, me: int, count: int) -> None:
        for number in range(count):
            to.hear.broadcast((me, number))


def test_ten_thousand_messages_from_each_of_sixteen_senders_all_arrive_in_order():
    receiver = this_host().spawn_procs(name="receiver").spawn("receiver", Plain)
    senders = this_host().spawn_procs({"gpus": SENDERS}, name="senders").spawn("sender", Sender)

    bursts = [senders.slice(gpus=rank).burst.call_one(receiver, rank, MESSAGES) for rank in range(SENDERS)]
    for burst in bursts:
        burst.get(LIMIT_S)

    def all_of_it():
        heard = receiver.all_heard.call_one().get(LIMIT_S)
        return heard if len(heard) >= SENDERS * MESSAGES else None

    heard = eventually(all_of_it, within_s=LIMIT_S, every_s=0.5)
    for rank in range(SENDERS):
        assert [number for sender, number in heard if sender == rank] == list(range(MESSAGES))


def held() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_ranks_killed_at_random_come_back_and_every_call_ends(monkeypatch):
    told = []
    monkeypatch.setattr("sky_monarch.actor.unhandled_fault_hook", told.append)
    chance = random.Random(6)
    mesh = this_host().spawn_procs({"gpus": 4}).spawn("plain", Plain)
    pids = list(mesh.pid.call().get(LIMIT_S).values())
    over = threading.Event()
    ended = [0, 0]

    def call() -> None:
        while not over.is_set():
            rank = chance.randrange(4)
            try:
                assert mesh.slice(gpus=rank).echo.call_one(rank).get(LIMIT_S) == rank
                ended[0] += 1
            except SupervisionError:
                ended[1] += 1
                time.sleep(0.005)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    before = None
    for kills in range(1, 26):
        rank = chance.randrange(4)
        os.kill(pids[rank], signal.SIGKILL)
        eventually(lambda kills=kills: len(told) == kills, what="one event a death")
        mesh.respawn(rank)
        pids = list(mesh.pid.call().get(LIMIT_S).values())
        before = before or held()
        eventually(lambda most=before + 4: held() <= most, what="descriptors do not pile up")
    eventually(lambda: ended[0] > 100, what="calls are answered")
    over.set()
    for caller in callers:
        caller.join(LIMIT_S)
        assert not caller.is_alive(), "every call ends"


def test_deaths_one_and_eight_at_once_are_told_within_milliseconds(monkeypatch):
    told: list[tuple[float, int]] = []
    monkeypatch.setattr(
        "sky_monarch.actor.unhandled_fault_hook",
        lambda failure: told.append((time.monotonic(), failure.rank)),
    )
    mesh = this_host().spawn_procs({"gpus": 8}).spawn("plain", Plain)
    delays, calls_s = [], []
    for many in (1, 8) * 6:
        asked = time.monotonic()
        pids = list(mesh.pid.call().get(LIMIT_S).values())
        calls_s.append(time.monotonic() - asked)
        told.clear()
        began = time.monotonic()
        send(pids[:many], signal.SIGKILL)
        eventually(lambda many=many: len(told) == many, every_s=0.002)
        assert sorted(rank for _, rank in told) == list(range(many))
        delays.extend(when - began for when, _ in told)
        mesh.respawn(range(many))
    delays.sort()
    # What a call of all of them takes says how busy this machine is with other tests.
    pace = max(1.0, sorted(calls_s)[len(calls_s) // 2] / 0.02)
    assert delays[len(delays) // 2] < 0.1 * pace, "pushed, not polled: half of them well below any poll"
    assert delays[-1] < 2.0 * pace, f"no tail: {delays[-5:]}"
