"""Answers of ranks on other hosts that are combined there, on their way to the caller."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sky_monarch.actor import Accumulator, ActorError, SupervisionError, local_hosts
from tests.support.folded_actors import Part
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("actors_end")

LIMIT_S = 30


def join(left, right):
    """Two pieces, and in which processes pieces were joined."""
    return left[0] + right[0], left[1] + right[1] + [os.getpid()]


@pytest.fixture
def parts():
    procs = local_hosts(2).spawn_procs({"gpus": 3}, name="trainers")
    mesh = procs.spawn("part", Part)
    mesh.initialized.get(LIMIT_S)
    return procs, mesh


def test_answers_are_combined_on_each_host_in_the_order_of_ranks_and_one_value_of_each_comes_back(parts):
    procs, mesh = parts
    pids, here = procs.pids(), os.getpid()
    for name in ("piece", "piece_later", "piece_beside"):
        whole = Accumulator(getattr(mesh, name), (":", []), join, associative=True)
        for number in range(20):
            text, joined = whole.accumulate(number)
            assert text == ":" + "".join(f"{rank}.{number} " for rank in range(6))
            assert joined.count(here) == 2, "one value of each host"
            assert sorted(pid for pid in joined if pid != here) == sorted([pids[0]] * 2 + [pids[3]] * 2)
    # A part has ranks of its own; a host with one rank has nothing to combine.
    part = mesh.slice(gpus=slice(1, 3))
    text, joined = Accumulator(part.piece, (":", []), join, associative=True).accumulate(7)
    assert (text, joined.count(here), len(joined)) == (":0.7 1.7 2.7 3.7 ", 2, 4)
    text, joined = Accumulator(mesh.slice(gpus=2).piece, (":", []), join, associative=True).accumulate(7)
    assert (text, joined) == (":0.7 1.7 ", [here, here])
    # Without a word about it nothing but the caller combines.
    text, joined = Accumulator(mesh.piece, (":", []), join).accumulate(7)
    assert joined == [here] * 6
    # What was sent before is handled before.
    mesh.mark.broadcast("!")
    assert Accumulator(mesh.piece, (":", []), join, associative=True).accumulate(8)[0].count("!") == 6
    assert set(mesh.folds.call().get(LIMIT_S).values()) == {0}
    large = Accumulator(mesh.large, 0, lambda left, right: left + right, associative=True).accumulate(100_000)
    assert (large.shape, large.sum()) == ((100_000,), 600_000.0)


def test_a_rank_that_fails_ends_a_reduction_at_once_and_nothing_of_it_is_left(parts, failures):
    procs, mesh = parts

    def broken(left, right):
        raise ValueError(f"cannot join {left[0]}and {right[0]}")

    with pytest.raises(ActorError, match=r"part\[[03]\]\.piece raised ValueError: cannot join"):
        Accumulator(mesh.piece, (":", []), broken, associative=True).accumulate(1)
    with pytest.raises(ActorError, match=r"part\[4\]\.fails raised ValueError: rank 4"):
        Accumulator(mesh.fails, (":", []), join, associative=True).accumulate(4, 0.0)
    eventually(lambda: set(mesh.folds.call().get(LIMIT_S).values()) == {0}, what="all is forgotten")
    pid = procs.pids()[5]
    # Ranks 4 and 5 stay; rank 3 waits for them.
    began_s = time.monotonic()
    mesh.kill_in.broadcast(5, 0.5)
    with pytest.raises(SupervisionError, match=rf"part\[5\] is dead: .*pid {pid}: killed by signal 9"):
        Accumulator(mesh.fails, (":", []), join, associative=True).accumulate(-1, 3.0)
    assert time.monotonic() - began_s < 3.0
    eventually(lambda: failures)
    procs.respawn(5)
    eventually(lambda: set(mesh.folds.call().get(LIMIT_S).values()) == {0}, what="late answers are no more")
    assert Accumulator(mesh.piece, (":", []), join, associative=True).accumulate(9)[0].endswith("5.9 ")
    os.kill(procs.pids()[3], signal.SIGKILL)  # the one that folds
    eventually(lambda: len(failures) == 2)
    with pytest.raises(SupervisionError, match=r"part\[3\] is dead"):
        Accumulator(mesh.piece, (":", []), join, associative=True).accumulate(9)
