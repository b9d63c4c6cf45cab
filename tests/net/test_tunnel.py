"""Hosts that reach the head, and not each other: groups average and heal through the agents' tunnel.

Each host is a network namespace, and a PID namespace, with the real agent, enrolled as a provisioned one, a real
session and a real TorchFT manager in it. The bridge between them lets each through to the hub alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Enrolled, enrolled_hosts
from tests.support.network import Network, network, why_not
from tests.support.runs import Workbench
from tests.support.tunnel_rank import BALLAST
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
if missing := why_not():
    pytestmark.append(pytest.mark.skip(missing))

HOSTS, DIES, LOST = 3, 1, 2
LOCAL = 5  # steps of a round
START_S = 120
_DIAL = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=1)
except ConnectionRefusedError:
    print("reached")
except OSError as error:
    print("cut off")
"""


class Scene:
    """A run of three groups on three hosts that only dial out."""

    def __init__(self, bench: Workbench, net: Network, far: Enrolled) -> None:
        self.bench, self.net, self.far = bench, net, far

    def synced(self, replica: int, generation: int = 1) -> list[dict[str, Any]]:
        path = self.bench.folder / f"rank{replica}.g{generation}.jsonl"
        events = _lines(path) if path.exists() else []
        return [event for event in events if event["event"] == "synced"]

    def newest(self, replica: int) -> int:
        return max((event["step"] for one in (1, 2, 3) for event in self.synced(replica, one)), default=0)

    def wait_for_step(self, step: int, replicas: Iterable[int], within_s: float) -> None:
        replicas = list(replicas)
        eventually(
            lambda: all(self.newest(replica) >= step for replica in replicas),
            within_s=within_s,
            every_s=0.25,
            what=f"groups {replicas} commit step {step}",
        )

    def passed(self) -> dict[str, dict[str, int]]:
        """Bytes that the relay has seen, by the host that opened the stream."""
        hosts: dict[str, dict[str, int]] = json.loads((self.far.run_dir / "tunnel.json").read_text())["hosts"]
        return hosts

    def reaches(self, host: int, address: str) -> bool:
        command = self.net.inside(self.net.hosts[host], sys.executable, "-c", _DIAL, address)
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip() == "reached"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


@pytest.fixture
def scene(workbench: Workbench) -> Iterator[Scene]:
    run = f"{sys.executable} -m tests.support.tunnel_rank --folder {workbench.folder} --dies {DIES} --in-collective 20"
    job = workbench.job("tunnel", run=run, replicas=HOSTS, sync=f"diloco({LOCAL})")
    with network(HOSTS) as net:
        net.isolate()
        hosts = enrolled_hosts(
            workbench, job, count=HOSTS, net=net, tunnelled=True, limits={"agent_lost_s": 6}
        )
        with hosts as far:
            yield Scene(workbench, net, far)


def test_groups_on_hosts_that_only_dial_out_average_heal_and_outlive_one_of_them(scene: Scene) -> None:
    assert scene.reaches(0, scene.net.hub_address)
    assert not scene.reaches(0, scene.net.addresses[1]), "or nothing here needs a tunnel"

    # One group is killed inside of an outer average, comes back as its next generation, and gets the others' state.
    scene.wait_for_step(2 * LOCAL, range(HOSTS), START_S)
    eventually(lambda: scene.synced(DIES, 2), within_s=60, every_s=0.25, what="the group is back")

    def healed() -> bool:  # the ranks' own logs are ahead of what the controller hears
        recoveries = scene.bench.status(scene.far.name)["recoveries"]
        (recovery,) = (one for one in recoveries if one["replica"] == DIES)
        assert (recovery["heal_bytes"] or 0) >= 4 * BALLAST, recovery
        return True

    eventually(healed, what="its recovery is told with what it got")
    scene.wait_for_step(scene.newest(0) + 2 * LOCAL, range(HOSTS), 60)

    # All streams break at once where the relay dies. Nobody is restarted: the averages are tried again by the next one.
    os.kill(json.loads((scene.far.run_dir / "relay.pid").read_text())["pid"], signal.SIGKILL)
    at, began = scene.newest(0), time.monotonic()
    scene.wait_for_step(at + 3 * LOCAL, range(HOSTS), 60)
    print(f"{time.monotonic() - began:.1f} s from the death of the relay to three rounds more")
    others = {
        scene.bench.folder / name
        for name in ("rank0.g2.jsonl", f"rank{DIES}.g3.jsonl", f"rank{LOST}.g2.jsonl")
    }
    assert not any(path.exists() for path in others), "nobody else was restarted"

    # A host vanishes without a word: the others do not wait for it for long.
    at = scene.newest(0)
    scene.net.unplug(LOST)
    began = time.monotonic()
    scene.wait_for_step(at + 3 * LOCAL, {0, DIES}, 30)
    print(f"{time.monotonic() - began:.1f} s from the loss of a host to three rounds without it")

    last = max(scene.newest(0), scene.newest(DIES)) + 3 * LOCAL
    fresh = scene.bench.folder / "stop.new"  # whoever sees the file is to see all of it
    fresh.write_text(str(last))
    fresh.replace(scene.bench.folder / "stop")
    scene.wait_for_step(last, {0, DIES}, 60)
    scene.net.plug(LOST)  # it is told to end

    # What DiLoCo promises: after each outer step all who took it are equal, bit for bit.
    digests: dict[int, set[str]] = {}
    for replica in range(HOSTS):
        for generation in (1, 2):
            for event in scene.synced(replica, generation):
                digests.setdefault(event["step"], set()).add(event["digest"])
    assert {step for step, found in digests.items() if len(found) > 1} == set()
    assert [event["members"] for event in scene.synced(0)][-1] == [0, DIES]
    told = eventually(
        lambda: (found := scene.bench.status(scene.far.name)["tunnel_bytes"]) > 8 * 4 * BALLAST and found,
        what="what has passed is told",
    )
    passed = scene.passed()
    assert told <= sum(one["sent"] + one["received"] for one in passed.values())
    assert set(passed) == {f"{scene.far.name}-h{number}" for number in range(HOSTS)}, passed
