"""The same in a run whose hosts are provisioned: they are had, lost, cut off and taken away.

The launcher is modelled after the real one: it does what is wanted, an older attempt's cluster first; it is away at
times, and its reports come late and more than once. Clusters die without a word, and their provider says so much later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sky_monarch.controller import model
from sky_monarch.controller.hosts import is_wanted
from sky_monarch.controller.model import FailureKind, GroupPhase, HostPhase, HostReported
from tests.support.simulation import Agent, Simulation

_POLL_S, _WATCH_S, _SILENT_S = 1.0, 10.0, 15.0


@dataclass(slots=True)
class Cluster:
    """What the provider has for a host."""

    attempt: int
    agent: Agent | None = None
    told: bool = False
    """Its end was told."""
    alive: bool = True


class HostSimulation(Simulation):
    """One history, decided by its seed."""

    def __init__(self, groups: int, *, hosts: int, seed: int, **options: Any) -> None:
        self.clusters: dict[str, Cluster] = {}
        self.jobs: dict[str, tuple[int, bool]] = {}
        self.launches: dict[tuple[str, int], int] = {}
        self.launcher_here = True
        self.trouble = 0.25
        self._incarnations = 0
        self._delays: dict[str, float] = {}
        self._kept: dict[str, float] = {}
        super().__init__(groups, hosts=hosts, seed=seed, provisioned=True, **options)
        self.after(0.5, self._poll)
        self.after(_WATCH_S, self._watch)

    # --- the launcher -----------------------------------------------------------------------------------------

    def _poll(self) -> None:
        self.after(_POLL_S, self._poll)
        if not self.launcher_here or self._down or self._paused is not None:
            return
        if self.state.launcher is not True and not self.state.phase.ended:
            self.decide(model.LauncherCame())
        for host in self.state.hosts:
            want = (host.attempt, is_wanted(self.state, host))
            if self.jobs.get(host.name) != want:
                self.jobs[host.name] = want
                (self._launch if want[1] else self._take_down)(host.name, host.attempt)

    def launcher_goes(self, seconds: float) -> None:
        """Killed, and started again later; what it asked of its provider goes on."""
        if not self.launcher_here:
            return
        self.launcher_here = False

        def silent() -> None:
            if not self.launcher_here and not self.state.phase.ended:
                self.decide(model.LauncherGone(silent_s=_SILENT_S))

        def back() -> None:
            self.launcher_here = True

        self.after(_SILENT_S, lambda: self.hear(silent))
        self.after(seconds, back)

    def _launch(self, name: str, attempt: int) -> None:
        self.launches[name, attempt] = self.launches.get((name, attempt), 0) + 1
        assert self.launches[name, attempt] == 1, "I6: each attempt is launched once"
        if (older := self.clusters.get(name)) is not None and older.alive:
            self._ends(older)  # there are never two of a name
        self._report(name, attempt, HostReported.LAUNCHING)
        seconds = 3.0 + 17.0 * self.chance.random()
        kind = None
        if self.chance.random() < self.trouble:
            kind = self.chance.choice((FailureKind.CAPACITY, FailureKind.CAPACITY, FailureKind.ERROR))
        self.after(seconds, lambda: self._has_launched(name, attempt, kind))

    def _has_launched(self, name: str, attempt: int, kind: FailureKind | None) -> None:
        if self.jobs.get(name) != (attempt, True):
            return  # nobody wants it any more: it was cancelled
        if kind is not None:
            self._report(name, attempt, HostReported.FAILED, kind)
            return
        current = self.clusters.get(name)
        assert current is None or not current.alive, "I6: one cluster a slot"
        cluster = self.clusters[name] = Cluster(attempt)
        self._report(name, attempt, HostReported.LAUNCHED)
        self.after(1.0 + 4.0 * self.chance.random(), lambda: self._agent_begins(name, cluster))

    def _agent_begins(self, name: str, cluster: Cluster) -> None:
        if not cluster.alive:
            return
        self._incarnations += 1
        agent = Agent(
            name, self.places[name], 1000 * self._incarnations, ready=not self.setup, attempt=cluster.attempt
        )
        cluster.agent = self.agents[name] = agent
        self.connect(agent)

    def _take_down(self, name: str, attempt: int) -> None:
        def gone() -> None:
            if self.jobs.get(name) == (attempt, False):
                cluster = self.clusters.get(name)
                if cluster is not None and cluster.alive:
                    self._ends(cluster)
                self._report(name, attempt, HostReported.DOWN)

        self.after(1.0 + 3.0 * self.chance.random(), gone)

    def _watch(self) -> None:
        """The provider's word on what has died, two looks later."""
        self.after(_WATCH_S, self._watch)
        for name, cluster in self.clusters.items():
            if not cluster.alive and not cluster.told and self.launcher_here:
                cluster.told = True
                attempt = cluster.attempt
                self.after(_WATCH_S, lambda n=name, a=attempt: self._report(n, a, HostReported.ENDED))

    def _report(self, name: str, attempt: int, state: HostReported, kind: FailureKind | None = None) -> None:
        """Sooner or later, once or more than once."""
        event = model.HostReport(host=name, attempt=attempt, state=state, kind=kind, reason="so it is")

        def arrive() -> None:
            # It is said until it is heard: a controller that is killed while it is paused has heard nothing.
            if self._down or self._paused is not None or not self.launcher_here:
                self.after(1.0, arrive)
            else:
                self.decide(event)

        copies = 1 if self.steady or self.chance.random() < 0.8 else 2
        for copy in range(copies):
            # What failed is failed once; anything else may be said long after it was true.
            late_s = 90.0 if copy and state is not HostReported.FAILED else 0.2
            self.after(late_s * self.chance.random(), arrive)

    # --- hosts ------------------------------------------------------------------------------------------------

    def _ends(self, cluster: Cluster) -> None:
        cluster.alive = False
        agent = cluster.agent
        if agent is None:
            return
        agent.gone = True
        for mine in agent.groups.values():
            mine.live = False
        agent.unacked.clear()
        if agent.connected:  # nobody is told at once: a line without a peer looks like a quiet one
            self.after(20.0 * self.chance.random(), lambda: self.disconnect(agent))

    def host_dies(self, name: str) -> None:
        """Gone, without a word."""
        if (cluster := self.clusters.get(name)) is not None and cluster.alive:
            self._ends(cluster)

    def host_leaves(self, name: str) -> None:
        """Its agent is told that it will be taken away: it stops its groups and goes."""
        cluster = self.clusters.get(name)
        agent = cluster.agent if cluster is not None and cluster.alive else None
        if cluster is None or agent is None or agent.gone:
            return
        self.tell(agent, model.HostLeaving(host=name, reason="it is about to be taken away"))
        for replica, mine in agent.groups.items():
            if mine.live and not mine.phase.final:
                whose = {"replica": replica, "generation": mine.generation}
                mine.live, mine.phase = False, GroupPhase.STOPPED
                whose["host"] = name
                self.tell(
                    agent, model.GenerationEnded(**whose, reason="it was stopped: taken away", stopped=True)
                )
                self.tell(agent, model.GroupStopped(**whose))

        def gone() -> None:
            agent.gone = True
            cluster.alive = False
            self.disconnect(agent)

        self.after(1.0 + 2.0 * self.chance.random(), gone)

    # --- what the base does otherwise --------------------------------------------------------------------------

    def disconnect(self, agent: Agent, *, told: bool = True, for_s: float | None = None) -> None:
        """The line of an agent that has been fenced is nobody's news."""
        if not agent.connected:
            return
        agent.connected = False
        agent.line += 1
        name, incarnation = agent.name, agent.incarnation

        def noticed() -> None:
            known = self.state.host(name)
            if known.connected and known.incarnation == incarnation:
                self.decide(model.AgentDisconnected(host=name))

        if told:
            self.hear(noticed)
        again_s = 2 * self.chance.random() if for_s is None else for_s
        self.after(again_s, lambda: self.connect(agent))

    def _send(self, action: Any, order: int) -> None:
        if isinstance(action, model.Fence):
            cluster = self.clusters.get(action.host)
            agent = cluster.agent if cluster is not None else None
            if agent is not None and agent.attempt == action.attempt:
                agent.connected, agent.gone = False, True
                agent.line += 1
                agent.unacked.clear()
                for mine in agent.groups.values():
                    mine.live = False
        elif action.host in self.agents:
            super()._send(action, order)

    def _arm(self, name: str, delay_s: float) -> None:
        self._delays[name] = delay_s
        super()._arm(name, delay_s)

    def controller_dies(self) -> None:
        """Its timers are known from the journal, and get a full window again."""
        if not self._down:
            self._kept = {name: self._delays[name] for name in self._timers}
            super().controller_dies()

    def _controller_returns(self) -> None:
        super()._controller_returns()
        for name, delay_s in self._kept.items():
            if name not in self._timers and not self.state.phase.ended:
                self._arm(name, delay_s)

    def fail_every_second(self, seconds: int) -> None:
        """Something fails in each of the next seconds; its kind is up to chance."""
        kinds = {
            "rank": 50,
            "cut": 12,
            "agent": 6,
            "controller": 3,
            "pause": 5,
            "host": 6,
            "leaves": 5,
            "partition": 6,
            "launcher": 7,
        }
        for second in range(seconds):
            kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
            self.failures[kind] = self.failures.get(kind, 0) + 1
            name = self.chance.choice(list(self.places))
            part, length_s = self.chance.random(), 120 * self.chance.random()
            self.after(second + part, lambda k=kind, n=name, p=part, s=length_s: self._fail(k, n, p, s))

    def _fail(self, kind: str, name: str, part: float, length_s: float) -> None:
        agent = self.agents.get(name)
        acts: dict[str, Callable[[], None]] = {
            "controller": self.controller_dies,
            "pause": lambda: self.controller_pauses(length_s / 12),
            "host": lambda: self.host_dies(name),
            "leaves": lambda: self.host_leaves(name),
            "launcher": lambda: self.launcher_goes(length_s),
        }
        if agent is not None and not agent.gone:
            mine = sorted(agent.groups)
            acts |= {
                "rank": lambda: self.rank_dies(agent, mine[int(part * len(mine))]) if mine else None,
                "cut": lambda: self.disconnect(agent),
                "agent": lambda: self.agent_dies(agent),
                "partition": lambda: self.disconnect(agent, for_s=length_s),
            }
        if act := acts.get(kind):
            act()

    # --- what must hold ---------------------------------------------------------------------------------------

    def _check(self, before: model.State, event: model.Event, actions: tuple[Any, ...]) -> None:
        super()._check(before, event, actions)
        for old, new in zip(before.hosts, self.state.hosts, strict=True):
            if old is new:
                continue
            assert new.attempt in (old.attempt, old.attempt + 1), "I6: attempts are counted one by one"
            if new.attempt != old.attempt:
                failed = isinstance(event, model.HostReport) and event.state is HostReported.FAILED
                mine = getattr(event, "attempt", old.attempt) == old.attempt
                assert mine, "I6: what is said of an older attempt is no news"
                assert old.phase is not HostPhase.WANTED or failed, "I6: one outstanding attempt a host"
                assert not self.state.phase.ended, "nothing is asked for when a run has ended"
            if old.phase is HostPhase.GIVEN_UP:
                assert new.phase is HostPhase.GIVEN_UP, "I5: what is given up stays so"
        placed = sorted(replica for host in self.state.hosts for replica in host.replicas)
        homes = sorted(group.replica for group in self.state.groups for _ in group.hosts)
        assert placed == homes, "each group is on its hosts, and on no other"
        for action in actions:
            if isinstance(action, model.StartGroup):
                host = self.state.host(action.host)
                agent = self.agents[action.host]
                assert agent.attempt == host.attempt, "only the newest attempt is ordered about"
                if not agent.gone:
                    known = agent.groups.get(action.replica)
                    assert known is None or not known.live, "I1: what lives is not started"

    def check_all(self) -> None:
        """What costs a look at every group and host."""
        super().check_all()
        for group in self.state.groups:
            assert group.away == any(self.state.host(name).away for name in group.hosts)

    def check_end(self) -> None:
        """I8, and no cluster that nobody has named."""
        super().check_end()
        for name, cluster in self.clusters.items():
            named = f"host {name} may still bill" in (self.state.reason or "")
            assert named or not cluster.alive, "what bills is taken down, or named"
