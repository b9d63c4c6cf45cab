"""Who saves when hosts are taken away: one group of the last host that has the state, and nobody before."""

from __future__ import annotations

import dataclasses

from sky_monarch.controller import model
from sky_monarch.controller.model import WhoSaves
from tests.support.host_policies import LIMITS, HostRun
from tests.support.policies import LIMITS as ALONE
from tests.support.policies import Run, kinds


def noticed(run: HostRun | Run, host: str) -> list[tuple[str, int | None]]:
    told = run.feed(model.HostLeaving(host=host, reason="pre-empted"))
    assert all(action.reason for action in kinds(told, WhoSaves))
    return [(action.host, action.replica) for action in kinds(told, WhoSaves)]


def run_of(*, saves: bool = True) -> HostRun:
    run = HostRun(dataclasses.replace(LIMITS, last_saves=saves))
    run.up()
    return run


def test_of_hosts_that_leave_at_once_the_last_saves() -> None:
    run = run_of()
    assert noticed(run, "h1") == [("h1", None)]
    assert noticed(run, "h0") == [("h0", None)]
    assert noticed(run, "h2") == [("h2", 2)]
    assert noticed(run, "h2") == [], "a second notice changes nothing"


def test_who_has_not_committed_yet_is_nobody_to_heal_from() -> None:
    run = HostRun(dataclasses.replace(LIMITS, last_saves=True))
    run.launched("h0")
    run.launched("h1")
    run.runs(0)
    assert noticed(run, "h0") == [("h0", 0)]


def test_a_host_that_is_silent_is_nobody_to_heal_from() -> None:
    run = run_of()
    for host in ("h0", "h2"):
        run.feed(model.AgentDisconnected(host=host))
    assert noticed(run, "h1") == [("h1", 1)]


def test_the_lowest_group_of_the_only_host_saves() -> None:
    run = Run(dataclasses.replace(ALONE, last_saves=True))
    run.up()
    run.feed(model.RestartScheduled(replica=0, generation=2, mono_ns=1))
    assert noticed(run, "local") == [("local", 1)]


def test_nobody_is_told_where_the_job_has_no_checkpoint() -> None:
    assert noticed(run_of(saves=False), "h0") == []


def test_a_host_that_is_cut_off_before_its_groups_have_left_is_a_loss() -> None:
    run = run_of()
    noticed(run, "h1")
    lost = kinds(run.feed(model.AgentDisconnected(host="h1")), model.HostLost)
    assert [action.groups for action in lost] == [((1, 1),)]
    noticed(run, "h2")
    run.stopped(2)
    assert not kinds(run.feed(model.AgentDisconnected(host="h2")), model.HostLost), "it has left in order"
