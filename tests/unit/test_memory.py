"""What a controller remembers: a summary stands for all the rows that it was made of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.memory import Memory
from sky_monarch.controller.recovery import MAX_RECORDS

LIMITS = model.Limits(
    replicas=3, min_replicas=2, ranks_per_replica=1, max_restarts=600, window_s=600.0, grace_s=5.0
)


def memory() -> Memory:
    return Memory(LIMITS, {"a": (0, 1), "b": (2,)}, has_setup=True, checkpoint_target="/there")


def rows() -> list[dict[str, Any]]:
    """A run with a bit of everything."""
    stamp = {"mono_ns": 5, "wall_ms": 6}
    found: list[dict[str, Any]] = [{"event": "controller_started"}]

    def add(event: str, **fields: Any) -> None:
        found.append({"event": event, **stamp, **fields})

    def starts(replica: int, generation: int) -> None:
        whose = {"replica": replica, "generation": generation}
        add("generation_started", **whose)
        add("rank_spawned", **whose, rank=0, pid=100 + replica, warm=generation > 1)

    def dies(replica: int, generation: int) -> None:
        whose = {"replica": replica, "generation": generation, "rank": 0, "exit": {"signal": 9}}
        add("rank_exited", **whose, collateral=False, oom=False, pid=1, tail=["last words"])
        add("generation_ended", **whose, cause="rank_exited", early=None, step=7)
        add("restart_scheduled", replica=replica, generation=generation + 1, delay_s=0.0, restarts_left=1)

    for host in "ab":
        add("agent_connected", host=host, incarnation=7, pid=1, groups=[])
        add("setup_started", host=host)
        add("setup_finished", host=host, exit={"code": 0}, timed_out=False, tail=[])
    for replica in range(3):
        starts(replica, 1)
        add("first_commit", replica=replica, generation=1, step=1)
    add("injected", replica=1, rank=0, generation=1, injection=3, fault="kill")
    for generation in range(1, 4):
        dies(1, generation)
        starts(1, generation + 1)
        if generation != 3:
            add("first_commit", replica=1, generation=generation + 1, step=9)
    add("samples_lost", replica=1, step=8, batches=[24], samples=4)
    add("samples_lost", replica=0, step=9, batches=[27], samples=4)
    add("checkpoint_saved", replica=0, rank=0, generation=1, number=4, step=4, bytes=5, to="/there")
    cause = {"cause": "rank_exited", "rank": 0, "exit": {"code": 7}, "early": None}
    add("group_given_up", replica=2, generation=1, restarts=8, **cause)
    add("agent_disconnected", host="b", reason="gone")
    add("group_done", replica=0, generation=1, step=9)
    dies(1, 4)
    starts(1, 5)
    add("first_commit", replica=1, generation=5, step=9)
    add("down_requested", grace_s=1.0, reason="enough")
    return found


def known(one: Memory) -> dict[str, Any]:
    document = one.book.document(one.state, LIMITS, {})
    return {
        "state": one.state,
        "timers": one.timers,
        "status": {**document, "elapsed_s": 0},
        "all": one.summary(),
    }


@pytest.mark.parametrize("at", range(len(rows()) + 1))
def test_with_a_summary_in_place_of_any_number_of_rows_the_rest_leads_to_the_same(at: int) -> None:
    whole, first = memory(), memory()
    for row in rows():
        whole.apply(row)
    for row in rows()[:at]:
        first.apply(row)
    second = memory()
    second.restore(json.loads(json.dumps(first.summary())))
    assert known(second) == known(first)
    for row in rows()[at:]:
        second.apply(row)
    assert known(second) == known(whole)


def test_records_of_recoveries_are_bounded_and_counted_also_over_a_summary() -> None:
    one = memory()
    for row in rows()[:10]:
        one.apply(row)
    whose: dict[str, Any] = {"replica": 1, "mono_ns": 5, "wall_ms": 6}
    for generation in range(1, MAX_RECORDS + 51):
        exit_ = {"rank": 0, "exit": {"signal": 9}, "collateral": False, "oom": False, "pid": 1, "tail": []}
        one.apply({"event": "rank_exited", **whose, "generation": generation, **exit_})
        if generation % 100 == 0:
            again = memory()
            again.restore(json.loads(json.dumps(one.summary())))
            one = again
    document = one.book.document(one.state, LIMITS, {})
    assert len(document["recoveries"]) == MAX_RECORDS
    assert document["recoveries"][-1]["generation"] == MAX_RECORDS + 50, "the newest are kept"
    assert document["recoveries_total"] == MAX_RECORDS + 50


def test_a_stop_of_a_generation_whose_record_is_gone_ends_nobody() -> None:
    one = memory()
    death = {"rank": 0, "exit": {"signal": 9}, "collateral": False, "oom": False, "pid": 1, "tail": []}
    stamp = {"mono_ns": 5, "wall_ms": 6}
    one.apply({"event": "rank_exited", "replica": 0, "generation": 1, **stamp, **death})
    for generation in range(1, MAX_RECORDS + 5):
        one.apply({"event": "rank_exited", "replica": 1, "generation": generation, **stamp, **death})
    ended = {"cause": "stopped", "reason": "down", "step": None}
    one.apply({"event": "generation_ended", "replica": 0, "generation": 1, **stamp, **ended})
    assert len(one.book.recoveries.documents()) == MAX_RECORDS
