"""Whole runs of groups with two hosts each, in virtual time: whatever fails, parts begin and end together."""

from __future__ import annotations

import pytest

from sky_monarch.controller.model import GroupPhase, RunPhase
from tests.support.wide_simulation import WideSimulation

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]


@pytest.mark.parametrize("seed", SEEDS)
def test_wide_groups_whose_ranks_and_hosts_are_lost_again_and_again_keep_their_invariants_and_end(
    seed: int,
) -> None:
    world = WideSimulation(4, seed=seed, setup=seed % 3 == 0, steady=seed % 2 == 0, max_restarts=60)
    world.trouble = 0.1
    world.run(60)
    world.fail_every_second(240)
    world.run(400)
    world.check_all()
    assert world.failures.keys() >= {"host", "leaves", "partition", "launcher", "controller"}
    assert sum(group.generation for group in world.state.groups) > 10, "they died and began again"
    if not world.state.phase.ended:
        end(world)


def end(world: WideSimulation) -> None:
    """Quiet until all is back, then every part is done, and every host is taken down."""
    world.steady, world.trouble = True, 0.0
    for agent in list(world.agents.values()):
        world.disconnect(agent)
    world.run(3000)
    assert world.state.phase in (RunPhase.RUNNING, RunPhase.DEGRADED), (world.state.phase, world.state.reason)
    for group in world.state.groups:
        assert group.phase is GroupPhase.RUNNING or group.phase.final, (group, world.state.reason)
    world.check_together()
    for agent in world.agents.values():
        for replica in agent.replicas:
            world.finish(agent, replica)
    world.run(900)
    world.check_end()
    assert world.state.phase is RunPhase.SUCCEEDED, world.state.reason
    assert not any(cluster.alive for cluster in world.clusters.values())


def test_a_crash_loop_on_two_hosts_spends_one_budget() -> None:
    world = WideSimulation(2, seed=7, steady=True, max_restarts=3)
    world.trouble = 0.0
    world.run(120)
    for second in range(60):
        world.run(2)
        agent = world.agents[f"h{2 + second % 2}"]
        world.rank_dies(agent, 1)
    world.run(60)

    assert world.state.groups[1].phase is GroupPhase.GIVEN_UP
    assert "after 3 restarts" in (world.state.groups[1].reason or "")
    assert len(world.restarts_ns[1]) == 3, "I3: not one for each host"
    assert world.state.phase is RunPhase.DEGRADED
    assert not any(mine.live for name in ("h2", "h3") for mine in world.agents[name].groups.values())
