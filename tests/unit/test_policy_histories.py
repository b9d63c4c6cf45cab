"""Whatever agents do, in any order: the invariants of the policy hold.

Of the invariants of the design these are the policy's: I1 one live generation a group, I3 the budget, I5 what is
given up stays so, I6 one outstanding order to provide for a host, I8 nothing alive after the end. I2 (no act without
its row) is the controller's (`test_adoption.py`), I4 (evict before spawn) the agent's, I7 (one quorum a step) the
lighthouse's, I9 (no sample twice) the session's.
"""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase, RunPhase, StartGroup, StopGroup
from sky_monarch.controller.policy import step
from tests.support.policies import LIMITS, Run, kinds


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
        self.told: list[model.Event] = []

    def tell(self, event: model.Event) -> None:
        before = self.run.state
        actions = self.run.feed(event)
        self.told.append(event)
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

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def an_event_comes_again_and_late(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.told))
        if hasattr(event, "generation"):
            before = self.run.state.groups[event.replica]
            self.tell(event)
            after = self.run.state.groups[event.replica]
            assert after.restarts_ns == before.restarts_ns, "I3: heard twice, it was one restart"
            assert after.generation == before.generation, "I1: generations only grow"

    @rule()
    def down(self) -> None:
        self.tell(model.DownRequested(grace_s=1.0, reason="down"))

    @rule(name=st.sampled_from(["drain", "leave", "agent:local", "stop"]))
    def a_timer_fires(self, name: str) -> None:
        self.tell(model.TimerFired(name=name))

    @invariant()
    def i1_what_lives_is_what_the_policy_takes_it_for(self) -> None:
        if self.connected and not self.run.state.phase.ended:
            for replica, mine in self.agent.items():
                assert self.run.state.groups[replica].generation == mine["generation"]

    @invariant()
    def what_is_at_hand_of_all_groups_is_what_they_come_to(self) -> None:
        groups = self.run.state.groups
        assert groups == model.Groups.of(list(groups))

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


@settings(max_examples=60, stateful_step_count=30, deadline=None)
class _AnySetup(RuleBasedStateMachine):
    """Three hosts that are prepared, come, go and die in any order."""

    def __init__(self) -> None:
        super().__init__()
        hosts = {"a": (0,), "b": (1,), "c": (2,)}
        self.state = model.initial_state(hosts, setup=True)
        self.agents = dict.fromkeys(hosts, 0)
        self.connected: set[str] = set()
        self.ordered: dict[str, int] = {}  # what its agent of now was told: only that one can do it
        self.tell(model.ControllerStarted())

    def tell(self, event: model.Event) -> None:
        self.state, actions = step(self.state, event, LIMITS)
        for action in actions:
            if isinstance(action, model.Setup):
                assert action.host not in self.ordered, "I6: one outstanding order a host"
                self.ordered[action.host] = self.agents[action.host]
            if isinstance(action, StartGroup):
                prepared = all(host.setup is model.SetupPhase.DONE for host in self.state.hosts)
                assert prepared, "no group before all hosts are ready"

    @rule(host=st.sampled_from("abc"), heard=st.booleans(), another=st.booleans())
    def comes(self, host: str, heard: bool, another: bool) -> None:
        """A connection begins; on the one before, the last order was heard or lost."""
        if host in self.connected:
            return
        sent = self.state.host(host).setup is model.SetupPhase.SENT
        if another or (sent and not heard):
            self.ordered.pop(host, None)
        self.agents[host] += another
        self.connected.add(host)
        if sent and heard and not another:
            self.tell(model.SetupStarted(host=host))
        event = model.AgentConnected(host=host, incarnation=self.agents[host], mono_ns=0, groups=())
        self.tell(event)

    @rule(host=st.sampled_from("abc"))
    def goes(self, host: str) -> None:
        if host in self.connected:
            self.connected.remove(host)
            self.tell(model.AgentDisconnected(host=host))

    @rule(host=st.sampled_from("abc"), failure=st.sampled_from([None, None, None, "it exited with code 3"]))
    def is_prepared(self, host: str, failure: str | None) -> None:
        if host in self.connected and self.ordered.get(host) == self.agents[host]:
            self.tell(model.SetupStarted(host=host))
            self.tell(model.SetupFinished(host=host, failure=failure))

    @invariant()
    def what_is_ready_is_counted(self) -> None:
        assert self.state.unready == sum(host.setup is not model.SetupPhase.DONE for host in self.state.hosts)


TestAnyHistory = _AnyHistory.TestCase
TestAnySetup = _AnySetup.TestCase
