"""Unmodified TorchFT managers train against our lighthouse and against TorchFT's own: one test for both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.manager_bench import Bench
from tests.support.processes import is_alive
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.fixture(params=["sky-monarch", "torchft"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def our_bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, "sky-monarch")
    try:
        yield made
    finally:
        made.close()


def _assert_all_agree(bench: Bench, names: list[str]) -> int:
    """Every step was committed with the same weights by everyone who committed it."""
    by_step: dict[int, list[float]] = {}
    compared = 0
    for name in names:
        for commit in bench.commits(name):
            known = by_step.setdefault(commit["step"], commit["weights"])
            assert known == commit["weights"], f"{name} disagrees at step {commit['step']}"
            compared += known is not commit["weights"]
    return compared


def test_survivors_train_on_and_the_replacement_heals(bench: Bench) -> None:
    pids = [bench.start(replica, 1) for replica in range(3)]
    for replica in range(3):
        bench.wait_for(f"r{replica}.g1", 5, participants=3)

    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: not is_alive(pids[1]), within_s=10)
    if bench.kind == "sky-monarch":
        assert bench.control().evict(1, 1) is not None, "it was in a quorum"
    died_at = bench.commits("r1.g1")[-1]["step"]
    for survivor in ("r0.g1", "r2.g1"):
        bench.wait_for(survivor, died_at + 10, participants=2)

    bench.start(1, 2)
    for name in ("r0.g1", "r1.g2", "r2.g1"):
        bench.wait_for(name, died_at + 20, participants=3)
    assert bench.commits("r1.g2")[0]["step"] > died_at + 10, "it healed instead of starting from 0"
    assert all(is_alive(pids[replica]) for replica in (0, 2)), "nobody else was hurt"
    assert _assert_all_agree(bench, ["r0.g1", "r1.g1", "r1.g2", "r2.g1"]) > 20

    if bench.kind == "sky-monarch":
        state = bench.control().state()
        assert state["fences"]["1"] == 2
        reasons = [record["reason"] for record in state["history"]]
        assert reasons[0] == "all 3 expected replicas asked"
        assert any("evicted: rep_1:" in reason for reason in reasons), reasons
        assert sorted(one["replica"] for one in state["replicas"] if one["in_quorum"]) == [0, 1, 2]
        assert state["counters"]["drops"] == {"evicted": 1, "silent": 0}


def test_a_second_copy_of_a_live_group_never_votes(our_bench: Bench) -> None:
    bench = our_bench
    for replica in range(3):
        bench.start(replica, 1)
    for replica in range(3):
        bench.wait_for(f"r{replica}.g1", 5, participants=3)
    copy = bench.start(1, 1, name="copy", quorum_timeout_s=2)
    eventually(lambda: bench.control().state()["counters"]["refusals"].get("second_copy", 0), within_s=20)
    step = bench.commits("r0.g1")[-1]["step"]
    eventually(lambda: not is_alive(copy), within_s=40, what="the copy gives up")
    bench.wait_for("r0.g1", step + 20, participants=3)
    assert bench.commits("copy") == []
    assert {one["participants"] for one in bench.commits("r0.g1")} == {3}
    assert _assert_all_agree(bench, ["r0.g1", "r1.g1", "r2.g1"]) > 20


def test_a_restart_of_the_lighthouse_loses_nobody(our_bench: Bench) -> None:
    bench = our_bench
    pids = [bench.start(replica, 1, quorum_timeout_s=5) for replica in range(3)]
    for replica in range(3):
        bench.wait_for(f"r{replica}.g1", 5, participants=3)
    before = bench.control().state()["quorum_id"]
    bench.lighthouse.kill()
    bench.lighthouse.communicate(timeout=20)
    bench.lighthouse = bench.start_lighthouse()
    step = max(one["step"] for one in bench.commits("r0.g1"))
    for replica in range(3):
        bench.wait_for(f"r{replica}.g1", step + 10, participants=3)
    assert all(is_alive(pid) for pid in pids)
    since = bench.control().state()["history"]
    assert min(record["quorum_id"] for record in since) > before, "no quorum_id is given twice"
    assert _assert_all_agree(bench, ["r0.g1", "r1.g1", "r2.g1"]) > 20
