"""A run in virtual time over the pure policy: agents that crash, a network that misbehaves, a controller that dies.

The agents are modelled after the real ones: they restart their groups on a lease, ignore orders for what lives, tell
everything with numbers and tell again what was not acked. Everything else is the policy itself. After each of its
decisions the invariants of the design that are its own are checked; the others are named where they are not.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase, RunPhase
from sky_monarch.controller.policy import step

S = 1_000_000_000
_TOLD_LATE_S = 5.0


@dataclass(slots=True)
class Mine:
    """A group as its agent has it."""

    generation: int
    left: int
    phase: GroupPhase = GroupPhase.STARTING
    live: bool = True
    restarts: int = 0


@dataclass(slots=True)
class Agent:
    """The agent of one host; ``line`` counts its connections: what was sent over an older one is lost."""

    name: str
    replicas: tuple[int, ...]
    incarnation: int
    connected: bool = False
    line: int = 0
    seq: int = 0
    groups: dict[int, Mine] = field(default_factory=dict)
    unacked: list[tuple[int, model.Event]] = field(default_factory=list)
    ready: bool = True
    gone: bool = False
    attempt: int = 0


class Simulation:
    """One history, decided by its seed.

    Args:
        groups: Replica groups.
        hosts: Agents that they are spread over.
        seed: Of everything that is up to chance.
        setup: The job has a setup command.
        steady: Events are neither lost, late, doubled nor out of order.
        max_restarts: Of each group inside five minutes.
        provisioned: Hosts are yet to be had: somebody else brings their agents.
        spare: More of those, without groups.
    """

    def __init__(
        self,
        groups: int,
        *,
        hosts: int,
        seed: int,
        setup: bool = False,
        steady: bool = False,
        max_restarts: int = 3,
        provisioned: bool = False,
        spare: int = 0,
    ) -> None:
        self.chance = random.Random(seed)
        self.steady = steady
        self.limits = model.Limits(
            replicas=groups,
            min_replicas=max(1, groups // 2),
            ranks_per_replica=self.ranks,
            max_restarts=max_restarts,
            window_s=300.0,
            grace_s=5.0,
        )
        places = self._spread(groups, hosts)
        places |= {f"h{hosts + number}": () for number in range(spare)}
        self.places = places
        self.setup = setup
        self.provisioned = frozenset(places if provisioned else ())
        self.state = self._nothing()
        self.agents = {
            name: Agent(name, mine, 1, ready=not setup) for name, mine in places.items() if not provisioned
        }
        self.now_ns = 0
        self.decisions = 0
        self.deciding_s = 0.0
        self.failures: dict[str, int] = {}
        self.journal: list[model.Event] = []
        self.orders: set[int] = set()
        self._order = 0
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._known: dict[tuple[str, int], int] = {}
        self._timers: dict[str, int] = {}
        self._paused: list[Callable[[], None]] | None = None
        self._down = False
        self._over: dict[int, GroupPhase] = {}
        self._preparing: dict[str, int] = {}
        self.keep_journal = groups <= 100
        self.decide(model.ControllerStarted())
        for agent in self.agents.values():
            self.after(self.chance.random(), lambda agent=agent: self.connect(agent))

    ranks = 1
    """Of each group."""

    @staticmethod
    def _spread(groups: int, hosts: int) -> dict[str, tuple[int, ...]]:
        return {f"h{host}": tuple(range(host, groups, hosts)) for host in range(hosts)}

    def _nothing(self) -> model.State:
        return model.initial_state(
            self.places, setup=self.setup, provisioned=self.provisioned, ranks=self.ranks
        )

    # --- time ---------------------------------------------------------------------------------------------

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._agenda, (self.now_ns + round(delay_s * S), self._count, act))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end_ns = self.now_ns + round(seconds * S)
        while self._agenda and self._agenda[0][0] <= end_ns:
            self.now_ns, _, act = heapq.heappop(self._agenda)
            act()
        self.now_ns = end_ns

    # --- the controller -----------------------------------------------------------------------------------

    def hear(self, act: Callable[[], None]) -> None:
        """Something reaches the controller: now, or once it goes on."""
        if self._down:
            return
        if self._paused is None:
            act()
        else:
            self._paused.append(act)

    def decide(self, event: model.Event) -> None:
        """One decision of the policy, checked."""
        before = self.state
        since = time.thread_time()  # of this thread alone: others run beside it
        self.state, actions = step(before, event, self.limits)
        self.deciding_s += time.thread_time() - since
        self.decisions += 1
        if self.keep_journal:
            self.journal.append(event)
        self._check(before, event, actions)
        for action in actions:
            match action:
                case model.SetTimer():
                    self._arm(action.name, action.delay_s)
                case model.CancelTimer():
                    self._timers.pop(action.name, None)
                case _:
                    self._order += 1
                    self.orders.add(self._order)  # journaled, then sent
                    self._send(action, self._order)

    def _arm(self, name: str, delay_s: float) -> None:
        self._count += 1
        mark = self._timers[name] = self._count

        def fire() -> None:
            if self._timers.get(name) == mark:
                del self._timers[name]
                self.decide(model.TimerFired(name=name))

        self.after(delay_s, lambda: self.hear(fire))

    def _send(self, action: Any, order: int) -> None:
        agent = self.agents[action.host]
        line = agent.line
        if not agent.connected or (not self.steady and self.chance.random() < 0.002):
            if agent.connected:
                self.disconnect(agent)  # an order is lost only with its connection
            return

        def arrive() -> None:
            if agent.line == line and not agent.gone:
                assert order in self.orders, "I2: no act without its row"
                self._obey(agent, action)

        self.after(0.001 + 0.01 * self.chance.random(), arrive)

    def controller_dies(self) -> None:
        """Killed; another one reads the journal a second later."""
        self._down, self._paused = True, None
        self._timers.clear()
        for agent in self.agents.values():
            self.disconnect(agent, told=False)
        self.after(1.0, self._controller_returns)

    def _controller_returns(self) -> None:
        self._down = False
        if self.keep_journal:  # what is pure tells the same again
            state = self._nothing()
            for event in self.journal:
                state = step(state, event, self.limits).state
            assert state == self.state
        if not self.state.phase.ended:
            for name in ("drain", "leave", "stop"):
                self._arm(name, 30.0)
        self.decide(model.ControllerStarted())

    def controller_pauses(self, seconds: float) -> None:
        """Stopped, and continued with all that came meanwhile."""
        if self._down or self._paused is not None:
            return
        mine: list[Callable[[], None]] = []
        self._paused = mine

        def go_on() -> None:
            if self._paused is mine:
                self._paused = None
                for act in mine:
                    act()

        self.after(seconds, go_on)

    # --- the network --------------------------------------------------------------------------------------

    def connect(self, agent: Agent) -> None:
        """The agent dials, says what it has, and tells again what was not acked."""
        if agent.connected or agent.gone:
            return
        if self._down:
            self.after(1.0, lambda: self.connect(agent))
            return
        agent.connected = True
        agent.line += 1
        line = agent.line
        seen = tuple(
            model.Snapshot(
                replica=replica,
                generation=mine.generation,
                state=mine.phase,
                live=frozenset({self._rank(agent)}) if mine.live else frozenset(),
                restarts=mine.restarts,
            )
            for replica, mine in agent.groups.items()
        )
        hello = model.AgentConnected(
            host=agent.name,
            incarnation=agent.incarnation,
            mono_ns=self.now_ns,
            groups=seen,
            attempt=agent.attempt,
        )
        self.hear(lambda: self.decide(hello) if agent.line == line else None)
        for seq, event in list(agent.unacked):
            self._carry(agent, seq, event)

    def _rank(self, agent: Agent) -> int:
        """Of the group's ranks the one on that host."""
        return 0

    def disconnect(self, agent: Agent, *, told: bool = True, for_s: float | None = None) -> None:
        """The connection ends; the agent dials again."""
        if not agent.connected:
            return
        agent.connected = False
        agent.line += 1
        if told:
            self.hear(lambda: self.decide(model.AgentDisconnected(host=agent.name)))
        again_s = 2 * self.chance.random() if for_s is None else for_s
        self.after(again_s, lambda: self.connect(agent))

    def tell(self, agent: Agent, event: model.Event) -> None:
        """The agent has news."""
        agent.seq += 1
        agent.unacked.append((agent.seq, event))
        if agent.connected:
            self._carry(agent, agent.seq, event)

    def _carry(self, agent: Agent, seq: int, event: model.Event) -> None:
        line, incarnation = agent.line, agent.incarnation
        delay_s = 0.001 * seq / (seq + 1)  # in order
        copies = 1
        if not self.steady:
            fate = self.chance.random()
            if fate < 0.01:  # lost, and the connection with it: it is told again over the next one
                self.disconnect(agent)
                return
            copies = 2 if fate < 0.03 else 1
            delay_s += self.chance.choice((0.0, 0.0, 0.0, 0.02, _TOLD_LATE_S)) * self.chance.random()

        def arrive() -> None:
            if agent.line == line or not self.steady:  # late: from a connection that is no more
                self.hear(lambda: self._take(agent, incarnation, seq, event))

        for _ in range(copies):
            self.after(delay_s, arrive)
            delay_s += self.chance.random()

    def _take(self, agent: Agent, incarnation: int, seq: int, event: model.Event) -> None:
        if self.state.host(agent.name).incarnation != incarnation:
            return  # an agent is heard until the next one of its host is
        if self.steady:
            if seq <= self._known.get((agent.name, incarnation), 0):
                return
            self._known[agent.name, incarnation] = seq
        self.decide(event)
        agent.unacked = [(number, one) for number, one in agent.unacked if number > seq]

    # --- the agents ---------------------------------------------------------------------------------------

    def _obey(self, agent: Agent, action: Any) -> None:
        match action:
            case model.Setup():
                if not agent.ready:
                    self.tell(agent, model.SetupStarted(host=agent.name))
                    self.after(1.0, lambda: self._prepared(agent, agent.incarnation))
            case model.StartGroup():
                mine = agent.groups.get(action.replica)
                if mine is not None and (not mine.phase.final or action.generation <= mine.generation):
                    return  # as the real one: what lives is not doubled
                mine = Mine(action.generation, action.max_restarts, restarts=len(action.spent_s))
                agent.groups[action.replica] = mine
                for age_s in action.spent_s:
                    self.after(max(0.0, self.limits.window_s - age_s), lambda mine=mine: self._forget(mine))
                self._begin(agent, action.replica)
            case model.StopGroup():
                mine = agent.groups.get(action.replica)
                if mine is None:
                    self.tell(agent, model.GroupStopped(replica=action.replica, generation=0))
                elif not mine.phase.final:
                    mine.live, mine.phase = False, GroupPhase.STOPPED
                    self.tell(agent, model.GroupStopped(replica=action.replica, generation=mine.generation))
            case model.Shutdown():
                agent.gone = True
                for mine in agent.groups.values():
                    mine.live = False

    def _prepared(self, agent: Agent, incarnation: int) -> None:
        if agent.incarnation == incarnation and not agent.ready:
            agent.ready = True
            self.tell(agent, model.SetupFinished(host=agent.name, failure=None))

    def _begin(self, agent: Agent, replica: int) -> None:
        mine = agent.groups[replica]
        mine.live, mine.phase = True, GroupPhase.STARTING
        whose = {"replica": replica, "generation": mine.generation}
        self.tell(agent, model.GenerationStarted(**whose))
        self.tell(agent, model.RankSpawned(**whose, rank=0))
        incarnation, generation = agent.incarnation, mine.generation

        def commits() -> None:
            same = agent.incarnation == incarnation and mine.generation == generation
            if same and mine.live and mine.phase is GroupPhase.STARTING:
                mine.phase = GroupPhase.RUNNING
                self.tell(agent, model.FirstCommit(**whose))

        self.after(0.5 + self.chance.random(), commits)

    def rank_dies(self, agent: Agent, replica: int) -> None:
        """A rank is killed: its agent replaces the generation, or gives the group up."""
        mine = agent.groups.get(replica)
        if mine is None or not mine.live or agent.gone:
            return
        whose = {"replica": replica, "generation": mine.generation}
        self.tell(agent, model.RankExited(**whose, rank=0, failure="rank 0 was killed by SIGKILL"))
        self.tell(agent, model.GenerationEnded(**whose, reason="rank 0 was killed by SIGKILL"))
        mine.live = False
        if mine.left == 0:
            mine.phase = GroupPhase.GIVEN_UP
            self.tell(agent, model.GroupGivenUp(**whose, restarts=mine.restarts, reason="killed"))
            return
        mine.left -= 1
        mine.restarts += 1
        mine.generation += 1
        mine.phase = GroupPhase.RESTARTING
        at = {"replica": replica, "generation": mine.generation}
        self.tell(agent, model.RestartScheduled(**at, mono_ns=self.now_ns))
        incarnation, generation = agent.incarnation, mine.generation

        def again() -> None:
            known = agent.groups.get(replica)
            if agent.incarnation == incarnation and known is mine and mine.phase is GroupPhase.RESTARTING:
                assert mine.generation == generation
                self._begin(agent, replica)

        self.after(0.1, again)
        self.after(self.limits.window_s, lambda: self._forget(mine))

    @staticmethod
    def _forget(mine: Mine) -> None:
        mine.left += 1
        mine.restarts -= 1

    def agent_dies(self, agent: Agent) -> None:
        """Killed, with all of its ranks; its keeper starts another one."""
        if agent.gone:
            return
        self.disconnect(agent, for_s=0.5)
        agent.connected = False
        agent.incarnation += 1
        agent.seq = 0
        agent.groups.clear()
        agent.unacked.clear()

    def finish(self, agent: Agent, replica: int) -> None:
        """The work of a group is done and its rank leaves."""
        mine = agent.groups.get(replica)
        if mine is not None and mine.live and not mine.phase.final:
            mine.live, mine.phase = False, GroupPhase.DONE
            whose = {"replica": replica, "generation": mine.generation}
            self.tell(agent, model.GroupDone(**whose, step=100))
            self.tell(agent, model.RankExited(**whose, rank=0, failure=None))

    def fail_every_second(self, seconds: int) -> None:
        """Something fails in each of the next seconds; its kind is up to chance."""
        names = list(self.agents)
        for second in range(seconds):
            agent = self.agents[self.chance.choice(names)]
            kind = self.chance.choices(
                ("rank", "cut", "silence", "agent", "controller", "pause"), (70, 12, 2, 8, 2, 6)
            )[0]
            self.failures[kind] = self.failures.get(kind, 0) + 1
            replica = self.chance.choice(agent.replicas)
            length_s = 40 * self.chance.random()
            acts: dict[str, Callable[[], None]] = {
                "rank": lambda agent=agent, replica=replica: self.rank_dies(agent, replica),
                "cut": lambda agent=agent: self.disconnect(agent),
                "silence": lambda agent=agent, length_s=length_s: self.disconnect(agent, for_s=length_s),
                "agent": lambda agent=agent: self.agent_dies(agent),
                "controller": self.controller_dies,
                "pause": lambda length_s=length_s: self.controller_pauses(length_s / 4),
            }
            self.after(second + self.chance.random(), acts[kind])

    # --- what must hold -----------------------------------------------------------------------------------

    def _check(self, before: model.State, event: model.Event, actions: tuple[Any, ...]) -> None:
        """The invariants of the design, after one decision.

        I4 (evict before spawn) is kept by agents and I7 by the lighthouse, I9 by sessions: the policy has no part
        in them. I6 is kept for what there is to provide today, the preparation of a host.
        """
        state = self.state
        if before.phase.ended:
            assert state.phase is before.phase, "an end is final"
        touched = {action.replica for action in actions if hasattr(action, "replica")}
        if hasattr(event, "replica"):
            touched.add(event.replica)
        for replica in touched:
            now, old = state.groups[replica], before.groups[replica]
            assert now.generation >= old.generation, "I1: generations only grow"
            over = self._over.get(replica)
            if over is GroupPhase.GIVEN_UP:
                assert now.phase in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED), "I5: given up stays so"
            elif over is not None:
                assert now.phase is over, "I5: what is over stays so"
            if now.phase.final:
                self._over[replica] = now.phase
        for action in actions:
            if isinstance(action, model.CancelTimer):
                continue
            assert action.reason, "every decision carries its reason"
            match action:
                case model.StartGroup():
                    now = state.groups[action.replica]
                    self._check_start(action, now)
                    assert action.generation == now.generation, "I1"
                    assert not before.groups[action.replica].phase.final, "I5: what is over is not started"
                    assert state.phase is not RunPhase.STOPPING, "I8: nothing starts in a run that ends"
                    assert not state.phase.ended, "I8: nothing starts in a run that ended"
                    spent = len(now.restarts_ns)
                    assert spent + action.max_restarts <= self.limits.max_restarts, "I3: the budget"
                case model.Setup():
                    incarnation = state.host(action.host).incarnation
                    lost = isinstance(event, model.AgentConnected) and event.host == action.host
                    assert self._preparing.get(action.host) != incarnation or lost, "I6: one order at a time"
                    self._preparing[action.host] = incarnation or 0
        if self.decisions % 997 == 0:
            self.check_all()

    def _check_start(self, action: model.StartGroup, group: model.Group) -> None:
        assert not group.live, "I1: what lives is not started"

    def check_all(self) -> None:
        """What costs a look at every group."""
        groups = self.state.groups
        assert groups == model.Groups.of(list(groups)), "what is at hand is what they come to"
        unready = sum(host.holds_up for host in self.state.hosts)
        assert self.state.unready == unready
        for group in groups:
            assert group.host_lost == any(self.state.host(name).lost for name in group.hosts)
            budget = [at for at in group.restarts_ns if at > self.now_ns - self.limits.window_s * S]
            assert len(budget) <= self.limits.max_restarts, "I3: the budget"

    def check_end(self) -> None:
        """I8, where the run has ended and everybody has heard of it."""
        assert self.state.phase.ended
        assert self.state.reason
        left = [mine for agent in self.agents.values() for mine in agent.groups.values() if mine.live]
        assert not left, "I8: nothing lives on"
