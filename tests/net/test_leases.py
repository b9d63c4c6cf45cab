"""A host that is cut off without a reset, while its agent talks all the time: it knows within its lease, and leaves."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.hosts import enrolled_hosts
from tests.support.network import network, why_not
from tests.support.processes import is_alive
from tests.support.runs import FREE_RANK, Workbench, pid_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(240)]
if missing := why_not():
    pytestmark.append(pytest.mark.skip(missing))

HOSTS, VICTIM = 3, 1
LEASE_S = 3.0
# What was sent and is not acknowledged for so long ends a connection (rust_core/src/wire/stream.rs).
UNACKNOWLEDGED_S = 8.0


def test_a_host_whose_cable_is_pulled_ends_its_ranks_when_its_lease_is_over(workbench: Workbench) -> None:
    job = workbench.job("lease", run=f"{FREE_RANK} --steps 3000 --quorum-timeout-s 120")
    with (
        network(HOSTS) as net,
        enrolled_hosts(
            workbench, job, count=HOSTS, agent_limits={"lease_s": LEASE_S, "evict_s": 1}, net=net
        ) as far,
    ):
        before = workbench.wait_for_step(far.name, 20)
        name = f"{far.name}-h{VICTIM}"
        # Each took the address that the route to the head begins at.
        told = [json.loads((folder / "agent.json").read_text())["address"] for folder in far.hosts.values()]
        assert told == net.addresses
        victim = pid_of(before, VICTIM)
        assert is_alive(victim)

        net.unplug(VICTIM)
        cut_s = time.monotonic()
        at = workbench.status(far.name)["step"]
        eventually(
            lambda: workbench.status(far.name)["step"] >= at + 20, within_s=20, what="the others go on"
        )
        if time.monotonic() - cut_s < UNACKNOWLEDGED_S:
            assert is_alive(victim), "it may come back: nothing has ended it yet"
        assert far.keepers[name].wait(60) == 1
        took_s = time.monotonic() - cut_s
        assert not is_alive(victim)
        assert LEASE_S < took_s < UNACKNOWLEDGED_S + LEASE_S + 10, took_s
        log = (far.run_dir / f"{name}.log").read_text()
        assert f"no controller for {LEASE_S:g} s: the lease is over" in log
        now = workbench.status(far.name)
        for replica in {0, 2}:
            assert pid_of(now, replica) == pid_of(before, replica), "nobody else was touched"
        net.plug(VICTIM)
