"""All nodes are taken at once: nothing of the run is left but its durable checkpoint, and it goes on from that.

In a file of its own, before the scenarios of three groups that stay up: it needs every node of the cluster.
"""

from __future__ import annotations

import pytest

from tests.e2e.client import REPLICAS, Client
from tests.e2e.site import Site
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

EVERY_STEPS = 20


def test_when_all_groups_are_pre_empted_the_run_resumes_from_its_checkpoint(
    site: Site, client: Client
) -> None:
    slurm, name = site.slurm, "saved"
    place = slurm.root / "home/checkpoints"
    job = client.training_job(name, checkpoint={"to": str(place), "every_steps": EVERY_STEPS})
    client.up(job)
    try:
        before = client.wait_for_all(name, step=2 * EVERY_STEPS + 10, within_s=900)
        taken = [slurm.take(node) for node in slurm.nodes]
        try:
            eventually(
                lambda: len([j for j in slurm.jobs(named="other") if j.state == "RUNNING"]) == len(taken),
                within_s=90,
                every_s=0.5,
                what="all nodes are taken",
            )
            running = [job for job in slurm.jobs(named=f"{name}-h") if job.state == "RUNNING"]
            assert not running, "nobody has the state in its memory any more"
            events = client.events(name)
            saved = max(event["step"] for event in events if event["event"] == "checkpoint_saved")
            stood = client.status(name)
            assert stood["state"] not in ("FAILED", "CANCELLED"), "it waits"
            assert saved >= stood["step"] - 2 * EVERY_STEPS, (saved, stood["step"])
        finally:
            slurm.cancel(*taken)
        after = client.wait_for_all(name, step=stood["step"] + EVERY_STEPS, within_s=900)

        later = client.events(name)[len(events) :]
        restored = [event["step"] for event in later if event["event"] == "checkpoint_restored"]
        assert restored, "from the checkpoint"
        assert min(restored) >= saved, "from the newest one"
        first = {event["replica"]: event["step"] for event in later if event["event"] == "first_commit"}
        assert first.keys() == set(range(REPLICAS))
        assert min(first.values()) > saved, "nobody began anew"
        for group, was in zip(after["groups"], before["groups"], strict=True):
            assert group["generation"] > was["generation"]
            assert group["restarts_left"] == was["restarts_left"], "none is spent"
    finally:
        client.end(name)
