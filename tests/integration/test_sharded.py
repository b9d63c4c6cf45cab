"""FSDP2 inside a group of two: three groups, of which one loses a rank, and then all lose both."""

from __future__ import annotations

import json
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import reserved
from tests.support.told_lighthouse import ToldLighthouse
from tests.support.waiting import eventually
from tests.support.zygote import Child, Zygote

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

LIMIT_S = 90
STEPS, KILLED_AT, BACK_AT, SAVED_AT, ALL_KILLED_AT = 14, 4, 7, 10, 11
Place = tuple[int, int]  # replica and generation
FIRST: list[Place] = [(0, 1), (1, 1), (2, 1)]
HEALED: Place = (2, 2)
RESTORED: list[Place] = [(0, 2), (1, 2), (2, 3)]


class Run:
    """Three groups of two ranks."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote, self.folder = zygote, folder
        self.lighthouse = ToldLighthouse(folder, 3)
        self.saved = folder / "saved"
        self.children: dict[tuple[Place, int], Child] = {}
        self.at_back, self.never = folder / "back", folder / "never"
        self.went = False
        self.ports: list[socket.socket] = []

    def start(self, place: Place, *options_of_ranks: dict[str, Any]) -> None:
        replica, generation = place
        self.ports.append(reserved())
        port = self.ports[-1].getsockname()[1]
        for rank, options in enumerate(options_of_ranks):
            self.children[place, rank] = self.zygote.fork(
                "tests.support.sharded_ranks:rank",
                str(self.log(place, rank)),
                {"steps": STEPS, **options},
                RANK=rank,
                WORLD_SIZE=2,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                REPLICA_GROUP_ID=replica,
                NUM_REPLICA_GROUPS=3,
                TORCHFT_LIGHTHOUSE=self.lighthouse.url(replica, generation),
                SKY_MONARCH_GENERATION=generation,
                SKY_MONARCH_CHECKPOINT=json.dumps({"to": str(self.saved), "every_steps": 5, "keep": 2}),
            )

    def log(self, place: Place, rank: int) -> Path:
        return self.folder / "r{}.g{}.{}".format(*place, rank)

    def lines(self, place: Place, rank: int, event: str) -> list[dict[str, Any]]:
        path = self.log(place, rank)
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line for line in found if line["event"] == event]

    def all_lines(self, event: str) -> list[tuple[Place, int, dict[str, Any]]]:
        """Of the steps that the run kept: the first generations' last step was done again."""
        return [
            (place, rank, line)
            for place, rank in self.children
            for line in self.lines(place, rank, event)
            if place in RESTORED or line["step"] < SAVED_AT
        ]

    def wait_for_steps(self, places: list[Place], step: int) -> None:
        for place in places:
            for rank in (0, 1):
                eventually(
                    lambda place=place, rank=rank: (
                        (done := self.lines(place, rank, "commit")) and done[-1]["step"] == step - 1
                    ),
                    within_s=LIMIT_S,
                    what=f"step {step} of {place}",
                )

    def kill(self, place: Place) -> None:
        """End what is left of it, as its agent does, and say so."""
        for rank in (0, 1):
            self.children[place, rank].kill(signal.SIGKILL)
            self.children[place, rank].wait(LIMIT_S)
        self.lighthouse.evict(*place)

    def go(self) -> Run:
        """All of it, once."""
        if not self.children:
            self._go()
        assert self.went, "it failed at the first try"
        return self

    def _go(self) -> None:
        held = {"hold": {BACK_AT: str(self.at_back), ALL_KILLED_AT: str(self.never)}}
        self.start((0, 1), held, held)
        self.start((1, 1), *[{**held, "average_first": True}] * 2)
        self.start((2, 1), {}, {"die_at": KILLED_AT})
        assert self.children[(2, 1), 1].wait(LIMIT_S) == -signal.SIGKILL, self.zygote.log()
        self.kill((2, 1))
        self.wait_for_steps([(0, 1), (1, 1)], BACK_AT)
        # One of its two downloads fails: the group has healed when both have come.
        self.start(HEALED, {**held, "fail_heals": 1}, held)
        eventually(lambda: self.lighthouse.asks(*HEALED), within_s=LIMIT_S)
        self.at_back.touch()
        self.wait_for_steps([(0, 1), (1, 1), HEALED], ALL_KILLED_AT)
        pattern = f"step-{SAVED_AT:012}-*"
        eventually(lambda: list(self.saved.glob(pattern)), within_s=LIMIT_S, what="it is saved")
        for place in ((0, 1), (1, 1), HEALED):
            self.kill(place)
        for place in RESTORED:
            self.start(place, {}, {})
        codes = [self.children[place, rank].wait(LIMIT_S) for place in RESTORED for rank in (0, 1)]
        assert codes == [0] * 6, self.zygote.log()
        self.went = True


@pytest.fixture(scope="module")
def started(zygote: Zygote, module_path: Path) -> Iterator[Run]:
    run = Run(zygote, module_path)
    yield run
    zygote.end_children()
    run.lighthouse.close()
    for port in run.ports:
        port.close()


@pytest.fixture
def run(started: Run) -> Callable[[], Run]:
    """The one run of all tests: a defect in it is a failure of the test, not of a fixture."""
    return started.go


def shares_of(run: Run, name: str) -> dict[int, list[list[float]]]:
    """What each group applied as the gradient of that parameter, whole, by step."""
    found: dict[int, list[list[float]]] = {}
    for place, rank, line in run.all_lines("update"):
        if rank == 0:
            (other,) = (one for one in run.lines(place, 1, "update") if one["step"] == line["step"])
            whole = line[name] if name == "plain" else line[name] + other[name]
            assert name != "plain" or line[name] == other[name], "its ranks agree"
            found.setdefault(line["step"], []).append(whole)
    return found


def samples_of(run: Run) -> dict[int, Counter[int]]:
    """Which samples each step used, as those say that took part in it."""
    found: dict[int, Counter[int]] = {step: Counter() for step in range(STEPS)}
    for _, _, line in run.all_lines("commit"):
        if line["took_part"]:
            found[line["step"]].update(line["indices"])
    return found


def test_the_gradient_is_the_mean_over_the_samples_of_all_ranks_at_every_world_size(
    run: Callable[[], Run],
) -> None:
    """Of sharded and of whole parameters, and where the ranks of a group have different numbers of samples."""
    done = run()
    samples = samples_of(done)
    for name in ("marks", "plain"):
        of_steps = shares_of(done, name)
        assert sorted(of_steps) == list(range(STEPS))
        for step, of_groups in of_steps.items():
            assert all(shares == of_groups[0] for shares in of_groups), f"step {step}: they are equal"
            total = samples[step].total()
            expected = [samples[step][sample] / total for sample in range(len(of_groups[0]))]
            assert of_groups[0] == pytest.approx(expected, abs=1e-6), f"{name}, step {step}"
    for step, of_groups in shares_of(done, "ones").items():
        for whole in of_groups:
            assert whole == [pytest.approx([1.0, 1.0])], f"step {step}"
    sizes = {line["step"]: line["participants"] for _, _, line in done.all_lines("commit")}
    assert [sizes[step] for step in range(STEPS)] == [
        2 if KILLED_AT <= step <= BACK_AT else 3 for step in range(STEPS)
    ]
    assert any(count % 4 for count in (samples[step].total() for step in range(STEPS))), "some were uneven"


def test_each_rank_heals_from_its_like_and_is_equal_to_it_after_each_step(run: Callable[[], Run]) -> None:
    done = run()
    healed = [line["step"] for line in done.lines(HEALED, 0, "commit")]
    assert healed == list(range(BACK_AT, ALL_KILLED_AT))
    assert f"another rank of this group did not get the state of step {BACK_AT}" in done.zygote.log()
    digests: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for _, rank, line in done.all_lines("commit"):
        digests.setdefault((line["step"], rank), set()).add((line["digest"], line["optimizer"]))
    assert sorted(digests) == [(step, rank) for step in range(STEPS) for rank in (0, 1)]
    assert {where: len(found) for where, found in digests.items() if len(found) != 1} == {}
    assert digests[5, 0] != digests[5, 1], "ranks of a group have shards of their own"


def test_all_groups_killed_at_once_go_on_from_the_shards_that_were_saved(run: Callable[[], Run]) -> None:
    done = run()
    for place in RESTORED:
        for rank in (0, 1):
            steps = [line["step"] for line in done.lines(place, rank, "commit")]
            assert steps == list(range(SAVED_AT, STEPS))


def test_it_ends_as_one_process_does_that_was_never_disturbed(run: Callable[[], Run]) -> None:
    done = run()
    samples = samples_of(done)
    log = done.folder / "reference"
    batches = [sorted(samples[step].elements()) for step in range(STEPS)]
    child = done.zygote.fork("tests.support.sharded_ranks:reference", str(log), batches)
    assert child.wait(LIMIT_S) == 0, done.zygote.log()
    expected = json.loads(log.read_text())["state"]
    for place in RESTORED:
        (first,), (second,) = (done.lines(place, rank, "finished") for rank in (0, 1))
        for name, tensors in expected.items():
            parts = [first["state"][name], second["state"][name]]
            for number, tensor in enumerate(tensors):
                mine, other = parts[0][number], parts[1][number]
                sharded = name != "plain" and isinstance(tensor, list)
                assert flat(mine + other if sharded else mine) == pytest.approx(flat(tensor), abs=2e-5), (
                    f"{name}, state {number}"
                )


def flat(value: Any) -> list[float]:
    """All numbers of nested lists."""
    return [value] if not isinstance(value, list) else [number for one in value for number in flat(one)]
