"""What the policy makes of what the doctor found on a host."""

from __future__ import annotations

import pytest

from sky_monarch.config.examination import examination
from sky_monarch.controller import model
from sky_monarch.controller.model import Fence, HostPhase, RunPhase, SetTimer, StartGroup
from sky_monarch.controller.replacing import MOST_FAULTS
from sky_monarch.controller.reports import check_report, policy_event
from sky_monarch.errors import ProtocolError
from tests.support.host_policies import LIMITS, HostRun
from tests.support.policies import kinds

WHY = "gpu.memory_errors: device 2 counts 3 uncorrectable errors; fix: replace it"


def arrives(run: HostRun, name: str) -> list[model.Action]:
    """A host comes up, and is being looked at."""
    run.report(name, "launched")
    return run.connect(name, examining=True)


def found(run: HostRun, name: str, unfit: str | None = None) -> list[model.Action]:
    return run.feed(model.Examined(host=name, unfit=unfit))


def test_nothing_starts_on_a_host_before_it_was_looked_at() -> None:
    run = HostRun()
    assert kinds(arrives(run, "h0"), StartGroup) == []
    (start,) = kinds(found(run, "h0"), StartGroup)
    assert (start.host, start.generation) == ("h0", 1)
    assert kinds(run.launched("h1"), StartGroup), "one whose agent looks at nothing does not wait"


def test_an_unfit_host_is_fenced_and_had_anew_and_the_reason_names_it_with_what_helps() -> None:
    run = HostRun()
    arrives(run, "h1")
    actions = found(run, "h1", WHY)
    (fence,) = kinds(actions, Fence)
    assert (fence.host, fence.attempt) == ("h1", 1)
    assert WHY in fence.reason
    assert kinds(actions, StartGroup) == []
    assert run.wanted()["h1"] == (2, True)
    assert f"host h1: unfit, {WHY}; attempt 2 is asked for" in (run.state.reason or "")
    run.report("h1", "launched")
    assert kinds(run.connect("h1", examining=True), StartGroup) == []
    assert kinds(found(run, "h1"), StartGroup)


def test_a_host_that_is_unfit_again_and_again_is_given_up_after_longer_and_longer_pauses() -> None:
    run = HostRun()
    pauses = []
    for _ in range(MOST_FAULTS):
        arrives(run, "h1")
        actions = found(run, "h1", WHY)
        waits = [timer.delay_s for timer in kinds(actions, SetTimer) if timer.name == "host:h1"]
        pauses += waits
        if waits:
            run.feed(model.TimerFired(name="host:h1"))
    assert pauses == [LIMITS.host_backoff_s * 2**number for number in range(3)]
    assert run.host("h1").phase is HostPhase.GIVEN_UP
    assert run.state.groups[1].reason is not None
    assert WHY in run.state.groups[1].reason


def test_a_spare_that_is_being_looked_at_is_not_ready() -> None:
    run = HostRun(hosts={"h0": (0,), "h1": (1,), "h2": (2,), "s0": ()})
    for number in range(3):
        run.launched(f"h{number}")
        run.runs(number)
    arrives(run, "s0")
    run.silent("h1")
    assert run.host("s0").replicas == ()
    assert kinds(found(run, "s0"), StartGroup)
    assert run.host("s0").replicas == (1,)


def local(*, examining: bool) -> tuple[model.State, list[model.Action]]:
    from sky_monarch.controller.policy import step

    state = model.initial_state({"local": (0, 1, 2)}, setup=False)
    state, _ = step(state, model.ControllerStarted(), LIMITS)
    came = model.AgentConnected(host="local", incarnation=1, mono_ns=1, groups=(), examining=examining)
    state, actions = step(state, came, LIMITS)
    return state, list(actions)


def test_where_there_is_only_this_machine_an_unfit_one_ends_a_run_that_waits_for_it() -> None:
    from sky_monarch.controller.policy import step

    state, actions = local(examining=True)
    assert kinds(actions, StartGroup) == []
    fit, actions = step(state, model.Examined(host="local", unfit=None), LIMITS)
    assert len(kinds(list(actions), StartGroup)) == 3
    assert fit.phase is RunPhase.STARTING
    unfit, actions = step(state, model.Examined(host="local", unfit=WHY), LIMITS)
    assert kinds(list(actions), StartGroup) == []
    assert unfit.outcome is RunPhase.FAILED_SETUP
    assert WHY in (unfit.reason or "")
    assert "doctor: off" in (unfit.reason or "")

    state, actions = local(examining=False)
    assert len(kinds(actions, StartGroup)) == 3
    noted, _ = step(state, model.Examined(host="local", unfit=WHY), LIMITS)
    assert noted.outcome is None
    assert WHY in noted.notes[-1]


def test_rows_of_the_journal_are_checked_and_only_errors_make_a_host_unfit() -> None:
    finding = {"check": "gpu.access", "severity": "error", "message": "no", "fix": "join render"}
    event = {
        "type": "event",
        "seq": 1,
        "mono_ns": 1,
        "wall_ms": 1,
        "event": "examined",
        "findings": [finding, {**finding, "severity": "warning", "fix": None}],
        "took_s": 0.2,
    }
    assert check_report(event, replicas=frozenset(), ranks=1) == "event"
    made = policy_event({**event, "host": "h0"})
    assert made == model.Examined(host="h0", unfit="gpu.access: no; fix: join render")
    assert policy_event({**event, "host": "h0", "findings": event["findings"][1:]}) == model.Examined(
        host="h0", unfit=None
    )
    with pytest.raises(ProtocolError, match="findings"):
        check_report({**event, "findings": [{"check": 1}]}, replicas=frozenset(), ranks=1)


def test_only_a_job_with_devices_has_them_tried_and_waits_on_this_machine() -> None:
    assert examination({"doctor": "off"}, place="h0-a1", held=True) is None
    assert examination({}, place="h0-a1", held=True) is None, "of a version without it"
    bare = examination({"doctor": "smoke", "resources": {"accelerators": None}}, place="local", held=False)
    assert bare is not None
    assert (bare["holds"], bare["strict"], bare["limit_s"]) == (False, False, 10.0)
    assert "--devices" not in bare["argv"]
    resources = {"accelerators": None, "any_of": [{"accelerators": "MI300X:8"}]}
    full = examination({"doctor": "smoke", "resources": resources}, place="local", held=False)
    assert full is not None
    assert (full["holds"], full["strict"]) == (True, True)
    assert "--devices" in full["argv"]
