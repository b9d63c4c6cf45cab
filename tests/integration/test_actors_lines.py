"""Connections between hosts that break while both live: nothing is lost, twice there or out of order."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from sky_monarch.actor import SupervisionError, attach_to_hosts, shutdown
from sky_monarch.actor_host import make_keys
from tests.support.actors import Echo, Plain
from tests.support.processes import is_alive
from tests.support.proxy import Proxy
from tests.support.served import Served
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("actors_end")

LIMIT_S = 30
MESSAGES = 3000
RESET_BYTES = 300_000


@pytest.fixture
def line(tmp_path):
    """A host, what is between it and this program, and the mesh of that one host."""
    make_keys(str(tmp_path / "keys"), 1)
    served = Served(tmp_path / "keys/host-0.key", "--once")
    proxy = Proxy(served.address)
    try:
        yield (
            served,
            proxy,
            attach_to_hosts([proxy.address], keys=tmp_path / "keys/client.key", timeout=LIMIT_S),
        )
    finally:
        shutdown()
        proxy.close()
        if served.process.poll() is None:
            served.end()
        elif served.process.stderr is not None:
            served.process.stderr.close()


def test_a_connection_that_is_reset_again_and_again_loses_nothing_and_is_no_failure(line, failures):
    _, proxy, hosts = line
    mesh = hosts.spawn_procs().spawn("echo", Echo)
    pid = mesh.pid.call_one().get(LIMIT_S)
    pending = mesh.echo_later.call_one("in time", after_s=1.0)

    over, cuts = threading.Event(), 0

    def cut() -> None:
        while not over.wait(0.01):
            proxy.reset_after(RESET_BYTES)

    cutter = threading.Thread(target=cut)
    cutter.start()
    answers = []
    try:
        for number in range(MESSAGES):
            mesh.hear.broadcast((number, b"x" * (number % 5000)))
            if number % 100 == 0:
                answers.append(mesh.echo.call_one(number))
                time.sleep(0.01)
            if number % 750 == 700:  # so often for certain, however quickly all of it goes
                cuts += 1
                eventually(
                    lambda cuts=cuts: proxy.made >= cuts, what="it is dialled again", comes_always=True
                )
                proxy.reset()
    finally:
        over.set()
        cutter.join()
    try:
        told = [answer.get(LIMIT_S * PATIENCE) for answer in (*answers, mesh.all_heard.call_one(), pending)]
    except TimeoutError as error:
        raise AssertionError("a message or its answer is missing") from error
    *numbers, heard, late = told
    assert numbers == list(range(0, MESSAGES, 100))
    wanted = [(number, number % 5000) for number in range(MESSAGES)]
    assert [(number, len(data)) for number, data in heard] == wanted, "a message or its answer is missing"
    assert late == "in time"
    assert mesh.pid.call_one().get(LIMIT_S) == pid
    assert proxy.made > cuts > 3, "it was dialled again"
    assert not failures


@pytest.mark.slow
def test_a_half_open_connection_is_left_for_another_one_before_the_host_counts_as_lost(line, failures):
    _, proxy, hosts = line
    mesh = hosts.spawn_procs().spawn("plain", Plain)
    mesh.hear.call_one(-1).get(LIMIT_S)

    proxy.swallow()
    for number in range(50):
        mesh.hear.broadcast(number)
    heard = mesh.all_heard.call_one().get(LIMIT_S)

    assert heard == list(range(-1, 50))
    assert proxy.made == 2, "what was swallowed came by another one"
    assert not failures, "within the silence that a lost host has"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nobody", "killed", "stopped"])
def test_a_host_that_does_not_come_back_is_one_report_and_ends_what_ran_there(line, failures, how):
    served, proxy, hosts = line
    mesh = hosts.spawn_procs({"gpus": 2}, name="trainers").spawn("plain", Plain)
    pids = list(mesh.pid.call().get(LIMIT_S).values())
    pending = mesh.alone.call(s=600)

    began_s = time.monotonic()
    if how == "nobody":
        proxy.close()
    elif how == "killed":
        os.kill(served.process.pid, signal.SIGKILL)
    else:
        os.kill(served.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(SupervisionError, match="host-0 is lost"):
            pending.get(LIMIT_S)
        # What is in between still listens for a host that is killed: then it is silence that tells, of 8 s.
        took_s = time.monotonic() - began_s
        assert took_s < 5 or how != "nobody", took_s
        eventually(lambda: failures)
    finally:
        os.kill(served.process.pid, signal.SIGCONT)
    eventually(lambda: not any(map(is_alive, pids)), within_s=15, what="the host has ended what ran there")
    assert [failure.crashed_ranks for failure in failures] == [(0, 1)]
