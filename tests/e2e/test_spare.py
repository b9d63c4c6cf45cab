"""A warm spare host on real Slurm: the groups of a lost node go on there, and what comes back is the next spare."""

from __future__ import annotations

import time

import pytest

from tests.e2e.client import Client
from tests.e2e.site import Site
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

GROUPS = 2
#: 5 s of silence, then a start; a bare `sky launch` of one cluster takes some 20.
ON_THE_SPARE_S = 15.0


def test_the_group_of_a_lost_node_goes_on_on_the_spare_one_and_its_host_returns_as_the_next(
    site: Site, client: Client
) -> None:
    recovery = {"standby": 0, "grace_s": 3, "spare": 1}
    name = client.up(client.free_job("spared", replicas=GROUPS, min_replicas=1, recovery=recovery))
    names = {f"{name}-h{number}" for number in range(GROUPS + 1)}

    def all_have_dialled() -> bool:
        dialled = {event["host"] for event in client.events(name) if event["event"] == "agent_connected"}
        assert names <= dialled, dialled
        return True

    client.wait_for_all(name, step=10, within_s=900, replicas=GROUPS)
    eventually(all_have_dialled, within_s=200, every_s=0.5, what="the spare one has dialled")
    # The groups are on the hosts that were there first.
    lost = client.host_of(name, 1)
    (spare,) = names - {client.host_of(name, group) for group in range(GROUPS)}
    jobs, before = client.host_jobs(name), client.status(name)
    (free,) = site.free_nodes()
    assert {job.node for job in jobs.values()} == set(site.slurm.nodes) - {free}, "a node each"
    assert {host["host"] for host in before["hosts"] if host["spare"]} == {spare}

    killed_s = time.monotonic()
    site.slurm.kill_node(jobs[lost].node)
    eventually(lambda: client.host_of(name, 1) == spare, within_s=60, what="it is placed on the spare one")
    client.wait_for_all(name, step=(before["step"] or 0) + 10, within_s=60, replicas=GROUPS)

    back = next(step for step in client.steps(name, 1) if step.at_s > killed_s + 1)
    back_s = back.at_s - killed_s
    print(f"its first commit on the spare node {back_s:.2f} s after the loss")  # -rP shows it
    assert back_s <= ON_THE_SPARE_S
    others = {key: job for key, job in client.host_jobs(name).items() if key != lost}
    assert others == {key: job for key, job in jobs.items() if key != lost}, "the other jobs are unchanged"

    def returned() -> bool:
        host = next(one for one in client.status(name)["hosts"] if one["host"] == lost)
        assert (host["attempt"], host["phase"], host["spare"]) == (2, "UP", True), host
        return True

    eventually(returned, within_s=300, every_s=0.5, what="the lost host is the next spare one")
    after = client.status(name)
    assert client.host_jobs(name)[lost].node == free
    assert after["groups"][0]["ranks"] == before["groups"][0]["ranks"], "nobody touched the other group"
    assert after["groups"][1]["restarts_left"] == before["groups"][1]["restarts_left"], "none is spent"
    assert {host["host"] for host in after["hosts"] if host["spare"]} == {lost}
    site.slurm.wait_for_node(jobs[lost].node, "down", within_s=60)
    site.slurm.start_node(jobs[lost].node)
    client.end(name)
