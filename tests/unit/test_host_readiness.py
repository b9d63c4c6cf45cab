"""What a host has to have done before its groups start: its setup, and to have reached all others."""

from __future__ import annotations

from sky_monarch.controller import model
from sky_monarch.controller.model import HostPhase, Probe, RunPhase
from sky_monarch.controller.replacing import MOST_FAULTS
from tests.support.host_policies import HostRun, starts
from tests.support.policies import kinds


def prepared(host: str, failure: str | None = None, *, killed: bool = False) -> list[model.Event]:
    return [
        model.SetupStarted(host=host),
        model.SetupFinished(host=host, failure=failure, killed=killed),
    ]


def test_a_host_is_set_up_alone_and_a_replacement_again() -> None:
    run = HostRun(setup=True)
    assert not kinds(run.actions, model.Setup), "nothing of the job runs on the head"
    assert [order.host for order in kinds(run.launched("h0"), model.Setup)] == ["h0"]
    assert starts(run.feed(*prepared("h0"))) == [("h0", 0, 1)]
    run.runs(0)
    run.report("h0", "ended")
    assert [order.host for order in kinds(run.launched("h0"), model.Setup)] == ["h0"]
    assert starts(run.feed(*prepared("h0"))) == [("h0", 0, 2)]


def test_a_host_that_is_taken_away_in_its_setup_is_replaced() -> None:
    run = HostRun(setup=True)
    run.launched("h0")
    run.feed(*prepared("h0", "it was killed by SIGTERM", killed=True))
    assert run.wanted()["h0"] == (2, True)
    assert run.state.phase is not RunPhase.FAILED_SETUP


def test_a_setup_that_fails_before_anything_ran_is_the_jobs_own_fault() -> None:
    run = HostRun(setup=True)
    run.launched("h0")
    run.feed(*prepared("h0", "it exited with code 3"))
    assert run.state.outcome is RunPhase.FAILED_SETUP


def test_a_setup_that_fails_on_a_replacement_ends_nobody_who_trains() -> None:
    run = HostRun(setup=True)
    for number in range(3):
        run.launched(f"h{number}")
        run.feed(*prepared(f"h{number}"))
        run.runs(number)
    run.report("h1", "ended")
    for _ in range(MOST_FAULTS):
        run.launched("h1")
        run.feed(*prepared("h1", "it exited with code 3"))
        assert run.state.phase is RunPhase.DEGRADED
        run.timer("host:h1")
    assert run.host("h1").phase is HostPhase.GIVEN_UP
    assert "setup failed: it exited with code 3" in (run.state.reason or "")


def reached(host: str, **errors: str) -> model.Reached:
    return model.Reached(host=host, targets=tuple(errors.items()))


def test_a_group_starts_once_its_host_and_all_others_have_reached_each_other() -> None:
    run = HostRun()
    assert starts(run.launched("h0", probe="10.0.0.1:1")), "there is nobody else yet"
    actions = run.launched("h1", probe="10.0.0.2:2")
    asked = {
        order.host: [(t.host, t.attempt, t.address) for t in order.targets] for order in kinds(actions, Probe)
    }
    assert asked == {"h1": [("h0", 1, "10.0.0.1:1")], "h0": [("h1", 1, "10.0.0.2:2")]}
    assert not starts(actions)
    assert not starts(run.feed(reached("h1", h0="")))
    assert starts(run.feed(reached("h0", h1=""))) == [("h1", 1, 1)]


def test_hosts_that_cannot_talk_end_a_run_that_has_not_begun_and_are_both_named() -> None:
    run = HostRun()
    run.launched("h0", probe="10.0.0.1:1")
    run.launched("h1", probe="10.0.0.2:2")
    run.feed(reached("h1", h0=""), reached("h0", h1="10.0.0.1 cannot reach 10.0.0.2:2: timed out"))
    assert (run.state.outcome, run.state.exit_code) == (RunPhase.FAILED, 1)
    assert run.state.reason is not None
    assert "hosts h1 and h0 cannot talk: 10.0.0.1 cannot reach 10.0.0.2:2: timed out" in run.state.reason


def test_a_replacement_that_cannot_be_reached_is_replaced_and_nobody_else() -> None:
    run = HostRun()
    for number in range(3):
        run.launched(f"h{number}", probe=f"10.0.0.{number}:1")
        for other in range(number):
            run.feed(reached(f"h{number}", **{f"h{other}": ""}), reached(f"h{other}", **{f"h{number}": ""}))
        run.runs(number)
    run.report("h1", "ended")
    run.launched("h1", probe="10.0.9.9:1")
    run.feed(reached("h1", h0="no route", h2=""))
    assert run.host("h1").connected, "h0 may be dead: it has said nothing yet"
    run.feed(reached("h0", h1=""))
    assert run.wanted()["h1"] == (3, True)
    assert run.state.phase is RunPhase.DEGRADED


def test_who_does_not_answer_may_be_dead_and_holds_up_nobody() -> None:
    run = HostRun()
    run.launched("h0", probe="10.0.0.1:1")
    run.launched("h1", probe="10.0.0.2:2")
    run.feed(reached("h1", h0="timed out"))
    assert starts(run.timer("probe:h1")) == [("h1", 1, 1)]
    assert run.state.outcome is None


def test_a_host_that_is_lost_is_not_waited_for_by_those_that_tried_to_reach_it() -> None:
    run = HostRun()
    run.launched("h0", probe="10.0.0.1:1")
    run.launched("h1", probe="10.0.0.2:2")
    assert starts(run.report("h0", "ended")) == [("h1", 1, 1)]


def test_a_question_that_was_lost_with_its_line_is_asked_again() -> None:
    run = HostRun()
    run.launched("h0", probe="10.0.0.1:1", incarnation=70)
    run.launched("h1", probe="10.0.0.2:2", incarnation=71)
    run.feed(model.AgentDisconnected(host="h0"), model.AgentDisconnected(host="h1"))
    again = run.connect("h1", incarnation=71, probe="10.0.0.2:2")
    again += run.connect("h0", incarnation=70, probe="10.0.0.1:1")
    assert {order.host for order in kinds(again, Probe)} == {"h0", "h1"}
