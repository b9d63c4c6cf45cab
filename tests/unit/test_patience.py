"""Hosts that are there and cost, while too few of their like can be had: kept for a time, and no longer."""

from __future__ import annotations

import dataclasses

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.model import HostPhase, RunPhase, SetTimer
from sky_monarch.controller.turn import IDLE_TIMER
from tests.support.host_policies import LIMITS, HostRun
from tests.support.policies import kinds

ALL = dataclasses.replace(LIMITS, min_replicas=3, idle_limit_s=3600.0)


def timers(actions: list[model.Action]) -> list[str]:
    """What is done with the timer of idle hosts, in order."""
    of_it = [one for one in kinds(actions, SetTimer | model.CancelTimer) if one.name == IDLE_TIMER]
    return ["set" if isinstance(one, SetTimer) else "cancelled" for one in of_it]


def test_hosts_that_wait_for_one_that_cannot_be_had_are_kept_for_the_limit_and_then_let_go() -> None:
    run = HostRun(ALL)
    assert timers(run.actions) == [], "nothing is there that would cost"
    run.launched("h0")
    assert timers(run.actions) == ["set"]
    assert [one.delay_s for one in kinds(run.actions, SetTimer) if one.name == IDLE_TIMER] == [3600.0]
    assert timers(run.launched("h2")) == [], "it has begun with the first of them"
    for _ in range(9):
        assert timers(run.report("h1", "failed", kind="capacity", reason="no MI300X anywhere")) == []
        assert run.state.phase is RunPhase.STARTING
        assert "2 of 3 replica groups have a host, min_replicas is 3" in (run.state.reason or "")
        assert "kept for 3600 s of that" in (run.state.reason or "")
        run.timer("host:h1")
        assert run.wanted() == {"h0": (1, True), "h1": (run.host("h1").attempt, True), "h2": (1, True)}

    run.timer(IDLE_TIMER)

    assert run.state.phase is RunPhase.STOPPING
    for replica in (0, 2):
        run.stopped(replica)
    run.timer("reap")
    assert not any(wanted for _, wanted in run.wanted().values()), "they are let go"
    for host in ("h0", "h1", "h2"):
        run.report(host, "down")
    assert (run.state.phase, run.state.exit_code) == (RunPhase.FAILED, 3), "no capacity"
    assert run.state.reason == (
        "host h1: no MI300X anywhere; attempt 10 is asked for; "
        "for 3600 s (recovery.idle_limit_s) 2 of 3 replica groups have a host, min_replicas is 3"
    )


def test_a_host_that_comes_in_time_ends_the_wait_and_the_next_loss_begins_another_one() -> None:
    run = HostRun(ALL)
    run.launched("h0")
    run.launched("h1")
    assert timers(run.launched("h2")) == ["cancelled"]
    run.timer(IDLE_TIMER)
    assert run.state.phase is RunPhase.STARTING, "one that was on its way ends nothing"
    for replica in range(3):
        run.runs(replica)
    assert timers(run.report("h1", "ended", reason="preempted")) == ["set"]
    run.timer(IDLE_TIMER)
    assert (run.state.outcome, run.state.exit_code) == (RunPhase.FAILED, 4), (
        "it has trained: that is no launch"
    )
    assert "host h1: its provider ended it: preempted" in (run.state.reason or "")


def test_capacity_is_waited_for_without_an_end_where_no_host_is_there_to_cost() -> None:
    run = HostRun(ALL)
    run.up()
    assert timers(run.report("h0", "ended")) == ["set"]
    assert timers(run.report("h1", "ended")) == []
    assert timers(run.report("h2", "ended")) == ["cancelled"]
    for _ in range(9):
        for host in ("h0", "h1", "h2"):
            assert timers(run.report(host, "failed", kind="capacity")) == []
            run.timer(f"host:{host}")
    assert run.state.phase is RunPhase.DEGRADED


@pytest.mark.parametrize("limits", [LIMITS, dataclasses.replace(ALL, idle_limit_s=None)])
def test_no_limit_is_one_and_enough_groups_are_never_idle(limits: model.Limits) -> None:
    limits = dataclasses.replace(limits, min_replicas=min(limits.min_replicas, 1) if limits is LIMITS else 3)
    run = HostRun(limits)
    run.launched("h0")
    run.report("h1", "failed", kind="capacity")
    assert timers(run.actions) == []


def test_a_run_that_ends_anyway_counts_no_more() -> None:
    run = HostRun(ALL)
    run.launched("h0")
    assert timers(run.down()) == ["cancelled"]
    run.timer(IDLE_TIMER)
    assert run.state.outcome is RunPhase.CANCELLED
    assert run.host("h0").phase is HostPhase.UP, "until its ranks have ended"
