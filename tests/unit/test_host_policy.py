"""Hosts that are provisioned: had one by one, lost, had again, given up, and taken down at the end."""

from __future__ import annotations

import dataclasses

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase, HostPhase, RunPhase, SetTimer, StartGroup
from sky_monarch.controller.replacing import MOST_FAULTS
from tests.support.host_policies import LIMITS, HostRun, starts
from tests.support.policies import kinds


def pauses(actions: list[model.Action]) -> list[float]:
    return [timer.delay_s for timer in kinds(actions, SetTimer) if timer.name.startswith("host:")]


def test_each_host_starts_when_it_is_there_and_waits_for_no_other() -> None:
    run = HostRun()
    assert run.wanted() == {"h0": (1, True), "h1": (1, True), "h2": (1, True)}
    assert run.state.phase is RunPhase.PENDING
    assert "host h0: attempt 1 is asked for" in (run.state.reason or "")
    assert starts(run.launched("h0")) == [("h0", 0, 1)]
    assert run.state.phase is RunPhase.STARTING
    run.runs(0)
    assert run.state.phase is RunPhase.DEGRADED
    assert "going on without replica 1, replica 2" in (run.state.reason or "")
    for number in (1, 2):
        run.launched(f"h{number}")
        run.runs(number)
    assert (run.state.phase, run.state.reason) == (RunPhase.RUNNING, None)


def test_an_agent_may_dial_before_its_launcher_knows_that_it_is_up() -> None:
    run = HostRun()
    run.report("h0", "launching")
    assert starts(run.connect("h0")) == [("h0", 0, 1)]
    assert run.host("h0").phase is HostPhase.UP
    assert run.report("h0", "launched") == []


def test_a_silent_host_is_replaced_alone_at_once_and_costs_its_group_no_restart() -> None:
    run = HostRun()
    run.up()
    version = run.state.wanted
    assert not pauses(run.silent("h1"))
    assert run.wanted() == {"h0": (1, True), "h1": (2, True), "h2": (1, True)}
    assert run.state.wanted > version
    assert run.host("h1").replaces == 1, "nobody has seen the end of the first"
    assert run.state.phase is RunPhase.DEGRADED
    assert run.state.reason == (
        "host h1: its agent was silent for 30 s; attempt 2 is asked for; going on without replica 1"
    )
    (start,) = kinds(run.launched("h1"), StartGroup)
    assert (start.replica, start.max_restarts) == (1, LIMITS.max_restarts)
    assert start.generation > 1 + LIMITS.max_restarts, "the old one may live and count on, cut off from here"
    run.runs(1)
    assert (run.state.phase, run.state.reason) == (RunPhase.RUNNING, None)


def test_a_host_that_its_provider_has_ended_is_replaced_and_its_group_goes_on_one_generation_later() -> None:
    run = HostRun()
    run.up()
    actions = run.report("h1", "ended", reason="preempted")
    assert [fence.host for fence in kinds(actions, model.Fence)] == ["h1"], "its line may still look alive"
    assert run.host("h1").replaces is None
    assert "its provider ended it: preempted" in (run.state.reason or "")
    assert starts(run.launched("h1")) == [("h1", 1, 2)]


def test_a_host_that_leaves_is_not_fenced_before_it_has_left() -> None:
    run = HostRun()
    run.up()
    run.feed(model.HostLeaving(host="h1", reason="the host is about to be taken away (SIGTERM)"))
    run.feed(model.GenerationEnded(replica=1, generation=1, reason="it was stopped: SIGTERM"))
    actions = run.stopped(1)
    assert not kinds(actions, model.Fence)
    assert run.wanted()["h1"] == (1, True)
    assert not run.state.groups[1].phase.final, "it goes on elsewhere"
    run.feed(model.AgentDisconnected(host="h1"))
    assert run.wanted()["h1"] == (2, True)
    assert starts(run.launched("h1")) == [("h1", 1, 2)]


def test_an_agent_that_stops_its_groups_unasked_is_leaving() -> None:
    run = HostRun()
    run.up()
    run.feed(model.GenerationEnded(replica=1, generation=1, reason="it was stopped: SIGTERM"))
    run.stopped(1)
    run.stopped(1)
    assert run.host("h1").leaving
    run.feed(model.AgentDisconnected(host="h1"))
    assert run.wanted()["h1"] == (2, True)


def test_whoever_says_it_and_however_often_a_loss_is_one_loss() -> None:
    run = HostRun()
    run.up()
    run.silent("h1")
    for state in ("ended", "down", "failed", "launched", "launching", "ended"):
        run.report("h1", state, attempt=1, **({"kind": "capacity"} if state == "failed" else {}))
    run.timer("agent:h1")
    run.feed(model.AgentDisconnected(host="h1"))
    assert run.wanted()["h1"] == (2, True)
    assert run.host("h1").replaces is None, "its end was told"


def test_an_agent_of_an_older_attempt_is_fenced_whenever_it_comes() -> None:
    run = HostRun()
    run.up()
    run.silent("h1")
    for before_the_next in (True, False):
        (fence,) = kinds(run.connect("h1", attempt=1), model.Fence)
        assert (fence.attempt, fence.reason) == (1, "fenced: host h1 is at attempt 2")
        assert run.host("h1").connected is not before_the_next
        if before_the_next:
            run.launched("h1")
    assert run.host("h1").connected


def test_no_capacity_is_waited_for_with_a_pause_that_doubles_and_without_an_end() -> None:
    run = HostRun()
    waited = []
    for attempt in range(1, 12):
        run.report("h1", "launching")
        waited += pauses(run.report("h1", "failed", kind="capacity", reason="no MI300X anywhere"))
        assert run.wanted()["h1"] == (attempt, False)
        assert run.host("h1").phase is HostPhase.WAITING
        assert "no MI300X anywhere" in (run.state.reason or "")
        run.timer("host:h1")
        assert run.wanted()["h1"] == (attempt + 1, True)
    assert waited == [30, 60, 120, 240, 480, 600, 600, 600, 600, 600, 600]


def test_an_error_is_tried_again_a_few_times_and_then_the_host_is_given_up() -> None:
    run = HostRun()
    waited = []
    for _ in range(MOST_FAULTS):
        waited += pauses(run.report("h1", "failed", kind="error", reason="the API answered 500"))
        run.timer("host:h1")
    assert waited == [30, 60, 120], "the first goes at once, the last was one too many"
    assert run.host("h1").phase is HostPhase.GIVEN_UP
    assert run.state.groups[1].phase is GroupPhase.GIVEN_UP
    assert run.wanted()["h1"] == (5, False)
    for number in (0, 2):
        run.launched(f"h{number}")
        run.runs(number)
    assert run.state.phase is RunPhase.DEGRADED
    assert "host h1 was given up: after 5 attempts: the API answered 500" in (run.state.reason or "")


@pytest.mark.parametrize(("kind", "code"), [("credentials", 1), ("refused", 3)])
def test_what_is_refused_is_not_tried_again_and_fails_a_run_that_needs_it(kind: str, code: int) -> None:
    run = HostRun(dataclasses.replace(LIMITS, min_replicas=3))
    run.report("h1", "failed", kind=kind, reason="quota 0 of 8 MI300X")
    assert run.host("h1").phase is HostPhase.GIVEN_UP
    assert run.state.phase is RunPhase.STOPPING
    for host in ("h0", "h2"):
        run.report(host, "down")
    run.timer("reap")
    assert (run.state.phase, run.state.exit_code) == (RunPhase.FAILED, code)
    assert "quota 0 of 8 MI300X; 2 of 3 replica groups can go on" in (run.state.reason or "")


@pytest.mark.parametrize("kind", ["capacity", "refused", "credentials", "error"])
def test_a_run_whose_failed_launch_left_something_behind_ends_only_when_that_is_down(kind: str) -> None:
    run = HostRun()
    for host in ("h0", "h2"):
        run.report(host, "failed", kind="capacity", reason="no room")
    why = "no room; what there is of h1 may still bill: the API answered 503"
    run.report("h1", "failed", kind=kind, reason=why, left=True)
    assert not run.host("h1").gone
    run.down()
    run.timer("reap")
    assert run.state.phase is RunPhase.STOPPING
    attempt = run.host("h1").attempt
    run.report("h1", "down_failed", attempt=attempt, reason="h1 may still bill: the API answered 503")
    assert run.state.phase is RunPhase.STOPPING
    run.report("h1", "down", attempt=attempt)
    assert run.state.phase is RunPhase.CANCELLED
    assert "may still bill" not in (run.state.reason or "")


def test_what_a_failed_launch_left_behind_is_named_where_it_never_goes() -> None:
    run = HostRun()
    why = "quota; what there is of h1 may still bill: the API answered 503"
    run.report("h1", "failed", kind="refused", reason=why, left=True)
    run.down()
    run.timer("reap")
    run.timer("reap")
    assert run.state.phase is RunPhase.CANCELLED
    assert f"host h1 may still bill: {why}" in (run.state.reason or "")
    assert not run.host("h1").gone


def test_why_an_older_attempt_does_not_go_is_told_at_the_end_and_its_host_is_not_said_to_be_gone() -> None:
    run = HostRun()
    run.up()
    run.silent("h1")
    run.launched("h1")
    run.report("h1", "down_failed", attempt=1, reason="h1 may still bill: the API answered 503")
    run.down()
    for replica in range(3):
        run.stopped(replica)
    run.timer("reap")
    for host in ("h0", "h2"):
        run.report(host, "down")
    run.report("h1", "ended", attempt=2)
    assert run.state.phase is RunPhase.STOPPING
    run.timer("reap")
    assert run.state.phase is RunPhase.CANCELLED
    assert "host h1 may still bill: h1 may still bill: the API answered 503" in (run.state.reason or "")


def test_a_host_of_which_an_older_attempt_may_stand_is_not_made_down_by_the_end() -> None:
    run = HostRun()
    run.up()
    run.silent("h1")
    run.report("h1", "failed", kind="capacity", reason="no room")
    assert (run.host("h1").gone, run.host("h1").replaces) == (True, 1)
    run.down()
    for replica in (0, 2):
        run.stopped(replica)
    run.timer("reap")
    for host in ("h0", "h2"):
        run.report(host, "down")
    run.timer("reap")
    assert run.state.phase is RunPhase.CANCELLED
    assert run.host("h0").phase is HostPhase.DOWN
    assert run.host("h1").phase is not HostPhase.DOWN


def test_a_host_is_not_gone_any_more_where_taking_it_down_has_failed() -> None:
    run = HostRun()
    run.up()
    run.report("h1", "ended", reason="stopped by its provider")
    run.report("h1", "failed", attempt=2, kind="capacity")
    assert run.host("h1").gone
    run.report("h1", "down_failed", attempt=2, reason="h1-a2 may still bill: 503")
    assert not run.host("h1").gone


def test_a_host_that_is_given_up_in_mid_run_fails_it_for_want_of_groups() -> None:
    run = HostRun(dataclasses.replace(LIMITS, min_replicas=3))
    run.up()
    run.report("h1", "ended")
    run.report("h1", "failed", kind="refused", reason="quota")
    assert run.state.exit_code == 4, "capacity was there once"


def test_the_budget_of_restarts_goes_along_to_the_next_host() -> None:
    run = HostRun()
    run.up()
    run.feed(
        model.GenerationEnded(replica=1, generation=1, reason="it died"),
        model.RestartScheduled(replica=1, generation=2, mono_ns=5),
    )
    run.report("h1", "ended")
    (start,) = kinds(run.launched("h1"), StartGroup)
    assert (start.generation, start.max_restarts) == (3, 1)


def test_a_host_that_comes_to_nothing_again_and_again_is_waited_with_and_given_up() -> None:
    run = HostRun()
    run.up()
    waited = pauses(run.silent("h1"))
    for _ in range(MOST_FAULTS):
        run.report("h1", "launching")
        run.report("h1", "launched")
        waited += pauses(run.timer("agent:h1"))
        run.timer("host:h1")
    assert waited == [30, 60, 120], "of use before: at once; of none: at once, and then with pauses"
    assert run.host("h1").phase is HostPhase.GIVEN_UP
    assert "its agent was silent for 600 s" in (run.host("h1").reason or "")


def test_an_agent_has_longer_to_come_than_to_come_back() -> None:
    run = HostRun()
    run.report("h1", "launching")
    (join,) = kinds(run.report("h1", "launched"), SetTimer)
    assert (join.name, join.delay_s) == ("agent:h1", LIMITS.agent_joins_s)
    run.connect("h1")
    silence, _doubt = kinds(run.feed(model.AgentDisconnected(host="h1")), SetTimer)
    assert silence.delay_s == LIMITS.agent_lost_s


def test_a_host_whose_groups_are_over_is_not_had_again() -> None:
    run = HostRun()
    run.up()
    run.done(1)
    run.report("h1", "ended")
    assert run.host("h1").phase is HostPhase.DOWN
    assert run.wanted()["h1"] == (1, False)
    assert run.state.phase is RunPhase.RUNNING


def test_a_host_that_comes_too_late_is_not_waited_for_when_the_others_are_done() -> None:
    run = HostRun()
    run.up()
    run.report("h1", "ended")
    run.feed(*(model.GroupDone(replica=replica, generation=1, step=9) for replica in (0, 2)))
    run.timer("drain")
    assert run.wanted()["h1"] == (2, False)
    run.feed(*(model.RankExited(replica=r, generation=1, rank=0, failure=None) for r in (0, 2)))
    run.timer("reap")
    for host in ("h0", "h1", "h2"):
        run.report(host, "down")
    assert run.state.phase is RunPhase.SUCCEEDED
    assert "replica 1 did not come back before the others finished" in (run.state.reason or "")


def test_nobody_who_asks_is_said_and_changes_nothing_else() -> None:
    run = HostRun()
    run.up()
    run.report("h1", "ended")
    wanted = run.wanted()
    run.feed(model.LauncherGone(silent_s=15.0))
    assert "waiting for launcher" in (run.state.reason or "")
    run.feed(model.LauncherCame())
    assert "waiting for launcher" not in (run.state.reason or "")
    assert run.wanted() == wanted


def test_without_its_journal_a_run_takes_the_newest_attempt_that_dials_and_counts_on_far_beyond() -> None:
    run = HostRun()
    run.feed(model.JournalLost(reason="it is gone", generations=((0, 4), (1, 2))))
    live = model.Snapshot(replica=0, generation=4, state=GroupPhase.RUNNING, live=frozenset({0}))
    run.connect("h0", live, attempt=7)
    assert (run.host("h0").attempt, run.state.groups[0].generation) == (7, 4)
    assert kinds(run.connect("h0", attempt=6), model.Fence)
    run.timer("agent:h1")
    attempt, wanted = run.wanted()["h1"]
    assert wanted
    assert attempt >= 1000, "nobody knows which of the older ones may still come back"
    assert run.host("h1").replaces == 0
