"""Hosts that are provisioned: had one by one, lost, had again, given up, and taken down at the end."""

from __future__ import annotations

import dataclasses

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase, HostPhase, Probe, RunPhase, SetTimer, StartGroup
from sky_monarch.controller.replacing import MOST_FAULTS
from tests.support.host_policies import LIMITS, HostRun
from tests.support.policies import kinds


def starts(actions: list[model.Action]) -> list[tuple[str, int, int]]:
    return [(start.host, start.replica, start.generation) for start in kinds(actions, StartGroup)]


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


# --- the end ---------------------------------------------------------------------------------------------------


def test_the_end_waits_until_every_host_is_down_and_the_head_goes_last() -> None:
    run = HostRun()
    run.up()
    for replica in range(3):
        run.done(replica)
    assert run.state.phase is RunPhase.STOPPING
    assert run.state.reason == "every replica group is done; taking down h0, h1, h2"
    assert all(wanted for _, wanted in run.wanted().values()), "what was printed last is still read"
    actions = run.timer("reap")
    assert not any(wanted for _, wanted in run.wanted().values())
    assert [order.host for order in kinds(actions, model.Shutdown)] == ["h0", "h1", "h2"]
    for host in ("h0", "h1"):
        run.report(host, "down")
    assert run.state.phase is RunPhase.STOPPING
    actions = run.report("h2", "ended")
    assert (run.state.phase, run.state.exit_code) == (RunPhase.SUCCEEDED, 0)
    assert run.state.reason == "every replica group is done"
    assert [order.host for order in kinds(actions, model.Shutdown)] == ["head"]


def test_a_host_that_cannot_be_taken_down_is_named_at_the_limit_as_what_may_still_bill() -> None:
    run = HostRun()
    run.up()
    run.down()
    for replica in range(3):
        run.stopped(replica)
    run.timer("reap")
    run.report("h0", "down")
    run.report("h1", "down_failed", reason="the API answered 500")
    assert run.state.phase is RunPhase.STOPPING, "it is tried again until the limit"
    run.timer("reap")
    assert (run.state.phase, run.state.exit_code) == (RunPhase.CANCELLED, 8)
    assert run.state.reason == (
        "down was called; host h1 may still bill: the API answered 500; "
        "host h2 may still bill: nobody has said within 600 s that it is down"
    )


def test_down_while_hosts_are_launched_cancels_them_at_once() -> None:
    run = HostRun()
    run.launched("h0")
    run.report("h1", "launching")
    run.down()
    assert run.wanted() == {"h0": (1, True), "h1": (1, False), "h2": (1, False)}
    run.stopped(0)
    run.timer("reap")
    for host in ("h0", "h1", "h2"):
        run.report(host, "down")
    assert run.state.phase is RunPhase.CANCELLED


def test_down_before_anybody_has_asked_waits_for_nobody() -> None:
    state = model.initial_state({"head": (), "h0": (0,)}, setup=False, provisioned={"h0"})
    limits = dataclasses.replace(LIMITS, replicas=1, min_replicas=1)
    for event in (model.ControllerStarted(), model.DownRequested(grace_s=1.0, reason="down")):
        state = model_step(state, event, limits)
    assert state.phase is RunPhase.CANCELLED


def model_step(state: model.State, event: model.Event, limits: model.Limits) -> model.State:
    from sky_monarch.controller.policy import step

    return step(state, event, limits).state


def test_a_spent_budget_ends_the_run_in_order() -> None:
    run = HostRun()
    run.up()
    run.feed(model.BudgetSpent(reason="the budget is spent: 50.01 of max_usd 50"))
    assert run.state.phase is RunPhase.STOPPING
    for replica in range(3):
        run.stopped(replica)
    run.timer("reap")
    for host in ("h0", "h1", "h2"):
        run.report(host, "down")
    assert (run.state.phase, run.state.exit_code) == (RunPhase.FAILED, 9)
    assert run.state.reason == "the budget is spent: 50.01 of max_usd 50"


# --- preparation -----------------------------------------------------------------------------------------------


def prepared(host: str, failure: str | None = None, *, killed: bool = False) -> list[model.Event]:
    return [
        model.SetupStarted(host=host),
        model.SetupFinished(host=host, failure=failure, killed=killed),
    ]


def test_a_host_is_set_up_alone_and_a_replacement_again() -> None:
    run = HostRun(setup=True)
    assert not kinds(run.actions, model.Setup), "nothing of the job runs on the head"
    assert [order.host for order in kinds(run.launched("h0"), model.Setup)] == ["h0"]
    assert starts(run.feed(*prepared("h0"))) == [("h0", 0, 1)]
    run.runs(0)
    run.report("h0", "ended")
    assert [order.host for order in kinds(run.launched("h0"), model.Setup)] == ["h0"]
    assert starts(run.feed(*prepared("h0"))) == [("h0", 0, 2)]


def test_a_host_that_is_taken_away_in_its_setup_is_replaced() -> None:
    run = HostRun(setup=True)
    run.launched("h0")
    run.feed(*prepared("h0", "it was killed by SIGTERM", killed=True))
    assert run.wanted()["h0"] == (2, True)
    assert run.state.phase is not RunPhase.FAILED_SETUP


def test_a_setup_that_fails_before_anything_ran_is_the_jobs_own_fault() -> None:
    run = HostRun(setup=True)
    run.launched("h0")
    run.feed(*prepared("h0", "it exited with code 3"))
    assert run.state.outcome is RunPhase.FAILED_SETUP


def test_a_setup_that_fails_on_a_replacement_ends_nobody_who_trains() -> None:
    run = HostRun(setup=True)
    for number in range(3):
        run.launched(f"h{number}")
        run.feed(*prepared(f"h{number}"))
        run.runs(number)
    run.report("h1", "ended")
    for _ in range(MOST_FAULTS):
        run.launched("h1")
        run.feed(*prepared("h1", "it exited with code 3"))
        assert run.state.phase is RunPhase.DEGRADED
        run.timer("host:h1")
    assert run.host("h1").phase is HostPhase.GIVEN_UP
    assert "setup failed: it exited with code 3" in (run.state.reason or "")


# --- the pair test ---------------------------------------------------------------------------------------------


def reached(host: str, **errors: str) -> model.Reached:
    return model.Reached(host=host, targets=tuple(errors.items()))


def test_a_group_starts_once_its_host_and_all_others_have_reached_each_other() -> None:
    run = HostRun()
    assert starts(run.launched("h0", probe="10.0.0.1:1")), "there is nobody else yet"
    actions = run.launched("h1", probe="10.0.0.2:2")
    asked = {
        order.host: [(t.host, t.attempt, t.address) for t in order.targets] for order in kinds(actions, Probe)
    }
    assert asked == {"h1": [("h0", 1, "10.0.0.1:1")], "h0": [("h1", 1, "10.0.0.2:2")]}
    assert not starts(actions)
    assert not starts(run.feed(reached("h1", h0="")))
    assert starts(run.feed(reached("h0", h1=""))) == [("h1", 1, 1)]


def test_hosts_that_cannot_talk_end_a_run_that_has_not_begun_and_are_both_named() -> None:
    run = HostRun()
    run.launched("h0", probe="10.0.0.1:1")
    run.launched("h1", probe="10.0.0.2:2")
    run.feed(reached("h1", h0=""), reached("h0", h1="10.0.0.1 cannot reach 10.0.0.2:2: timed out"))
    assert (run.state.outcome, run.state.exit_code) == (RunPhase.FAILED, 1)
    assert run.state.reason is not None
    assert "hosts h1 and h0 cannot talk: 10.0.0.1 cannot reach 10.0.0.2:2: timed out" in run.state.reason


def test_a_replacement_that_cannot_be_reached_is_replaced_and_nobody_else() -> None:
    run = HostRun()
    for number in range(3):
        run.launched(f"h{number}", probe=f"10.0.0.{number}:1")
        for other in range(number):
            run.feed(reached(f"h{number}", **{f"h{other}": ""}), reached(f"h{other}", **{f"h{number}": ""}))
        run.runs(number)
    run.report("h1", "ended")
    run.launched("h1", probe="10.0.9.9:1")
    run.feed(reached("h1", h0="no route", h2=""))
    assert run.host("h1").connected, "h0 may be dead: it has said nothing yet"
    run.feed(reached("h0", h1=""))
    assert run.wanted()["h1"] == (3, True)
    assert run.state.phase is RunPhase.DEGRADED


def test_who_does_not_answer_may_be_dead_and_holds_up_nobody() -> None:
    run = HostRun()
    run.launched("h0", probe="10.0.0.1:1")
    run.launched("h1", probe="10.0.0.2:2")
    run.feed(reached("h1", h0="timed out"))
    assert starts(run.timer("probe:h1")) == [("h1", 1, 1)]
    assert run.state.outcome is None


def test_a_host_that_is_lost_is_not_waited_for_by_those_that_tried_to_reach_it() -> None:
    run = HostRun()
    run.launched("h0", probe="10.0.0.1:1")
    run.launched("h1", probe="10.0.0.2:2")
    assert starts(run.report("h0", "ended")) == [("h1", 1, 1)]


def test_a_question_that_was_lost_with_its_line_is_asked_again() -> None:
    run = HostRun()
    run.launched("h0", probe="10.0.0.1:1", incarnation=70)
    run.launched("h1", probe="10.0.0.2:2", incarnation=71)
    run.feed(model.AgentDisconnected(host="h0"), model.AgentDisconnected(host="h1"))
    again = run.connect("h1", incarnation=71, probe="10.0.0.2:2")
    again += run.connect("h0", incarnation=70, probe="10.0.0.1:1")
    assert {order.host for order in kinds(again, Probe)} == {"h0", "h1"}


# --- without a journal -----------------------------------------------------------------------------------------


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
