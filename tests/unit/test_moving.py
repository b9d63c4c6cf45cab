"""Groups of a job that goes to another place, by the policy alone."""

from __future__ import annotations

import json

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.memory import Memory
from tests.support.host_policies import HostRun

TWO = {"h0": (0, 1), "h1": (2,)}
ONE = {"h0": (0, 1, 2)}


def move(run: HostRun, choice: int, homes: dict[str, tuple[int, ...]]) -> list[model.Action]:
    return run.feed(model.JobPlaced(choice=choice, homes=tuple(homes.items())))


def homes(run: HostRun) -> dict[str, tuple[int, ...]]:
    return {host.name: host.replicas for host in run.state.hosts if host.replicas}


def test_hosts_that_a_place_does_not_need_are_wanted_no_more_and_groups_wait_for_those_that_it_has() -> None:
    run = HostRun()
    version = run.state.wanted
    move(run, 1, TWO)

    assert homes(run) == TWO
    assert run.wanted() == {"h0": (1, True), "h1": (1, True), "h2": (1, False)}
    assert [group.host for group in run.state.groups] == ["h0", "h0", "h1"]
    assert all(group.away for group in run.state.groups)
    assert run.state.wanted > version, "the launcher hears of it"
    run.report("h2", "down")
    run.launched("h0")
    run.runs(0)
    run.runs(1)
    assert run.host("h2").phase is model.HostPhase.DOWN


def test_a_host_that_was_left_out_and_is_needed_again_is_the_next_attempt() -> None:
    run = HostRun()
    move(run, 1, ONE)
    for host in ("h1", "h2"):
        run.report(host, "down")
    move(run, 2, {**TWO, "h4": ()})

    assert run.wanted() == {"h0": (1, True), "h1": (2, True), "h2": (1, False), "h4": (1, True)}
    assert run.host("h4").spare


@pytest.mark.parametrize("launched", [False, True])
def test_once_a_host_was_up_groups_stay_where_they_are(launched: bool) -> None:
    run = HostRun()
    run.report("h0", "launching")
    (run.report("h0", "launched") if launched else run.connect("h0"))
    before = run.state
    move(run, 1, ONE)
    assert homes(run) == {"h0": (0,), "h1": (1,), "h2": (2,)}
    assert run.state.placement == before.placement == 0
    assert run.state.settled


def test_the_summary_of_a_journal_knows_where_groups_are() -> None:
    hosts = {"head": (), "h0": (0,), "h1": (1,), "h2": (2,)}
    run = HostRun()

    def memory() -> Memory:
        return Memory(
            run.limits, hosts, has_setup=False, checkpoint_target=None, provisioned=("h0", "h1", "h2")
        )

    first = memory()
    row = {"event": "job_placed", "choice": 1, "homes": {"h0": [0, 1], "h5": [2]}, "wall_ms": 1, "mono_ns": 1}
    first.apply(row)
    other = memory()
    other.restore(json.loads(json.dumps(first.summary())))
    assert other.state == first.state
    assert {host.name: host.replicas for host in other.state.hosts if host.replicas} == {
        "h0": (0, 1),
        "h5": (2,),
    }
    assert other.since_ms["h5"] == 1
