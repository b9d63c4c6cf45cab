"""Links that fail without a reset: who is left goes on within seconds, and nobody ever disagrees.

Each host is a network namespace with the real agent, a real session and a real TorchFT manager in it. A rank
logs each of its commits itself.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from benches.recovery.analysis import Logs, commits, equality
from benches.recovery.events import Follower, log_path
from sky_monarch.actors.lighthouse_control import LighthouseControl
from tests.support.cluster import cluster
from tests.support.network import Network, network, why_not
from tests.support.runs import Workbench, pid_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
if missing := why_not():
    pytestmark.append(pytest.mark.skip(missing))

HOSTS = 4
# Silence that evicts, as the lighthouse has it by default.
SILENCE_S = 2.0
STALL_S = 3.0
# From a link that is cut, without a reset, to when the lighthouse has dropped who was behind it: what it last said was
# before that. The rest is for a busy machine.
EVICTED_S = SILENCE_S + 0.5
START_S = 120


class Scene:
    """A run of four groups on four hosts, all of them in step."""

    def __init__(self, bench: Workbench, net: Network, name: str) -> None:
        self.bench, self.net, self.name = bench, net, name
        self._followers = {(group, 0): Follower(log_path(bench.folder, group, 0)) for group in range(HOSTS)}

    def logs(self) -> Logs:
        for follower in self._followers.values():
            follower.poll()
        return {who: follower.events for who, follower in self._followers.items()}

    def newest(self, group: int) -> int:
        done = commits(self.logs().get((group, 0), ()))
        return done[-1]["step"] if done else -1

    def wait_for_step(self, step: int, groups=range(HOSTS), *, within_s: float = START_S) -> None:
        eventually(
            lambda: all(self.newest(group) >= step for group in groups),
            within_s=within_s,
            every_s=0.25,
            what=f"groups {list(groups)} commit step {step}",
        )

    def longest_gap_s(self, group: int, since_s: float) -> float:
        """Longest time between two commits of a group, from the last one before ``since_s`` on."""
        times = [event["t"] for event in commits(self.logs()[group, 0])]
        last_before = max(t for t in times if t <= since_s)
        marks = [t for t in times if t >= last_before]
        return max(b - a for a, b in zip(marks, [*marks[1:], time.monotonic()], strict=True))

    def dropped(self) -> int:
        """How many members the lighthouse has dropped for their silence."""
        folder = self.bench.folder_of(self.name)
        control = LighthouseControl(
            f"unix:{folder.info['sockets']['lighthouse']}", token=folder.token or "", run_id=folder.run_id
        )
        found: int = control.state()["counters"]["drops"]["silent"]
        return found

    def finish(self) -> None:
        """Let all groups end at one step, and compare them."""
        stop = max(self.newest(group) for group in range(HOSTS)) + 40
        fresh = self.bench.folder / "stop.new"  # whoever sees the file is to see all of it
        fresh.write_text(str(stop))
        fresh.replace(self.bench.folder / "stop")
        eventually(
            lambda: equality(self.logs()).final_step is not None, within_s=60, every_s=0.25, what="all end"
        )
        found = equality(self.logs())
        assert found.bit_equal, found
        assert found.compared >= 5


@pytest.fixture
def scene(workbench: Workbench) -> Iterator[Scene]:
    command = [sys.executable, "-m", "benches.recovery.train_sky", "--folder", str(workbench.folder)]
    job = {
        "name": "net",
        "replicas": HOSTS,
        "run": shlex.join(command),
        "recovery": {"standby": 0, "max_restarts": 8, "grace_s": 2},
    }
    path = workbench.write(json.dumps(job), name="net.yaml")
    with network(HOSTS) as net, cluster(workbench, path, net) as name:
        scene = Scene(workbench, net, name)
        scene.wait_for_step(20)
        yield scene


def survive(
    scene: Scene, victim: int, cut: Callable[[], None], mend: Callable[[], None], away_s: float
) -> None:
    """Cut a host off for a while: the others go on soon, it comes back without a restart, all end equal."""
    others = [group for group in range(HOSTS) if group != victim]
    dropped = scene.dropped()
    cut_at = time.monotonic()
    cut()
    silent_at = not_yet_at = time.monotonic()

    def evicted() -> bool:
        nonlocal not_yet_at
        asked_at = time.monotonic()
        if scene.dropped() > dropped:
            return True
        not_yet_at = asked_at
        return False

    try:
        eventually(evicted, within_s=10, every_s=0.01, what="it is evicted")
        # Whoever looks may have been held up since: it was so for that long for certain.
        evicted_s = not_yet_at - silent_at
        at = max(scene.newest(group) for group in others)
        scene.wait_for_step(at + 10, others, within_s=20)
        gaps = [scene.longest_gap_s(group, cut_at) for group in others]
        stuck_at = scene.newest(victim)
        time.sleep(max(0.0, cut_at + away_s - time.monotonic()))
        assert scene.newest(victim) <= stuck_at + 1, "it was cut off, and committed nothing"
    finally:
        mend()
    again = max(scene.newest(group) for group in others)
    scene.wait_for_step(again + 20, within_s=60)
    print("evicted after, s:", evicted_s)
    assert evicted_s <= EVICTED_S
    print("longest time without a commit of each of the others, s:", gaps)  # shown by -rP
    assert max(gaps) <= STALL_S, gaps
    spawned = scene.bench.pids_spawned(scene.name)
    assert {group: len(pids) for group, pids in spawned.items()} == dict.fromkeys(range(HOSTS), 1), (
        "nobody was restarted"
    )
    scene.finish()


def test_a_host_whose_cable_is_pulled_stalls_the_others_for_three_seconds_at_most(scene: Scene) -> None:
    survive(scene, 2, lambda: scene.net.unplug(2), lambda: scene.net.plug(2), away_s=6)


def test_a_host_that_hears_but_is_not_heard_stalls_nobody_for_longer(scene: Scene) -> None:
    """Its packets are lost on the way to everybody, the lighthouse too; theirs arrive."""
    net = scene.net
    places = [*(address for number, address in enumerate(net.addresses) if number != 1), net.hub_address]

    def cut() -> None:
        for address in places:
            net.lose(1, address)

    def mend() -> None:
        for address in places:
            net.find(1, address)

    survive(scene, 1, cut, mend, away_s=6)


def test_a_pair_that_cannot_talk_one_way_stops_nobody_for_good(scene: Scene) -> None:
    """Host 0 reaches host 3 no more, and both are heard by the lighthouse: nobody is evicted for it."""
    cut_at = time.monotonic()
    scene.net.lose(0, scene.net.addresses[3])
    time.sleep(5)
    scene.net.find(0, scene.net.addresses[3])
    at = max(scene.newest(group) for group in range(HOSTS))
    scene.wait_for_step(at + 20, within_s=90)
    assert time.monotonic() - cut_at < 100
    scene.finish()


def test_a_stopped_rank_that_is_resumed_later_disagrees_with_nobody(scene: Scene) -> None:
    pid = pid_of(scene.bench.status(scene.name), 1)
    survive(
        scene,
        1,
        lambda: os.kill(pid, signal.SIGSTOP),
        lambda: os.kill(pid, signal.SIGCONT),
        away_s=6,
    )
