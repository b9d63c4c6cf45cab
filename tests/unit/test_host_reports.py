"""What launchers say and are told: checked before it counts, and no secret where it does not belong."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.agents import Agents
from sky_monarch.controller.clocks import HostClocks
from sky_monarch.controller.enrolment import Enrolments
from sky_monarch.controller.host_reports import check_head_bill, check_host_report, check_placement
from sky_monarch.controller.money import Budget
from sky_monarch.controller.plans import Plans
from sky_monarch.controller.reports import policy_event
from sky_monarch.controller.settings import load_settings
from sky_monarch.errors import ConfigError, RunNotFoundError
from tests.support.host_policies import HostRun
from tests.unit.test_plans import settings, written

REPORT = {"host": "h0", "attempt": 2, "state": "launched"}
ATTEMPTS = {"h0": 2}


def checked(**change: Any) -> dict[str, Any]:
    return check_host_report({**REPORT, **change}, ATTEMPTS, choices=3)


def test_a_report_becomes_a_row_with_all_of_its_fields() -> None:
    row = checked(place="RunPod/CA", usd_per_hour=15, choice=2)
    assert row == {
        "event": "host_report",
        "host": "h0",
        "attempt": 2,
        "state": "launched",
        "kind": None,
        "reason": None,
        "left": False,
        "choice": 2,
        "place": "RunPod/CA",
        "usd_per_hour": 15.0,
    }
    event = policy_event(row)
    assert event == model.HostReport(host="h0", attempt=2, state=model.HostReported.LAUNCHED)
    del row["left"]
    assert policy_event(row) == event, "a row of an older version"
    assert policy_event(checked(state="failed", left=True)).left


BILL = {"cluster": "demo-head", "since_ms": 1_000, "place": "oci/x", "usd_per_hour": 1}


def test_the_bill_of_a_head_becomes_a_row() -> None:
    assert check_head_bill(BILL) == {**BILL, "event": "head_launched", "usd_per_hour": 1.0}
    assert check_head_bill({**BILL, "usd_per_hour": None, "place": None})["usd_per_hour"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": ""},
        {"cluster": 7},
        {"since_ms": -1},
        {"since_ms": True},
        {"since_ms": "now"},
        {"usd_per_hour": -1.0},
        {"usd_per_hour": float("nan")},
        {"usd_per_hour": "free"},
        {"attempt": 1},
    ],
)
def test_a_bill_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_head_bill({**BILL, **change})


WANTED_AT: dict[str, Any] = {"choice": 1, "homes": {"h0": [0, 2], "h1": [1], "spare": []}}


def test_where_groups_are_to_be_becomes_a_row() -> None:
    assert check_placement(WANTED_AT, replicas=3, choices=2) == {**WANTED_AT, "event": "job_placed"}


@pytest.mark.parametrize(
    "change",
    [
        {"choice": 2},
        {"choice": None},
        {"homes": None},
        {"homes": {"h0": [0, 1]}},
        {"homes": {"h0": [0, 1, 2], "h1": [2]}},
        {"homes": {"h0": [0, 1, 3]}},
        {"homes": {"h0": [0, 1, True]}},
        {"homes": {"": [0, 1, 2]}},
        {"homes": {"h0": 7}},
        {"why": "x"},
    ],
)
def test_a_placement_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_placement({**WANTED_AT, **change}, replicas=3, choices=2)


def test_a_failure_without_a_kind_is_an_error() -> None:
    assert checked(state="failed", reason="x" * 9000)["kind"] == "error"
    assert len(checked(state="failed", reason="x" * 9000)["reason"]) == 4000


@pytest.mark.parametrize(
    "change",
    [
        {"state": "up"},
        {"state": None},
        {"kind": "tired"},
        {"attempt": 3},
        {"attempt": 0},
        {"attempt": True},
        {"attempt": "1"},
        {"choice": 3},
        {"choice": -1},
        {"usd_per_hour": -1},
        {"usd_per_hour": float("nan")},
        {"usd_per_hour": "8"},
        {"reason": ["a"]},
        {"place": 7},
    ],
)
def test_what_the_api_does_not_allow_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        checked(**change)


def test_a_host_that_nobody_provisions_cannot_be_reported_on() -> None:
    for host in ("head", "h9", None):
        with pytest.raises(RunNotFoundError):
            checked(host=host)


def test_what_agents_say_of_hosts_reaches_the_policy() -> None:
    row = {"event": "host_leaving", "host": "h0", "kind": "SIGTERM", "reason": "taken away", "grace_s": 30.0}
    assert policy_event(row) == model.HostLeaving(host="h0", reason="taken away")
    target = {"host": "h1", "address": "10.0.0.2:1", "ok": False, "error": None, "rtt_s": None}
    row = {"event": "reached", "host": "h0", "from": "10.0.0.1", "targets": [target]}
    assert policy_event(row) == model.Reached(host="h0", targets=(("h1", "10.0.0.2:1 cannot be reached"),))


# --- what a launcher is told -----------------------------------------------------------------------------------


class Issuer:
    """An authority that makes certificates of words."""

    def __init__(self) -> None:
        self.issued: list[str] = []

    def issue(self, name: str) -> dict[str, str]:
        self.issued.append(name)
        return {"name": name, "ca_pem": "ca", "cert_pem": "cert", "key_pem": f"canary-{name}"}


def told(run: HostRun, issuer: Issuer, **change: Any) -> dict[str, Any]:
    known = dataclasses.replace(settings(), reached_at="tls:10.0.0.9:7443", version="0.1.0", **change)
    return Enrolments(known, issuer).document(run.state)


def test_each_attempt_gets_a_certificate_of_its_own_while_it_is_coming() -> None:
    run, issuer = HostRun(), Issuer()
    run.launched("h0")
    run.launched("h1")
    run.report("h1", "ended")
    answer = told(run, issuer)
    assert issuer.issued == ["h1-a2", "h2-a1"]
    hosts = {host["host"]: host for host in answer["hosts"]}
    assert hosts["h0"]["enrolment"] is None, "who is up has his"
    secret = json.loads(base64.b64decode(hosts["h1"]["enrolment"]))
    assert secret["token"] == "t0ken"
    assert secret["identities"]["agent"]["key_pem"] == "canary-h1-a2"
    public = json.dumps([{**host, "enrolment": None} for host in answer["hosts"]])
    assert "canary" not in public
    assert "t0ken" not in public


def test_hosts_that_only_dial_out_are_told_of_the_relay_and_of_the_address_that_all_know_them_by() -> None:
    host = dataclasses.replace(HostRun().state.host("h0"), name="demo-h0", attempt=3)
    known = dataclasses.replace(settings(), reached_at="tls:10.0.0.9:7443", relay="tls:10.0.0.9:7444")
    told = Enrolments(known, None).agent(host)
    assert (told["relay"], told["address"]) == ("tls:10.0.0.9:7444", "127.64.0.2")
    near = Enrolments(dataclasses.replace(known, relay=None), None).agent(host)
    assert near["address"] == "auto"
    assert "relay" not in near


def test_without_its_journal_a_run_wants_nothing_of_hosts_that_may_live() -> None:
    run, issuer = HostRun(), Issuer()
    run.feed(model.JournalLost(reason="it is gone"))
    lost = told(run, issuer)
    assert lost["hosts"] == [], "an older attempt than what lives would end it"
    run.connect("h1", attempt=3)
    answer = told(run, issuer)
    assert [(host["host"], host["attempt"], host["want"]) for host in answer["hosts"]] == [("h1", 3, "up")]
    assert answer["version"] > lost["version"]
    run.timer("agent:h0")
    assert [host["host"] for host in told(run, issuer)["hosts"]] == ["h0", "h1"]
    run.down()
    assert [(host["host"], host["want"]) for host in told(run, issuer)["hosts"]] == [
        ("h0", "down"),
        ("h1", "up"),
        ("h2", "down"),
    ], "whatever there is of it goes"
    assert check_host_report({"host": "h2", "attempt": 0, "state": "down"}, {"h2": 0}, choices=1)


def test_an_agent_is_told_who_it_is_and_where_the_head_is() -> None:
    run = HostRun()
    agent = told(run, Issuer(), base_env={})["hosts"][0]["agent"]
    assert (agent["host"], agent["attempt"], agent["version"]) == ("h0", 1, "0.1.0")
    assert agent["controller"] == "tls:10.0.0.9:7443"
    assert (agent["workdir"], agent["inherit_env"]) == (".", True), "another machine has folders of its own"
    assert told(run, Issuer())["hosts"][0]["agent"]["workdir"] is None, "this one has the job's"


def test_another_machine_keeps_its_own_path() -> None:
    far = dataclasses.replace(settings(envs={"A": "1"}), base_env={})
    assert Plans(far, python="/opt/bin/python").setup()["envs"] == {"A": "1"}


def test_hosts_are_asked_whether_they_reach_others_in_the_words_of_the_protocol() -> None:
    target = model.ProbeTarget(host="h1", attempt=2, address="10.0.0.2:9")
    order = model.Probe(host="h0", targets=(target,), deadline_s=10.0, reason="r")
    assert Plans(settings()).command(order) == {
        "type": "probe",
        "targets": [{"host": "h1", "attempt": 2, "address": "10.0.0.2:9"}],
        "deadline_s": 10.0,
    }


# --- settings --------------------------------------------------------------------------------------------------


def loaded(folder: Path, environ: dict[str, str] | None = None, **change: Any) -> Any:
    path = written(folder, **change)
    return load_settings(path, {"SKY_MONARCH_LIGHTHOUSE_ADDR": "127.0.0.1:1", **(environ or {})})


PLACED = [
    {"name": "head", "groups": [], "provisioned": False},
    {"name": "demo-h0", "groups": [0], "provisioned": True},
    {"name": "demo-h1", "groups": [1], "provisioned": True},
]


def test_hosts_to_be_provisioned_and_the_budget_are_read(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        {"SKY_MONARCH_CONTROLLER_ADDR": "10.0.0.9:7443"},
        hosts=PLACED,
        choices=3,
        budget={"max_usd": 50, "max_hours": "off"},
    )
    assert found.provisioned == {"demo-h0", "demo-h1"}
    assert (found.choices, found.budget) == (3, Budget(max_usd=50))
    assert found.reached_at == "tls:10.0.0.9:7443"


def test_a_run_of_this_machine_provisions_nothing_and_has_no_limit(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    assert (found.provisioned, found.authority) == (frozenset(), None)
    assert found.budget.unlimited


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hosts": [*PLACED[:2], {**PLACED[2], "provisioned": "yes"}]}, "true or false"),
        ({"budget": {"max_usd": 0}}, "above 0"),
        ({"budget": {"usd": 5}}, "max_usd and max_hours"),
        ({"limits": {"reap_s": -1}}, "number of seconds"),
    ],
)
def test_hosts_and_budgets_that_cannot_be_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, **change)


# --- who may speak for a host ----------------------------------------------------------------------------------


class Line:
    """A channel of which a test decides what arrives."""

    def __init__(self) -> None:
        self.items: list[tuple[int, str, Any]] = []
        self.ended: list[tuple[int, str]] = []

    def fileno(self) -> int:
        return -1

    def drain(self, limit: int) -> list[tuple[int, str, Any]]:
        items, self.items = self.items[:limit], self.items[limit:]
        return items

    def send(self, connection: int, command: Any) -> None:
        del connection, command

    def disconnect(self, connection: int, reason: str) -> None:
        self.ended.append((connection, reason))

    def close(self) -> None:
        pass


def hello(attempt: int, *, incarnation: int, certificate: str | None = None) -> dict[str, Any]:
    return {
        "role": "agent",
        "host": "h0",
        "attempt": attempt,
        "pid": 1,
        "incarnation": incarnation,
        "groups": [],
        "certificate": certificate,
    }


def test_an_agent_that_is_fenced_is_told_so_and_heard_no_more() -> None:
    line = Line()
    agents = Agents(line, {"h0": (0,)}, ranks=1)
    agents.fenced = lambda host, attempt: None if attempt == 2 else f"fenced: host {host} is at attempt 2"
    line.items = [(1, "opened", hello(2, incarnation=5)), (2, "opened", hello(1, incarnation=4))]
    kinds = [item.kind for item in agents.drain(9)]
    assert kinds == ["connected", "refused"]
    assert line.ended == [(2, "fenced: host h0 is at attempt 2")]
    agents.fence("h0", 1, "fenced: late")
    assert agents.connected("h0"), "the fence of an older one is not for the newest"
    agents.fence("h0", 2, "fenced: it is over")
    assert line.ended[-1] == (1, "fenced: it is over")
    line.items = [(1, "message", {"type": "event"}), (1, "closed", "gone")]
    assert agents.drain(9) == []


def test_a_certificate_of_another_attempt_is_refused() -> None:
    line = Line()
    agents = Agents(line, {"h0": (0,)}, ranks=1)
    line.items = [(1, "opened", hello(2, incarnation=5, certificate="h0-a1"))]
    (refused,) = agents.drain(9)
    assert "certificate of 'h0-a1'" in refused.data["reason"]
    line.items = [(2, "opened", hello(2, incarnation=5, certificate="h0-a2"))]
    assert [item.kind for item in agents.drain(9)] == ["connected"]


# --- clocks ----------------------------------------------------------------------------------------------------


def test_moments_of_another_machine_are_told_in_our_time() -> None:
    clocks, ahead_ns = HostClocks(), 5_000_000_000_000
    first = clocks.ours(7, {"mono_ns": ahead_ns}, 10_000_000_000)
    assert first["mono_ns"] == 10_000_000_000
    slow = clocks.ours(7, {"mono_ns": ahead_ns + 1_000_000_000}, 13_000_000_000)
    assert slow["mono_ns"] == 11_000_000_000, "its way took two seconds longer than the first one's"
    heal = {"at_ns": ahead_ns + 2_000_000_000}
    healed = clocks.ours(7, {"mono_ns": ahead_ns + 3_000_000_000, "heal": heal}, 14_000_000_000)
    assert healed["heal"]["at_ns"] == 12_000_000_000


def test_a_clock_that_is_ours_is_left_alone() -> None:
    clocks = HostClocks()
    for at_ns, received_ns in ((5, 800_000_000), (900_000_000, 900_000_500), (10**9, 7 * 10**9)):
        assert clocks.ours(7, {"mono_ns": at_ns}, received_ns)["mono_ns"] == at_ns
    assert clocks.ours(7, {"reason": "gone"}, 5) == {"reason": "gone"}
