"""Silence of two seconds: told at once, taken back by asking again, and never blamed on who was not heard."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sky_monarch import _core
from sky_monarch.errors import ChannelClosedError
from tests.support.manager_bench import TOKEN, Bench
from tests.support.processes import is_alive
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

SILENCE_S = 2.0
NAMES = [f"r{replica}.g1" for replica in range(3)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, "sky-monarch", heartbeat_timeout_s=SILENCE_S)
    try:
        yield made
    finally:
        made.close()


def started(bench: Bench) -> list[int]:
    """Pids of three groups that train together."""
    pids = [bench.start(replica, 1) for replica in range(3)]
    for name in NAMES:
        bench.wait_for(name, 5, participants=3)
    return pids


def supervisor(bench: Bench) -> Any:
    hello = {"role": "supervisor", "pid": os.getpid()}
    return _core.ChannelClient(f"unix:{bench.folder / 'lighthouse.sock'}", TOKEN, "run", hello, 20.0)


def is_at_once(why: str) -> bool:
    """Whether the silence that was told had lasted for as long as it has to, and hardly longer."""
    (found,) = re.findall(r"silent (\d+\.\d) s", why)
    return SILENCE_S <= float(found) <= SILENCE_S + 0.5


def assert_all_train_on(bench: Bench, pids: list[int]) -> None:
    step = max(bench.commits(name)[-1]["step"] for name in NAMES)
    for name in NAMES:
        bench.wait_for(name, step + 10, participants=3)
    assert all(is_alive(pid) for pid in pids)


def test_a_paused_group_is_told_of_to_every_supervisor_and_let_in_again_without_a_restart(
    bench: Bench,
) -> None:
    pids = started(bench)
    supervisors = [supervisor(bench) for _ in range(2)]
    held = bench.control().state()["quorum_id"]
    os.kill(pids[1], signal.SIGSTOP)
    try:
        for one in supervisors:
            told = one.recv(20.0)
            assert (told["seq"], told["reply"]["type"]) == (0, "gone")
            assert told["reply"]["quorum_id"] >= held
            assert "rep_1:" in told["reply"]["reason"]
            # It beats every 0.1 s; the survivors hang in a collective with it and ask for nothing. The lighthouse looks
            # as often, and takes no blame for a time in which it was itself held up.
            assert is_at_once(told["reply"]["reason"]), told
        for name in ("r0.g1", "r2.g1"):
            bench.wait_for(name, 5, participants=2)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert_all_train_on(bench, pids)
    state = bench.control().state()
    assert state["counters"]["drops"] == {"evicted": 0, "silent": 1}
    assert state["fences"]["1"] == 1, "its generation goes on"
    (left,) = [record["left"] for record in state["history"] if record["left"]]
    assert left[0]["replica"] == 1
    assert is_at_once(left[0]["why"])
    for one in supervisors:
        assert one.recv(0.2) is None, "once"
        one.close()


def test_an_evict_is_answered_before_its_own_news(bench: Bench) -> None:
    pids = started(bench)
    who, other = supervisor(bench), supervisor(bench)
    os.kill(pids[1], signal.SIGKILL)
    who.send({"seq": 7, "command": {"type": "evict", "replica": 1, "generation": 1}})
    first, second = who.recv(20.0), who.recv(20.0)
    assert (first["seq"], first["reply"]["type"]) == (7, "evicted")
    assert (second["seq"], second["reply"]["type"]) == (0, "gone")
    assert second["reply"]["quorum_id"] == first["reply"]["quorum_id"]
    assert other.recv(20.0) == second
    who.close()
    other.close()


def test_a_supervisor_that_does_not_read_is_disconnected_and_holds_nobody_up(bench: Bench) -> None:
    deaf = supervisor(bench)

    def ask_on() -> None:
        until, seq = time.monotonic() + 20, 0
        while time.monotonic() < until:
            seq += 1
            deaf.send({"seq": seq, "command": {"type": "state"}})

    with pytest.raises(ChannelClosedError):
        ask_on()
    bench.control().evict(5, 1, timeout_s=10)
    deaf.close()


@pytest.mark.parametrize("stopped_s", [1.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_a_lighthouse_that_was_stopped_drops_nobody(bench: Bench, stopped_s: float) -> None:
    pids = started(bench)
    bench.lighthouse.send_signal(signal.SIGSTOP)
    time.sleep(stopped_s)
    bench.lighthouse.send_signal(signal.SIGCONT)
    assert_all_train_on(bench, pids)
    counters = bench.control().state()["counters"]
    assert counters["drops"] == {"evicted": 0, "silent": 0}
    assert counters["pauses"] >= 1


@pytest.mark.slow
def test_a_lighthouse_that_is_starved_drops_nobody(bench: Bench) -> None:
    pids = started(bench)
    cpu = min(os.sched_getaffinity(0))
    for task in Path(f"/proc/{bench.lighthouse.pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {cpu})
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
    spin = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
    try:
        time.sleep(4 * SILENCE_S)
        assert bench.control().state()["counters"]["drops"] == {"evicted": 0, "silent": 0}
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert_all_train_on(bench, pids)
    assert bench.control().state()["counters"]["drops"] == {"evicted": 0, "silent": 0}


@pytest.mark.slow
def test_a_restart_of_the_lighthouse_leaves_everyone_time_to_be_heard_again(bench: Bench) -> None:
    pids = started(bench)
    for _ in range(3):
        bench.lighthouse.kill()
        bench.lighthouse.communicate(timeout=20)
        bench.lighthouse = bench.start_lighthouse()
        eventually(lambda: bench.control().state() is not None)
        assert_all_train_on(bench, pids)
    # longer than the silence that counts
    time.sleep(SILENCE_S)
    assert bench.control().state()["counters"]["drops"] == {"evicted": 0, "silent": 0}
