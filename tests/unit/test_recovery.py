"""Recovery records: what one failure cost, told from its events."""

from __future__ import annotations

import itertools
from typing import Any

from sky_monarch.controller.recovery import MAX_RECORDS, RecoveryBook

MS = 1_000_000


class History:
    """Feeds events with times in milliseconds."""

    def __init__(self, ranks: int = 1) -> None:
        self.book = RecoveryBook(ranks)

    def at(self, ms: float, event: str, *, received_ms: float | None = None, **fields: Any) -> None:
        received_ns = round((ms if received_ms is None else received_ms) * MS)
        stamp = {"mono_ns": round(ms * MS), "wall_ms": round(ms), "received_ns": received_ns}
        self.book.apply({"event": event, "replica": 1, "generation": 1, **stamp, **fields})

    def exits(self, ms: float, rank: int = 0, *, how: dict | None = None, **fields: Any) -> None:
        more = {"collateral": False, "oom": False, "pid": 1, "tail": [], **fields}
        self.at(ms, "rank_exited", rank=rank, exit=how or {"signal": 9}, **more)

    def ends(
        self, ms: float, *, rank: int = 0, how: dict | None = None, step: int | None = 30, **fields: Any
    ):
        more = {"cause": "rank_exited", "rank": rank, "exit": how or {"signal": 9}, "early": None, **fields}
        self.at(ms, "generation_ended", step=step, **more)

    def comes_back(self, ms: float, *, generation: int = 2, step: int = 33, warm: bool = True) -> None:
        self.at(ms, "restart_scheduled", generation=generation, delay_s=0, restarts_left=7)
        self.at(ms + 1, "generation_started", generation=generation)
        self.at(ms + 10, "rank_spawned", generation=generation, rank=0, pid=2, warm=warm)
        self.at(ms + 100, "first_commit", generation=generation, step=step)

    def records(self) -> list[dict[str, Any]]:
        return self.book.documents()


def test_each_phase_counts_from_the_death() -> None:
    history = History()
    history.exits(1000, received_ms=1002)
    history.at(1005, "evicted", quorum_id=4)
    history.ends(1006)
    history.comes_back(1010)
    (record,) = history.records()
    assert record["cause"] == "rank 0 was killed by SIGKILL"
    assert (record["generation"], record["next_generation"], record["step"]) == (1, 2, 30)
    times = {key: record[key] for key in ("detect_s", "evict_s", "spawn_s", "first_commit_s")}
    assert times == {"detect_s": 0.002, "evict_s": 0.005, "spawn_s": 0.02, "first_commit_s": 0.11}
    assert record["lost_steps"] == 2, "steps 31 and 32 were committed without it"
    assert record["warm"] is True


def test_a_rehearsed_death_counts_from_the_act() -> None:
    history = History()
    history.at(995, "injected", injection=1, rank=0, fault="kill")
    history.exits(1000, received_ms=1001)
    history.ends(1002)
    (record,) = history.records()
    assert record["injected"] is True
    assert record["detect_s"] == 0.006


def test_the_first_rank_that_died_is_the_cause_and_the_others_are_collateral() -> None:
    history = History(ranks=3)
    history.exits(1000, rank=2, how={"code": 1})
    history.exits(1010, rank=0, how={"signal": 15}, collateral=True)
    history.exits(1011, rank=1, how={"signal": 9}, collateral=True)
    history.ends(1012, rank=2, how={"code": 1})
    (record,) = history.records()
    assert (record["rank"], record["cause"], record["collateral"]) == (2, "rank 2 exited with code 1", [0, 1])


def test_an_out_of_memory_kill_says_so() -> None:
    history = History()
    history.exits(1000, oom=True)
    history.ends(1001)
    assert history.records()[0]["cause"] == "rank 0 was killed by SIGKILL, out of memory"


def test_exit_0_before_the_end_is_a_failure_and_exit_0_at_the_end_is_none() -> None:
    history = History()
    history.exits(1000, how={"code": 0})
    history.at(1001, "group_done", step=120)
    assert history.records() == []
    history = History()
    history.exits(1000, how={"code": 0})
    history.ends(1001, how={"code": 0}, early=[3, 120], step=3)
    assert history.records()[0]["cause"] == "rank 0 exited with code 0 before the end (3/120)"


def test_a_generation_that_was_stopped_on_request_is_no_failure() -> None:
    history = History()
    history.exits(1000, how={"signal": 15}, collateral=True)
    history.at(1001, "generation_ended", cause="stopped", reason="down", step=5)
    assert history.records() == []


def test_limits_and_failed_starts_have_their_record() -> None:
    history = History()
    history.at(1000, "generation_ended", cause="progress_limit", limit_s=60.0, step=9)
    history.comes_back(1001, generation=2, step=10, warm=False)
    history.at(2000, "generation_ended", generation=2, cause="spawn_failed", error="no such file", step=None)
    first, second = history.records()
    assert (first["cause"], first["warm"], first["lost_steps"]) == ("no commit within 60 s", False, 0)
    assert second["cause"] == "it could not be started: no such file"


def test_work_that_is_done_again_is_lost() -> None:
    history = History()
    history.exits(1000)
    history.ends(1001, step=30)
    history.comes_back(1002, step=1)
    assert history.records()[0]["lost_steps"] == 30


def test_a_group_of_several_ranks_is_back_when_all_of_them_are() -> None:
    history = History(ranks=2)
    history.exits(1000)
    history.ends(1001)
    history.at(1010, "rank_spawned", generation=2, rank=0, pid=2, warm=True)
    assert history.records()[0]["spawn_s"] is None
    history.at(1030, "rank_spawned", generation=2, rank=1, pid=3, warm=False)
    record = history.records()[0]
    assert (record["spawn_s"], record["warm"]) == (0.03, False)


def test_a_second_death_before_the_first_commit_is_a_record_of_its_own() -> None:
    history = History()
    history.exits(1000)
    history.ends(1001)
    history.at(1010, "rank_spawned", generation=2, rank=0, pid=2, warm=True)
    history.exits(1020, generation=2, how={"code": 1})
    history.ends(1021, generation=2, how={"code": 1}, step=None)
    history.at(
        1022,
        "group_given_up",
        generation=2,
        cause="rank_exited",
        rank=0,
        exit={"code": 1},
        early=None,
        restarts=1,
    )
    first, second = history.records()
    assert (first["generation"], first["first_commit_s"], first["given_up"]) == (1, None, False)
    assert (second["generation"], second["given_up"]) == (2, True)


def test_the_survivors_first_commit_without_the_dead_and_the_heal_are_phases() -> None:
    history = History()
    history.exits(1000)
    history.at(1005, "evicted", quorum_id=4)
    history.ends(1006)
    commit = {"slot": {"replica": 0, "rank": 0}, "quorum_id": 5, "mono_ns": 1050 * MS}
    assert history.book.awaits(commit)
    for useless in (
        {**commit, "quorum_id": 4},
        {**commit, "quorum_id": None},
        {**commit, "mono_ns": 999 * MS},
        {**commit, "slot": {"replica": 1, "rank": 0}},
    ):
        assert not history.book.awaits(useless), useless
    history.at(1050, "quorum_changed", replica=0, rank=0, quorum_id=5, step=31, participants=2)
    assert not history.book.awaits(commit), "one row a failure"
    history.at(1060, "rank_spawned", generation=2, rank=0, pid=2, warm=True)
    heal = {"at_ns": 1200 * MS, "took_s": 0.1, "bytes": 4096, "donor": 2, "step": 32}
    history.at(1210, "first_commit", generation=2, step=33, heal=heal)
    (record,) = history.records()
    assert (record["quorum_s"], record["heal_s"], record["heal_took_s"]) == (0.05, 0.2, 0.1)
    assert (record["heal_bytes"], record["heal_donor"]) == (4096, 2)


def test_a_quorum_is_still_noted_when_the_replacement_was_faster() -> None:
    history = History()
    history.exits(1000)
    history.at(1005, "evicted", quorum_id=4)
    history.ends(1006)
    history.comes_back(1010)
    history.at(1112, "quorum_changed", replica=2, rank=0, quorum_id=5, step=33, participants=3)
    assert history.records()[0]["quorum_s"] == 0.112


def test_the_root_cause_has_its_evidence_and_collateral_none() -> None:
    history = History(ranks=2)
    trace = ["Traceback (most recent call last):", '  File "train.py", line 7, in f', "ValueError: broken"]
    history.exits(1000, rank=1, how={"code": 1}, traceback=trace, tail=[*trace, "x" * 999])
    history.exits(1001, rank=0, how={"signal": 15}, collateral=True, tail=["KeyError: 1"])
    history.ends(1002, rank=1, how={"code": 1})
    (record,) = history.records()
    assert (record["exception"], record["where"]) == ("ValueError: broken", "train.py:7")
    assert record["collateral"] == [0]
    assert [len(line) for line in record["tail"]][-1] == 300, "a status is asked for often"


def test_a_kill_has_its_numbers_and_no_exception_that_was_handled_long_ago() -> None:
    history = History()
    memory = {"peak_bytes": 3 << 30, "limit_bytes": 4 << 30, "limit_of": "cgroup"}
    history.exits(1000, oom=True, memory=memory, tail=["ValueError: retried"])
    history.ends(1001)
    (record,) = history.records()
    assert (record["memory"], record["exception"]) == (memory, None)


def test_a_crash_in_native_code_is_placed_by_the_dump_that_python_left() -> None:
    history = History()
    dump = ["Fatal Python error: Segmentation fault", "", "Current thread 0x00007f (most recent call first):"]
    history.exits(1000, how={"signal": 11}, tail=[*dump, '  File "train.py", line 3 in f'])
    history.ends(1001, how={"signal": 11})
    assert history.records()[0]["where"] == "train.py:3 in f"


def test_a_hang_is_placed_by_its_python_stack_or_by_what_the_kernel_says() -> None:
    history = History()
    stacks = ["Thread 0x01 (most recent call first):", '  File "train.py", line 3 in f']
    threads = ["77 python S futex_wait"]
    history.at(1000, "hung", rank=1, pid=77, state="S (sleeping)", stacks=stacks, threads=threads)
    history.at(1000, "hung", rank=0, pid=76, state="S (sleeping)", stacks=[], threads=threads)
    history.at(1001, "generation_ended", cause="progress_limit", limit_s=60.0, step=9)
    history.comes_back(1002)
    more = {"generation": 2, "rank": 0, "pid": 78, "stacks": [], "threads": threads}
    history.at(2000, "hung", state="T (stopped)", **more)
    history.at(2001, "generation_ended", generation=2, cause="progress_limit", limit_s=60.0, step=9)
    first, second = history.records()
    assert (first["rank"], first["where"]) == (1, "train.py:3 in f"), "the first is the one that was late"
    assert (first["hung"]["state"], first["hung"]["native"]) == ("S (sleeping)", None)
    assert second["hung"] == {"rank": 0, "state": "T (stopped)", "native": "77 python S futex_wait"}


def test_only_the_newest_records_keep_their_last_lines() -> None:
    history = History()
    for generation in range(1, 41):
        history.exits(1000 + generation, generation=generation, tail=["last words"])
    tails = [record["tail"] for record in history.records()]
    assert tails == [[]] * 20 + [["last words"]] * 20


def test_the_number_of_records_is_bounded() -> None:
    history = History()
    for generation in itertools.islice(itertools.count(1), MAX_RECORDS + 50):
        history.exits(1000 + generation, generation=generation)
    records = history.records()
    assert len(records) == MAX_RECORDS
    assert records[-1]["generation"] == MAX_RECORDS + 50
