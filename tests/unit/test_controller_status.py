"""The status document: what people see of a run."""

from __future__ import annotations

from typing import Any

from sky_monarch.controller import model
from sky_monarch.controller.status import StatusBook

LIMITS = model.Limits(
    replicas=1, min_replicas=1, ranks_per_replica=1, max_restarts=2, window_s=600.0, grace_s=5.0
)
SECOND = 1_000_000_000


class Book:
    """Feeds rows and reads the one group of the document."""

    def __init__(self) -> None:
        self.book = StatusBook(1, 1, has_setup=False)
        self.state = model.initial_state({"local": (0,)}, setup=False)

    def row(self, event: str, generation: int = 1, **fields: Any) -> None:
        stamp = {"mono_ns": 1, "wall_ms": 1, "replica": 0, "generation": generation}
        self.book.apply({"event": event, **stamp, **fields})

    def starts(self, generation: int) -> None:
        self.row("generation_started", generation)
        self.row("rank_spawned", generation, rank=0, pid=100 + generation, warm=False)

    def exits(self, generation: int, *, collateral: bool = False, **how: int) -> None:
        more = {"collateral": collateral, "oom": False, "pid": 1, "tail": []}
        self.row("rank_exited", generation, rank=0, exit=how, **more)

    def group(self) -> dict[str, Any]:
        return self.book.document(self.state, LIMITS, {})["groups"][0]

    def rank(self) -> dict[str, Any]:
        return self.group()["ranks"][0]


def test_a_live_rank_has_a_pid_and_a_dead_one_its_exit() -> None:
    book = Book()
    book.starts(1)
    assert book.rank() == {"rank": 0, "pid": 101, "state": "running", "exit": None}
    book.exits(1, code=7)
    assert (book.rank()["pid"], book.rank()["state"], book.rank()["exit"]["code"]) == (None, "exited", 7)


def test_a_stop_in_mid_start_does_not_hide_the_failure_before_it() -> None:
    book = Book()
    book.starts(1)
    book.exits(1, code=7)
    book.starts(2)
    book.exits(2, collateral=True, signal=15)
    assert book.rank()["exit"]["code"] == 7


def test_a_failure_that_was_recovered_from_is_not_shown_as_the_end() -> None:
    book = Book()
    book.starts(1)
    book.exits(1, code=7)
    book.starts(2)
    book.row("first_commit", 2, step=5)
    book.exits(2, collateral=True, signal=15)
    assert book.rank()["exit"]["signal"] == 15


def test_what_an_older_generation_says_late_changes_nothing() -> None:
    book = Book()
    book.starts(1)
    book.starts(2)
    book.exits(1, code=7)
    report = {"slot": {"replica": 0, "rank": 0}, "generation": 1, "mono_ns": 1, "step": 99}
    book.book.progress(report)
    assert book.rank()["state"] == "running"
    assert book.group()["step"] is None
    assert book.group()["restarts"] == 1


def test_the_rate_is_that_of_the_last_seconds_of_this_generation() -> None:
    import time

    book = Book()
    book.starts(1)
    now_ns = time.monotonic_ns()
    for number in range(5):
        report = {
            "slot": {"replica": 0, "rank": 0},
            "generation": 1,
            "mono_ns": now_ns - (5 - number) * SECOND // 2,
            "step": 10 + number,
            "metrics": {"loss": 2.0},
        }
        book.book.progress(report)
    assert book.group()["rate"] == 2.0
    assert book.group()["loss"] == 2.0
    book.starts(2)
    assert book.group()["rate"] is None
    assert book.group()["step"] == 14, "the step itself is not forgotten"


def test_an_adopted_group_shows_the_pids_of_its_agent() -> None:
    book = Book()
    book.starts(1)
    snapshot = {"replica": 0, "generation": 3, "state": "running", "restarts": 1, "pids": {"0": 777}}
    book.row("agent_connected", groups=[snapshot])
    assert book.rank()["pid"] == 777
    book.row("agent_connected", groups=[{**snapshot, "pids": {}}])
    assert book.rank()["pid"] is None


def slower(*busy_s: float, samples: int = 9) -> list[float | None]:
    """What is said of groups whose own work on a step takes so long."""
    book = StatusBook(len(busy_s), 1, has_setup=False)
    for step in range(samples):
        for replica, value in enumerate(busy_s):
            slot = {"replica": replica, "rank": 0}
            report = {"slot": slot, "generation": 1, "step": step, "mono_ns": step * SECOND}
            book.progress({**report, "metrics": {"busy_s": value * (20 if step == 4 else 1)}})
    state = model.initial_state({"local": tuple(range(len(busy_s)))}, setup=False)
    groups = book.document(state, LIMITS, {})["groups"]
    return [group["slower"] for group in groups]


def test_a_straggler_is_told_by_how_much_longer_it_works_than_the_others() -> None:
    assert slower(0.1, 0.1, 0.5) == [None, None, 5.0], "one long step, such as an evaluation, changes nothing"
    assert slower(0.1, 0.11, 0.15) == [None, None, None]
    assert slower(0.1, 0.3) == [None, 3.0]
    assert slower(0.1) == [None]
    assert slower(0.0, 0.0, 0.1) == [None, None, None]
    assert slower(0.1, 0.1, 0.5, samples=4) == [None, None, None], "too early to say"
