"""Spare hosts: ready with nothing to run, until a host is lost or does not come."""

from __future__ import annotations

import dataclasses

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase, GroupsPlaced, HostPhase, RunPhase, Setup, StartGroup
from tests.support.host_policies import LIMITS, HostRun
from tests.support.policies import kinds

PLACED: dict[str, tuple[int, ...]] = {"h0": (0,), "h1": (1,), "h2": (2,), "h3": ()}


def spared(limits: model.Limits = LIMITS) -> HostRun:
    """Three hosts with a group each, and a spare one; all are there and commit."""
    run = HostRun(limits, hosts=PLACED)
    run.up()
    return run


def starts(actions: list[model.Action]) -> list[tuple[str, int]]:
    return [(start.host, start.replica) for start in kinds(actions, StartGroup)]


def living(replica: int, generation: int) -> model.Snapshot:
    return model.Snapshot(
        replica=replica, generation=generation, state=GroupPhase.RUNNING, live=frozenset({0})
    )


def test_a_spare_is_wanted_and_prepared_as_any_other_host_and_runs_nothing() -> None:
    run = HostRun(hosts=PLACED, setup=True)
    assert run.wanted()["h3"] == (1, True)
    assert [order.host for order in kinds(run.launched("h3"), Setup)] == ["h3"]
    run.feed(model.SetupStarted(host="h3"))
    for number in range(3):
        run.launched(f"h{number}")
        run.feed(model.SetupStarted(host=f"h{number}"), model.SetupFinished(host=f"h{number}", failure=None))
    assert starts(run.feed(model.SetupFinished(host="h3", failure=None))) == []
    assert run.host("h3").spare


def test_the_groups_of_a_lost_host_start_on_the_spare_at_once_and_the_lost_one_is_the_next_spare() -> None:
    run = spared()
    before = run.state.groups[1].generation
    actions = run.report("h1", "ended", reason="preempted")
    assert starts(actions) == [("h3", 1)]
    (start,) = kinds(actions, StartGroup)
    assert start.generation > before
    assert start.max_restarts == LIMITS.max_restarts, "what a host costs is not taken from the budget"
    (placed,) = kinds(actions, GroupsPlaced)
    assert (placed.host, placed.on, placed.groups) == ("h1", "h3", (1,))
    lost = run.host("h1")
    assert (lost.replicas, lost.attempt, lost.phase) == ((), 2, HostPhase.WANTED)
    assert run.state.phase is RunPhase.RUNNING, "nobody is waited for"
    assert starts(run.launched("h1")) == []
    assert starts(run.report("h0", "ended")) == [("h1", 0)]


def test_a_silent_host_is_left_for_a_spare_as_soon_as_it_is_doubted() -> None:
    run = spared()
    run.feed(model.AgentDisconnected(host="h1"))
    assert run.host("h1").doubted, "its provider is asked at once"
    assert starts(run.timer("doubt:h1")) == [("h3", 1)]
    assert run.state.groups[1].generation > 2 * LIMITS.max_restarts, "the silent one may live and count on"
    assert run.host("h1").attempt == 2


def test_without_a_spare_a_silent_host_is_doubted_and_waited_for() -> None:
    run = HostRun()
    run.up()
    version = run.state.wanted
    run.feed(model.AgentDisconnected(host="h1"))
    assert run.state.wanted > version, "whoever provides it is asked now"
    assert run.timer("doubt:h1") == []
    assert run.wanted()["h1"] == (1, True)
    run.connect("h1", living(1, 1), incarnation=run.host("h1").incarnation)
    assert not run.host("h1").doubted
    run.feed(model.HostLeaving(host="h1", reason="SIGTERM"), model.AgentDisconnected(host="h1"))
    assert not run.host("h1").doubted, "who has said farewell is in no doubt"


def test_a_controller_that_was_away_itself_doubts_nobody_before_they_had_their_time() -> None:
    run = spared()
    delays = {
        timer.name: timer.delay_s for timer in kinds(run.feed(model.ControllerStarted()), model.SetTimer)
    }
    assert not any(host.doubted for host in run.state.hosts)
    assert delays["doubt:h1"] == 2 * LIMITS.agent_doubted_s, "a dial that hangs in the old one takes its time"


def test_an_agent_of_the_lost_host_is_fenced_and_its_words_count_for_nothing() -> None:
    run = spared()
    run.feed(model.AgentDisconnected(host="h1"))
    run.timer("doubt:h1")
    generation = run.state.groups[1].generation
    (fence,) = kinds(run.connect("h1", living(1, 2), attempt=1), model.Fence)
    assert fence.attempt == 1
    run.feed(model.FirstCommit(replica=1, generation=2))
    assert (run.state.groups[1].generation, run.state.groups[1].host) == (generation, "h3")


def test_a_spare_that_is_ready_first_takes_the_groups_of_a_host_that_is_awaited() -> None:
    run = HostRun(hosts=PLACED)
    assert starts(run.launched("h3")) == [("h3", 0)]
    assert run.host("h0").spare
    assert starts(run.launched("h1")) == [("h1", 1)]
    assert starts(run.launched("h0")) == [("h0", 2)], "it has come before the one that was to have them"
    assert run.host("h2").spare
    assert starts(run.launched("h2")) == []


def test_of_two_lost_hosts_and_one_spare_the_second_waits_for_whichever_is_ready_next() -> None:
    run = spared()
    run.report("h0", "ended")
    run.report("h1", "ended")
    assert [run.state.groups[number].host for number in range(3)] == ["h3", "h1", "h2"]
    assert run.state.phase is RunPhase.DEGRADED
    assert starts(run.launched("h0")) == [("h0", 1)], "the next spare came before the lost one"
    assert run.host("h1").spare


def test_a_lost_spare_is_had_again_and_degrades_nothing() -> None:
    run = spared()
    run.report("h3", "ended")
    assert run.wanted()["h3"] == (2, True)
    assert run.state.phase is RunPhase.RUNNING
    run.report("h3", "failed", kind="refused", reason="quota")
    assert run.host("h3").phase is HostPhase.GIVEN_UP
    assert run.state.phase is RunPhase.RUNNING
    assert run.state.root_cause is None
    assert "spare host h3 was given up: quota" in run.state.notes


def test_a_host_that_is_refused_leaves_no_group_behind_that_a_spare_can_have() -> None:
    run = HostRun(dataclasses.replace(LIMITS, min_replicas=3), hosts=PLACED)
    run.launched("h3")
    run.launched("h1")
    run.launched("h2")
    assert run.host("h0").spare
    run.report("h0", "failed", kind="refused", reason="quota")
    assert run.state.phase is not RunPhase.STOPPING, "no group needs that host"


def test_no_spare_is_had_any_more_for_a_run_whose_work_is_done_and_its_end_takes_it_down() -> None:
    run = spared()
    for replica in range(3):
        run.done(replica)
    assert run.state.phase is RunPhase.STOPPING
    run.timer("reap")
    assert run.wanted()["h3"] == (1, False)
    for number in range(4):
        assert run.state.phase is RunPhase.STOPPING
        run.report(f"h{number}", "down")
    assert run.state.phase is RunPhase.SUCCEEDED


def test_the_end_waits_for_the_older_attempt_that_is_taken_down_beside() -> None:
    run = spared()
    run.feed(model.AgentDisconnected(host="h1"))
    run.timer("doubt:h1")
    run.launched("h1")
    assert run.host("h1").replaces == 1, "nobody has told its end"
    run.down()
    for replica in range(3):
        run.stopped(replica)
    run.timer("reap")
    for number in (0, 2, 3):
        run.report(f"h{number}", "down")
    run.report("h1", "ended")
    assert run.state.phase is RunPhase.STOPPING, "its first attempt may bill"
    run.report("h1", "down", attempt=1)
    assert run.state.phase is RunPhase.CANCELLED


def test_where_groups_are_is_taken_from_their_agents_when_the_journal_is_lost() -> None:
    run = HostRun(hosts=PLACED)
    run.feed(model.JournalLost(reason="damaged", generations=((1, 4),), outcome=None, ended=("", 1)))
    assert starts(run.connect("h3", living(1, 4), attempt=1)) == []
    assert (run.state.groups[1].host, run.state.groups[1].live) == ("h3", frozenset({0}))
    assert starts(run.connect("h1", attempt=2)) == [], "it is the spare"
