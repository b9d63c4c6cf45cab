"""Groups that heal while the others train on: real processes, real gloo, a real lighthouse.

Donors are slow here, and what is read between two looks at whether the others wait is little, so that a state of 13 MiB
takes as many steps as one of many GiB.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_healing import MIB, HealingJob
from tests.integration.test_session import LIMIT_S
from tests.support.waiting import eventually
from tests.support.zygote import Zygote

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(400)]

SLOW = {
    "steps": 100_000,
    "sleep_s": 0.05,
    "width": 256,
    "layers": 16,
    "bytes_per_s": 5 * MIB,
    "batch_bytes": 256 * 1024,
}
"""A heal of some three seconds, in which nobody would commit anything if he waited for it."""


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., HealingJob]]:
    yield lambda replicas, **options: HealingJob(zygote, tmp_path, replicas, **options)
    zygote.end_children()


def healed(run: HealingJob, **more: Any) -> dict[str, Any]:
    """Three groups train, one dies and heals; returns what its newcomer says of that."""
    options = {**SLOW, **more}
    first = [run.begin(replica, **options) for replica in range(3)]
    run.await_commit(1, 3)
    first[0].kill()
    first[0].wait(LIMIT_S)
    # TorchFT's lighthouse hears of the death by silence: that is waited for by all, and is over.
    # One of them may have committed the step in which it happened alone: the other heals from it first.
    reached = max(line["step"] for line in run.events(1, "commit"))
    for survivor in (1, 2):
        run.await_commit(survivor, reached + 2)
    run.begin(0, 2, **options)
    eventually(
        lambda: len(run.events(0, "commit", 2)) >= 3,
        within_s=LIMIT_S,
        what=f"the newcomer commits; {run.zygote.log()[-3000:]}",
    )
    stripes: dict[str, Any] = run.events(0, "stripes", 2)[0]
    return stripes


def heal_of(run: HealingJob) -> tuple[float, dict[int, float]]:
    """How long the newcomer's heal took, and each survivor's longest time between two commits in it."""
    begins, ends = run.events(0, "heal", 2)[0], run.events(0, "healed", 2)[0]
    gaps_s = {}
    for survivor in (1, 2):
        commits = [
            line["t"]
            for line in run.events(survivor, "commit")
            if begins["step"] <= line["step"] <= ends["step"] + 1
        ]
        gaps_s[survivor] = max(after - before for before, after in itertools.pairwise(commits))
    return ends["t"] - begins["t"], gaps_s


def assert_equal(run: HealingJob, members: list[tuple[int, int]]) -> None:
    """After every commit all have the same bits. While others heal, one may commit a step alone."""
    found: dict[int, dict[tuple[int, int], tuple[str, str]]] = {}
    for member in members:
        for line in run.events(member[0], "commit", member[1]):
            found.setdefault(line["step"], {})[member] = (line["digest"], line["moments"])
    assert {step: bits for step, bits in found.items() if len(set(bits.values())) != 1} == {}
    assert sum(len(bits) > 1 for bits in found.values()) > 5, "some were compared"


def test_nobody_waits_for_a_group_that_heals_and_all_end_bit_equal(job: Callable[..., HealingJob]) -> None:
    run = job(3)
    stripes = healed(run)
    follows = run.events(0, "follows", 2)
    assert len(follows) > 5, "its state came over many steps"
    assert [line["step"] for line in follows] == list(range(follows[0]["step"], follows[-1]["step"] + 1))
    assert run.events(0, "commit", 2)[0]["step"] == follows[-1]["step"] + 2, "it missed none"
    for survivor in (1, 2):
        committed = {line["step"] for line in run.events(survivor, "commit")}
        assert committed >= {line["step"] for line in follows}, "the others went on"
    took_s, gaps_s = heal_of(run)
    assert took_s > 2.5
    assert max(gaps_s.values()) < took_s / 3
    # It has done what the others did: at the end there was nothing left to be read again.
    assert stripes["kept"] > 0.9 * stripes["bytes"] > 10 * MIB
    assert_equal(run, [(0, 1), (1, 1), (2, 1), (0, 2)])


def test_every_member_gives_in_each_step_of_a_heal(job: Callable[..., HealingJob]) -> None:
    run = job(3)
    # Two pieces at a time, one for each.
    healed(run, batch_bytes=2 * MIB)
    follows = run.events(0, "follows", 2)
    assert len(follows) > 2, "its state came over several steps"
    for donor in ("1", "2"):
        gave = [line["gave"].get(donor, 0) for line in follows]
        assert gave[-1] - gave[0] > MIB, f"also after the step in which they met: {gave}"
    assert_equal(run, [(0, 1), (1, 1), (2, 1), (0, 2)])


def test_what_it_could_not_know_of_is_read_again_at_the_end(job: Callable[..., HealingJob]) -> None:
    run = job(3)
    stripes = healed(run, move=True)
    assert len(run.events(0, "follows", 2)) > 5
    assert 0 < stripes["kept"] < stripes["bytes"], "the script's own change was not taken part in"
    assert_equal(run, [(0, 1), (1, 1), (2, 1), (0, 2)])


def test_groups_that_are_killed_while_one_heals_end_bit_equal(job: Callable[..., HealingJob]) -> None:
    run, kills = job(4), 10
    options = {**SLOW, "sleep_s": 0.02, "bytes_per_s": 10 * MIB}
    alive = {replica: (1, run.begin(replica, **options)) for replica in range(4)}
    members = [(replica, 1) for replica in range(4)]
    run.await_commit(0, 5)
    chance = random.Random(11)
    for _ in range(kills):
        # Two have the state, so that it is not lost. The others may be anywhere on their way.
        eventually(
            lambda: sum(bool(run.events(one, "commit", alive[one][0])) for one in alive) >= 2,
            within_s=LIMIT_S,
            what=f"two have the state; {run.zygote.log()[-3000:]}",
        )
        time.sleep(chance.random() * 1.5)
        # Whoever it is: one that trains, one that gives its state, or one that is just getting it.
        victim = chance.randrange(4)
        generation, child = alive[victim]
        child.kill()
        child.wait(LIMIT_S)
        alive[victim] = (generation + 1, run.begin(victim, generation + 1, **options))
        members.append((victim, generation + 1))
    last = [(replica, generation) for replica, (generation, _) in alive.items()]
    eventually(
        lambda: set.intersection(
            *(
                {line["step"] for line in run.events(replica, "commit", generation)}
                for replica, generation in last
            )
        ),
        within_s=LIMIT_S,
        what=f"all commit one step; {run.zygote.log()[-3000:]}",
    )
    for _, child in alive.values():
        child.kill()
    follows = [line for member in members for line in run.events(member[0], "follows", member[1])]
    assert len(follows) > kills, "states came over several steps"
    assert_equal(run, members)
