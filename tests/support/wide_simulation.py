"""The same with groups that have two hosts each: their agents end what dies and start what they are told, no more."""

from __future__ import annotations

from typing import Any

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase
from tests.support.host_simulation import HostSimulation
from tests.support.simulation import Agent, Mine, S

NODES = 2


class WideSimulation(HostSimulation):
    """One history, decided by its seed; each group has a rank on each of its two hosts."""

    ranks = NODES

    def __init__(self, groups: int, *, seed: int, **options: Any) -> None:
        self.restarts_ns: dict[int, list[int]] = {}
        self.gaps: list[tuple[int, int]] = []
        super().__init__(groups, hosts=groups * NODES, seed=seed, **options)

    @staticmethod
    def _spread(groups: int, hosts: int) -> dict[str, tuple[int, ...]]:
        assert hosts == groups * NODES
        return {f"h{host}": (host // NODES,) for host in range(hosts)}

    def _rank(self, agent: Agent) -> int:
        return int(agent.name.removeprefix("h")) % NODES

    # --- the controller's own rows ----------------------------------------------------------------------------

    def _send(self, action: Any, order: int) -> None:
        match action:
            case model.ScheduleRestart():
                self.restarts_ns.setdefault(action.replica, []).append(self.now_ns)
                row = {"replica": action.replica, "generation": action.generation}
                self.decide(model.RestartScheduled(**row, mono_ns=self.now_ns))
            case model.GiveUpGroup():
                row = {"replica": action.replica, "generation": action.generation}
                self.decide(model.GroupGivenUp(**row, restarts=action.restarts, reason=action.reason))
            case _:
                super()._send(action, order)

    # --- the agents ---------------------------------------------------------------------------------------------

    def _whose(self, agent: Agent, replica: int, generation: int) -> dict[str, Any]:
        return {"replica": replica, "generation": generation, "host": agent.name}

    def _end(self, agent: Agent, replica: int, mine: Mine, reason: str) -> None:
        whose = self._whose(agent, replica, mine.generation)
        mine.live, mine.phase = False, GroupPhase.RESTARTING
        self.tell(agent, model.GenerationEnded(**whose, reason=reason, mono_ns=self.now_ns))

    def _obey(self, agent: Agent, action: Any) -> None:
        match action:
            case model.StartGroup():
                self._start(agent, action)
            case model.EndGeneration():
                mine = agent.groups.get(action.replica)
                if mine is None or not mine.live:
                    whose = self._whose(agent, action.replica, action.generation)
                    ended = model.GenerationEnded(**whose, reason=action.reason, mono_ns=self.now_ns)
                    self.tell(agent, ended)
                elif mine.generation <= action.generation:
                    self.after(2.0 * self.chance.random(), lambda: self._ended(agent, action, mine))
            case model.StopGroup():
                mine = agent.groups.get(action.replica)
                if mine is None or mine.phase.final:
                    self.tell(agent, model.GroupStopped(**self._whose(agent, action.replica, 0)))
                    return
                whose = self._whose(agent, action.replica, mine.generation)
                if mine.live:
                    self.tell(agent, model.GenerationEnded(**whose, reason="it was stopped", stopped=True))
                mine.live, mine.phase = False, GroupPhase.STOPPED
                self.tell(agent, model.GroupStopped(**whose, mono_ns=self.now_ns))
            case _:
                super()._obey(agent, action)

    def _start(self, agent: Agent, action: model.StartGroup) -> None:
        mine = agent.groups.get(action.replica)
        if mine is not None and mine.generation >= action.generation:
            return
        assert mine is None or not mine.live, (
            "I1: what lives is ended, and said to be, before the next one starts"
        )
        assert (action.store is None) == (self._rank(agent) == 0), "the others are told where the store is"
        agent.groups[action.replica] = Mine(action.generation, 0)
        self._begin(agent, action.replica)

    def _ended(self, agent: Agent, action: model.EndGeneration, mine: Mine) -> None:
        if mine.live and agent.groups.get(action.replica) is mine and not agent.gone:
            self._end(agent, action.replica, mine, f"it ended on another host: {action.reason}")

    def _begin(self, agent: Agent, replica: int) -> None:
        mine = agent.groups[replica]
        mine.live, mine.phase = True, GroupPhase.STARTING
        whose, rank = self._whose(agent, replica, mine.generation), self._rank(agent)
        store = f"{agent.name}:29400" if rank == 0 else None
        self.tell(agent, model.GenerationStarted(**whose, store=store, mono_ns=self.now_ns))
        self.tell(agent, model.RankSpawned(**whose, rank=rank))

        def commits() -> None:
            if agent.groups.get(replica) is mine and mine.live and mine.phase is GroupPhase.STARTING:
                mine.phase = GroupPhase.RUNNING
                self.tell(agent, model.FirstCommit(**whose))

        self.after(0.5 + self.chance.random(), commits)

    def rank_dies(self, agent: Agent, replica: int) -> None:
        """A rank is killed: its agent ends its part, and waits."""
        mine = agent.groups.get(replica)
        if mine is None or not mine.live or agent.gone:
            return
        whose = self._whose(agent, replica, mine.generation)
        killed = f"rank {self._rank(agent)} was killed by SIGKILL"
        self.tell(agent, model.RankExited(**whose, rank=self._rank(agent), failure=killed))
        self._end(agent, replica, mine, killed)

    def finish(self, agent: Agent, replica: int) -> None:
        """The work of a part is done and its rank leaves."""
        mine = agent.groups.get(replica)
        if mine is not None and mine.live and not mine.phase.final:
            mine.live, mine.phase = False, GroupPhase.DONE
            whose = self._whose(agent, replica, mine.generation)
            self.tell(agent, model.GroupDone(**whose, step=100))
            self.tell(agent, model.RankExited(**whose, rank=self._rank(agent), failure=None))

    # --- what must hold -----------------------------------------------------------------------------------------

    def _check_start(self, action: model.StartGroup, group: model.Group) -> None:
        for name in group.hosts:
            agent, host = self.agents.get(name), self.state.host(name)
            mine = None if agent is None or agent.gone else agent.groups.get(action.replica)
            if agent is None or mine is None or agent.attempt != host.attempt:
                continue  # who is cut off is fenced by the number, at the lighthouse and at its own agent
            older = mine.live and mine.generation < action.generation
            assert not older, "I1: no part of an older generation lives on any host"

    def _check(self, before: model.State, event: model.Event, actions: tuple[Any, ...]) -> None:
        super()._check(before, event, actions)
        for action in actions:
            if isinstance(action, model.ScheduleRestart):
                granted = [*self.restarts_ns.get(action.replica, ()), self.now_ns]
                window_ns = round(self.limits.window_s * S)
                inside = [at for at in granted if at > self.now_ns - window_ns]
                assert len(inside) <= self.limits.max_restarts, (
                    "I3: the budget is the group's, on all its hosts"
                )

    def check_together(self) -> None:
        """In quiet, all parts of a group that runs are of one generation."""
        for group in self.state.groups:
            if group.phase is GroupPhase.RUNNING:
                parts = [self.agents[name].groups[group.replica] for name in group.hosts]
                assert {part.generation for part in parts} == {group.generation}, (group, parts)
                assert all(part.live for part in parts), (group, parts)
