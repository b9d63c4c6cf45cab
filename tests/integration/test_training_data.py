"""Training stays correct while groups die and return: data, scale, schedule, and the bits themselves."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_ranks import BATCH, SAMPLES
from tests.support.told_lighthouse import ToldLighthouse
from tests.support.waiting import eventually
from tests.support.zygote import Child, Zygote

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

LIMIT_S = 90
STEPS, KILLED_AT, BACK_AT = 20, 6, 12
Place = tuple[int, int]  # replica and generation


class Group:
    """Three replica groups, which come and go at fixed steps."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote, self.folder = zygote, folder
        folder.mkdir()
        self.lighthouse = ToldLighthouse(folder, 3)
        self.gate, self.opened_s = folder / "go", 0.0
        self.children: dict[Place, Child] = {}

    def start(self, replica: int, generation: int = 1, **options: Any) -> None:
        self.children[replica, generation] = self.zygote.fork(
            "tests.support.data_ranks:rank",
            str(self.folder / f"r{replica}.g{generation}"),
            {"steps": STEPS, **options},
            REPLICA_GROUP_ID=replica,
            NUM_REPLICA_GROUPS=3,
            TORCHFT_LIGHTHOUSE=self.lighthouse.url(replica, generation),
            SKY_MONARCH_GENERATION=generation,
        )

    def bury(self, replica: int, generation: int = 1) -> None:
        """It has killed itself; now the lighthouse hears of it, as from its agent."""
        assert self.children[replica, generation].wait(LIMIT_S) == -signal.SIGKILL, self.zygote.log()
        self.lighthouse.evict(replica, generation)

    def come_back(self, replica: int, generation: int, **options: Any) -> None:
        """Start it while 0 and 1 stand at the gate, which opens once it is sure to be in their next quorum."""
        for other in (0, 1):
            eventually(lambda other=other: self.commits(other) == BACK_AT, within_s=LIMIT_S)
        self.start(replica, generation, **options)
        eventually(lambda: self.lighthouse.asks(replica, generation), within_s=LIMIT_S)
        self.opened_s = time.monotonic()
        self.gate.touch()

    def commits(self, replica: int) -> int:
        return len(self.lines((replica, 1), "commit"))

    def ends(self, *places: Place) -> None:
        assert [self.children[place].wait(LIMIT_S) for place in places] == [0] * len(places), (
            self.zygote.log()
        )

    def lines(self, place: Place, event: str) -> list[dict[str, Any]]:
        path = self.folder / "r{}.g{}".format(*place)
        found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in found if line["event"] == event]

    def by_step(self, event: str, field: str) -> dict[int, list[Any]]:
        """What each group says of each step."""
        found: dict[int, list[Any]] = {}
        for place in self.children:
            for line in self.lines(place, event):
                found.setdefault(line["step"], []).append(line[field])
        return found


Run = Callable[[str], Group]


@pytest.fixture(scope="module")
def run(zygote: Zygote, module_path: Path) -> Iterator[Run]:
    """The runs of the schedules, by name: each is done once."""
    done: dict[str, Group] = {}

    def get(name: str) -> Group:
        if name not in done:
            done[name] = Group(zygote, module_path / name)
            SCHEDULES[name](done[name])
        return done[name]

    yield get
    zygote.end_children()
    for group in done.values():
        group.lighthouse.close()


def undisturbed(group: Group) -> None:
    for replica in range(3):
        group.start(replica)
    group.ends((0, 1), (1, 1), (2, 1))


def three_two_three(group: Group) -> None:
    for replica in (0, 1):
        group.start(replica, hold={BACK_AT: str(group.gate)}, average_first=replica == 1)
    group.start(2, die_at=KILLED_AT)
    group.bury(2)
    group.come_back(2, 2)
    group.ends((0, 1), (1, 1), (2, 2))


def heals_at_the_second_try(group: Group) -> None:
    for replica in (0, 1):
        group.start(replica, hold={BACK_AT: str(group.gate)})
    group.start(2, die_at=KILLED_AT)
    group.bury(2)
    group.come_back(2, 2, fail_heals=1)
    group.ends((0, 1), (1, 1), (2, 2))


def dies_while_another_heals(group: Group) -> None:
    group.start(0, hold={BACK_AT: str(group.gate)})
    group.start(1, hold={BACK_AT: str(group.gate)}, die_at=BACK_AT)
    group.start(2, die_at=KILLED_AT)
    group.bury(2)
    group.come_back(2, 2)
    group.bury(1)
    group.ends((0, 1), (2, 2))


SCHEDULES = {
    "undisturbed": undisturbed,
    "disturbed": three_two_three,
    "stubborn": heals_at_the_second_try,
    "unlucky": dies_while_another_heals,
}


def samples_of_steps(group: Group) -> dict[int, Counter[int]]:
    """Which samples each step used, by its averaged gradient alone; all groups have the same."""
    sizes = group.by_step("commit", "effective_batch")
    used: dict[int, Counter[int]] = {}
    for step, marks in group.by_step("update", "marks").items():
        assert all(other == marks[0] for other in marks), "every group applies the same gradient"
        (total,) = set(sizes[step])
        shares = [mark * total for mark in marks[0]]
        assert shares == pytest.approx([round(share) for share in shares], abs=1e-4), (
            f"step {step} is no mean"
        )
        used[step] = Counter({sample: round(share) for sample, share in enumerate(shares) if round(share)})
        assert used[step].total() == total
    return used


def claimed(group: Group) -> dict[int, list[tuple[int, list[int]]]]:
    """The batches of each step, as those that took part in it say."""
    found: dict[int, list[tuple[int, list[int]]]] = {}
    for place in group.children:
        for line in group.lines(place, "commit"):
            if line["took_part"]:
                found.setdefault(line["step"], []).append((line["number"], line["indices"]))
    return found


def lost_at_the_end(group: Group) -> list[tuple[int, int, int]]:
    """Step, replica and batch of what was lost; all groups list the same."""
    last = group.by_step("commit", "lost")[STEPS - 1]
    assert all(other == last[0] for other in last)
    return [tuple(one) for one in last[0]]


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("undisturbed", []),
        # Dealt to three in the step in which the third dies, to two from the next on.
        ("disturbed", [(KILLED_AT, 2)]),
        # The other one dies in the step in which the third heals. Both others had asked for that step.
        ("unlucky", [(KILLED_AT, 2), (BACK_AT, 1)]),
    ],
)
def test_no_sample_is_used_twice_in_an_epoch_and_the_lost_ones_are_listed(
    run: Run, name: str, lost: list[tuple[int, int]]
) -> None:
    group = run(name)
    used, batches = samples_of_steps(group), claimed(group)
    assert sorted(used) == list(range(STEPS))
    for step, of_step in batches.items():
        assert Counter(sample for _, indices in of_step for sample in indices) == used[step], f"step {step}"

    listed = lost_at_the_end(group)
    assert [(step, replica) for step, replica, _ in listed] == lost
    # All batches from the first to the last were dealt out, each once.
    committed = [number for of_step in batches.values() for number, _ in of_step]
    numbers = sorted([*committed, *(number for _, _, number in listed)])
    assert numbers == list(range(len(numbers)))
    # And the batches of an epoch hold each sample once.
    per_epoch = -(-SAMPLES // BATCH)
    lost_numbers = {number for _, _, number in listed}
    for epoch in range(len(numbers) // per_epoch):
        of_epoch = [
            sample
            for of_step in batches.values()
            for number, indices in of_step
            for sample in indices
            if number // per_epoch == epoch
        ]
        missing = sum(
            SAMPLES % BATCH if number % per_epoch == per_epoch - 1 else BATCH
            for number in lost_numbers
            if number // per_epoch == epoch
        )
        assert len(of_epoch) == len(set(of_epoch)) == SAMPLES - missing, f"epoch {epoch}"


def test_the_mean_is_one_over_samples_at_every_world_size(run: Run) -> None:
    """That it is a mean of whole samples is what :func:`samples_of_steps` checks in each step."""
    group = run("disturbed")
    sizes = group.by_step("commit", "participants")
    effective = group.by_step("commit", "effective_batch")
    assert samples_of_steps(group)
    for step in range(STEPS):
        # The step in which it heals is one of two, and it takes part from the next on.
        expected = 2 if KILLED_AT <= step <= BACK_AT else 3
        assert set(sizes[step]) == {expected}, f"step {step}"
        (size,) = set(effective[step])
        # A short batch ends each epoch.
        assert size in {expected * BATCH, expected * BATCH - BATCH + SAMPLES % BATCH}, f"step {step}"
    short = [step for step in range(STEPS) if effective[step][0] % BATCH]
    assert any(KILLED_AT <= step <= BACK_AT for step in short)
    assert any(not KILLED_AT <= step <= BACK_AT for step in short)


def test_every_group_has_the_learning_rate_of_an_undisturbed_run(run: Run) -> None:
    rates = run("undisturbed").by_step("update", "lr")
    assert all(len(set(of_step)) == 1 for of_step in rates.values())
    assert len({of_step[0] for of_step in rates.values()}) == STEPS, "it changes in each step"
    for name in ("disturbed", "stubborn", "unlucky"):
        for step, of_step in run(name).by_step("update", "lr").items():
            assert set(of_step) == {rates[step][0]}, f"{name}, step {step}"


def test_the_same_seed_and_the_same_failures_give_the_same_bits(run: Run) -> None:
    """However often a heal fails meanwhile: what counts is who took part in which step."""
    first, second = (run(name).by_step("commit", "digest") for name in ("disturbed", "stubborn"))
    assert sorted(first) == sorted(second) == list(range(STEPS))
    for step in range(STEPS):
        assert len({*first[step], *second[step]}) == 1, f"step {step}"
    calm = run("undisturbed").by_step("commit", "digest")
    assert calm[KILLED_AT - 1][0] == first[KILLED_AT - 1][0]
    assert calm[KILLED_AT][0] != first[KILLED_AT][0], "the digests tell runs apart"


def test_a_heal_that_fails_stalls_nobody_and_is_tried_again(run: Run) -> None:
    group = run("stubborn")
    times = [line["t"] for line in group.lines((0, 1), "commit")]
    since = [group.opened_s, *(time_s for time_s in times if time_s > group.opened_s)]
    gaps = [after - before for before, after in itertools.pairwise(since)]
    # A collective may take 60 s: whoever is not cut loose waits for it.
    assert max(gaps) < 30, "the others waited for the one that could not heal"
    assert [len(group.lines(place, "finished")) for place in ((0, 1), (1, 1), (2, 2))] == [1, 1, 1]
    assert all(len(set(of_step)) == 1 for of_step in group.by_step("commit", "digest").values())
