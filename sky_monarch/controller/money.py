"""What a run has cost, what of it was wasted, and what it may cost. In time of the run, which rows of the journal tell.

A host bills from the moment at which it is being launched until somebody has said that it is gone. What it cost before
the first commit of the attempt is wasted, and all of it where none came: nothing was trained for it. A head that is a
cluster of its own was launched before there was a journal; it bills from then on, in vain until the first commit of
anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Budget", "Cost", "MoneyBook"]

_HOUR_S = 3600.0
_JITTER_S = 5.0
_LOST_HEADS = "lost heads"
"""Whose account holds what was paid under them; no host has a name like this."""


@dataclass(slots=True)
class _Clock:
    """Seconds that a run has lasted, over restarts of its controller and of the machine below it."""

    total_s: float = 0.0
    last_ns: int | None = None
    last_ms: int | None = None

    def at(self, now_ns: int, now_ms: int) -> float:
        """The time of a moment."""
        if self.last_ns is None or self.last_ms is None:
            return self.total_s
        passed_s = (now_ns - self.last_ns) / 1e9
        if passed_s < -_JITTER_S:  # the machine was started anew, and with it the one clock that nobody sets
            passed_s = (now_ms - self.last_ms) / 1e3
        return self.total_s + max(0.0, passed_s)

    def take(self, row: Mapping[str, Any]) -> None:
        """Go on to the moment of a row: our own clock, not that of the host which it came from."""
        now_ns, now_ms = row.get("received_ns", row.get("mono_ns")), row.get("wall_ms")
        if now_ns is not None and now_ms is not None:
            ahead = self.last_ns is not None and 0 < self.last_ns - now_ns <= _JITTER_S * 1e9
            if not ahead:  # rows that were made together may carry their moments in another order
                self.total_s = self.at(now_ns, now_ms)
                self.last_ns, self.last_ms = now_ns, now_ms


@dataclass(slots=True)
class _Bill:
    """One attempt at a host."""

    since_s: float
    usd_per_hour: float | None = None
    came: bool = False
    committed_s: float | None = None

    def cost(self, now_s: float) -> Cost:
        seconds = max(0.0, now_s - self.since_s)
        useless = seconds if self.committed_s is None else max(0.0, self.committed_s - self.since_s)
        if self.usd_per_hour is None:
            return Cost(unpriced=True)
        each = self.usd_per_hour / _HOUR_S
        return Cost(usd=seconds * each, wasted_usd=min(useless, seconds) * each)


@dataclass(frozen=True, slots=True)
class Cost:
    """An amount, and how much of it was in vain.

    Attributes:
        usd: What was billed and has a known price.
        wasted_usd: Of that, what went by before a commit.
        unpriced: Something was billed whose price nobody has told.
    """

    usd: float = 0.0
    wasted_usd: float = 0.0
    unpriced: bool = False

    def __add__(self, other: Cost) -> Cost:
        unpriced = self.unpriced or other.unpriced
        return Cost(self.usd + other.usd, self.wasted_usd + other.wasted_usd, unpriced)


@dataclass(slots=True)
class _Account:
    """One host."""

    settled: Cost = field(default_factory=Cost)
    bills: dict[int, _Bill] = field(default_factory=dict)
    attempt: int = 0
    usd_per_hour: float | None = None
    place: str | None = None
    choice: int | None = None
    last: dict[str, Any] | None = None

    def cost(self, now_s: float) -> Cost:
        return sum((bill.cost(now_s) for bill in self.bills.values()), self.settled)

    def settle(self, attempt: int, now_s: float) -> None:
        bill = self.bills.pop(attempt, None)
        if bill is not None:
            self.settled += bill.cost(now_s)


class MoneyBook:
    """Collects the bills of a run from the rows of its journal."""

    def __init__(self) -> None:
        self._clock = _Clock()
        self._accounts: dict[str, _Account] = {}
        self._head: str | None = None

    # --- rows ------------------------------------------------------------------------------------------------

    def apply(self, row: Mapping[str, Any]) -> None:
        """Take one row of the journal."""
        self._clock.take(row)
        match row["event"]:
            case "host_report":
                self._reported(row)
            case "agent_connected" if row.get("attempt"):
                account = self._account(row["host"])
                account.attempt = row["attempt"]
                self._open(account, row["attempt"]).came = True
            case "head_launched":
                self._head_launched(row)
            case "head_replaced":
                self._go_on_from(row["spent"], row["wall_ms"])
            case "first_commit" | "ranks_up":
                for name in (row.get("host", ""), self._head or ""):
                    self._committed(name)

    def _go_on_from(self, spent: Mapping[str, Any], now_ms: int) -> None:
        """What the run has cost, and how long it has lasted, under heads that are lost."""
        since_s = max(0.0, (now_ms - spent["at_ms"]) / 1e3)
        self._clock.total_s += spent["hours"] * _HOUR_S + since_s
        if spent["usd"]:
            settled = Cost(spent["usd"], spent["wasted_usd"])
            self._accounts[_LOST_HEADS] = _Account(settled=settled, usd_per_hour=0.0)

    def _committed(self, name: str) -> None:
        """What is paid for a host from now on is not in vain."""
        account = self._accounts.get(name)
        if account is not None and (bill := account.bills.get(account.attempt)):
            bill.committed_s = self._clock.total_s if bill.committed_s is None else bill.committed_s

    def _head_launched(self, row: Mapping[str, Any]) -> None:
        self._head = row["cluster"]
        account = self._accounts[row["cluster"]] = _Account(
            attempt=1, usd_per_hour=row["usd_per_hour"], place=row["place"]
        )
        before_s = max(0.0, (row["wall_ms"] - row["since_ms"]) / 1e3)
        bill = _Bill(self._clock.total_s - before_s, row["usd_per_hour"], came=True)
        commits = [one.committed_s for two in self._accounts.values() for one in two.bills.values()]
        bill.committed_s = min((at_s for at_s in commits if at_s is not None), default=None)
        account.bills[1] = bill

    def _account(self, host: str) -> _Account:
        return self._accounts.setdefault(host, _Account())

    def _open(self, account: _Account, attempt: int) -> _Bill:
        bill = account.bills.get(attempt)
        if bill is None:
            # While one is launched, the one before may still be taken down; none is that was before that.
            for older in sorted(number for number in account.bills if number < attempt)[:-1]:
                account.settle(older, self._clock.total_s)
            bill = account.bills[attempt] = _Bill(self._clock.total_s, account.usd_per_hour)
        return bill

    def _reported(self, row: Mapping[str, Any]) -> None:
        account, attempt, state = self._account(row["host"]), row["attempt"], row["state"]
        account.last = {name: row[name] for name in _SAID}
        if state in ("launching", "launched"):
            newest = max(account.bills, default=0)
            if attempt >= newest:
                self._moved(account, row)
                bill = self._open(account, attempt)
                bill.came = bill.came or state == "launched"
                for name in ("usd_per_hour", "place", "choice"):
                    if row[name] is not None:
                        setattr(account, name, row[name])
                bill.usd_per_hour = account.usd_per_hour
        elif state in ("ended", "down"):
            account.settle(attempt, self._clock.total_s)
        elif state == "failed" and not row.get("left") and (failed := account.bills.get(attempt)) is not None:
            # What is left behind bills on until it is down. An error may have come after the machines.
            if failed.came or row["kind"] == "error":
                account.settle(attempt, self._clock.total_s)
            else:
                del account.bills[attempt]  # there was nothing that could be billed

    def _moved(self, account: _Account, row: Mapping[str, Any]) -> None:
        """An attempt that goes on with another choice bills by that one's price from now on.

        What went before is settled by the price of the choice that failed, or was nothing where that had no machine.
        """
        bill, choice = account.bills.get(row["attempt"]), row["choice"]
        if bill is None or bill.came or row["state"] != "launching":
            return
        if None in (choice, account.choice) or choice == account.choice:
            return
        if row["kind"] in (None, "error") or row.get("left"):
            account.settle(row["attempt"], self._clock.total_s)
        else:
            del account.bills[row["attempt"]]
        account.usd_per_hour = None  # that of the other one

    def repeats(self, report: Mapping[str, Any]) -> bool:
        """Whether a checked report says what was said last of that host."""
        account = self._accounts.get(report["host"])
        return account is not None and account.last == {name: report[name] for name in _SAID}

    @property
    def head(self) -> str | None:
        """The cluster that is the head; None where it is none, or nobody has told yet."""
        return self._head

    # --- amounts ---------------------------------------------------------------------------------------------

    def cost(self, now_ns: int, now_ms: int) -> Cost:
        """What all hosts together have cost by now."""
        now_s = self._clock.at(now_ns, now_ms)
        return sum((account.cost(now_s) for account in self._accounts.values()), Cost())

    def usd_per_hour(self) -> float:
        """What is billed at this moment, as far as prices are known."""
        return sum(bill.usd_per_hour or 0.0 for _, bill in self._bills())

    def hours(self, now_ns: int, now_ms: int) -> float:
        """How long the run has lasted."""
        return self._clock.at(now_ns, now_ms) / _HOUR_S

    def _bills(self) -> Iterator[tuple[str, _Bill]]:
        for host, account in self._accounts.items():
            for bill in account.bills.values():
                yield host, bill

    def document(self, host: str, now_ns: int, now_ms: int) -> dict[str, Any]:
        """What people see of the money of one host."""
        account = self._accounts.get(host) or _Account()
        cost = account.cost(self._clock.at(now_ns, now_ms))
        return {
            "place": account.place,
            "choice": account.choice,
            "usd_per_hour": account.usd_per_hour,
            **amounts(cost, known=account.usd_per_hour is not None),
        }

    def totals(self, now_ns: int, now_ms: int) -> dict[str, Any]:
        """The same of all of them; None where no price is known at all."""
        known = any(account.usd_per_hour is not None for account in self._accounts.values())
        return amounts(self.cost(now_ns, now_ms), known=known)

    # --- summaries -------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """All that it remembers, as JSON values."""
        accounts = {}
        for host, account in self._accounts.items():
            bills = {str(attempt): asdict(bill) for attempt, bill in account.bills.items()}
            accounts[host] = {**asdict(account), "bills": bills}
        return {"clock": asdict(self._clock), "accounts": accounts, "head": self._head}

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Take up what :meth:`summary` gave; one of an older version has nothing of it."""
        self._clock = _Clock(**summary.get("clock", {}))
        self._accounts = {}
        self._head = summary.get("head")
        for host, kept in summary.get("accounts", {}).items():
            bills = {int(attempt): _Bill(**bill) for attempt, bill in kept["bills"].items()}
            self._accounts[host] = _Account(**{**kept, "bills": bills, "settled": Cost(**kept["settled"])})


_SAID = ("host", "attempt", "state", "kind", "reason", "choice", "place", "usd_per_hour")


def amounts(cost: Cost, *, known: bool) -> dict[str, float | None]:
    """An amount as people see it; None where no price is known."""
    if not known:
        return {"cost_usd": None, "wasted_usd": None}
    return {"cost_usd": round(cost.usd, 4), "wasted_usd": round(cost.wasted_usd, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a job may cost; None: no limit.

    Attributes:
        max_usd: In money, as far as prices are known.
        max_hours: In time, from the beginning of the run on.
    """

    max_usd: float | None = None
    max_hours: float | None = None

    @property
    def unlimited(self) -> bool:
        """Whether there is nothing to watch."""
        return self.max_usd is None and self.max_hours is None

    def spent(self, money: MoneyBook, now_ns: int, now_ms: int) -> str | None:
        """Why the run has to end; None where it may go on."""
        if self.max_usd is not None:
            usd = money.cost(now_ns, now_ms).usd
            if usd >= self.max_usd:
                return f"the budget is spent: {usd:.2f} of max_usd {self.max_usd:g}"
        if self.max_hours is not None and money.hours(now_ns, now_ms) >= self.max_hours:
            return f"the budget is spent: the run has lasted max_hours, {self.max_hours:g}"
        return None

    def due_s(self, money: MoneyBook, now_ns: int, now_ms: int) -> float | None:
        """Seconds until :meth:`spent`, if prices stay as they are; None where that is never."""
        due: list[float] = []
        if self.max_hours is not None:
            due.append((self.max_hours - money.hours(now_ns, now_ms)) * _HOUR_S)
        rate = money.usd_per_hour()
        if self.max_usd is not None and rate > 0.0:
            due.append((self.max_usd - money.cost(now_ns, now_ms).usd) / rate * _HOUR_S)
        return max(0.0, min(due)) if due else None
