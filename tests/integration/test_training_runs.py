"""Training under the real agent: a group that dies comes back equal, and costs the others no step."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import is_alive
from tests.support.runs import ROOT, Workbench, pid_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

# Torch is imported by several processes at once, on machines that do other things too.
START_S = 120
# So many quarters of a second outlast every wait for a replacement.
RAW_STEPS = 4 * (START_S + 60)
# One collective may take so long: whoever is not cut loose waits for it, far past every wait below.
STUCK_S = 100
TOLD = {"kind": "sky-monarch", "process_group_timeout_s": STUCK_S}
BY_SILENCE = {"kind": "torchft", "process_group_timeout_s": STUCK_S, "heartbeat_timeout_s": 2}


def test_the_guide_shows_the_example_that_these_tests_run() -> None:
    assert (ROOT / "examples/train.py").read_text() in (ROOT / "docs/guides/your-script.md").read_text()


def gate(workbench: Workbench) -> Path:
    """Training is slow until this file exists."""
    return workbench.folder / "go"


def start(
    workbench: Workbench,
    *inject: str,
    example: str = "train.py --steps 400",
    without: str = "",
    deal: bool = False,
    **fields: Any,
) -> str:
    staged = ["-m", "tests.support.staged", *(["--leave-out", without] if without else [])]
    staged += ["--deal"] if deal else []
    words = [sys.executable, *staged, str(gate(workbench)), *f"{ROOT}/examples/{example}".split()]
    recovery = {"standby": 0, **fields.pop("recovery", {})}
    job = workbench.job("train", run=shlex.join(words), recovery=recovery, **fields)
    return workbench.up(job, *(word for fault in inject for word in ("--inject", fault)))


def wait_for_steps_of_all(workbench: Workbench, name: str, step: int) -> dict[str, Any]:
    def probe() -> dict[str, Any]:
        status = workbench.status(name)
        assert all((group["step"] or 0) >= step for group in status["groups"]), status["groups"]
        return status

    return eventually(probe, within_s=START_S, every_s=0.5, comes_always=True)


def wait_for_event(
    workbench: Workbench, name: str, event: str, *, comes_always: bool = False, **fields: Any
) -> dict[str, Any]:
    def probe() -> dict[str, Any] | None:
        for line in workbench.events(name):
            if line["event"] == event and fields.items() <= line.items():
                return line
        return None

    what = f"{event} {fields}"
    return eventually(probe, within_s=START_S, every_s=0.5, what=what, comes_always=comes_always)


def digests(workbench: Workbench, name: str) -> dict[int, tuple[str, str]]:
    """What each group had at the end, as its last line says it: step and digest."""
    lines = workbench.logs(name)
    return {
        int(who): (step, it) for who, step, it in re.findall(r"replica (\d+) step (\d+) digest (\w+)", lines)
    }


def all_report(status: dict[str, Any]) -> bool:
    """Whether every group shows a loss and a learning rate."""
    return all(group["loss"] and group["metrics"].get("lr") for group in status["groups"])


def survive_a_kill(
    workbench: Workbench, *, replicas: int, standby: int, until: str = "imports", **fields: Any
) -> dict[str, Any]:
    """Kill replica 1 of a run in mid-training, let it end, and check everything that is promised."""
    name = start(
        workbench,
        replicas=replicas,
        preload=["sky_monarch.training.session"],
        recovery={"standby": standby, "standby_until": until},
        **fields,
    )
    if standby:
        wait_for_event(workbench, name, "standby_ready", replica=1, comes_always=True)
    before = wait_for_steps_of_all(workbench, name, 3)
    eventually(lambda: all_report(workbench.status(name)), within_s=20)
    os.kill(pid_of(before, 1), signal.SIGKILL)
    wait_for_event(workbench, name, "first_commit", replica=1, generation=2)
    gate(workbench).touch()
    after = workbench.wait_for_end(name, within_s=START_S)

    assert after["state"] == "SUCCEEDED", after["reason"]
    spawned = workbench.pids_spawned(name)
    assert {replica: len(pids) for replica, pids in spawned.items()} == {
        replica: 1 + (replica == 1) for replica in range(replicas)
    }, "only the victim was replaced"
    assert all(spawned[replica] == [pid_of(before, replica)] for replica in range(replicas) if replica != 1)
    found = digests(workbench, name)
    assert sorted(found) == list(range(replicas))
    assert len(set(found.values())) == 1, found
    (recovery,) = after["recoveries"]
    assert (recovery["replica"], recovery["generation"], recovery["next_generation"]) == (1, 1, 2)
    assert recovery["cause"] == "rank 0 was killed by SIGKILL"
    for field in ("detect_s", "spawn_s", "first_commit_s", "step", "lost_steps"):
        assert recovery[field] is not None, field
    assert recovery["warm"] is bool(standby)
    assert recovery["heal_donor"] in set(range(replicas)) - {1}
    assert recovery["heal_bytes"] > 1000, "the bytes of a model"
    assert 0 <= recovery["heal_took_s"] <= recovery["heal_s"] <= recovery["first_commit_s"]
    return recovery


def test_a_killed_group_comes_back_from_its_standby_and_all_end_bit_equal(workbench: Workbench) -> None:
    recovery = survive_a_kill(workbench, replicas=3, standby=1, lighthouse=TOLD, deal=True)
    assert recovery["evict_s"] is not None
    assert recovery["first_commit_s"] < STUCK_S / 2, "nobody waited for a timeout"
    assert recovery["evict_s"] <= recovery["quorum_s"] < STUCK_S / 2
    # The batch that it had was never used: the report says which, and the others name its samples.
    assert recovery["lost_samples"] == 8 * len(recovery["lost_batches"]) > 0, "its samples are listed"
    said = workbench.cli("status", "train").stdout
    assert f"{recovery['lost_samples']} samples lost, batch {recovery['lost_batches'][0]}" in said
    log = workbench.logs("train", replica=0)
    assert re.search(r"step \d+ went on without 8 samples of replicas \[1\]: \[\d+(, \d+){7}\]", log)


@pytest.mark.slow
def test_the_same_holds_where_the_standby_has_run_ahead_up_to_its_session(workbench: Workbench) -> None:
    recovery = survive_a_kill(workbench, replicas=2, standby=1, until="session", lighthouse=TOLD)
    assert recovery["first_commit_s"] < STUCK_S / 2, "nobody waited for a timeout"
    ready = wait_for_event(workbench, "train", "standby_ready", replica=1)
    spawned = wait_for_event(workbench, "train", "rank_spawned", replica=1, generation=2)
    assert spawned["pid"] == ready["pid"]
    said = [path.read_text() for path in workbench.run_folder("train").glob("logs/r1-0/standby-*.log")]
    assert not any("cannot" in text or "could not" in text for text in said), said


@pytest.mark.slow
def test_the_same_holds_under_torchfts_own_lighthouse(workbench: Workbench) -> None:
    recovery = survive_a_kill(workbench, replicas=2, standby=0, lighthouse=BY_SILENCE)
    assert recovery["evict_s"] is None, "nobody can tell it of a death"


@pytest.mark.mutant
def test_without_healing_the_groups_do_not_end_equal(workbench: Workbench) -> None:
    """The mutant of the two tests above."""
    with pytest.raises(AssertionError, match="\\{0: \\('400', "):
        survive_a_kill(workbench, replicas=2, standby=0, lighthouse=TOLD, without="heal")


def survive_a_hang(workbench: Workbench, *, within_s: float, without: str = "") -> None:
    """Let replica 1 hang and see replica 0 commit on while it still stands there, holding its sockets."""
    name = start(
        workbench,
        replicas=2,
        lighthouse=TOLD,
        without=without,
        recovery={"progress_limit_s": 5, "grace_s": STUCK_S},
    )
    before = wait_for_steps_of_all(workbench, name, 3)
    hang = Path(f"{gate(workbench)}.hang-1")
    hang.touch()
    try:
        evicted = wait_for_event(workbench, name, "evicted", replica=1)
        assert evicted["quorum_id"] is not None
        stuck_at = workbench.status(name)["groups"][0]["step"]
        eventually(
            lambda: workbench.status(name)["groups"][0]["step"] >= stuck_at + 5,
            within_s=within_s,
            every_s=0.5,
        )
        assert is_alive(pid_of(before, 1)), "it was cut off, not waited for"
        assert workbench.pids_spawned(name)[0] == [pid_of(before, 0)], "the one that waited was left alone"
    finally:
        hang.unlink()
        workbench.down(name)


@pytest.mark.slow
def test_a_survivor_is_cut_loose_from_a_peer_that_hangs(workbench: Workbench) -> None:
    survive_a_hang(workbench, within_s=30)


@pytest.mark.mutant
def test_without_the_push_it_stays_stuck(workbench: Workbench) -> None:
    """The mutant of the test above."""
    with pytest.raises(AssertionError, match="not within"):
        survive_a_hang(workbench, within_s=15, without="push")


@pytest.mark.slow
def test_rehearsed_faults_of_the_session_name_their_cause_on_the_first_screen(workbench: Workbench) -> None:
    job = workbench.job(
        "faults",
        run=f"{sys.executable} {ROOT}/examples/train.py --steps 100000 --step-s 0.02",
        replicas=2,
        min_replicas=2,
        recovery={"max_restarts": 1},
    )
    faults = ["--inject", "exit:replica=0,step=3", "--inject", "oom:replica=0,step=30"]
    done = workbench.cli("up", str(job), *faults, timeout_s=START_S)
    workbench.names.append("faults")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "rank 0 exited with code 1" in done.stdout
    assert "rehearsing a fault: exit with code 1" in done.stdout
    first_screen = done.stdout.splitlines()[-24:]
    assert "  MemoryError" in first_screen, first_screen
    assert any(re.fullmatch(rf"  at {ROOT}/\S+:\d+", line) for line in first_screen), first_screen
    causes = [record["cause"] for record in workbench.status("faults")["recoveries"]]
    assert causes == ["rank 0 exited with code 1"] * 2


@pytest.mark.slow
def test_a_plain_torchft_script_survives_a_kill(workbench: Workbench) -> None:
    script = [f"{ROOT}/examples/raw_torchft.py", "--steps", str(RAW_STEPS), "--step-s", "0.01"]
    words = [sys.executable, "-m", "tests.support.staged_torchft", str(gate(workbench)), *script]
    name = workbench.up(workbench.job("raw", run=shlex.join(words), replicas=2))
    together = re.compile(r"step (\d+) loss \S+ replicas 2$", re.MULTILINE)

    def seen(replica: int, lines: re.Pattern[str] = together) -> list[int]:
        """Steps that this replica says it took together with the other."""
        log = workbench.logs(name, replica=replica)
        return [int(step) for step in lines.findall(log)]

    eventually(lambda: seen(0) and seen(1), within_s=START_S, every_s=0.5, comes_always=True)
    before = workbench.status(name)
    os.kill(pid_of(before, 1), signal.SIGKILL)
    eventually(lambda: len(workbench.pids_spawned(name)[1]) == 2, within_s=START_S)
    # Only the replacement can say this: the dead one never came so far. It must before replica 0 ends, for
    # alone it would train from scratch, and come to the same weights.
    alone = max(seen(0, re.compile(r"step (\d+) loss")))
    eventually(lambda: any(step > alone + 10 for step in seen(1)), within_s=START_S, every_s=0.5)
    gate(workbench).touch()
    after = workbench.wait_for_end(name, within_s=START_S)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert workbench.pids_spawned(name)[0] == [pid_of(before, 0)]
    assert len(workbench.pids_spawned(name)[1]) == 2
    logs = workbench.logs(name)
    ends = dict(re.findall(r"replica (\d) finished, weights (\[.*\])", logs))
    assert sorted(ends) == ["0", "1"]
    # Replicas share their gradients: a difference at the heal would never grow smaller.
    assert len(set(ends.values())) == 1, "it healed"


@pytest.mark.slow
def test_a_torchrun_script_runs_unchanged_and_a_death_restarts_its_own_group_only(
    workbench: Workbench,
) -> None:
    job = workbench.job(
        "plain",
        run=f"{sys.executable} {ROOT}/examples/plain_script.py --rounds 100",
        replicas=2,
        ranks_per_replica=2,
    )
    name = workbench.up(job, "--inject", "kill:replica=1,rank=1,after=2")
    after = workbench.wait_for_end(name, within_s=START_S)
    assert after["state"] == "SUCCEEDED", after["reason"]
    for rank in (0, 1):
        spawned = workbench.pids_spawned(name, rank)
        assert (len(spawned[0]), len(spawned[1])) == (1, 2)
    logs = workbench.logs(name)
    assert logs.count("of 2: 100 rounds, all sums right") == 4
