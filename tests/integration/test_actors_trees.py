"""Actors that spawn actors that spawn actors, over hosts: failures climb, and nothing outlives its owner."""

from __future__ import annotations

import os
import signal

import pytest

from sky_monarch.actor import local_hosts
from tests.support.actors import Branch
from tests.support.processes import is_alive
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("actors_end")

LIMIT_S = 60
LEVELS = 4


@pytest.fixture
def tree():
    """The actor at the root of four levels on two hosts, and the pids of each level."""
    hosts = local_hosts(2)
    root = hosts.slice(hosts=LEVELS % 2).spawn_procs(name=f"level{LEVELS}").spawn("branch", Branch)
    pids = root.grow.call_one(hosts, LEVELS).get(LIMIT_S)
    assert len(set(pids)) == LEVELS
    return root, pids


@pytest.mark.slow
def test_the_end_of_a_leaf_climbs_level_by_level_to_the_program_and_is_told_once(tree, failures):
    root, pids = tree

    os.kill(pids[-1], signal.SIGKILL)

    eventually(lambda: failures)
    (failure,) = failures
    assert (failure.mesh_name, failure.pid) == ("level1", pids[-1])
    assert root.all_told.call_one().get(LIMIT_S) == [["level1"]]
    assert all(map(is_alive, pids[:-1])), "nobody else ends"


@pytest.mark.slow
@pytest.mark.parametrize("level", range(LEVELS - 1))
def test_with_an_owner_ends_all_that_it_has_spawned_and_what_that_has(tree, failures, level):
    _, pids = tree

    os.kill(pids[level], signal.SIGKILL)

    eventually(lambda: not any(map(is_alive, pids[level:])), what="all levels below it are gone")
    eventually(lambda: failures)
    assert [failure.mesh_name for failure in failures] == [f"level{LEVELS - level}"], "one event"
    assert all(map(is_alive, pids[:level]))


@pytest.mark.slow
def test_a_host_that_is_lost_ends_the_levels_on_it_and_those_below_them(tree, failures):
    from tests.support.processes import parent_of

    _, pids = tree  # levels 4 and 2 on one host, 3 and 1 on the other

    os.kill(parent_of(parent_of(pids[1])), signal.SIGKILL)

    eventually(lambda: not any(map(is_alive, pids[1:])), what="all but the first level")
    eventually(lambda: failures)
    assert failures[0].mesh_name == "level3"
    assert is_alive(pids[0])
