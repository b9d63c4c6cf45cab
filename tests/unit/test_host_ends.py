"""How a run with hosts ends: in order, when all of them are down, and with what may still bill named."""

from __future__ import annotations

import dataclasses

from sky_monarch.controller import model
from sky_monarch.controller.model import RunPhase
from tests.support.host_policies import LIMITS, HostRun
from tests.support.policies import kinds


def test_the_end_waits_until_every_host_is_down_and_the_head_goes_last() -> None:
    run = HostRun()
    run.up()
    for replica in range(3):
        run.done(replica)
    assert run.state.phase is RunPhase.STOPPING
    assert run.state.reason == "every replica group is done; taking down h0, h1, h2"
    assert all(wanted for _, wanted in run.wanted().values()), "what was printed last is still read"
    actions = run.timer("reap")
    assert not any(wanted for _, wanted in run.wanted().values())
    assert [order.host for order in kinds(actions, model.Shutdown)] == ["h0", "h1", "h2"]
    for host in ("h0", "h1"):
        run.report(host, "down")
    assert run.state.phase is RunPhase.STOPPING
    actions = run.report("h2", "ended")
    assert (run.state.phase, run.state.exit_code) == (RunPhase.SUCCEEDED, 0)
    assert run.state.reason == "every replica group is done"
    assert [order.host for order in kinds(actions, model.Shutdown)] == ["head"]


def test_a_host_that_cannot_be_taken_down_is_named_at_the_limit_as_what_may_still_bill() -> None:
    run = HostRun()
    run.up()
    run.down()
    for replica in range(3):
        run.stopped(replica)
    run.timer("reap")
    run.report("h0", "down")
    run.report("h1", "down_failed", reason="the API answered 500")
    assert run.state.phase is RunPhase.STOPPING, "it is tried again until the limit"
    run.timer("reap")
    assert (run.state.phase, run.state.exit_code) == (RunPhase.CANCELLED, 8)
    assert run.state.reason == (
        "down was called; host h1 may still bill: the API answered 500; "
        "host h2 may still bill: nobody has said within 600 s that it is down"
    )


def test_down_while_hosts_are_launched_cancels_them_at_once() -> None:
    run = HostRun()
    run.launched("h0")
    run.report("h1", "launching")
    run.down()
    assert run.wanted() == {"h0": (1, True), "h1": (1, False), "h2": (1, False)}
    run.stopped(0)
    run.timer("reap")
    for host in ("h0", "h1", "h2"):
        run.report(host, "down")
    assert run.state.phase is RunPhase.CANCELLED


def test_down_before_anybody_has_asked_waits_for_nobody() -> None:
    state = model.initial_state({"head": (), "h0": (0,)}, setup=False, provisioned={"h0"})
    limits = dataclasses.replace(LIMITS, replicas=1, min_replicas=1)
    for event in (model.ControllerStarted(), model.DownRequested(grace_s=1.0, reason="down")):
        state = model_step(state, event, limits)
    assert state.phase is RunPhase.CANCELLED


def model_step(state: model.State, event: model.Event, limits: model.Limits) -> model.State:
    from sky_monarch.controller.policy import step

    return step(state, event, limits).state


def test_a_spent_budget_ends_the_run_in_order() -> None:
    run = HostRun()
    run.up()
    run.feed(model.BudgetSpent(reason="the budget is spent: 50.01 of max_usd 50"))
    assert run.state.phase is RunPhase.STOPPING
    for replica in range(3):
        run.stopped(replica)
    run.timer("reap")
    for host in ("h0", "h1", "h2"):
        run.report(host, "down")
    assert (run.state.phase, run.state.exit_code) == (RunPhase.FAILED, 9)
    assert run.state.reason == "the budget is spent: 50.01 of max_usd 50"
