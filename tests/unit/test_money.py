"""What a run costs and what of that was in vain, in virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sky_monarch.controller.money import Budget, MoneyBook

HOUR_NS = 3_600_000_000_000


class Ledger:
    """A money book, and a clock that a test sets."""

    def __init__(self) -> None:
        self.book = MoneyBook()
        self.hours = 0.0
        self.booted = 7 * HOUR_NS
        self.row("controller_started")

    @property
    def now(self) -> tuple[int, int]:
        """Monotonic nanoseconds, Unix milliseconds."""
        return self.booted + round(self.hours * HOUR_NS), 10**12 + round(self.hours * 3_600_000)

    def row(self, event: str, **fields: Any) -> None:
        mono_ns, wall_ms = self.now
        self.book.apply({"event": event, "mono_ns": mono_ns, "wall_ms": wall_ms, **fields})

    def report(self, host: str, attempt: int, state: str, price: float | None = None, **more: Any) -> None:
        fields = {"kind": None, "reason": None, "choice": 0, "place": "here", "usd_per_hour": price, **more}
        self.row("host_report", host=host, attempt=attempt, state=state, **fields)

    def connects(self, host: str, attempt: int) -> None:
        self.row("agent_connected", host=host, attempt=attempt, groups=[])

    def commits(self, host: str) -> None:
        self.row("first_commit", host=host, replica=0, generation=1, step=1)

    def after(self, hours: float) -> Ledger:
        self.hours += hours
        return self

    def restarted(self) -> Ledger:
        """Another controller, which has the journal's summary."""
        kept = json.loads(json.dumps(self.book.summary()))
        self.book = MoneyBook()
        self.book.restore(kept)
        return self

    def cost(self, host: str | None = None) -> tuple[float | None, float | None]:
        found = self.book.totals(*self.now) if host is None else self.book.document(host, *self.now)
        return found["cost_usd"], found["wasted_usd"]


def test_a_host_bills_from_its_launch_until_somebody_has_said_that_it_is_gone() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 10.0)
    ledger.after(0.5).report("a", 1, "launched", 16.0)
    ledger.connects("a", 1)
    ledger.after(0.5).commits("a")
    assert ledger.after(1.0).cost() == (32.0, 16.0), "by the price that it really has, from the launch on"
    ledger.report("a", 1, "down")
    assert ledger.after(5.0).cost() == (32.0, 16.0)


def test_an_attempt_without_a_commit_is_wasted_as_a_whole_and_so_is_a_replacement_until_its_first_one() -> (
    None
):
    ledger = Ledger()
    for attempt in (1, 2):
        ledger.report("a", attempt, "launching", 8.0)
        ledger.report("a", attempt, "launched", 8.0)
        ledger.connects("a", attempt)
        ledger.after(1.0).report("a", attempt, "ended")
    assert ledger.cost("a") == (16.0, 16.0)
    ledger.report("a", 3, "launching", 8.0)
    ledger.connects("a", 3)
    ledger.after(1.0).commits("a")
    ledger.after(1.0).report("a", 3, "ended")
    ledger.report("a", 4, "launching", 8.0)
    assert ledger.after(0.5).cost("a") == (36.0, 28.0)


def test_what_never_came_costs_nothing() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 8.0)
    ledger.after(2.0).report("a", 1, "failed")
    assert ledger.after(2.0).cost() == (0.0, 0.0)


@pytest.mark.parametrize(("kind", "usd"), [("error", 16.0), ("capacity", 0.0), ("refused", 0.0)])
def test_a_launch_that_an_error_ended_may_have_billed_and_one_that_had_no_machine_has_not(
    kind: str, usd: float
) -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 8.0)
    ledger.after(2.0).report("a", 1, "failed", kind=kind, left=False)
    assert ledger.after(2.0).cost() == (usd, usd)


@pytest.mark.parametrize(
    ("kind", "left", "usd"),
    [("capacity", False, 0.0), ("refused", False, 0.0), ("error", False, 8.0), ("capacity", True, 8.0)],
)
def test_an_attempt_that_goes_on_in_another_place_bills_each_place_by_its_own_price(
    kind: str, left: bool, usd: float
) -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 8.0, choice=0)
    ledger.after(1.0).report("a", 1, "launching", 48.0, choice=1, kind=kind, left=left)
    assert ledger.restarted().after(0.5).cost() == (usd + 24.0, usd + 24.0)
    ledger.report("a", 1, "launched", 48.0, choice=1)
    ledger.connects("a", 1)
    ledger.commits("a")
    ledger.after(0.5).report("a", 1, "down", choice=1)
    assert ledger.after(1.0).cost() == (usd + 48.0, usd + 24.0)


def test_a_place_without_a_known_price_does_not_bill_by_that_of_the_one_before() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 8.0, choice=0)
    ledger.after(1.0).report("a", 1, "launching", None, choice=1, kind="capacity", left=False)
    assert ledger.after(1.0).book.cost(*ledger.now).unpriced


@pytest.mark.parametrize("kind", ["error", "capacity", "refused", "credentials"])
@pytest.mark.parametrize("again", [False, True])
def test_what_a_failed_launch_leaves_behind_bills_until_it_is_down(kind: str, again: bool) -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 8.0)
    ledger.after(1.0).report("a", 1, "failed", kind=kind, left=True)
    assert ledger.after(1.0).restarted().cost() == (16.0, 16.0)
    assert Budget(max_usd=20.0).due_s(ledger.book, *ledger.now) == pytest.approx(1800)
    if again:
        ledger.report("a", 2, "launching", 8.0)
        assert ledger.after(1.0).cost() == (32.0, 32.0)
        ledger.report("a", 2, "failed", kind="capacity", left=False)
        assert ledger.cost() == (24.0, 24.0)
    ledger.report("a", 1, "down")
    usd = 24.0 if again else 16.0
    assert ledger.after(5.0).cost() == (usd, usd)


def test_a_launch_that_failed_after_its_host_was_there_is_paid_for() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 8.0)
    ledger.report("a", 1, "launched", 8.0)
    ledger.after(2.0).report("a", 1, "failed")
    assert ledger.after(2.0).cost() == (16.0, 16.0)


def test_a_cluster_that_is_replaced_bills_beside_the_next_one_until_its_end_is_told() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 8.0)
    ledger.report("a", 1, "launched", 8.0)
    ledger.after(1.0).report("a", 2, "launching", 8.0)
    assert ledger.after(1.0).cost() == (24.0, 24.0), "it is taken down beside the launch"
    ledger.report("a", 1, "down", 8.0)
    assert ledger.after(1.0).cost() == (32.0, 32.0)
    ledger.report("a", 3, "launching", 8.0)
    ledger.report("a", 4, "launching", 8.0)
    assert ledger.after(1.0).cost() == (48.0, 48.0), "of those before the one before nothing is left"


def test_hosts_are_added_up_and_those_without_a_price_left_out() -> None:
    ledger = Ledger()
    for host, price in (("a", 2.0), ("b", 4.0), ("c", None)):
        ledger.report(host, 1, "launching", price)
        ledger.report(host, 1, "launched", price)
    ledger.after(1.0)
    assert ledger.cost() == (6.0, 6.0)
    assert ledger.cost("c") == (None, None)
    assert ledger.book.usd_per_hour() == 6.0
    assert ledger.book.cost(*ledger.now).unpriced


def test_a_run_without_hosts_has_no_cost() -> None:
    ledger = Ledger()
    ledger.row("agent_connected", host="local", groups=[])
    ledger.commits("local")
    assert ledger.after(1.0).cost() == (None, None)


def test_the_time_in_which_no_controller_ran_is_paid_for_also_over_a_restart_of_the_machine() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 1.0)
    ledger.report("a", 1, "launched", 1.0)
    ledger.after(2.0).restarted().row("controller_started")
    assert ledger.cost() == (2.0, 2.0)
    ledger.booted = -ledger.after(3.0).now[0] + ledger.booted  # its clock begins anew
    ledger.restarted().row("controller_started")
    assert ledger.cost() == (5.0, 5.0)
    assert ledger.after(1.0).cost() == (6.0, 6.0)


def test_rows_that_were_made_together_count_no_time_twice() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launched", 3600.0)
    mono_ns, wall_ms = ledger.now
    for _ in range(1000):
        for ahead_ns in (2_000_000, 0):
            ledger.book.apply({"event": "notice", "mono_ns": mono_ns + ahead_ns, "wall_ms": wall_ms})
    assert ledger.book.cost(mono_ns, wall_ms).usd == pytest.approx(0.002)


def test_the_clock_of_a_host_is_nobodys_business() -> None:
    ledger = Ledger()
    mono_ns, wall_ms = ledger.now
    elsewhere = {"event": "notice", "mono_ns": 5, "received_ns": mono_ns + HOUR_NS, "wall_ms": wall_ms}
    ledger.report("a", 1, "launched", 1.0)
    ledger.book.apply(elsewhere)
    assert ledger.after(1.0).cost() == (1.0, 1.0)


@pytest.mark.parametrize("restart", [False, True])
def test_a_budget_is_due_when_it_says_and_not_before(restart: bool) -> None:
    ledger, budget = Ledger(), Budget(max_usd=50.0, max_hours=10.0)
    for host in ("a", "b"):
        ledger.report(host, 1, "launching", 5.0)
        ledger.report(host, 1, "launched", 5.0)
    if restart:
        ledger.restarted()
    assert budget.due_s(ledger.book, *ledger.now) == pytest.approx(5 * 3600)
    assert budget.spent(ledger.book, *ledger.after(4.99).now) is None
    reason = budget.spent(ledger.book, *ledger.after(0.02).now)
    assert reason == "the budget is spent: 50.10 of max_usd 50"


def test_a_budget_in_hours_runs_from_the_beginning_of_the_run_hosts_or_not() -> None:
    ledger, budget = Ledger(), Budget(max_hours=2.5)
    assert budget.due_s(ledger.book, *ledger.now) == pytest.approx(2.5 * 3600)
    ledger.after(1.0).row("notice")
    assert budget.due_s(ledger.book, *ledger.now) == pytest.approx(1.5 * 3600)
    assert budget.spent(ledger.book, *ledger.now) is None
    reason = budget.spent(ledger.book, *ledger.after(1.5).now)
    assert reason == "the budget is spent: the run has lasted max_hours, 2.5"


def test_a_budget_in_money_is_never_due_while_nothing_bills() -> None:
    ledger = Ledger()
    assert Budget(max_usd=5.0).due_s(ledger.book, *ledger.now) is None
    assert Budget().unlimited


@pytest.mark.parametrize("restart", [False, True])
def test_a_head_bills_since_its_launch_which_was_before_the_journal_and_in_vain_until_somebody_commits(
    restart: bool,
) -> None:
    ledger = Ledger()
    ledger.after(0.5)
    since_ms = ledger.now[1] - 3_600_000
    ledger.row("head_launched", cluster="head", since_ms=since_ms, place="oci", usd_per_hour=2.0)
    if restart:
        ledger.restarted()
    assert ledger.book.head == "head"
    assert ledger.after(1.0).cost("head") == (4.0, 4.0)
    ledger.report("a", 1, "launching", 1.0)
    ledger.report("a", 1, "launched", 1.0)
    ledger.connects("a", 1)
    ledger.commits("a")
    assert ledger.after(1.0).cost() == (7.0, 4.0), "the head's and the host's"
    assert ledger.book.usd_per_hour() == 3.0
    reason = Budget(max_usd=7.0).spent(ledger.book, *ledger.now)
    assert reason == "the budget is spent: 7.00 of max_usd 7"


def test_a_head_that_is_told_of_late_has_been_of_use_since_the_first_commit() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launched", 1.0)
    ledger.connects("a", 1)
    ledger.after(1.0).commits("a")
    since_ms = ledger.now[1] - 2 * 3_600_000
    ledger.after(1.0).row("head_launched", cluster="head", since_ms=since_ms, place=None, usd_per_hour=1.0)
    assert ledger.cost("head") == (3.0, 2.0)


def test_what_was_said_last_of_a_host_is_known_to_be_said_again() -> None:
    ledger = Ledger()
    ledger.report("a", 1, "launching", 8.0)
    said = {"kind": None, "reason": None, "choice": 0, "place": "here", "usd_per_hour": 8.0}
    again = {"event": "host_report", "host": "a", "attempt": 1, "state": "launching", **said}
    assert ledger.restarted().book.repeats(again)
    assert not ledger.book.repeats({**again, "state": "launched"})
    assert not ledger.book.repeats({**again, "host": "b"})
