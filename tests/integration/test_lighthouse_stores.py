"""The store of each quorum: a real helper, real TCPStore clients, and unmodified managers that die in a rendezvous."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.actors.lighthouse_client import LighthouseClient
from tests.support.manager_bench import TOKEN, Bench
from tests.support.processes import is_alive, pids
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

HELPER = [sys.executable, "-m", "sky_monarch.training.store"]
OWN = "127.0.0.1:1"
"""Store address that the members themselves name: nobody is there."""

# On a machine that is busy with other tests; a stall is a minute, the limit of the stores' clients.
SOON_S = 20.0

STORES_AT = "127.0.0.2"

STALL_S = 12
"""How long a survivor tries to meet a dead member whose death it is not told of."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    # As a lighthouse of several hosts is told where ranks of all of them reach its stores.
    made = Bench(tmp_path, "sky-monarch", expect=2, store_argv=HELPER, address=STORES_AT)
    try:
        yield made
    finally:
        made.close()
        eventually(lambda: helpers(made) == [], what="no helper is left")


def helpers(bench: Bench) -> list[int]:
    """Live helpers of that lighthouse, by the marked environment that they inherit."""
    found = []
    for pid in pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        mine = f"SKY_MONARCH_LIGHTHOUSE_ADDR={bench.address}".encode()
        if b"sky_monarch.training.store" in command and mine in environment.split(b"\0") and is_alive(pid):
            found.append(pid)
    return found


def quorum(bench: Bench, *replicas: tuple[int, int], step: int = 1) -> dict[str, Any]:
    """A quorum of these replicas and generations, which ask at the same time; each has the same."""

    def ask(replica: int, generation: int) -> dict[str, Any]:
        client = LighthouseClient(f"http://r{replica}.g{generation}.{TOKEN}@{bench.address}", 20.0)
        name = f"rep_{replica}:{generation}"
        return dict(client.quorum(name, step, store_address=OWN, commit_failures=1, timeout_s=30))

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda who: ask(*who), replicas))
    first = answers[0]
    assert all(answer["participants"] == first["participants"] for answer in answers)
    return first


def address(formed: dict[str, Any]) -> str:
    (found,) = {member["store_address"] for member in formed["participants"]}
    return str(found)


def with_store(bench: Bench, *replicas: tuple[int, int]) -> str:
    """Address of the store of a new quorum, once the helper serves."""

    def probe() -> str | None:
        found = address(quorum(bench, *replicas))
        return None if found == OWN else found

    found = eventually(probe, within_s=160, what="a quorum with a store of its own")
    assert found
    assert found.startswith(f"{bench.config.get('address', '127.0.0.1')}:")
    return found


def client(at: str, timeout_s: float = 60) -> Any:
    from torch.distributed import TCPStore

    host, _, port = at.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)


class Blocked:
    """Clients that wait in a store for a key that never comes."""

    def __init__(self, at: str, count: int = 3) -> None:
        self.ended_at: list[float] = []
        inside = threading.Barrier(count + 1)

        def wait() -> None:
            store = client(at)
            inside.wait(60)
            try:
                store.get("never")
            except RuntimeError:
                self.ended_at.append(time.monotonic())

        self.threads = [threading.Thread(target=wait, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()
        inside.wait(60)
        time.sleep(0.1)  # from the barrier into the wait: nothing outside shows that

    def failed_within(self, since: float) -> float:
        for thread in self.threads:
            thread.join(SOON_S + 10)
        assert len(self.ended_at) == len(self.threads), "they still wait"
        return max(self.ended_at) - since


def test_an_evict_fails_at_once_whoever_is_in_the_store_of_that_quorum_or_comes_late(bench: Bench) -> None:
    at = with_store(bench, (0, 1), (1, 1))
    assert bench.control().state()["store_address"] == at
    store = client(at)
    store.set("key", "value")
    assert client(at).get("key") == b"value"
    blocked = Blocked(at)

    began = time.monotonic()
    bench.control().evict(1, 1)
    assert blocked.failed_within(began) < SOON_S
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        client(at).get("key")
    assert time.monotonic() - began < SOON_S, "a latecomer does not try to connect until its timeout"
    assert bench.control().state()["store_address"] is None

    fresh = with_store(bench, (0, 1), (1, 2))
    assert fresh != at
    assert not client(fresh).check(["key"])
    history = bench.control().state()["history"]
    # A helper that is held up for a second is not waited for: then one of its quorums has no store.
    assert [found for record in history if (found := record["store_address"])][-2:] == [at, fresh]
    left = [record["left"] for record in history if record["left"]]
    assert left[-1] == [{"id": "rep_1:1", "replica": 1, "generation": 1, "why": "evicted"}]


def test_a_superseded_store_stays_for_one_quorum_more(bench: Bench) -> None:
    first = with_store(bench, (0, 1), (1, 1))
    store = client(first)
    store.set("key", "value")
    second = address(quorum(bench, (0, 1), (1, 1)))
    assert second != first, "a failed commit: the same members in a quorum of its own"
    assert store.get("key") == b"value", "a slow member may still need it"
    quorum(bench, (0, 1), (1, 1))

    def closed() -> bool:
        try:
            return client(first).get("key") is None
        except RuntimeError:
            return True

    eventually(closed, what="the first store is closed")


@pytest.mark.slow
def test_a_helper_that_dies_is_replaced_and_nobody_waits_for_it(bench: Bench) -> None:
    at = with_store(bench, (0, 1), (1, 1))
    (helper,) = helpers(bench)
    blocked = Blocked(at)
    began = time.monotonic()
    os.kill(helper, signal.SIGKILL)
    assert blocked.failed_within(began) < SOON_S
    began = time.monotonic()
    assert address(quorum(bench, (0, 1), (1, 1))) == OWN, "as with TorchFT, until there is another helper"
    assert time.monotonic() - began < SOON_S
    with_store(bench, (0, 1), (1, 1))
    assert helpers(bench) != [helper]


@pytest.mark.slow
def test_a_helper_that_hangs_holds_up_neither_quorum_nor_evict_and_is_ended(bench: Bench) -> None:
    at = with_store(bench, (0, 1), (1, 1))
    (helper,) = helpers(bench)
    blocked = Blocked(at)
    os.kill(helper, signal.SIGSTOP)
    began = time.monotonic()
    bench.control().evict(1, 1)
    quorum(bench, (0, 1), (1, 2))
    assert time.monotonic() - began < SOON_S
    assert blocked.failed_within(began) < SOON_S, "its end ends the connections to its stores"
    eventually(lambda: not is_alive(helper))
    with_store(bench, (0, 1), (1, 2))


@pytest.mark.slow
def test_the_helper_dies_with_the_lighthouse_even_where_it_is_stopped(bench: Bench) -> None:
    with_store(bench, (0, 1), (1, 1))
    (helper,) = helpers(bench)
    os.kill(helper, signal.SIGSTOP)
    bench.lighthouse.kill()
    bench.lighthouse.communicate(timeout=20)
    eventually(lambda: not is_alive(helper))

    bench.lighthouse = bench.start_lighthouse()
    eventually(lambda: bench.control().state() is not None)
    with_store(bench, (0, 1), (1, 1))
    (helper,) = helpers(bench)
    bench.lighthouse.terminate()
    bench.lighthouse.communicate(timeout=20)
    assert bench.lighthouse.returncode == 0
    eventually(lambda: not is_alive(helper))


def test_a_python_without_torch_is_said_once_and_done_without(tmp_path: Path) -> None:
    (tmp_path / "shadow" / "torch").mkdir(parents=True)
    (tmp_path / "shadow" / "torch" / "__init__.py").write_text("raise ImportError('there is no torch here')")
    argv = ["env", f"PYTHONPATH={tmp_path / 'shadow'}:{os.environ.get('PYTHONPATH', '')}", *HELPER]
    made = Bench(tmp_path, "sky-monarch", expect=2, store_argv=argv)
    log = tmp_path / "sky_monarch.lighthouse.log"
    try:
        assert address(quorum(made, (0, 1), (1, 1))) == OWN
        eventually(lambda: "no stores for quorums" in log.read_text(), within_s=30)
        for _ in range(5):
            assert address(quorum(made, (0, 1), (1, 1))) == OWN
        assert log.read_text().count("no stores for quorums") == 1
        assert "there is no torch here" in log.read_text()
        assert helpers(made) == []
    finally:
        made.close()


def primary_dies_in_the_rendezvous(bench: Bench) -> float:
    """Four groups; one dies, and then the first as it meets the others. The longest gap of the survivors."""
    cue = bench.folder / "die"
    pids = [
        bench.start(replica, 1, process_group_timeout_s=STALL_S, die_in_rendezvous=None if replica else cue)
        for replica in range(4)
    ]
    for replica in range(4):
        bench.wait_for(f"r{replica}.g1", 5, participants=4)
    cue.touch()
    killed = time.monotonic()
    os.kill(pids[3], signal.SIGKILL)
    eventually(lambda: not is_alive(pids[3]))
    bench.control().evict(3, 1)
    eventually(lambda: not is_alive(pids[0]), within_s=60, what="the primary enters its rendezvous and dies")
    bench.control().evict(0, 1)
    gaps: list[float] = []
    for name in ("r1.g1", "r2.g1"):
        bench.wait_for(name, 5, participants=2)
        times = [one["at"] for one in bench.commits(name)]
        gaps += [later - sooner for sooner, later in pairwise(times) if later > killed]
    return max(gaps)


@pytest.mark.slow
def test_the_death_of_the_primary_in_a_rendezvous_stalls_nobody(tmp_path: Path) -> None:
    made = Bench(tmp_path, "sky-monarch", expect=4, store_argv=HELPER)
    try:
        with_store(made, (7, 1), (8, 1), (9, 1), (10, 1))  # the helper serves
        for replica in (7, 8, 9, 10):
            made.control().evict(replica, 1)
        gap_s = primary_dies_in_the_rendezvous(made)
        assert gap_s < STALL_S / 2, f"they stalled for {gap_s:.1f} s"
        assert made.control().state()["store_address"]
    finally:
        made.close()


@pytest.mark.mutant
def test_without_a_helper_quorums_form_and_that_death_stalls_everyone(tmp_path: Path) -> None:
    made = Bench(tmp_path, "sky-monarch", expect=4)
    try:
        gap_s = primary_dies_in_the_rendezvous(made)
        assert gap_s > STALL_S / 2, "then the test above shows nothing"
        assert made.control().state()["store_address"] is None
    finally:
        made.close()
