"""What ran on a lost host comes back on another one, in its place; and processes that stand by on other hosts."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sky_monarch.actor import RestartPolicy, local_hosts, this_host
from sky_monarch.actors.runtime import runtime
from sky_monarch.errors import ConfigError, LaunchError, NoCapacityError, SupervisionError
from tests.support.actors import Caller, FarOwner, Plain, Spoken
from tests.support.processes import children_of, is_alive, parent_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("actors_end")

LIMIT_S = 30


def kill_host_of(pid: int) -> None:
    """End the process that serves the host of ``pid``: the parent of its zygote."""
    os.kill(parent_of(parent_of(pid)), signal.SIGKILL)


def test_ranks_of_a_lost_host_come_back_on_one_that_has_room_and_every_handle_works_again(failures):
    hosts = local_hosts(3)
    procs = hosts.slice(hosts=slice(0, 2)).spawn_procs({"gpus": 2}, name="trainers")
    mesh = procs.spawn("trainer", Caller)
    other = hosts.slice(hosts=1).spawn_procs(name="other").spawn("other", Caller)
    there = hosts.slice(hosts=2).spawn_procs(name="there").spawn("there", Caller)
    before = [mesh.slice(hosts=h, gpus=g) for h in (0, 1) for g in (0, 1)]
    assert there.ask.call_one(before[2], "before").get(LIMIT_S) == "before"
    mesh.initialized.get(LIMIT_S)  # until then some may not be forked
    pids = procs.pids()

    kill_host_of(pids[2])
    eventually(lambda: len(failures) == 2, what="a report for each mesh that had processes there")
    eventually(lambda: not is_alive(pids[2]))

    with pytest.raises(NoCapacityError, match="no host has room for what ran on local-1: local-1 is lost"):
        mesh.respawn(range(2, 4))  # one process runs on the third host, which has two at the most
    there.stop().get(LIMIT_S)
    hosts.slice(hosts=2)  # a handle, nothing more
    mesh.respawn(range(2, 4), host=hosts.slice(hosts=2))

    assert hosts.names == ["local-0", "local-2", "local-2"]
    again = procs.pids()
    assert again[:2] == pids[:2]
    assert parent_of(parent_of(again[2])) == parent_of(parent_of(again[3]))
    assert list(mesh.echo.call("all").get(LIMIT_S).values()) == ["all"] * 4
    late = hosts.slice(hosts=2).spawn_procs(name="late").spawn("late", Caller)
    for asking in (before[0], before[3], late):
        # From another host, from the next process, from another mesh of the same host.
        for number in range(20):
            assert asking.ask.call_one(before[2], number).get(LIMIT_S) == number
    other.respawn(0)
    assert other.ask.call_one(before[0], "its own owner").get(LIMIT_S) == "its own owner"
    assert len(failures) == 2, "a replacement is no failure"


def test_ranks_of_a_lost_host_are_spread_over_all_that_have_room_and_fail_each_with_its_own(failures):
    hosts = local_hosts(4)
    procs = hosts.slice(hosts=slice(0, 2)).spawn_procs({"gpus": 2}, name="trainers")
    mesh = procs.spawn("trainer", Spoken)
    busy = hosts.slice(hosts=2).spawn_procs(name="busy").spawn("busy", Spoken)
    idle = hosts.slice(hosts=3).spawn_procs(name="idle").spawn("idle", Spoken)
    hosts_of = lambda: [parent_of(parent_of(pid)) for pid in procs.pids()]  # noqa: E731
    rank = [mesh.slice(hosts=h, gpus=g) for h in (0, 1) for g in (0, 1)]
    pids = [*mesh_pids(busy), *mesh_pids(idle)]
    assert list(mesh.echo.call("before").get(LIMIT_S).values()) == ["before"] * 4
    before = procs.pids()

    kill_host_of(before[2])
    eventually(lambda: failures)
    mesh.respawn([2, 3])

    third, fourth = (parent_of(parent_of(pid)) for pid in pids)
    assert hosts_of()[2:] == [third, fourth], "one on each, for one has room on each"
    assert procs.pids()[:2] == before[:2]
    for asking in (rank[0], rank[2], rank[3], busy, idle):
        for target, value in ((rank[2], "third"), (rank[3], "fourth")):
            if asking is not target:
                assert asking.ask.call_one(target, value).get(LIMIT_S) == value
        values = asking.ask_all.call_one(mesh).get(LIMIT_S)
        assert values == procs.pids(), "each value is at its rank"
    for number in range(100):
        mesh.slice(hosts=1).hear.broadcast(number)
    assert list(mesh.slice(hosts=1).all_heard.call().get(LIMIT_S).values()) == [list(range(100))] * 2
    large = b"large" * 100_000
    assert set(mesh.slice(hosts=1).echo.call(large).get(LIMIT_S).values()) == {large}
    # The end of one of these hosts is the end of what ran there, and of no other call to the lost one's ranks.
    alone = rank[3].stay.call_one(1.0, -1)
    both = mesh.slice(hosts=1).stay.call(10.0, -1)
    again = procs.pids()
    kill_host_of(again[2])
    with pytest.raises(SupervisionError, match=r"trainer\[2\] is dead: .*local-2 is lost"):
        both.get(LIMIT_S)
    alone.get(LIMIT_S)
    eventually(lambda: len(failures) == 3)
    assert [failure.crashed_ranks for failure in failures if failure.mesh == "trainers"] == [(2, 3), (2,)]
    with pytest.raises(NoCapacityError, match="no host has room for what ran on local-2"):
        mesh.respawn(2)  # two run on the only one that is not full already
    mesh.respawn(2, host=hosts.slice(hosts=3))
    assert hosts_of()[2:] == [fourth, fourth]
    assert rank[0].ask_all.call_one(mesh).get(LIMIT_S) == procs.pids()


def mesh_pids(mesh):
    return list(mesh.pid.call().get(LIMIT_S).values())


@pytest.mark.slow
def test_a_place_is_taken_once_and_lost_again_with_the_host_that_has_it(failures):
    hosts = local_hosts(3)
    procs = hosts.slice(hosts=0).spawn_procs({"gpus": 1}, name="first")
    mesh = procs.spawn("plain", Plain)
    mesh.pid.call().get(LIMIT_S)
    for lost in range(2):
        (pid,) = procs.pids()
        assert pid is not None
        kill_host_of(pid)
        eventually(lambda lost=lost: len(failures) == lost + 1)
        mesh.respawn(0)
        assert mesh.echo.call_one(lost).get(LIMIT_S) == lost
    assert [failure.host for failure in failures] == ["local-0", "local-1"]
    assert hosts.names == ["local-2"] * 3
    with pytest.raises(ConfigError, match="host has 3 hosts"):
        mesh.respawn(0, host=hosts)
    kill_host_of(procs.pids()[0])
    eventually(lambda: len(failures) == 3)
    with pytest.raises(NoCapacityError, match="no host has room"):
        mesh.respawn(0)
    with pytest.raises(ConfigError, match="program's own"):
        mesh.respawn(0, host=this_host())
    with pytest.raises(LaunchError, match="local-2"):
        mesh.respawn(0, host=hosts.slice(hosts=0))


@pytest.mark.slow
@pytest.mark.parametrize("takes", [0, 2], ids=["own", "third"])
def test_an_actor_brings_back_what_it_had_on_a_lost_host_and_the_program_says_where(failures, takes):
    hosts = local_hosts(3)
    owner = hosts.slice(hosts=0).spawn_procs(name="owner").spawn("owner", FarOwner)
    pids = owner.start.call_one(hosts.slice(hosts=1), 2).get(LIMIT_S)

    kill_host_of(pids[1])

    told = eventually(lambda: owner.told.call_one().get(LIMIT_S))
    assert [(failure.host, failure.crashed_ranks) for _, failure in told] == [("local-1", (0, 1))]
    owner.bring_back_on.call_one([0, 1], hosts.slice(hosts=takes)).get(LIMIT_S)
    again = owner.all_pids.call_one().get(LIMIT_S)
    assert not set(again) & set(pids)
    os.kill(again[0], signal.SIGKILL)
    eventually(lambda: len(owner.told.call_one().get(LIMIT_S)) == 2, what="it hears of ends there")
    owner.bring_back.call_one(0).get(LIMIT_S)
    again = owner.all_pids.call_one().get(LIMIT_S)
    os.kill(owner.pid.call_one().get(LIMIT_S), signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, again)), what="they end with their owner")
    eventually(lambda: failures)
    assert len(failures) == 1, "that of the owner alone"


@pytest.mark.slow
def test_a_policy_brings_all_ranks_of_a_lost_host_back(failures):
    hosts = local_hosts(2)
    procs = hosts.slice(hosts=0).spawn_procs({"gpus": 3}, restart=RestartPolicy())
    mesh = procs.spawn("plain", Plain)
    mesh.pid.call().get(LIMIT_S)
    before = procs.pids()

    kill_host_of(before[0])

    eventually(lambda: not set(procs.pids()) & set(before) and all(procs.pids()), what="all are replaced")
    assert len(set(mesh.pid.call().get(LIMIT_S).values())) == 3
    assert not failures


def test_one_that_stands_by_on_another_host_takes_the_place_there(failures):
    hosts = local_hosts(1)
    procs = hosts.spawn_procs({"gpus": 2}, name="trainers", standby=1)
    mesh = procs.spawn("trainer", Plain)
    pids = list(mesh.pid.call().get(LIMIT_S).values())
    zygote = parent_of(pids[0])
    children = lambda: {pid for pid in children_of(zygote) if is_alive(pid)}  # noqa: E731
    (spare,) = eventually(lambda: children() - set(pids), what="one stands by")
    # It is there before its host knows that it may be taken; what the host is asked for now comes after that.
    other = hosts.spawn_procs(name="other")
    other.spawn("other", Plain).pid.call_one().get(LIMIT_S)
    other.stop().get(LIMIT_S)

    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: failures)
    began_s = time.monotonic()
    mesh.respawn(1)
    assert mesh.slice(gpus=1).echo.call_one("back").get(LIMIT_S) == "back"
    took_s = time.monotonic() - began_s

    assert procs.pids() == [pids[0], spare], "it was there before"
    print(f"respawned on another host with standby in {took_s * 1000:.0f} ms")
    (after,) = eventually(lambda: children() - {pids[0], spare}, what="another one stands by")
    procs.stop().get(LIMIT_S)
    eventually(lambda: not is_alive(after), what="what stands by ends with the mesh")
    assert runtime().attached.hosts
