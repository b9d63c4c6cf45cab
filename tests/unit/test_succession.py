"""What a head that follows a lost one is told, and what its controller makes of it. Pure, in virtual time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.controller.journal import Journal
from sky_monarch.controller.memory import Memory
from sky_monarch.controller.model import HostPhase, Limits
from sky_monarch.controller.money import MoneyBook
from sky_monarch.controller.rebuild import successor_row
from sky_monarch.launch.head import Away, following
from sky_monarch.provision.succession import MOST_FRUITLESS, Succession, succession

LIMITS = Limits(replicas=2, min_replicas=1, ranks_per_replica=1, max_restarts=3, window_s=60, grace_s=1)
HOSTS = {"head": (), "far-h0": (0,), "far-h1": (1,), "far-h2": ()}
HOUR_MS = 3_600_000


def status(step: int | None, **more: Any) -> dict[str, Any]:
    hosts = [
        {"host": "far-h0", "groups": [0], "attempt": 1, "phase": "UP", "usd_per_hour": 4.0},
        {"host": "far-h1", "groups": [], "attempt": 3, "phase": "DOWN", "usd_per_hour": 4.0},
        {"host": "far-h2", "groups": [1], "attempt": 1, "phase": "UP", "usd_per_hour": 4.0},
        {"host": "far-head", "groups": [], "head": True, "phase": "UP", "usd_per_hour": 1.0},
    ]
    groups = [{"replica": 0, "generation": 1}, {"replica": 1, "generation": 5}]
    return {
        "step": step,
        "hosts": hosts,
        "groups": groups,
        "replicas": 2,
        "elapsed_s": 7200.0,
        "cost_usd": 20.0,
        "wasted_usd": 2.0,
        **more,
    }


def after(before: Succession | None, step: int | None, **more: Any) -> Succession:
    return succession(
        before,
        status(step, **more),
        reason="it is gone",
        noted_ms=time.time_ns() // 1_000_000 - HOUR_MS,
        last_event=41,
        attempts={"far-h1": 4, "far-h2": 1},
    )


def row_of(found: Succession, mono_ns: int = 10**15, wall_ms: int | None = None) -> dict[str, Any]:
    wall_ms = time.time_ns() // 1_000_000 if wall_ms is None else wall_ms
    told = json.loads(json.dumps(found.after_clearing().told))
    return {"mono_ns": mono_ns, "wall_ms": wall_ms, **successor_row(told, {0, 1})}


def memory() -> Memory:
    return Memory(
        LIMITS,
        HOSTS,
        has_setup=False,
        checkpoint_target="/there",
        provisioned={name for name in HOSTS if name != "head"},
    )


def test_the_next_controller_asks_for_attempts_and_generations_beyond_all_that_there_were() -> None:
    found = memory()
    found.apply(row_of(after(None, 70)))

    hosts = {host.name: (host.attempt, host.phase) for host in found.state.hosts if host.provisioned}
    assert hosts == {
        "far-h0": (2, HostPhase.WANTED),
        "far-h1": (5, HostPhase.WANTED),  # what was asked for last, which no status told
        "far-h2": (2, HostPhase.WANTED),
    }
    assert [group.generation for group in found.state.groups] == [1, 5]
    assert not any(group.started for group in found.state.groups)


def test_a_run_that_was_scaled_stays_so_under_the_next_head() -> None:
    more = status(70)["hosts"] + [{"host": "far-h3", "groups": [2], "attempt": 2, "phase": "UP"}]
    generations = [{"replica": replica, "generation": 4} for replica in range(3)]
    found = memory()
    found.apply(row_of(after(None, 70, hosts=more, groups=generations, replicas=3)))

    assert found.state.replicas == 3
    assert [(group.replica, group.generation) for group in found.state.groups] == [(0, 4), (1, 4), (2, 4)]
    (new,) = (host for host in found.state.hosts if host.name == "far-h3")
    assert (new.attempt, new.replicas) == (3, (2,))

    fewer = memory()
    fewer.apply(row_of(after(None, 70, replicas=1)))
    assert fewer.state.replicas == 1


def test_what_the_run_has_cost_and_how_long_it_has_lasted_go_on() -> None:
    lost = after(None, 70)
    book = MoneyBook()
    now_ms = time.time_ns() // 1_000_000
    book.apply(row_of(lost, wall_ms=now_ms))

    # 20 were told an hour ago; since then two hosts and the head have billed 9 an hour, for nothing.
    told = book.totals(10**15, now_ms)
    assert told["cost_usd"] == pytest.approx(29.0, abs=0.1)
    assert told["wasted_usd"] == pytest.approx(11.0, abs=0.1)
    assert book.hours(10**15, now_ms) == pytest.approx(3.0, abs=0.01)
    again = MoneyBook()
    again.restore(json.loads(json.dumps(book.summary())))
    assert again.totals(10**15, now_ms) == told


def test_no_event_has_an_id_that_the_lost_journal_may_have_given_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.begin_after(after(None, 70).told["after"])
    with journal.transaction():
        stored = journal.append({"event": "head_replaced", "wall_ms": 1})
    assert stored is not None
    assert stored["id"] > 41 + 999
    with pytest.raises(ValueError, match="has events"):
        journal.begin_after(5)
    journal.close()


def test_heads_that_are_lost_before_anything_new_was_committed_are_not_followed_for_ever() -> None:
    found = after(None, 70)
    for _ in range(MOST_FRUITLESS):
        assert not found.hopeless
        found = after(found, 60)  # it had gone on from the checkpoint of step 50
    assert found.hopeless
    assert found.step == 60
    assert not after(found, 71).hopeless, "it came further than the one before"
    assert after(found, None).attempt == found.attempt + 1


def test_it_is_read_as_it_was_written_and_a_first_head_has_none(tmp_path: Path) -> None:
    assert Succession.of(tmp_path) is None
    found = after(None, 70).keep(tmp_path)
    assert Succession.of(tmp_path) == found
    done = found.after_clearing().keep(tmp_path)
    assert (found.cleared, done.cleared) == (False, True)
    assert Succession.of(tmp_path) == done


def test_the_next_head_is_told_no_fault_to_rehearse_and_nothing_secret() -> None:
    away = Away(cluster="far-head", told={"head": {"injections": [1], "job": {}}}, secret={"token": "t"})
    found = following(away, {"attempt": 2})
    assert found.told["head"] == {"injections": [], "job": {}, "succeeds": {"attempt": 2}}
    assert (found.cluster, found.secret) == (away.cluster, away.secret)
    assert away.told["head"]["injections"] == [1], "the first one is what it was"
