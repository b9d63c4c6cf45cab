"""Bursts, kills and resets over hosts: nothing is lost, nothing overtakes, nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.actor import Actor, SupervisionError, attach_to_hosts, endpoint, local_hosts, shutdown
from sky_monarch.actor_host import make_keys
from tests.support.actors import Plain
from tests.support.processes import is_alive, parent_of
from tests.support.proxy import Proxy
from tests.support.served import Served
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LIMIT_S = 120
SENDERS, MESSAGES = 16, 10_000


@pytest.fixture(autouse=True)
def _all_ends():
    yield
    shutdown()


class Sender(Actor):
    """Sends a burst to another actor."""

    @endpoint
    def burst(self, to: Any, me: int, count: int) -> None:
        for number in range(count):
            to.hear.broadcast((me, number))


class Slow(Plain):
    """Takes its time for each message."""

    @endpoint
    def hear(self, value: Any) -> None:
        time.sleep(0.002)
        self.heard.append(value)
        self.last_s = time.monotonic()

    @endpoint
    def last_heard_s(self) -> float:
        """When it heard the last one."""
        return self.last_s


@contextlib.contextmanager
def proxied(folder: Path, count: int) -> Iterator[tuple[Any, list[Proxy]]]:
    """So many hosts, each behind a network that can be reset."""
    make_keys(str(folder / "keys"), count)
    served = [Served(folder / f"keys/host-{number}.key", "--once") for number in range(count)]
    proxies = [Proxy(host.address) for host in served]
    try:
        yield attach_to_hosts([proxy.address for proxy in proxies], keys=folder / "keys/client.key"), proxies
    finally:
        shutdown()
        for proxy in proxies:
            proxy.close()
        for host in served:
            host.end()


def held() -> dict[str, int]:
    """What this process and the machine hold: files, threads, shared memory (that of other tests comes and goes)."""
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "kernel threads": len(list(Path("/proc/self/task").iterdir())),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
    }


def test_bursts_of_sixteen_senders_on_two_hosts_arrive_in_order_though_connections_are_reset(tmp_path):
    with proxied(tmp_path, 3) as (hosts, proxies):
        receiver = hosts.slice(hosts=0).spawn_procs(name="receiver").spawn("receiver", Plain)
        senders = hosts.slice(hosts=slice(1, 3)).spawn_procs({"gpus": SENDERS // 2}).spawn("sender", Sender)
        over = threading.Event()
        chance = random.Random(8)

        def cut() -> None:
            while not over.wait(0.2):
                chance.choice(proxies).reset_after(100_000)

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            bursts = [
                senders.slice(hosts=rank % 2, gpus=rank // 2).burst.call_one(receiver, rank, MESSAGES)
                for rank in range(SENDERS)
            ]
            for burst in bursts:
                burst.get(LIMIT_S)

            def all_of_it():
                heard = receiver.all_heard.call_one().get(LIMIT_S)
                return heard if len(heard) >= SENDERS * MESSAGES else None

            heard = eventually(all_of_it, within_s=LIMIT_S, every_s=0.5)
        finally:
            over.set()
            cutter.join()
        assert sum(proxy.made for proxy in proxies) > 10, "they were reset"
        assert len(heard) == SENDERS * MESSAGES
        for rank in range(SENDERS):
            assert [number for sender, number in heard if sender == rank] == list(range(MESSAGES))


def test_a_slow_reader_on_another_host_stops_its_sender_alone_and_loses_nothing():
    hosts = local_hosts(2)
    slow = hosts.slice(hosts=0).spawn_procs(name="slow").spawn("slow", Slow)
    quick = hosts.slice(hosts=0).spawn_procs(name="quick").spawn("quick", Plain)
    flood, other = (hosts.slice(hosts=1).spawn_procs(name=n).spawn(n, Sender) for n in ("flood", "other"))
    flooding = flood.burst.call_one(slow, 0, 5000)
    time.sleep(0.5)
    other.burst.call_one(quick, 1, 2000).get(LIMIT_S)
    eventually(lambda: len(quick.all_heard.call_one().get(LIMIT_S)) == 2000)
    quick_s = time.monotonic()
    flooding.get(LIMIT_S)
    heard = eventually(
        lambda: (found := slow.all_heard.call_one().get(LIMIT_S)) and len(found) == 5000 and found,
        within_s=60,
    )
    assert heard == [(0, number) for number in range(5000)]
    assert quick_s < slow.last_heard_s.call_one().get(LIMIT_S), "nobody waited for the slow one"


def test_ranks_and_hosts_killed_at_random_come_back_every_call_ends_and_nothing_is_held(monkeypatch):
    told = []
    monkeypatch.setattr("sky_monarch.actor.unhandled_fault_hook", told.append)
    chance = random.Random(6)
    hosts = local_hosts(5)
    procs = hosts.slice(hosts=slice(0, 2)).spawn_procs({"gpus": 2}, standby=1)
    mesh = procs.spawn("plain", Plain)
    mesh.pid.call().get(LIMIT_S)
    over = threading.Event()
    ended = [0, 0]

    def call() -> None:
        while not over.is_set():
            try:
                assert list(mesh.echo.call("x").get(LIMIT_S).values()) == ["x"] * 4
                ended[0] += 1
            except SupervisionError:
                ended[1] += 1
                time.sleep(0.01)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    before: dict[str, int] = {}
    seen: set[int] = set()
    try:
        for kill in range(1, 25):
            pids = procs.pids()
            rank = chance.randrange(4)
            seen.update(pids)
            if kill % 8 == 0:
                os.kill(parent_of(parent_of(pids[rank])), signal.SIGKILL)
                lost = [2 * (rank // 2), 2 * (rank // 2) + 1]
            else:
                os.kill(pids[rank], signal.SIGKILL)
                lost = [rank]
            eventually(lambda kill=kill: len(told) == kill, what="one event a failure")
            assert list(told[-1].crashed_ranks) == lost
            mesh.respawn(lost)
            assert mesh.pid.call().get(LIMIT_S)
            if kill == 9:
                before = held()  # after the first lost host
        eventually(lambda: ended[0] > 20, what="calls are answered")
    finally:
        over.set()
        for caller in callers:
            caller.join(LIMIT_S)
    assert not any(caller.is_alive() for caller in callers), "every call ends"
    # What stands by is forked a moment later.
    eventually(
        lambda: all(now <= before[what] + 6 for what, now in held().items()),
        within_s=60,
        what=f"no more is held than {before}",
    )
    live = set(procs.pids())
    eventually(lambda: not any(is_alive(pid) for pid in seen - live))
