"""The controller's side of those who provision: long polls, silence, and the budget, in an event loop of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from sky_monarch.controller import provisioning
from sky_monarch.controller.memory import Memory
from sky_monarch.controller.money import Budget
from sky_monarch.controller.notices import Notices
from sky_monarch.controller.provisioning import Provisioning
from tests.support.host_policies import LIMITS
from tests.unit.test_plans import settings

PLACED: dict[str, tuple[int, ...]] = {"head": (), "h0": (0,), "h1": (1,), "h2": (2,)}
#: Longest wait for what is to happen.
SOON_S = 20.0


class Served:
    """A memory without a journal, and what serves it."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.memory = Memory(
            LIMITS, PLACED, has_setup=False, checkpoint_target=None, provisioned={"h0", "h1", "h2"}
        )
        self.rows: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        known = dataclasses.replace(settings(), budget=budget or Budget(), created_ms=1)
        self.hosts = Provisioning(
            known,
            None,
            memory=lambda: self.memory,
            record=self.record,
            news=self._wait,
            guarded=lambda act: act,
        )
        self.record({"event": "controller_started"})

    def record(self, row: dict[str, Any]) -> None:
        row = {"wall_ms": time.time_ns() // 1_000_000, "mono_ns": time.monotonic_ns(), **row}
        self.rows.append(row)
        self.memory.apply(row)
        self._news.set()
        self._news = asyncio.Event()

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def heard(self, event: str) -> int:
        return sum(row["event"] == event for row in self.rows)

    async def poll(self, after: int, wait_s: float = 5.0) -> dict[str, Any]:
        return await self.hosts.wanted(after, wait_s, _stays)


async def _stays() -> bool:
    return False


async def _soon(probe: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not probe():
            await asyncio.sleep(0.005)


def served(test: Callable[[Served], Any], budget: Budget | None = None) -> None:
    async def run() -> None:
        one = Served(budget)
        one.hosts.start()
        try:
            await test(one)
        finally:
            one.hosts.close()

    asyncio.run(run())


def test_a_launcher_is_told_at_once_what_it_does_not_know_and_else_when_it_changes() -> None:
    async def test(one: Served) -> None:
        first = await one.poll(-1)
        assert [(host["host"], host["want"], host["attempt"]) for host in first["hosts"]] == [
            ("h0", "up", 1),
            ("h1", "up", 1),
            ("h2", "up", 1),
        ]
        waiting = asyncio.create_task(one.poll(first["version"]))
        one.hosts.report({"host": "h1", "attempt": 1, "state": "launching"})
        await asyncio.sleep(0.02)
        assert not waiting.done(), "that is no news to a launcher"
        one.hosts.report(
            {"host": "h1", "attempt": 1, "state": "failed", "kind": "capacity", "reason": "full"}
        )
        second = await asyncio.wait_for(waiting, SOON_S)
        assert second["version"] != first["version"]
        assert [(host["want"], host["reason"]) for host in second["hosts"]][1] == ("down", "full")
        lower = await asyncio.wait_for(one.poll(second["version"] + 7), SOON_S)
        assert lower["version"] == second["version"], "a journal that was lost counts anew"

    served(test)


def test_a_poll_ends_after_its_time_and_where_nobody_listens_any_more() -> None:
    async def test(one: Served) -> None:
        version = (await one.poll(-1))["version"]
        await asyncio.wait_for(one.poll(version, 0.05), SOON_S)

        async def gone() -> bool:
            return True

        await asyncio.wait_for(one.hosts.wanted(version, 10 * SOON_S, gone), SOON_S)

    served(test)


def test_silence_counts_from_the_last_poll_and_a_waiting_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisioning, "_SILENT_S", 0.1)

    async def test(one: Served) -> None:
        version = (await one.poll(-1))["version"]
        await one.poll(version, 0.3)
        assert one.heard("launcher_gone") == 0, "who waits is there"
        await _soon(lambda: one.heard("launcher_gone") == 1)
        assert "waiting for launcher" in (one.memory.state.reason or "")
        await one.poll(-1)
        assert one.heard("launcher_came") == 2
        assert "waiting for launcher" not in (one.memory.state.reason or "")

    served(test)


def test_a_report_that_is_said_again_is_journaled_once() -> None:
    async def test(one: Served) -> None:
        for _ in range(3):
            answer = one.hosts.report({"host": "h1", "attempt": 1, "state": "launching"})
            assert answer == {"host": "h1", "attempt": 1, "phase": "LAUNCHING"}
        assert one.heard("host_report") == 1

    served(test)


def test_status_has_hosts_and_their_cost() -> None:
    async def test(one: Served) -> None:
        price = {"usd_per_hour": 36e6, "place": "there", "choice": 0}
        one.hosts.report({"host": "h0", "attempt": 1, "state": "launched", **price})
        await asyncio.sleep(0.02)
        facts = one.hosts.facts()
        assert [host["phase"] for host in facts["hosts"]] == ["UP", "WANTED", "WANTED"]
        first = facts["hosts"][0]
        assert (first["place"], first["groups"], first["attempt"]) == ("there", [0], 1)
        assert first["since_ms"] == one.rows[-1]["wall_ms"]
        assert facts["cost_usd"] == first["cost_usd"] > 100
        assert facts["wasted_usd"] == facts["cost_usd"], "nothing was committed yet"

    served(test)


@pytest.mark.parametrize(
    ("budget", "stops_in_s"),
    [(Budget(), None), (Budget(max_hours=2.0), 7200.0), (Budget(max_usd=5.0, max_hours=2.0), 1800.0)],
)
def test_status_says_when_the_budget_will_end_the_run(budget: Budget, stops_in_s: float | None) -> None:
    began_s = time.monotonic()

    async def test(one: Served) -> None:
        one.hosts.report({"host": "h0", "attempt": 1, "state": "launched", "usd_per_hour": 10.0})
        await asyncio.sleep(0.02)
        told = one.hosts.facts()["stops_in_s"]
        passed_s = time.monotonic() - began_s
        assert told == (None if stops_in_s is None else pytest.approx(stops_in_s, abs=5.0 + passed_s))
        one.record({"event": "down_requested", "grace_s": 0.0, "reason": "down"})
        assert one.hosts.facts()["stops_in_s"] is None, "something else ends it"

    served(test, budget)


def test_status_has_the_seconds_that_a_host_under_notice_has_left() -> None:
    async def test(one: Served) -> None:
        one.hosts.report({"host": "h0", "attempt": 1, "state": "launched", "usd_per_hour": 3.0})
        assert [host["stops_in_s"] for host in one.hosts.facts()["hosts"]] == [None] * 3
        told = {"event": "host_leaving", "host": "h0", "kind": "azure", "reason": "Preempt", "grace_s": 30.0}
        told_ns = time.monotonic_ns()
        one.record({**told, "received_ns": told_ns - 12_000_000_000})
        first = one.hosts.facts()["hosts"][0]
        passed_s = (time.monotonic_ns() - told_ns) / 1e9
        assert 17.9 - passed_s <= first["stops_in_s"] <= 18.0

        one.record({**told, "received_ns": time.monotonic_ns() - 40_000_000_000})
        assert one.hosts.facts()["hosts"][0]["stops_in_s"] == 0.0, "never less"
        kept = one.memory.summary()["notices"]
        assert list(kept) == ["h0"]
        anew = Notices()
        anew.restore(json.loads(json.dumps(kept)))
        at_ns, at_ms, _ = kept["h0"]
        assert anew.left_s("h0", int(at_ns) - 1, int(at_ms) + 10_000) == 20.0, "the machine was started anew"
        one.hosts.report({"host": "h0", "attempt": 1, "state": "ended"})
        assert one.hosts.facts()["hosts"][0]["stops_in_s"] is None, "the next attempt has heard nothing"

    served(test)


def test_the_budget_is_told_once_it_is_spent() -> None:
    async def test(one: Served) -> None:
        await one.poll(-1)
        one.hosts.report({"host": "h0", "attempt": 1, "state": "launched", "usd_per_hour": 36_000.0})
        await _soon(lambda: one.heard("budget_spent") == 1)
        assert one.memory.money.cost(time.monotonic_ns(), time.time_ns() // 1_000_000).usd >= 1.0
        assert one.memory.state.exit_code == 9

    served(test, Budget(max_usd=1.0))
