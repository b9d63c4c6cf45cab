"""Actors on hosts of a network that fails without a reset, and in which one side alone can dial."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.network import Network, ip, network, why_not
from tests.support.processes import with_variable
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(120)]
if missing := why_not():
    pytestmark.append(pytest.mark.skip(missing))

ROOT = Path(__file__).parents[2]
# Silence after which a gateway takes the other for lost (rust_core/src/mesh/gateway/peer.rs).
SILENCE_S = 8.0
PORT = 24100

PROGRAM = """
import sys, time
from sky_monarch.actor import HostListener, SupervisionError, attach_to_hosts
import sky_monarch.actor as face
from tests.support.actors import Caller
how, keys, *where = sys.argv[1:]
def say(words):
    # Two threads speak at once: a line goes out whole, where print would write its words one by one.
    sys.stdout.write(words + "\\n")
    sys.stdout.flush()
face.unhandled_fault_hook = lambda failure: say(f"failure {failure.host} {failure.crashed_ranks}")
hosts = HostListener(where[0], keys=keys).hosts(2) if how == "listen" else attach_to_hosts(where, keys=keys)
mesh = hosts.spawn_procs({"gpus": 2}).spawn("caller", Caller)
left, right = mesh.slice(hosts=0, gpus=0), mesh.slice(hosts=1, gpus=1)
say(f"asked {left.ask.call_one(right, 'over there').get(30)} {right.ask.call_one(left, 'and back').get(30)}")
pending = mesh.slice(hosts=1).stay.call(100, -1)
say("waiting")
try:
    pending.get(60)
except SupervisionError as error:
    say(f"lost {error}")
say("left " + left.echo.call_one("goes on").get(30))
sys.stdin.read()
"""


@pytest.fixture
def keys(tmp_path):
    from sky_monarch.actor_host import make_keys

    make_keys(str(tmp_path / "keys"), 2)
    return tmp_path / "keys"


class Scene:
    """A program on the hub, and a host process in each of two namespaces."""

    def __init__(self, net: Network, keys: Path, mark: str) -> None:
        self.net, self.keys = net, keys
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "ACTORS_TEST_MARK": mark, "TMPDIR": "/tmp"}
        self.started: list[subprocess.Popen[str]] = []

    def run(self, namespace: str, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.net.inside(namespace, sys.executable, *argv),
            env=self.env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def host(self, number: int, *options: str) -> None:
        argv = ["-m", "sky_monarch.actor_host", "--keys", str(self.keys / f"host-{number}.key")]
        self.run(self.net.hosts[number], *argv, "--name", f"host-{number}", "--within", "60", *options)

    def program(self, how: str, *where: str) -> subprocess.Popen[str]:
        return self.run(self.net.hub, "-c", PROGRAM, how, str(self.keys / "client.key"), *where)

    def end(self) -> None:
        # The program is killed; a host is told, since between two programs nobody else tidies up after it.
        for process in reversed(self.started):
            (process.kill if "-c" in process.args else process.terminate)()
            process.communicate(timeout=20)


@pytest.fixture
def scene(keys):
    mark = f"{os.getpid()}-net"
    with network(2) as net:
        scene = Scene(net, keys, mark)
        try:
            yield scene
        finally:
            scene.end()
            eventually(lambda: not with_variable("ACTORS_TEST_MARK", mark), within_s=15, what="all are gone")


def read(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def test_a_host_whose_cable_is_pulled_is_lost_on_both_sides_within_its_silence(scene: Scene) -> None:
    for number in range(2):
        scene.host(number, "--listen", f"{scene.net.addresses[number]}:{PORT}")
    program = scene.program("dial", *(f"{address}:{PORT}" for address in scene.net.addresses))
    assert read(program) == "asked over there and back"
    assert read(program) == "waiting"
    before = len(with_variable("ACTORS_TEST_MARK", f"{os.getpid()}-net"))

    scene.net.unplug(1)
    cut_s = time.monotonic()

    heard = sorted([read(program), read(program)])
    took_s = time.monotonic() - cut_s
    assert heard[0] == "failure host-1 (2, 3)", heard
    assert heard[1].startswith("lost"), heard
    assert "host-1 is lost: nothing was heard of it for 8 s" in heard[1]
    assert took_s < SILENCE_S + 20, took_s  # the kernel alone would try for a quarter of an hour
    assert read(program) == "left goes on"
    # Its two processes; the one that serves it waits for the next program.
    eventually(
        lambda: len(with_variable("ACTORS_TEST_MARK", f"{os.getpid()}-net")) <= before - 2,
        within_s=SILENCE_S + 20,
        what="what ran on the host has ended, though nobody could tell it",
    )


@pytest.mark.parametrize("reach", ["each other", "the program alone"])
def test_hosts_that_dial_out_are_attached_to_and_reach_each_other_through_the_program(
    scene: Scene, reach: str
) -> None:
    if reach == "the program alone":
        for number, other in ((0, 1), (1, 0)):
            # Nothing of one arrives at the other; both see the hub.
            scene.net.lose(number, scene.net.addresses[other])
            ip("-n", scene.net.hosts[number], "route", "add", "blackhole", f"{scene.net.addresses[other]}/32")
    where = f"{scene.net.hub_address}:{PORT}"
    program = scene.program("listen", where)
    for number in range(2):
        scene.host(number, "--dial", where)
    assert read(program) == "asked over there and back"
