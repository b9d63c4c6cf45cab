"""A head that is a job of a real Slurm is cancelled: another one follows, and the run goes on from its checkpoint."""

from __future__ import annotations

import pytest

from sky_monarch.launch.folder import Phase
from tests.e2e.client import Client
from tests.e2e.site import Site
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(3000), pytest.mark.slow]

GROUPS = 2
EVERY_STEPS = 20
#: What a head needs it has from the package index: on a busy machine that takes minutes.
UP_S = 900


def test_a_run_whose_head_is_lost_goes_on_from_its_checkpoint_under_another_one(
    site: Site, client: Client
) -> None:
    place = site.slurm.root / "home/of-a-lost-head"
    job = client.training_job(
        "bereft",
        replicas=GROUPS,
        min_replicas=1,
        head="cluster",
        checkpoint={"to": str(place), "every_steps": EVERY_STEPS},
    )
    name = client.up(job, timeout_s=UP_S)
    before = client.wait_for_all(name, step=2 * EVERY_STEPS + 10, within_s=900, replicas=GROUPS)
    jobs, folder = client.host_jobs(name), client.folder_of(name)
    (head,) = site.slurm.jobs(named=f"{name}-head")
    events = client.events(name)
    saved = max(event["step"] for event in events if event["event"] == "checkpoint_saved")

    site.slurm.cancel(head.number)

    eventually(lambda: folder.head_was_lost, within_s=180, every_s=0.2, what="its launcher has found out")
    eventually(lambda: folder.phase() is Phase.LIVE, within_s=UP_S, every_s=0.5, what="another head is up")
    after = client.wait_for_all(name, step=saved + EVERY_STEPS, within_s=900, replicas=GROUPS)

    (next_head,) = site.slurm.jobs(named=f"{name}-head")
    assert next_head.number != head.number
    found = client.host_jobs(name)
    assert found.keys() == jobs.keys()
    assert not {job.number for job in found.values()} & {job.number for job in jobs.values()}
    assert min(host["attempt"] for host in after["hosts"] if not host.get("head")) >= 2
    for group, was in zip(after["groups"], before["groups"], strict=True):
        assert group["generation"] > was["generation"]
    told = client.events(name)
    assert [event["id"] for event in told] == sorted({event["id"] for event in told}), "no id is given twice"
    (replaced,) = (event for event in told if event["event"] == "head_replaced")
    later = [event for event in told if event["id"] > replaced["id"]]
    restored = [event["step"] for event in later if event["event"] == "checkpoint_restored"]
    assert restored, "from the checkpoint"
    assert min(restored) >= saved, "from the newest one"
    assert min(event["step"] for event in later if event["event"] == "first_commit") > saved
    client.end(name)
    assert not site.slurm.jobs(named=f"{name}-head")
