"""What sky-monarch promises, on real Slurm through real SkyPilot: three groups, three nodes, one to spare."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.client import REPLICAS, Client
from tests.e2e.site import Site
from tests.e2e.slurm import GRACE_S
from tests.support.processes import pids
from tests.support.runs import ended_at_exit
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(2400)

EVICTED_S = 2.0
# From an eviction to a commit without the lost one; and to a status that shows it.
STEP_S, NEWS_S = 0.5, 1.5
CANCELLED = 8


def nobody_shows(secret: str) -> bool:
    """Whether no command line of any process has it in it."""
    for pid in pids():
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert secret.encode() not in line, line
            assert b"SKY_MONARCH_ENROLMENT=" not in line, line
    return True


@pytest.fixture(scope="module")
def up(client: Client) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A run of the quickstart's model, and the `up` that started it and says what happens."""
    name = "train"
    job = client.training_job(name)
    client.names.append(name)
    words = ("up", str(job), "--yes", "--head-address", "127.0.0.1", "--json")
    with ended_at_exit(client.stream(client.folder / "up.ndjson", *words)) as process:
        yield name, process


@pytest.fixture
def train(up: tuple[str, subprocess.Popen[str]]) -> str:
    return up[0]


def test_three_groups_train_on_three_nodes(site: Site, client: Client, train: str) -> None:
    client.wait_for_all(train, step=60, within_s=900)

    jobs = client.host_jobs(train)
    assert len({job.node for job in jobs.values()}) == len(jobs) == REPLICAS
    shown = json.loads(client.cli("status", train, "--json").stdout)
    assert shown["state"] == "RUNNING"
    assert {host["host"]: host["phase"] for host in shown["hosts"]} == dict.fromkeys(jobs, "UP")
    assert all(group["loss"] < math.log(256) - 1 for group in shown["groups"]), "better than a guess"
    events = [json.loads(line) for line in client.cli("events", train, "--json").stdout.splitlines()]
    assert {e["replica"] for e in events if e["event"] == "first_commit"} == set(range(REPLICAS))
    place = client.folder / "logs"
    with ended_at_exit(client.stream(place, "logs", train, "--follow")) as logs:
        eventually(lambda: "loss" in place.read_text(), within_s=30, what="the leader's line")
        logs.terminate()
        logs.wait(20)
    private = json.loads((client.run_folder(train) / "private.json").read_text())
    assert nobody_shows(private["token"])


def kill_rank(client: Client, name: str) -> None:
    """A rank is killed: its group alone is replaced, in the Slurm job that it has."""
    jobs, before = client.host_jobs(name), client.status(name)

    os.kill(client.rank_pid(name, 1), signal.SIGKILL)
    eventually(
        lambda: client.status(name)["groups"][1]["generation"] > before["groups"][1]["generation"],
        within_s=20,
        what="it is replaced",
    )
    after = client.wait_for_all(name, step=(before["step"] or 0) + 10, within_s=60)

    assert client.host_jobs(name) == jobs
    for other in (0, 2):
        assert after["groups"][other]["ranks"] == before["groups"][other]["ranks"], "nobody touched it"


def test_a_killed_rank_is_replaced_in_place_and_its_slurm_job_is_the_same(client: Client, train: str) -> None:
    kill_rank(client, train)


def lose_node(
    site: Site, client: Client, name: str, replica: int, meanwhile: Callable[[], None] = lambda: None
) -> float:
    """Switch the node of a group off: the others go on, and it comes back on a node that was free. Returns when."""
    host, jobs, before = f"{name}-h{replica}", client.host_jobs(name), client.status(name)
    others = [other for other in range(REPLICAS) if other != replica]
    attempt, lost, spares = client.host(name, replica)["attempt"], jobs[host], site.free_nodes()

    killed_s = time.monotonic()
    site.slurm.kill_node(lost.node, wait=False)
    eventually(
        lambda: client.status(name)["groups"][others[0]]["participants"] == REPLICAS - 1,
        within_s=20,
        what="the others go on",
    )
    gap_s = time.monotonic() - killed_s
    site.slurm.kill_node(lost.node)
    meanwhile()
    eventually(
        lambda: client.host(name, replica)["attempt"] == attempt + 1,
        within_s=90,
        what="another one is asked for",
    )
    eventually(
        lambda: client.launched_beside(name, host, attempt + 1),
        within_s=30,
        what="it is launched while the lost one is taken down",
    )
    after = client.wait_for_all(name, step=(before["step"] or 0) + 10, within_s=900)
    back_s = time.monotonic() - killed_s

    found = client.host_jobs(name)
    assert found[host].number != lost.number
    assert found[host].node in spares
    assert {key: job for key, job in found.items() if key != host} == {
        key: job for key, job in jobs.items() if key != host
    }, "the others' Slurm jobs are what they were"
    assert after["groups"][replica]["generation"] > before["groups"][replica]["generation"]
    left = [status["groups"][replica]["restarts_left"] for status in (before, after)]
    assert left[0] == left[1], "no restart is spent"
    assert gap_s <= EVICTED_S + NEWS_S, f"the status shows a quorum without it after {gap_s:.2f} s"
    for other in others:
        assert after["groups"][other]["ranks"] == before["groups"][other]["ranks"], "nobody touched it"
    # `-rP` shows it.
    print(f"all train again {back_s:.1f} s after the loss of {lost.node}, on {found[host].node}")
    site.slurm.wait_for_node(lost.node, "down", within_s=60)
    site.slurm.start_node(lost.node)
    return killed_s


def test_a_lost_node_costs_the_others_a_step_and_its_group_returns_on_the_spare_one(
    site: Site, client: Client, train: str
) -> None:
    lose_node(site, client, train, 1)


@pytest.mark.slow
def test_scale_brings_a_host_up_and_takes_it_down_and_touches_no_other(
    site: Site, client: Client, train: str
) -> None:
    jobs, before = client.host_jobs(train), client.status(train)
    (free,) = site.free_nodes()

    client.scale(train, REPLICAS + 1)
    more = client.wait_for_all(train, step=(before["step"] or 0) + 10, within_s=300, replicas=REPLICAS + 1)

    found = client.host_jobs(train)
    new = f"{train}-h{REPLICAS}"
    assert found[new].node == free
    assert {key: job for key, job in found.items() if key != new} == jobs
    assert more["replicas"] == REPLICAS + 1

    client.scale(train, REPLICAS)
    fewer = client.wait_for_all(train, step=(more["step"] or 0) + 10, within_s=60)

    eventually(lambda: client.host_jobs(train) == jobs, within_s=60, every_s=0.5, what="its job has left")
    assert not site.slurm.jobs(named=new), "nothing of it is left in the queue"
    eventually(lambda: site.slurm.node_state(free) == "idle", within_s=30, every_s=0.5, what="its node")
    assert fewer["state"] == "RUNNING", fewer["reason"]
    for group, was in zip(fewer["groups"], before["groups"], strict=False):
        assert group["ranks"] == was["ranks"], "nobody touched it"


def test_down_leaves_no_job_and_no_process(client: Client, up: tuple[str, subprocess.Popen[str]]) -> None:
    name, process = up
    client.end(name)

    assert process.wait(60) == CANCELLED
    *events, final = [json.loads(line) for line in (client.folder / "up.ndjson").read_text().splitlines()]
    assert final["state"] == "CANCELLED"
    assert all("event" in event for event in events)
    again = client.cli("down", name)
    assert again.returncode == 0, again.stderr
    assert "already gone" in again.stdout


# From here on ranks are torch-free: they say when they committed which step, by a clock that all nodes share.


@pytest.fixture(scope="module")
def free(site: Site, client: Client) -> Iterator[str]:
    """A run of torch-free ranks, all of them in step."""
    name = client.up(client.free_job("free"))
    client.wait_for_all(name, step=10, within_s=900)
    yield name
    client.end(name)


@pytest.mark.slow
def test_a_torch_free_rank_is_replaced_in_place_too(client: Client, free: str) -> None:
    kill_rank(client, free)


@pytest.mark.slow
def test_survivors_of_a_lost_node_commit_without_it_within_two_seconds(
    site: Site, client: Client, free: str
) -> None:
    killed_s = lose_node(site, client, free, 1)

    for other in (0, 2):
        steps = client.steps(free, other)
        gap_s = next(s.at_s for s in steps if s.at_s > killed_s and s.participants < REPLICAS) - killed_s
        print(f"group {other}: first commit without the lost node {gap_s:.2f} s after it")  # -rP shows it
        assert gap_s <= EVICTED_S + STEP_S
        numbers = [step.number for step in steps]
        assert len(numbers) - len(set(numbers)) <= 1, "at most one step was done again"


@pytest.mark.slow
def test_a_controller_that_is_killed_while_a_node_is_lost_changes_nothing(
    site: Site, client: Client, free: str
) -> None:
    def kill_controller() -> None:
        pid = client.status(free)["controller_pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: client.status(free)["controller_pid"] not in (pid, None), within_s=20, what="another one"
        )

    lose_node(site, client, free, 2, kill_controller)


@pytest.mark.slow
def test_a_pre_empted_group_loses_nothing_waits_and_returns_when_there_is_room(
    site: Site, client: Client, free: str
) -> None:
    slurm, name = site.slurm, free
    jobs, before = client.host_jobs(name), client.status(name)
    victim = jobs[f"{name}-h0"]
    taken = [slurm.take(node) for node in site.free_nodes()]
    try:
        told_s = time.monotonic()
        taken.append(slurm.take(victim.node))
        eventually(
            lambda: client.status(name)["groups"][1]["participants"] == REPLICAS - 1,
            within_s=GRACE_S,
            what="it leaves within the grace time",
        )
        eventually(
            lambda: all(job.state == "RUNNING" for job in slurm.jobs(named="other")),
            within_s=60,
            every_s=0.5,
            what="the urgent jobs have their nodes",
        )
        waiting = client.status(name)
        assert waiting["state"] == "DEGRADED"
        at = waiting["step"]
        eventually(
            lambda: client.host(name, 0)["phase"] == "WAITING", within_s=200, what="there is no room for it"
        )
        assert client.status(name)["step"] > at + 10, "the others train on"
        running = {key for key, job in client.host_jobs(name).items() if job.state == "RUNNING"}
        assert running == {f"{name}-h1", f"{name}-h2"}
    finally:
        slurm.cancel(*taken)
    after = client.wait_for_all(name, step=at, within_s=900)

    found = client.host_jobs(name)
    assert {found[f"{name}-h{other}"].number for other in (1, 2)} == {
        jobs[f"{name}-h{other}"].number for other in (1, 2)
    }
    assert after["groups"][0]["restarts_left"] == before["groups"][0]["restarts_left"], "none is spent"
    for other in (1, 2):
        numbers = [step.number for step in client.steps(name, other) if step.at_s > told_s - 5]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), (
            "no step was done again or left out"
        )
