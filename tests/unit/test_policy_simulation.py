"""Whole runs in virtual time: whatever fails, is lost, late, doubled or out of order, the invariants hold."""

from __future__ import annotations

import time

import pytest

from sky_monarch.controller.model import GroupPhase, RunPhase
from tests.support.simulation import Simulation


@pytest.mark.parametrize("seed", range(24))
def test_a_run_of_many_failures_keeps_its_invariants_and_ends(seed: int) -> None:
    budget = 2 if seed % 4 < 2 else 60
    world = Simulation(12, hosts=4, seed=seed, setup=seed % 3 == 0, steady=seed % 2 == 0, max_restarts=budget)
    world.run(10)
    world.fail_every_second(120)
    world.run(180)
    world.check_all()
    if not world.state.phase.ended:
        end(world)


def end(world: Simulation) -> None:
    """Quiet for a while, then every group is done; those that cannot be any more are named."""
    world.steady = True
    for agent in world.agents.values():
        world.disconnect(agent)
    world.run(120)
    for group in world.state.groups:
        assert group.phase is GroupPhase.RUNNING or group.phase.final, (group, world.state.phase)
    for agent in world.agents.values():
        for replica in agent.replicas:
            world.finish(agent, replica)
    world.run(300)
    world.check_end()
    state = world.state
    assert state.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED), state.reason
    done = sum(group.phase is GroupPhase.DONE for group in state.groups)
    assert (state.phase is RunPhase.SUCCEEDED) == (done >= world.limits.min_replicas)


def test_the_cost_of_a_decision_does_not_grow_with_the_run() -> None:
    """A hundred times the groups in less than ten times the time, where each was looked at it was 50 times."""
    cost_s = {}
    for groups in (50, 5_000):
        world = Simulation(groups, hosts=groups // 10, seed=1, steady=True)
        world.run(5)
        assert world.state.phase is RunPhase.RUNNING
        world.decisions, world.deciding_s = 0, 0.0
        since = time.monotonic()
        while world.decisions < 400 and time.monotonic() - since < 10:
            world.fail_every_second(20)
            world.run(22)
        cost_s[groups] = world.deciding_s / world.decisions
    assert cost_s[5_000] < 10 * cost_s[50], cost_s
