"""Places with hosts of different sizes: real controller and provisioner, a provider and agents of a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.provision.client import ControllerClient, Wanted
from sky_monarch.provision.provider import HostOrder, Kind, Launched, ProvisionError, Turn
from sky_monarch.provision.provisioner import Provisioner
from sky_monarch.provision.requests import Requests
from sky_monarch.provision.settings import Limits, Settings
from tests.support.controllers import RUN_ID, TOKEN, ControllerRun, ScriptedAgent
from tests.support.fake_provider import FakeProvider, Outcome
from tests.support.provisioning import QUICK, choice
from tests.support.waiting import eventually

GROUPS = 4
ONE = {"demo-h0": [0, 1, 2, 3]}
TWO = {"demo-h0": [0, 1], "demo-h1": [2, 3]}
FOUR = {f"demo-h{number}": [number] for number in range(GROUPS)}


def placed(infra: str, homes: dict[str, list[int]]) -> dict[str, Any]:
    hosts = [{"cluster": name, "groups": groups, "nodes": 1} for name, groups in homes.items()]
    return {**choice(infra, list(homes)), "hosts": hosts}


class Job:
    """A run that may be in several places, the first of which it is planned for.

    Attributes:
        full: Choices where there is no room now.
    """

    def __init__(self, folder: Path, *homes: dict[str, list[int]], full: tuple[int, ...] = ()) -> None:
        self.folder, self.full = folder, set(full)
        self.provider = FakeProvider(self._comes)
        self.choices = tuple(placed(f"k8s/c{number}", one) for number, one in enumerate(homes))
        self.run = ControllerRun(
            folder / "run",
            hosts={"head": [], **homes[0]},
            provisioned=tuple(homes[0]),
            choices=len(homes),
            limits={"host_backoff_s": 0.2, "linger_s": 0.2, "reap_s": 20.0},
            replicas=GROUPS,
            min_replicas=1,
        )
        self.run.start()
        self.agents = [ScriptedAgent(self.run, host="head").connect()]

    def _comes(self, order: HostOrder, turn: Turn, nth: int) -> Outcome:
        if turn.choice in self.full:
            return ProvisionError("no room", kind=Kind.CAPACITY)
        return Launched(place=f"place {turn.choice}", infra=None, usd_per_hour=2.0)

    @contextmanager
    def provisioner(self) -> Iterator[Provisioner]:
        requests = Requests(self.folder / "requests.json")
        settings = Settings(
            run_id=RUN_ID,
            run_dir=self.folder,
            provider="skypilot",
            api=Path(self.run.api),
            token=TOKEN,
            choices=self.choices,
            limits=Limits(**{**QUICK, "wait_s": 0.3, "hold_s": 0.05}),
            same_zone=False,
        )
        running = Provisioner(settings, self.provider, requests)
        thread = threading.Thread(target=running.run, name="provisioner")
        thread.start()
        try:
            yield running
        finally:
            running.closing.set()
            thread.join(20)
            running.finish()
            assert not thread.is_alive()
        assert not running.failed

    def up(self, *hosts: str) -> None:
        """Wait until exactly these hosts are up."""

        def seen() -> bool:
            phases = {host["host"]: host["phase"] for host in self.run.status()["hosts"]}
            assert {name for name, phase in phases.items() if phase == "UP"} == set(hosts), phases
            assert {phase for name, phase in phases.items() if name not in hosts} <= {"DOWN"}, phases
            return True

        eventually(seen, within_s=20, what=f"{hosts} are up")

    def homes(self) -> dict[str, list[int]]:
        hosts = self.run.status()["hosts"]
        return {host["host"]: host["groups"] for host in hosts if host["groups"]}

    def dials(self, host: str, attempt: int = 1) -> list[int]:
        """The agent of a host dials; which groups it is told to start."""
        agent = ScriptedAgent(self.run, host=host, attempt=attempt).connect()
        self.agents.append(agent)
        return sorted(order["replica"] for order in agent.told("start_group", len(self.homes()[host])))

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.run.close()


@pytest.mark.parametrize(
    ("homes", "full"),
    [
        ((ONE, TWO, FOUR), (0, 1)),
        pytest.param((FOUR, ONE, TWO), (0,), marks=pytest.mark.slow),
        pytest.param((TWO, FOUR, TWO), (0, 1), marks=pytest.mark.slow),
    ],
)
def test_groups_are_placed_as_the_place_that_has_room_needs_it_and_no_other_host_is_launched(
    tmp_path: Path, homes: tuple[dict[str, list[int]], ...], full: tuple[int, ...]
) -> None:
    job = Job(tmp_path, *homes, full=full)
    taken = homes[len(full)]
    try:
        with job.provisioner():
            job.up(*taken)
            assert job.homes() == taken
            assert {host: job.dials(host) for host in taken} == taken
        tried = [(host, number) for host, _, number, _ in job.provider.launches]
        assert [number for _, number in tried[: len(full)]] == list(full), "one host finds out, whichever"
        assert all(host in homes[number] for host, number in tried)
        assert sorted(tried[len(full) :]) == [(host, len(full)) for host in taken]
        assert job.provider.violations == []
        assert set(job.provider.clusters) == set(taken)
    finally:
        job.close()


def test_an_answer_that_was_on_its_way_while_groups_were_placed_moves_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third place is as the first: by a late word that groups are there they would be placed no more."""
    wanted, place = ControllerClient.wanted, ControllerClient.place
    answered, placed, begun, taken, third = (threading.Event() for _ in range(5))

    def late(client: ControllerClient, after: int, wait_s: float) -> Wanted:
        if placed.is_set() and not taken.is_set():
            taken.set()
            third.wait(0.5)
        answer = wanted(client, after, wait_s)
        if after >= 0 and answer.placement == 0 and not placed.is_set():
            answered.set()
            assert placed.wait(20)
            begun.wait(0.5)  # whoever waits for no word of after that launches by then
        return answer

    def ordered(client: ControllerClient, choice: int, homes: Mapping[str, Sequence[int]]) -> None:
        assert answered.wait(20)
        place(client, choice, homes)
        placed.set()

    def comes(order: HostOrder, turn: Turn, nth: int) -> Outcome:
        if turn.choice == 1:
            begun.set()
            assert taken.wait(20)
        elif turn.choice == 2:
            third.set()
        return job._comes(order, turn, nth)

    monkeypatch.setattr(ControllerClient, "wanted", late)
    monkeypatch.setattr(ControllerClient, "place", ordered)
    job = Job(tmp_path, TWO, FOUR, TWO, full=(0, 1))
    job.provider.script = comes
    try:
        with job.provisioner():
            job.up(*TWO)
            assert job.homes() == TWO
        assert {host for host, *_ in job.provider.launches} == set(TWO)
    finally:
        job.close()


@pytest.mark.slow
def test_where_no_place_has_room_the_next_round_places_groups_anew(tmp_path: Path) -> None:
    job = Job(tmp_path, FOUR, TWO, full=(0, 1))
    try:
        with job.provisioner():
            eventually(lambda: len(job.provider.launches) >= 4, within_s=20, what="two rounds")
            job.full = {1}
            job.up(*FOUR)
        assert job.homes() == FOUR
        tried = {(host, number) for host, _, number, _ in job.provider.launches}
        assert {host for host, number in tried if number == 1} <= set(TWO), "the others are not there"
    finally:
        job.close()


@pytest.mark.parametrize("lost", [pytest.param(False, marks=pytest.mark.slow), True])
def test_where_groups_are_is_known_to_the_next_controller(tmp_path: Path, lost: bool) -> None:
    job = Job(tmp_path, TWO, FOUR, full=(0,))
    try:
        with job.provisioner():
            job.up(*FOUR)
        for host in FOUR:
            assert job.dials(host) == FOUR[host]
        for agent in job.agents[1:]:
            (replica,) = FOUR[agent.host]
            agent.start(replica)
            agent.commit(replica, 1, first=True)
            agent.all_acked()
        job.run.kill()
        for agent in job.agents:
            agent.dropped()
        if lost:
            for path in (tmp_path / "run").glob("journal.db*"):
                path.unlink()
        job.run.start()
        for agent in job.agents:
            agent.connect()
        eventually(lambda: job.homes() == FOUR, within_s=20, what="each has its host")

        def run_on() -> bool:  # one is adopted as its agent is heard
            return {group["state"] for group in job.run.status()["groups"]} == {"RUNNING"}

        eventually(run_on, within_s=20)
    finally:
        job.close()


def test_a_job_that_has_been_somewhere_goes_only_where_its_groups_fit_and_the_reason_is_told(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, FOUR, TWO, full=(0,))
    try:
        with job.provisioner():
            job.up(*TWO)
            job.full = {1}
            for host in TWO:
                job.provider.notice(host, "the place was closed")

            def waits() -> bool:
                phases = [host["phase"] for host in job.run.status()["hosts"] if host["groups"]]
                assert len(job.provider.launches) > 3, "nothing was tried anew yet"
                assert phases == ["WAITING"] * len(TWO) or len(job.provider.launches) > 5, phases
                return True

            eventually(waits, within_s=20)
            assert job.homes() == TWO
            assert {number for *_, number, _ in job.provider.launches[3:]} == {1}, "never the other one"
        with job.run.client() as client:
            answer = client.post("/v1/hosts/placement", json={"choice": 0, "homes": FOUR})
        assert answer.status_code == 400
        assert "groups stay with their hosts" in answer.text
    finally:
        job.close()
