"""Whole runs on provisioned hosts in virtual time: whatever fails, of hosts, launcher, agents and controller."""

from __future__ import annotations

import pytest

from sky_monarch.controller.model import GroupPhase, RunPhase
from tests.support.host_simulation import HostSimulation


@pytest.mark.parametrize("seed", range(16))
def test_a_run_whose_hosts_are_lost_again_and_again_keeps_its_invariants_and_ends(seed: int) -> None:
    options = {"setup": seed % 3 == 0, "steady": seed % 2 == 0, "spare": seed // 2 % 3}
    world = HostSimulation(8, hosts=4, seed=seed, max_restarts=60, **options)
    world.run(60)
    world.fail_every_second(240)
    world.run(400)
    world.check_all()
    assert world.failures.keys() >= {"host", "leaves", "partition", "launcher", "controller"}
    assert sum(host.attempt for host in world.state.hosts) > 8, "hosts were lost and had again"
    if not world.state.phase.ended:
        end(world)


def end(world: HostSimulation) -> None:
    """Quiet until all is back, then every group is done, and every host is taken down."""
    world.steady, world.trouble = True, 0.0
    for agent in list(world.agents.values()):
        world.disconnect(agent)
    world.run(3000)
    assert world.state.phase in (RunPhase.RUNNING, RunPhase.DEGRADED), (world.state.phase, world.state.reason)
    for group in world.state.groups:
        assert group.phase is GroupPhase.RUNNING or group.phase.final, (group, world.state.reason)
    for agent in world.agents.values():
        for replica in list(agent.groups):
            world.finish(agent, replica)
    world.run(900)
    world.check_end()
    assert world.state.phase is RunPhase.SUCCEEDED, world.state.reason
    assert "may still bill" not in (world.state.reason or "")
    assert not any(cluster.alive for cluster in world.clusters.values())
