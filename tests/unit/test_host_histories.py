"""Whatever happens to hosts, launcher and agents, in any order: one attempt at a time, one cluster a slot (I6).

The launcher of this model does what is wanted, late or never; its words come, come again, and come long after they
were true. Clusters live and die as they like, and what was cut off comes back.
"""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sky_monarch.controller import model
from sky_monarch.controller.hosts import is_wanted
from sky_monarch.controller.model import (
    FailureKind,
    GroupPhase,
    HostPhase,
    HostReport,
    HostReported,
    RunPhase,
)
from sky_monarch.controller.policy import step
from tests.support.host_policies import LIMITS as POLICY_LIMITS
from tests.support.waiting import PATIENCE

LIMITS = dataclasses.replace(POLICY_LIMITS, replicas=2, min_replicas=1)
HOSTS = ("h0", "h1", "h2")
_OVER = (HostPhase.WAITING, HostPhase.GIVEN_UP, HostPhase.DOWN)
# What may end an attempt, and nothing else does.
_ENDS = ("ended", "silent", "doubted", "failed", "left", "setup", "apart", "paused")


@dataclasses.dataclass
class Cluster:
    """What the provider has under the name of a host."""

    attempt: int
    agent: int | None = None  # incarnation of the agent that runs there, once it does
    groups: dict[int, int] = dataclasses.field(default_factory=dict)  # generation by replica


# A mutant is only to be found, and each time: what its shortest history is, nobody asks.
_PHASES = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if PATIENCE >= 1 else [])]


@settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    phases=_PHASES,
    derandomize=PATIENCE < 1,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
class _AnyHosts(RuleBasedStateMachine):
    """Two hosts with a group each, and a spare one."""

    def __init__(self) -> None:
        super().__init__()
        placed: dict[str, tuple[int, ...]] = {"h0": (0,), "h1": (1,), "h2": ()}
        self.state = model.initial_state({"head": (), **placed}, setup=False, provisioned=set(HOSTS))
        self.clusters: dict[str, list[Cluster]] = {name: [] for name in HOSTS}
        self.launches: set[tuple[str, int]] = set()
        self.launching: dict[str, int] = {}
        self.connected: dict[str, tuple[int, int]] = {}  # attempt and incarnation of who is connected
        self.said: list[HostReport] = []
        self.agents = 0
        self.now = 0
        self.tell(model.ControllerStarted(), "")
        self.tell(model.LauncherCame(), "")

    # --- the controller ----------------------------------------------------------------------------------------

    def tell(self, event: model.Event, ends: str, host: str | None = None) -> None:
        """One event; ``ends`` says how it may end an attempt at ``host``."""
        before = self.state
        self.state, actions = step(before, event, LIMITS)
        self.now += 1
        if before.phase.ended:
            assert self.state.phase is before.phase, "an end is final"
        for name in HOSTS:
            self._one_at_a_time(before.host(name), self.state.host(name), ends if name == host else "")
        if wanted(before) != wanted(self.state):
            assert self.state.wanted > before.wanted, "a launcher that waits is told"
        for action in actions:
            if isinstance(action, model.CancelTimer):
                continue
            assert action.reason, "every decision carries its reason"
            if isinstance(action, model.Fence):
                self._fenced(action)
            elif isinstance(action, model.StartGroup):
                self._start(action)
            elif isinstance(action, model.Shutdown) and action.host in self.connected:
                self._agent_ends(action.host)

    def _one_at_a_time(self, old: model.Host, new: model.Host, ends: str) -> None:
        assert new.attempt in (old.attempt, old.attempt + 1), "I6: attempts are counted one by one"
        if new.attempt != old.attempt:
            assert old.phase is not HostPhase.WANTED or ends == "failed", "I6: one outstanding attempt a host"
            assert ends in _ENDS, f"I6: nothing has ended attempt {old.attempt}"
            assert not self.state.phase.ended, "nothing is asked for when a run has ended"
            assert self.state.phase is not RunPhase.STOPPING, "nothing is asked for in a run that ends"
        if old.phase is HostPhase.GIVEN_UP:
            assert new.phase is HostPhase.GIVEN_UP, "I5: what is given up stays so"
        if new.phase is HostPhase.WANTED and old.phase is not HostPhase.WANTED:
            assert new.incarnation is None
            assert not new.connected, "nobody of an older attempt speaks for it"

    def _fenced(self, action: model.Fence) -> None:
        if self.connected.get(action.host, (None,))[0] == action.attempt:
            del self.connected[action.host]
        for cluster in self.clusters[action.host]:
            if cluster.attempt == action.attempt:
                cluster.agent = None  # it ends its ranks and itself
                cluster.groups.clear()

    def _start(self, action: model.StartGroup) -> None:
        attempt, incarnation = self.connected[action.host]
        assert attempt == self.state.host(action.host).attempt, "only the newest attempt is ordered about"
        (cluster,) = [c for c in self.clusters[action.host] if c.attempt == attempt]
        if cluster.agent == incarnation and action.replica not in cluster.groups:
            cluster.groups[action.replica] = action.generation

    def _agent_ends(self, host: str) -> None:
        attempt, _ = self.connected.pop(host)
        for cluster in self.clusters[host]:
            if cluster.attempt == attempt:
                cluster.agent = None
                cluster.groups.clear()

    # --- the launcher ------------------------------------------------------------------------------------------

    def say(self, host: str, state: str, attempt: int, kind: str | None = None) -> None:
        """The launcher reports, for the first time or again."""
        event = HostReport(
            host=host,
            attempt=attempt,
            state=HostReported(state),
            kind=None if kind is None else FailureKind(kind),
        )
        self.said.append(event)
        self.tell(event, "ended" if state in ("ended", "down") else state, host)

    @rule(host=st.sampled_from(HOSTS), far=st.sampled_from((2, 3, 3, 1, 0)), told=st.booleans())
    def is_launched(self, host: str, far: int, told: bool) -> None:
        """As far as it comes: the rest happens later, or never."""
        now = self.state.host(host)
        if not is_wanted(self.state, now) or host in self.launching or (host, now.attempt) in self.launches:
            return
        for cluster in self.clusters[host][:-1]:
            self._ends(host, cluster)  # the one before may go beside; those before that go first
        self.launching[host] = now.attempt
        self.launches.add((host, now.attempt))
        self.say(host, "launching", now.attempt)
        if far > 0:
            self._launched(host, told)
        if far > 1:
            self._dials(host, another=False)
        if far > 2:
            self._commits(host)

    def _launched(self, host: str, told: bool) -> None:
        attempt = self.launching.pop(host)
        self.clusters[host].append(Cluster(attempt))
        if told:
            self.say(host, "launched", attempt)

    @precondition(lambda self: self.launching)
    @rule(data=st.data(), told=st.booleans())
    def has_launched(self, data: st.DataObject, told: bool) -> None:
        self._launched(data.draw(st.sampled_from(sorted(self.launching))), told)

    @precondition(lambda self: self.launching)
    @rule(data=st.data(), kind=st.sampled_from(["capacity", "error", "error", "capacity", "refused"]))
    def fails_to_launch(self, data: st.DataObject, kind: str) -> None:
        host = data.draw(st.sampled_from(sorted(self.launching)))
        self.say(host, "failed", self.launching.pop(host), kind)

    @precondition(lambda self: any(self.clusters.values()))
    @rule(host=st.sampled_from(HOSTS), told=st.booleans())
    def a_cluster_is_taken_away(self, host: str, told: bool) -> None:
        for cluster in list(self.clusters[host]):
            self._ends(host, cluster)
            if told:
                self.say(host, "ended", cluster.attempt)

    @rule(host=st.sampled_from(HOSTS))
    def takes_down_what_is_not_wanted(self, host: str) -> None:
        now = self.state.host(host)
        if is_wanted(self.state, now) or host in self.launching:
            return
        for cluster in list(self.clusters[host]):
            self._ends(host, cluster)
        self.say(host, "down", now.attempt)

    @precondition(lambda self: self.said)
    @rule(data=st.data(), ended=st.booleans())
    def says_it_again_and_late(self, data: st.DataObject, ended: bool) -> None:
        ends = [one for one in self.said if one.state is HostReported.ENDED]
        old = data.draw(st.sampled_from(ends if ended and ends else self.said))
        if old.state is HostReported.FAILED and old.attempt == self.state.host(old.host).attempt:
            return  # no launcher fails twice at what it has not begun again
        ends = {"ended": "ended", "down": "ended", "failed": "failed"}.get(str(old.state), "")
        current = old.attempt == self.state.host(old.host).attempt
        self.tell(old, ends if current else "", old.host)

    @precondition(lambda self: self.said)
    @rule()
    def launchers_come_and_go(self) -> None:
        came = self.state.launcher is not True
        self.tell(model.LauncherCame() if came else model.LauncherGone(silent_s=15.0), "")

    def _ends(self, host: str, cluster: Cluster) -> None:
        """With all that runs there; its line stays as it is until somebody notices."""
        self.clusters[host].remove(cluster)
        cluster.agent = None
        cluster.groups.clear()

    # --- the agents --------------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.clusters.values()))
    @rule(host=st.sampled_from(HOSTS), another=st.booleans())
    def an_agent_dials(self, host: str, another: bool) -> None:
        self._dials(host, another=another)

    def _dials(self, host: str, *, another: bool) -> None:
        """The agent of any cluster that lives, the newest or one that was cut off."""
        for cluster in self.clusters[host]:
            if self.connected.get(host, (None,))[0] == cluster.attempt:
                continue
            if cluster.agent is None or another:
                self.agents += 1
                cluster.agent = self.agents
                cluster.groups.clear()  # its ranks died with it
            snapshots = tuple(
                model.Snapshot(
                    replica=replica, generation=generation, state=GroupPhase.RUNNING, live=frozenset({0})
                )
                for replica, generation in cluster.groups.items()
            )
            before = self.state.host(host)
            fenced = cluster.attempt != before.attempt or before.phase in _OVER
            known = self.connected.get(host)
            if not fenced:
                self.connected[host] = (cluster.attempt, cluster.agent)
            hello = model.AgentConnected(
                host=host,
                incarnation=cluster.agent,
                mono_ns=self.now,
                groups=snapshots,
                attempt=cluster.attempt,
            )
            if fenced:
                orders = step(self.state, hello, LIMITS).actions
                assert [type(order) for order in orders] == [model.Fence], (
                    "an agent of an older attempt is fenced"
                )
            self.tell(hello, "")
            if fenced:
                assert cluster.agent is None
                assert self.connected.get(host) == known, "and takes nobody's place"

    @precondition(lambda self: self.connected)
    @rule(data=st.data(), leaves=st.booleans())
    def a_line_ends(self, data: st.DataObject, leaves: bool) -> None:
        host = data.draw(st.sampled_from(sorted(self.connected)))
        if leaves:
            self.tell(model.HostLeaving(host=host, reason="SIGTERM"), "", host)
        attempt, _ = self.connected.pop(host)
        for cluster in self.clusters[host] if leaves else ():
            if cluster.attempt == attempt:
                cluster.agent = None
                cluster.groups.clear()
        self.tell(model.AgentDisconnected(host=host), "left", host)

    @precondition(lambda self: self.connected)
    @rule(data=st.data(), returns=st.booleans())
    def a_host_is_cut_off(self, data: st.DataObject, returns: bool) -> None:
        """For longer than it is waited for; it lives, and may come back."""
        host = data.draw(st.sampled_from(sorted(self.connected)))
        del self.connected[host]
        self.tell(model.AgentDisconnected(host=host), "left", host)
        self.tell(model.TimerFired(name=f"doubt:{host}"), "doubted", host)
        self.tell(model.TimerFired(name=f"agent:{host}"), "silent", host)
        if returns:
            self._dials(host, another=False)

    @precondition(lambda self: self.connected)
    @rule(data=st.data())
    def a_group_commits(self, data: st.DataObject) -> None:
        self._commits(data.draw(st.sampled_from(sorted(self.connected))))

    def _commits(self, host: str) -> None:
        attempt = self.connected.get(host, (None,))[0]
        for cluster in self.clusters[host]:
            if cluster.attempt == attempt:
                for replica, generation in cluster.groups.items():
                    whose = {"replica": replica, "generation": generation}
                    self.tell(model.GenerationStarted(**whose), "")
                    self.tell(model.RankSpawned(**whose, rank=0), "")
                    self.tell(model.FirstCommit(**whose), "")

    @precondition(lambda self: any(self.clusters.values()))
    @rule(host=st.sampled_from(HOSTS))
    def who_is_cut_off_counts_on(self, host: str) -> None:
        """An agent restarts its groups whether it is heard or not."""
        for cluster in self.clusters[host]:
            if cluster.agent is not None and host not in self.connected:
                for replica in cluster.groups:
                    cluster.groups[replica] += 1

    # --- time and orders ---------------------------------------------------------------------------------------

    @rule(host=st.sampled_from(HOSTS))
    def time_passes_for(self, host: str) -> None:
        """Whatever is waited for does not come."""
        if host not in self.connected:
            self.tell(model.TimerFired(name=f"doubt:{host}"), "doubted", host)
            self.tell(model.TimerFired(name=f"agent:{host}"), "silent", host)
        self.tell(model.TimerFired(name=f"host:{host}"), "paused", host)

    @precondition(lambda self: self.connected)
    @rule()
    def the_controller_restarts(self) -> None:
        self.connected.clear()
        self.tell(model.ControllerStarted(), "")

    @precondition(lambda self: self.now > 25)  # a run that ends has no history any more
    @rule()
    def down(self) -> None:
        self.tell(model.DownRequested(grace_s=1.0, reason="down"), "")

    @precondition(lambda self: self.state.phase is RunPhase.STOPPING)
    @rule(name=st.sampled_from(["reap", "stop", "drain", "leave"]))
    def the_end_comes_nearer(self, name: str) -> None:
        self.tell(model.TimerFired(name=name), "")

    # --- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def i6_there_are_never_two_clusters_of_a_slot(self) -> None:
        for host in HOSTS:
            newest = [one for one in self.clusters[host] if one.attempt == self.state.host(host).attempt]
            assert len(newest) <= 1, "I6: one cluster a slot"
            assert len(self.clusters[host]) <= 2, "I6: beside the one that goes"

    @invariant()
    def i1_no_generation_lives_twice(self) -> None:
        living = [
            (replica, generation)
            for clusters in self.clusters.values()
            for cluster in clusters
            for replica, generation in cluster.groups.items()
        ]
        assert len(living) == len(set(living)), "I1: one host a generation"

    @invariant()
    def each_group_is_on_one_host(self) -> None:
        placed = sorted(replica for host in self.state.hosts for replica in host.replicas)
        assert placed == [0, 1]
        for group in self.state.groups:
            assert group.replica in self.state.host(group.host).replicas

    @invariant()
    def who_is_connected_is_of_the_newest_attempt(self) -> None:
        for host, (attempt, incarnation) in self.connected.items():
            known = self.state.host(host)
            if known.connected:
                assert (known.attempt, known.incarnation) == (attempt, incarnation)

    @invariant()
    def groups_know_where_their_hosts_are(self) -> None:
        groups = self.state.groups
        assert groups == model.Groups.of(list(groups))
        for group in groups:
            host = self.state.host(group.host)
            assert (group.away, group.host_lost) == (host.away, host.lost)

    @invariant()
    def a_run_that_waits_for_hosts_says_for_which(self) -> None:
        if self.state.phase in (RunPhase.DEGRADED, RunPhase.STOPPING):
            assert self.state.reason

    @invariant()
    def an_end_leaves_no_cluster_or_names_it(self) -> None:
        state = self.state
        if state.phase.ended:
            assert state.reason
            for host in HOSTS:
                whole = state.host(host).gone and state.host(host).replaces is None
                told = whole or "may still bill" in (state.reason or "")
                assert told or not state.launched


def wanted(state: model.State) -> list[tuple[int, bool]]:
    return [(state.host(name).attempt, is_wanted(state, state.host(name))) for name in HOSTS]


def test_whatever_happens_there_is_one_attempt_at_a_time_and_one_cluster_a_slot() -> None:
    run_state_machine_as_test(_AnyHosts)  # type: ignore[no-untyped-call]
