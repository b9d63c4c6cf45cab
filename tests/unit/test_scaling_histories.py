"""Whatever number of groups is asked for, and whatever dies meanwhile: the run gets there, each group once."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.memory import Memory
from sky_monarch.controller.model import GroupPhase, StartGroup, StopGroup
from sky_monarch.controller.room import Room
from sky_monarch.controller.scale_plan import plan_scale
from sky_monarch.errors import ConfigError
from tests.support.policies import LIMITS

ROOM = Room(most=7, stem="job", per_host=2)
WIDE = dataclasses.replace(LIMITS, replicas=3, min_replicas=1, max_restarts=10**6)


class World:
    """A controller whose every act is a row; agents and launchers that do as they are told."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.rows: list[dict] = []
        self.memory = self.nothing()
        self.live: dict[int, tuple[str, int, int]] = {}  # group: host, attempt, generation
        self.agents: dict[str, tuple[int, int]] = {}  # host: attempt, incarnation
        self.timers: dict[str, float] = {}
        self.clusters: dict[str, int] = {}
        self.now = 0
        self.say({"event": "controller_started"})
        self.dial("head", 0)
        self.say({"event": "launcher_came"})

    @staticmethod
    def nothing() -> Memory:
        hosts = {"head": (), "job-h0": (0, 1), "job-h1": (2,)}
        provisioned = {"job-h0", "job-h1"}
        return Memory(WIDE, hosts, has_setup=False, checkpoint_target=None, provisioned=provisioned)

    def say(self, row: dict) -> None:
        self.now += 1
        row = {"wall_ms": self.now, "mono_ns": self.now, "id": self.now, **row}
        self.rows.append(row)
        actions = self.memory.apply(row)
        for action in actions:
            if not isinstance(action, model.CancelTimer):
                assert action.reason, "every decision carries its reason"
            if isinstance(action, model.SetTimer):
                self.timers[action.name] = action.delay_s
            elif isinstance(action, model.CancelTimer):
                self.timers.pop(action.name, None)
            elif self.dice.random() < 0.1:
                self.killed()  # after its row, before its act: whoever connects is told again
                return
            else:
                self.obey(action)

    def killed(self) -> None:
        """The controller is killed and begins anew; every agent dials again."""
        again = self.nothing()
        summary = None
        if self.dice.random() < 0.5:
            summary = json.loads(json.dumps(self.memory.summary()))
            again.restore(summary)
        else:
            for row in self.rows:
                again.apply(row)
        assert again.state.replicas == self.memory.state.replicas, "the number survives a controller"
        known = dataclasses.asdict(again.state)["hosts"]
        assert known == dataclasses.asdict(self.memory.state)["hosts"]
        self.memory = again
        self.timers = dict(again.timers)
        self.say({"event": "controller_started"})
        for host, (attempt, incarnation) in list(self.agents.items()):
            self.dial(host, attempt, incarnation)

    def obey(self, action: model.Action) -> None:
        if isinstance(action, StartGroup):
            if action.host not in self.agents or action.replica in self.live:
                return
            attempt = self.agents[action.host][0]
            assert action.replica not in self.live, "I1"
            self.live[action.replica] = (action.host, attempt, action.generation)
            self.say(self.of(action.replica, "generation_started"))
            if action.replica in self.live:
                self.say({**self.of(action.replica, "rank_spawned"), "rank": 0, "pid": 1, "warm": False})
            if action.replica in self.live:
                self.say({**self.of(action.replica, "first_commit"), "step": 1, "heal": None})
        elif isinstance(action, StopGroup) and action.replica in self.live:
            row = self.of(action.replica, "group_stopped")
            del self.live[action.replica]
            self.say(row)
        elif isinstance(action, model.Shutdown | model.Fence) and action.host in self.agents:
            self.hang_up(action.host)

    def of(self, replica: int, event: str) -> dict:
        host, _, generation = self.live[replica]
        return {"event": event, "host": host, "replica": replica, "generation": generation}

    def hang_up(self, host: str) -> None:
        del self.agents[host]
        for replica in [one for one, (home, _, _) in self.live.items() if home == host]:
            del self.live[replica]
        self.say({"event": "agent_disconnected", "host": host})

    def dial(self, host: str, attempt: int, incarnation: int | None = None) -> None:
        incarnation = self.now + 1000 if incarnation is None else incarnation
        self.agents[host] = (attempt, incarnation)
        groups = [
            {"replica": one, "generation": generation, "state": "RUNNING", "restarts": 0, "pids": {"0": 1}}
            for one, (home, _, generation) in self.live.items()
            if home == host
        ]
        row = {"event": "agent_connected", "host": host, "incarnation": incarnation, "groups": groups}
        self.say({**row, **({"attempt": attempt} if attempt else {})})

    # --- what may happen ---------------------------------------------------------------------------------------

    def scale(self) -> None:
        before = self.memory.state
        try:
            plan = plan_scale(before, WIDE, self.dice.randint(1, 8), ROOM)
        except ConfigError:
            assert self.memory.state is before
            return
        if plan.is_change:
            homes = {name: list(mine) for name, mine in plan.homes.items()}
            self.say({"event": "scaled", "replicas": plan.replicas, "homes": homes, "reason": "asked"})

    def launch(self) -> None:
        """The launcher brings hosts to what is wanted."""
        for host in self.memory.state.hosts:
            if not host.provisioned:
                continue
            name, wanted = host.name, model_wanted(self.memory.state, host.name)
            if not wanted and name in self.clusters:
                if name in self.agents:
                    self.hang_up(name)
                attempt = self.clusters.pop(name)
                self.report(name, attempt, "down")
            elif wanted and self.clusters.get(name) != host.attempt:
                if name in self.agents:
                    self.hang_up(name)
                self.clusters[name] = host.attempt
                self.report(name, host.attempt, "launching")
                self.report(name, host.attempt, "launched")
                if model_wanted(self.memory.state, name):
                    self.dial(name, host.attempt)

    def report(self, host: str, attempt: int, state: str) -> None:
        said = {"kind": None, "reason": None, "choice": None, "place": None, "usd_per_hour": None}
        self.say({"event": "host_report", "host": host, "attempt": attempt, "state": state, **said})

    def lose(self) -> None:
        mine = [name for name in self.agents if name != "head"]
        if mine:
            name = self.dice.choice(sorted(mine))
            self.hang_up(name)
            self.fire(f"agent:{name}")

    def fire(self, name: str) -> None:
        if self.timers.pop(name, None) is not None:
            self.memory.timers.pop(name, None)
            self.say({"event": "timer_fired", "timer": name})


def model_wanted(state: model.State, name: str) -> bool:
    from sky_monarch.controller.hosts import is_wanted

    return is_wanted(state, state.host(name))


def check(world: World) -> None:
    state = world.memory.state
    assert not state.phase.ended
    for replica, (host, attempt, generation) in world.live.items():
        assert state.groups[replica].generation >= generation
        assert state.groups[replica].host == host, "a group never moves"
        assert attempt <= state.host(host).attempt


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_is_scaled_again_and_again_gets_to_what_was_asked_last(seed: int) -> None:
    world = World(random.Random(seed))
    acts = [world.scale] * 3 + [world.launch] * 4 + [world.lose, world.killed]
    for _ in range(30):
        world.dice.choice(acts)()
        for name in sorted(world.timers):
            if world.dice.random() < 0.5:
                world.fire(name)
        check(world)
    world.dice = random.Random(0)
    world.dice.random = lambda: 1.0  # type: ignore[method-assign]  # nobody dies any more
    world.killed()
    for _ in range(10):
        world.launch()
        for name in sorted(world.timers):
            world.fire(name)
    state = world.memory.state
    assert sorted(world.live) == list(range(state.replicas)), "as many as were asked for last, and no other"
    assert [group.phase for group in state.groups[: state.replicas]] == [GroupPhase.RUNNING] * state.replicas
    needed = {group.host for group in state.groups[: state.replicas]}
    assert set(world.clusters) == needed, "no host stands that nothing runs on"


def test_a_summary_of_a_version_that_knew_no_scaling_is_read() -> None:
    world = World(random.Random(1))
    summary = json.loads(json.dumps(world.memory.summary()))
    del summary["state"]["replicas"]
    for group in summary["state"]["groups"]:
        del group["dropped"]
    again = world.nothing()
    again.restore(summary)
    assert again.state.replicas == 3
