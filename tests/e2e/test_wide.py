"""One replica group over two nodes of a real Slurm, a cluster of SkyPilot for each of them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.client import Client
from tests.e2e.site import Site
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

RESOURCES = {"accelerators": "MI300X:2", "gpus_per_host": 1, "cpus": "4+", "memory_gib": "4+"}


def test_a_group_over_two_nodes_keeps_both_jobs_at_a_crash_and_has_only_a_lost_node_replaced(
    site: Site, client: Client
) -> None:
    job = client.free_job("wide", replicas=1, min_replicas=1, ranks_per_replica=2, resources=RESOURCES)
    name = client.up(job)
    client.wait_for_all(name, step=10, within_s=900, replicas=1)
    jobs, before = client.host_jobs(name), client.status(name)
    assert len({job.node for job in jobs.values()}) == len(jobs) == 2
    assert all(rank["pid"] for rank in before["groups"][0]["ranks"])

    os.kill(client.rank_pid(name, 0, rank=1, host=1), signal.SIGKILL)
    eventually(
        lambda: client.status(name)["groups"][0]["generation"] > before["groups"][0]["generation"],
        within_s=30,
        what="the whole group is replaced",
    )
    crashed = client.wait_for_all(name, step=10, within_s=60, replicas=1)
    assert client.host_jobs(name) == jobs, "in the Slurm jobs that it has"
    ranks = [group["groups"][0]["ranks"] for group in (before, crashed)]
    assert all(old["pid"] != new["pid"] for old, new in zip(*ranks, strict=True)), "on both nodes"

    lost = jobs[f"{name}-h1"]
    free = site.free_nodes()
    site.slurm.kill_node(lost.node)
    eventually(lambda: client.host(name, 1)["attempt"] == 2, within_s=90, what="another one is asked for")
    eventually(
        lambda: client.status(name)["groups"][0]["generation"] > crashed["groups"][0]["generation"],
        within_s=300,
        every_s=0.5,
        what="it starts again",
    )
    after = client.wait_for_all(name, step=10, within_s=60, replicas=1)

    found = client.host_jobs(name)
    assert found[f"{name}-h0"] == jobs[f"{name}-h0"], "the other node's job is what it was"
    assert found[f"{name}-h1"].node in free
    left = [status["groups"][0]["restarts_left"] for status in (crashed, after)]
    assert left[0] == left[1], "a lost host spends no restart"
    site.slurm.wait_for_node(lost.node, "down", within_s=60)
    site.slurm.start_node(lost.node)
    client.end(name)
