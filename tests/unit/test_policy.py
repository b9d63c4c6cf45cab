"""The policy: what follows from what, and what holds whatever happens."""

from __future__ import annotations

import dataclasses

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase, RunPhase, SetupPhase, StartGroup, StopGroup
from sky_monarch.controller.policy import step
from tests.support.policies import LIMITS, Run, kinds


def test_groups_start_once_their_host_connects():
    run = Run()
    starts = kinds(run.connect(), StartGroup)
    assert [(start.replica, start.generation, start.max_restarts) for start in starts] == [
        (0, 1, 2),
        (1, 1, 2),
        (2, 1, 2),
    ]
    assert run.state.phase is RunPhase.STARTING
    run.runs(0, 1)
    assert run.state.phase is RunPhase.RUNNING


def test_no_group_starts_before_setup_has_succeeded():
    run = Run(setup=True)
    actions = run.connect()
    assert kinds(actions, model.Setup)
    assert not kinds(actions, StartGroup)
    assert run.state.phase is RunPhase.SETUP
    actions = run.feed(model.SetupStarted(host="local"), model.SetupFinished(host="local", failure=None))
    assert len(kinds(actions, StartGroup)) == 3


def test_a_failed_setup_ends_the_run_before_it_starts():
    run = Run(setup=True)
    run.connect()
    actions = run.feed(
        model.SetupStarted(host="local"),
        model.SetupFinished(host="local", failure="it exited with code 3"),
    )
    assert run.state.phase is RunPhase.FAILED_SETUP
    assert run.state.exit_code == 5
    assert run.state.reason == "setup failed: it exited with code 3"
    assert kinds(actions, model.Shutdown)
    assert not kinds(run.actions, StartGroup)


def test_down_during_setup_cancels_at_once_and_never_starts_a_group():
    run = Run(setup=True)
    run.connect()
    run.feed(model.SetupStarted(host="local"))
    assert kinds(run.down(), model.Shutdown)
    assert run.state.phase is RunPhase.CANCELLED
    assert run.state.exit_code == 8
    before = run.state
    run.feed(model.SetupFinished(host="local", failure="it was killed by SIGTERM"))
    assert (run.state.phase, run.state.reason) == (before.phase, before.reason)
    assert run.down() == []
    assert not kinds(run.actions, StartGroup)


def test_a_spent_budget_degrades_the_run_while_min_replicas_holds_and_then_fails_it_root_cause_first():
    run = Run()
    run.up()
    run.give_up(1, reason="rank 0 exited with code 7")
    assert run.state.phase is RunPhase.DEGRADED
    assert "rank 0 exited with code 7" in (run.state.reason or "")
    actions = run.give_up(2, reason="rank 0 was killed by SIGKILL")
    assert run.state.phase is RunPhase.STOPPING
    assert [stop.replica for stop in kinds(actions, StopGroup)] == [0]
    run.stopped(0)
    assert run.state.phase is RunPhase.FAILED
    assert run.state.exit_code == 4
    assert run.state.reason == (
        "replica 1 was given up after 2 restarts: rank 0 exited with code 7; "
        "1 of 3 replica groups can go on, min_replicas is 2"
    )


def test_all_groups_done_is_success():
    run = Run()
    run.up()
    for replica in range(3):
        run.done(replica)
    assert (run.state.phase, run.state.exit_code) == (RunPhase.SUCCEEDED, 0)
    assert kinds(run.actions, model.Shutdown)


def test_while_the_last_ranks_leave_the_reason_says_so():
    run = Run()
    run.up()
    for replica in range(3):
        run.done(replica, left=False)
    assert run.state.phase is RunPhase.RUNNING
    assert run.state.reason == "every replica group is done, the ranks are leaving"
    for replica in range(3):
        run.leaves(replica)
    assert (run.state.phase, run.state.reason) == (RunPhase.SUCCEEDED, "every replica group is done")


def test_a_group_without_a_session_runs_once_all_its_ranks_do():
    run = Run(dataclasses.replace(LIMITS, ranks_per_replica=2))
    run.connect()
    run.feed(model.GenerationStarted(replica=0, generation=1))
    for rank in range(2):
        run.feed(model.RankSpawned(replica=0, rank=rank, generation=1))
    assert run.state.groups[0].phase is GroupPhase.STARTING, "a session may still come"
    run.feed(model.RanksUp(replica=0, generation=1))
    assert run.state.groups[0].phase is GroupPhase.RUNNING
    run.feed(
        model.GenerationEnded(replica=0, generation=1, reason="rank 0 exited with code 7"),
        model.RestartScheduled(replica=0, generation=2, mono_ns=1),
    )
    run.feed(model.GenerationStarted(replica=0, generation=2), model.RanksUp(replica=0, generation=1))
    assert run.state.groups[0].phase is GroupPhase.STARTING, "an older generation has nothing to say"
    run.feed(model.RanksUp(replica=0, generation=2))
    assert (run.state.groups[0].phase, run.state.groups[0].reason) == (GroupPhase.RUNNING, None)


def test_success_with_a_group_given_up_says_so():
    run = Run()
    run.up()
    run.give_up(1)
    run.done(0)
    run.done(2)
    assert run.state.phase is RunPhase.SUCCEEDED
    assert "replica 1 was given up" in (run.state.reason or "")


def test_donors_stay_until_all_are_done_and_are_released_then():
    run = Run()
    run.up()
    actions = run.done(0, left=False)
    assert [timer.name for timer in kinds(actions, model.SetTimer)] == ["drain"]
    assert not kinds(run.done(1, left=False), model.Release)
    assert len(kinds(run.done(2, left=False), model.Release)) == 1
    assert not run.state.phase.ended, "their ranks are still there"
    for replica in range(3):
        run.leaves(replica)
    assert run.state.phase is RunPhase.SUCCEEDED


def test_a_straggler_is_stopped_when_the_drain_window_closes():
    run = Run()
    run.up()
    run.done(0, left=False)
    run.done(1, left=False)
    actions = run.feed(model.TimerFired(name="drain"))
    assert kinds(actions, model.Release)
    assert [stop.replica for stop in kinds(actions, StopGroup)] == [2]
    run.stopped(2)
    run.leaves(0)
    run.leaves(1)
    assert run.state.phase is RunPhase.SUCCEEDED
    assert "replica 2 was stopped" in (run.state.reason or "")


def test_scripts_without_a_session_are_never_stopped_by_the_drain_window():
    run = Run()
    run.up()
    run.done(0, at=None)
    run.done(1, at=None)
    assert not kinds(run.feed(model.TimerFired(name="drain")), StopGroup)
    assert run.state.phase is RunPhase.RUNNING
    run.done(2, at=None)
    assert run.state.phase is RunPhase.SUCCEEDED


def test_donors_that_are_too_few_for_min_replicas_stay_after_the_window():
    run = Run()
    run.up()
    run.done(0, left=False)
    actions = run.feed(model.TimerFired(name="drain"))
    assert not kinds(actions, model.Release)
    assert "drain" in [timer.name for timer in kinds(actions, model.SetTimer)], "the window opens anew"


def test_released_ranks_that_never_leave_are_stopped_and_the_run_has_succeeded():
    run = Run()
    run.up()
    for replica in range(3):
        run.done(replica, left=replica > 0)
    assert [stop.replica for stop in kinds(run.feed(model.TimerFired(name="leave")), StopGroup)] == [0]
    run.leaves(0)
    assert run.state.phase is RunPhase.SUCCEEDED
    assert "replica 0 did not leave" in (run.state.reason or "")


def test_a_rank_that_fails_after_its_work_was_done_fails_a_run_that_needed_it():
    run = Run(dataclasses.replace(LIMITS, min_replicas=3))
    run.up()
    for replica in range(3):
        run.done(replica, left=False)
    run.leaves(0)
    run.leaves(1, failure="rank 0 exited with code 1")
    run.leaves(2)
    assert (run.state.phase, run.state.exit_code) == (RunPhase.FAILED, 1)
    assert "replica 1, after it was done: rank 0 exited with code 1" in (run.state.reason or "")


def test_down_stops_every_group_and_a_second_down_changes_nothing():
    run = Run()
    run.up()
    assert {(stop.replica, stop.grace_s) for stop in kinds(run.down(), StopGroup)} == {(0, 3), (1, 3), (2, 3)}
    assert run.down() == []
    for replica in range(3):
        assert run.state.phase is RunPhase.STOPPING
        run.stopped(replica)
    assert (run.state.phase, run.state.exit_code) == (RunPhase.CANCELLED, 8)
    assert run.down() == []


def test_a_stop_that_nobody_confirms_ends_at_its_deadline():
    run = Run()
    run.up()
    run.down()
    run.stopped(0)
    run.feed(model.TimerFired(name="stop"))
    assert run.state.phase is RunPhase.CANCELLED
    assert "replica 1, replica 2 did not report" in (run.state.reason or "")


def test_an_agent_that_reconnects_keeps_its_groups():
    run = Run()
    run.up()
    run.feed(model.AgentDisconnected(host="local"))
    live = [
        model.Snapshot(replica=r, generation=1, state=GroupPhase.RUNNING, live=frozenset({0}))
        for r in range(3)
    ]
    assert not kinds(run.connect(*live), StartGroup | StopGroup)
    assert run.state.phase is RunPhase.RUNNING


def test_an_order_that_was_lost_with_its_connection_is_given_again():
    run = Run()
    run.connect()
    run.feed(model.AgentDisconnected(host="local"))
    starts = kinds(run.connect(), StartGroup)
    assert [(start.replica, start.generation) for start in starts] == [(0, 1), (1, 1), (2, 1)]


def test_a_stop_that_was_lost_with_its_connection_is_given_again():
    run = Run()
    run.up()
    run.feed(model.AgentDisconnected(host="local"))
    assert not kinds(run.down(), StopGroup), "nobody is there to be told"
    live = [
        model.Snapshot(replica=r, generation=1, state=GroupPhase.RUNNING, live=frozenset({0}))
        for r in range(3)
    ]
    assert [stop.replica for stop in kinds(run.connect(*live), StopGroup)] == [0, 1, 2]
    assert run.state.phase is RunPhase.STOPPING


def test_what_is_over_or_told_to_stop_stays_so_whatever_comes_late():
    run = Run()
    run.up()
    run.give_up(1)
    run.done(0)
    for replica in (0, 1):
        before = run.state.groups[replica].phase
        run.feed(
            model.RestartScheduled(replica=replica, generation=2, mono_ns=1),
            model.FirstCommit(replica=replica, generation=2),
        )
        assert run.state.groups[replica].phase is before
    run.feed(model.GroupDone(replica=1, generation=2, step=120))
    assert run.state.groups[1].phase is GroupPhase.GIVEN_UP
    run.down()
    run.feed(model.FirstCommit(replica=2, generation=1))
    assert run.state.groups[2].phase is GroupPhase.STOPPING


def test_a_generation_that_starts_after_its_group_was_given_up_is_ended():
    run = Run()
    run.up()
    run.give_up(1)
    actions = run.feed(model.GenerationStarted(replica=1, generation=2))
    assert [stop.replica for stop in kinds(actions, StopGroup)] == [1]


def test_an_agent_that_restarted_costs_each_of_its_groups_one_restart_of_the_budget():
    run = Run()
    run.up()
    for incarnation, generation, left in ((8, 2, 1), (9, 3, 0)):
        run.feed(model.AgentDisconnected(host="local"))
        starts = kinds(run.connect(incarnation=incarnation), StartGroup)
        assert {(start.generation, start.max_restarts) for start in starts} == {(generation, left)}
    run.feed(model.AgentDisconnected(host="local"))
    assert not kinds(run.connect(incarnation=10), StartGroup)
    assert run.state.phase is RunPhase.FAILED


def test_what_was_spent_before_an_agent_restarted_is_given_back_in_time():
    seconds = 10**9
    run = Run()
    run.up()
    run.feed(model.RestartScheduled(replica=0, generation=2, mono_ns=100 * seconds))
    run.feed(model.AgentDisconnected(host="local"))
    starts = kinds(run.connect(incarnation=8, mono_ns=340 * seconds), StartGroup)
    assert [(start.max_restarts, start.spent_s) for start in starts] == [
        (0, (240.0, 0.0)),
        (1, (0.0,)),
        (1, (0.0,)),
    ]


def test_no_generation_that_an_agent_began_untold_is_begun_again_and_each_was_a_restart():
    run = Run(dataclasses.replace(LIMITS, max_restarts=4))
    run.up()
    run.feed(model.AgentDisconnected(host="local"))
    back = model.AgentConnected(host="local", incarnation=8, mono_ns=5, groups=(), begun=((1, 3),))
    starts = kinds(run.feed(back), StartGroup)
    assert [(start.generation, start.max_restarts) for start in starts] == [(2, 3), (4, 1), (2, 3)]
    run.feed(model.AgentDisconnected(host="local"))
    starts = kinds(run.feed(dataclasses.replace(back, incarnation=9, begun=((1, 99),))), StartGroup)
    assert [(start.replica, start.generation) for start in starts] == [(0, 3), (2, 3)]
    assert run.state.groups[1].phase is GroupPhase.GIVEN_UP, (
        "the budget is no larger for what nobody heard of"
    )


def test_restarts_before_the_machine_was_started_anew_are_forgotten_a_window_later():
    seconds = 10**9
    run = Run()
    run.up()
    run.feed(model.RestartScheduled(replica=0, generation=2, mono_ns=9_000_000 * seconds))
    run.feed(model.AgentDisconnected(host="local"))
    starts = kinds(run.connect(incarnation=8, mono_ns=50 * seconds), StartGroup)
    assert starts[0].spent_s == (0.0, 0.0), "nobody can say how long ago it was"
    run.feed(model.AgentDisconnected(host="local"))
    later = 50 + LIMITS.window_s + 1
    (start, *_) = kinds(run.connect(incarnation=9, mono_ns=round(later * seconds)), StartGroup)
    assert (start.max_restarts, start.spent_s) == (1, (0.0,))


def test_a_silent_agent_fails_the_run_after_its_limit_and_a_short_silence_does_not():
    run = Run()
    run.up()
    timers = kinds(run.feed(model.AgentDisconnected(host="local")), model.SetTimer)
    assert [(timer.name, timer.delay_s) for timer in timers] == [("agent:local", 30.0)]
    assert run.state.phase is RunPhase.RUNNING
    run.feed(model.TimerFired(name="agent:local"))
    assert run.state.phase is RunPhase.FAILED
    assert "the agent of host local was silent for 30 s" in (run.state.reason or "")


def test_a_stop_of_a_group_that_the_agent_never_had_is_confirmed_at_once():
    run = Run()
    run.connect()
    run.down()
    for replica in range(3):
        run.feed(model.GroupStopped(replica=replica, generation=0))
    assert run.state.phase is RunPhase.CANCELLED


def test_groups_that_their_agent_stopped_by_itself_fail_the_run_with_its_reason():
    run = Run()
    run.up()
    for replica in range(3):
        reason = "it was stopped: the host is taken away"
        run.feed(model.GenerationEnded(replica=replica, generation=1, reason=reason))
        run.stopped(replica)
    assert run.state.phase is RunPhase.FAILED
    assert (run.state.reason or "").startswith("replica 0: it was stopped: the host is taken away")


def test_a_success_without_a_group_that_its_agent_stopped_says_so():
    run = Run()
    run.up()
    run.feed(model.GenerationEnded(replica=1, generation=1, reason="it was stopped: the host is taken away"))
    run.stopped(1)
    for replica in (0, 2):
        run.done(replica)
    assert "note: replica 1: it was stopped: the host is taken away" in (run.state.reason or "")


def test_an_older_generation_has_nothing_to_say():
    run = Run()
    run.up()
    run.runs(0, 2)
    before = run.state
    run.feed(
        model.GroupDone(replica=0, generation=1, step=120),
        model.RankExited(replica=0, rank=0, generation=1, failure="late"),
    )
    assert run.state == before


def test_hosts_must_place_every_replica_once():
    with pytest.raises(ValueError, match="once"):
        model.initial_state({"a": (0, 1), "b": (1,)}, setup=False)


def test_setup_runs_again_where_its_order_was_lost_or_its_agent_died_and_only_there():
    run = Run(setup=True)
    run.connect()
    run.feed(model.AgentDisconnected(host="local"))
    assert kinds(run.connect(), model.Setup), "the order may have been lost"
    run.feed(model.SetupStarted(host="local"), model.AgentDisconnected(host="local"))
    assert not kinds(run.connect(), model.Setup), "the same agent goes on with it"
    run.feed(model.AgentDisconnected(host="local"))
    assert kinds(run.connect(incarnation=8), model.Setup)
    assert run.state.hosts[0].setup is SetupPhase.SENT


@pytest.mark.parametrize(("min_replicas", "phase"), [(2, RunPhase.DEGRADED), (3, RunPhase.STOPPING)])
def test_a_host_that_never_comes_is_named_and_costs_the_run_its_groups_alone(min_replicas, phase):
    limits = dataclasses.replace(LIMITS, min_replicas=min_replicas)
    state = model.initial_state({"a": (0,), "b": (1,), "c": (2,)}, setup=False)
    state, actions = step(state, model.ControllerStarted(), limits)
    assert [action.name for action in actions] == ["agent:a", "agent:b", "agent:c"], (
        "each has its time to come"
    )
    for host in "ab":
        event = model.AgentConnected(host=host, incarnation=1, mono_ns=0, groups=())
        state, actions = step(state, event, limits)
        assert kinds(list(actions), StartGroup), "who is there does not wait for who is not"
    state, actions = step(state, model.TimerFired(name="agent:c"), limits)
    assert state.phase is phase
    assert "the agent of host c was silent for 30 s" in state.reason
    if phase is RunPhase.DEGRADED:
        assert "replica 2" in state.reason
    else:
        assert "2 of 3 replica groups can go on, min_replicas is 3" in state.reason
        assert state.exit_code == 4


def test_a_long_list_of_lost_groups_is_cut_short_in_the_reason():
    run = Run(dataclasses.replace(LIMITS, replicas=30, min_replicas=1))
    run.up()
    for replica in range(20):
        run.give_up(replica)
    assert run.state.phase is RunPhase.DEGRADED
    assert "replica 7, others" in run.state.reason
