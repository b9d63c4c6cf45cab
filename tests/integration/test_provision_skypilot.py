"""Hosts that are SkyPilot's clusters: its requests outlive the provisioner that asked for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sky_monarch.provision.requests import Requests
from sky_monarch.provision.skypilot import SkyPilotProvider
from tests.support.fake_sky import FakeSky, error
from tests.support.provisioning import Bench, choice
from tests.support.waiting import eventually

CHOICES = [choice("slurm/loop", ["demo-h0", "demo-h1"])]


class SkyBench(Bench):
    """A run whose provider is SkyPilot."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sky = FakeSky()

    def sky_provisioner(self, choices=CHOICES, *, server_s: float = 5.0, **more):
        requests = Requests(self.folder / "requests.json")
        settings = self.settings(choices, **more)
        provider = SkyPilotProvider(requests, settings, sdk=self.sky, poll_s=0.01, server_s=server_s)
        return self.provisioner(provider, choices, requests=requests, **more)

    def asked(self, name: str = "launch") -> int:
        return self.sky.calls.count(name)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SkyBench]:
    bench = SkyBench(tmp_path)
    yield bench
    bench.close()


def test_a_task_ends_its_cluster_itself_and_holds_its_secret_in_one_place(
    bench: SkyBench,
) -> None:
    with bench.sky_provisioner(autodown_minutes=5):
        bench.controller.want("demo-h0", agent={"controller": "tls:10.0.0.1:7443"})
        report = bench.controller.reported("demo-h0", "launched")
        assert (report["place"], report["usd_per_hour"]) == ("Slurm/loop/gpu", 5.0), "its share of the plan's"

    (task,) = bench.sky.tasks
    secret = bench.controller._hosts["demo-h0"]["enrolment"]
    assert task["secrets"] == {"SKY_MONARCH_ENROLMENT": secret}
    assert json.loads(task["envs"]["SKY_MONARCH_HOST"])["controller"] == "tls:10.0.0.1:7443"
    assert task["resources"]["autostop"] == {"idle_minutes": 5, "down": True}
    assert secret not in json.dumps({key: value for key, value in task.items() if key != "secrets"})
    assert secret not in (bench.folder / "requests.json").read_text()


def test_a_provisioner_that_is_ended_while_it_waits_goes_on_waiting_for_the_same_request(
    bench: SkyBench,
) -> None:
    bench.sky.hold.set()
    with bench.sky_provisioner():
        bench.controller.want("demo-h0")
        eventually(lambda: bench.record("demo-h0").get("request_id") == "request-1", comes_always=True)
    assert not bench.sky.requests["request-1"].done, "it was left alone"

    with bench.sky_provisioner():
        eventually(lambda: bench.controller.states("demo-h0").count("launching") == 2)
        bench.sky.hold.clear()
        bench.controller.reported("demo-h0", "launched")
    assert bench.asked() == 1, "asked once"
    assert bench.sky.up == {"demo-h0": 1}


def test_one_that_was_killed_between_asking_and_writing_finds_its_request(bench: SkyBench) -> None:
    bench.sky.hold.set()
    with bench.sky_provisioner():
        bench.controller.want("demo-h0")
        eventually(lambda: bench.record("demo-h0").get("request_id"), comes_always=True)
    written = bench.requests()
    written["hosts"]["demo-h0"]["request_id"] = None
    (bench.folder / "requests.json").write_text(json.dumps(written))

    bench.sky.hold.clear()
    with bench.sky_provisioner():
        bench.controller.reported("demo-h0", "launched")
    assert bench.asked() == 1, "asked once"


def test_down_cancels_a_launch_that_is_under_way(bench: SkyBench) -> None:
    bench.sky.hold.set()
    with bench.sky_provisioner():
        bench.controller.want("demo-h0")
        eventually(lambda: bench.asked() == 1, comes_always=True)
        bench.controller.want("demo-h0", "down")
        bench.controller.reported("demo-h0", "down")
    bench.sky.hold.clear()
    for request in bench.sky.requests.values():
        bench.sky.finish(request)

    assert bench.sky.up == {}, "nothing comes up after it was taken down"


def test_a_server_that_is_away_is_waited_for_and_never_asked_twice(bench: SkyBench) -> None:
    bench.sky.hold.set()
    with bench.sky_provisioner(server_s=0.05, limits={"retries": 10_000}):
        bench.controller.want("demo-h0")
        eventually(lambda: bench.record("demo-h0").get("request_id"), comes_always=True)
        bench.sky.away.set()
        eventually(lambda: bench.sky.unanswered >= 20, what="it is asked, for longer than it may be away")
        bench.sky.away.clear()
        bench.sky.hold.clear()
        bench.controller.reported("demo-h0", "launched")
        unanswered = bench.sky.unanswered
        bench.sky.away.set()
        eventually(lambda: bench.sky.unanswered >= unanswered + 5, what="it is asked for the status")
        assert bench.controller.states("demo-h0") == ["launching", "launched"], "no answer is no word of it"
        bench.sky.away.clear()
    assert bench.asked() == 1, "asked once"


def test_a_server_that_is_away_when_a_launch_is_to_be_asked_for_is_no_fault_of_the_host(
    bench: SkyBench,
) -> None:
    bench.sky.away.set()
    with bench.sky_provisioner(server_s=60.0, limits={"retries": 1}):
        bench.controller.want("demo-h0")
        eventually(lambda: bench.sky.unanswered >= 10, what="it is asked for again and again")
        assert bench.controller.states("demo-h0") == [], "nothing has failed"
        bench.sky.away.clear()
        bench.controller.reported("demo-h0", "launched")
    assert bench.controller.states("demo-h0") == ["launching", "launched"]
    assert bench.asked() == 1, "asked once"


def test_a_server_that_has_forgotten_a_request_is_asked_anew_once_nothing_of_it_is_left(
    bench: SkyBench,
) -> None:
    bench.sky.hold.set()
    with bench.sky_provisioner():
        bench.controller.want("demo-h0")
        eventually(lambda: bench.record("demo-h0").get("request_id"), comes_always=True)
        bench.sky.up["demo-h0"] = 1  # it was nearly there
        others = {f"other-{number}": one for number, one in enumerate(bench.sky.requests.values())}
        others["other-1"].done = True
        bench.sky.requests = others
        bench.sky.hold.clear()  # only now: the launch that it has forgotten must not come to its end
        bench.controller.reported("demo-h0", "launched")
    assert bench.sky.up == {"demo-h0": 1}, "one job on it"


def test_what_the_clouds_say_is_told_with_what_it_means(bench: SkyBench) -> None:
    bench.sky.outcome = error(
        "Failed to provision all possible launchable resources.",
        "ResourcesUnavailableError",
        causes=[
            error("\x1b[33mOut of host capacity.\x1b[0m"),
            error("Quota exceeded"),
            error("Quota exceeded"),
        ],
    )
    with bench.sky_provisioner():
        bench.controller.want("demo-h0")
        report = bench.controller.reported("demo-h0", "failed")

    assert report["kind"] == "capacity"
    assert report["reason"] == "Out of host capacity.; Quota exceeded"
    assert bench.asked() == 1, "no capacity now is none in a moment either"
    assert bench.asked("down") == 1, "what there may be of it is taken down"


def test_a_cluster_that_is_not_in_two_answers_has_ended(bench: SkyBench) -> None:
    with bench.sky_provisioner():
        bench.controller.want_all(["demo-h0", "demo-h1"])
        for host in ("demo-h0", "demo-h1"):
            bench.controller.reported(host, "launched")
        del bench.sky.up["demo-h1"]
        bench.controller.reported("demo-h1", "ended")
        bench.controller.want("demo-h1", attempt=2)
        bench.controller.reported("demo-h1", "launched", attempt=2)
    assert bench.sky.up == {"demo-h0": 1, "demo-h1-a2": 1}


def test_a_server_that_was_set_up_anew_proves_nothing_gone_and_what_stands_may_bill(bench: SkyBench) -> None:
    with bench.sky_provisioner():
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        bench.sky.set_up_anew()
        asked = bench.asked("status")
        eventually(
            lambda: bench.asked("status") >= asked + 5 or "ended" in bench.controller.states("demo-h0"),
            what="it is asked for longer than it takes to believe it",
        )
        assert bench.controller.states("demo-h0") == ["launching", "launched"], "the cluster stands"

        bench.controller.want("demo-h0", "down")
        said = bench.controller.reported("demo-h0", "down_failed")
        assert "demo-h0 may still bill" in said["reason"]
        assert "set up anew" in said["reason"]
        assert "down" not in bench.controller.states("demo-h0")


def test_what_a_server_has_ended_itself_is_gone_for_one_that_remembers_it(bench: SkyBench) -> None:
    with bench.sky_provisioner(limits={"status_s": 600.0}):
        bench.controller.want("demo-h0")
        bench.controller.reported("demo-h0", "launched")
        del bench.sky.up["demo-h0"]  # by its autostop, say
        bench.controller.want("demo-h0", "down")
        bench.controller.reported("demo-h0", "down")
    assert "down_failed" not in bench.controller.states("demo-h0")


def test_of_a_silent_host_skypilot_is_asked_at_once_and_believed_where_it_has_looked(bench: SkyBench) -> None:
    limits = {"status_s": 600.0, "confirm_s": 600.0, "early_s": 0.02}
    with bench.sky_provisioner(limits=limits):
        bench.controller.want_all(["demo-h0", "demo-h1"])
        for host in ("demo-h0", "demo-h1"):
            bench.controller.reported(host, "launched")
        asked = bench.asked("status")
        lost = bench.sky.up.pop("demo-h0")  # a server that was set up anew: it has never heard of it
        bench.controller.want("demo-h0", doubted=True)
        eventually(
            lambda: bench.asked("status") >= asked + 4 or "ended" in bench.controller.states("demo-h0")
        )
        assert bench.controller.states("demo-h0") == ["launching", "launched"], (
            "an empty answer proves nothing"
        )

        bench.sky.up["demo-h0"] = lost
        bench.sky.taken.add("demo-h1")
        bench.controller.want("demo-h1", doubted=True)
        report = bench.controller.reported("demo-h1", "ended")
        assert "SkyPilot finds nothing of demo-h1 any more" in report["reason"]
    assert "ended" not in bench.controller.states("demo-h0")


def test_a_launch_without_an_end_is_no_capacity_and_cancelled(bench: SkyBench) -> None:
    bench.sky.hold.set()
    with bench.sky_provisioner(limits={"launch_s": 0.1}):
        bench.controller.want("demo-h0")
        assert bench.controller.reported("demo-h0", "failed")["kind"] == "capacity"
    assert bench.asked("cancel") == 1
