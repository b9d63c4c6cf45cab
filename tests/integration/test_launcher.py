"""The launcher of a run whose head is a cluster, in this process: with a provider of a test, and SSH that is real."""

from __future__ import annotations

import base64
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sky_monarch.launch.door import Door, open_door
from sky_monarch.launch.folder import RunFolder
from sky_monarch.launch.head import Away
from sky_monarch.launch.process import carrying
from sky_monarch.provision.launcher import Launcher
from sky_monarch.provision.provider import Kind, Launched, Provider, ProvisionError, Seen
from sky_monarch.provision.requests import Phase, Record, Requests
from sky_monarch.provision.skypilot import SkyPilotProvider
from sky_monarch.sdk import _archive
from tests.support.fake_provider import FakeProvider
from tests.support.fake_sky import FakeSky
from tests.support.hosts_controller import RUN_ID, TOKEN, HostsController
from tests.support.provisioning import Bench, choice
from tests.support.ssh_site import SSHD, ssh_site
from tests.support.waiting import eventually

HOSTS = ["demo-h0", "demo-h1"]
HEAD = "demo-head"
CHOICE = choice("k8s/ctx", [HEAD, *HOSTS], head={"kind": "cluster", "cluster": HEAD, "own": True})
CHOICES = [{**CHOICE, "hosts": CHOICE["hosts"][1:]}]
TOLD = {"run_id": RUN_ID, "version": "0.1.0", "head": {"created_ms": 1000}}
SECRET = {"token": TOKEN, "envs": {}, "secrets": {"KEY": "canary"}, "authority": {}, "identities": {}}
AWAY = Away(cluster=HEAD, told=TOLD, secret=SECRET)
LIMITS = {"head_s": 3.0, "unreached_s": 0.5, "end_s": 5.0, "head_again_s": 0.05, "head_within_s": 20.0}


class Site(Bench):
    """A run folder here, and the controller of its head elsewhere."""

    def __init__(self, folder: Path, elsewhere: Path) -> None:
        elsewhere.mkdir(parents=True)
        self.folder = folder
        self.controller = HostsController(elsewhere).start()
        run = {"run_id": RUN_ID, "name": "demo", "infra": "k8s", "head": HEAD, "created_ms": 1000}
        run["sockets"] = {"api": str(folder / "api.sock")}
        (folder / "run.json").write_text(json.dumps(run))
        self.choices = CHOICES
        self.checkpoint: str | None = None
        self.provider = FakeProvider()
        self.provider.doors[HEAD] = Door(socket=str(self.controller.api))

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def requests_file(self) -> Requests:
        return Requests(self.folder / "requests.json")

    @contextmanager
    def launcher(
        self, provider: Provider | None = None, requests: Requests | None = None
    ) -> Iterator[Launcher]:
        settings = self.settings(self.choices, limits=LIMITS, head=AWAY, checkpoint=self.checkpoint)
        object.__setattr__(settings, "api", self.folder / "api.sock")
        found = requests or self.requests_file
        running = Launcher(settings, AWAY, provider or self.provider, found, threading.Event())
        thread = threading.Thread(target=running.run, name="launcher")
        thread.start()
        try:
            yield running
        finally:
            running.closing.set()
            deadline = time.monotonic() + 20
            while thread.is_alive() and time.monotonic() < deadline:
                self.controller.want_all([])  # whoever has just asked again is not waited for
                thread.join(0.2)
            assert not thread.is_alive()
        assert not running.failed

    def order_end(self) -> None:
        (self.folder / "end.json").write_text('{"reason": "down", "grace_s": 1}')

    def final(self) -> dict:
        return eventually(lambda: self.run.final, within_s=20, what="it has ended")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, tmp_path / "far")
    yield site
    site.close()


def test_the_head_comes_first_and_hosts_go_exactly_where_it_is(site: Site) -> None:
    site.provider.script = lambda *_: Launched(place="ctx", infra="k8s/ctx", usd_per_hour=None)
    with site.launcher():
        site.controller.want_all(HOSTS)
        for host in HOSTS:
            site.controller.reported(host, "launched")
        assert site.provider.launches[0][0] == HEAD
        assert {infra for _, _, _, infra in site.provider.launches} == {None}, "each task names the place"
        assert site.controller.states(HEAD) == [], "the controller is not asked for its own host"
        secret = json.loads(base64.b64decode(site.provider.enrolments[HEAD]))
        assert secret["secrets"] == {"KEY": "canary"}
    assert "canary" not in (site.folder / "requests.json").read_text()
    assert site.provider.downs == [], "what was up lives on"


def test_the_first_host_chooses_the_zone_in_the_region_of_the_head(site: Site) -> None:
    whole = choice("oci", [HEAD, *HOSTS], head={"kind": "cluster", "cluster": HEAD, "own": True})
    site.choices = [{**whole, "hosts": whole["hosts"][1:]}]
    places = {HEAD: "oci/us-sanjose-1/AD-1", "demo-h0": "oci/us-sanjose-1/AD-3"}
    site.provider.script = lambda order, *_: Launched(
        place=None, infra=places.get(order.host), usd_per_hour=None
    )
    with site.launcher():
        for host in HOSTS:
            site.controller.want(host)
            site.controller.reported(host, "launched")

    assert [(host, infra) for host, _, _, infra in site.provider.launches] == [
        (HEAD, None),
        ("demo-h0", None),
        ("demo-h1", places["demo-h0"]),
    ]


def test_without_capacity_for_the_head_nothing_is_left_and_the_reason_is_told(site: Site) -> None:
    site.provider.script = lambda *_: ProvisionError("no CPU left", kind=Kind.CAPACITY)

    with site.launcher():
        final = site.final()

    assert (final["state"], final["exit_code"]) == ("FAILED", 3)
    assert "the head was not launched: no CPU left" in final["reason"]
    assert site.provider.clusters == {}


def test_a_cluster_of_that_name_that_is_not_ours_is_not_touched(site: Site) -> None:
    site.provider.clusters[HEAD] = 9

    with site.launcher():
        final = site.final()

    assert "there is a cluster demo-head already" in final["reason"]
    assert site.provider.clusters == {HEAD: 9}


def test_an_order_to_end_ends_a_head_that_is_still_being_launched(site: Site) -> None:
    site.provider.go.clear()

    with site.launcher():
        eventually(lambda: site.provider.launches)
        site.order_end()
        final = site.final()

    assert (final["state"], final["reason"], final["exit_code"]) == ("CANCELLED", "down", 8)
    assert site.provider.clusters == {}
    assert {host["host"]: host["phase"] for host in final["hosts"]} == dict.fromkeys((*HOSTS, HEAD), "DOWN")


def test_what_cannot_be_taken_down_is_named(site: Site) -> None:
    with site.launcher():
        site.controller.want_all(HOSTS)
        for host in HOSTS:
            site.controller.reported(host, "launched")
        site.provider.undown = [ProvisionError("who are you?", kind=Kind.CREDENTIALS) for _ in range(3)]
        site.controller.stop()
        site.order_end()
        final = site.final()

    for cluster in (*HOSTS, HEAD):
        assert f"{cluster} may still bill: who are you?" in final["reason"]
    assert [host["host"] for host in final["hosts"] if host.get("phase") == "DOWN"] == []


def test_one_word_that_the_head_is_gone_proves_nothing_and_two_end_the_run(site: Site) -> None:
    site.controller.status = {"step": 41, "hosts": [], "groups": []}
    with site.launcher():
        site.controller.want_all(HOSTS)
        for host in HOSTS:
            site.controller.reported(host, "launched")
        site.provider.answers[HEAD] = [Seen.GONE]
        eventually(lambda: not site.provider.answers[HEAD])
        time.sleep(0.3)
        assert site.run.final is None

        del site.provider.clusters[HEAD]
        final = site.final()

    assert final["state"] == "FAILED"
    assert "its head, demo-head, is gone (the provider says that demo-head is gone)" in final["reason"]
    assert "the last step that it told was 41" in final["reason"]
    assert "`sky-monarch up` of the same job file starts it again" in final["reason"]
    assert site.provider.clusters == {}, "hosts that have nobody to dial cost money"


def test_the_end_is_collected_before_the_head_goes(site: Site) -> None:
    began_ms = time.time() * 1000 - 1
    site.controller.events = [{"id": 1, "wall_ms": 5, "event": "launched"}, {"id": 2, "event": "run_ended"}]
    site.controller.status = {
        "run_id": RUN_ID,
        "state": "SUCCEEDED",
        "exit_code": 0,
        "reason": "done",
        "hosts": [{"host": "demo-h0", "phase": "UP", "groups": [0]}],
    }
    with site.launcher():
        site.controller.want_all(HOSTS)
        for host in HOSTS:
            site.controller.reported(host, "launched")
        eventually(lambda: site.controller.bills, what="it was told what its head costs")
        site.controller.want_all(HOSTS, "down")
        site.controller.end()
        final = site.final()

    assert site.controller.collected.is_set()
    told, *_ = site.controller.bills
    assert (told["cluster"], told["usd_per_hour"], told["place"]) == (HEAD, 2.0, "place 0")
    assert began_ms <= told["since_ms"] <= time.time() * 1000
    line = next(host for host in final["hosts"] if host["host"] == HEAD)
    assert (line["head"], line["usd_per_hour"]) == (True, 2.0)
    assert 0.0 <= line["cost_usd"] == final["cost_usd"] < 1.0
    assert (final["state"], final["exit_code"], final["reason"]) == ("SUCCEEDED", 0, "done")
    assert {host["host"]: host["phase"] for host in final["hosts"]} == dict.fromkeys((*HOSTS, HEAD), "DOWN")
    assert final["run_dir"] == str(site.folder)
    assert [(event.id, event.event) for event in _archive.events(site.run)] == [
        (1, "launched"),
        (2, "run_ended"),
    ]
    assert site.provider.downs[-1] == HEAD
    assert site.provider.clusters == {}


def test_a_head_that_is_gone_takes_every_attempt_along_and_hosts_that_the_plan_has_not(site: Site) -> None:
    newest, older = "demo-h0-a2", "demo-h1-a3"
    site.provider.clusters |= {newest: 2, older: 3, "demo-h7": 1, HEAD: 1}
    requests = site.requests_file
    for host, attempt in (("demo-h0", 2), ("demo-h7", 1), (HEAD, 1)):
        requests.put(Record(host=host, attempt=attempt, phase=Phase.UP, choice=0))
    requests.retire(Record(host="demo-h1", attempt=3, phase=Phase.UP, choice=0), candidates={})
    Door(socket=str(site.controller.api)).keep(site.run)
    site.provider.clusters.pop(HEAD)
    with site.launcher(requests=requests):
        final = site.final()

    assert final["state"] == "FAILED"
    assert set(site.provider.downs) >= {newest, older, "demo-h7"}
    assert site.requests_file.older() == (), "or they may still bill"
    assert site.provider.clusters == {}
    assert all(host["gone"] for host in final["hosts"])


def test_the_next_launcher_goes_on_with_the_head_that_is_there(site: Site) -> None:
    with site.launcher():
        eventually(lambda: Door.of(site.run))
    with site.launcher():
        site.controller.want("demo-h0")
        site.controller.reported("demo-h0", "launched")
    assert [host for host, *_ in site.provider.launches] == [HEAD, "demo-h0"]


@pytest.mark.slow
@pytest.mark.skipif(SSHD is None, reason="there is no sshd here (apt-get install openssh-server)")
def test_by_ssh_the_head_answers_at_the_socket_here_and_a_way_that_is_lost_is_opened_again(
    tmp_path: Path,
) -> None:
    with ssh_site(tmp_path / "ssh", HEAD) as config:
        site = Site(tmp_path, tmp_path / "far")
        sky = FakeSky()
        sky.reached = ("-F", str(config))
        requests = site.requests_file
        settings = site.settings(CHOICES, head=AWAY)
        provider = SkyPilotProvider(requests, settings, sdk=sky, poll_s=0.01, server_s=5.0)
        try:
            with site.launcher(provider, requests):
                eventually(lambda: (record := requests.get(HEAD)) and record.phase is Phase.UP)
                assert Door.of(site.run) is None, "nothing of it is there yet"
                far = tmp_path / "ssh/home/.sky-monarch/runs" / RUN_ID / f"{HEAD}-a1"
                far.mkdir(parents=True)
                (far / "run.json").write_text(json.dumps({"sockets": {"api": str(site.controller.api)}}))

                site.controller.want("demo-h0")
                site.controller.reported("demo-h0", "launched")
                assert site.run.api.stat().st_mode & 0o777 == 0o600, "nobody else's"
                forwarding = site.run.process("door")
                assert forwarding is not None
                forwarding.signal(signal.SIGKILL)
                site.controller.want("demo-h1")
                site.controller.reported("demo-h1", "launched")

            task = sky.tasks[0]
            assert set(task["secrets"]) == {"SKY_MONARCH_ENROLMENT"}
            public = {key: value for key, value in task.items() if key != "secrets"}
            assert "canary" not in json.dumps(public)
            assert TOKEN not in json.dumps(public)
            open_door(site.run)  # as any client does, without a launcher
            again = site.run.process("door")
            assert again is not None
            assert TOKEN not in " ".join(again.arguments())

            site.controller.status = {"run_id": RUN_ID, "state": "CANCELLED", "exit_code": 8}
            with site.launcher(provider, requests):
                site.order_end()
                eventually(lambda: site.controller.orders)
                site.controller.want_all(HOSTS, "down")
                site.controller.end()
                assert site.final()["state"] == "CANCELLED"
            assert sky.up == {}
            eventually(lambda: carrying(RUN_ID) == [], what="nothing leads there any more")
            assert not site.run.api.exists()
        finally:
            for process in carrying(RUN_ID):
                process.signal(signal.SIGKILL)
            site.close()


@pytest.mark.parametrize("content", [None, "{}"])
def test_where_the_record_is_lost_the_head_is_still_ours(site: Site, content: str | None) -> None:
    with site.launcher():
        site.controller.want("demo-h0")
        site.controller.reported("demo-h0", "launched")
    if content is None:
        (site.folder / "requests.json").unlink()
    else:
        (site.folder / "requests.json").write_text(content)

    with site.launcher():
        site.controller.stop()
        site.order_end()
        final = site.final()

    assert final["state"] == "CANCELLED"
    assert site.provider.clusters == {}, final["reason"]


def test_a_record_of_a_head_that_was_lost_is_its_end(site: Site) -> None:
    site.requests_file.put(Record(host=HEAD, attempt=1, phase=Phase.ENDED, reason="gone before"))

    with site.launcher():
        final = site.final()

    assert "is gone (gone before)" in final["reason"]


def lose_the_head(site: Site) -> None:
    """A run that trains, of a job that saves somewhere, loses its head."""
    site.controller.events = [{"id": 7, "wall_ms": 5, "event": "first_commit"}]
    site.controller.status = {
        "state": "RUNNING",
        "step": 41,
        "replicas": 2,
        "hosts": [{"host": host, "phase": "UP", "attempt": 1, "groups": [0]} for host in HOSTS],
        "groups": [{"replica": 0, "generation": 3}, {"replica": 1, "generation": 1}],
    }
    site.controller.want_all(HOSTS)
    for host in HOSTS:
        site.controller.reported(host, "launched")
    eventually(lambda: site.controller.bills, what="its launcher knows how it stands")
    site.controller.forget_hosts()  # the next one wants others
    del site.provider.clusters[HEAD]


def test_a_head_that_is_gone_is_followed_by_another_one_once_nothing_of_it_is_left(site: Site) -> None:
    site.checkpoint = "s3://there/far"
    came: list[set[str]] = []

    def comes(order, _turn, nth):
        if order.host == HEAD and order.attempt == 2:
            came.append(set(site.provider.clusters))
            if nth == 1:
                return ProvisionError("no CPU left", kind=Kind.CAPACITY)  # it is waited for
        return Launched(place="ctx", infra="k8s/ctx", usd_per_hour=2.0)

    site.provider.script = comes
    with site.launcher():
        lose_the_head(site)
        eventually(lambda: len(came) == 2 and site.run.door.exists(), what="the next head is up")
        site.controller.want("demo-h0", attempt=2)
        site.controller.reported("demo-h0", "launched", attempt=2)

    assert came[0] == {f"{HEAD}-a2"}, "no host of the lost one stood beside it"
    assert site.run.final is None
    assert set(site.provider.clusters) == {f"{HEAD}-a2", "demo-h0-a2"}
    told = json.loads((site.folder / "succession.json").read_text())["told"]
    assert (told["step"], told["generations"], told["hosts"]) == (
        41,
        {"0": 3, "1": 1},
        dict.fromkeys(HOSTS, 1),
    )
    assert told["after"] > 7, "ids of events go on"
    assert [event.id for event in _archive.events(site.run)] == [7], "what the lost one told is kept here"


def test_no_head_follows_where_something_of_the_lost_one_may_still_run(site: Site) -> None:
    site.checkpoint = "s3://there/far"
    with site.launcher():
        site.provider.undown = [ProvisionError("who are you?", kind=Kind.CREDENTIALS) for _ in range(6)]
        lose_the_head(site)
        final = site.final()

    assert final["state"] == "FAILED"
    assert "could not be had again beside what is left: demo-h0, demo-h1" in final["reason"]
    assert "demo-h0 may still bill: who are you?" in final["reason"]
    assert f"{HEAD}-a2" not in {f"{host}-a{attempt}" for host, attempt, *_ in site.provider.launches}


def test_a_provider_that_does_not_say_what_there_is_is_asked_again_before_a_head_is_given_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsaid = [ProvisionError("it took longer than 120 s")]
    truth = site.provider.found

    def found(host: str) -> dict[str, int]:
        if unsaid:
            raise unsaid.pop()
        return truth(host)

    monkeypatch.setattr(site.provider, "found", found)
    with site.launcher():
        eventually(lambda: Door.of(site.run), what="the head is up")
    assert site.run.final is None
