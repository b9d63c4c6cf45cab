"""The policy: what follows from what, and what holds whatever happens."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase, Limits, RunPhase, SetupPhase, StartGroup, StopGroup
from sky_monarch.controller.policy import step

LIMITS = Limits(replicas=3, min_replicas=2, ranks_per_replica=1, max_restarts=2, window_s=600.0, grace_s=5.0)
AGENT = 7


class Run:
    """Feeds events in order and keeps what was wanted."""

    def __init__(self, limits: Limits = LIMITS, *, setup: bool = False) -> None:
        self.limits = limits
        self.state = model.initial_state({"local": tuple(range(limits.replicas))}, setup=setup)
        self.actions: list[model.Action] = []
        self.feed(model.ControllerStarted())

    def feed(self, *events: model.Event) -> list[model.Action]:
        new: list[model.Action] = []
        for event in events:
            self.state, actions = step(self.state, event, self.limits)
            new += actions
        self.actions += new
        return new

    def connect(
        self, *groups: model.Snapshot, incarnation: int = AGENT, mono_ns: int = 0
    ) -> list[model.Action]:
        return self.feed(
            model.AgentConnected(host="local", incarnation=incarnation, mono_ns=mono_ns, groups=groups)
        )

    def up(self, *, incarnation: int = AGENT) -> None:
        self.connect(incarnation=incarnation)
        for replica in range(self.limits.replicas):
            self.runs(replica, 1)

    def runs(self, replica: int, generation: int) -> None:
        self.feed(
            model.GenerationStarted(replica=replica, generation=generation),
            model.RankSpawned(replica=replica, rank=0, generation=generation),
            model.FirstCommit(replica=replica, generation=generation),
        )

    def give_up(self, replica: int, *, reason: str = "rank 0 exited with code 7") -> list[model.Action]:
        generation = self.state.groups[replica].generation
        return self.feed(
            model.RankExited(replica=replica, rank=0, generation=generation, failure=reason),
            model.GenerationEnded(replica=replica, generation=generation, reason=reason),
            model.GroupGivenUp(replica=replica, generation=generation, restarts=2, reason=reason),
        )

    def done(self, replica: int, *, at: int | None = 120, left: bool = True) -> list[model.Action]:
        generation = self.state.groups[replica].generation
        actions = self.feed(model.GroupDone(replica=replica, generation=generation, step=at))
        return actions + (self.leaves(replica) if left else [])

    def leaves(self, replica: int, *, failure: str | None = None) -> list[model.Action]:
        generation = self.state.groups[replica].generation
        return self.feed(model.RankExited(replica=replica, rank=0, generation=generation, failure=failure))

    def stopped(self, replica: int) -> list[model.Action]:
        generation = self.state.groups[replica].generation
        return self.feed(model.GroupStopped(replica=replica, generation=generation))

    def down(self) -> list[model.Action]:
        return self.feed(model.DownRequested(grace_s=3.0, reason="down was called"))


def kinds(actions: list[model.Action], kind: type) -> list:
    return [action for action in actions if isinstance(action, kind)]


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


@settings(
    max_examples=80, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow], deadline=None
)
class _AnyHistory(RuleBasedStateMachine):
    """Agents that do whatever the protocol lets them do, in any order, with restarts of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(dataclasses.replace(LIMITS, window_s=1e9))
        self.connected = False
        self.incarnation = 1
        self.agent: dict[int, dict] = {}  # what the agent has: replica -> generation, live, left, over
        self.spent = dict.fromkeys(range(3), 0)
        self.given_up: set[int] = set()
        self.clock = 0

    def tell(self, event: model.Event) -> None:
        before = self.run.state
        actions = self.run.feed(event)
        self.clock += 1
        state = self.run.state
        if before.phase.ended:
            assert state.phase is before.phase, "an end is final"
            assert not kinds(actions, StartGroup)
        for action in actions:
            if not isinstance(action, model.CancelTimer):
                assert action.reason, "every decision carries its reason"
            if isinstance(action, StartGroup):
                assert state.phase not in (RunPhase.STOPPING,), "nothing starts while the run stops"
                assert action.replica not in self.given_up, "I5"
                self._start(action)
            elif isinstance(action, StopGroup):
                self._stop(action.replica)
            elif isinstance(action, model.Shutdown):
                for replica in list(self.agent):
                    self._stop(replica)
        if state.phase is not before.phase and state.phase in (RunPhase.DEGRADED, RunPhase.STOPPING):
            assert state.reason

    def _start(self, action: StartGroup) -> None:
        mine = self.agent.get(action.replica)
        if mine is not None and mine["live"]:
            assert action.generation == mine["generation"], "I1: a live generation is never doubled"
            return
        known = self.run.state.groups[action.replica].generation
        assert action.generation >= known
        self.agent[action.replica] = {
            "generation": action.generation,
            "live": True,
            "left": action.max_restarts,
            "over": False,
            "phase": GroupPhase.RUNNING,
        }

    def _stop(self, replica: int) -> None:
        mine = self.agent.get(replica)
        if mine is not None and mine["live"]:
            mine["live"] = False
            mine["stopping"] = True
            mine["phase"] = GroupPhase.STOPPED

    def _busy(self) -> list[int]:
        return [r for r, mine in self.agent.items() if mine["live"] and not mine["over"]]

    @rule()
    def connect(self) -> None:
        if not self.connected:
            self.connected = True
            snapshots = tuple(
                model.Snapshot(
                    replica=replica,
                    generation=mine["generation"],
                    state=mine["phase"],
                    live=frozenset({0}) if mine["live"] else frozenset(),
                )
                for replica, mine in self.agent.items()
            )
            self.tell(
                model.AgentConnected(
                    host="local", incarnation=self.incarnation, mono_ns=self.clock, groups=snapshots
                )
            )

    @precondition(lambda self: self.connected)
    @rule(lose_agent=st.booleans())
    def disconnect(self, lose_agent: bool) -> None:
        self.connected = False
        self.tell(model.AgentDisconnected(host="local"))
        if lose_agent:
            for replica, mine in self.agent.items():
                if mine["live"] and not mine["over"]:
                    self.spent[replica] += 1
            self.agent.clear()
            self.incarnation += 1

    @precondition(lambda self: not self.connected)
    @rule()
    def controller_restarts(self) -> None:
        self.tell(model.ControllerStarted())

    @precondition(lambda self: self.connected and self._busy())
    @rule(data=st.data())
    def a_rank_dies(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self._busy()))
        mine = self.agent[replica]
        generation = mine["generation"]
        whose = {"replica": replica, "generation": generation}
        self.tell(model.RankExited(**whose, rank=0, failure="died"))
        self.tell(model.GenerationEnded(**whose, reason="died"))
        if not mine["live"]:
            return  # told to stop meanwhile
        if mine["left"] == 0:
            mine["over"], mine["live"], mine["phase"] = True, False, GroupPhase.GIVEN_UP
            self.given_up.add(replica)
            self.tell(model.GroupGivenUp(**whose, restarts=2, reason="died"))
            return
        mine["left"] -= 1
        self.spent[replica] += 1
        mine["generation"] += 1
        whose["generation"] += 1
        self.tell(model.RestartScheduled(**whose, mono_ns=self.clock))
        self.tell(model.GenerationStarted(**whose))
        self.tell(model.RankSpawned(**whose, rank=0))

    @precondition(lambda self: self.connected and self._busy())
    @rule(data=st.data())
    def a_group_finishes(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self._busy()))
        mine = self.agent[replica]
        mine["over"], mine["live"], mine["phase"] = True, False, GroupPhase.DONE
        whose = {"replica": replica, "generation": mine["generation"]}
        self.tell(model.GroupDone(**whose, step=9))
        self.tell(model.RankExited(**whose, rank=0, failure=None))

    @precondition(lambda self: self.connected)
    @rule()
    def stops_are_confirmed(self) -> None:
        for replica, mine in list(self.agent.items()):
            if mine.pop("stopping", False):
                self.tell(model.GroupStopped(replica=replica, generation=mine["generation"]))

    @rule()
    def down(self) -> None:
        self.tell(model.DownRequested(grace_s=1.0, reason="down"))

    @rule(name=st.sampled_from(["drain", "leave", "agent:local", "stop"]))
    def a_timer_fires(self, name: str) -> None:
        self.tell(model.TimerFired(name=name))

    @invariant()
    def i3_restarts_stay_within_the_budget(self) -> None:
        for replica, mine in self.agent.items():
            if mine["live"]:
                assert self.spent[replica] + mine["left"] <= LIMITS.max_restarts

    @invariant()
    def i5_what_is_given_up_stays_so(self) -> None:
        for replica in self.given_up:
            assert self.run.state.groups[replica].phase in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED)

    @invariant()
    def i8_nothing_is_alive_where_a_run_ended_and_its_agent_listens(self) -> None:
        if self.run.state.phase.ended and self.connected:
            assert not any(mine["live"] for mine in self.agent.values())

    @invariant()
    def an_end_has_its_reason_and_exit_code(self) -> None:
        state = self.run.state
        if state.phase.ended:
            assert state.reason
            assert (state.exit_code == 0) == (state.phase is RunPhase.SUCCEEDED)
        if state.phase is RunPhase.SUCCEEDED:
            done = [group for group in state.groups if group.phase is GroupPhase.DONE]
            assert len(done) >= LIMITS.min_replicas


TestAnyHistory = _AnyHistory.TestCase


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
