"""Timers of the controller: what counts while it does not run."""

from __future__ import annotations

import asyncio
import time

from sky_monarch.controller.timers import Timers


def test_time_in_which_the_process_was_stopped_is_nobodys_silence() -> None:
    async def scene() -> tuple[float, float]:
        timers, fired = Timers(), asyncio.Event()
        began_s = time.monotonic()
        timers.arm_awake("doubt:h0", 0.8, fired.set)
        time.sleep(1.2)  # as if it was stopped: the whole loop stands still
        resumed_s = time.monotonic()
        await asyncio.wait_for(fired.wait(), 10)
        assert "doubt:h0" not in timers
        return time.monotonic() - resumed_s, time.monotonic() - began_s

    heard_s, whole_s = asyncio.run(scene())
    assert heard_s >= 0.3, "it could hear for no longer than that"
    assert whole_s >= 1.2 + 0.3


def test_one_that_counts_awake_is_cancelled_and_replaced_like_any_other() -> None:
    async def scene() -> list[str]:
        timers, said = Timers(), []
        timers.arm_awake("doubt:h0", 0.01, lambda: said.append("first"))
        timers.arm_awake("doubt:h0", 0.05, lambda: said.append("second"))
        timers.arm_awake("doubt:h1", 0.01, lambda: said.append("cancelled"))
        timers.cancel("doubt:h1")
        await asyncio.sleep(0.3)
        assert list(timers) == []
        return said

    assert asyncio.run(scene()) == ["second"]
