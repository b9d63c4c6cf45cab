"""What becomes of hosts: the provisioner, with a provider that does as it is told and a stand-in for the controller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sky_monarch.provision.provider import HostOrder, Kind, ProvisionError, Seen, Turn
from tests.support.fake_provider import FakeProvider, Outcome, always_up
from tests.support.provisioning import Bench, choice
from tests.support.waiting import eventually

HOSTS = ["demo-h0", "demo-h1", "demo-h2"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def failing(**kinds: Kind):
    """A script in which the choices named ``c0``, ``c1``, … fail."""

    def script(order: HostOrder, turn: Turn, nth: int) -> Outcome:
        if kind := kinds.get(f"c{turn.choice}"):
            return ProvisionError(f"{kind} in {turn.choice}", kind=kind)
        return always_up(order, turn, nth)

    return script


def plan(*infras: str, hosts: list[str] = HOSTS):
    return [choice(infra, hosts) for infra in infras]


# --- candidates --------------------------------------------------------------------------------------


def test_each_choice_is_tried_once_in_order_and_all_hosts_go_where_the_first_came_up(bench: Bench) -> None:
    provider = FakeProvider(failing(c0=Kind.CAPACITY, c1=Kind.REFUSED))
    with bench.provisioner(provider, plan("oci", "azure", "runpod")):
        bench.controller.want_all(HOSTS)
        launched = {host: bench.controller.reported(host, "launched") for host in HOSTS}

    tried = [number for _, _, number, _ in provider.launches]
    assert tried == [0, 1, 2, 2, 2], "the first two are tried by one host only"
    assert {report["choice"] for report in launched.values()} == {2}
    followed = [infra for *_, infra in provider.launches]
    assert followed == [None, None, None, "cloud/r2/z1", "cloud/r2/z1"], "the others follow it to its zone"
    assert launched["demo-h1"]["place"] == "place 2"
    assert launched["demo-h1"]["usd_per_hour"] == 2.0
    assert provider.violations == []
    scout = provider.launches[0][0]
    told = [one for one in bench.controller.reports if (one["host"], one["state"]) == (scout, "launching")]
    assert [(one["choice"], one["kind"]) for one in told] == [(0, None), (1, "capacity"), (2, "refused")], (
        "each says how the one before ended, by which that is paid or not"
    )


def test_where_every_choice_fails_the_reasons_of_all_are_told_once_for_the_whole_job(bench: Bench) -> None:
    provider = FakeProvider(failing(c0=Kind.CAPACITY, c1=Kind.REFUSED))
    with bench.provisioner(provider, plan("oci", "runpod/US")):
        bench.controller.want_all(HOSTS)
        failed = [bench.controller.reported(host, "failed") for host in HOSTS]

        assert [number for _, _, number, _ in provider.launches] == [0, 1], "not once for each host"
        for report in failed:
            assert report["kind"] == "capacity"
            assert report["reason"] == (
                "1. oci MI300X:8: capacity: capacity in 0; 2. runpod/US MI300X:8: refused: refused in 1"
            )
        assert provider.clusters == {}, "what a failed launch leaves is taken down"

        provider.script = always_up
        bench.controller.want_all(HOSTS, attempt=2)
        for host in HOSTS:
            assert bench.controller.reported(host, "launched", attempt=2)["choice"] == 0
    assert {number for _, attempt, number, _ in provider.launches if attempt == 2} == {0}


@pytest.mark.parametrize("kind", [Kind.CAPACITY, Kind.REFUSED, Kind.CREDENTIALS])
def test_a_failed_launch_whose_cluster_does_not_go_is_told_as_that_by_each_process_until_it_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setattr("sky_monarch.provision.host._CLEAN_UP_S", 0.1)
    provider = FakeProvider(failing(c0=kind))
    provider.undown = [ProvisionError("the API answered 503") for _ in range(10_000)]
    plan_of_one = plan("oci", hosts=HOSTS[:1])
    for told in (1, 2):
        with bench.provisioner(provider, plan_of_one):
            bench.controller.want("demo-h0")
            eventually(lambda told=told: bench.controller.states("demo-h0").count("failed") == told)
        failed = bench.controller.reported("demo-h0", "failed")
        assert (failed["kind"], failed["left"]) == (str(kind), True), "something of it is left"
        assert "what there is of demo-h0 may still bill: the API answered 503" in failed["reason"]
        bench.controller.reports = [one for one in bench.controller.reports if one["state"] == "failed"]
    assert provider.clusters == {"demo-h0": 1}
    assert bench.record("demo-h0")["left"] == "the API answered 503"

    with bench.provisioner(provider, plan_of_one):
        bench.controller.want("demo-h0", "down")
        bench.controller.reported("demo-h0", "down_failed")
        provider.undown = []
        bench.controller.reported("demo-h0", "down")
    assert provider.clusters == {}
    assert bench.record("demo-h0") == {}


def test_what_a_failed_launch_left_behind_is_told_to_be_down_beside_the_next_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sky_monarch.provision.host._CLEAN_UP_S", 0.1)
    provider = FakeProvider(failing(c0=Kind.CAPACITY))
    provider.undown = [ProvisionError("the API answered 503") for _ in range(10_000)]
    with bench.provisioner(provider, plan("oci", hosts=HOSTS[:1])):
        bench.controller.want("demo-h0")
        assert bench.controller.reported("demo-h0", "failed")["left"]
        provider.script = always_up
        bench.controller.want("demo-h0", attempt=2, replaces=1)
        bench.controller.reported("demo-h0", "launched", attempt=2)
        bench.controller.reported("demo-h0", "down_failed")
        provider.undown = []
        bench.controller.reported("demo-h0", "down")  # else it is waited for, and billed
    assert provider.clusters == {"demo-h0-a2": 2}


def test_a_launch_is_told_with_the_price_of_the_plan_from_its_beginning(bench: Bench) -> None:
    provider = FakeProvider(failing(c0=Kind.CAPACITY))
    choices = [choice("oci", HOSTS[:2]), choice("azure", HOSTS[:2], usd_per_hour=31.0, head_usd_per_hour=1.0)]
    with bench.provisioner(provider, choices):
        bench.controller.want_all(HOSTS[:2])
        for host in HOSTS[:2]:
            bench.controller.reported(host, "launched")
    told = [(one["choice"], one["state"], one["usd_per_hour"]) for one in bench.controller.reports]
    planned = sorted(one for one in told if one[1] == "launching")
    assert planned == [(0, "launching", 5.0), (1, "launching", 15.0), (1, "launching", 15.0)], (
        "its launch has a price"
    )
    assert {one for one in told if one[1] == "launched"} == {(1, "launched", 2.0)}, "what it really costs"


def test_wrong_credentials_end_the_search_at_once(bench: Bench) -> None:
    provider = FakeProvider(failing(c0=Kind.CREDENTIALS))
    with bench.provisioner(provider, plan("oci", "runpod")):
        bench.controller.want_all(HOSTS)
        for host in HOSTS:
            assert bench.controller.reported(host, "failed")["kind"] == "credentials"

    assert len(provider.launches) == 1


def test_an_error_on_the_way_is_tried_again_a_few_times_and_a_refusal_is_not(bench: Bench) -> None:
    def script(order: HostOrder, turn: Turn, nth: int) -> Outcome:
        if order.host == "demo-h0" and nth < 2:
            return ProvisionError("the network was away")
        if order.host == "demo-h1":
            return ProvisionError("no such flavour", kind=Kind.REFUSED)
        if order.host == "demo-h2":
            return ProvisionError("away for good")
        return always_up(order, turn, nth)

    provider = FakeProvider(script)
    with bench.provisioner(provider, plan("slurm/loop")):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        bench.controller.want_all(["demo-h1", "demo-h2"])
        assert bench.controller.reported("demo-h1", "failed")["kind"] == "refused"
        assert bench.controller.reported("demo-h2", "failed")["kind"] == "error"

    count = {host: sum(host == one for one, *_ in provider.launches) for host in HOSTS}
    assert count == {"demo-h0": 3, "demo-h1": 1, "demo-h2": 3}


def test_a_host_without_capacity_costs_no_good_one_and_never_stays_in_between(bench: Bench) -> None:
    def script(order: HostOrder, turn: Turn, nth: int) -> Outcome:
        if order.host == "demo-h1":
            return ProvisionError("no capacity", kind=Kind.CAPACITY)
        return always_up(order, turn, nth)

    provider = FakeProvider(script)
    with bench.provisioner(provider, plan("oci", "runpod")):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        for attempt in (1, 2, 3):
            bench.controller.want("demo-h1", attempt=attempt)
            assert bench.controller.reported("demo-h1", "failed", attempt=attempt)["kind"] == "capacity"
        assert provider.clusters == {"demo-h0": 1}, "the good one stays"

        bench.controller.want("demo-h1", "down", attempt=3)
        bench.controller.reported("demo-h1", "down", attempt=3)
    assert {number for _, _, number, _ in provider.launches} == {0}, "the job stays in one place"
    assert "demo-h0" not in provider.downs


# --- hosts that are lost ------------------------------------------------------------------------------


def test_a_lost_host_is_launched_alone_and_asked_for_no_more(bench: Bench) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("oci", "runpod")):
        bench.controller.want_all(HOSTS)
        for host in HOSTS:
            bench.controller.reported(host, "launched")
        del provider.clusters["demo-h1"]
        reason = bench.controller.reported("demo-h1", "ended")["reason"]
        assert "demo-h1 is gone" in reason

        mark = len(provider.asked)
        eventually(lambda: len(provider.asked) > mark + 2)
        assert all("demo-h1" not in asked for asked in provider.asked[mark:])

        bench.controller.want("demo-h1", attempt=2)
        bench.controller.reported("demo-h1", "launched", attempt=2)
    assert provider.clusters == {"demo-h0": 1, "demo-h1-a2": 2, "demo-h2": 1}
    assert [launch for launch in provider.launches if launch[1] == 2] == [("demo-h1", 2, 0, "cloud/r0/z1")]
    assert provider.violations == []


def test_one_answer_that_all_hosts_are_gone_and_any_that_fails_prove_nothing(bench: Bench) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("slurm/loop")):
        bench.controller.want_all(HOSTS)
        for host in HOSTS:
            bench.controller.reported(host, "launched")
        provider.answers = {
            "demo-h0": [Seen.GONE, Seen.UNKNOWN, Seen.UP],
            "demo-h1": [Seen.UNKNOWN] * 4,
            "demo-h2": [Seen.INIT] * 4,
        }
        eventually(lambda: not any(provider.answers.values()), what="all of that was answered")
        mark = len(provider.asked)
        eventually(lambda: len(provider.asked) > mark + 2)

        provider.answers = {"demo-h0": [Seen.STOPPED] * 3}
        bench.controller.reported("demo-h0", "ended")
    assert bench.controller.states("demo-h1") == ["launching", "launched"]
    assert bench.controller.states("demo-h2") == ["launching", "launched"]
    assert bench.controller.states("demo-h0") == ["launching", "launched", "ended"], "two in a row do"


def test_where_all_hosts_are_lost_the_job_may_move(bench: Bench) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("oci", "runpod", hosts=HOSTS[:2])):
        bench.controller.want_all(HOSTS[:2])
        for host in HOSTS[:2]:
            bench.controller.reported(host, "launched")
        for host in HOSTS[:2]:
            provider.notice(host, "taken away")
            assert bench.controller.reported(host, "ended")["reason"] == "taken away"
        provider.script = failing(c0=Kind.CAPACITY)
        bench.controller.want_all(HOSTS[:2], attempt=2)
        for host in HOSTS[:2]:
            assert bench.controller.reported(host, "launched", attempt=2)["choice"] == 1

    again = [(number, infra) for _, attempt, number, infra in provider.launches if attempt == 2]
    assert again == [(0, None), (1, None), (1, "cloud/r1/z1")]


def test_an_older_attempt_goes_beside_the_next_one_and_those_before_it_go_first(bench: Bench) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("slurm/loop"), limits={"down_s": 60.0}) as running:
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        provider.goes.clear()
        provider.undown = [ProvisionError("busy")] * 2
        bench.controller.want("demo-h0", attempt=2, reason="silent for 30 s", replaces=1)
        bench.controller.reported("demo-h0", "launched", attempt=2)
        assert provider.clusters == {"demo-h0": 1, "demo-h0-a2": 2}, "the launch has waited for nothing"

        bench.controller.want("demo-h0", attempt=3, replaces=2)
        eventually(lambda: running._shared.waiting or len(provider.launches) == 3)
        assert [attempt for _, attempt, *_ in provider.launches] == [1, 2], "one goes at a time"
        provider.goes.set()
        bench.controller.reported("demo-h0", "down")
        bench.controller.reported("demo-h0", "launched", attempt=3)
        bench.controller.reported("demo-h0", "down", attempt=2)

    assert provider.clusters == {"demo-h0-a3": 3}
    assert provider.most_of_a_host == 2
    assert provider.violations == []
    assert bench.requests()["older"] == []


def test_an_older_attempt_that_is_going_when_the_provisioner_is_killed_goes_all_the_same(
    bench: Bench,
) -> None:
    provider = FakeProvider()
    choices = plan("slurm/loop")
    with bench.provisioner(provider, choices):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        provider.goes.clear()
        bench.controller.want("demo-h0", attempt=2, replaces=1)
        bench.controller.reported("demo-h0", "launched", attempt=2)
    assert provider.clusters == {"demo-h0": 1, "demo-h0-a2": 2}
    provider.goes.set()
    launches = len(provider.launches)

    with bench.provisioner(provider, choices):
        bench.controller.reported("demo-h0", "down")
        bench.controller.want("demo-h0", "down", attempt=2)
        bench.controller.reported("demo-h0", "down", attempt=2)
    assert provider.clusters == {}
    assert len(provider.launches) == launches


def test_down_is_told_only_when_the_older_attempt_is_gone_too(bench: Bench) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("slurm/loop")):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        provider.goes.clear()
        bench.controller.want("demo-h0", attempt=2, replaces=1)
        bench.controller.reported("demo-h0", "launched", attempt=2)
        bench.controller.want("demo-h0", "down", attempt=2)
        eventually(lambda: {"demo-h0", "demo-h0-a2"} <= set(provider.downs))
        assert "down" not in bench.controller.states("demo-h0")
        provider.goes.set()
        bench.controller.reported("demo-h0", "down", attempt=2)
        assert provider.clusters == {}
    assert bench.controller.states("demo-h0", 1)[-1] == "down", "it costs no more"


def test_a_launch_for_which_there_is_no_room_beside_the_one_that_goes_is_tried_again_without_it(
    bench: Bench,
) -> None:
    def script(order: HostOrder, turn: Turn, nth: int) -> Outcome:
        if order.attempt == 2 and "demo-h0" in provider.clusters:
            provider.goes.set()
            return ProvisionError("quota 1 of 1", kind=Kind.REFUSED)
        return always_up(order, turn, nth)

    provider = FakeProvider(script)
    with bench.provisioner(provider, plan("slurm/loop")):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        provider.goes.clear()
        bench.controller.want("demo-h0", attempt=2, replaces=1)
        bench.controller.reported("demo-h0", "launched", attempt=2)
    assert provider.clusters == {"demo-h0-a2": 2}
    assert "failed" not in bench.controller.states("demo-h0")


def test_a_silent_host_is_asked_for_at_once_and_only_certainty_is_believed(bench: Bench) -> None:
    provider = FakeProvider()
    limits = {"status_s": 600.0, "early_s": 0.02, "early_asks": 4}
    with bench.provisioner(provider, plan("slurm/loop"), limits=limits):
        bench.controller.want_all(HOSTS)
        for host in HOSTS:
            bench.controller.reported(host, "launched")
        assert provider.early == []
        provider.answers = {"demo-h1": [Seen.GONE]}
        bench.controller.want("demo-h1", doubted=True)
        eventually(lambda: len(provider.early) == 4, what="a few times, and no more")
        assert set(provider.early) == {("demo-h1",)}
        assert bench.controller.states("demo-h1") == ["launching", "launched"], "no word proves nothing"

        bench.controller.want("demo-h1", doubted=False)
        bench.controller.taken()
        provider.sure = {"demo-h1": "the node is down"}
        bench.controller.want("demo-h1", doubted=True)
        report = bench.controller.reported("demo-h1", "ended")
        assert report["reason"] == "its agent is silent, and the node is down"
    assert bench.controller.states("demo-h0") == ["launching", "launched"]


def test_an_attempt_that_only_the_controller_remembers_is_taken_down_as_well(bench: Bench) -> None:
    provider = FakeProvider()
    provider.clusters["demo-h0-a3"] = 3
    with bench.provisioner(provider, plan("slurm/loop")):
        bench.controller.want("demo-h0", attempt=1000, replaces=0)
        bench.controller.reported("demo-h0", "launched", attempt=1000)
        bench.controller.reported("demo-h0", "down", attempt=3)

    assert provider.downs == ["demo-h0-a3"]
    assert provider.violations == []


def test_a_host_is_launched_with_the_newest_enrolment_and_never_without(bench: Bench) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("slurm/loop"), limits={"launches": 1}):
        bench.controller.want("demo-h0", enrolment=None)
        report = bench.controller.reported("demo-h0", "failed")
        assert (report["kind"], provider.launches) == ("error", [])

        provider.go.clear()
        bench.controller.want("demo-h1")
        bench.controller.reported("demo-h1", "launching")
        bench.controller.want("demo-h2", enrolment="older")  # waits for its turn
        bench.controller.taken()
        bench.controller.want("demo-h2", enrolment="newer")
        bench.controller.taken()
        provider.go.set()
        bench.controller.reported("demo-h2", "launched")
    assert provider.enrolments["demo-h2"] == "newer"


# --- down ----------------------------------------------------------------------------------------------


def test_down_ends_a_launch_in_any_phase_and_twice_is_fine(bench: Bench) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("slurm/loop"), limits={"launches": 1}):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        provider.go.clear()
        bench.controller.want("demo-h1")
        bench.controller.reported("demo-h1", "launching")
        bench.controller.want("demo-h2")  # waits for its turn
        bench.controller.want_all(HOSTS, "down")
        for host in HOSTS:
            bench.controller.reported(host, "down")
        assert provider.clusters == {}

        before = len(provider.downs)
        bench.controller.want_all(HOSTS, "up", attempt=2)
        bench.controller.want_all(HOSTS, "down", attempt=2)
        for host in HOSTS:
            bench.controller.reported(host, "down", attempt=2)
        assert provider.clusters == {}
        assert len(provider.downs) <= before + len(HOSTS)
    assert bench.requests()["hosts"] == {}


def test_a_host_that_does_not_go_is_told_of_and_taken_down_all_the_same(bench: Bench) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("slurm/loop"), limits={"down_s": 0.05}):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        provider.undown = [ProvisionError("HTTP 500")] * 12
        bench.controller.want("demo-h0", "down")
        assert "may still bill: HTTP 500" in bench.controller.reported("demo-h0", "down_failed")["reason"]
        bench.controller.reported("demo-h0", "down")
    assert provider.clusters == {}


def test_a_cluster_of_the_same_name_that_is_not_ours_is_never_touched(bench: Bench) -> None:
    provider = FakeProvider()
    provider.clusters["demo-h0"] = 1
    with bench.provisioner(provider, plan("oci", "runpod")):
        bench.controller.want("demo-h0")
        report = bench.controller.reported("demo-h0", "failed")
        assert report["kind"] == "refused"
        assert "did not launch" in report["reason"]
        bench.controller.want("demo-h0", "down")
        bench.controller.reported("demo-h0", "down")

    assert (provider.launches, provider.downs) == ([], [])
    assert provider.clusters == {"demo-h0": 1}


# --- bounds, and the controller ------------------------------------------------------------------------


def test_launches_are_bounded_and_first_come_is_first_served(bench: Bench) -> None:
    hosts = [f"demo-h{number}" for number in range(30)]
    provider = FakeProvider()
    provider.go.clear()
    with bench.provisioner(provider, plan("slurm/loop", hosts=hosts), limits={"launches": 4}) as running:
        bench.controller.want_all(hosts)
        eventually(lambda: len(running._shared.queue) == 26, what="all others wait")
        eventually(lambda: len(provider.launches) == 4)
        provider.go.set()
        for host in hosts:
            bench.controller.reported(host, "launched")

    assert provider.most_at_once == 4
    assert len(provider.launches) == len(hosts)


def test_no_report_is_lost_while_the_controller_is_away_and_a_new_one_is_told_what_it_asks(
    bench: Bench,
) -> None:
    provider = FakeProvider()
    with bench.provisioner(provider, plan("slurm/loop")):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        provider.go.clear()
        bench.controller.want("demo-h1")
        bench.controller.reported("demo-h1", "launching")
        bench.controller.stop()
        provider.go.set()
        eventually(lambda: "demo-h1" in {record["host"] for record in ups(bench)})
        provider.notice("demo-h0", "taken away")
        bench.controller.forget_versions()
        bench.controller.start()
        bench.controller.reported("demo-h1", "launched")
        bench.controller.reported("demo-h0", "ended")
        bench.controller.want("demo-h0", attempt=2)
        bench.controller.reported("demo-h0", "launched", attempt=2)

    assert bench.controller.asked_after.count(-1) >= 2, "it asks for all after each loss"
    assert bench.controller.states("demo-h1") == ["launching", "launched"]


def ups(bench: Bench) -> list[dict]:
    return [record for record in bench.requests()["hosts"].values() if record["phase"] == "up"]


def test_a_report_that_is_refused_is_dropped_and_one_that_fails_is_not(bench: Bench) -> None:
    answers = iter([500, 503, 401])
    bench.controller.refuse = lambda report: next(answers, 409 if report["host"] == "demo-h1" else None)
    provider = FakeProvider()
    with bench.provisioner(provider, plan("slurm/loop")):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        bench.controller.want("demo-h1")
        eventually(lambda: "demo-h1" in provider.clusters)
        bench.controller.want("demo-h1", "down")
        eventually(lambda: "demo-h1" not in provider.clusters)

    assert bench.controller.states("demo-h0") == ["launching", "launched"]


# --- restarts --------------------------------------------------------------------------------------------


def test_a_provisioner_that_starts_again_launches_nothing_twice_and_tells_what_is(bench: Bench) -> None:
    provider = FakeProvider(failing(c0=Kind.CAPACITY))
    choices = plan("oci", "runpod")
    with bench.provisioner(provider, choices):
        bench.controller.want_all(HOSTS[:2])
        for host in HOSTS[:2]:
            bench.controller.reported(host, "launched")
    launches, bench.controller.reports = len(provider.launches), []

    with bench.provisioner(provider, choices):
        for host in HOSTS[:2]:
            report = bench.controller.reported(host, "launched")
            assert (report["choice"], report["place"], report["usd_per_hour"]) == (1, "place 1", 2.0)
        assert len(provider.launches) == launches
        bench.controller.want("demo-h2")
        assert bench.controller.reported("demo-h2", "launched")["choice"] == 1, "it knows where the job is"
        provider.notice("demo-h0", "gone")
        bench.controller.reported("demo-h0", "ended")
    assert provider.launches[-1] == ("demo-h2", 1, 1, "cloud/r1/z1")


def test_a_damaged_file_of_requests_costs_no_host(bench: Bench) -> None:
    provider = FakeProvider()
    choices = plan("slurm/loop")
    with bench.provisioner(provider, choices):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
    bench.controller.reports = []
    (bench.folder / "requests.json").write_text('{"hosts": {"demo-h0"')

    with bench.provisioner(provider, choices):
        bench.controller.reported("demo-h0", "launched")
        bench.controller.want("demo-h0", "down")
        bench.controller.reported("demo-h0", "down")
    assert len(provider.launches) == 1
    assert provider.clusters == {}


def test_a_defect_of_a_hosts_thread_ends_the_provisioner(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: seen.append(arguments.exc_value))
    provider = FakeProvider(lambda order, turn, nth: 1 / 0)
    with bench.provisioner(provider, plan("slurm/loop"), fails=True) as running:
        bench.controller.want("demo-h0")
        assert running.closing.wait(10)
    assert isinstance(seen[0], ZeroDivisionError)
