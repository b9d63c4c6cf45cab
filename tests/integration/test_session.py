"""The training session with real processes, real gloo and a real lighthouse."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import reserved_port
from tests.support.waiting import eventually
from tests.support.zygote import Child, Zygote

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

RANKS = "tests.support.torch_ranks"
# TorchFT's lighthouse hears of a death by silence only.
HEARTBEAT_MS = 5000
LIMIT_S = 90


class Job:
    """Replica groups of one rank under one lighthouse."""

    def __init__(
        self, zygote: Zygote, folder: Path, replicas: int, *, min_replicas: int = 1, **env: object
    ) -> None:
        self.zygote, self.folder, self.replicas, self.env = zygote, folder, replicas, env
        address = folder / "lighthouse"
        zygote.fork(f"{RANKS}:lighthouse", str(address), max(2, min_replicas), 20_000, HEARTBEAT_MS)
        self.lighthouse = eventually(lambda: address.exists() and address.read_text(), within_s=LIMIT_S)

    def start(self, replica: int, generation: int = 1, **options: Any) -> Child:
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

    def start_together(self, replicas: int, each: dict[int, dict[str, Any]], **options: Any) -> list[Child]:
        """None takes a step before all have said that they are there: else two of them begin without the third."""
        gate = self.folder / "start"
        children = [
            self.start(one, start=str(gate), **options, **each.get(one, {})) for one in range(replicas)
        ]
        for one in range(replicas):
            eventually(lambda one=one: self.events(one, "entered"), within_s=LIMIT_S)
        gate.touch()
        return children

    def log(self, replica: int, generation: int = 1) -> Path:
        return self.folder / f"r{replica}.g{generation}.jsonl"

    def events(self, replica: int, event: str, generation: int = 1) -> list[dict[str, Any]]:
        path = self.log(replica, generation)
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    yield lambda replicas, **options: Job(zygote, tmp_path, replicas, **options)
    zygote.end_children()


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


def assert_bit_equal(job: Job, members: list[tuple[int, int]]) -> None:
    digests: dict[int, set[str]] = {}
    for replica, generation in members:
        for line in job.events(replica, "commit", generation) + job.events(replica, "finished", generation):
            digests.setdefault(line["step"], set()).add(line["digest"])
    assert digests, "nothing was compared"
    assert {step: len(found) for step, found in digests.items() if len(found) != 1} == {}


def assert_every_step_once(job: Job, replica: int, last: int) -> None:
    """In order, up to the last; the first quorum may have formed a moment before this replica asked."""
    steps = [line["step"] for line in job.events(replica, "commit")]
    assert steps == list(range(steps[0], last + 1))
    assert steps[0] < 5


@pytest.mark.slow
def test_a_replica_that_dies_in_mid_allreduce_costs_the_others_no_step_and_comes_back_equal(
    job: Callable[..., Job],
) -> None:
    run = job(3)
    steps, gate = 60, run.folder / "go"
    pace = {"steps": steps, "sleep_s": 0.02, "ease": (20, str(gate))}
    victim, *survivors = run.start_together(3, {0: {"die_at": 8}}, **pace)
    assert victim.wait(LIMIT_S) == -signal.SIGKILL
    eventually(
        lambda: len(run.events(1, "commit")) >= 15, within_s=LIMIT_S, what="the survivors go on with two"
    )
    newcomer = run.start(0, 2, **pace)
    eventually(lambda: run.events(0, "commit", 2), within_s=LIMIT_S, what="it has come back")
    gate.touch()
    assert [child.wait(LIMIT_S) for child in (*survivors, newcomer)] == [0, 0, 0], run.zygote.log()

    # Every step was committed once by each survivor, in order: the interrupted one was averaged again.
    for replica in (1, 2):
        assert_every_step_once(run, replica, steps)
    # The scale is right with three, two and three: a gradient of ones averages to one.
    sizes = [line["participants"] for line in run.events(1, "commit")]
    changes = [size for before, size in zip([0, *sizes], sizes, strict=False) if size != before]
    assert changes[-3:] == [3, 2, 3]
    for replica, generation in ((0, 1), (1, 1), (2, 1), (0, 2)):
        for line in run.events(replica, "update", generation):
            assert line["ones"] == [1.0, 1.0, 1.0]
            assert line["unused"] == [0.0, 0.0]
            assert line["lr"] == 1e-2 / (1 + line["step"]), "also in the step in which it heals"
    # The newcomer healed: it never committed step 1.
    first = run.events(0, "commit", 2)[0]["step"]
    assert 8 < first <= steps
    assert_bit_equal(run, [(0, 1), (1, 1), (2, 1), (0, 2)])
    finished = [run.events(*place)[0] for place in ((0, "finished", 2), (1, "finished"), (2, "finished"))]
    assert [line["extra"] for line in finished] == [steps] * 3, "registered state heals too"
    assert sum(line["leader"] for line in finished) == 1
    # Not the collective's timeout (60 s): the death was noticed, and the lighthouse waited for its heartbeat.
    times = [line["t"] for line in run.events(1, "commit")]
    assert max(after - before for before, after in itertools.pairwise(times)) < 30


def test_a_group_that_is_late_heals_from_donors_that_are_done(job: Callable[..., Job]) -> None:
    run = job(3)
    early = [run.start(replica, steps=6, linger_s=2 * LIMIT_S) for replica in (1, 2)]
    eventually(lambda: run.events(1, "finished") and run.events(2, "finished"), within_s=LIMIT_S)
    late = run.start(0, steps=6, linger_s=0.1)
    eventually(lambda: run.events(0, "finished"), within_s=LIMIT_S, what="the late one still runs after all")
    for child in early:
        child.kill(signal.SIGTERM)
    assert [child.wait(LIMIT_S) for child in (*early, late)] == [0, 0, 0], run.zygote.log()
    assert run.events(0, "commit") == []
    assert run.events(0, "finished")[0]["digest"] == run.events(1, "finished")[0]["digest"]


def test_replicas_that_start_from_different_parameters_are_refused(job: Callable[..., Job]) -> None:
    run = job(2)
    children = [run.start(replica, steps=3, seed=replica) for replica in (0, 1)]
    assert [child.wait(LIMIT_S) for child in children] == [1, 1]
    assert "start from different parameters" in run.zygote.log()
    assert run.events(0, "commit") == []


def test_a_drained_replica_finishes_its_step_and_exits_0_while_the_others_go_on(
    job: Callable[..., Job],
) -> None:
    run = job(3)
    gate = run.folder / "go"
    pace = {"steps": 60, "sleep_s": 0.02, "ease": (10, str(gate))}
    children = run.start_together(3, {1: {"average_first": True}}, **pace)
    eventually(lambda: len(run.events(0, "commit")) >= 5, within_s=LIMIT_S)
    children[0].kill(signal.SIGTERM)
    assert children[0].wait(15) == 0, run.zygote.log()
    gate.touch()
    assert [child.wait(LIMIT_S) for child in children[1:]] == [0, 0], run.zygote.log()
    assert run.events(0, "finished") == []
    for replica in (1, 2):
        assert_every_step_once(run, replica, 60)
    assert all(line["ones"] == [1.0, 1.0, 1.0] for line in run.events(1, "averaged"))
    assert_bit_equal(run, [(0, 1), (1, 1), (2, 1)])


def test_a_replica_that_waits_for_its_quorum_leaves_at_once_when_drained(job: Callable[..., Job]) -> None:
    run = job(2)
    lonely = run.start(0, steps=5)
    eventually(lambda: run.events(0, "entered"), within_s=LIMIT_S)
    # It sits in the quorum call now, for which its peer is missing.
    eventually(lambda: "futex" in Path(f"/proc/{lonely.pid}/wchan").read_text(), within_s=LIMIT_S)
    lonely.kill(signal.SIGTERM)
    assert lonely.wait(30) == 0, run.zygote.log()  # a quorum is waited for for 120 s


def test_all_groups_go_on_from_the_newest_checkpoint(
    zygote: Zygote, job: Callable[..., Job], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint = json.dumps({"to": str(folder), "every_steps": 4, "keep": 1})
    first = job(2, SKY_MONARCH_CHECKPOINT=checkpoint)
    assert [child.wait(LIMIT_S) for child in [first.start(r, steps=9, sleep_s=0.05) for r in (0, 1)]] == [
        0,
        0,
    ]
    assert [entry.name[:17] for entry in folder.iterdir()] == ["step-000000000008"], "one group writes"

    (tmp_path / "second").mkdir()
    second = Job(zygote, tmp_path / "second", 2, SKY_MONARCH_CHECKPOINT=checkpoint)
    assert [child.wait(LIMIT_S) for child in [second.start(r, steps=11) for r in (0, 1)]] == [0, 0], (
        zygote.log()
    )
    for replica in (0, 1):
        assert [line["step"] for line in second.events(replica, "commit")] == [9, 10, 11]
    assert_bit_equal(second, [(0, 1), (1, 1)])


def test_what_was_computed_before_the_checkpoint_was_read_is_not_used(zygote: Zygote, tmp_path: Path) -> None:
    checkpoint = json.dumps({"to": str(tmp_path / "checkpoints"), "every_steps": 8, "keep": 1})
    ninth = []
    for log in (tmp_path / "first", tmp_path / "second"):
        alone = zygote.fork(f"{RANKS}:rank", str(log), {"steps": 9}, SKY_MONARCH_CHECKPOINT=checkpoint)
        assert alone.wait(LIMIT_S) == 0, zygote.log()
        commits = [
            line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "commit"
        ]
        ninth.append(commits[-1])
    assert len(commits) == 1, "the second goes on from step 8"
    assert ninth[0]["digest"] == ninth[1]["digest"], "as if there had been no interruption"


@pytest.mark.parametrize("average_first", [False, True])
def test_the_ranks_of_a_group_weigh_as_much_as_their_samples(
    zygote: Zygote, tmp_path: Path, port: int, average_first: bool
) -> None:
    logs = [tmp_path / f"rank{number}" for number in range(2)]
    options = {"steps": 3, "uneven": True, "average_first": average_first}
    ranks = [
        zygote.fork(
            f"{RANKS}:rank",
            str(log),
            options,
            RANK=number,
            WORLD_SIZE=2,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for number, log in enumerate(logs)
    ]
    assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0], zygote.log()
    for log in logs:
        updates = [
            line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "update"
        ]
        assert len(updates) == 3
        for line in updates:
            # One sample with a gradient of one, and two with a gradient of two.
            assert line["ones"] == pytest.approx([5 / 3] * 3)


def test_a_death_a_hang_and_a_missing_member_cost_the_mesh_moments(zygote: Zygote, tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.jsonl" for number in range(4)]
    members = [
        zygote.fork(f"{RANKS}:mesh_member", str(log), str(tmp_path), number, True)
        for number, log in enumerate(logs)
    ]
    try:
        assert members[3].wait(LIMIT_S) == -signal.SIGKILL
        assert [member.wait(LIMIT_S) for member in members[:2]] == [0, 0], zygote.log()
    finally:
        zygote.end_children()
    for log in logs[:2]:
        lines = {
            line.get("phase", line["event"]): line for line in map(json.loads, log.read_text().splitlines())
        }
        assert lines["whole"]["result"] == "ok"
        for phase in ("killed", "hung", "rendezvous"):
            assert lines[phase]["result"] != "ok"
            assert lines[phase]["took_s"] < 15, (phase, lines[phase], "half of what it may take")
        assert "a member died in it" in lines["rendezvous"]["result"]
        assert lines["after"]["result"] == "ok", "late news of an older quorum does not touch a newer one"


@pytest.mark.mutant
def test_without_the_cut_a_death_stalls_who_is_not_its_neighbour(zygote: Zygote, tmp_path: Path) -> None:
    """The mutant of the test above: it would be red."""
    logs = [tmp_path / f"{number}.jsonl" for number in range(4)]
    members = [
        zygote.fork(f"{RANKS}:mesh_member", str(log), str(tmp_path), number, False)
        for number, log in enumerate(logs)
    ]
    for member in members[:3]:
        member.wait(LIMIT_S)
    took = [
        line["took_s"]
        for log in logs[:3]
        for line in map(json.loads, log.read_text().splitlines())
        if line.get("phase") == "killed"
    ]
    assert max(took) > 9, "someone waited for the whole timeout of 10 s"
    assert min(took) < 5
