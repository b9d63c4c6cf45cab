"""Groups that heal in stripes: real processes, real gloo, a real lighthouse."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_session import LIMIT_S, Job
from tests.support.waiting import eventually
from tests.support.zygote import Child, Zygote

# test_session.py, which is not slow, heals in the same way.
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(400)]

RANKS = "tests.support.healing_ranks"
MIB = 1 << 20


class HealingJob(Job):
    """Replica groups of one rank, some of which die."""

    def begin(self, replica: int, generation: int = 1, **options: Any) -> Child:
        return self.zygote.fork(
            f"{RANKS}:rank",
            str(self.log(replica, generation)),
            options,
            **{
                "REPLICA_GROUP_ID": replica,
                "NUM_REPLICA_GROUPS": self.replicas,
                "TORCHFT_LIGHTHOUSE": self.lighthouse,
                "SKY_MONARCH_GENERATION": generation,
                **self.env,
            },
        )

    def await_commit(self, replica: int, step: int, generation: int = 1) -> None:
        eventually(
            lambda: any(line["step"] >= step for line in self.events(replica, "commit", generation)),
            within_s=LIMIT_S,
            every_s=0.01,
            what=f"step {step} of replica {replica}, generation {generation}; {self.zygote.log()[-3000:]}",
        )

    def assert_equal(self, members: list[tuple[int, int]]) -> None:
        """Parameters and moments have the same bits on all, after every commit."""
        found: dict[int, set[tuple[str, str]]] = {}
        count = 0
        for member in members:
            for line in self.events(member[0], "commit", member[1]):
                found.setdefault(line["step"], set()).add((line["digest"], line["moments"]))
                count += 1
        assert count > 2 * len(found) > 0, "several groups were compared"
        assert {step: len(bits) for step, bits in found.items() if len(bits) != 1} == {}


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., HealingJob]]:
    yield lambda replicas, **options: HealingJob(zygote, tmp_path, replicas, **options)
    zygote.end_children()


def test_a_group_heals_from_all_others_and_ends_bit_equal(job: Callable[..., HealingJob]) -> None:
    run = job(3)
    options = {"steps": 150, "sleep_s": 0.03, "width": 1024}
    first = [run.begin(replica, **options) for replica in range(3)]
    run.await_commit(1, 5)
    first[0].kill()
    run.await_commit(1, 10)
    newcomer = run.begin(0, 2, **options)
    assert [child.wait(LIMIT_S) for child in (*first[1:], newcomer)] == [0, 0, 0], run.zygote.log()

    (stripes,) = run.events(0, "stripes", 2)
    assert sorted(stripes["donors"]) == [1, 2]
    assert [part["lost"] for part in stripes["owners"]] == [None, None]
    assert sum(part["bytes"] for part in stripes["owners"]) > 3 * 1024**2 * 4, "parameters and moments"
    assert all(part["bytes"] > 0 for part in stripes["owners"]), "each gave a part"
    run.assert_equal([(0, 1), (1, 1), (2, 1), (0, 2)])
    # The running means are those of the assigned donor, which has seen more batches than the newcomer.
    assert run.events(0, "commit", 2)[0]["seen"] > 5


def test_groups_that_are_killed_again_and_again_end_bit_equal(job: Callable[..., HealingJob]) -> None:
    run, kills = job(4), 12
    options = {"steps": 10_000, "sleep_s": 0.02, "width": 512}
    alive = {replica: (1, run.begin(replica, **options)) for replica in range(4)}
    members = [(replica, 1) for replica in range(4)]
    run.await_commit(0, 5)
    chance = random.Random(7)
    for _ in range(kills):
        victim = chance.randrange(4)
        generation, child = alive[victim]
        time.sleep(chance.random() * 0.2)
        child.kill()
        child.wait(LIMIT_S)
        alive[victim] = (generation + 1, run.begin(victim, generation + 1, **options))
        members.append((victim, generation + 1))
        eventually(
            lambda victim=victim, generation=generation: run.events(victim, "commit", generation + 1),
            within_s=LIMIT_S,
            what="the replacement commits",
        )
    for _, child in alive.values():
        child.kill()
    healed = [line for member in members for line in run.events(member[0], "stripes", member[1])]
    assert len(healed) >= kills
    assert sum(len(line["donors"]) == 3 for line in healed) >= kills // 2, "from all that were there"
    run.assert_equal(members)


def slow_heal(run: HealingJob, **more: Any) -> tuple[list[Child], Child, dict[str, Any]]:
    """Groups 0 to 2 train, group 0 died, and its newcomer has begun to heal, which takes three seconds and more."""
    options = {"steps": 100_000, "sleep_s": 0.02, "width": 1536, "wait": True, **more}
    first = [run.begin(replica, **options) for replica in range(run.replicas)]
    run.await_commit(1, 3)
    first[0].kill()
    first[0].wait(LIMIT_S)
    newcomer = run.begin(0, 2, **options)
    eventually(lambda: run.events(0, "heal", 2), within_s=LIMIT_S, every_s=0.005, what="the heal begins")
    return first, newcomer, options


def test_a_donor_that_dies_in_the_middle_costs_the_newcomer_no_second_heal(
    job: Callable[..., HealingJob],
) -> None:
    run = job(4)
    first, _, _ = slow_heal(run, bytes_per_s=3 * MIB)
    time.sleep(0.4)
    # Not the one that was assigned: by TorchFT's rule the first of those that are at the step.
    first[3].kill(signal.SIGKILL)
    (stripes,) = eventually(lambda: run.events(0, "stripes", 2), within_s=LIMIT_S)
    lost = dict(zip(stripes["donors"], (part["lost"] for part in stripes["owners"]), strict=True))
    assert lost.pop(3), "it was asked, and died"
    assert set(lost.values()) == {None}
    assert stripes["again"] > 0
    run.await_commit(0, run.events(0, "heal", 2)[0]["step"] + 3, 2)
    assert len(run.events(0, "heal", 2)) == 1, "what had come by then was enough"
    run.assert_equal([(0, 1), (1, 1), (2, 1), (3, 1), (0, 2)])


def test_a_newcomer_that_dies_in_the_middle_of_its_heal_holds_nobody_up(
    job: Callable[..., HealingJob],
) -> None:
    run = job(3)
    _, newcomer, options = slow_heal(run, bytes_per_s=4 * MIB)
    before = max(line["step"] for line in run.events(1, "commit"))
    time.sleep(0.4)
    newcomer.kill()
    assert not run.events(0, "healed", 2), "it was in the middle"
    began = time.monotonic()
    run.await_commit(1, before + 5)
    assert time.monotonic() - began < 30  # who waits for it waits for 60 s
    run.begin(0, 3, **options)
    eventually(lambda: run.events(0, "commit", 3), within_s=LIMIT_S, what="the next one heals")
    run.assert_equal([(0, 1), (1, 1), (2, 1), (0, 3)])


def test_a_group_whose_parameters_are_half_a_donors_does_not_train_on_with_them(
    job: Callable[..., HealingJob],
) -> None:
    run = job(2)
    first, newcomer, options = slow_heal(run, bytes_per_s=4 * MIB)
    time.sleep(0.4)
    first[1].kill()
    run.begin(1, 2, **options)  # it has nothing to give
    code = newcomer.wait(LIMIT_S)
    assert code not in (0, None), "it ends, to be replaced"
    assert run.events(0, "heal_failed", 2)[0]["torn"]
    assert run.events(0, "commit", 2) == []
    assert "its parameters are of no step" in run.zygote.log()
