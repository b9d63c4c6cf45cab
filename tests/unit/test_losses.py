"""What sessions say of lost samples becomes one event for each group and step, and part of the failure's record."""

from __future__ import annotations

from typing import Any

from sky_monarch.controller.losses import LostSamples
from sky_monarch.controller.recovery import RecoveryBook


def progress(**metrics: float) -> dict[str, Any]:
    return {
        "slot": {"replica": 0, "rank": 0},
        "generation": 1,
        "step": 9,
        "metrics": {"loss": 1.0, **metrics},
    }


def lost(replica: int, step: int, *batches: int, samples: int = 4) -> dict[str, float]:
    return {f"lost_batch_{batch}_step_{step}_replica_{replica}": float(samples) for batch in batches}


def test_each_loss_is_told_once_whoever_says_it() -> None:
    book = LostSamples(3)
    said = {**lost(1, 7, 20, 21), **lost(2, 8, 30)}
    left, rows = book.take(progress(**said))
    assert left["metrics"] == {"loss": 1.0}, "it is no metric of its own"
    assert [(row["replica"], row["step"], row["batches"], row["samples"]) for row in rows] == [
        (1, 7, [20, 21], 8),
        (2, 8, [30], 4),
    ]
    for row in rows:
        book.apply(row)
    again = LostSamples(3)
    again.restore(book.summary())
    for one in (book, again):
        assert one.take(progress(**said))[1] == []
        assert [row["batches"] for row in one.take(progress(**said, **lost(1, 9, 40)))[1]] == [[40]]


def test_what_is_no_loss_is_left_alone() -> None:
    book = LostSamples(2)
    report = progress(lost_samples=5.0, lost_batch=1.0)
    assert book.take(report) == (report, [])
    assert book.take(progress(**lost(7, 1, 1), **lost(0, 1, 2, samples=-1)))[1] == []
    assert book.take(progress(lost_batch_1_step_1_replica_0=float("nan")))[1] == []


def test_what_is_remembered_is_bounded() -> None:
    book = LostSamples(2)
    for step in range(5000):
        for row in book.take(progress(**lost(1, step, step)))[1]:
            book.apply(row)
    assert len(book.summary()) == 1000


class History:
    """One group that dies, comes back, and dies."""

    def __init__(self) -> None:
        self.book = RecoveryBook(1)

    def tell(self, event: str, generation: int, **fields: Any) -> None:
        self.book.apply(
            {"event": event, "replica": 1, "generation": generation, "mono_ns": 1, "wall_ms": 1, **fields}
        )

    def exits(self, generation: int) -> None:
        more = {"collateral": False, "oom": False, "pid": 1, "tail": []}
        self.tell("rank_exited", generation, rank=0, exit={"signal": 9}, **more)

    def ends(self, generation: int, step: int, cause: str = "progress_limit") -> None:
        self.tell("generation_ended", generation, cause=cause, limit_s=5, reason="down", step=step)

    def commits(self, generation: int, step: int) -> None:
        self.tell("first_commit", generation, step=step)

    def loses(self, step: int, *batches: int) -> None:
        self.book.apply(
            {
                "event": "samples_lost",
                "replica": 1,
                "step": step,
                "batches": list(batches),
                "samples": 4 * len(batches),
            }
        )

    def records(self) -> list[tuple[int | None, list[int]]]:
        return [(record["lost_samples"], record["lost_batches"]) for record in self.book.documents()]


def test_a_loss_belongs_to_the_failure_that_took_the_samples_whichever_is_told_first() -> None:
    history = History()
    history.exits(1)
    history.loses(30, 90)  # the others were faster than the end of the generation
    history.ends(1, step=30)
    history.commits(2, step=33)
    history.loses(50, 150, 151)  # it hangs: its end is told when all of it has ended
    history.ends(2, step=50)
    history.loses(51, 153)
    again = RecoveryBook(1)
    again.restore(history.book.summary())
    assert again.documents() == history.book.documents()
    assert history.records() == [(4, [90]), (12, [150, 151, 153])]


def test_a_group_that_left_in_order_leaves_no_loss_to_a_later_failure() -> None:
    history = History()
    history.loses(20, 60)
    history.ends(1, step=20, cause="stopped")
    history.exits(2)
    history.ends(2, step=40)
    assert history.records() == [(None, [])]
