"""Outer steps every few steps: what a kill between two of them costs, and that they are TorchFT's DiLoCo."""

from __future__ import annotations

import json
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.diloco_ranks import BATCH, LOCAL, LOWEST_RATE, RATE, SAMPLES
from tests.support.ports import reserved_port
from tests.support.told_lighthouse import ToldLighthouse
from tests.support.waiting import eventually
from tests.support.zygote import Child, Zygote

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

RANKS = "tests.support.diloco_ranks"
SYNC = f"diloco({LOCAL})"
LIMIT_S = 90
# The third dies in the middle of the second round, is back in the middle of the fourth, and heals at its end. At the
# end of the fifth the second dies while the others average with it.
STEPS, KILLED_AT, HELD_AT, BACK_AT, DIES_IN = 30, 7, 17, 20, 25
CAME = {
    5: [1, 1, 1],
    10: [1, 1, 0],
    15: [1, 1, 0],
    20: [1, 1, 0],
    25: [1, 0, 1],
    30: [1, 0, 1],
}
Place = tuple[int, int]  # replica and generation


def lines(path: Path, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in found if line["event"] == event]


class Disturbed:
    """The run of which most tests here ask something."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote, self.folder = zygote, folder
        self.lighthouse = ToldLighthouse(folder, 3)
        self.children: dict[Place, Child] = {}

    def play(self) -> None:
        gate = self.folder / "go"
        self.start(0, hold={HELD_AT: str(gate)})
        self.start(1, hold={HELD_AT: str(gate)}, die_in_sync=DIES_IN)
        self.start(2, die_at=KILLED_AT)
        self.bury(2)
        for other in (0, 1):
            eventually(lambda other=other: self.stands_at(other, HELD_AT), within_s=LIMIT_S)
        self.start(2, 2)
        eventually(lambda: self.lighthouse.asks(2, 2), within_s=LIMIT_S, what="the newcomer asks at once")
        gate.touch()
        self.bury(1)
        for place in ((0, 1), (2, 2)):
            assert self.children[place].wait(LIMIT_S) == 0, self.zygote.log()

    def start(self, replica: int, generation: int = 1, **options: Any) -> None:
        self.children[replica, generation] = self.zygote.fork(
            f"{RANKS}:rank",
            str(self.log((replica, generation))),
            {"steps": STEPS, **options},
            REPLICA_GROUP_ID=replica,
            NUM_REPLICA_GROUPS=3,
            TORCHFT_LIGHTHOUSE=self.lighthouse.url(replica, generation),
            SKY_MONARCH_GENERATION=generation,
            SKY_MONARCH_SYNC=SYNC,
        )

    def bury(self, replica: int, generation: int = 1) -> None:
        """It has killed itself; now the lighthouse hears of it, as from its agent."""
        assert self.children[replica, generation].wait(LIMIT_S) == -signal.SIGKILL, self.zygote.log()
        self.lighthouse.evict(replica, generation)

    def stands_at(self, replica: int, step: int) -> bool:
        path = self.log((replica, 1))
        return path.exists() and step in [line["step"] for line in lines(path, "stepped")]

    def log(self, place: Place) -> Path:
        return self.folder / "r{}.g{}".format(*place)

    def lines(self, place: Place, event: str) -> list[dict[str, Any]]:
        return lines(self.log(place), event)

    def by_step(self, event: str, field: str) -> dict[int, list[Any]]:
        """What each group says of each step."""
        found: dict[int, list[Any]] = {}
        for place in self.children:
            for line in self.lines(place, event):
                found.setdefault(line["step"], []).append(line[field])
        return found


@pytest.fixture(scope="module")
def run(zygote: Zygote, module_path: Path) -> Iterator[Disturbed]:
    run = Disturbed(zygote, module_path)
    try:
        run.play()
        yield run
    finally:
        zygote.end_children()
        run.lighthouse.close()


def samples_of_rounds(run: Disturbed) -> dict[int, set[int]]:
    """Which samples each outer step used, by its averaged way alone; all groups have the same."""
    used = {}
    for step, of_groups in run.by_step("outer", "marks").items():
        assert all(other == of_groups[0] for other in of_groups), "every group takes the same outer step"
        used[step] = {sample for sample, way in enumerate(of_groups[0]) if way > 1e-5}
    return used


def test_a_kill_between_two_outer_steps_leaves_all_groups_equal_after_the_next(run: Disturbed) -> None:
    digests = run.by_step("synced", "digest")
    assert sorted(digests) == list(CAME)
    assert {step: len(set(found)) for step, found in digests.items()} == dict.fromkeys(CAME, 1)
    assert len(set(next(zip(*digests.values(), strict=False)))) == len(CAME), "each outer step moves them"
    came = {step: found[0] for step, found in run.by_step("synced", "came").items()}
    # By replica group, of those that averaged.
    assert {step: [who.get(str(replica), 0) for replica in range(3)] for step, who in came.items()} == CAME
    ends = [run.lines(place, "finished")[0] for place in ((0, 1), (2, 2))]
    assert [end["step"] for end in ends] == [STEPS, STEPS]
    assert ends[0]["digest"] == ends[1]["digest"] == digests[STEPS][0]
    # Between two outer steps a group goes its own way, and still knows what all have in common.
    first = digests[5][0]
    assert {line["digest"] for line in run.lines((0, 1), "stepped") if 5 < line["step"] < 10} == {first}


def test_who_comes_back_heals_to_the_last_outer_step_and_computes_nothing_in_vain(run: Disturbed) -> None:
    updates = run.lines((2, 2), "update")
    assert [line["step"] for line in updates] == list(range(BACK_AT, STEPS))
    assert updates[0]["warm"], "it has the inner optimizer's state of a donor"


def test_nobody_asks_or_waits_for_another_group_between_two_outer_steps(run: Disturbed) -> None:
    for place in ((0, 1), (1, 1), (2, 2)):
        steps = [line["step"] for line in run.lines(place, "update")]
        assert steps == list(range(steps[0], steps[-1] + 1)), "every step once, whoever dies"
    asked = [line["asked"] for line in run.lines((0, 1), "synced")]
    # One to begin together, and one for each round; the death at the end of the fifth costs some more.
    assert asked[:4] == [2, 3, 4, 5]
    assert asked[5] == asked[4] + 1
    for line in run.lines((0, 1), "stepped"):
        assert line["asked"] == [1, *asked][line["step"] // LOCAL]


def test_a_death_in_the_outer_average_costs_the_others_no_step_of_the_round(run: Disturbed) -> None:
    asked = [line["asked"] for line in run.lines((0, 1), "synced")]
    assert asked[4] > asked[3] + 1, "the first attempt failed"
    own = {
        sample
        for place in ((0, 1), (2, 2))
        for line in run.lines(place, "update")
        if BACK_AT <= line["step"] < DIES_IN
        for sample in line["indices"]
    }
    assert samples_of_rounds(run)[DIES_IN] == own, "the ways that they had gone, averaged again"
    # The mean is one over those that came, and a step's way is its rate by the share of each sample.
    marks = run.by_step("outer", "marks")[DIES_IN][0]
    for line in run.lines((0, 1), "update"):
        if BACK_AT <= line["step"] < DIES_IN:
            for sample in line["indices"]:
                assert marks[sample] == pytest.approx(line["lr"] / BATCH / 2, rel=1e-3)


def test_no_sample_is_in_two_outer_steps_and_the_lost_ones_are_listed(run: Disturbed) -> None:
    used = samples_of_rounds(run)
    everything = Counter(sample for of_round in used.values() for sample in of_round)
    assert set(everything.values()) == {1}
    for step, came in CAME.items():
        assert len(used[step]) == sum(came) * LOCAL * BATCH
    assert {step: set(found) for step, found in run.by_step("synced", "samples").items()} == {
        step: {sum(came) * LOCAL * BATCH} for step, came in CAME.items()
    }
    listed = [line["lost"] for place in ((0, 1), (2, 2)) for line in run.lines(place, "synced")[-1:]]
    assert listed[0] == listed[1]
    lost = [(step, replica) for step, replica, _ in listed[0]]
    assert lost == [(step, 2) for step in range(5, 10)] + [(step, 1) for step in range(20, 25)]
    # Every batch up to the last was in an outer step, or is listed.
    numbers = {number for _, _, number in listed[0]}
    for place, since, until in (((0, 1), 0, STEPS), ((1, 1), 0, 20), ((2, 1), 0, 5), ((2, 2), 20, STEPS)):
        taken = [line["number"] for line in run.lines(place, "update") if since <= line["step"] < until]
        assert not numbers & set(taken)
        numbers |= set(taken)
    assert numbers == set(range(len(numbers)))
    assert len(numbers) * BATCH == everything.total() + len(listed[0]) * BATCH <= SAMPLES


def test_every_group_has_the_rate_of_an_undisturbed_run_in_every_step(run: Disturbed) -> None:
    for step, rates in run.by_step("update", "lr").items():
        expected = LOWEST_RATE + (RATE - LOWEST_RATE) * (1 + math.cos(math.pi * step / STEPS)) / 2
        assert len(set(rates)) == 1
        assert rates[0] == pytest.approx(expected), f"step {step}"


def alone(zygote: Zygote, log: Path, options: dict[str, Any], **env: object) -> list[dict[str, Any]]:
    child = zygote.fork(f"{RANKS}:rank", str(log), {"momentum": 0.0, **options}, SKY_MONARCH_SYNC=SYNC, **env)
    assert child.wait(LIMIT_S) == 0, zygote.log()
    return lines(log, "finished")


def test_a_round_that_is_done_again_and_one_that_follows_a_checkpoint_are_as_if_nothing_had_been(
    zygote: Zygote, tmp_path: Path
) -> None:
    (calm,) = alone(zygote, tmp_path / "calm", {"steps": 15})
    checkpoint = json.dumps({"to": str(tmp_path / "checkpoints"), "every_steps": 7, "keep": 1})
    failing = {"steps": 10, "total": 15, "fail_sync": 1, "retries": 0}
    alone(zygote, tmp_path / "first", failing, SKY_MONARCH_CHECKPOINT=checkpoint)
    # The first round failed at its end, and was done again: the same steps, samples and rates.
    updates = [(line["step"], line["indices"], line["lr"]) for line in lines(tmp_path / "first", "update")]
    assert updates[:LOCAL] == updates[LOCAL : 2 * LOCAL]
    assert [line["kept"] for line in lines(tmp_path / "first", "synced")] == [False, True, True]
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name[:17] == "step-000000000010", "the first outer step since the seventh step"

    (end,) = alone(zygote, tmp_path / "second", {"steps": 15}, SKY_MONARCH_CHECKPOINT=checkpoint)
    assert [line["step"] for line in lines(tmp_path / "second", "update")] == list(range(10, 15))
    assert end["digest"] == calm["digest"], "parameters, both optimizers, schedule and data went on"


def test_steps_that_are_no_whole_number_of_rounds_end_with_a_shorter_one(
    zygote: Zygote, tmp_path: Path
) -> None:
    lighthouse = ToldLighthouse(tmp_path, 2)
    logs = [tmp_path / f"group{replica}" for replica in range(2)]
    steps = 2 * LOCAL + 2
    checkpoint = json.dumps({"to": str(tmp_path / "checkpoints"), "every_steps": steps, "keep": 1})
    try:
        groups = [
            zygote.fork(
                f"{RANKS}:rank",
                str(log),
                {"steps": steps},
                REPLICA_GROUP_ID=replica,
                NUM_REPLICA_GROUPS=2,
                TORCHFT_LIGHTHOUSE=lighthouse.url(replica, 1),
                SKY_MONARCH_GENERATION=1,
                SKY_MONARCH_SYNC=SYNC,
                SKY_MONARCH_CHECKPOINT=checkpoint,
            )
            for replica, log in enumerate(logs)
        ]
        assert [group.wait(LIMIT_S) for group in groups] == [0, 0], zygote.log()
    finally:
        zygote.end_children()
        lighthouse.close()
    ends = [lines(log, "finished")[0] for log in logs]
    assert [end["step"] for end in ends] == [steps, steps]
    assert ends[0]["digest"] == ends[1]["digest"]
    for log in logs:
        assert [line["step"] for line in lines(log, "update")] == list(range(steps)), "each step once"
        outer = lines(log, "outer")
        assert [line["step"] for line in outer] == [LOCAL, 2 * LOCAL, steps]
        used = [{sample for sample, way in enumerate(line["marks"]) if way > 1e-5} for line in outer]
        assert [len(samples) for samples in used] == [2 * BATCH * n for n in (LOCAL, LOCAL, 2)]
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name[:17] == f"step-{steps:012}"
    # Whoever goes on from it, with the same target, has nothing left to do; with every_step it may go on.
    (end,) = alone(zygote, tmp_path / "again", {"steps": steps}, SKY_MONARCH_CHECKPOINT=checkpoint)
    assert (end["step"], end["digest"]) == (steps, ends[0]["digest"])


def test_the_ranks_of_a_group_average_in_every_step_and_the_groups_at_the_end(
    zygote: Zygote, tmp_path: Path
) -> None:
    logs = [tmp_path / f"rank{number}" for number in range(2)]
    with reserved_port() as port:
        group = {
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "SKY_MONARCH_SYNC": "diloco(2)",
        }
        ranks = [
            zygote.fork(
                "tests.support.torch_ranks:rank", str(log), {"steps": 4, "uneven": True}, RANK=number, **group
            )
            for number, log in enumerate(logs)
        ]
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0], zygote.log()
    for log in logs:
        # One sample with a gradient of one, and two with a gradient of two.
        assert [line["ones"] for line in lines(log, "update")] == [pytest.approx([5 / 3] * 3)] * 4
    ends = [[line["digest"] for line in lines(log, "commit")] for log in logs]
    assert ends[0] == ends[1]
    assert len(set(ends[0])) == 3, "of the beginning, and of each of two rounds"


@pytest.fixture
def pair(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[[str], list[list[dict[str, Any]]]]]:
    """Two groups that train undisturbed: what both say."""

    def train(function: str) -> list[list[dict[str, Any]]]:
        address = tmp_path / f"{function}.lighthouse"
        zygote.fork("tests.support.torch_ranks:lighthouse", str(address), 2, 20_000, 5_000)
        lighthouse = eventually(lambda: address.exists() and address.read_text(), within_s=LIMIT_S)
        logs = [tmp_path / f"{function}.{replica}" for replica in range(2)]
        groups = [
            zygote.fork(
                f"{RANKS}:{function}",
                str(log),
                4 * LOCAL,
                REPLICA_GROUP_ID=replica,
                NUM_REPLICA_GROUPS=2,
                TORCHFT_LIGHTHOUSE=lighthouse,
                SKY_MONARCH_SYNC=SYNC,
            )
            for replica, log in enumerate(logs)
        ]
        assert [group.wait(LIMIT_S) for group in groups] == [0, 0], zygote.log()
        return [
            [line["digest"] for event in ("outer", "synced") for line in lines(log, event)] for log in logs
        ]

    yield train
    zygote.end_children()


def test_undisturbed_it_is_torchfts_diloco_bit_for_bit(pair: Callable[[str], list[list[str]]]) -> None:
    ours, torchfts = pair("ours"), pair("torchfts")
    assert ours[0] == ours[1]
    assert len(set(ours[0])) == 8, "four averaged ways, and four outer steps"
    assert ours == torchfts
