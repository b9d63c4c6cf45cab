"""Replica groups that are actors: one is lost, the others train on, it comes back and all are equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sky_monarch.actor import Lighthouse, ReplicaGroups, this_host
from sky_monarch.errors import ConfigError, RestartsExhaustedError
from tests.support.actors import Plain
from tests.support.care_actors import Group
from tests.support.processes import is_alive
from tests.support.session_actors import Trainer
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("failures", "actors_end")

REPO = Path(__file__).parents[2]
#: Nobody is dropped for its silence meanwhile: what is not told of a death shows as a stall.
SILENCE_S = 120


@pytest.mark.parametrize("dies", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_group_that_fails_is_replaced_whole_and_comes_to_its_end(dies, failures, shown, tmp_path):
    workers = this_host().spawn_procs({"gpus": 2, "replicas": 2}).spawn("workers", Group)
    pids = workers.spmd(os.getpid).get(20)

    groups = ReplicaGroups(workers, "http://127.0.0.1:1")
    ended = groups.run(workers.work, str(tmp_path / "gate"), fails=(1, 2), opens=3, dies=dies)

    assert groups.generations == (1, 3)
    assert [one[2] for one in ended.values()] == ["0", "0", "1", "1"], "ranks of their groups"
    assert {one[:2] for one in ended.values()} == {("http://127.0.0.1:1", "2")}
    again = workers.spmd(os.getpid).get(20)
    changed = {point["replicas"] for point, pid in again.items() if pid != pids.item(**point)}
    assert changed == {1}
    assert shown.text.count("sky-monarch: group 1 is replaced") == 2


def test_a_group_that_fails_once_more_than_it_may_or_when_it_is_alone_is_given_up(capfd, tmp_path):
    workers = this_host().spawn_procs({"replicas": 2}).spawn("workers", Group)
    words, gate = "group 1 has failed 2 times; 1 restarts are allowed", str(tmp_path / "gate")
    with Lighthouse() as lighthouse:
        with pytest.raises(RestartsExhaustedError, match=words) as raised:
            ReplicaGroups(workers, lighthouse, restarts=1).run(workers.work, gate, fails=(1, 9), opens=2)
        fences = lighthouse._control.state()["fences"]
        assert fences == {"1": 3}, "what has failed cannot come back, and is not waited for"
    assert "generation 2 cannot work" in str(raised.value.__cause__)

    many = 200  # the other one comes to its end long before that
    late = ReplicaGroups(workers, "http://127.0.0.1:1", restarts=many)
    with pytest.raises(RestartsExhaustedError) as raised:
        late.run(workers.work, gate, fails=(0, 2 * many), opens=1)
    assert "nobody is left to heal from" in "".join(raised.value.__cause__.__notes__)
    assert late.generations[0] <= many


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sizes", [{"replicas": 3}, {"replicas": 2, "gpus": 2}])
def test_a_killed_group_comes_back_heals_and_all_end_bit_equal(sizes, failures, tmp_path):
    trainers = this_host().spawn_procs(sizes).spawn("trainers", Trainer)
    count, last = sizes["replicas"], 120
    with Lighthouse(min_replicas=count - 1, expect=count, heartbeat_timeout_s=SILENCE_S) as lighthouse:
        groups = ReplicaGroups(trainers, lighthouse)
        ended = groups.run(trainers.train, last, str(tmp_path), die=(1, 8))

    assert len(ended) == len(trainers)
    assert groups.generations == tuple(2 if replica == 1 else 1 for replica in range(count))
    by_rank: dict[int, set[str]] = {}
    for point, one in ended.items():
        assert one["step"] == last
        assert one["replica"] == point["replicas"]
        assert one["generation"] == (2 if point["replicas"] == 1 else 1)
        by_rank.setdefault(point.get("gpus", 0), set()).add(one["digest"])
        if point["replicas"] != 1:
            assert one["gap_s"] < SILENCE_S / 2 * PATIENCE, "the others do not wait for the dead"
            assert {count - 1, count} <= set(one["sizes"]), "they train on without it, and with it again"
        else:
            assert one["first"] > 8, "it goes on where the others are"
    assert all(len(digests) == 1 for digests in by_rank.values())
    assert failures, "the death is told"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_group_whose_endpoint_raises_is_replaced_so_often_and_no_more(tmp_path, capfd):
    trainers = this_host().spawn_procs({"replicas": 2}).spawn("trainers", Trainer)
    with Lighthouse(expect=2, heartbeat_timeout_s=SILENCE_S) as lighthouse:
        groups = ReplicaGroups(trainers, lighthouse, restarts=0)
        words = "group 1 has failed 1 times; 0 restarts are allowed"
        with pytest.raises(RestartsExhaustedError, match=words) as raised:
            groups.run(trainers.train, 20, str(tmp_path), die=(1, 3), raises=True)
    assert "ValueError: this batch cannot be" in str(raised.value.__cause__)


def test_a_lighthouse_ends_with_its_program_and_leaves_nothing(tmp_path):
    program = (
        "import os, signal\n"
        "from sky_monarch.actor import Lighthouse\n"
        "made = Lighthouse()\n"
        "print(made._process.pid, made._folder, made.address(1, 2), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPO)])),
    }
    # Not until the pipe closes, which the lighthouse has open, too.
    ran = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
    assert ran.stdout is not None
    with ran.stdout:
        pid, folder, address = ran.stdout.readline().split()
    ran.wait(20 * PATIENCE)
    assert address.startswith("http://r1.g2.")
    assert eventually(lambda: not is_alive(int(pid)), what="it ends")
    assert eventually(lambda: not Path(folder).exists(), what="its folder is gone")
    with pytest.raises(ConfigError, match="min_replicas is 3, expect 2"):
        Lighthouse(min_replicas=3, expect=2)
    plain = this_host().spawn_procs({"gpus": 1}).spawn("plain", Plain)
    with pytest.raises(ConfigError, match="the mesh has no dimension 'replicas'"):
        ReplicaGroups(plain, "http://127.0.0.1:1")
    with pytest.raises(TypeError, match=r"echo\(value.*missing a required argument"):
        ReplicaGroups(plain, "http://127.0.0.1:1", dim="gpus").run(plain.echo)
